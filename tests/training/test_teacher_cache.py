"""Outputs of frozen networks: computed once, found again, and refused where they are not what the network says."""

import itertools
import json
import math
import pickle
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import filelock
import numpy as np
import packed_rows
import pytest
import torch
from fake_runtime import RUNTIME
from runs import TOY, all_same, run, spawn, stop_after
from torch import nn

from trainkit.data.rows import reader
from trainkit.errors import UserError
from trainkit.interfaces import Networks
from trainkit.training import teacher_cache
from trainkit.training.teacher_cache import StoredOutputs

SIDE, WIDE = 4, 6


class Teacher(nn.Module):
    """Counts the images that it is shown."""

    def __init__(self, seed=0, turned=1.0):
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(SIDE * SIDE, WIDE)
        self.turned, self.seen = turned, 0

    def forward(self, x):
        self.seen += len(x)
        return torch.tanh(self.head(x.flatten(1))) * self.turned


class Split:
    """Images of noise, mirrored by the parity of sample and epoch."""

    name, protocol, at_once = "train", None, None

    def __init__(self, size=50, views=2, shade=2.0, digest="d", drift=0.0):
        self.size, self.views, self.digest, self.shade, self.drift = size, views, digest, shade, drift
        self.pictures = np.random.default_rng(size).integers(0, 256, (size, SIDE, SIDE)).astype(np.uint8)

    def order(self, epoch, batch_size):
        return np.arange(self.size // batch_size * batch_size).reshape(-1, batch_size)

    def fetch(self, indices, epoch, view=None):
        indices = np.array(indices)
        views = (indices + epoch) % self.views if view is None else np.full(len(indices), view)
        images = self.pictures[indices].copy()
        images[views == 1] = images[views == 1][:, :, ::-1]
        images = images + np.uint8(self.drift * epoch)
        return {name: torch.from_numpy(x) for name, x in (("image", images), ("index", indices), ("view", views))}

    def on_device(self, batch):
        return {**batch, "image": batch["image"].float() / 255 * self.shade - 1}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(teacher_cache, "BATCH", 4)
    monkeypatch.setattr(teacher_cache, "BLOCK", 8)


class Home:
    """A store, what a run said, and how many images the network was shown."""

    def __init__(self, path):
        self.path, self.said = path / "outputs", []

    def open(self, teacher=None, split=None, stopping=lambda: False, stored=True, runtime=RUNTIME):
        self.teacher = Teacher() if teacher is None else teacher
        self.split = Split() if split is None else split
        self.teacher.eval().requires_grad_(False)
        self.teacher.seen, self.said = 0, []
        logger = SimpleNamespace(say=self.said.append)
        networks = Networks(nn.Identity(), cached={"teacher": self.teacher}, cache_on_disk=stored)
        return teacher_cache.outputs(networks, self.split, runtime, logger, self.path, stopping)

    @property
    def made(self):
        return sorted(p for p in self.path.iterdir() if not p.name.startswith("."))


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


PROBED = 1
"""Images that tell the shape of a table."""
COMPUTED = PROBED + teacher_cache.CHECKED
"""Images beside those of a table that is computed."""


def expected(home) -> np.ndarray:
    """(samples, views, WIDE) float64, image by image, by the formula."""
    w, b = home.teacher.head.weight.double().numpy(), home.teacher.head.bias.double().numpy()
    out = np.empty((home.split.size, home.split.views, WIDE))
    for i, picture in enumerate(home.split.pictures):
        for view in range(home.split.views):
            seen = (picture[:, ::-1] if view else picture) / 255.0 * home.split.shade - 1
            out[i, view] = np.tanh(w @ seen.reshape(-1) + b) * home.teacher.turned
    return out


def carried(split, rows, epoch=1) -> tuple[np.ndarray, np.ndarray]:
    """What batches carry, and the views they are in."""
    batch = split.on_device(split.fetch(np.asarray(rows), epoch))
    assert batch["teacher"].dtype == torch.float32
    return batch["teacher"].numpy(), batch["view"].numpy()


def test_what_a_table_takes_is_forecast_from_a_few_batches(home, tmp_path, monkeypatch):
    runtime = SimpleNamespace(**vars(RUNTIME), synchronize=lambda: None)
    teacher, split = Teacher().eval().requires_grad_(False), Split()

    def found(stored=True, **changes) -> list[tuple]:
        networks = Networks(nn.Identity(), cached={"teacher": teacher}, cache_on_disk=stored)
        ticks = itertools.count()
        with monkeypatch.context() as patch:  # a second a batch
            patch.setattr(teacher_cache.time, "perf_counter", lambda: float(next(ticks)))
            told = teacher_cache.forecast(networks, Split(**changes), runtime, home.path)
        return [(one.name, one.samples, one.views, one.seconds, one.bytes) for one in told]

    # 50 samples in batches of 4 make 13, in each of two views; half precision.
    assert found() == [("teacher", 50, 2, 26.0, 50 * 2 * WIDE * 2)]
    assert found(stored=False) == [("teacher", 50, 2, 26.0, 0)]
    with monkeypatch.context() as patch:
        patch.setattr(teacher_cache, "IN_MEMORY", 50 * 2 * WIDE * 4 - 1)
        assert found(stored=False) == found()
    assert found(views=0) == []
    teacher.seen = 0
    found()
    assert teacher.seen <= 3 * 4 + 2 * 4 + PROBED and not home.path.exists(), "few images, and nothing written"
    home.open(teacher, split)
    assert found() == [("teacher", 50, 2, 0.0, 0)], "it is there"


@pytest.mark.parametrize("stored", [True, False])
def test_batches_carry_what_the_network_says_of_each_sample_in_its_view(home, stored):
    outputs = home.open(stored=stored)
    assert home.teacher.seen >= 2 * 50
    rows = np.arange(50)[::-3]
    for epoch in (0, 1):
        found, view = carried(outputs, rows, epoch)
        assert set(view) == {0, 1}
        truth = expected(home)[rows, view]
        np.testing.assert_allclose(found, truth, rtol=2**-11 if stored else 1e-6, atol=1e-6)
        assert stored == np.array_equal(found, found.astype(np.float16))
    assert outputs.size == 50 and outputs.order(0, 8).shape == (6, 8)


def test_a_second_run_finds_what_the_first_computed(home):
    home.open()
    assert home.teacher.seen >= 100
    first = (home.made[0] / "rows.arrow").read_bytes()
    home.open()
    assert home.teacher.seen == COMPUTED and "are from" in home.said[0]
    assert [(path / "rows.arrow").read_bytes() for path in home.made] == [first]
    table = StoredOutputs(home.made[0])
    rows = table.rows(torch.arange(50), torch.ones(50, dtype=torch.int64))
    assert (len(table), rows.dtype, rows.shape) == (50, torch.float16, (50, WIDE)) and table.changed() == []


@pytest.mark.parametrize("batches", [0, 1, 5, 9])
@pytest.mark.parametrize("torn", [b"", b"torn"])
def test_an_interrupted_computation_goes_on_where_it_was(home, tmp_path, batches, torn):
    whole = Home(tmp_path / "whole")
    whole.open()
    asked = iter(range(100))
    assert home.open(stopping=lambda: next(asked) >= batches) is None
    assert not home.made
    partial = [p for p in home.path.iterdir() if p.is_dir()]
    assert len(partial) == (batches >= 2)
    for folder in partial:
        with (folder / "rows.arrow").open("ab") as file:
            file.write(torn)
    assert home.open() is not None
    assert home.teacher.seen == 2 * (52 - batches // 2 * 8) + COMPUTED
    assert (home.made[0] / "rows.arrow").read_bytes() == (whole.made[0] / "rows.arrow").read_bytes()
    assert [p.name for p in home.made] == [p.name for p in whole.made]
    assert sorted(p.name for p in home.made[0].iterdir()) == ["manifest.json", "rows.arrow"]


def test_what_was_damaged_while_interrupted_is_computed_again(home):
    asked = iter(range(100))
    home.open(stopping=lambda: next(asked) >= 9)
    (partial,) = (p for p in home.path.iterdir() if p.is_dir())
    first = json.loads((partial / "progress.jsonl").read_text().splitlines()[0])["end"]
    packed_rows.flip(partial, first + 300)  # in the second of four blocks
    home.open()
    assert home.teacher.seen == 2 * (52 - 8) + COMPUTED


def test_a_run_that_dies_before_a_table_has_its_name_leaves_a_whole_one(home, monkeypatch):
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (_ for _ in ()).throw(OSError(5, "pulled out")))
    with pytest.raises(UserError, match="pulled out"):
        home.open()
    monkeypatch.setattr(Path, "rename", rename)
    home.open()
    assert home.teacher.seen == COMPUTED and len(home.made) == 1


def test_a_second_run_waits_for_the_first(home, monkeypatch):
    monkeypatch.setattr(teacher_cache, "_WAIT", 0.01)
    whole = Home(home.path.parent)
    whole.open()
    key = home.made[0].name
    home.made[0].rename(home.path / "elsewhere")
    other, asked = filelock.FileLock(home.path / f".{key}.lock"), []

    def stopping():
        asked.append(None)
        if len(asked) == 3:  # the other has done it
            (home.path / "elsewhere").rename(home.path / key)
            other.release()
        return False

    other.acquire()
    assert home.open(stopping=lambda: True) is None and "waiting" in home.said[0]
    assert home.open(stopping=stopping) is not None
    assert home.teacher.seen == COMPUTED and len(home.said) == 1


def _of_another(folder):
    manifest = json.loads((folder / "manifest.json").read_text()) | {"weights": "of another"}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": StoredOutputs.digest_of(manifest)}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: packed_rows.flip(folder, -70), "stored outputs cannot be used: is not what was written"),
        (lambda folder: packed_rows.flip(folder, 20, file="manifest.json"), "stored outputs cannot be used"),
        (_of_another, "stored outputs are of another teacher, data or setting"),
        (lambda folder: (folder / "manifest.json").unlink(), "stored outputs cannot be used: no manifest.json"),
        (lambda folder: (folder / "rows.arrow").unlink(), "stored outputs cannot be used: is missing"),
        (shutil.rmtree, "none are stored"),
    ],
)
def test_a_damaged_table_is_computed_again(home, damage, said):
    home.open()
    good = (home.made[0] / "rows.arrow").read_bytes()
    damage(home.made[0])
    home.open()
    assert home.teacher.seen >= 100 and said in home.said[0]
    assert (home.made[0] / "rows.arrow").read_bytes() == good
    home.open()
    assert home.teacher.seen == COMPUTED


def test_damage_in_a_table_too_large_to_be_hashed_when_it_is_opened_is_found_too(home, monkeypatch):
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)
    home.open()
    packed_rows.damage(StoredOutputs(home.made[0]), "output", 7, 3)
    home.open()
    assert home.teacher.seen >= 100 and "the stored outputs are damaged" in home.said[0]


def test_a_table_that_is_whole_and_of_another_network_is_computed_again(home):
    """Weights and structure are the same, what is done in forward is not: seen by computing a few again."""
    home.open(Teacher(turned=-1.0))
    outputs = home.open(Teacher(turned=1.0))
    assert len(home.made) == 1 and "is off by 2 " in home.said[0]
    found, view = carried(outputs, np.arange(50))
    np.testing.assert_allclose(found, expected(home)[np.arange(50), view], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("teacher", "split", "runtime"),
    [
        (Teacher(seed=1), Split(), {}),
        (nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, WIDE)), Split(), {}),
        (Teacher(), Split(digest="e"), {}),
        (Teacher(), Split(views=1), {}),
        (Teacher(), Split(shade=2.1), {}),
        (Teacher(), Split(), {"precision": "bf16"}),
    ],
)
def test_outputs_of_something_else_are_another_table(home, teacher, split, runtime):
    home.open()
    teacher.head = getattr(teacher, "head", None)
    home.open(teacher, split, runtime=SimpleNamespace(**{**vars(RUNTIME), **runtime}))
    assert len(home.made) == 2


def test_an_augmentation_that_changes_more_than_it_counts_ends_the_training(home):
    wrong = r"the output of teacher for sample \d+ in view [01] is off by .*0.002 at most"
    for _ in range(2):  # where there is none yet, and where one was stored
        with pytest.raises(UserError, match=wrong):
            home.open(split=Split(drift=3.0))


def test_what_one_process_finds_wrong_ends_all(home):
    teachers = [Teacher(), Teacher()]
    for given, wrong in ((Split(size=20, drift=3.0), "is off by"), (Split(size=21), "half precision")):
        errors = Ranks(2).run(lambda m, s=given: Home(home.path.parent).open(teachers[m.rank], s, runtime=m))
        assert len({str(error) for error in errors}) == 1 and wrong in str(errors[0])
        teachers[1].turned = math.inf


def test_without_countable_views_nothing_is_computed(home):
    with pytest.raises(UserError, match=r"teacher cannot be computed once.*no countable views: mirror only"):
        home.open(split=Split(views=0))


@pytest.mark.parametrize("turned", [1e5, 1e-7, math.nan])
def test_outputs_that_half_precision_does_not_hold_are_refused(home, turned):
    with pytest.raises(UserError, match=r"output for sample 0 in view [01] does not fit in half precision"):
        home.open(Teacher(turned=turned))
    assert not home.made
    home.open(Teacher(turned=0.0))


def test_a_full_disk_is_named_before_anything_is_computed(home, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(UserError, match=r"0.0 MB free; expected 0.0 MB; make room"):
        home.open()
    assert home.teacher.seen == PROBED


def test_large_tables_go_to_disk_by_themselves(home, monkeypatch):
    home.open(stored=False)
    assert not home.path.exists()
    monkeypatch.setattr(teacher_cache, "IN_MEMORY", 4 * 100 * WIDE)
    home.open(stored=False)
    assert not home.path.exists()
    monkeypatch.setattr(teacher_cache, "IN_MEMORY", 4 * 100 * WIDE - 1)
    home.open(stored=False)
    assert len(home.made) == 1


def test_where_only_speeds_are_measured_one_output_stands_for_many(home, monkeypatch):
    home.path = None
    assert home.open().on_device(home.split.fetch(np.arange(2), 0))["teacher"].unique().numel() > WIDE
    monkeypatch.setattr(teacher_cache, "IN_MEMORY", 4 * 100 * WIDE - 1)
    outputs = home.open()
    found, _ = carried(outputs, np.arange(50))
    np.testing.assert_allclose(found, expected(home)[:1, 0].repeat(50, 0), rtol=1e-5)
    assert home.teacher.seen == PROBED and "stands for all 50 samples" in home.said[0]


def test_a_split_with_outputs_goes_to_spawned_workers(home):
    outputs = home.open()
    sent = pickle.dumps(outputs)
    assert len(sent) < 4000  # the images are in it, the table is not
    rows = np.arange(10)
    assert torch.equal(pickle.loads(sent).fetch(rows, 0)["teacher"], outputs.fetch(rows, 0)["teacher"])


class Ranks:
    """Machines of several processes, played by threads."""

    def __init__(self, world):
        self.world, self.turn, self.box = world, threading.Barrier(world, timeout=60), [None] * world

    def each(self, rank, thing):
        self.box[rank] = thing
        self.turn.wait()
        found = list(self.box)
        self.turn.wait()
        return found

    def runtime(self, rank):
        def lead(act):
            done = failure = None
            if rank == 0:
                try:
                    done = act()
                except UserError as error:
                    failure = error
            done, failure = self.each(rank, (done, failure))[0]
            if failure:
                raise failure
            return done

        own = {
            "world": self.world,
            "rank": rank,
            "main": rank == 0,
            "all_gather": lambda thing: self.each(rank, thing),
            "gather": lambda x: torch.cat(self.each(rank, x)),
            "on_main": lead,
            "any_async": lambda flag: lambda: any(self.each(rank, flag)),
        }
        return SimpleNamespace(**{**vars(RUNTIME), **own})

    def run(self, act):
        """`act(runtime)` on each; what each returned or raised."""
        out = [None] * self.world

        def one(rank):
            try:
                out[rank] = act(self.runtime(rank))
            except UserError as error:
                out[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out


@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_make_the_table_that_one_makes(home, tmp_path, world):
    home.open()
    homes = [Home(tmp_path / "several") for _ in range(world)]
    teachers = [Teacher() for _ in range(world)]  # not by the threads: they share the generator of weights
    stops = [iter([False, False, True] + 100 * [False]) for _ in range(world)]
    found = Ranks(world).run(
        lambda m: homes[m.rank].open(teachers[m.rank], runtime=m, stopping=lambda: next(stops[m.rank]))
    )
    assert found == [None] * world
    found = Ranks(world).run(lambda m: homes[m.rank].open(teachers[m.rank], runtime=m))
    assert (homes[0].made[0] / "rows.arrow").read_bytes() == (home.made[0] / "rows.arrow").read_bytes()
    assert homes[0].made[0].name == home.made[0].name
    for outputs in found:
        np.testing.assert_array_equal(*(carried(o, np.arange(50))[0] for o in (outputs, found[0])))


def test_a_run_told_to_stop_meanwhile_goes_on_with_what_there_is(store, monkeypatch):
    """Its task compares each batch with a fresh forward."""
    monkeypatch.setattr(teacher_cache, "BLOCK", 16)
    words = ("task.teacher=oracle", "task.stored=true", "data.noise=0.3", "train.length=2 epochs")
    killed = run(*words, stopping=stop_after(8))
    assert killed.code == 143 and killed.folder.info().status == "KILLED" and not killed.steps
    (partial,) = (p for p in (store / "outputs").iterdir() if p.is_dir())
    assert partial.name.startswith(".") and (partial / "rows.arrow").stat().st_size > 128
    again = run(*words, resume="")
    assert again.code == 0 and again.folder == killed.folder
    (whole,) = (p for p in (store / "outputs").iterdir() if p.is_dir())
    assert partial.name.startswith(f".{whole.name}.") and StoredOutputs(whole).manifest["shape"] == [128, 4]


@pytest.mark.slow
def test_a_resumed_run_with_stored_outputs_has_the_bits_of_an_uninterrupted_one(store):
    words = ("task.teacher=oracle", "task.stored=true", "data.noise=0.3")
    whole = run(*words)
    run(*words, stopping=stop_after(8))
    assert all_same(run(*words, resume=""), whole)
    workers = run(*words, "loader.workers=1", "loader.start=spawn")
    assert all_same(workers, whole)


@pytest.mark.slow
def test_two_processes_compute_a_table_together_and_learn_from_it(store, monkeypatch):
    monkeypatch.setattr(teacher_cache, "BLOCK", 2048)  # as the processes have it
    words = [str(TOY), "--plugin", "toy", "task.teacher=oracle", "task.stored=true", "data.noise=0.3"]
    done = spawn(2, *words)
    assert done.returncode == 0, done.stderr
    (table,) = (store / "outputs").glob("[!.]*/rows.arrow")
    made = table.read_bytes()
    alone = run("task.teacher=oracle", "task.stored=true", "data.noise=0.3")
    assert alone.code == 0 and table.read_bytes() == made and len(list((store / "outputs").glob("[!.]*"))) == 1

"""Checkpoints written beside the training: it goes on, and they hold what was there when it asked for them."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import PLUGIN, ROOT, TOY, Ran, newest, run, until_a_row
from torch import nn

from tests.training.test_trainer import same
from trainkit.checkpoint import state_dict, storage
from trainkit.checkpoint.state_dict import Copies
from trainkit.checkpoint.verification import CheckpointError
from trainkit.config.run_request import RunRequest, load
from trainkit.data.loader import stream
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.tracker import Silent
from trainkit.training.checkpointer import Checkpointer, CheckpointWriter, Resume
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState
from trainkit.training.trainer import Trainer

QUIET = ("evaluations={}", "best=null", "log.every=100 steps", "train.length=12 steps")


class Folder(RunFolder):
    """A folder without a record of its run."""

    def update(self, **changes):
        pass


def trained(folder: Path, *words: str, at: Path | None = None, tracker: Silent | None = None) -> RunLogger:
    """The toy recipe, trained without a store: its logger."""
    if str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    folder.mkdir(exist_ok=True)
    given = {word.partition("=")[0]: word for word in (*QUIET, *words)}
    recipe = load(RunRequest(TOY, list(given.values()), ("toy",)))
    logger = RunLogger(recipe, Folder(folder), tracker or Silent(), main=True)
    data = recipe.data.open(recipe.seed)
    with Trainer(recipe, data, Runtime(recipe), logger, resume=Resume(at)) as trainer:
        trainer.fit()
    return logger


def steps(logger: RunLogger) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in logger.folder.checkpoints.glob("step-*"))


@pytest.fixture
def late(monkeypatch):
    """Copies that are made 30 ms after they were promised: many updates of the toy network later."""

    def make(self, plain=Copies.make):
        time.sleep(0.03)
        return plain(self)

    monkeypatch.setattr(Copies, "make", make)


@pytest.fixture
def frozen(monkeypatch):
    """By step, what a checkpoint must hold, copied while the training stands still."""
    kept: dict[int, dict[str, dict[str, torch.Tensor]]] = {}

    def freeze(self, keep, plain=TrainState.freeze):
        copies, scalars = plain(self, keep)
        kept[self.step] = {
            file: {name: tensor.clone() for name, tensor in members.items()} for file, members in copies.files.items()
        }
        return copies, scalars

    monkeypatch.setattr(TrainState, "freeze", freeze)
    return kept


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(tmp_path, frozen, late):
    ran = trained(tmp_path, "checkpoints={every: 1 steps, keep_last: 50}", "optim={name: adamw, lr: 0.01}")
    assert steps(ran) == list(range(1, 13)) == sorted(frozen)
    for step, kept in frozen.items():
        held = storage.read(tmp_path / "checkpoints" / f"step-{step:09d}").tensors
        assert held.keys() == kept.keys() == {"model", "optimizer", "memory", "ema"}
        assert all(same(held[group], kept[group]) for group in kept)
    for group in ("model", "optimizer", "ema", "memory"):
        assert not same(frozen[4][group], frozen[5][group]), "a copy made too late would not be noticed"


def test_without_the_wait_the_update_is_noticed(tmp_path, monkeypatch):
    updated = threading.Event()

    def make(self, plain=Copies.make):
        assert updated.wait(30)
        return plain(self)

    monkeypatch.setattr(Copies, "make", make)
    monkeypatch.setattr(RunLogger, "progress", lambda self, step, steps: step > 4 and updated.set())
    monkeypatch.setattr(Checkpointer, "wait_for_copies", lambda self, then: None)
    with pytest.raises(UserError, match=r"changed while it was copied for a checkpoint"):
        trained(tmp_path, "checkpoints={every: 4 steps, keep_last: 50}")
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_the_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    reached = [0]
    seen: list[tuple[int, int]] = []

    def progress(self, step, steps):
        reached[0] = step

    def write(folder, step, *rest, plain=storage.write):
        deadline = time.monotonic() + 30
        while reached[0] < step + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append((step, reached[0]))
        return plain(folder, step, *rest)

    monkeypatch.setattr(RunLogger, "progress", progress)
    monkeypatch.setattr(storage, "write", write)
    trained(tmp_path, "checkpoints={every: 4 steps, keep_last: 50, at_end: false}", "train.length=11 steps")
    assert [step for step, _ in seen] == [4, 8] and all(later >= step + 2 for step, later in seen)


def test_one_is_written_at_a_time_and_in_order(tmp_path, monkeypatch):
    said: list[tuple[str, int]] = []

    def write(folder, step, *rest, plain=storage.write):
        said.append(("begins", step))
        time.sleep(0.02)
        path = plain(folder, step, *rest)
        said.append(("ends", step))
        return path

    monkeypatch.setattr(storage, "write", write)
    ran = trained(tmp_path, "checkpoints={every: 2 steps, keep_last: 2}")
    assert said == [(word, step) for step in range(2, 13, 2) for word in ("begins", "ends")]
    assert steps(ran) == [10, 12], "the end of the training waits for the last of them, and for pruning"


class Telling(Silent):
    """A tracker that keeps events and tags."""

    def __init__(self):
        self.events, self.set = [], {}

    def event(self, step, name, data=None):
        self.events.append((step, name, data))

    def tags(self, values):
        self.set |= values


def refusing(monkeypatch, *bad: int, error: Callable[[Path], BaseException] | None = None) -> None:
    """No checkpoint of these steps can be written."""

    def write(folder, step, *rest, plain=storage.write):
        if step in bad:
            raise error(folder) if error else CheckpointError(str(folder), "1.0 MB free", remedy="free some space")
        return plain(folder, step, *rest)

    monkeypatch.setattr(storage, "write", write)


def test_a_checkpoint_that_cannot_be_written_is_said_noted_and_tried_again_at_the_next(tmp_path, monkeypatch, capsys):
    quiet = trained(tmp_path / "quiet", "checkpoints={every: 4 steps, keep_last: 50}", "train.length=16 steps")
    refusing(monkeypatch, 8)
    telling = Telling()
    words = ("checkpoints={every: 4 steps, keep_last: 50}", "train.length=16 steps")
    ran = trained(tmp_path / "full", *words, tracker=telling)
    assert steps(ran) == [4, 12, 16] and steps(quiet) == [4, 8, 12, 16]
    failed, again = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step 8:", "step 12:"))]
    assert failed.endswith("1.0 MB free; free some space; training continues and tries again at the next checkpoint")
    assert again == "step 12: checkpoints can be written again"
    assert [(step, name) for step, name, _ in telling.events if name == "checkpoint_failed"] == [
        (8, "checkpoint_failed")
    ]
    tag = telling.set["trainkit.checkpoint_failed"]
    assert tag.startswith("step 8: ") and tag.endswith("; written again at step 12")
    one, other = (
        storage.read(folder / "checkpoints" / "step-000000016").tensors
        for folder in (tmp_path / "quiet", tmp_path / "full")
    )
    assert all(same(one[group], other[group]) for group in one), "a disk that refuses changes no bit"


def test_a_checkpoint_refused_at_the_last_step_is_tried_again_at_the_end(tmp_path, monkeypatch):
    tries = []

    def write(folder, step, *rest, plain=storage.write):
        tries.append(step)
        if tries == [4, 8, 12]:
            raise CheckpointError(str(folder), "full")
        return plain(folder, step, *rest)

    monkeypatch.setattr(storage, "write", write)
    ran = trained(tmp_path, "checkpoints={every: 4 steps, keep_last: 50}")
    assert tries == [4, 8, 12, 12] and steps(ran) == [4, 8, 12]


def test_a_recipe_may_ask_that_a_full_disk_ends_the_training(tmp_path, monkeypatch):
    reached = []
    refusing(monkeypatch, 8)
    monkeypatch.setattr(RunLogger, "progress", lambda self, step, steps: (reached.append(step), time.sleep(0.01)))
    with pytest.raises(CheckpointError, match=r"1\.0 MB free; free some space"):
        trained(tmp_path, "checkpoints={every: 4 steps, keep_last: 50, failing: stop}", "train.length=1000 steps")
    assert 8 <= reached[-1] < 40, "a few steps later"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000004"]


def test_a_mistake_while_a_checkpoint_is_written_ends_the_training_whatever_the_recipe_says(tmp_path, monkeypatch):
    refusing(monkeypatch, 8, error=lambda folder: ValueError("a state that JSON would change"))
    with pytest.raises(ValueError, match="a state that JSON"):
        trained(tmp_path, "checkpoints={every: 4 steps, keep_last: 50}", "train.length=1000 steps")


def test_no_memory_for_the_copies_costs_one_checkpoint(tmp_path, monkeypatch):
    asked = []

    def make(self, plain=Copies.make):
        asked.append(1)
        if len(asked) == 2:
            raise MemoryError
        return plain(self)

    monkeypatch.setattr(Copies, "make", make)
    ran = trained(tmp_path, "checkpoints={every: 4 steps, keep_last: 50}")
    assert steps(ran) == [4, 12]


def test_a_checkpoint_that_fails_at_the_very_end_is_no_finished_run(tmp_path, monkeypatch):
    def write(*what):
        raise CheckpointError("disk", "full")

    monkeypatch.setattr(storage, "write", write)
    with pytest.raises(CheckpointError, match="disk: full"):
        trained(tmp_path, "checkpoints={every: null}")


def test_no_worker_is_forked_while_a_thread_writes(tmp_path, monkeypatch):
    alive = []

    def write(*what, plain=storage.write):
        time.sleep(0.1)
        return plain(*what)

    def training(*what, plain=stream.training, **more):
        alive.append([thread.name for thread in threading.enumerate() if thread.name == "trainkit-checkpoint"])
        return plain(*what, **more)

    monkeypatch.setattr(storage, "write", write)
    monkeypatch.setattr(stream, "training", training)
    first = "evaluations={val: {at_start: true, batch_size: 8}}"
    ran = trained(tmp_path, first, "best={metric: val/accuracy}", "checkpoints={every: 5 steps, keep_last: 50}")
    assert alive == [[]] and steps(ran)[0] == 0, "one was being written before the stream"


def test_a_resumed_training_cuts_the_journal_where_the_checkpoint_was_asked_for(tmp_path):
    """What is logged while a checkpoint is being written is behind its position: it will be computed again."""
    kept = journal.Journal(tmp_path / "journal.jsonl")

    class Written(Silent):
        def position(self):
            return kept.position

        def commit(self):
            kept.append(5, {"train/loss": 2.0})
            return kept.commit()

    kept.append(4, {"train/loss": 1.0})
    before = kept.position
    recipe = load(RunRequest(TOY, QUIET, ("toy",)))
    writer = CheckpointWriter(recipe, RunLogger(recipe, Folder(tmp_path), Written(), main=True))
    writer.begin(4, Copies(), {"best": []})
    writer.settle()
    assert storage.read(tmp_path / "checkpoints" / "step-000000004").state["journal"] == before < kept.position


def test_tensors_are_copied_when_it_was_said_and_whatever_else_is_left_alone():
    a, b, c = nn.Parameter(torch.ones(3)), torch.zeros(2), torch.zeros(1)
    copies = Copies()
    promised = copies.promise(a)
    copies.files |= {"model": {"a": promised, "b": copies.take(b), "c": c}, "ema": {"a": promised}}
    copies.begin()
    b += 1
    assert copies.files["model"]["b"].tolist() == [0, 0] and copies.files["model"]["a"].data_ptr() == a.data_ptr()
    made = copies.make()
    with torch.no_grad():
        a += 1
    assert made["model"]["a"] is made["ema"]["a"] and made["model"]["c"] is c
    assert made["model"]["a"].tolist() == [1, 1, 1] and not made["model"]["a"].requires_grad


def test_copies_of_every_kind_share_a_room_and_the_next_use_it_again():
    g = torch.Generator().manual_seed(0)
    some = [
        torch.randn(3, 5, generator=g), torch.tensor(7), torch.zeros(0, 2), torch.tensor([True, False, True]),
        torch.randn(5, generator=g).bfloat16(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(), torch.randn(9)[::2], torch.randn(1).double(), torch.randn(3, dtype=torch.complex64),
    ]  # fmt: skip
    room = state_dict.CopyBuffers()
    made = room.copies(some)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(made, some, strict=True))
    assert all(copy.is_contiguous() for copy in made)
    spans = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in made)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "none lies over another"
    again = room.copies(some[:4])
    assert [copy.data_ptr() for copy in again] == [copy.data_ptr() for copy in made[:4]]
    larger = room.copies([torch.ones(10_000), *some])
    assert all(torch.equal(one, other) for one, other in zip(larger[1:], some, strict=True))


def test_buffers_and_untrained_parameters_are_taken_and_not_promised():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net[0].bias.requires_grad_(False)

    def shared(learns: bool) -> set[str]:
        copies = Copies()
        taken = copies.files["model"] = state_dict.module_tensors(net, copies=copies, learns=learns)
        copies.begin()
        assert taken.keys() == net.state_dict().keys()
        return {name for name, tensor in net.state_dict().items() if taken[name].data_ptr() == tensor.data_ptr()}

    assert shared(True) == {"0.weight", "1.weight", "1.bias"} and shared(False) == set()


@pytest.mark.slow
def test_killed_anywhere_and_resumed_a_run_ends_with_the_bits_of_an_uninterrupted_one(store, monkeypatch):
    """SIGKILL 5 times, most of them within a save: each update begins one."""
    words = ["train.length=60 steps", "checkpoints={every: 1 steps, keep_last: 2}", "log.every=1 steps"]
    whole = run(*words)
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    rng, began = random.Random(0), ""
    command = [sys.executable, str(ROOT / "trainkit" / "run.py"), str(TOY), "--plugin", "toy", *words, "seed=0"]
    for _ in range(5):
        job = subprocess.Popen([*command, *(["--resume", began] if began else [])], stdout=subprocess.PIPE, text=True)
        until_a_row(job)
        began = newest().name
        time.sleep(rng.uniform(0, 0.3))
        job.send_signal(signal.SIGKILL)
        job.communicate()
        assert storage.newest_valid(newest().checkpoints)[1] == []
        if newest().info().status == "FINISHED":
            break
    ran = Ran(0, newest())
    if ran.folder.info().status != "FINISHED":
        ran = run(*words, resume=began)
    assert all(same(ran.last.tensors[group], whole.last.tensors[group]) for group in whole.last.tensors)
    assert ran.repeatable == whole.repeatable and not ran.events("nondeterminism")


def test_what_ends_a_training_waits_for_the_checkpoint_under_way(tmp_path, monkeypatch):
    def write(*what, plain=storage.write):
        time.sleep(0.2)
        return plain(*what)

    monkeypatch.setattr(storage, "write", write)
    monkeypatch.setattr(RunLogger, "progress", lambda self, step, steps: 1 / (5 - step))
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, "checkpoints={every: 4 steps, keep_last: 50}")
    assert storage.newest_valid(tmp_path / "checkpoints")[0].name == "step-000000004"

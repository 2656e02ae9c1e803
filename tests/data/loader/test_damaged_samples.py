"""Damaged samples: each ends the run by name, or another is trained on in its place and nothing else changes."""

from __future__ import annotations

import csv
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import PLUGIN, Ran, all_same, newest, own_store, run, spawn, stop_after, stripes

from trainkit import rng
from trainkit.config.schema import Loader
from trainkit.data.images.dataset import Images
from trainkit.data.loader import stream
from trainkit.data.loader.damaged_samples import TRIES, Damage, Replacing
from trainkit.data.rows import reader
from trainkit.data.split import SplitView
from trainkit.data.storage.image_store import Packed
from trainkit.errors import EXIT_CODE, UserError
from trainkit.training.plan import Plan

pytestmark = pytest.mark.usefixtures("unsent")

SIDE = 16
PLAN = Plan(steps=12, steps_per_epoch=6, batch_size=8, micro_batch=8, accumulation=1, world=1, rank=0)


@pytest.fixture
def pictures(tmp_path, cache, monkeypatch) -> Path:
    """48 images of three classes, packed; as of a set of gigabytes their hash is not compared when it is opened."""
    stripes(tmp_path / "set", 16, 1, (SIDE, SIDE))
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)
    return tmp_path / "set"


def opened(root: Path):
    return Images(train=str(root), image_size=SIDE).open(0).train


def damage(packed: Packed, rows, seed: int = 0) -> None:
    """Flip a bit of each of some rows, wherever in it."""
    rng, size = np.random.default_rng(seed), 3 * SIDE * SIDE
    with (packed.path / "rows.arrow").open("r+b") as file:
        for row in rows:
            at = packed.span("image", int(row))[0] + int(rng.integers(size))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << int(rng.integers(8))]))


def read(split, bad: Damage | None = None, **more) -> list[dict[str, torch.Tensor]]:
    return list(stream.training(split, partial(PLAN.keys, split, 0), Loader(**more), pin=False, damage=bad))


def test_every_flip_of_a_packed_row_is_found_when_it_is_read(trials, pictures):
    whole = opened(pictures)
    content = (whole.packed.path / "rows.arrow").read_bytes()
    for seed in trials(40, 2000):
        row = seed % 48
        damage(whole.packed, [row], seed)
        split = opened(pictures)
        with pytest.raises(UserError, match=rf"row {row} \(\w+/\d+\.png\): is not what was written"):
            split.fetch(np.array([row]), 0)
        (whole.packed.path / "rows.arrow").write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
def test_another_of_its_class_is_read_in_its_place_and_nothing_else_changes(pictures, workers):
    split = opened(pictures)
    expected = read(split)
    bad_rows = [5, 20, 21]
    damage(split.packed, bad_rows)
    split = opened(pictures)
    damaged = Damage(split, seed=7, most=0.1)
    got = read(split, damaged, workers=workers)
    assert len(got) == len(expected) == 12
    for was, now in zip(expected, got, strict=True):
        kept = ~np.isin(was["index"], bad_rows)
        assert torch.equal(was["label"], now["label"]) and all(torch.equal(was[k][kept], now[k][kept]) for k in was)
        assert not np.isin(now["index"], bad_rows).any()
    seen = {int(row) for batch in expected for row in batch["index"]} & set(bad_rows)
    assert set(damaged.found) == seen
    for row, found in damaged.found.items():
        assert re.search(rf"row {row} \(\w+/\d+\.png\): is not what was written", found["said"])
        assert found["instead"] == Replacing(split, 7).instead(row)[0] != row
        assert split.label[found["instead"]] == split.label[row]
    assert all(
        torch.equal(a["image"], b["image"]) for a, b in zip(got, read(split, Damage(split, 7, 0.1)), strict=True)
    )


def test_what_stands_in_for_a_row_may_be_damaged_too(pictures):
    split = opened(pictures)
    alike = np.flatnonzero(split.label == split.label[9])
    first = int(alike[alike != 9][rng.number(3, "damaged", 9, 0) % 15])
    damage(split.packed, [9, first])
    instead, said = Replacing(opened(pictures), 3).instead(9)
    assert instead not in (9, first) and "row 9 " in said
    damage(split.packed, set(alike) - {9, first}, 1)
    with pytest.raises(UserError, match="row 9 "):
        Replacing(opened(pictures), 3).fetch(np.array([40, 9]), 0)
    assert TRIES >= 10


def test_behind_cached_outputs_any_row_may_stand_in_for_a_damaged_one(pictures):
    split = opened(pictures)
    damage(split.packed, [9])
    others = np.delete(np.arange(split.size), 9)
    instead, _ = Replacing(SplitView(opened(pictures)), 3).instead(9)
    assert instead == others[rng.number(3, "damaged", 9, 0) % len(others)]


def test_more_than_the_share_that_may_be_damaged_ends_the_run(pictures):
    split = opened(pictures)
    damage(split.packed, range(5))
    with pytest.raises(UserError, match=r"3 samples are damaged, the last one: .*at most 2 of 48: 5%, loader"):
        read(opened(pictures), Damage(opened(pictures), 0, 0.05))
    with pytest.raises(UserError, match=r"row \d+ \(.*is not what was written"):
        read(opened(pictures))


# ---- Whole runs, of the toy: a row of it is said to be damaged


def words(*more: str) -> tuple[str, ...]:
    return ("data.damaged=11", "loader.damaged=replace", "loader.damaged_most=5%", *more)


@pytest.fixture(scope="module")
def replaced(tmp_path_factory, database):
    with own_store(tmp_path_factory.mktemp("replaced"), database):
        yield run(*words())


def table(ran) -> list[dict[str, str]]:
    (file,) = ran.folder.path.parent.parent.rglob(f"*{ran.folder.info().run_id}*/**/tables/damaged.csv")
    return list(csv.DictReader(file.open()))


@pytest.mark.usefixtures("sent")
def test_a_run_says_what_it_replaced(replaced):
    assert replaced.code == 0 and replaced.last.step == 12, "no update and no epoch is shorter"
    (event,) = replaced.events("sample_replaced")
    assert event.data["row"] == 11 and event.data["said"] == "images/11: damaged" and event.data["instead"] != 11
    (row,) = table(replaced)
    assert row == {key: str(value) for key, value in event.data.items()}


@pytest.mark.parametrize("how", ["repeated", "with workers", "interrupted"])
def test_what_is_trained_on_instead_is_the_same_every_time(store, replaced, how):
    if how == "interrupted":
        first = run(*words(), stopping=stop_after(7))
        assert first.code == 143
        ran = run(*words(), resume="")
        assert ran.folder == first.folder
    else:
        ran = run(*words(*(["loader.workers=2", "loader.start=fork"] if how == "with workers" else [])))
    assert all_same(ran, replaced) and ran.repeatable == replaced.repeatable
    assert [event.data for event in ran.events("sample_replaced")] == [
        event.data for event in replaced.events("sample_replaced")
    ]


@pytest.mark.slow
def test_on_two_processes_all_that_was_replaced_is_listed_once(store):
    plain = ("data.samples=32", "train.length=2 epochs", "evaluations={}", "best=null")
    done = spawn(2, str(PLUGIN / "toy.yaml"), *words(*plain), "--plugin", "toy")
    assert done.returncode == 0, done.stderr
    (event,) = Ran(0, newest()).events("sample_replaced")
    assert event.data["row"] == 11


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_share_that_may_be_damaged_is_that_of_the_run_however_often_it_was_interrupted(
    store, monkeypatch, interrupted
):
    """One sample of 64 may be damaged; two are, the first and the last of the only epoch."""
    monkeypatch.syspath_prepend(PLUGIN)
    import toy

    order, whole = rng.permutation(0, 0, 64), toy.ToySplit.fetch

    def fetch(self, indices, epoch, view=None):
        if self.name == "train" and (bad := {order[0], order[-1]}.intersection(indices)):
            raise UserError(f"images/{bad.pop()}", "damaged")
        return whole(self, indices, epoch, view)

    monkeypatch.setattr(toy.ToySplit, "fetch", fetch)
    words = ("loader.damaged=replace", "loader.damaged_most=2%", "train.length=1 epochs")
    if interrupted:
        assert run(*words, stopping=stop_after(2)).code == 143
    with pytest.raises(UserError, match=rf"2 samples are damaged, the last one: images/{order[-1]}: .* at most 1"):
        run(*words, resume="" if interrupted else None)


def test_and_of_all_processes_together():
    split = SimpleNamespace(name="train", size=64, digest="d", views=1, protocol=None, at_once=None)
    damage = [Damage(split, 0, 0.02) for _ in range(2)]
    found = [{"row": row, "said": f"{row}: damaged", "instead": 1} for row in (11, 12)]
    damage[0].add(found[:1])
    damage[1].add(found[1:])
    for one in damage:
        with pytest.raises(UserError, match=r"2 samples are damaged, the last one: 1[12]: damaged"):
            one.add(found)


def test_as_given_damage_ends_the_run(store):
    with pytest.raises(UserError, match="images/11: damaged"):
        run("data.damaged=11")
    with pytest.raises(UserError, match=r"1 sample is damaged, .*images/11: damaged; expected at most 0 of 64: 1%"):
        run("data.damaged=11", "loader.damaged=replace")


def test_an_import_leaves_out_no_more_than_it_may(pictures, tmp_path):
    from click.testing import CliRunner

    from trainkit.cli.main import main

    for name in ("across/003.png", "down/004.png"):
        (pictures / name).write_bytes((pictures / name).read_bytes()[:60])

    def imported(*words: str):
        return CliRunner().invoke(
            main, ["data", "import", str(pictures), str(tmp_path / "out"), "--size", "16x16", *words]
        )

    assert "--damaged-most is given with --damaged skip" in imported("--damaged-most", "1%").output
    few = imported("--damaged", "skip", "--damaged-most", "4%")
    assert few.exit_code == EXIT_CODE and "2 unusable images" in few.output and not (tmp_path / "out").exists()
    many = imported("--damaged", "skip", "--damaged-most", "5%")
    assert many.exit_code == 0 and "46 images" in many.output
    assert all(f"skipped: {pictures}/{name}" in many.output for name in ("across/003.png", "down/004.png"))

"""The preflight: a training in small, whose parts are those of the real one."""

from __future__ import annotations

import sys

import pytest
from runs import PLUGIN, TOY, run

from trainkit import plan
from trainkit.errors import UserError
from trainkit.machine import Machine
from trainkit.order import Order, load
from trainkit.speed import preflight
from trainkit.store import Store

pytestmark = pytest.mark.usefixtures("store")


def order(*words: str) -> Order:
    if str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    return Order(TOY, words, ("toy",))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 0.2)


def flown(folder, *words: str):
    recipe = load(order(*words))
    machine, data = Machine(recipe), recipe.data.open(recipe.seed)
    return recipe, plan.Plan.make(recipe, data, 1, 0), preflight.fly(recipe, data, machine, {}, folder)


def test_what_is_tried_is_what_the_training_then_does(tmp_path, quick):
    recipe, cut, tried = flown(tmp_path)
    ran = run()
    whole = ran.folder.checkpoints / f"step-{cut.steps:09d}"
    size = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    assert tried.bytes == pytest.approx(size, rel=0.1) and tried.written_s > 0
    assert tried.scored == {"val": 37} and set(tried.costs) == set(tried.held) == {"val"}
    expected = preflight.forecast(recipe, cut, tried)
    assert expected.steps == cut.steps == ran.steps[-1]
    assert expected.evaluations["val"][0] == len(ran.series("val/accuracy"))
    assert expected.total() == pytest.approx(
        cut.steps * tried.steps.seconds.mean()
        + len(ran.series("val/accuracy")) * tried.held["val"]
        + expected.checkpoints[0] * tried.written_s
    )


def test_checkpoints_are_counted_as_they_are_written(tmp_path, quick):
    words = ["train.length=10 steps", "checkpoints={every: 4 steps, keep_last: 50, keep_best: 0}", "best=null"]
    recipe, cut, tried = flown(tmp_path, *words)
    ran = run(*words)
    assert preflight.forecast(recipe, cut, tried).checkpoints[0] == len(ran.steps) == 3


def test_a_preflight_leaves_no_run_behind_and_says_what_it_found(capsys, quick):
    before = len(Store.locate().runs())
    said: list[str] = []
    assert preflight.command(order(), say=said.append) == 0
    text = "\n".join(said)
    for word in (
        "updates",
        "evaluation  val: 37 samples",
        "checkpoint",
        "disk",
        "memory",
        "epoch",
        "forecast:",
        "finished",
    ):
        assert word in text
    assert len(Store.locate().runs()) == before and not list(Store.locate().home.glob("preflight-*"))


def test_a_disk_that_does_not_hold_the_checkpoints_is_told_of(tmp_path, quick):
    recipe, cut, tried = flown(tmp_path)
    lines, fits = preflight.report(recipe, cut, tried, free=3 * tried.bytes)
    keep = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    assert not fits and lines[-1].startswith("error: the disk does not hold") and keep > 3
    assert preflight.report(recipe, cut, tried, free=(keep + 1) * tried.bytes)[1]


def test_an_evaluation_that_would_fail_at_the_end_fails_now(quick):
    with pytest.raises((UserError, ValueError, RuntimeError)):
        preflight.command(order("evaluations={val: {split: nothing}}", "best=null"), say=print)


def test_a_training_of_three_updates_is_refused(tmp_path, quick):
    with pytest.raises(UserError, match=r"ended after 2 updates; expected more than 3"):
        flown(tmp_path, "train.length=2 steps", "checkpoints={every: null, at_end: false}")

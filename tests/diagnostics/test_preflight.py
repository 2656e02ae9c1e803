"""The preflight: a training in small, whose parts are those of the real one."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest
from runs import PLUGIN, TOY, run

from trainkit.checkpoint import storage
from trainkit.checkpoint.state_dict import Copies
from trainkit.config.run_request import RunRequest, load
from trainkit.diagnostics import preflight, throughput_limits
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.speed.eta import checkpoint_cost
from trainkit.tracking.store import Store
from trainkit.training import plan
from trainkit.training.teacher_cache import Building

pytestmark = pytest.mark.usefixtures("store")


def order(*words: str) -> RunRequest:
    if str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    return RunRequest(TOY, words, ("toy",))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 0.2)


def flown(folder, *words: str):
    recipe = load(order(*words))
    runtime, data = Runtime(recipe), recipe.data.open(recipe.seed)
    return (
        recipe,
        plan.Plan.make(recipe, data, 1, 0),
        preflight.fly(recipe, data, runtime, {}, folder, folder / "outputs"),
    )


def test_where_damage_is_replaced_the_trial_replaces_it_too(tmp_path, quick):
    assert flown(tmp_path, "data.damaged=11", "loader.damaged=replace", "loader.damaged_most=5%")[2].bytes > 0


def test_what_is_tried_is_what_the_training_then_does(tmp_path, quick):
    recipe, cut, tried = flown(tmp_path)
    ran = run()
    whole = ran.folder.checkpoints / f"step-{cut.steps:09d}"
    size = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    assert tried.bytes == pytest.approx(size, rel=0.1) and tried.written_s > 0
    assert tried.samples == {"val": 37} and set(tried.costs) == set(tried.evaluation_s) == {"val"}
    expected = preflight.forecast(recipe, cut, tried)
    assert expected.steps == cut.steps == ran.steps[-1]
    assert expected.evaluations["val"][0] == len(ran.series("val/accuracy"))
    assert expected.total() == pytest.approx(
        cut.steps * tried.steps.seconds.mean()
        + len(ran.series("val/accuracy")) * tried.evaluation_s["val"]
        + expected.checkpoints[0] * expected.checkpoints[1]
        + expected.last_s
    )
    each = expected.checkpoints[1]
    assert tried.blocking_s <= each <= max(tried.blocking_s, tried.written_s)
    assert expected.last_s == pytest.approx(max(0.0, tried.written_s - each))


def test_checkpoints_are_counted_as_they_are_written(tmp_path, quick):
    words = ["train.length=10 steps", "checkpoints={every: 4 steps, keep_last: 50, keep_best: 0}", "best=null"]
    recipe, cut, tried = flown(tmp_path, *words)
    ran = run(*words)
    assert preflight.forecast(recipe, cut, tried).checkpoints[0] == len(ran.steps) == 3


def test_what_is_written_beside_the_training_does_not_hold_it_up(tmp_path, quick, monkeypatch):
    def write(*what, plain=storage.write):
        time.sleep(0.5)
        return plain(*what)

    monkeypatch.setattr(storage, "write", write)
    words = "train.length=1000 steps", "checkpoints={every: 500 steps}"
    recipe, cut, tried = flown(tmp_path, *words)
    assert tried.written_s > 0.5 > tried.blocking_s >= 0
    cut = replace(cut, steps=10**6)  # steps enough to write one between two
    assert preflight.forecast(recipe, cut, tried).checkpoints[1] == tried.blocking_s


def test_what_an_update_waits_for_holds_the_training_up(tmp_path, quick, monkeypatch):
    def make(self, plain=Copies.make):
        time.sleep(0.2)
        return plain(self)

    monkeypatch.setattr(Copies, "make", make)
    tried = flown(tmp_path)[2]
    assert 0.0 < tried.blocking_s <= tried.written_s > 0.2


def test_checkpoints_that_follow_too_fast_wait_for_each_other():
    assert checkpoint_cost(0.01, 2.0, 5.0) == 0.01
    assert checkpoint_cost(0.01, 2.0, 0.5) == 1.5


def test_a_preflight_leaves_no_run_behind_and_says_what_it_found(capsys, quick):
    before = len(Store.locate().runs())
    said: list[str] = []
    assert preflight.command(order(), say=said.append) == 0
    text = "\n".join(said)
    for word in (
        "steps",
        "evaluation  val: 37 samples",
        "checkpoint",
        "disk",
        "memory",
        "epoch",
        "forecast:",
        "cost        ",
        "finished",
        "loader alone",
        "model alone",
        "Throughput: ",
    ):
        assert word in text
    (file,) = (Store.locate().home / throughput_limits.FOLDER).iterdir()
    mark = json.loads(file.read_text())["fingerprint"]
    assert throughput_limits.known(Store.locate(), mark).model > 0, "later runs know them"
    assert len(Store.locate().runs()) == before and not list(Store.locate().home.glob("preflight-*"))


def test_a_disk_that_does_not_hold_the_checkpoints_is_told_of(tmp_path, quick):
    recipe, cut, tried = flown(tmp_path)
    lines, fits = preflight.report(recipe, cut, tried, free=3 * tried.bytes)
    keep = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    assert not fits and lines[-1].startswith("error: not enough disk space for the checkpoints;") and keep > 3
    assert preflight.report(recipe, cut, tried, free=(keep + 1) * tried.bytes)[1]


def test_networks_that_are_asked_once_are_timed_and_nothing_is_kept_of_them(tmp_path, quick):
    recipe, cut, tried = flown(tmp_path, "task.teacher=oracle", "task.stored=true")
    train = recipe.data.open(recipe.seed).train
    (one,) = tried.building
    assert (one.name, one.samples, one.views) == ("teacher", train.size, train.views)
    assert one.bytes == 2 * train.size * train.views * 4, "four classes, half precision"
    assert 0 < one.seconds == preflight.forecast(recipe, cut, tried).before_s and not (tmp_path / "outputs").exists()


def test_what_a_table_of_outputs_takes_is_forecast(tmp_path, quick):
    recipe, cut, tried = flown(tmp_path)
    assert tried.building == []
    plain = preflight.forecast(recipe, cut, tried).total()
    tried.building = [Building("teacher", 5_822_653, 2, 3600.0, 12_000_000_000)]
    expected = preflight.forecast(recipe, cut, tried)
    assert expected.total() == pytest.approx(plain + 3600) and "3.6e+03 s before the first" in expected.describe()
    need = 12_000_000_000 + (1 + recipe.checkpoints.keep_last + recipe.checkpoints.keep_best) * tried.bytes
    lines, fits = preflight.report(recipe, cut, tried, free=need)
    said = (
        "teacher     outputs of teacher for 5,822,653 samples in 2 views: computed in 60 min, 12 GB in the cache, once"
    )
    assert fits and said in lines and any(", 12 GB of teacher outputs" in line for line in lines)
    assert not preflight.report(recipe, cut, tried, free=need - 1)[1]
    for one, word in (((0.0, 0), "already cached"), ((5.0, 0), "in memory, at every start")):
        tried.building = [Building("teacher", 10, 2, *one)]
        assert word in "\n".join(preflight.report(recipe, cut, tried, free=need)[0])


def test_an_evaluation_that_would_fail_at_the_end_fails_now(quick):
    with pytest.raises((UserError, ValueError, RuntimeError)):
        preflight.command(order("evaluations={val: {split: nothing}}", "best=null"), say=print)


@pytest.mark.parametrize("steps", [2, 4])
def test_a_training_without_a_step_that_is_timed_is_refused(tmp_path, quick, steps):
    """Of 4 steps no interval was known, and the report ended in a traceback."""
    with pytest.raises(UserError, match=f"a training of {steps} steps; expected 5 steps or more"):
        flown(tmp_path, f"train.length={steps} steps", "checkpoints={every: null, at_end: false}")

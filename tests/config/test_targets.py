"""Time to a score: reached once, counted over interruptions; and what a run costs."""

from __future__ import annotations

import math
import shutil
import time
from types import SimpleNamespace

import pytest
from runs import PLUGIN, TOY, run, stop_after

from trainkit.config import loader
from trainkit.config.run_request import RunRequest
from trainkit.config.targets import Targets, targets_reached
from trainkit.errors import UserError
from trainkit.inference import evaluate_run
from trainkit.speed import cost
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import METRIC_NAME, Tracker
from trainkit.training.state import TrainState


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)


def loaded(*words: str):
    return loader.load(TOY, words, ("toy",))


# Which targets are reached


def test_targets_are_reached_from_below_or_from_above():
    asked = {"val/auc": Targets(at=[0.5, 0.75, 0.9]), "val/eer": Targets(at=[0.1, 0.25], mode="min")}
    found = targets_reached(asked, {"val/auc": 0.75, "val/eer": 0.25, "val/other": 1.0}, 12.5)
    assert found == {"time_to/val/auc_0.5": 12.5, "time_to/val/auc_0.75": 12.5, "time_to/val/eer_0.25": 12.5}
    assert targets_reached(asked, {"val/auc": math.nan, "val/eer": math.nan}, 1.0) == {}
    assert targets_reached(asked, {}, 1.0) == {}


@pytest.mark.parametrize("value", [0, 1.0, -3.5, 1e-9, 1e22, 0.123456789, 100.0, 12345678.0])
def test_the_name_of_a_target_is_that_of_a_metric_and_reads_back_as_its_value(value):
    (name,) = targets_reached({"val/dice.sr": Targets(at=[value])}, {"val/dice.sr": math.inf}, 1.0)
    assert METRIC_NAME.fullmatch(name) and ".." not in name
    assert float(name.removeprefix("time_to/val/dice.sr_")) == value


def test_a_list_takes_its_direction_from_the_table_or_a_rule_of_the_same_metric():
    word = "time_to={val/eer: [0.1], val/auc: [0.9], val/odd: [0.2]}"
    found = loaded("best={metric: val/odd, mode: min}", word).time_to
    assert {metric: targets.mode for metric, targets in found.items()} == {
        "val/eer": "min",
        "val/auc": "max",
        "val/odd": "min",
    }


# In a recipe


def test_a_recipe_says_targets_as_a_list_or_as_a_block_and_resolves_to_blocks():
    recipe = loaded("time_to={val/accuracy: [0.5, 1], val/loss: {at: [0.1], mode: min}}")
    down = Targets(at=[0.1], mode="min")
    assert recipe.time_to == {"val/accuracy": Targets(at=[0.5, 1.0], mode="max"), "val/loss": down}
    assert loaded("time_to.val/accuracy=[0.5]").time_to == {"val/accuracy": Targets(at=[0.5], mode="max")}
    text = loader.dump(recipe)
    again = loader.parse(type(recipe), text, "again", (), loader.with_plugins(loader.TABLES, ("toy",)))
    assert loader.dump(again) == text and again.time_to == recipe.time_to
    assert loader.digest(recipe) == loader.digest(loaded()), "the same experiment"
    assert loaded("best={metric: val/loss, mode: min}", "time_to.val/loss=[0.1]").time_to["val/loss"].mode == "min"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("time_to={other/accuracy: [0.9]}", "time_to is 'other/accuracy', but there is no such evaluation"),
        ("time_to={val: [0.9]}", "time_to is 'val', but there is no such evaluation"),
        ("time_to={val/accuracy: []}", "time_to of val/accuracy: at is empty"),
        ("time_to={val/accuracy: [0.9, 0.90]}", "0.9 is given twice; keep one of them"),
        ("time_to={val/accuracy: 0.9}", "found 0.9, expected a list or a block"),
        ("time_to={val/accuracy: [high]}", "found 'high', expected a number"),
        ("time_to={val/accuracy: {mode: max}}", "time_to.val/accuracy"),
        ("time_to={val/accuracy: {at: [0.9], mode: up}}", "time_to.val/accuracy"),
        ("time_to={val/accuracy: {at: [true]}}", "time_to.val/accuracy"),
    ],
)
def test_targets_that_cannot_be_are_refused(word, said):
    with pytest.raises(loader.ConfigError) as error:
        loaded(word)
    assert said in str(error.value) and "Traceback" not in str(error.value)


def test_a_target_of_averaged_weights_needs_an_average():
    with pytest.raises(
        loader.ConfigError, match=r"time_to is a metric of EMA weights, but train\.ema is not set; set it"
    ):
        loaded("time_to={val/ema/accuracy: [0.9]}", "train.ema=null")


def test_other_evaluations_than_those_of_the_targets_can_be_asked_for(tmp_path):
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(TOY.read_text() + "time_to: {val/accuracy: [0.5]}\npromote: {}\n")
    found = evaluate_run._recipe(RunRequest(recipe, ("evaluations={other: {split: val}}",), ("toy",)))
    assert (found.time_to, found.promote, found.best, list(found.evaluations)) == ({}, None, None, ["other"])


def test_a_target_that_nobody_measures_is_named_before_training_goes_on(store):
    with pytest.raises(UserError, match=r"time_to: .*'val/top1', which is not measured"):
        run("time_to={val/top1: [0.9]}", "log.ceilings=off")


# In a run


def test_each_target_is_timed_at_the_evaluation_that_first_reaches_it(store, capsys):
    words = ("evaluations.val.every=1 steps", "log.ceilings=off")
    plain = run(*words)
    steps, values = plain.history.series("val/accuracy")
    best = max(values)
    ran = run(*words, f"time_to={{val/accuracy: [{best!r}, 0, 1.5], val/ema/accuracy: [0]}}")
    times = {name: points for name, points in ran.history.metrics.items() if name.startswith("time_to/")}
    assert all(len(points) == 1 for points in times.values())
    at = {name.removeprefix("time_to/"): points[0].step for name, points in times.items()}
    first = steps[values.index(best)]
    assert first > 1, "nothing to tell apart"
    assert at == {f"val/accuracy_{best:.10g}": first, "val/accuracy_0": 1, "val/ema/accuracy_0": 1}
    began, late = (times[f"time_to/{name}"][0].value for name in ("val/accuracy_0", f"val/accuracy_{best:.10g}"))
    assert 0 < began < late < ran.series("final/time/total_s")[0]
    assert ran.repeatable == plain.repeatable, "nothing else has changed"
    said = capsys.readouterr().out
    assert f"step {first}: val/accuracy_{best:.10g} reached after 0:" in said
    assert "\nReached  " in said and "\nCost  " in said and "time_to" not in said
    shown = Store.locate().client().get_run(ran.folder.info().run_id).data.metrics
    assert shown["time_to/val/accuracy_0"] == pytest.approx(began, rel=1e-5) and "time_to/val/accuracy_1.5" not in shown


def test_a_target_is_reached_once_and_costs_add_up_where_a_run_goes_on_from_before_it(store):
    words = ("evaluations.val.every=3 steps", "checkpoints.every=2 steps", "best=null", "log.ceilings=off")
    began = time.perf_counter()
    cut = run(*words, "time_to={val/accuracy: [0]}", stopping=stop_after(4))
    ((name, points),) = [m for m in cut.history.metrics.items() if m[0].startswith("time_to/")]
    assert [point.step for point in points] == [3] and not any(key.startswith("cost/") for key in cut.history.metrics)
    shutil.rmtree(sorted(cut.folder.checkpoints.glob("step-*"))[-1])
    assert [path.name for path in cut.folder.checkpoints.glob("step-*")] == ["step-000000002"]
    kept = cut.last.state
    ran = run(*words, "time_to={val/accuracy: [0]}", resume="")
    assert ran.folder == cut.folder and ran.history.metrics[name] == points, "the first measurement stands"

    ((name, (point,)),) = [m for m in ran.history.metrics.items() if m[0].startswith("cost/")]
    assert name == "cost/core_hours" and point.step == 12
    cores = cost.allotted(SimpleNamespace(all_gather=lambda thing: [thing], device=SimpleNamespace(type="cpu")))[name]
    least = kept["elapsed"] + ran.series("final/time/total_s")[0]
    assert 0.999 * least <= point.value * 3600 / cores <= time.perf_counter() - began
    assert kept["spent"][name] * 3600 / cores >= 0.999 * kept["elapsed"]


def test_what_is_recorded_once_is_recorded_once(store):
    place = Store.locate()
    folder = place.new_run("x", 0, "abcd")
    settings = {"experiment": "x", "run_name": "x", "params": {}, "system_metrics_every": 0.0}
    tracker = Tracker.start(folder, place, **settings)
    assert tracker.once(1, {}) == [] and tracker.once(1, {"time_to/a": 1.0}) == ["time_to/a"]
    behind = tracker.position()
    assert tracker.once(2, {"time_to/a": 2.0, "time_to/b": 2.0}) == ["time_to/b"]
    tracker.commit()
    tracker.finish("KILLED")
    again = Tracker.start(folder, place, **settings, resume=True)
    again.cut_back(behind)
    assert again.once(2, {"time_to/a": 3.0, "time_to/b": 3.0}) == []
    again.finish("FINISHED")
    found = place.client().get_run(folder.info().run_id).data.metrics
    assert found == {"time_to/a": 1.0, "time_to/b": 2.0}, "what was cut off keeps its first value"


# What it costs


def test_hours_are_counted_over_resumes_also_on_other_machines():
    clock, rates = SimpleNamespace(elapsed=lambda: 1200.0, before=600.0), {"cost/core_hours": 8.0}
    new = object.__new__(TrainState)
    new.elapsed, new.spent = 0.0, {}
    assert (new.total_elapsed(clock), new.total_spent(clock, rates)) == (1200.0, {"cost/core_hours": 4.0})
    resumed = object.__new__(TrainState)
    resumed.elapsed, resumed.spent = 7200.0, {"cost/core_hours": 3.0, "cost/gpu_hours": 2.5}
    assert resumed.total_elapsed(clock) == 8400.0
    assert resumed.total_spent(clock, rates) == {"cost/core_hours": 7.0, "cost/gpu_hours": 2.5}


def test_cores_that_processes_share_count_once_and_a_quota_is_that_of_a_host():
    shared = [("a", [0, 1, 2, 3], None), ("a", [2, 3, 4, 5], None)]
    assert cost.cores(shared) == 6.0
    assert cost.cores([*shared, ("b", [0, 1], None)]) == 8.0
    assert cost.cores([("a", [0, 1, 2, 3], 1.5), ("b", range(64), 100.0)]) == 65.5
    assert cost.cores([("a", [0, 1], 4.0), ("a", [2, 3], 2.5)]) == 2.5


def test_gpus_cost_where_the_run_trains_on_them(monkeypatch):
    monkeypatch.setattr(cost, "quota", lambda: None)
    runtime = SimpleNamespace(all_gather=lambda thing: [thing, thing], device=SimpleNamespace(type="cuda"), world=2)
    found = cost.allotted(runtime)
    assert found.keys() == {"cost/core_hours", "cost/gpu_hours"} and found["cost/gpu_hours"] == 2.0
    runtime.device.type = "cpu"
    assert cost.allotted(runtime) == {"cost/core_hours": found["cost/core_hours"]}

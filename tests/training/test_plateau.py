"""The schedule `plateau`: when the learning rate is reduced, and that an interruption changes nothing."""

import math
from pathlib import Path

import pytest
import torch
from runs import PLUGIN, TOY, run, stop_after

from trainkit.autoconfig import fit
from trainkit.config.loader import ConfigError, digest, dump, hashed
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schedule import Curve, Warmup
from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.diagnostics import preflight, stepping_child
from trainkit.errors import UserError
from trainkit.inference import evaluate_run
from trainkit.training import best
from trainkit.training.state import Plateau

pytestmark = pytest.mark.usefixtures("store", "unsent")

STUCK = "train.schedule={name: plateau, metric: val/accuracy, patience: 2, gamma: 0.5, min_delta: 2.0}"
EACH = "evaluations={val: {every: 1 steps, batch_size: 8}}"


def reductions(curve: Curve, scores: list[float]) -> list[int]:
    plateau, reduced = Plateau(best=None, waited=0, cooling=0, reduced=0), []
    for score in scores:
        best.count_plateau(plateau, curve, score)
        reduced.append(plateau["reduced"])
    return reduced


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("cooldown", [0, 1, 4])
def test_the_rate_is_that_of_pytorchs_scheduler(mode, cooldown):
    scores = torch.rand(200, generator=torch.Generator().manual_seed(cooldown)).cumsum(0).sin().tolist()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, 0.5, patience=2, threshold=0.05, threshold_mode="abs", cooldown=cooldown, min_lr=0.01, eps=0
    )
    curve = Curve(name="plateau", metric="val/x", mode=mode, patience=3, gamma=0.5, floor=0.01)
    curve.cooldown, curve.min_delta = cooldown, 0.05
    for score, reduced in zip(scores, reductions(curve, scores), strict=True):
        torchs.step(score)
        assert curve.factor(0, 1, 1, 1, reduced) == optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] == 0.01, "the floor was reached"


def test_a_score_that_is_not_a_number_is_no_improvement_and_no_record():
    curve = Curve(name="plateau", metric="val/x", patience=2)
    assert reductions(curve, [math.nan, 0.5, 0.6, math.nan, 0.4, 0.7, 0.1]) == [0, 0, 0, 0, 1, 1, 1]


def test_the_warm_up_comes_first_and_has_its_own_rate():
    curve = Curve(name="plateau", metric="val/x", patience=1, warmup=Warmup(over=Span.parse("4 steps")))
    assert [curve.factor(step, 9, 3, 1, reduced=step // 5) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 0.1]


def test_a_run_reduces_its_rate_and_says_so(capsys):
    ran = run(STUCK, EACH, "log.every=1 steps", "train.length=7 steps")
    assert ran.series("train/lr") == [0.05, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]
    events = ran.events("lr_reduced")
    said = capsys.readouterr().out
    assert "LR          x 0.5 each time val/accuracy has not improved for 2 evaluations" in said
    assert "step 5: val/accuracy no longer improves; learning rate x 0.5 (reduction 2)" in said
    assert [(event.step, event.data["times"]) for event in events] == [(3, 1), (5, 2), (7, 3)]


def test_evaluations_within_the_warm_up_are_not_counted():
    warm = STUCK.replace("patience", "warmup: {over: 4 steps}, patience")
    ran = run(warm, EACH, "train.length=8 steps")
    assert [event.step for event in ran.events("lr_reduced")] == [6, 8], "the first that counts is that of step 4"


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4))])
def test_an_interrupted_run_goes_on_bit_for_bit(step):
    """Among others right after the evaluation that reduces the rate, before the next update."""
    words = (STUCK, EACH, "log.every=1 steps", "train.length=8 steps")
    whole = run(*words)
    first = run(*words, stopping=stop_after(step))
    assert first.last.step == step
    ran = run(*words, resume=first.folder.name)
    assert ran.repeatable == whole.repeatable
    assert ran.last.state["plateau"] == whole.last.state["plateau"]
    for group, tensors in whole.last.tensors.items():
        assert all(torch.equal(ran.last.tensors[group][name], t) for name, t in tensors.items())


def test_the_metric_is_checked():
    def refused(text, *words):
        with pytest.raises(ConfigError, match=text):
            recipe(*words)

    plateau = "train.schedule={name: plateau, metric: val/accuracy, patience: 2}"
    refused("there is no such evaluation; expected one of: val", plateau.replace("val/", "other/"))
    refused("evaluations.val has no `every`", plateau, "evaluations={val: {batch_size: 8}}")
    refused("needs `metric` and `patience`", "train.schedule={name: plateau, metric: val/accuracy}")
    refused("needs `metric` and `patience`", "train.schedule={name: cosine, metric: val/accuracy, patience: 2}")
    refused("train.ema is not set", plateau.replace("val/", "val/ema/"), "train.ema=null")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def recipe(*words: str) -> Recipe:
    return load(RunRequest(TOY, words, ("toy",)))


def test_other_schedules_keep_their_identity():
    counted = hashed(recipe())["train"]["schedule"]
    assert sorted(counted) == ["at", "floor", "gamma", "name", "power", "warmup"], "the keys of before"
    assert digest(recipe(STUCK)) != digest(recipe(STUCK.replace("patience: 2", "patience: 3")))


def test_an_unknown_score_is_named_at_the_first_evaluation():
    with pytest.raises(UserError, match=r"train\.schedule\.metric.*which is not measured"):
        run(STUCK.replace("accuracy", "top1"), EACH)


def test_the_tools_that_do_not_evaluate_take_such_a_recipe():
    made = recipe(STUCK, EACH)
    assert stepping_child.shortened(made).train.schedule.name == "constant"
    assert preflight._shortened(made, None).train.schedule.name == "constant"


def test_a_copy_for_other_data_watches_its_score():
    tree = {"train": {"schedule": {"metric": "lfw/accuracy"}}, "evaluations": {"lfw": {"every": "1 epoch"}}}
    fitted = fit.Fitted(tree, Path("new.yaml"))
    fit.score(fitted, {"val": "own/pairs.csv"})
    assert fitted.get("train.schedule.metric") == "val/accuracy"


def test_an_evaluation_of_weights_needs_no_such_score(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(dump(recipe(STUCK, EACH)))
    words = ("evaluations={other: {split: val}}",)
    assert evaluate_run._recipe(RunRequest(file, words, ("toy",))).train.schedule.name == "constant"

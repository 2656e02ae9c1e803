"""Directions of the metrics that a recipe names: from the table, the task or the recipe, and the same everywhere."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from runs import PLUGIN, ROOT, TOY

from trainkit.config import loader
from trainkit.config.gates import Gate
from trainkit.config.loader import ConfigError
from trainkit.config.run_request import RunRequest
from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.errors import UserError
from trainkit.experiments import sweep
from trainkit.experiments.group import Child, Result
from trainkit.interfaces import Scores
from trainkit.training import best
from trainkit.training.state import Plateau

FALLING = [0.9, 0.5, 0.3, 0.4]
LOWER = {
    "convnext": ("val/nll", "val/ema/nll", "val/ece"),
    "eye_state": ("val/nll", "val/ema/ece", "val/bayes_error", "val/intra"),
    "face_teacher": ("sample/eer", "sample/fnmr@1e-3"),
    "tom500": ("val/hd95_mean_mm", "val/asd_mm.liver", "val/volume_error_mean_mm3", "val/missed", "val/invented"),
    "segment": ("val/loss", "val/pixel_error"),
    "reid": ("val/loss",),
}
HIGHER = {
    "convnext": ("val/top1",),
    "omniglot": ("unseen/r_precision",),
    "segment": ("val/iou.road", "val/boundary_f"),
    "reid": ("val/nir.map", "val/rank_1"),
    "tom500": ("val/dice.liver", "val/nsd_mean"),
}
CASES = [
    (name, metric, lower)
    for metrics, lower in ((LOWER, True), (HIGHER, False))
    for name, each in metrics.items()
    for metric in each
]


def loaded(name: str, *words: str) -> Recipe:
    return loader.load(ROOT / "recipes" / f"{name}.yaml", ("train.ema=0.9", *words))


def blocks(metric: str) -> tuple[str, ...]:
    return (
        f"best={{metric: {metric}}}",
        f"stop_when={{metric: {metric}, patience: 1}}",
        f"train.schedule={{name: plateau, metric: {metric}, patience: 1, gamma: 0.5}}",
        f"evaluations.{metric.partition('/')[0]}.every=1 epochs",
    )


def entered(recipe: Recipe, metric: str, values: list[float]) -> SimpleNamespace:
    """The state after evaluations, one a step."""
    name = metric.partition("/")[0]
    gate = Gate(Span(1, "steps"), 1, 1)
    plateau = Plateau(best=None, waited=0, cooling=0, reduced=0)
    state = SimpleNamespace(record=None, waited=0, best=[], step=0, plateau=plateau)
    state.events = SimpleNamespace(gates={f"evaluate.{name}": gate})
    for value in values:
        state.step += 1
        best.enter(state, recipe, name, {metric: value})
    return state


@pytest.mark.parametrize("name, metric, lower", CASES)
def test_the_best_value_is_kept_waited_for_and_reached(name, metric, lower):
    recipe = loaded(name, *blocks(metric))
    values = FALLING if lower else [-value for value in FALLING]
    state = entered(recipe, metric, values)
    assert [(record["value"], record["step"]) for record in state.best] == [(values[2], 3)]
    assert (state.record, state.waited) == (values[2], 1)
    assert (state.plateau["best"], state.plateau["reduced"]) == (values[2], 1)


@pytest.mark.parametrize("name, metric, lower", CASES)
def test_settings_are_ranked_in_the_same_direction(name, metric, lower):
    recipe = loaded(name, *blocks(metric))
    results = [
        Result(Child(str(value), RunRequest(Path(name)), recipe), None, value) for value in (0.4, 0.2, math.nan, 0.3)
    ]
    order = [result.child.title for result in sweep.rank(results, recipe.best.better)]
    assert order == (["0.2", "0.3", "0.4", "nan"] if lower else ["0.4", "0.3", "0.2", "nan"])


@pytest.mark.parametrize("key, block", [(word.partition("=")[0], word) for word in blocks("val/nll")[:3]])
def test_a_mode_that_contradicts_the_metric_is_refused(key, block):
    with pytest.raises(ConfigError) as error:
        loaded("convnext", block.replace("}", ", mode: max}"), "evaluations.val.every=1 epochs")
    (problem,) = error.value.problems
    assert (problem.path, problem.found, bool(problem.remedy)) == (f"{key}.mode", "max", True)
    assert problem.expected.startswith("min") and problem.override
    right = loaded("convnext", block.replace("}", ", mode: min}"), "evaluations.val.every=1 epochs")
    assert loader.digest(right) == loader.digest(loaded("convnext", block, "evaluations.val.every=1 epochs"))


@pytest.mark.parametrize("metric", ["val/odd", "val/threshold", "val/accuracy_std"])
def test_a_metric_without_a_direction_needs_a_mode_once(metric):
    for word in blocks(metric)[:3]:
        with pytest.raises(ConfigError, match=metric):
            loaded("convnext", word, "evaluations.val.every=1 epochs")
    words = [word.replace("}", ", mode: min}") if word.startswith("best") else word for word in blocks(metric)]
    recipe = loaded("convnext", *words)
    assert [rule.mode for _, _, rule in recipe.rules()] == ["min"] * 3 and all(r.lower for _, _, r in recipe.rules())


def test_a_misspelt_metric_is_named_with_the_right_one():
    with pytest.raises(ConfigError) as error:
        loaded("convnext", "best.metric=val/ema/topp1")
    assert error.value.problems[0].nearest == "val/ema/top1"


def test_a_resolved_recipe_states_its_modes_and_a_brief_one_does_not():
    recipe = loaded("convnext", *blocks("val/nll"))
    again = loader.parse(Recipe, loader.dump(recipe), "again", (), loader.TABLES)
    assert again == recipe and loader.tree(recipe)["best"] == {"metric": "val/nll", "mode": "min"}
    assert "mode: m" not in loader.brief(loaded("convnext", *blocks("val/nll")[:3]))
    assert "mode: min" in loader.brief(loaded("convnext", "best={metric: val/odd, mode: min}"))


# ---- Plug-ins --------------------------------------------------------------------------------------------------------


def declaring(monkeypatch: pytest.MonkeyPatch, name: str, directions: object) -> tuple[str, ...]:
    monkeypatch.syspath_prepend(PLUGIN)
    module = ModuleType(name)
    module.Task = type("Task", (importlib.import_module("toy").ToyTask,), {"directions": directions})
    module.TABLES = {"task": {"declares": f"{name}:Task"}}
    monkeypatch.setitem(sys.modules, name, module)
    return ("toy", name)


def test_a_task_declares_the_directions_of_its_metrics(monkeypatch):
    plugins = declaring(monkeypatch, "declares", {"off": "lower", "off.*": "lower", "gain": "higher"})
    for metric, mode in (("off", "min"), ("ema/off", "min"), ("off.left", "min"), ("gain", "max"), ("nll", "min")):
        words = ("task={name: declares}", f"best.metric=val/{metric}")
        recipe = loader.load(TOY, words, plugins)
        assert recipe.best is not None and (recipe.best.mode, recipe.best.lower) == (mode, mode == "min"), metric
        other = "max" if mode == "min" else "min"
        with pytest.raises(ConfigError, match=f"expected {mode}"):
            loader.load(TOY, (*words, f"best.mode={other}"), plugins)


def test_a_network_that_only_guesses_is_known_by_what_is_better():
    for metrics, declared, guesses in (
        ({"top1": 0.2}, {}, True), ({"top1": 0.4}, {}, False), ({"eer": 0.2}, {}, False), ({"eer": 0.4}, {}, True),
        ({"off": 0.2}, {"off": "lower"}, False), ({"off": 0.2}, {}, True), ({"off": math.nan}, {"off": "lower"}, True),
    ):  # fmt: skip
        scores = Scores(metrics, {}, chance=dict.fromkeys(metrics, 0.3))
        with pytest.raises(UserError, match="no better than guessing") if guesses else contextlib.nullcontext():
            best.refuse_chance("teacher", "val", scores, declared)


@pytest.mark.parametrize("name, directions", [("says_up", {"off": "up"}), ("contradicts", {"accuracy": "lower"})])
def test_a_declared_direction_that_cannot_be_is_refused(monkeypatch, name, directions):
    plugins = declaring(monkeypatch, name, directions)
    with pytest.raises(ConfigError, match="directions"):
        loader.load(TOY, ("task={name: declares}",), plugins)

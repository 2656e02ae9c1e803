"""`trainkit sweep`: train a recipe with several settings of some keys, and rank them.

An argument with several values is an axis: `optim.lr=0.1,0.05`. Every combination is a child of a parent run, and one
that has a finished run already is not trained again.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainkit.config import loader, stored_recipes
from trainkit.config.metric_table import SIGNS, Mode
from trainkit.config.run_request import RunRequest, load, values_of
from trainkit.errors import UserError
from trainkit.experiments.group import Child, Parent, Result, RunGroup, child_of
from trainkit.terminal import aligned, numbers

MOST = 1000
"""Settings that a sweep may have."""
_SHOWN = 20
"""Settings in the printed table; all are in MLflow."""


@dataclass(frozen=True)
class Settings(RunGroup):
    """The runs of a recipe with several settings, compared by its `best`."""

    word: ClassVar[str] = "sweep"
    kind: ClassVar[str] = "sweep"
    unit: ClassVar[str] = "settings"
    tolerant: ClassVar[bool] = True
    fixed: Sequence[str] = ()
    """Overrides that all settings share."""

    @classmethod
    def of(cls, request: RunRequest) -> Settings:
        """Return the settings in the order in which they are trained.

        Raises UserError for arguments that are not a sweep, and for settings that are invalid or not comparable.
        """
        fixed, axes = read(request)
        grid = itertools.islice(itertools.product(*axes.values()), MOST)
        every = [dict(zip(axes, values, strict=True)) for values in grid]
        if load(replace(request, overrides=words_of(fixed, every[0]))).best is None:
            found = f"{request.path.stem} does not name the metric by which settings are compared"
            raise UserError("best", found, "best: {metric: EVALUATION/SCORE}")
        if (count := math.prod(map(len, axes.values()))) > MOST:
            raise UserError("sweep", f"{count} settings", f"at most {MOST}", "give fewer values")
        children = [
            child_of(request, f"trial {number}", words_of(fixed, setting), setting)
            for number, setting in enumerate(every)
        ]
        _check_comparable(children)
        return cls(request, children, tuple(axes), fixed)

    def conclude(self, results: Sequence[Result], parent: Parent) -> None:
        """Tag the best run, log the scores in the order of the settings, and print the settings as a table."""
        if (best_by := self.recipe.best) is None:
            raise RuntimeError("a sweep of a recipe without `best`")
        for number, result in enumerate(results):
            if not math.isnan(result.value):
                parent.tracker.log(number, {f"sweep/{best_by.metric}": result.value})
        ranked = rank(results, best_by.better)
        best, run = ranked[0], _name(ranked[0])
        parent.tracker.tags({"trainkit.best": run, "trainkit.best_setting": best.child.overrides})
        parent.tracker.adopt(run, {"trainkit.best_of": parent.folder.name})
        columns: dict[str, list[Any]] = {"trial": [result.child.title for result in ranked]}
        columns |= {key: [result.child.setting[key] for result in ranked] for key in self.keys}
        columns[best_by.metric] = [result.value for result in ranked]
        columns |= {name: [getattr(result, name) for result in ranked] for name in ("step", "seconds", "error")}
        columns["run"] = [_name(result) for result in ranked]
        parent.tracker.table("tables/sweep.csv", columns)
        plugins = [word for plugin in self.request.plugins for word in ("--plugin", plugin)]
        own = words_of(self.fixed, best.child.setting)
        words = shlex.join([os.path.relpath(self.request.path), *plugins, *own])
        following = [
            (f"trainkit repeat {words}", "is the best setting better on average, or by luck?"),
            (f"trainkit promote {run}", "register the run of the best setting"),
        ]
        parent.conclude(self._described(ranked, best_by.metric), following)

    def _described(self, ranked: Sequence[Result], metric: str) -> str:
        """Return the settings as a table, best first."""
        best, shown = ranked[0], ranked[:_SHOWN]
        scores, seconds = numbers([one.value for one in shown]), numbers([one.seconds for one in shown])
        table = [["", *self.keys, metric, "at step", "seconds", "run"]]
        for result, score, took in zip(shown, scores, seconds, strict=True):
            title = f"{result.child.title}{' (failed)' if result.error else ''}"
            values = [result.child.setting[key] for key in self.keys]
            table.append([title, *values, score, str(result.step), took, _name(result)])
        lines = [f"{self.recipe.name}: {len(ranked)} settings", "", *aligned(table)]
        if len(ranked) > len(shown):
            lines.append(f"and {len(ranked) - len(shown)} more in MLflow")
        return "\n".join([*lines, "", f"Best: {_name(best)}  {best.child.overrides}"])


def read(request: RunRequest) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the arguments of a request with one value, and the values of the others by their keys.

    Raises UserError for arguments that are not a sweep.
    """
    fixed: list[str] = []
    axes: dict[str, tuple[str, ...]] = {}
    for word in request.overrides:
        key, _, text = (part.strip() for part in word.partition("="))
        values = tuple(values_of(text))
        if len(values) == 1 or key in axes:  # a key that is given twice is refused with the recipe
            fixed.append(word)
        elif "" in values:
            raise UserError(word, "a value is missing beside a comma", remedy=f"write it like {key}=0.1,0.05")
        else:
            axes[key] = values
    if not axes:
        load(request)
        expected = "an argument such as optim.lr=0.1,0.05"
        raise UserError("sweep", "no argument gives several values", expected, "of one setting: trainkit run")
    return fixed, axes


def words_of(fixed: Sequence[str], setting: Mapping[str, str]) -> tuple[str, ...]:
    """Return the overrides of a setting, after those that all settings share."""
    return (*fixed, *(f"{key}={value}" for key, value in setting.items()))


def rank(results: Sequence[Result], mode: Mode) -> list[Result]:
    """Sort results, the best first; those without a score, then those that failed, come last."""

    def place(result: Result) -> tuple[bool, bool, float]:
        lost = math.isnan(result.value)
        return bool(result.error), lost, 0.0 if lost else -SIGNS[mode] * result.value

    return sorted(results, key=place)


def _name(result: Result) -> str:
    return result.run.name if result.run is not None else "-"


def _check_comparable(children: Sequence[Child]) -> None:
    """Raise UserError for settings that one launch cannot train, or that nothing tells apart."""
    first, known = children[0].recipe, {}
    for child in children:
        recipe, where = child.recipe, child.overrides
        if (recipe.device, recipe.train.precision) != (first.device, first.train.precision):
            found = "a launch has one `device` and one `train.precision`, and a sweep is one launch"
            raise UserError(where, found, remedy="run each on its own, then trainkit compare")
        if stored_recipes.division(loader.tree(recipe)) != stored_recipes.division(loader.tree(first)):
            found = "not comparable: its data is divided in another way, and gives it other held-out data"
            raise UserError(where, found, remedy="keep one split, and vary `seed`")
        if recipe.best != first.best:
            raise UserError(where, "all settings must have the same `best`", remedy="leave it unchanged in the recipe")
        if same := known.get(digest := loader.digest(recipe)):
            remedy = "leave one of them out; keys that change only the speed are measured by trainkit bench"
            raise UserError(where, f"is the same experiment as {same}", remedy=remedy)
        known[digest] = where

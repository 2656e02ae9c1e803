"""`trainkit sweep`: train a recipe with several settings of some keys, and rank them.

An argument with several values is an axis: `optim.lr=0.1,0.05`. All combinations are tried (grid), or a number of
settings that Optuna proposes, for which an argument may also be a range: `optim.lr=log:1e-3..1e-1`. Each setting is a
child of a parent run. Settings are a pure function of the arguments and of the scores of earlier ones, so a sweep that
is started again tries the same settings and reuses their runs.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trainkit.config import loader, stored_recipes
from trainkit.config.metric_table import SIGNS, Mode
from trainkit.config.run_request import RunRequest, Sweep
from trainkit.config.schema import Best
from trainkit.errors import UserError
from trainkit.experiments import search_space
from trainkit.experiments.group import Child, Parent, Result, RunGroup, child_of
from trainkit.experiments.search_space import Axis, Setting, load_setting, words_of
from trainkit.terminal import aligned, numbers

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

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
    axes: Sequence[Axis] = ()

    @classmethod
    def of(cls, request: RunRequest) -> Settings:
        """Return the settings in the order in which they are tried; one example if Optuna proposes them.

        All are checked here. Raises UserError for arguments that are not a sweep, and for invalid settings.
        """
        how = request.sweep or Sweep()
        fixed, axes = search_space.read(request)
        first = {axis.key: axis.values[0] for axis in axes}
        if load_setting(request, fixed, first).best is None:
            found = f"{request.path.stem} does not name the metric by which settings are compared"
            raise UserError("best", found, "best: {metric: EVALUATION/SCORE}")
        if (count := how.proposed or math.prod(len(axis.values) for axis in axes)) > MOST:
            raise UserError("sweep", f"{count} settings", f"at most {MOST}", "take fewer, such as --random 50")
        if how.proposed:
            search_space.require_optuna()
            chosen = [first, *({**first, axis.key: value} for axis in axes for value in axis.values[1:])]
        else:
            every = itertools.product(*(axis.values for axis in axes))
            chosen = [dict(zip(first, values, strict=True)) for values in every]
        children = [_child(request, fixed, number, setting) for number, setting in enumerate(chosen)]
        _check_comparable(children)
        return cls(request, children[:1] if how.proposed else children, fixed, axes)

    @property
    def differ(self) -> Sequence[str]:
        """Keys of the recipe that children may have of their own; blocks too."""
        return [axis.key for axis in self.axes]

    @property
    def size(self) -> int:
        """How many runs it has in the end."""
        return (self.request.sweep or Sweep()).proposed or len(self.children)

    @property
    def identity(self) -> Sequence[str]:
        """The arguments of the axes, and how settings are chosen."""
        return (*self._axis_words(), repr(self.request.sweep))

    @property
    def best(self) -> Best:
        """The rule by which settings are compared."""
        if self.recipe.best is None:
            raise RuntimeError("a sweep of a recipe without `best`")
        return self.recipe.best

    def child(self, results: Sequence[Result], runtime: Runtime) -> Child:
        """Return the setting to train after these results."""
        how = self.request.sweep or Sweep()
        if not how.proposed:
            return self.children[len(results)]
        tried = [(dict(result.child.setting), result.value) for result in results]
        random = how.random is not None
        setting = runtime.on_main(lambda: search_space.propose(self.axes, tried, self.best.better, random))
        return _child(self.request, self.fixed, len(results), setting)

    def log(self, results: Sequence[Result], parent: Parent) -> None:
        """Log the newest score over the number of its setting."""
        if not math.isnan(value := results[-1].value):
            parent.tracker.log(len(results) - 1, {f"sweep/{self.best.metric}": value})

    def conclude(self, results: Sequence[Result], parent: Parent) -> None:
        """Name the best setting, and keep and print the scores of all."""
        ranked = rank(results, self.best.better)
        best, run = ranked[0].child, _name(ranked[0])
        parent.tracker.tags({"trainkit.best": run, "trainkit.best_setting": best.overrides})
        parent.tracker.adopt(run, {"trainkit.best_of": parent.folder.name})
        columns: dict[str, list[Any]] = {"trial": [result.child.title for result in ranked]}
        columns |= {key: [result.child.setting.get(key, "") for result in ranked] for key in best.setting}
        columns[self.best.metric] = [result.value for result in ranked]
        columns |= {name: [getattr(result, name) for result in ranked] for name in ("step", "seconds", "error")}
        columns["run"] = [_name(result) for result in ranked]
        parent.tracker.table("tables/sweep.csv", columns)
        plugins = [word for plugin in self.request.plugins for word in ("--plugin", plugin)]
        words = shlex.join([os.path.relpath(self.request.path), *plugins, *words_of(self.fixed, best.setting)])
        following = [
            (f"trainkit repeat {words}", "is the best setting better on average, or by luck?"),
            (f"trainkit promote {run}", "register the run of the best setting"),
        ]
        parent.conclude(self.describe(ranked), following)

    def describe(self, ranked: Sequence[Result]) -> str:
        """Return the settings as a table, best first."""
        best, shown = ranked[0], ranked[:_SHOWN]
        scores, seconds = numbers([one.value for one in shown]), numbers([one.seconds for one in shown])
        table = [["", *best.child.setting, self.best.metric, "at step", "seconds", "run"]]
        for result, score, took in zip(shown, scores, seconds, strict=True):
            state = " (failed)" if result.error else ""
            values = [result.child.setting.get(key, "") for key in best.child.setting]
            table.append([f"{result.child.title}{state}", *values, score, str(result.step), took, _name(result)])
        lines = [f"{self.recipe.name}: {len(ranked)} settings", "", *aligned(table)]
        if len(ranked) > len(shown):
            lines.append(f"and {len(ranked) - len(shown)} more in MLflow")
        return "\n".join([*lines, "", f"Best: {_name(best)}  {best.child.overrides}"])

    def _axis_words(self) -> list[str]:
        return [word for word in self.request.overrides if word not in self.fixed]


def rank(results: Sequence[Result], mode: Mode) -> list[Result]:
    """Sort results, the best first; those without a score, then those that failed, come last."""

    def place(result: Result) -> tuple[bool, bool, float]:
        lost = math.isnan(result.value)
        return bool(result.error), lost, 0.0 if lost else -SIGNS[mode] * result.value

    return sorted(results, key=place)


def _child(request: RunRequest, fixed: Sequence[str], number: int, setting: Setting) -> Child:
    return child_of(request, f"trial {number}", words_of(fixed, setting), setting)


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

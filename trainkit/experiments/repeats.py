"""Train a recipe several times, with several seeds or with each fold of its data held out, and combine the scores.

Each run is the one that `seed=K` or `data.fold=K` would start, a child of a parent run. The parent run gets the mean
and the standard deviation of every final score, and intervals: of seeds those of the mean (`interval`), of folds those
over all samples, each of which was held out once (`fold_rows`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.data import kinds
from trainkit.errors import UserError, few
from trainkit.experiments import fold_rows
from trainkit.experiments.group import Child, Digests, Parent, Result, RunGroup, child_of
from trainkit.interfaces import DividesIntoFolds
from trainkit.metrics import significance
from trainkit.terminal import aligned, chosen, numbers
from trainkit.tracking import journal

_MEASURED = ("speed/", "time/")
"""Beginnings of scores that depend on the machine and have no spread of their own."""


@dataclass(frozen=True)
class Repetition(RunGroup):
    """Several runs of a recipe whose scores are summed up. A subclass says what varies, and how sure the scores are."""

    metric: ClassVar[str]
    """Beginning of the metrics of intervals: `seeds/val/top1_low`."""
    ends: ClassVar[tuple[str, ...]]
    """Endings of these metrics, in the order of `intervals`."""
    columns: ClassVar[tuple[str, ...]]
    """Their columns in the table."""
    heads: ClassVar[tuple[str, ...]]
    """Their heads in the printed table, where the last two, the ends of the interval, are one."""

    @abstractmethod
    def intervals(
        self, values: Mapping[str, Sequence[float]], results: Sequence[Result], parent: Parent
    ) -> tuple[Mapping[str, tuple[float, ...]], Mapping[str, str]]:
        """Return a value for each of `ends` by score, and a note on each evaluation for which there is one."""

    def conclude(self, results: Sequence[Result], parent: Parent) -> None:
        """Log mean, standard deviation and interval of each score, and print them as tables."""
        values, step = final_scores(results)
        found, notes = self.intervals(values, results, parent)
        measured = {name for name in values if name.startswith(_MEASURED)}
        scores = {f"final/{name}": mean(own) for name, own in values.items()}
        scores |= {f"std/{name}": std(own) for name, own in values.items() if name not in measured}
        for name in found.keys() - measured:
            scores |= {f"{self.metric}/{name}{end}": v for end, v in zip(self.ends, found[name], strict=True)}
        parent.tracker.log(step, scores)
        columns: dict[str, Any] = {"score": list(values), "mean": list(map(mean, values.values()))}
        columns["std"] = list(map(std, values.values()))
        for k, column in enumerate(self.columns):
            columns[column] = [found[name][k] if name in found else None for name in values]
        for k, result in enumerate(results):
            columns[result.child.title.replace(" ", "_")] = [own[k] for own in values.values()]
        parent.tracker.table(f"tables/{self.word}.csv", columns)
        lines = [f"{self.recipe.name}, {len(results)} {self.unit}", ""]
        for evaluation in self.recipe.evaluations:
            table = self._table(evaluation, values, [result.child.title for result in results], found)
            note = notes.get(evaluation)
            lines += [*table, *([note] if note else []), ""] if table else []
        lines += [f"{result.child.title}  {result.run.name}" for result in results if result.run]
        parent.conclude("\n".join([*lines, ""]), self._following(results, parent))

    def _table(
        self,
        evaluation: str,
        values: Mapping[str, Sequence[float]],
        titles: Sequence[str],
        found: Mapping[str, tuple[float, ...]],
    ) -> list[str]:
        """Return the scores of an evaluation in lines: each run, mean, standard deviation and interval."""
        shown, left_out = chosen(list(values), evaluation)
        if not shown:
            return []
        heads = self.heads if any(name.startswith(f"{evaluation}/") for name in found) else ()
        table = [[evaluation, *titles, "mean", "std", *heads]]
        for name in shown:
            own = found.get(name, (math.nan,) * len(self.ends))
            centre, spread, *words = numbers([mean(values[name]), std(values[name]), *own])
            words[-2:] = ["-" if math.isnan(own[-2]) else f"{words[-2]} to {words[-1]}"]
            row = [name.removeprefix(f"{evaluation}/"), *numbers(values[name]), centre, spread]
            table.append([*row, *words[: len(heads)]])
        return [*aligned(table), *([f"and {left_out} more in MLflow"] if left_out else [])]

    def _following(self, results: Sequence[Result], parent: Parent) -> list[tuple[str, str]]:
        """Return commands that may follow, each with its purpose."""
        found = [(f"trainkit compare OTHER_RUN {parent.folder.name}", "means and intervals against another run")]
        known = {result.value: result.run for result in results if result.run and math.isfinite(result.value)}
        if self.recipe.best is not None and known:
            best = known[(min if self.recipe.best.lower else max)(known)]
            found.append((f"trainkit promote {best.name}", "register the child run with the best score"))
        return found


@dataclass(frozen=True)
class Seeds(Repetition):
    """The runs of a recipe with several seeds."""

    word: ClassVar[str] = "seeds"
    kind: ClassVar[str] = "repetition"
    unit: ClassVar[str] = "seeds"
    metric: ClassVar[str] = "seeds"
    ends: ClassVar[tuple[str, ...]] = ("_low", "_high")
    columns: ClassVar[tuple[str, ...]] = ("low", "high")
    heads: ClassVar[tuple[str, ...]] = ("95 % CI of the mean",)

    @classmethod
    def of(cls, request: RunRequest) -> Seeds:
        """Return a child for each seed, from the recipe's on. Raises UserError for fewer than two."""
        recipe, count = load(request), request.seeds or 0
        if count < 2:
            raise UserError("--seeds", f"{count}", "2 or more", "one run has no spread")
        seeds = range(recipe.seed, recipe.seed + count)
        return cls(request, _children(request, recipe, "seed", "seed", seeds), ("seed",))

    def check_data(self, digests: Digests) -> None:
        """Raise UserError where the seeds would be evaluated on different data, so that no spread says anything."""
        each = [evaluated for _, evaluated in digests.values()]
        names = [name for name in each[0] if len({evaluated[name] for evaluated in each}) > 1]
        if names:
            found = f"not comparable: {few(names)} is other data for each seed, drawn by the seed of the training"
            raise UserError("--seeds", found, "the same data for every seed", "draw it by a seed of its own")

    def intervals(
        self, values: Mapping[str, Sequence[float]], results: Sequence[Result], parent: Parent
    ) -> tuple[Mapping[str, tuple[float, ...]], Mapping[str, str]]:
        """Return the ends of the interval of the mean by score."""
        return {name: interval(own) for name, own in values.items()}, {}


@dataclass(frozen=True)
class Folds(Repetition):
    """The runs of a cross-validation: each part of the data is held out once."""

    word: ClassVar[str] = "folds"
    kind: ClassVar[str] = "cross-validation"
    unit: ClassVar[str] = "folds"
    metric: ClassVar[str] = "pooled"
    ends: ClassVar[tuple[str, ...]] = ("", "_low", "_high")
    columns: ClassVar[tuple[str, ...]] = ("all", "all_low", "all_high")
    heads: ClassVar[tuple[str, ...]] = ("all", "95 %")

    @classmethod
    def of(cls, request: RunRequest) -> Folds:
        """Return a child for each fold of the data. Raises UserError for data without folds."""
        recipe = load(request)
        if not isinstance(recipe.data, DividesIntoFolds):
            found = f"the data of {recipe.name}, {kinds.name(recipe.data)}, has no keys `folds` and `fold`"
            raise UserError("--folds", found, "data that divides into folds, such as volumes")
        if any(word.partition("=")[0].strip() == "data.fold" for word in request.overrides):
            raise UserError("--folds", "data.fold is given too", remedy="leave it out: --folds trains every fold")
        if recipe.data.folds < 2:
            raise UserError("data.folds", f"{recipe.data.folds}", "2 or more", "cross-validation needs two parts")
        folds = range(recipe.data.folds)
        return cls(request, _children(request, recipe, "fold", "data.fold", folds), ("data.fold",))

    def intervals(
        self, values: Mapping[str, Sequence[float]], results: Sequence[Result], parent: Parent
    ) -> tuple[Mapping[str, tuple[float, ...]], Mapping[str, str]]:
        """Return the scores over the samples of all folds, with their intervals, and keep these samples' rows."""
        runs = [result.run for result in results if result.run is not None]
        rows = {name: fold_rows.read(runs, name, parent.store) for name in self.recipe.evaluations}
        pooled = fold_rows.pool(values, rows)
        notes = dict(pooled.notes)
        for name, table in pooled.tables.items():
            parent.tracker.table(f"rows/{name}_folds.parquet", table)
            notes[name] = f"all: the {len(table['fold'])} samples of all folds, each once"
        return pooled.scores, notes


def _children(request: RunRequest, recipe: Recipe, title: str, key: str, values: range) -> list[Child]:
    if not recipe.evaluations:
        raise UserError(f"--{title}s", f"{recipe.name} has no evaluations", "one whose scores are averaged")
    words = [word for word in request.overrides if word.partition("=")[0].strip() != key]
    return [child_of(request, f"{title} {value}", (*words, f"{key}={value}")) for value in values]


# ---- The scores together ---------------------------------------------------------------------------------------------


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the ends of Student's t-interval of the mean over the finite values; two NaN for fewer than two.

    Mean +- t * std / sqrt(n), with the quantile t of n - 1 degrees of freedom. It assumes that the scores of seeds are
    normally distributed, which few seeds cannot show.
    """
    found = _finite(values)
    if len(found) < 2:
        return math.nan, math.nan
    half = significance.t_quantile(len(found) - 1, level) * std(found) / math.sqrt(len(found))
    return mean(found) - half, mean(found) + half


def mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    found = _finite(values)
    return float(np.mean(found)) if found else math.nan


def std(values: Sequence[float]) -> float:
    """Return the standard deviation (n - 1) of the finite values; NaN for fewer than two."""
    found = _finite(values)
    return float(np.std(found, ddof=1)) if len(found) > 1 else math.nan


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def final_scores(results: Sequence[Result]) -> tuple[dict[str, list[float]], int]:
    """Return final scores by name, a value for each run, NaN where it has none; and the last step.

    The primary evaluation comes first. The interval ends of single runs are left out: beside other runs they say
    nothing.
    """
    runs = [result.run for result in results if result.run is not None]
    last = [
        {name.removeprefix("final/"): points[-1] for name, points in own.items() if name.startswith("final/")}
        for own in (journal.read(run.journal).metrics for run in runs)
    ]
    names = list(dict.fromkeys(name for own in last for name in own if not name.endswith(("_low", "_high"))))
    best = results[0].child.recipe.best
    names.sort(key=lambda name: best is None or not name.startswith(f"{best.metric.partition('/')[0]}/"))
    values = {name: [own[name].value if name in own else math.nan for own in last] for name in names}
    return values, max((point.step for own in last for point in own.values()), default=0)

"""Train a recipe several times, with several seeds or with each fold of its data held out, and combine the scores.

Each run is the one that `seed=K` or `data.fold=K` would start, a child of a parent run. The parent run gets the mean
and the standard deviation of every final score, and intervals: of seeds those of the mean (`interval`), of folds those
over all samples, each of which was held out once (`fold_rows`).
"""

from __future__ import annotations

import math
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
_NONE = (math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Seeds(RunGroup):
    """The runs of a recipe with several seeds."""

    word: ClassVar[str] = "seeds"
    kind: ClassVar[str] = "repetition"
    unit: ClassVar[str] = "seeds"

    @classmethod
    def of(cls, request: RunRequest) -> Seeds:
        """Return a child for each seed, from the recipe's on. Raises UserError for fewer than two."""
        recipe, count = load(request), request.seeds or 0
        if count < 2:
            raise UserError("--seeds", f"{count}", "2 or more", "one run has no spread")
        return cls(request, _children(request, recipe, "seed", "seed", range(recipe.seed, recipe.seed + count)))

    @property
    def differ(self) -> Sequence[str]:
        """Keys of the recipe that children may have of their own."""
        return ("seed",)

    def check_data(self, digests: Digests) -> None:
        """Raise UserError where the seeds would be evaluated on different data, so that no spread says anything."""
        each = [evaluated for _, evaluated in digests.values()]
        names = [name for name in each[0] if len({evaluated[name] for evaluated in each}) > 1]
        if names:
            found = f"not comparable: {few(names)} is other data for each seed, drawn by the seed of the training"
            raise UserError("--seeds", found, "the same data for every seed", "draw it by a seed of its own")

    def conclude(self, results: Sequence[Result], parent: Parent) -> None:
        """Log mean, standard deviation and the interval of the mean of each score."""
        values, step = final_scores(results)
        ends = {name: (mean(values[name]), *interval(values[name])) for name in values}
        own = {name: pair for name, pair in ends.items() if not name.startswith(_MEASURED)}
        parent.tracker.log(step, {f"seeds/{name}_low": low for name, (_, low, _) in own.items()})
        parent.tracker.log(step, {f"seeds/{name}_high": high for name, (_, _, high) in own.items()})
        table = {key: [ends[name][k] for name in values] for k, key in ((1, "low"), (2, "high"))}
        _summarise(self, values, step, results, parent, table)
        heads = ("95 % CI of the mean",)
        tables = {name: _table(name, values, parent.children, heads, ends) for name in self.recipe.evaluations}
        _say(self, tables, (), results, parent)


@dataclass(frozen=True)
class Folds(RunGroup):
    """The runs of a cross-validation: each part of the data is held out once."""

    word: ClassVar[str] = "folds"
    kind: ClassVar[str] = "cross-validation"
    unit: ClassVar[str] = "folds"

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
        return cls(request, _children(request, recipe, "fold", "data.fold", range(recipe.data.folds)))

    @property
    def differ(self) -> Sequence[str]:
        """Keys of the recipe that children may have of their own."""
        return ("data.fold",)

    def conclude(self, results: Sequence[Result], parent: Parent) -> None:
        """Log mean and standard deviation of each score, and the scores over the samples of all folds."""
        values, step = final_scores(results)
        runs = [result.run for result in results if result.run is not None]
        pooled = fold_rows.pool(
            values, {name: fold_rows.read(runs, name, parent.store) for name in self.recipe.evaluations}
        )
        for name, table in pooled.tables.items():
            parent.tracker.table(f"rows/{name}_folds.parquet", table)
        for k, end in enumerate(("", "_low", "_high")):
            parent.tracker.log(step, {f"pooled/{name}{end}": own[k] for name, own in pooled.scores.items()})
        ends = {name: pooled.scores.get(name) for name in values}
        columns = {
            key: [own and own[k] for own in ends.values()] for k, key in enumerate(("all", "all_low", "all_high"))
        }
        _summarise(self, values, step, results, parent, columns)
        tables = {}
        for name in self.recipe.evaluations:
            if name not in pooled.tables:
                tables[name] = _table(name, values, parent.children, (), {})
                continue
            tables[name] = _table(name, values, parent.children, ("all", "95 %"), pooled.scores)
            tables[name].append(f"all: the {len(pooled.tables[name]['fold'])} samples of all folds, each once")
        _say(self, tables, pooled.notes, results, parent)


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


def _summarise(
    group: RunGroup,
    values: Mapping[str, Sequence[float]],
    step: int,
    results: Sequence[Result],
    parent: Parent,
    more: Mapping[str, list[Any]],
) -> None:
    """Log mean and standard deviation of each score, and all scores with `more` columns as a table."""
    parent.tracker.log(step, {f"final/{name}": mean(own) for name, own in values.items()})
    spread = {f"std/{name}": std(own) for name, own in values.items() if not name.startswith(_MEASURED)}
    parent.tracker.log(step, spread)
    columns: dict[str, Any] = {"score": list(values), "mean": list(map(mean, values.values()))}
    columns |= {"std": list(map(std, values.values())), **more}
    for k, result in enumerate(results):
        columns[result.child.title.replace(" ", "_")] = [own[k] for own in values.values()]
    parent.tracker.table(f"tables/{group.word}.csv", columns)


def _table(
    evaluation: str,
    values: Mapping[str, Sequence[float]],
    runs: Mapping[str, str],
    heads: Sequence[str],
    ends: Mapping[str, tuple[float, float, float]],
) -> list[str]:
    """Return a table of the scores of an evaluation: each run, mean, standard deviation and, under `heads`, `ends`.

    `ends`: a value and its interval; with one head the interval alone is shown.
    """
    shown, left_out = chosen(list(values), evaluation)
    table = [[evaluation, *runs, "mean", "std", *heads]]
    for name in shown:
        centre, spread, *own = numbers([mean(values[name]), std(values[name]), *ends.get(name, _NONE)])
        both = [own[0], "-" if own[1] == "-" else f"{own[1]} to {own[2]}"]
        table.append([name.removeprefix(f"{evaluation}/"), *numbers(values[name]), centre, spread])
        table[-1] += both[len(both) - len(heads) :]
    lines = aligned(table) if shown else []
    return [*lines, f"and {left_out} more in MLflow"] if left_out else lines


def _say(
    group: RunGroup,
    tables: Mapping[str, Sequence[str]],
    notes: Sequence[str],
    results: Sequence[Result],
    parent: Parent,
) -> None:
    """Print the tables, the run of each seed or fold, and commands that may follow."""
    lines = [f"{group.recipe.name}, {len(results)} {group.unit}", ""]
    for table in tables.values():
        lines += [*table, ""] if table else []
    lines += [*notes, *(f"{title}  {name}" for title, name in parent.children.items()), ""]
    following = [(f"trainkit compare OTHER_RUN {parent.folder.name}", "means and intervals against another run")]
    if (best := group.recipe.best) is not None:
        known = {result.value: result.run for result in results if result.run and math.isfinite(result.value)}
        if known:
            chosen_run = known[(min if best.lower else max)(known)]
            following.append((f"trainkit promote {chosen_run.name}", "register the child run with the best score"))
    parent.conclude("\n".join(lines), following)

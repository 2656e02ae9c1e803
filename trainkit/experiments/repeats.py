"""Train a recipe several times, with several seeds or with each fold of its data held out, and combine the scores.

Each run is the one that `seed=K` or `data.fold=K` would start, a child of a parent run. The parent run gets the mean
and the standard deviation of every final score, and intervals: of seeds those of the mean (`interval`), of folds those
over all samples, each of which was held out once (`fold_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.data import kinds
from trainkit.errors import UserError, few
from trainkit.experiments import fold_rows, group
from trainkit.experiments.group import Child, Parent, RunGroup, child_of
from trainkit.interfaces import DividesIntoFolds
from trainkit.metrics import significance
from trainkit.terminal import aligned, chosen, numbers
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

_MEASURED = ("speed/", "time/")
"""Beginnings of scores that depend on the machine and have no spread of their own."""


@dataclass(frozen=True)
class Axis:
    """The key in which the runs of a repetition differ, and the names of their intervals."""

    word: str
    """`seeds`: the parent is RECIPE-seeds-..., the option `--seeds`, the table `tables/seeds.csv`."""
    title: str
    """`seed`: the children are `seed 3`, `seed 4`."""
    key: str
    kind: str
    """What the whole is called."""
    metric: str
    """Beginning of the metrics of intervals: `seeds/val/top1_low`."""
    ends: tuple[str, ...]
    """Endings of these metrics."""
    columns: tuple[str, ...]
    """Their columns in the table."""
    heads: tuple[str, ...]
    """Their heads in the printed table, in which the last two are one."""


SEEDS = Axis(
    "seeds", "seed", "seed", "repetition", "seeds", ("_low", "_high"), ("low", "high"), ("95 % CI of the mean",)
)
FOLDS = Axis(
    "folds", "fold", "data.fold", "cross-validation", "pooled", ("", "_low", "_high"), ("all", "all_low", "all_high"),
    ("all", "95 %"),
)  # fmt: skip


def axis_of(request: RunRequest) -> Axis:
    """Return what is varied by a request for several seeds or for folds."""
    return FOLDS if request.folds else SEEDS


def children_of(request: RunRequest) -> list[Child]:
    """Return a child for each seed, from the recipe's on, or for each fold of the data.

    Raises UserError for fewer than two, for data without folds, and for a recipe without evaluations.
    """
    recipe, axis = load(request), axis_of(request)
    values = _folds(request, recipe) if request.folds else _seeds(request, recipe)
    if not recipe.evaluations:
        raise UserError(f"--{axis.word}", f"{recipe.name} has no evaluations", "one whose scores are averaged")
    words = [word for word in request.overrides if word.partition("=")[0].strip() != axis.key]
    return [child_of(request, f"{axis.title} {value}", (*words, f"{axis.key}={value}")) for value in values]


def _seeds(request: RunRequest, recipe: Recipe) -> range:
    count = request.seeds or 0
    if count < 2:
        raise UserError("--seeds", f"{count}", "2 or more", "one run has no spread")
    return range(recipe.seed, recipe.seed + count)


def _folds(request: RunRequest, recipe: Recipe) -> range:
    if not isinstance(recipe.data, DividesIntoFolds):
        found = f"the data of {recipe.name}, {kinds.name(recipe.data)}, has no keys `folds` and `fold`"
        raise UserError("--folds", found, "data that is divided by patients, such as `volumes`")
    for word in request.overrides:
        if word.partition("=")[0].strip() == FOLDS.key:
            remedy = "leave one of them out: --folds trains every fold"
            raise UserError("--folds", f"{word} is given too", remedy=remedy)
    if recipe.data.folds < 2:
        raise UserError("data.folds", f"{recipe.data.folds}", "2 or more", "cross-validation needs two parts")
    return range(recipe.data.folds)


def repeat(request: RunRequest, children: Sequence[Child], runtime: Runtime, store: Store, train: group.Train) -> str:
    """Train every child that has no finished run, and summarise them in a parent run. Returns its status.

    Raises UserError for errors that the user can correct; the next attempt reuses the finished runs.
    """
    axis, digests = axis_of(request), {}
    keys = [group.child_key(child, digests) for child in children]
    if axis is SEEDS:
        _refuse_other_data([scored for _, scored in digests.values()])
    whole = RunGroup(request, children, axis.word, axis.kind, axis.word, (axis.key,))
    with group.parent_run(whole, runtime, store, train) as parent:
        runs = parent.run_children(children, keys)
        if runs is None:
            return "KILLED"
        runtime.on_main(lambda: _conclude(axis, runs, parent))
    return "FINISHED"


def _refuse_other_data(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise UserError where the seeds would be evaluated on different data, so that no spread of them says anything."""
    names = [name for name in digests[0] if len({scored[name] for scored in digests}) > 1]
    if names:
        found = f"not comparable: {few(names)} is other data for each seed, drawn by the seed of the training"
        raise UserError("--seeds", found, "the same data for every seed", "draw it by a seed of its own")


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


def final_scores(runs: Sequence[RunFolder]) -> tuple[dict[str, list[float]], int]:
    """Return final scores by name, a value for each run, NaN where it has none; and the last step."""
    histories = [journal.read(run.journal).metrics for run in runs]
    last = [
        {name: points[-1] for name, points in metrics.items() if name.startswith("final/")} for metrics in histories
    ]
    names = dict.fromkeys(name for points in last for name in points)
    values = {
        name.removeprefix("final/"): [points[name].value if name in points else math.nan for points in last]
        for name in names
    }
    return values, max((point.step for points in last for point in points.values()), default=0)


def _conclude(axis: Axis, runs: Sequence[RunFolder], parent: Parent) -> None:
    """Sum the runs up in the parent run and in the terminal."""
    tracker, recipe = parent.tracker, parent.group.recipe
    values, step = final_scores(runs)
    lead = recipe.best.metric.partition("/")[0] if recipe.best else ""
    # The interval ends of single runs are left out: beside other runs they say nothing.
    names = [name for name in values if not name.endswith(("_low", "_high"))]
    names.sort(key=lambda name: not name.startswith(f"{lead}/"))
    pooled = fold_rows.Pooled()
    ends: Mapping[str, tuple[float, ...]] = {name: interval(values[name]) for name in names}
    if axis is FOLDS:
        rows = {name: fold_rows.read(runs, name, parent.store) for name in recipe.evaluations}
        pooled = fold_rows.pool(values, rows)
        ends = pooled.scores
        for name, table in pooled.tables.items():
            fold_rows.keep(name, table, tracker)
    scores = {f"final/{name}": mean(values[name]) for name in names}
    scores |= {f"std/{name}": std(values[name]) for name in names if not name.startswith(_MEASURED)}
    for name, own in ends.items():
        if not name.startswith(_MEASURED):
            scores |= {f"{axis.metric}/{name}{end}": value for end, value in zip(axis.ends, own, strict=True)}
    tracker.log(step, scores)
    columns: dict[str, Any] = {"score": names, "mean": [mean(values[name]) for name in names]}
    columns["std"] = [std(values[name]) for name in names]
    for k, column in enumerate(axis.columns):
        columns[column] = [ends[name][k] if name in ends else None for name in names]
    for k, title in enumerate(parent.children):
        columns[title.replace(" ", "_")] = [values[name][k] for name in names]
    tracker.table(f"tables/{axis.word}.csv", columns)
    text = describe(recipe, axis, values, ends, parent.children, pooled)
    parent.conclude(text, _following(parent.folder.name, recipe, runs))


def describe(
    recipe: Recipe,
    axis: Axis,
    values: Mapping[str, Sequence[float]],
    ends: Mapping[str, tuple[float, ...]],
    runs: Mapping[str, str],
    pooled: fold_rows.Pooled,
) -> str:
    """Return the final scores of all runs as a table for each evaluation, and the run of each seed or fold."""
    unknown = (math.nan,) * len(axis.ends)

    def of_score(name: str) -> tuple[float, ...]:
        return ends.get(name, unknown)

    lines = [f"{recipe.name}, {len(runs)} {axis.word}", ""]
    for evaluation in recipe.evaluations:
        together = axis is SEEDS or evaluation in pooled.tables
        heads = [*runs, "mean", "std", *axis.heads * together]
        table = _table(evaluation, values, heads, of_score if together else lambda _: ())
        if table and evaluation in pooled.tables:
            table.append(f"all: the {len(pooled.tables[evaluation]['fold'])} samples of all folds, each once")
        lines += [*table, ""] if table else []
    return "\n".join([*lines, *pooled.notes, *(f"{title}  {name}" for title, name in runs.items()), ""])


def _table(
    evaluation: str,
    values: Mapping[str, Sequence[float]],
    heads: Sequence[str],
    ends: Callable[[str], Sequence[float]],
) -> list[str]:
    """Return a table of the scores of an evaluation in lines: each run, mean, standard deviation and interval.

    `ends` returns numbers for a score, of which the last two are interval ends, or nothing.
    """
    shown, left_out = chosen(list(values), evaluation)
    table = [[evaluation, *heads]]
    for name in shown:
        own = ends(name)
        mean_word, std_word, *words = numbers([mean(values[name]), std(values[name]), *own])
        if words:
            words[-2:] = ["-" if math.isnan(own[-2]) else f"{words[-2]} to {words[-1]}"]
        table.append([name.removeprefix(f"{evaluation}/"), *numbers(values[name]), mean_word, std_word, *words])
    lines = aligned(table) if shown else []
    return [*lines, f"and {left_out} more in MLflow"] if left_out else lines


def _following(parent: str, recipe: Recipe, runs: Sequence[RunFolder]) -> list[tuple[str, str]]:
    """Return commands that may follow, each with its purpose."""
    found = [(f"trainkit compare OTHER_RUN {parent}", "means and intervals against another run or parent run")]
    if recipe.best is not None:
        points = [journal.read(run.journal).metrics.get(f"best/{recipe.best.metric}") for run in runs]
        scores = {run.name: own[-1].value for run, own in zip(runs, points, strict=True) if own}
        best = (min if recipe.best.lower else max)(scores, key=lambda name: scores[name], default="")
        found += [(f"trainkit promote {best}", "register the child run with the best score")] if best else []
    return found

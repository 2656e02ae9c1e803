"""Cross-validation: train a recipe once per fold of its data, with that fold held out, and combine the scores.

Each fold is the run that `data.fold=K` would start, a child of a parent run in MLflow. Folds that finished with this
recipe and data are reused; `--resume` continues interrupted ones. The parent run gets the mean and standard deviation
of every final score, and tables with every sample once, with the fold in which it was held out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.analysis import saved_rows
from trainkit.analysis.saved_rows import Columns
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.data import kinds
from trainkit.errors import UserError
from trainkit.experiments import group
from trainkit.experiments.group import Child, Parent, RunGroup, child_of
from trainkit.interfaces import DividesIntoFolds
from trainkit.metrics import segmentation_3d
from trainkit.metrics.significance import nan_mean
from trainkit.tracking.mlflow_errors import Away
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

_CSV_ROWS = 10_000
"""Longest table of samples that is also kept as CSV, which MLflow's page shows."""


def validate(request: RunRequest, folds: Sequence[Child], runtime: Runtime, store: Store, train: group.Train) -> str:
    """Train every fold that has no finished run, and summarise them in a parent run. Returns its status.

    Raises UserError for errors that the user can correct; the next attempt reuses the finished folds.
    """
    first, digests = folds[0].recipe, {}
    keys = [group.child_key(fold, digests) for fold in folds]
    digest = group.group_digest(folds)
    whole = RunGroup(request, first, "folds", "cross-validation", len(folds), "folds", ("data.fold",), digest)
    with group.parent_run(whole, runtime, store, train) as parent:
        runs = parent.run_children(folds, keys)
        if runs is None:
            return "KILLED"
        runtime.on_main(lambda: _conclude(first, runs, parent))
    return "FINISHED"


# ---- The scores together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Final scores of all folds."""

    values: dict[str, list[float]]
    """Name of a score (`held_out/dice_mean`) to its value in each fold; NaN where a fold has none."""
    step: int
    """Greatest step at which one was measured."""
    tables: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Evaluation to the rows of all folds, each sample once, with the column `fold`."""
    pooled: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Means over the samples of all folds together, and the ends of their 95 % intervals (bootstrap over patients)."""
    notes: tuple[str, ...] = ()

    def mean(self, name: str) -> float:
        """Return the mean over the folds that have the score."""
        return group.mean(self.values[name])

    def std(self, name: str) -> float:
        """Return the standard deviation (n - 1) over the folds that have the score; NaN for fewer than two."""
        return group.std(self.values[name])


def _conclude(recipe: Recipe, runs: Sequence[RunFolder], parent: Parent) -> None:
    """Sum the folds up in the parent run and in the terminal."""
    tracker, store = parent.tracker, parent.store
    values, step = group.final_scores(runs)
    rows = {name: _rows(runs, name, store) for name in recipe.evaluations}
    found = summarise(values, step, rows)
    names = group.summary_names(recipe, found.values)
    scores = group.summary_metrics(names, found.values)
    for name, (value, low, high) in found.pooled.items():
        scores |= {f"pooled/{name}": value, f"pooled/{name}_low": low, f"pooled/{name}_high": high}
    tracker.log(step, scores)
    columns: dict[str, Any] = {"score": names}
    columns |= {"mean": [found.mean(name) for name in names], "std": [found.std(name) for name in names]}
    together = [found.pooled.get(name, (None, None, None)) for name in names]
    columns |= {key: [ends[k] for ends in together] for k, key in enumerate(("all", "all_low", "all_high"))}
    columns |= {f"fold_{k}": [found.values[name][k] for name in names] for k in range(len(runs))}
    tracker.table("tables/folds.csv", columns)
    for name, table in found.tables.items():
        tracker.table(f"rows/{name}_folds.parquet", table)
        plain = {key: column for key, column in table.items() if column.ndim == 1}
        if len(table["fold"]) <= _CSV_ROWS:
            tracker.table(f"tables/{name}_folds.csv", plain)
    parent.conclude(describe(recipe, found, runs), group.following(parent.folder.name, recipe, runs))


def summarise(
    values: dict[str, list[float]], step: int, rows: Mapping[str, Sequence[Mapping[str, np.ndarray] | None]]
) -> Summary:
    """Combine the folds: their scores, and the rows of each evaluation.

    Rows are combined only if no `id` is in two folds: otherwise a set that all folds share would count several times.
    """
    tables, pooled, notes = {}, {}, []
    for name, kept in rows.items():
        parts = [part for part in kept if part is not None]
        if len(parts) < len(kept):
            notes.append(f"{name}: no table of all folds; not every run kept its rows")
            continue
        if any("id" not in part for part in parts):
            notes.append(f"{name}: no table of all folds; its rows have no `id`")
            continue
        ids = np.concatenate([part["id"] for part in parts])
        # Within a fold rows may share an id: patches of one case.
        if sum(len(set(part["id"].tolist())) for part in parts) > len(set(ids.tolist())):
            notes.append(f"{name}: no table of all folds; the same samples are evaluated in several folds")
            continue
        shared = [key for key in parts[0] if all(key in part for part in parts)]
        fold = np.repeat(np.arange(len(parts)), [len(part["id"]) for part in parts])
        tables[name] = {"id": ids, "fold": fold}
        tables[name] |= {key: _joined([part[key] for part in parts]) for key in shared if key not in ("id", "fold")}
        own = {key.removeprefix(f"{name}/"): v for key, v in values.items() if key.startswith(f"{name}/")}
        for score, columns in _means(own, parts).items():
            value, groups = _mean(tables[name], columns), tables[name].get("patient", ids)
            pooled[f"{name}/{score}"] = value, *segmentation_3d.interval(_matrix(tables[name], columns), groups)
    return Summary(values, step, tables, pooled, tuple(notes))


def _mean(part: Mapping[str, np.ndarray], columns: Sequence[str]) -> float:
    """Mean over columns of their means over rows, what is no number left out."""
    return float(nan_mean(nan_mean(_matrix(part, columns), 0)))


def _means(scores: Mapping[str, Sequence[float]], parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, list[str]]:
    """Scores that are means over samples, and the columns of rows that they are means of.

    Candidates go by name: `dice.sr` may be the mean of the column `dice_sr`, `dice_mean` of all columns `dice_...`.
    What counts is that the rows of every fold give the score of that fold, which a count or a total does not.
    """
    numbers = [key for key, column in parts[0].items() if column.ndim == 1 and column.dtype.kind in "fiub"]
    numbers = [key for key in numbers if all(key in part and part[key].dtype.kind in "fiub" for part in parts)]
    found = {}
    for score, values in scores.items():
        if score.endswith(("_low", "_high")):  # ends of an interval
            continue
        word, mean, _ = re.sub(r"[^a-z0-9]", "_", score).partition("_mean")
        columns = [key for key in numbers if (key.startswith(f"{word}_") if mean else key == word)]
        if columns:
            own = [_mean(part, columns) for part in parts]
            if np.allclose(own, values, rtol=1e-5, atol=1e-7, equal_nan=True):
                found[score] = columns
    return found


def _matrix(part: Mapping[str, np.ndarray], columns: Sequence[str]) -> np.ndarray:
    return np.stack([part[column].astype(float) for column in columns], 1)


def _joined(columns: Sequence[np.ndarray]) -> np.ndarray:
    # A column of texts beside one of numbers: a fold in which no sample has a value.
    if len({column.dtype.kind in "OUS" for column in columns}) > 1:
        columns = [column.astype(object) for column in columns]
    return np.concatenate(columns)


def _rows(runs: Sequence[RunFolder], evaluation: str, store: Store) -> list[Columns | None]:
    """The rows of the last evaluation of each run, as columns; None for a run that kept none."""
    name, client, found = f"{evaluation}_final", None, []
    for run in runs:
        # What a run has yet to send is here; of a store that is away nothing else is needed then.
        if (rows := saved_rows.unsent(run, name, without=())) is None:
            try:
                client = client or store.client()
            except Away as away:
                wanted = f"{away.found}, and the rows of {run.name} are there"
                remedy = "when it is available again, the same command with --resume completes the summary"
                raise Away(away.where, wanted, remedy=remedy) from None
            rows = saved_rows.read(client, run.info().run_id, name, without=())
        found.append(rows and rows[0])
    return found


def describe(recipe: Recipe, found: Summary, runs: Sequence[RunFolder]) -> str:
    """Return the scores of all folds as a table for each evaluation."""
    lines = [f"{recipe.name} in {len(runs)} folds", ""]
    for evaluation in recipe.evaluations:
        heads = [*(f"fold {k}" for k in range(len(runs))), "mean", "std"]
        pooled = evaluation in found.tables
        ends = (lambda name: found.pooled.get(name, 3 * (math.nan,))) if pooled else lambda _: ()
        heads += ["all", "95 %"] * pooled
        table = group.score_table(evaluation, found.values, heads, ends)
        if table and pooled:
            table.append(f"all: the {len(found.tables[evaluation]['fold'])} samples of all folds, each once")
        lines += [*table, ""] if table else []
    lines += found.notes
    lines += [f"fold {k}  {run.name}" for k, run in enumerate(runs)]
    return "\n".join([*lines, ""])


def divide(request: RunRequest) -> list[Child]:
    """Return a request per fold, with `data.fold` 0, 1, ..., checked without a device.

    Raises UserError for data without folds, and for a recipe without evaluations.
    """
    recipe = load(request)
    if not isinstance(recipe.data, DividesIntoFolds):
        found = f"the data of {recipe.name}, {kinds.name(recipe.data)}, has no keys `folds` and `fold`"
        raise UserError("--folds", found, "data that is divided by patients, such as `volumes`")
    for word in request.overrides:
        if word.partition("=")[0].strip() == "data.fold":
            raise UserError(
                "--folds", f"{word} is given too", remedy="leave one of them out: --folds trains every fold"
            )
    if recipe.data.folds < 2:
        raise UserError("data.folds", f"{recipe.data.folds}", "2 or more", "cross-validation needs two parts")
    if not recipe.evaluations:
        raise UserError("--folds", f"{recipe.name} has no evaluations", "one on the held-out split")
    return [
        child_of(request, f"fold {number}", (*request.overrides, f"data.fold={number}"))
        for number in range(recipe.data.folds)
    ]

"""Put the rows that the folds of a cross-validation saved together: every sample once, and scores over all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainkit.analysis import saved_rows
from trainkit.analysis.saved_rows import Columns
from trainkit.metrics import segmentation_3d
from trainkit.metrics.significance import nan_mean
from trainkit.tracking.mlflow_errors import Away
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Silent, Tracker

_CSV_ROWS = 10_000
"""Longest table of samples that is also kept as CSV, which MLflow's page shows."""


@dataclass(frozen=True)
class Pooled:
    """The samples of all folds."""

    tables: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Evaluation to the rows of all folds, each sample once, with the column `fold`."""
    scores: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Means over the samples of all folds together, and the ends of their 95 % intervals (bootstrap over patients)."""
    notes: tuple[str, ...] = ()
    """Reasons why an evaluation has no table."""


def pool(
    scores: Mapping[str, Sequence[float]], rows: Mapping[str, Sequence[Mapping[str, np.ndarray] | None]]
) -> Pooled:
    """Put the rows of the folds together, by evaluation; `scores` are those of each fold, by full name.

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
        own = {key.removeprefix(f"{name}/"): v for key, v in scores.items() if key.startswith(f"{name}/")}
        for score, columns in _means(own, parts).items():
            value, groups = _mean(tables[name], columns), tables[name].get("patient", ids)
            pooled[f"{name}/{score}"] = value, *segmentation_3d.interval(_matrix(tables[name], columns), groups)
    return Pooled(tables, pooled, tuple(notes))


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


def read(runs: Sequence[RunFolder], evaluation: str, store: Store) -> list[Columns | None]:
    """Return the rows of the last evaluation of each run, as columns; None for a run that kept none."""
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


def keep(evaluation: str, table: Mapping[str, np.ndarray], tracker: Tracker | Silent) -> None:
    """Log the rows of all folds as artifacts of the parent run."""
    tracker.table(f"rows/{evaluation}_folds.parquet", table)
    if len(table["fold"]) <= _CSV_ROWS:
        plain = {key: column for key, column in table.items() if column.ndim == 1}
        tracker.table(f"tables/{evaluation}_folds.csv", plain)

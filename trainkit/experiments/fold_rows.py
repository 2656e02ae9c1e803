"""Put the rows that the folds of a cross-validation saved together: every sample once, and scores over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainkit.analysis import saved_rows
from trainkit.analysis.saved_rows import Columns
from trainkit.tracking.mlflow_client import Away
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store


@dataclass(frozen=True)
class Pooled:
    """The samples of all folds."""

    tables: dict[str, Columns] = field(default_factory=dict)
    """Evaluation to the rows of all folds, each sample once, with the column `fold`."""
    scores: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Scores over the samples of all folds together, and the ends of their 95 % intervals."""
    notes: dict[str, str] = field(default_factory=dict)
    """Reason why an evaluation has no table, by its name."""


def pool(scores: Mapping[str, Sequence[float]], rows: Mapping[str, Sequence[Columns | None]]) -> Pooled:
    """Put the rows of the folds together, by evaluation; `scores` are those of each fold, by full name.

    Scores that the rows of every fold reproduce are computed again from all rows, with bootstrap intervals over the
    units of the evaluation. Rows are combined only if no `id` is in two folds: otherwise a set that all folds share
    would count several times.
    """
    tables, pooled, notes = {}, {}, {}
    for name, kept in rows.items():
        parts = [part for part in kept if part is not None]
        if len(parts) < len(kept):
            notes[name] = f"{name}: no table of all folds; not every run kept its rows"
            continue
        if any("id" not in part for part in parts):
            notes[name] = f"{name}: no table of all folds; its rows have no `id`"
            continue
        ids = np.concatenate([part["id"] for part in parts])
        # Within a fold rows may share an id: patches of one case.
        if sum(len(set(part["id"].tolist())) for part in parts) > len(set(ids.tolist())):
            notes[name] = f"{name}: no table of all folds; the same samples are evaluated in several folds"
            continue
        shared = [key for key in parts[0] if all(key in part for part in parts)]
        fold = np.repeat(np.arange(len(parts)), [len(part["id"]) for part in parts])
        table = tables[name] = {"id": ids, "fold": fold}
        table |= {key: _joined([part[key] for part in parts]) for key in shared if key not in ("id", "fold")}
        own = {key.removeprefix(f"{name}/"): value for key, value in scores.items() if key.startswith(f"{name}/")}
        known = set(own)
        for k, part in enumerate(parts):
            known &= saved_rows.reproduced(part, {score: values[k] for score, values in own.items()})
        whole = {score: value for score, value in saved_rows.scores(table).items() if score in known}
        intervals, _ = saved_rows.intervals(table, whole)
        for score, value in whole.items():
            found = intervals.get(score)
            pooled[f"{name}/{score}"] = (value, found.low, found.high) if found else (value, math.nan, math.nan)
    return Pooled(tables, pooled, notes)


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

"""Read the rows that a run saved of its evaluations, and compute bootstrap intervals of its scores from them."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.config import metric_table
from trainkit.metrics import bootstrap, significance
from trainkit.metrics.significance import Interval
from trainkit.tracking import desired_state
from trainkit.tracking.run_folder import RunFolder

Columns = dict[str, np.ndarray]


def read(
    client: Any, run_id: str | None, name: str, without: Collection[str] = bootstrap.NEVER_READ
) -> tuple[Columns, str] | None:
    """Return the columns of `rows/NAME.parquet` of a run in MLflow, and the SHA-256 of the file.

    Columns from which no metric is computed are left out. None where the rows are missing or cannot be read.
    """
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    with tempfile.TemporaryDirectory() as aside:
        try:
            return _read(Path(client.download_artifacts(run_id, f"rows/{name}.parquet", aside)), without)
        except (MlflowException, OSError):
            return None


def unsent(run: RunFolder, name: str, without: Collection[str] = bootstrap.NEVER_READ) -> tuple[Columns, str] | None:
    """As `read`, from the files of a run that MLflow has not got yet. None where the rows are not among them."""
    for entry in desired_state.read(run):
        if entry[:2] == ("file", f"rows/{name}.parquet") and (file := desired_state.path_of(run, entry)) is not None:
            with contextlib.suppress(OSError):  # it is being uploaded at this moment
                return _read(file, without)
    return None


def _read(file: Path, without: Collection[str]) -> tuple[Columns, str] | None:
    import pyarrow as pa
    from pyarrow import parquet

    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    try:
        names = [name for name in parquet.read_schema(file).names if name not in without]
        table = parquet.read_table(file, columns=names)
    except pa.ArrowException:
        return None
    return {name: _column(table[name]) for name in names}, digest


def scores(rows: Columns) -> dict[str, float]:
    """Return the scores that follow from rows, without those that they do not name by class."""
    size = len(next(iter(rows.values()), ()))
    if not size:
        return {}
    found = bootstrap.kind(rows).resampled(rows, np.ones((1, size)))
    return {name: float(values[0]) for name, values in found.items() if values.ndim == 1}


def reproduced(rows: Columns, logged: Mapping[str, float]) -> set[str]:
    """Return the names of the scores that the rows reproduce: not others, nor those of another step."""
    own = scores(rows)
    return {name for name in own.keys() & logged.keys() if np.isclose(own[name], logged[name], rtol=1e-5, atol=1e-7)}


def intervals(
    rows: Columns, logged: Mapping[str, float], draws: int = significance.DRAWS
) -> tuple[dict[str, Interval], str]:
    """Return bootstrap intervals of the scores that the rows reproduce, and the units that are resampled in words."""
    known, size = reproduced(rows, logged), len(next(iter(rows.values()), ()))
    if not known:
        return {}, ""
    kind = bootstrap.kind(rows)
    units = kind.units(rows)
    shares = {name for name in known if metric_table.unit(name) == "share"}

    def scored(times: np.ndarray) -> Columns:
        drawn = kind.resampled(rows, times)
        return {name: significance.log_odds(drawn[name], size) if name in shares else drawn[name] for name in known}

    found = {}
    for name, drawn in significance.resampled(units, scored, draws).items():
        value = float(significance.log_odds(logged[name], size)) if name in shares else logged[name]
        if interval := significance.bootstrap_interval(value, drawn, units.independent):
            found[name] = significance.from_log_odds(interval, logged[name]) if name in shares else interval
    return found, str(units)


def _column(values: Any) -> np.ndarray:
    """Return a column of parquet: numbers, texts (objects), or lists of one length as rows of a matrix."""
    plain = values.to_numpy()
    if plain.dtype == object and len(plain) and all(isinstance(value, np.ndarray) for value in plain):
        return np.stack(list(plain))
    return plain

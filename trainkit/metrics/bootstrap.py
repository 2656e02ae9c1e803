"""Bootstrap of metrics from the saved rows of an evaluation, by the kind of their protocol.

Each metrics module has `resampled`, a pure function of rows and their counts, and `units`, which groups the rows that
are resampled together. This module selects them by the columns of the rows. For unknown rows, such as those of a custom
task, the metrics are the means of the columns, and the units are rows or patients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from trainkit.metrics import (
    classification,
    identification,
    reid,
    retrieval,
    segmentation_2d,
    segmentation_3d,
    significance,
    verification,
)
from trainkit.metrics.significance import Interval, Units

Columns = Mapping[str, np.ndarray]

NEVER_READ = ("embedding", "thumbnail")
"""Large columns that no metric is computed from."""


@dataclass(frozen=True)
class Kind:
    """Rows of one kind of protocol."""

    units: Callable[[Columns], Units]
    """Returns the units that are resampled together."""
    resampled: Callable[[Columns, np.ndarray], dict[str, np.ndarray]]
    """Returns the metrics, (draws,) each, with row i counted `times[:, i]` times."""
    has: tuple[str, ...]
    """Columns that identify the kind."""
    same: tuple[str, ...]
    """Columns that are equal for equal samples: inputs of the evaluation, not results."""


def _units(rows: Columns) -> Units:
    if "patient" in rows:
        return Units.by(rows["patient"], "patients")
    return Units("samples", np.arange(len(next(iter(rows.values())))))


def _means(rows: Columns, times: np.ndarray) -> dict[str, np.ndarray]:
    """The mean of every numeric column, under its name, for rows of a custom task."""
    plain = {name: column for name, column in rows.items() if column.ndim == 1 and column.dtype.kind in "fiub"}
    return {name: significance.mean(column, times) for name, column in plain.items()}


def _kind(module: ModuleType, has: str, same: str) -> Kind:
    return Kind(module.units, module.resampled, tuple(has.split()), tuple(same.split()))


KINDS = (
    _kind(verification, "distance same fold", "first second same fold"),
    _kind(identification, "probe rank match_score", "probe label"),
    _kind(classification, "label prediction confidence probability", "label group"),
    _kind(retrieval, "relevant map_at_r rank", "label relevant"),
    _kind(reid, "list query ap inp", "list query person relevant"),
    _kind(segmentation_3d, "patient dice volume_truth_mm3_", "id patient"),
    _kind(segmentation_2d, "intersection predicted actual", "id actual"),
)
_MEANS = Kind(_units, _means, (), ("id", "patient", "label"))


def kind(rows: Columns) -> Kind:
    """Return the kind of rows; a column name ending in `_` is a prefix.

    Inspections also have the columns of a classification, and are treated as means.
    """
    if "outlier_distance" in rows:
        return _MEANS
    known = (k for k in KINDS if all(any(_is(name, asked) for name in rows) for asked in k.has))
    return next(known, _MEANS)


def _is(name: str, asked: str) -> bool:
    return name == asked or (asked.endswith("_") and name.startswith(asked))


def why_not_comparable(first: Columns, second: Columns) -> str:
    """Return the reason why rows of two runs cannot be compared one by one, or an empty text."""
    if kind(first) != kind(second):
        return "they were evaluated by different protocols"
    lengths = [len(next(iter(rows.values()), ())) for rows in (first, second)]
    if lengths[0] != lengths[1]:
        return f"{lengths[0]:,} rows against {lengths[1]:,}"
    for name in kind(first).same:
        one, other = first.get(name), second.get(name)
        if not _equal(one, other):
            return f"their rows differ in {name!r}"
    return ""


def difference(
    first: Columns, second: Columns | None, metric: str, gap: float, draws: int = significance.DRAWS
) -> Interval | None:
    """Return the interval of `gap`, the metric of `second` minus that of `first`; None if rows lack it.

    With rows of the same samples by the paired bootstrap. Without such rows of `second`, its metric is assumed to vary
    independently like that of `first`, which gives a wider interval.
    """
    size = len(next(iter(first.values()), ()))
    if not size:
        return None
    one = kind(first)
    units, whole = one.units(first), one.resampled(first, np.ones((1, size)))
    if metric not in whole or whole[metric].ndim != 1:
        return None
    if second is None or why_not_comparable(first, second):
        drawn = significance.resampled(units, lambda times: {metric: one.resampled(first, times)[metric]}, draws)
        return significance.bootstrap_interval(gap, math.sqrt(2) * drawn[metric], units.independent)

    def gaps(times: np.ndarray) -> dict[str, np.ndarray]:
        return {metric: one.resampled(second, times)[metric] - one.resampled(first, times)[metric]}

    drawn = significance.resampled(units, gaps, draws)
    return significance.bootstrap_interval(gap, drawn[metric], units.independent)


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    return one.tolist() == other.tolist() if one.dtype == object else bool(np.array_equal(one, other))


def by_class_name(
    drawn: Mapping[str, np.ndarray], whole: Mapping[str, np.ndarray], names: Sequence[str]
) -> dict[str, Any]:
    """Return all metrics, (draws,) each, with those of classes by name, for rows that do not name the classes.

    A key ending in a dot (`iou.`) has values (draws, C). `whole` has the same keys for all rows, once; `names` are the
    logged metrics in the order of the classes, without classes that never occur. If their number differs from that of
    the classes that occur, the classes are left out.
    """
    found = {name: values for name, values in drawn.items() if values.ndim == 1}
    for start in drawn.keys() - found.keys():
        values, own = drawn[start], [name for name in names if name.startswith(start)]
        occurs = np.flatnonzero(np.isfinite(whole[start][0]))
        if len(own) == len(occurs):
            found |= {name: values[:, k] for name, k in zip(own, occurs, strict=True)}
    return found

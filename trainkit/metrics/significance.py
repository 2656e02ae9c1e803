"""Significance of differences: the paired bootstrap over units, and Welch's interval over seeds.

A unit is what a metric is a mean over and what another test set would replace: a person, a patient, an image. All rows
of a unit are resampled together, because they are alike. Two networks are evaluated on the same draws, so samples that
are hard for both do not affect the difference (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993; Bolle,
Ratha and Pankanti, "Error analysis of pattern recognition systems: the subsets bootstrap", CVIU 93, 2004, for persons
with all their pairs). Knows nothing of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainkit import rng

DRAWS = 2000
LEVEL = 0.95
"""Confidence level of the intervals."""
_AT_ONCE, _DRAWS_AT_ONCE = 1 << 21, 256
"""Limits of a block of draws: numbers, and draws."""
_LOST = 0.05
"""Largest share of draws that may lack a metric, for example if a class was not drawn."""
_NOTHING = 1e-12
"""A difference below it is rounding."""
_FOR_A_VARIANCE = 4
"""Divisor of the number of draws for a variance: 500 draws estimate it to 6 %."""

Verdict = Literal["better", "worse", "not decided", "not comparable"]


@dataclass(frozen=True)
class Units:
    """Groups of rows that are resampled together."""

    word: str
    """Plural of their name: `patients`."""
    of: np.ndarray
    """int64 (rows,), the unit of each row, 0 .. count-1."""
    also: np.ndarray | None = None
    """int64 (rows,), a second unit of each row, as for a pair of two people; the same again if there is only one."""

    @classmethod
    def by(cls, names: Iterable[object], word: str) -> Units:
        """Make one unit per distinct name, (rows,)."""
        column = np.asarray(names if isinstance(names, np.ndarray) else list(names))
        if column.dtype == object:  # None among texts, which cannot be sorted
            column = np.array([str(name) for name in column.tolist()])
        return cls(word, np.unique(column, return_inverse=True)[1].reshape(-1))

    @property
    def count(self) -> int:
        """Number of units."""
        return max(int(units.max()) + 1 for units in (self.of, self.also) if units is not None) if len(self.of) else 0

    @property
    def independent(self) -> int:
        """Largest number of rows of which no two share a unit: half the number of units if rows have two."""
        return self.count if self.also is None else self.count // 2

    def __str__(self) -> str:
        return f"{self.count:,} {self.word}"


def draw_counts(units: Units, draws: int = DRAWS) -> Iterator[np.ndarray]:
    """Count of each row in each draw, float64 (some, rows), a block at a time, `draws` in total.

    Each draw has as many units as there are, with replacement. The draws depend only on the number of units, so that
    all metrics are computed on the same draws. The count of a row with two units is the mean of their counts; of a row
    that has one unit twice, the mean of its count and 1. Metrics then vary half as much as they should, which
    `resampled` corrects: with twice as much, counts would be negative.
    """
    draw = np.random.Generator(np.random.Philox(key=rng.number(0, "bootstrap")))
    count, rows = units.count, len(units.of)
    step = min(_DRAWS_AT_ONCE, max(1, _AT_ONCE // max(count, rows, 1)))
    for start in range(0, draws, step):
        some = min(step, draws - start)
        drawn = draw.integers(count, size=(some, count)) + count * np.arange(some)[:, None]
        often = np.bincount(drawn.ravel(), minlength=some * count).reshape(some, count).astype(np.float64)
        of = often[:, units.of]
        yield of if units.also is None else (of + np.where(units.of == units.also, 1, often[:, units.also])) / 2


def resampled(
    units: Units, scores: Callable[[np.ndarray], Mapping[str, np.ndarray]], draws: int = DRAWS
) -> dict[str, np.ndarray]:
    """Metrics in each draw, (draws,) each; `scores` computes them with row i counted `times[:, i]` times.

    Of rows with two units the variance of a score over the draws is that of drawing units less that of drawing pairs of
    two units: what is of a pair alone varies with both its units, and is counted twice (Aronow, Samii and Assenova,
    Political Analysis 23, 2015; Cameron, Gelbach and Miller, Journal of Business and Economic Statistics 29, 2011). At
    least half of it is left, and it is larger by n / (n - 2) of n units, for both units of a row are in the mean that
    it deviates from. Of simulated means over pairs of 100 people intervals hold the truth in 93 to 96 of 100 sets; with
    rows there as often as both units are drawn (Owen, Annals of Applied Statistics 1, 2007) in 95 to 99.
    """
    found = _scored(draw_counts(units, draws), scores)
    if units.also is None:
        return found
    pairs = _scored(_times_of_pairs(units, units.also, max(2, draws // _FOR_A_VARIANCE)), scores)
    few = units.count / max(units.count - 2, 1)
    for name, drawn in found.items():
        middle, variance = _moments(drawn)
        twice = _moments(pairs[name])[1]
        left = max(1 - twice / (4 * variance), 0.5) if variance else 1.0
        found[name] = middle + 2 * math.sqrt(left * few) * (drawn - middle)
    return found


def _times_of_pairs(units: Units, also: np.ndarray, draws: int) -> Iterator[np.ndarray]:
    """As `draw_counts`, where pairs of two units are drawn, each with all its rows; rows of one unit are there once."""
    low, high = np.minimum(units.of, also), np.maximum(units.of, also)
    two = low < high
    for often in draw_counts(Units.by((low * units.count + high)[two], "pairs"), draws):
        out = np.ones((len(often), len(two)))
        out[:, two] = often
        yield out


def _scored(
    blocks: Iterable[np.ndarray], scores: Callable[[np.ndarray], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The scores of all blocks of draws, one after the other."""
    found = [scores(block) for block in blocks]
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def _moments(drawn: np.ndarray) -> tuple[float, float]:
    """Mean and variance of what is a number; zeros where nothing is."""
    known = drawn[np.isfinite(drawn)]
    return (float(known.mean()), float(known.var())) if len(known) else (0.0, 0.0)


def group_sums(values: np.ndarray, of: np.ndarray, groups: int) -> np.ndarray:
    """Sums of `values` (draws, rows) over the rows of each group, (draws, groups); `of` (rows,) is the group of each.

    Rows of group -1 are in no sum.
    """
    order = np.argsort(of, kind="stable")
    order = order[int((of < 0).sum()) :]
    out = np.zeros((len(values), groups))
    if len(order):
        held, start = np.unique(of[order], return_index=True)
        out[:, held] = np.add.reduceat(values[:, order], start, axis=1)
    return out


def mean(values: np.ndarray, often: np.ndarray) -> np.ndarray:
    """Mean of `values` (rows,) or (rows, K) in each draw, (draws,) or (draws, K); what is nan is left out.

    `often` (draws, rows) says how often a row is in a draw; nan where none is that has a value.
    """
    values = np.asarray(values, dtype=np.float64)
    there = values == values
    with np.errstate(invalid="ignore", divide="ignore"):
        return (often @ np.where(there, values, 0)) / (often @ there.astype(np.float64))


def nan_mean(values: np.ndarray, axis: int | None = -1) -> Any:
    """Mean of what is a number over an axis, or over all of them with None; nan where nothing is."""
    there = values == values
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, values, 0).sum(axis) / there.sum(axis)


def percentile_interval(drawn: np.ndarray, units: int) -> tuple[float, float]:
    """The ends of the 95 % interval from draws of so many units, two at least; nan left out, nan where none is left.

    Percentiles, expanded for few units (`tail_probabilities`): plain ones hold the mean of 12 patients 91 times in 100.
    """
    drawn = drawn[drawn == drawn]
    if not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, tail_probabilities(units)).tolist()
    return low, high


@dataclass(frozen=True)
class Interval:
    """A difference with its confidence interval."""

    difference: float
    low: float
    high: float
    decides: bool = True
    """False if there are too few units or runs for a verdict."""

    @property
    def apart(self) -> int:
        """1 if the whole interval is above 0, -1 if it is below, else 0."""
        return (self.low > 0) - (self.high < 0) if self.decides else 0


def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t for a share `level` with so many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + level / 2))


def tail_probabilities(units: int, level: float = LEVEL) -> tuple[float, float]:
    """Shares of the draws below the ends of an interval, expanded as for a mean of so many units, two at least."""
    from scipy.special import ndtr

    tail = float(ndtr(-math.sqrt(units / (units - 1)) * t_quantile(units - 1, level)))
    return tail, 1 - tail


def bootstrap_interval(difference: float, drawn: np.ndarray, units: int, level: float = LEVEL) -> Interval | None:
    """The interval of a difference from its values in the draws, (draws,); None where too many have none.

    Percentiles, expanded as for a mean of so many units (Hesterberg, "What teachers should know about the bootstrap",
    The American Statistician 69, 2015): plain ones are too narrow for few. They are centred on the difference: what is
    chosen in each draw, a threshold say, is chosen worse than it was, by one network more than by the other, and the
    draws then lean to one side. An end at which the networks do not differ stays there: where one image of 200 tells
    them apart, a third of the draws lacks it. Of so few units that all could lie on one side by chance, five for a
    level of 0.95, there is an interval and no verdict.
    """
    drawn, total = drawn[np.isfinite(drawn)], len(drawn)
    if units < 2 or not math.isfinite(difference) or len(drawn) < max(1, (1 - _LOST) * total):
        return None
    shift = difference - float(drawn.mean())
    ends = np.quantile(drawn, tail_probabilities(units, level)).tolist()
    low, high = (0.0 if abs(end) < _NOTHING else end + shift for end in ends)
    return Interval(difference, low, high, 2.0 ** (1 - units) <= 1 - level)


def log_odds(share: np.ndarray | float, rows: int) -> np.ndarray:
    """Log odds of a share of so many rows, the scale on which its interval is computed.

    On the scale of the share itself, intervals near 1 are too narrow. 0 and 1 are moved by half a row.
    """
    share = np.clip(share, 0.5 / rows, 1 - 0.5 / rows)
    return np.log(share / (1 - share))


def from_log_odds(found: Interval, share: float) -> Interval:
    """Convert an interval of log odds to one of the share."""
    low, high = (1 / (1 + math.exp(-end)) for end in (found.low, found.high))
    return Interval(share, min(low, share), max(high, share), found.decides)


def welch(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Welch's interval of the mean of `second` minus that of `first`, each of independent runs; None below two of each.

    Student's t with Welch and Satterthwaite's degrees of freedom (Welch, Biometrika 34, 1947). If neither varies,
    the interval has no width and gives no verdict: two equal runs do not show the variation.
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if min(len(a), len(b)) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    difference = float(b.mean() - a.mean())
    parts = [float(values.var(ddof=1) / len(values)) for values in (a, b)]
    total = sum(parts)
    if not total:
        return Interval(difference, difference, difference, False)
    freedom = total**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    half = t_quantile(freedom, level) * math.sqrt(total)
    return Interval(difference, difference - half, difference + half)


def verdict(intervals: Sequence[Interval], lower_is_better: bool = False) -> Verdict:
    """`better` or `worse` if every interval is on that side of 0, else `not decided`, also without intervals."""
    sides = {interval.apart for interval in intervals}
    if len(sides) != 1 or 0 in sides:
        return "not decided"
    return "better" if (sides == {1}) != lower_is_better else "worse"

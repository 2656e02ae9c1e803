"""Whether a difference is more than chance: the paired bootstrap over units, and Welch's interval over seeds.

A unit is what a score is a mean over and what another test set would hold others of: a person, a patient, a picture.
All rows of a unit are drawn together, since they are alike. Both of two networks are scored on the same draws: what is
hard for both then counts for neither (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993; Bolle, Ratha and
Pankanti, "Error analysis of pattern recognition systems: the subsets bootstrap", CVIU 93, 2004, for persons with all
their pairs). Knows nothing of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainkit import seeding

DRAWS = 2000
LEVEL = 0.95
"""How often an interval is to hold the difference that all units that there could be would show."""
_AT_ONCE, _DRAWS_AT_ONCE = 1 << 21, 256
"""Most numbers of a block of draws, and most draws: what is counted of each may be longer than its rows."""
_LOST = 0.05
"""Largest share of draws that may be without a score, as where none of a class was drawn."""

Verdict = Literal["better", "worse", "not decided", "not comparable"]


@dataclass(frozen=True)
class Units:
    """Which rows are drawn together."""

    word: str
    """What they are, many: `patients`."""
    of: np.ndarray
    """int64 (rows,), the unit of each row, 0 .. count-1."""
    also: np.ndarray | None = None
    """int64 (rows,), a second unit of each row, as a pair of two people has; where there is but one, the same again."""

    @classmethod
    def by(cls, names: Iterable[object], word: str) -> Units:
        """One unit for each different name, (rows,)."""
        column = np.asarray(names if isinstance(names, np.ndarray) else list(names))
        if column.dtype == object:  # None among texts, which cannot be sorted
            column = np.array([str(name) for name in column.tolist()])
        return cls(word, np.unique(column, return_inverse=True)[1].reshape(-1))

    @property
    def count(self) -> int:
        """How many there are."""
        return max(int(units.max()) + 1 for units in (self.of, self.also) if units is not None) if len(self.of) else 0

    def __str__(self) -> str:
        return f"{self.count:,} {self.word}"


def times(units: Units, draws: int = DRAWS) -> Iterator[np.ndarray]:
    """How often each row is in each draw, float64 (some, rows), a block at a time, `draws` in all.

    As many units as there are, with replacement. The draws depend on the number of units alone, so that whatever is
    scored on them is scored on the same. A row of two units is there once more for each time that either is drawn
    beyond once, and once less for either that is not drawn. That is the product of how often both are (Owen, "The
    pigeonhole bootstrap", Annals of Applied Statistics 1, 2007) without its last term: of simulated networks 94 to 96 %
    of the intervals then hold the difference, with the product 98 to 99 %, with the first unit alone 92 to 97 %.
    """
    count, rows = units.count, len(units.of)
    draw = np.random.Generator(np.random.Philox(key=seeding.number(0, "bootstrap")))
    step = min(_DRAWS_AT_ONCE, max(1, _AT_ONCE // max(count, rows, 1)))
    for start in range(0, draws, step):
        some = min(step, draws - start)
        drawn = draw.integers(count, size=(some, count)) + count * np.arange(some)[:, None]
        often = np.bincount(drawn.ravel(), minlength=some * count).reshape(some, count)
        of = often[:, units.of].astype(np.float64)
        if units.also is not None:
            of = np.where(units.of == units.also, of, np.maximum(of + often[:, units.also] - 1, 0))
        yield of


def summed(values: np.ndarray, of: np.ndarray, groups: int) -> np.ndarray:
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


def over(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis of what is a number; nan where nothing is."""
    there = values == values
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, values, 0).sum(-1) / there.sum(-1)


@dataclass(frozen=True)
class Interval:
    """A difference, and between what it may lie."""

    difference: float
    low: float
    high: float
    decides: bool = True
    """Whether there is enough behind it for a verdict."""

    @property
    def apart(self) -> int:
        """1 where all of it is above 0, -1 where all of it is below, else 0."""
        return (self.low > 0) - (self.high < 0) if self.decides else 0


def reach(freedom: float, level: float = LEVEL) -> float:
    """How many standard errors either way hold a share `level` of Student's t with so many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + level / 2))


def bootstrapped(difference: float, drawn: np.ndarray, units: int, level: float = LEVEL) -> Interval | None:
    """The interval of a difference from its values in the draws, (draws,); None where too many have none.

    Percentiles, expanded as for a mean of so many units (Hesterberg, "What teachers should know about the bootstrap",
    The American Statistician 69, 2015): plain ones are too narrow for few. They are centred on the difference: what is
    chosen in each draw, a threshold say, is chosen worse than it was, by one network more than by the other, and the
    draws then lean to one side. Of so few units that all could lie on one side by chance, five for a level of 0.95,
    there is an interval and no verdict.
    """
    from scipy.special import ndtr

    drawn, total = drawn[np.isfinite(drawn)], len(drawn)
    if units < 2 or not math.isfinite(difference) or len(drawn) < max(1, (1 - _LOST) * total):
        return None
    tail = float(ndtr(-math.sqrt(units / (units - 1)) * reach(units - 1, level)))
    low, high = (np.quantile(drawn, (tail, 1 - tail)) - drawn.mean() + difference).tolist()
    return Interval(difference, low, high, 2.0 ** (1 - units) <= 1 - level)


def welch(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Welch's interval of the mean of `second` less that of `first`, each of independent runs; None below two of each.

    Student's t with Welch and Satterthwaite's degrees of freedom (Welch, Biometrika 34, 1947). Where neither varies
    there is no width, and no verdict: two runs that agree to the last digit have not been seen to vary.
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
    half = reach(freedom, level) * math.sqrt(total)
    return Interval(difference, difference - half, difference + half)


def verdict(intervals: Sequence[Interval], lower_is_better: bool = False) -> Verdict:
    """`better` or `worse` where every interval lies on that side of 0, else `not decided`; so without any."""
    sides = {interval.apart for interval in intervals}
    if len(sides) != 1 or 0 in sides:
        return "not decided"
    return "better" if (sides == {1}) != lower_is_better else "worse"

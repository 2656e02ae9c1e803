"""Divide the wall-clock of the main thread among phases.

Every moment belongs to exactly one phase, so the shares add up to the wall-clock. Throughput is counted over the phases
of a step alone: an evaluation, a checkpoint or a log line does not lower it.

On a GPU the main thread only queues the work of forward, backward and optimizer; a `Timeline` records times on the
device as the phases change.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

COMPUTE: tuple[str, ...] = ("forward", "backward", "optimizer")
"""The compute phases; their sum is `compute`."""
STEP: tuple[str, ...] = ("data", "transfer", *COMPUTE)
"""The phases of a step."""
BETWEEN: tuple[str, ...] = ("eval", "checkpoint", "log", "setup")
"""What else the main thread does."""
PHASES: tuple[str, ...] = (*STEP, *BETWEEN)
KEPT = 4096
"""Steps of which single times are kept."""
_WIDE = len(PHASES)
_MANY, _LONGEST = 128, 2 * _WIDE * (KEPT + 1)
_COLUMN = {phase: number for number, phase in enumerate(PHASES)}


class Timeline(Protocol):
    """Times on a device, in addition to those of the main thread; a CPU needs none."""

    def mark(self, phase: str) -> None:
        """Begin `phase` in the queue of the device, without waiting for it."""
        ...

    def step(self) -> None:
        """End a step."""
        ...


@dataclass(frozen=True)
class Steps:
    """Single times of consecutive steps, oldest first."""

    number: np.ndarray
    """(n,) int64: how many steps had ended with each, counted from 1 by the clock."""
    phases: np.ndarray
    """(n, 5) float64: seconds of the phases of `STEP`."""
    between: np.ndarray
    """(n, 4) float64: seconds of the phases of `BETWEEN`, spent since the step before."""

    def __len__(self) -> int:
        return len(self.number)

    def __getitem__(self, part: slice | np.ndarray) -> Steps:
        return Steps(self.number[part], self.phases[part], self.between[part])

    @property
    def seconds(self) -> np.ndarray:
        """(n,) float64: the time of each step."""
        return self.phases.sum(1)


class Clock:
    """Times of the phases of a training: `to(phase)` ends the running phase and begins another.

    Both `to` and `step` only note the time; sums are made when they are asked for, or after 128 steps, since in a
    training every cache line that is touched costs time.
    """

    def __init__(
        self,
        timeline: Timeline | None = None,
        now: Callable[[], float] = time.perf_counter,
        began: float | None = None,
    ):
        """`began`: when the start-up began, by `now`, where that was earlier: imports, opening and packing of data."""
        self._now = now
        self.timeline = timeline
        """Receives each phase and step; may be replaced while the clock runs."""
        self.steps = 0
        """Steps that have ended."""
        # A phase that begins, or None where a step ends, and the time of that, in turns.
        self._notes: list[str | float | None] = []
        self._note = self._notes.append
        # The sums of earlier notes.
        self._phase, self._since = "setup", now()
        self._spent = [0.0] * _WIDE
        self.before = self._spent[_COLUMN["setup"]] = 0.0 if began is None else self._since - began
        """Seconds of start-up before this clock was made."""
        # `_spent` at the end of each step, nine numbers a row. 200 rows are read from an array in 8 us, from tuples in
        # 180.
        self._rows = array("d", self._spent)
        self._marked, self._marked_steps = self.seconds, 0

    def to(self, phase: str) -> None:
        """End the running phase and begin `phase`."""
        self._note(phase)
        self._note(self._now())
        if self.timeline is not None:
            self.timeline.mark(phase)

    def step(self) -> None:
        """End a step."""
        self._note(None)
        self._note(self._now())
        self.steps += 1
        if self.steps % _MANY == 0:
            self._sum()
        if self.timeline is not None:
            self.timeline.step()

    @property
    def moved(self) -> tuple[int, int]:
        """A value that changes with every phase and step; any thread may read it."""
        return self.steps, len(self._notes)

    @property
    def phase(self) -> str:
        """The running phase."""
        self._sum()
        return self._phase

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, up to the last change of phase or end of a step."""
        self._sum()
        return dict(zip(PHASES, self._spent, strict=True))

    @property
    def training(self) -> float:
        """Seconds in the phases of steps so far."""
        self._sum()
        return sum(self._spent[: len(STEP)])

    @property
    def total(self) -> float:
        """Seconds of wall-clock up to the last change of phase."""
        self._sum()
        return sum(self._spent)

    def elapsed(self) -> float:
        """Seconds of wall-clock from the making of this clock up to now."""
        return self.total - self.before + self._now() - self._since

    def recent(self, many: int = KEPT) -> Steps:
        """Return the times of the last `many` steps, as far as they are kept."""
        self._sum()
        many = max(0, min(many, KEPT))
        # A copy: the array itself could not grow while another one looks into it.
        rows = np.frombuffer(self._rows[-_WIDE * (many + 1) :]).reshape(-1, _WIDE)
        spent = rows[1:] - rows[:-1]
        number = np.arange(self.steps - len(spent) + 1, self.steps + 1)
        return Steps(number, spent[:, : len(STEP)], spent[:, len(STEP) :])

    def _sum(self) -> None:
        """Add up what was noted."""
        notes, spent, rows, column, since = self._notes, self._spent, [], _COLUMN[self._phase], self._since
        phases, times = cast("list[str | None]", notes[::2]), cast("list[float]", notes[1::2])  # as they were noted
        for phase, now in zip(phases, times, strict=True):
            spent[column] += now - since
            since = now
            if phase is None:
                rows += spent
            else:
                column = _COLUMN[phase]
        notes.clear()
        self._phase, self._since = PHASES[column], since
        self._rows.fromlist(rows)
        if len(self._rows) > _LONGEST:
            del self._rows[: -_WIDE * (KEPT + 1)]

    def window(self, samples_per_step: int) -> dict[str, float]:
        """Return throughput and time shares since the last call, by metric name; empty when no step has ended.

        Percentiles are those of the last 4,096 steps of a longer window.
        """
        self.to(self.phase)
        seconds = self.seconds
        spent = {phase: seconds[phase] - self._marked[phase] for phase in PHASES}
        steps = self.steps - self._marked_steps
        self._marked, self._marked_steps = seconds, self.steps
        if not steps:
            return {}
        seconds = self.recent(steps).seconds
        return {**speed(seconds, samples_per_step, steps, sum(spent[phase] for phase in STEP)), **shares(spent)}

    def whole(self, samples: int, seconds: float) -> dict[str, float]:
        """Return the throughput of a training of `samples` in `seconds` of its steps, and all time shares."""
        self.to(self.phase)
        rate = samples / seconds if seconds else 0.0
        return {"speed/samples_per_s": rate, "time/total_s": self.total, **shares(self.seconds)}


def speed(step_seconds: np.ndarray, samples_per_step: int, steps: int, total: float) -> dict[str, float]:
    """Return throughput over `steps` in `total` seconds, and percentiles of `step_seconds`, the newest step times."""
    # `np.percentile` does the same in ten times the time, half of what a log line takes.
    ordered = np.sort(step_seconds)
    return {
        "speed/samples_per_s": samples_per_step * steps / total if total else 0.0,
        "speed/steps_per_s": steps / total if total else 0.0,
        "speed/step_ms_p50": 1e3 * _quantile(ordered, 0.5),
        "speed/step_ms_p99": 1e3 * _quantile(ordered, 0.99),
    }


def median(steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """Return the median of values of windows that end at `steps`, each weighted by the number of its steps.

    A window begins where the one before it ends, the first at step 0. Values that are not finite are left out.
    """
    end, measured = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    order = np.argsort(end, kind="stable")
    many = np.diff(end[order], prepend=0) * np.isfinite(measured[order])
    return float(np.median(np.repeat(measured[order], many)))


def _quantile(ordered: np.ndarray, share: float) -> float:
    """Return a quantile of sorted values, interpolated linearly."""
    at = share * (len(ordered) - 1)
    low, high = ordered[int(at)], ordered[math.ceil(at)]
    return float(low + (at - int(at)) * (high - low))


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Return the share of wall-clock of each phase, those of `COMPUTE` as one; they add up to 1."""
    total = sum(seconds.values()) or 1.0
    compute = sum(seconds[phase] for phase in COMPUTE)
    parts = {"data": seconds["data"], "transfer": seconds["transfer"], "compute": compute}
    parts |= {phase: seconds[phase] for phase in BETWEEN}
    return {f"time/{phase}_share": value / total for phase, value in parts.items()}

"""Forecast the duration of a training from its first steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trainkit.terminal import duration

_BLOCKS = 8
"""Parts into which the timed steps are cut: neighbouring ones are alike, so single steps are no independent sample."""
_T = 2.365
"""Student's t for 95 % and 7 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected duration of a training, from steps that were timed."""

    steps: int
    """Steps still to come."""
    step_s: float
    """Mean time of a step."""
    step_error: float
    """Half of the 95 % interval of that mean."""
    evaluations: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """How often each still runs, and how long it takes, seconds."""
    budgets: Mapping[str, float] = field(default_factory=dict)
    """Largest share of the whole that an evaluation may take, where it has one."""
    checkpoints: tuple[int, float] = (0, 0.0)
    """How many are still written, and the seconds for which one blocks training."""
    last_s: float = 0.0
    """Additional seconds for the last one: training waits until it is written."""
    before_s: float = 0.0
    """Before the first step: outputs of frozen models that are computed once."""

    def total(self, step_s: float | None = None) -> float:
        """Return the seconds until the end, at the expected step time or another."""
        steps = self.steps * (self.step_s if step_s is None else step_s)
        free = sum(times * s for name, (times, s) in self.evaluations.items() if name not in self.budgets)
        base = self.before_s + steps + free + self.checkpoints[0] * self.checkpoints[1] + self.last_s
        held = {name: self.evaluations[name] for name in self.budgets if name in self.evaluations}
        # A share of the whole, in which the evaluation itself is.
        return base + sum(
            min(times * s, self.budgets[name] / (1 - self.budgets[name]) * base) for name, (times, s) in held.items()
        )

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds until the end, between which it lies if later steps are like those that were timed."""
        return self.total(max(0.0, self.step_s - self.step_error)), self.total(self.step_s + self.step_error)

    def describe(self) -> str:
        """Write the forecast as a sentence."""
        low, high = self.interval
        parts = [f"{_seconds(self.before_s)} before the first step"] if self.before_s else []
        parts += [f"{self.steps:,} steps of {_seconds(self.step_s)}"]
        parts += [f"{name} {times:g} x {_seconds(s)}" for name, (times, s) in self.evaluations.items() if times]
        if self.checkpoints[0]:
            more = f" and {_seconds(self.last_s)} for the last" if self.last_s else ""
            parts.append(f"{self.checkpoints[0]} checkpoints of {_seconds(self.checkpoints[1])}{more}")
        return (
            f"forecast: {duration(self.total())} left ({duration(low)} to {duration(high)} if later steps take as "
            f"long): {', '.join(parts)}"
        )


def checkpoint_cost(blocking_s: float, written_s: float, interval_s: float) -> float:
    """Return the seconds for which a checkpoint blocks training, with one every `interval_s`.

    `blocking_s` where they are further apart than one takes to write; else a save waits for the one before.
    """
    return max(blocking_s, written_s - interval_s)


def mean_step(step_seconds: np.ndarray) -> tuple[float, float]:
    """Return the mean time of a step, and half of its 95 % interval over blocks of neighbouring steps.

    `step_seconds` (n,) in order. Fewer than 16 steps give an interval as wide as the mean itself.
    """
    mean = float(np.mean(step_seconds)) if len(step_seconds) else math.nan
    if len(step_seconds) < 2 * _BLOCKS:
        return mean, mean
    means = np.array([part.mean() for part in np.array_split(step_seconds, _BLOCKS)])
    return mean, _T * float(means.std(ddof=1)) / math.sqrt(_BLOCKS)


def _seconds(s: float) -> str:
    return f"{1e3 * s:.3g} ms" if s < 1 else f"{s:.3g} s"

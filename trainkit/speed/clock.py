"""Where the time of the main thread went.

Every moment belongs to exactly one phase, so the shares add up to the wall-clock. The speed of training is counted over
the phases of a step alone: an evaluation, a checkpoint or a log line does not make it look slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

STEP = ("data", "transfer", "compute")
"""The phases of a step."""
PHASES = (*STEP, "eval", "checkpoint", "log", "setup")


class Clock:
    """A stopwatch with one hand: `to(phase)` ends the phase that was running and begins another."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._phase = "setup"
        self._since = now()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._marked = dict(self.seconds)
        self._step_mark = 0.0
        self._steps: list[float] = []

    def to(self, phase: str) -> None:
        """End the running phase and begin `phase`."""
        now = self._now()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def step(self) -> None:
        """A step has ended: note how long its own phases took."""
        self.to(self._phase)
        spent = self.training
        self._steps.append(spent - self._step_mark)
        self._step_mark = spent

    @property
    def training(self) -> float:
        """Seconds in the phases of steps so far."""
        return sum(self.seconds[phase] for phase in STEP)

    @property
    def total(self) -> float:
        """Seconds of wall-clock up to the last change of phase."""
        return sum(self.seconds.values())

    def elapsed(self) -> float:
        """Seconds of wall-clock up to now."""
        return self.total + self._now() - self._since

    def window(self, samples_per_step: int) -> dict[str, float]:
        """Speed and shares since the last call, under the names of the vocabulary; empty when no step has ended."""
        self.to(self._phase)
        steps = np.asarray(self._steps)
        spent = {phase: self.seconds[phase] - self._marked[phase] for phase in PHASES}
        self._marked, self._steps = dict(self.seconds), []
        return {**speed(steps, samples_per_step), **shares(spent)} if len(steps) else {}

    def whole(self, samples: int, seconds: float) -> dict[str, float]:
        """Speed over the whole training, of so many samples in so many seconds of its steps, and all shares."""
        self.to(self._phase)
        rate = samples / seconds if seconds else 0.0
        return {"speed/samples_per_s": rate, "time/total_s": self.total, **shares(self.seconds)}


def speed(step_seconds: np.ndarray, samples_per_step: int) -> dict[str, float]:
    """Rates and step times from the duration of each step in seconds."""
    total = float(step_seconds.sum())
    p50, p99 = np.percentile(step_seconds, [50, 99])
    return {
        "speed/samples_per_s": samples_per_step * len(step_seconds) / total if total else 0.0,
        "speed/steps_per_s": len(step_seconds) / total if total else 0.0,
        "speed/step_ms_p50": 1e3 * float(p50),
        "speed/step_ms_p99": 1e3 * float(p99),
    }


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Share of wall-clock of each phase; they add up to 1."""
    total = sum(seconds.values()) or 1.0
    return {f"time/{phase}_share": value / total for phase, value in seconds.items()}

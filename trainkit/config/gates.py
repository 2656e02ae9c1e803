"""Gates: they turn a span into the next step at which something is due.

Between two events the loop pays one comparison of integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from trainkit.config.units import Span


@dataclass
class Gate:
    """Decides when something is due, as a step number known in advance.

    A gate in steps, epochs or samples is a pure function of the step. One in wall-clock, or one held to a share of
    wall-clock, looks at the clock when its step has come and moves the step on if it is too early: the caller makes
    that decision on one process, shares it and writes it down, so that a resumed run can repeat it.
    """

    every: Span | None
    """Interval; None: never due."""
    steps_per_epoch: int
    """Steps of an epoch."""
    batch_size: int
    """Samples of a step."""
    budget: float | None = None
    """Largest fraction of wall-clock time that the events may take."""
    due: int = 0
    """Step at which to ask next."""
    spent: float = 0.0
    """Seconds that past events took."""
    cost: float = 0.0
    """Seconds that the last event took: the estimate for the next."""
    last: float = 0.0
    """Elapsed seconds at the last event of a timed gate."""

    NEVER = 1 << 62
    REPEATED: ClassVar[bool] = True
    """True where decisions that depend on the clock are recorded and repeated by a resumed run."""

    def __post_init__(self) -> None:
        every = self.every
        self.clocked = every is not None and (every.timed or self.budget is not None)
        """True where the gate depends on the clock."""
        self._length = every.steps(self.steps_per_epoch, self.batch_size) if every and not every.timed else 0
        self.due = self.after(0)

    def after(self, step: int, seconds_per_step: float = 0.0) -> int:
        """The first step after `step` at which the event may be due."""
        if self._length:
            return (step // self._length + 1) * self._length
        if self.every is None:
            return self.NEVER
        # Rather too early than too late, since the pace of now may not last: then it asks again.
        ahead = 0.5 * self.every.seconds / seconds_per_step if seconds_per_step > 0 else 1
        return step + max(1, min(int(ahead), 1_000_000))

    def decide(self, step: int, elapsed: float, seconds_per_step: float) -> tuple[bool, int]:
        """Return whether the event happens at `step`, and the step at which to ask again.

        `elapsed` is wall-clock since training began, in seconds. Called on one process only.
        """
        if self.every is None:
            return False, self.NEVER
        pace = max(seconds_per_step, 1e-9)
        if self.every.timed and elapsed - self.last < self.every.seconds:
            return False, step + max(1, math.ceil(0.5 * (self.every.seconds - (elapsed - self.last)) / pace))
        if self.budget is not None and self.spent + self.cost > self.budget * (elapsed + self.cost):
            wait = (self.spent + self.cost) / self.budget - self.cost - elapsed
            later = step + max(1, math.ceil(wait / pace))
            # Stretched gates keep to their own grid: an evaluation `every: 1 epoch` stays at ends of epochs.
            return False, later if self.every.timed else self.after(later - 1)
        return True, self.after(step, seconds_per_step)

    def took(self, seconds: float, elapsed: float) -> None:
        """Record that an event took place."""
        self.cost = seconds
        self.spent += seconds
        self.last = elapsed


@dataclass
class Safeguard(Gate):
    """Decides when a checkpoint has to be written so that a process which is killed takes little with it.

    `every` seconds after the last at the latest. Before that the distance between two doubles, from 5 s on: a process
    that is killed loses at most half of what it did since it began, so that a run gets on however often that happens,
    and one that is left alone writes seven more for an `every` of 10 minutes. The copies of a large network hold the
    training up; the distance is at least 20 times that. Nothing of a training hangs on when a checkpoint is written:
    decisions are not repeated, and every process begins anew.
    """

    REPEATED: ClassVar[bool] = False
    SOONEST: ClassVar[float] = 5.0
    DEAREST: ClassVar[float] = 20.0
    began: float | None = None
    """Elapsed seconds when this process was first asked."""

    def decide(self, step: int, elapsed: float, seconds_per_step: float) -> tuple[bool, int]:
        """As `Gate.decide`."""
        if self.every is None:
            return False, self.NEVER
        if self.began is None:
            self.began = elapsed
        last = max(self.began, self.last)
        distance = max(self.SOONEST, self.DEAREST * self.cost, last - self.began)
        wait = last + min(self.every.seconds, distance) - elapsed
        if wait <= 0:
            return True, step + 1
        return False, step + max(1, math.floor(0.5 * wait / max(seconds_per_step, 1e-9)))

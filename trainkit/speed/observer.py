"""What watches the speed of a run while it trains, and sums it up at the end.

The loop calls `step` after every update, which costs one comparison where nothing is due, `window` for each log line,
and `close` at the end. Whatever is measured here changes no bit of the training.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainkit.machine import Machine
from trainkit.plan import Plan
from trainkit.recipe import Recipe
from trainkit.speed.clock import Clock
from trainkit.witness import Witness


class Observer:
    """All that measures the speed of one run, on one process."""

    def __init__(self, recipe: Recipe, plan: Plan, clock: Clock, machine: Machine, run: Witness, net: nn.Module):
        self._clock, self._plan, self._machine, self._run = clock, plan, machine, run
        self._due = plan.steps + 1

    def expects(self, costs: dict[str, float]) -> None:
        """Seconds that each evaluation will take, as far as its first batch tells."""
        self._run.costs = dict(costs)

    def step(self, step: int) -> None:
        """An update has ended."""
        if step >= self._due:
            self._look(step)

    def _look(self, step: int) -> None:
        pass

    def window(self) -> dict[str, Any]:
        """What was measured since the last log line, by metric name. Called on every process."""
        return {}

    def close(self, step: int) -> str:
        """The verdict on the run, in words."""
        return ""

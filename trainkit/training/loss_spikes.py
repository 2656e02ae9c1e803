"""Losses that jump up: noticed against the updates before, said, or gone back from.

A loss is a spike where its logarithm stands further above the median of those before than so many of their deviations,
a deviation being 1.4826 times the median distance from the median, which a few outliers do not move. Going back follows
PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1): on from a checkpoint from before, without the batches
around the spike. The same data did not spike from another state there, so it is the pair that is avoided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainkit.config.schema import Spikes
from trainkit.distributed.runtime import Machine
from trainkit.interfaces import Loss
from trainkit.training.async_scalar import Late
from trainkit.training.rollback import Trouble

if TYPE_CHECKING:
    from trainkit.training.run_logger import Witness
    from trainkit.training.state import State

_LEAST = 0.02
"""Deviations are taken to be at least so large: of a loss that hardly moves every twitch would be a spike."""


def deviations(loss: float, before: Sequence[float]) -> float:
    """How many deviations a loss stands above the median of those before; on a linear scale where one is not positive.

    NaN where the loss is not finite.
    """
    if not math.isfinite(loss):
        return math.nan
    values = np.asarray([*before, loss])
    values = np.log(values) if values.min() > 0 else values / max(float(np.abs(values[:-1]).mean()), 1e-30)
    middle = np.median(values[:-1])
    spread = 1.4826 * np.median(np.abs(values[:-1] - middle))
    return float((values[-1] - middle) / max(spread, _LEAST))


class Detector:
    """What looks at the loss of every update, one step late; its window is part of the state of a run."""

    def __init__(self, settings: Spikes | None, state: State, machine: Machine, run: Witness):
        self._settings, self._state, self._machine, self._run = settings, state, machine, run
        self._late = Late()

    def turn(self, losses: list[Loss], step: int) -> Trouble | None:
        """Hand in the losses of an update; returns what the one before it asks for."""
        if self._settings is None:
            return None
        found = self.look()
        self._late.turn(self._mean(losses), step)
        return found

    def look(self) -> Trouble | None:
        """What the update handed in last asks for; waits for its loss alone."""
        told = self._late.look()
        self._late.clear()
        return None if told is None else self._judged(*told)

    def clear(self) -> None:
        """Forget what was handed in last."""
        self._late.clear()

    def _mean(self, losses: list[Loss]) -> Tensor | float:
        """The loss of an update, the same on all processes."""
        total, weight = sum(loss.sum for loss in losses), sum(loss.weight for loss in losses)
        if self._machine.at_once and self._machine.world == 1:
            return float(total) / float(weight) if float(weight) else math.nan
        weight = weight.double() if isinstance(weight, Tensor) else torch.full_like(total, weight, dtype=torch.double)
        total, weight = self._machine.sum(torch.stack([total.double(), weight]))
        return total / weight

    def _judged(self, step: int, loss: float) -> Trouble | None:
        settings, state = self._settings, self._state
        away = deviations(loss, state.losses) if len(state.losses) >= settings.window else 0.0
        was, state.spiking = state.spiking, away > settings.deviations
        if math.isfinite(loss):
            state.losses = [*state.losses[1 - settings.window :], loss]
        if not state.spiking or was:
            return None
        why = f"the loss is {loss:.4g}, {away:.1f} deviations above the median of the {settings.window} updates before"
        if settings.policy == "warn":
            self._run.say(f"step {step}: {why}")
            self._run.tracker.event(step, "spike", {"loss": loss, "deviations": round(away, 2)})
            return None
        half = settings.leave_out // 2
        return Trouble(step, why, range(max(0, step - half), step + settings.leave_out - half))

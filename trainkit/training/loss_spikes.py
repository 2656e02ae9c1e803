"""Detect losses that jump above those of earlier steps, and report them or roll back.

A loss is a spike if its logarithm is more than so many deviations above the median of the window. A deviation is 1.4826
times the median distance from the median, which a few outliers do not change. The rollback follows PaLM (Chowdhery et
al. 2022, arXiv 2204.02311, section 5.1): training continues from an earlier checkpoint without the batches around the
spike. In PaLM the same data did not cause a spike from another state, so the combination of both is avoided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainkit.config.schema import Spikes
from trainkit.distributed.runtime import Runtime
from trainkit.interfaces import Loss
from trainkit.tensors import total, wide
from trainkit.training.guards import Pending, Rollback, Update
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState

_LEAST = 0.02
"""Deviations are taken to be at least so large: of a loss that hardly moves every twitch would be a spike."""


def deviations(loss: float, before: Sequence[float]) -> float:
    """Return the distance of a loss above the median of earlier ones, in deviations; NaN if it is not finite.

    Uses a linear scale if one of the losses is not positive.
    """
    if not math.isfinite(loss):
        return math.nan
    values = np.asarray([*before, loss])
    values = np.log(values) if values.min() > 0 else values / max(float(np.abs(values[:-1]).mean()), 1e-30)
    middle = np.median(values[:-1])
    spread = 1.4826 * np.median(np.abs(values[:-1] - middle))
    return float((values[-1] - middle) / max(spread, _LEAST))


class LossSpikeGuard:
    """Check the loss of every step. The window of earlier losses is part of the training state."""

    def __init__(self, settings: Spikes, state: TrainState, runtime: Runtime, logger: RunLogger):
        self._settings, self._state, self._runtime, self._logger = settings, state, runtime, logger
        self._pending = Pending()

    def observe(self, update: Update) -> None:
        """Take in the losses of a step."""
        self._pending.add(self._mean(update.losses), update.step)

    def verdict(self, wait: bool) -> Rollback | None:
        """Judge the steps before the last one; with `wait` the last one too."""
        for step, loss in self._pending.take(wait):
            if (rollback := self._judge(step, loss)) is not None:
                return rollback
        return None

    def reset(self) -> None:
        """Forget steps that are not judged yet."""
        self._pending.clear()

    def _mean(self, losses: list[Loss]) -> Tensor | float:
        """Return the loss of a step, the same on all processes."""
        whole, weight = total(loss.sum for loss in losses), total(loss.weight for loss in losses)
        if self._runtime.at_once and self._runtime.world == 1:
            return float(whole) / float(weight) if float(weight) else math.nan
        kind = {"dtype": wide(self._runtime.device), "device": self._runtime.device}
        both = self._runtime.sum(torch.stack([torch.as_tensor(whole, **kind), torch.as_tensor(weight, **kind)]))
        return both[0] / both[1]

    def _judge(self, step: int, loss: float) -> Rollback | None:
        settings, state = self._settings, self._state
        away = deviations(loss, state.losses) if len(state.losses) >= settings.window else 0.0
        was, state.spiking = state.spiking, away > settings.deviations
        if math.isfinite(loss):
            state.losses = [*state.losses[1 - settings.window :], loss]
        if not state.spiking or was:
            return None
        why = f"the loss is {loss:.4g}, {away:.1f} deviations above the median of the last {settings.window} steps"
        if settings.policy == "warn":
            self._logger.say(f"step {step}: {why}")
            self._logger.tracker.event(step, "spike", {"loss": loss, "deviations": round(away, 2)})
            return None
        half = settings.leave_out // 2
        return Rollback(step, why, range(max(0, step - half), step + settings.leave_out - half))

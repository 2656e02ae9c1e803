"""Handle losses and gradients that are not finite, by `train.nonfinite`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.errors import UserError
from trainkit.training.gradients import Update
from trainkit.training.model import Model
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState

MOST_SKIPPED = 10
"""Steps in a row that may be skipped before the run ends."""


class NotFinite(UserError):
    """A loss or gradient that is not finite, which a run that is continued as it was meets again."""


@dataclass(frozen=True)
class Rollback:
    """Request to return to an earlier checkpoint and continue without one step."""

    step: int
    """The step that went wrong."""
    why: str


class AsyncScalar:
    """A number of a step; a tensor is copied to the host without waiting for it."""

    def __init__(self, value: Tensor | bool, step: int):
        self.step = step
        self._value = value
        self._arrived: torch.cuda.Event | None = None
        if isinstance(value, Tensor):
            cuda = value.device.type == "cuda"
            # Of MPS nothing says when a copy has arrived.
            self._value = torch.empty((), dtype=value.dtype, pin_memory=cuda).copy_(
                value, non_blocking=value.device.type != "mps"
            )
            if cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> bool | float:
        """Return the number; waits for it alone."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value.item() if isinstance(self._value, Tensor) else self._value


class NonFiniteGuard:
    """End the run or request a rollback after a non-finite step: `stop` and `rollback`.

    It judges a step after the next one was queued, so that the host does not wait for the device.
    """

    def __init__(self, policy: str):
        self._policy = policy
        self._pending: deque[AsyncScalar] = deque()
        """Flags of steps that are not judged yet, oldest first."""

    def observe(self, update: Update) -> None:
        """Begin to copy the flag of a step from the device."""
        self._pending.append(AsyncScalar(update.finite, update.step))

    def verdict(self, wait: bool) -> Rollback | None:
        """Judge the steps before the last one; with `wait` the last one too. Raises UserError where policy says so."""
        while len(self._pending) > (0 if wait else 1):
            finite = self._pending.popleft()
            if not finite.read():
                return self._judge(finite.step)
        return None

    def reset(self) -> None:
        """Forget steps that are not judged yet."""
        self._pending.clear()

    def _judge(self, step: int) -> Rollback:
        why = "the loss or a gradient is not finite"
        if self._policy == "stop":
            raise NotFinite(
                f"step {step}",
                why,
                remedy="lower optim.lr or look at the data; no checkpoint holds this state. "
                "--resume train.nonfinite=skip, or rollback, continues without such steps",
            )
        return Rollback(step, why)


def skip(update: Update, model: Model, state: TrainState, logger: RunLogger) -> None:
    """Undo the forward pass of a skipped step. Raises UserError if the last ten steps were all skipped.

    For `train.nonfinite: skip`.
    """
    model.restore_buffers(update.buffers)
    if state.scaler is not None:
        state.scaler.update()  # it has looked at these gradients, and would not look at the next
    state.left_out.append(state.step)
    logger.tracker.event(state.step, "left_out", {"reason": "loss or gradient not finite"})
    if state.left_out[-MOST_SKIPPED:] == list(range(state.step - MOST_SKIPPED + 1, state.step + 1)):
        found = f"{MOST_SKIPPED} steps in a row were not finite"
        raise UserError(f"step {state.step}", found, remedy="lower optim.lr")

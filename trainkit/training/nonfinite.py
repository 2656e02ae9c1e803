"""Handle losses and gradients that are not finite, by `train.nonfinite`."""

from __future__ import annotations

from trainkit.errors import UserError
from trainkit.training.guards import Pending, Rollback, Update
from trainkit.training.model import Model
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState

MOST_SKIPPED = 10
"""Steps in a row that may be skipped before the run ends."""


class NotFinite(UserError):
    """A loss or gradient that is not finite, which a run that is continued as it was meets again."""


class NonFiniteGuard:
    """End the run or request a rollback after a non-finite step: `stop` and `rollback`."""

    def __init__(self, policy: str):
        self._policy, self._pending = policy, Pending()

    def observe(self, update: Update) -> None:
        """Take in the flag of a step."""
        self._pending.add(update.finite, update.step)

    def verdict(self, wait: bool) -> Rollback | None:
        """Judge the steps before the last one; with `wait` the last one too. Raises UserError where policy says so."""
        for step, finite in self._pending.take(wait):
            if not finite:
                return self._judge(step)
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
        return Rollback(step, why, range(step, step + 1))


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

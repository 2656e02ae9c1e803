"""Back to an earlier checkpoint, and on from there without the updates that went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.checkpoint import storage
from trainkit.distributed.runtime import Machine
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.training.run_logger import Witness
    from trainkit.training.state import State

MOST_ROLLBACKS = 5
"""A run that goes back more often does not get better by going back."""


@dataclass(frozen=True)
class Trouble:
    """An update after which a run goes back."""

    step: int
    why: str
    left_out: range
    """The updates that are not made the second time; `step` is one of them."""


def roll_back(state: State, trouble: Trouble, run: Witness, machine: Machine) -> None:
    """Return to the newest checkpoint before the updates that are to be left out, or to the oldest there is.

    What happens is a function of the state and of the checkpoints: a run that is killed meanwhile comes to the same.
    Raises UserError where there is no checkpoint, or the run has gone back too often.
    """
    first, last = trouble.left_out.start, trouble.left_out.stop
    passed, rollbacks, elapsed = [*state.passed, [first, last]], state.rollbacks + 1, state.elapsed
    sizes = state.micro_batch, state.eval_batches
    path = machine.lead(lambda: str(run.checkpoint_before(first, trouble.step) or ""))
    if not path or rollbacks > MOST_ROLLBACKS:
        why = "there is no checkpoint to go back to" if not path else f"this is rollback {rollbacks}"
        raise UserError(f"step {trouble.step}", f"{trouble.why}, and {why}", remedy="lower optim.lr")
    state.load(storage.read(Path(path)), machine.rank, run.elastic)
    state.passed, state.rollbacks, state.elapsed = passed, rollbacks, elapsed
    state.micro_batch, state.eval_batches = sizes  # what memory suffices for is known by now
    which = "that update" if last == first + 1 else f"updates {first} to {last - 1}"
    run.say(f"step {trouble.step}: {trouble.why}; back to step {state.step}, leaving {which} out")
    run.tracker.event(trouble.step, "rollback", {"to": state.step, "why": trouble.why, "left_out": [first, last]})

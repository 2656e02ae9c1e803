"""Save the state of a training, and return to a saved state."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.checkpoint import storage
from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.tracking.journal import Event
from trainkit.training.batch_stream import BatchStream
from trainkit.training.checkpoint_writer import CheckpointWriter
from trainkit.training.model import Model
from trainkit.training.nonfinite import Rollback
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState, changed_environment

MOST_ROLLBACKS = 5
"""A run that goes back more often does not get better by going back."""


@dataclass(frozen=True)
class Resume:
    """Describe where a run continues."""

    path: Path | None = None
    """Its checkpoint; None: from the start."""
    events: Sequence[Event] = ()
    """Journal events behind it: decisions by the clock that are repeated."""
    elastic: bool = False
    """Whether the number of processes may have changed since."""


def load(resume: Resume, state: TrainState, runtime: Runtime, logger: RunLogger) -> None:
    """Continue from a checkpoint, if there is one. Raises UserError if it belongs to another training."""
    if resume.path is not None:
        loaded = storage.read(resume.path)
        state.load(loaded, runtime.rank, resume.elastic)
        logger.changed_environment(state.step, changed_environment(loaded, _machine(runtime)))


def recorded_compile(resume: Resume) -> str | None:
    """Return the compile mode of the checkpoint to resume from, else None. Older checkpoints used the recipe's."""
    return None if resume.path is None else storage.state_of(resume.path).get("machine", {}).get("compile", "off")


def _machine(runtime: Runtime) -> dict[str, Json]:
    """Return what the bits hang on beside the recipe: it is kept, and compared on resume."""
    return {**runtime.describe(), "compile": runtime.compile}


class Checkpointer:
    """Save a training, each step once, and roll it back. Every rank calls it: sharded state is gathered."""

    def __init__(
        self,
        recipe: Recipe,
        state: TrainState,
        model: Model,
        batches: BatchStream,
        runtime: Runtime,
        logger: RunLogger,
        resume: Resume,
    ):
        self._recipe, self._state, self._model, self._batches = recipe, state, model, batches
        self._runtime, self._logger, self._clock, self._resume = runtime, logger, logger.clock, resume
        self._saved = set() if resume.path is None else {state.step}
        self.writer = CheckpointWriter(recipe, logger, state.constants)

    def save(self, required: bool = False, again: bool = False) -> None:
        """Begin to write a checkpoint of this step, unless there is one.

        Called only where the last update is known to be finite. `required`: without it the run fails. `again`: what is
        due or best has changed since the one there is.
        """
        state, runtime = self._state, self._runtime
        self._clock.to("checkpoint")
        if again:
            self._saved.discard(state.step)
        if state.step in self._saved and not required:
            return
        self.wait()
        if state.step in self._saved:
            return
        began = time.perf_counter()
        runtime.synchronize()
        runtime.check_tensors_equal("the state of batch norm or of class centres", self._model.buffers())
        copies, scalars = state.freeze(keep=runtime.main)
        meters, elapsed = runtime.all_gather(state.meter.state()), runtime.broadcast(state.total_elapsed(self._clock))
        kept = {**scalars, "tallies": meters, "elapsed": elapsed, "machine": _machine(runtime)}
        kept["trained"] = runtime.broadcast(state.total_trained(self._clock))
        kept["spent"] = state.total_spent(self._clock, self._logger.rates)
        self._batches.log_damage(state.step)
        runtime.on_main(lambda: self.writer.begin(state.step, copies, kept, required))
        self._saved.add(state.step)
        state.events.gates["safeguard"].took(time.perf_counter() - began, elapsed)

    def allocate(self, steps: int) -> None:
        """Get the memory of a first checkpoint, if one is due before `steps`, beside the next steps.

        Called after the first step, when the optimizer has its state.
        """
        saves = self._recipe.best is not None or self._state.events.gates["checkpoint"].due < steps
        if saves and self._runtime.main and not self._runtime.sharded:
            self._clock.to("setup")
            threading.Thread(target=self._state.allocator(), name="trainkit-room", daemon=True).start()

    def wait_for_copies(self, then: str) -> None:
        """Wait until the checkpoint that is being written needs nothing any more of what an update changes.

        The clock counts the wait as that of a checkpoint and goes on with the phase `then`.
        """
        if self.writer.copying:
            self._clock.to("checkpoint")
            self.writer.wait_for_copies()
            self._clock.to(then)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written lies on the disk, or cannot be put there.

        Raises what became of one without which the run does not go on: a UserError where the disk is full or fails.
        """
        self._clock.to("checkpoint")
        self._saved.discard(self._runtime.on_main(self.writer.settle))

    def close(self) -> None:
        """Wait for a checkpoint that is being written. What became of it is said and not raised."""
        try:
            self.writer.settle()
        except Exception as error:
            self._logger.say(f"the last checkpoint: {error}")

    def roll_back(self, rollback: Rollback) -> None:
        """Return to the newest checkpoint before the step that is to be skipped.

        What happens is a function of the state and of the checkpoints: a run that is killed meanwhile comes to the
        same. Raises UserError where there is no checkpoint, or the run has gone back too often.
        """
        self.wait()
        state = self._state
        path = self._runtime.on_main(lambda: str(self._valid_before(rollback.step) or ""))
        if not path or state.rollbacks >= MOST_ROLLBACKS:
            why = "no checkpoint exists to go back to" if not path else f"this is rollback {state.rollbacks + 1}"
            raise UserError(f"step {rollback.step}", f"{rollback.why}, and {why}", remedy="lower optim.lr")
        # Time goes on, and what memory suffices for is known by now.
        kept = {name: getattr(state, name) for name in ("elapsed", "trained", "spent", "micro_batch", "eval_batches")}
        left_out = [rollback.step, rollback.step + 1]
        kept |= {"passed": [*state.passed, left_out], "rollbacks": state.rollbacks + 1}
        state.load(storage.read(Path(path)), self._runtime.rank, self._resume.elastic)
        for name, value in kept.items():
            setattr(state, name, value)
        self._saved = {state.step}
        self._logger.say(f"step {rollback.step}: {rollback.why}; back to step {state.step}, leaving out that step")
        note = {"to": state.step, "why": rollback.why, "left_out": left_out}
        self._logger.tracker.event(rollback.step, "rollback", note)

    def _valid_before(self, step: int) -> Path | None:
        """Return the newest checkpoint of `step` or earlier that verifies."""
        path, problems = storage.valid_before(self.writer.folder.checkpoints, step)
        self._logger.refused_checkpoints(problems)
        return path

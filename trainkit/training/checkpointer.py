"""Save the state of a training, written to the disk in a thread while it trains, and continue from a saved state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainkit.checkpoint import storage
from trainkit.checkpoint.async_save import Commit
from trainkit.checkpoint.state_dict import Copies
from trainkit.checkpoint.verification import CheckpointError
from trainkit.config import loader
from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.errors import of_disk
from trainkit.files import Json
from trainkit.tracking.journal import Event
from trainkit.tracking.run_folder import RunFolder
from trainkit.training.batch_stream import BatchStream
from trainkit.training.model import Model
from trainkit.training.nonfinite import refuse_not_finite
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState, changed_environment

CHECKPOINT_FAILED = "trainkit.checkpoint_failed"
"""Tag of a run that went on without a checkpoint: at which step, why, and from which on there are some again."""


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
    """Save a training, each step once. Every rank calls it, since sharded state is gathered."""

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
        self._state, self._model, self._batches = state, model, batches
        self._runtime, self._logger, self._clock = runtime, logger, logger.clock
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
        runtime.check_tensors_equal("the state of batch norm or of class centres", self._model.equal_buffers())
        copies, scalars = state.freeze(keep=runtime.main)
        meters, elapsed = runtime.all_gather(state.meter.state()), runtime.broadcast(state.total_elapsed(self._clock))
        kept = {**scalars, "tallies": meters, "elapsed": elapsed, "machine": _machine(runtime)}
        kept["trained"] = runtime.broadcast(state.total_trained(self._clock))
        kept["spent"] = state.total_spent(self._clock, self._logger.rates, self._logger.used())
        self._batches.log_damage(state.step)
        runtime.on_main(lambda: self.writer.begin(state.step, copies, kept, required))
        self._saved.add(state.step)
        state.events.gates["safeguard"].took(time.perf_counter() - began, elapsed)

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


class CheckpointWriter:
    """Write one checkpoint at a time, and delete those that it replaces. Used on rank 0 of a run with a folder.

    If a `required` checkpoint cannot be written, the run fails. Otherwise `checkpoints.failing` decides: by default the
    error is reported and the next checkpoint tries again. `constants` are tensors that may be non-finite.
    """

    def __init__(self, recipe: Recipe, logger: RunLogger, constants: frozenset[str] = frozenset()):
        self._recipe, self._logger, self._constants = recipe, logger, constants
        self._commit: Commit | None = None
        self._failed = ""

    @property
    def folder(self) -> RunFolder:
        """The folder of the run. Raises RuntimeError where there is none."""
        return self._logger.require_folder()

    @property
    def copying(self) -> bool:
        """Return whether a checkpoint still needs what an update changes."""
        return self._commit is not None and self._commit.copying

    @property
    def ends_run(self) -> bool:
        """Return whether a checkpoint without which the run does not go on could not be written."""
        return self._commit is not None and self._commit.ends

    def begin(self, step: int, copies: Copies, state: Mapping[str, Json], required: bool = False) -> None:
        """Begin to write, after `settle`. Before anything changes what was promised to `copies`, `wait_for_copies`."""
        # What is logged from here on is computed again by a run that is resumed from this.
        state = {**state, "journal": self._logger.tracker.position()}
        required = required or self._recipe.checkpoints.failing == "stop"

        def write(tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
            try:
                self._write(step, tensors, state)
            except CheckpointError as error:
                if not required:  # said now, and not when the next is due
                    goes_on = "training continues and tries again at the next checkpoint"
                    self._logger.say(f"step {step}: {error}; {goes_on}")
                    self._logger.tracker.event(step, "checkpoint_failed", {"error": str(error)})
                raise

        self._commit = Commit(step, copies, write, required)
        self._commit.start()

    def _write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Json]) -> None:
        refuse_not_finite(tensors, self._constants, step)
        folder, keep = self.folder, self._recipe.checkpoints
        folder.refuse_deleted()
        try:
            self._logger.tracker.commit()
        except OSError as error:  # no checkpoint is written before the journal that it points into
            said = of_disk(error, folder.journal)
            found, remedy = (said.found, said.remedy) if said else (str(error), "")
            raise CheckpointError(str(folder.journal), found, remedy=remedy) from error
        storage.write(folder.checkpoints, step, tensors, state, loader.dump(self._recipe))
        # After a resume from an older checkpoint, later ones belong to a future that was given up.
        storage.drop_after(folder.checkpoints, step)
        best = [record["step"] for record in state["best"]]
        storage.prune(folder.checkpoints, keep.keep_last, best[: keep.keep_best])
        with contextlib.suppress(OSError):  # for people; the checkpoint says it itself
            folder.update(last_step=step)

    def wait_for_copies(self) -> None:
        """Wait until the checkpoint needs nothing any more of what an update changes."""
        if self._commit is not None:
            self._commit.copied()

    def settle(self) -> int | None:
        """Wait until the checkpoint lies on the disk, and what it supersedes is gone.

        Returns the step of one that could not be written, without which the training goes on; None where there is none.
        Raises what became of one that had to be: a UserError where the disk is full or fails.
        """
        if self._commit is None:
            return None
        self._commit.join()
        commit, self._commit = self._commit, None
        if commit.failure is not None:
            if commit.ends:
                raise commit.failure
            self._failed = f"step {commit.step}: {commit.failure}"
            self._logger.tracker.tags({CHECKPOINT_FAILED: self._failed})
            return commit.step
        if self._failed:
            self._logger.say(f"step {commit.step}: checkpoints can be written again")
            tag = f"{self._failed}; written again at step {commit.step}"
            self._logger.tracker.tags({CHECKPOINT_FAILED: tag})
            self._failed = ""
        return None

"""Write the checkpoints of a run in a thread while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import Tensor

from trainkit.checkpoint import storage
from trainkit.checkpoint.async_save import Commit
from trainkit.checkpoint.state_dict import Copies
from trainkit.checkpoint.verification import CheckpointError
from trainkit.config import loader
from trainkit.config.schema import Recipe
from trainkit.errors import of_disk
from trainkit.files import Json
from trainkit.tracking.run_folder import RunFolder
from trainkit.training.finite_checks import refuse_not_finite
from trainkit.training.run_logger import RunLogger

CHECKPOINT_FAILED = "trainkit.checkpoint_failed"
"""Tag of a run that went on without a checkpoint: at which step, why, and from which on there are some again."""


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
    def writing(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._commit is not None and self._commit.is_alive()

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
        # After a resume from an older checkpoint, or a rollback, later ones belong to a future that was given up.
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

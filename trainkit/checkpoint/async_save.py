"""Write a checkpoint in a thread during the training.

The training continues as soon as the tensors that a forward pass changes are copied. Tensors that only the optimizer
step changes are copied during the next forward and backward pass, and the step waits for that; hashing, writing and
syncing continue in the background. One checkpoint is written at a time (after CheckFreq, Mohan et al., FAST 2021).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from trainkit.checkpoint.state_dict import Copies
from trainkit.checkpoint.verification import CheckpointError


class Commit(threading.Thread):
    """Copies tensors and then writes them: `write` gets the copies by file and name.

    `required`: the training ends if it fails.
    """

    def __init__(
        self, step: int, copies: Copies, write: Callable[[Mapping[str, Mapping[str, Tensor]]], object], required: bool
    ):
        super().__init__(name="trainkit-checkpoint", daemon=True)
        self.step = step
        self._work, self._required = (copies, write), required
        self._copied = threading.Event()
        self.failure: BaseException | None = None
        """The error, if the checkpoint failed; valid after the thread has ended."""

    def run(self) -> None:
        """Copy, then write."""
        copies, write = self._work
        del self._work  # free the copies as soon as they are written
        try:
            try:
                files = copies.make()
            except MemoryError as error:
                remedy = "free memory; older checkpoints are intact"
                raise CheckpointError(
                    f"checkpoint of step {self.step}", "out of memory while copying tensors", "", remedy
                ) from error
            finally:
                self._copied.set()
            write(files)
        except BaseException as failure:  # raised where the training waits, `CheckpointWriter.settle`
            self.failure = failure

    @property
    def ends(self) -> bool:
        """Return True if the training must end with the failure; failures of the disk may be temporary."""
        return self.failure is not None and (self._required or not isinstance(self.failure, CheckpointError))

    @property
    def copying(self) -> bool:
        """Return True while the training's own memory is being copied."""
        return not self._copied.is_set()

    def copied(self) -> None:
        """Wait until the training's memory is copied."""
        self._copied.wait()

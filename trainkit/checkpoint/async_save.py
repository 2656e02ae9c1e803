"""Write a checkpoint in a thread beside the training.

The training goes on as soon as what a forward changes is copied. What only an update changes is copied while the next
forward and backward run, and the update waits for that; hashing, writing and syncing go on behind it. One checkpoint is
under way at a time (after CheckFreq, Mohan et al., FAST 2021: snapshot and persist, each beside the computation).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from trainkit.checkpoint.state_dict import Copies
from trainkit.checkpoint.verification import CheckpointError


class Commit(threading.Thread):
    """Copies tensors and then writes them: `write` gets the copies by file and name.

    `required`: the training does not go on without it.
    """

    def __init__(
        self, step: int, copies: Copies, write: Callable[[Mapping[str, Mapping[str, Tensor]]], object], required: bool
    ):
        super().__init__(name="trainkit-checkpoint", daemon=True)
        self.step = step
        self._work, self._required = (copies, write), required
        self._copied = threading.Event()
        self.failure: BaseException | None = None
        """Why there is no checkpoint; settled when the thread has ended."""

    def run(self) -> None:
        """Copy, then write."""
        copies, write = self._work
        del self._work  # the copies go when they are written, and not when somebody asks what became of them
        try:
            try:
                files = copies.make()
            except MemoryError as error:
                remedy = "free some memory; older checkpoints are intact"
                raise CheckpointError(
                    f"checkpoint of step {self.step}", "no memory for its copies", "", remedy
                ) from error
            finally:
                self._copied.set()
            write(files)
        except BaseException as failure:  # raised where the training waits, `CheckpointWriter.settle`
            self.failure = failure

    @property
    def ends(self) -> bool:
        """Return True where the training must end with the failure: one of the disk may pass, others do not."""
        return self.failure is not None and (self._required or not isinstance(self.failure, CheckpointError))

    @property
    def copying(self) -> bool:
        """Return True while the training's own memory is being copied."""
        return not self._copied.is_set()

    def copied(self) -> None:
        """Wait until the training's memory is copied."""
        self._copied.wait()

"""The toy's data, which does something to whoever reads a chosen row: what readers of batches are tested with."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import toy

from trainkit.interfaces import Dataset


def _raise() -> None:
    raise ValueError("no such thing")


def _crash() -> None:
    faulthandler.disable()  # pytest has enabled it; what it writes would stand between the lines of the tests
    ctypes.string_at(0)


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": _crash,
    "raises": _raise,
    "hangs": lambda: time.sleep(3600),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "out of memory": lambda: np.ones(1 << 50),
    "leaves": lambda: os._exit(3),
}


@dataclass(kw_only=True)
class FailingData(toy.ToyData):
    """Given the names of a fault and of a file, a worker that reads `row` does so once, or without a file always."""

    fault: str = "killed"
    row: int = 11
    once: str | None = None

    def open(self, seed: int) -> Dataset:
        opened = super().open(seed)
        opened.train.__class__ = FailingSplit
        opened.train.fails = (FAULTS[self.fault], self.row, self.once, os.getpid())
        return opened


class FailingSplit(toy.ToySplit):
    def fetch(self, indices, epoch, view=None):
        fault, row, once, training = self.fails
        if row in indices and os.getpid() != training and first_time(once):
            fault()
        return super().fetch(indices, epoch, view)


def first_time(file: str | None) -> bool:
    """Whether a file was not there yet, which it is from then on; of None always."""
    if file is None:
        return True
    try:
        Path(file).open("x").close()
    except FileExistsError:
        return False
    return True

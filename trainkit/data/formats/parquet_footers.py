"""Footers of Parquet files, which a child of this process reads first.

Where pyarrow's Python reads what a footer says of a column, nothing catches what Arrow throws: 25.0.1 aborts the
interpreter over a histogram of levels that is too long, 3 of 5,500 damaged files. Reading the data is caught.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
from pathlib import Path

from trainkit.errors import UserError

_SECONDS = 60
"""A child that takes longer says nothing: it may wait for a lock that another thread of its parent held."""


def refuse_fatal(file: Path) -> None:
    """Raise UserError for a Parquet file whose footer ends the process that reads it. Looks on Linux alone."""
    if sys.platform.startswith("linux") and hasattr(os, "fork"):
        found = file.stat()
        number = _ended_by(file, found.st_ino, found.st_size, found.st_mtime_ns)
        if number:
            said = f"its footer ends the process that reads it ({signal.Signals(number).name})"
            raise UserError(str(file), said, "a Parquet file", "write or download it anew")


@functools.lru_cache(maxsize=10_000)
def _ended_by(file: Path, *_: int) -> int:
    """Return the signal that ended a child which read a footer, 0 for none."""
    import pyarrow.parquet as pq

    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Arrow says as it goes
            faulthandler.disable()
            _leave_no_core()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_SECONDS)
            footer = pq.ParquetFile(file).metadata
            for group in map(footer.row_group, range(footer.num_row_groups)):
                for part in map(group.column, range(group.num_columns)):
                    part.to_dict()
        finally:
            os._exit(0)  # what it raises, its parent will
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGALRM else 0


def _leave_no_core() -> None:
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

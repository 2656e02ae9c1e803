"""Standard output and error that outlive whoever reads them.

`| head`, a terminal that is closed, a pager, a log on a full disk: what is said then is lost, and the training goes on.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Enduring(io.FileIO):
    """A file descriptor that takes everything: what cannot be written is dropped."""

    def write(self, data: Any, /) -> int:
        """Write bytes, a buffer of any kind, and return the length of all that was given in any case."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                written = super().write(left)
                if not written:  # whoever reads is too slow for a pipe that does not block
                    break
                left = left[written:]
        except OSError:
            pass
        return size


def outlive_readers() -> None:
    """Let writing to standard output and error fail no more, whatever becomes of what is behind them.

    Where one was closed before the process began, /dev/null takes its place: else a file that is opened later would get
    its number, and what libraries print. Streams that something else was put in place of are left alone.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        stream = getattr(sys, name)
        if name == "stdin" or stream is not getattr(sys, f"__{name}__") or isinstance(_raw(stream), _Enduring):
            continue
        if stream is not None:
            stream.flush()
        new = io.TextIOWrapper(
            io.BufferedWriter(_Enduring(number, "w", closefd=False)),
            encoding=getattr(stream, "encoding", None) or "utf-8",
            errors=getattr(stream, "errors", None) or "backslashreplace",
            line_buffering=name == "stderr" or os.isatty(number),
            newline="\n",
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _raw(stream: object) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)

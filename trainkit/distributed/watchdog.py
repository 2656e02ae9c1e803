"""End a training that hangs, and write the stacks of all its threads.

A thread checks for progress: a phase of a step, a step, a batch of an evaluation. It also keeps restarting the timer of
`faulthandler`, which runs outside of Python and so ends the process even where the interpreter's lock is never released
(NVIDIA's resiliency extension injects that fault as LOCK_GIL). Either writes the stacks to
`stacks-process-<rank>.txt` of the run's folder.

Time counts from the end of a process's first step, which may compile for long, to the end of training. The thread
counts its own ticks, so time in which a process is stopped does not count. The timer is stopped by Ctrl-Z and by
schedulers that suspend (SIGTSTP). A process cannot see SIGSTOP, and one that is continued after more than the limit may
be ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from trainkit.distributed import rank_failures


class Watchdog(threading.Thread):
    """Ends the process when `moved` has been the same for `limit` seconds. `start` it in the main thread."""

    def __init__(self, limit: float, moved: Callable[[], object], folder: Path, rank: int):
        super().__init__(name="trainkit-watchdog", daemon=True)
        self._limit, self._moved, self._folder, self._rank = limit, moved, folder, rank
        self._tick = min(30.0, limit / 20)
        self._over = threading.Event()
        self._file = open(rank_failures.stacks(folder, rank), "w", encoding="utf-8")  # noqa: SIM115 - the timer writes to it
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, _suspend)

    def run(self) -> None:
        """Look, and restart the timer."""
        before, still = self._moved(), 0.0
        while True:
            # A little later than the thread itself, which can say more.
            faulthandler.dump_traceback_later(self._limit + 3 * self._tick, file=self._file, exit=True)
            if self._over.wait(self._tick):
                faulthandler.cancel_dump_traceback_later()
                return
            now = self._moved()
            still = still + self._tick if now == before else 0.0
            before = now
            if still >= self._limit:
                self._end()

    def stop(self) -> None:
        """Stop watching: the training is over."""
        self._over.set()
        self.join()
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(rank_failures.stacks(self._folder, self._rank))

    def _end(self) -> None:
        words = f"no progress for {self._limit:g} s (limits.hang)"
        rank_failures.note(self._folder, self._rank, words)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(self._file)
            print(f"rank {self._rank}: {words}; stacks of all threads:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(2)
        os._exit(1)


def _suspend(number: int, frame: object) -> None:
    faulthandler.cancel_dump_traceback_later()  # until the next tick
    os.kill(os.getpid(), signal.SIGSTOP)

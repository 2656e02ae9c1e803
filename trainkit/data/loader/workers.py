"""Processes that read batches for a training, and what happens when one of them dies, raises, hangs or is stopped.

What a worker reads is a pure function of its key, so another one in its place reads the same bits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import math
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.config.schema import Loader
from trainkit.data import thread_pool
from trainkit.data.loader import batch_memory
from trainkit.data.loader.batch_memory import BatchMemory
from trainkit.errors import UserError, few
from trainkit.interfaces import Batch
from trainkit.redact import hide_in_logs

RESTARTS = 3
"""How often workers are replaced before their trouble ends the run."""

Key = tuple[int, np.ndarray]
"""Epoch, and rows."""

_LOOKS_EVERY = 0.5
"""Seconds after which a DataLoader that waits is interrupted, to see whether its process lives."""
GRACE = 5.0
"""Seconds that a killed process has to be gone; one that waits for a disk that hangs is not waited for."""
_IGNORED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)
"""Sent to a whole group of processes, they are for the training to answer: it still wants its batches."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

_log = logging.getLogger("trainkit")


class Readable(Protocol):
    """A split as far as it is read: its name, and its samples."""

    name: str

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the samples at `indices`, as `Split.fetch`."""
        ...


class Workers:
    """Processes that read a split: those of one DataLoader. Close it, or leave it as a context, and none is left.

    A loss ends all of them, and as many others read what was asked for and is not there yet.
    """

    def __init__(self, split: Readable, loader: Loader, tell: Callable[[str], None] | None = None):
        """`tell` is called with a sentence whenever processes had to be replaced.

        Raises UserError for a way to start them that this system has not.
        """
        if loader.start not in (None, *multiprocessing.get_all_start_methods()):
            remedy = "remove it to use the platform's default"
            raise UserError("loader.start", f"{loader.start}, which this platform does not have", "spawn", remedy)
        self._split, self._loader, self._tell = split, loader, tell
        self._patience = math.ceil(loader.timeout.seconds / _LOOKS_EVERY)
        self._restarts, self._owner, self._closed = 0, os.getpid(), False
        self._asked: deque[tuple[Key, BatchMemory | None]] = deque()
        """The key of each batch that is to come, and where a worker leaves it; None where there is no such memory:
        torch shares arrays."""
        self.processes: list[BaseProcess] = []

    def read(self, keys: Iterable[Key]) -> Iterator[Batch]:
        """Start the processes, and return the batches of `keys` in their order.

        A UserError of a read is raised where its batch stands, and no sooner. Lost processes are replaced, RESTARTS
        times in all; then a UserError says what was being read.
        """
        # Before multiprocessing's own, registered earlier, which would wait for them.
        atexit.register(self.close)
        self._keys = iter(keys)
        self._start()
        return iter(self._next, None)

    def _start(self) -> None:
        self._lost: _Lost | None = None
        loader = DataLoader(
            _Requests(self._split),
            batch_size=None,
            sampler=self._requests(),
            collate_fn=_same,
            num_workers=self._loader.workers,
            prefetch_factor=self._loader.prefetch,
            timeout=self._loader.timeout.seconds / self._patience,
            multiprocessing_context=self._loader.start,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # or it draws a seed of its own from the training's
        )
        handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
        try:
            # As many queues as it makes: of one that gets too few, torch prints a traceback.
            room = [multiprocessing.get_context(self._loader.start).Queue() for _ in range(self._loader.workers + 2)]
            del room
            with _held_signals():
                self._answers: Any = iter(loader)
        except OSError as error:
            found = f"{self._loader.workers}, but a worker process cannot be started ({error.strerror or error})"
            remedy = "set loader.workers=0; or allow more processes, and leave 1 MB of /dev/shm to their queues"
            raise UserError("loader.workers", found, remedy=remedy) from None
        if handler is not None and threading.current_thread() is threading.main_thread():
            # torch's would raise wherever the training stands, within a step or a checkpoint as well.
            signal.signal(signal.SIGCHLD, handler)
        # Nor may it where it stays, since another thread starts the workers or the system hides the signal.
        torch._C._remove_worker_pids(id(self._answers))
        self._answers._worker_pids_set = False
        self.processes = list(self._answers._workers)

    def _requests(self) -> Iterator[tuple[int, np.ndarray, str | None]]:
        """Yield what the DataLoader hands to its processes, as it has room for more."""
        with_memory = batch_memory.possible()
        for key in self._keys:
            memory = BatchMemory() if with_memory else None
            self._asked.append((key, memory))
            yield (*key, memory.path if memory else None)

    def _next(self) -> Batch | None:
        """Return the next batch, None behind the last one and when this was closed by another thread."""
        while self._asked and not self._closed:
            try:
                return self._take()
            except (_Lost, OSError, ValueError, RuntimeError) as lost:
                if self._closed:
                    return None
                if not isinstance(lost, _Lost):
                    raise
                self._replace(lost)
        return None

    def _take(self) -> Batch:
        """Return the batch that was asked for first. Raises UserError as reading it did, _Lost for other ends."""
        (_, memory), batch = self._asked[0], None
        if self._lost is None:
            try:
                batch = self._answer()
            except _Lost as lost:
                self._lost = lost
        if memory is not None:
            # A process may have ended before it sent word of what it had read whole.
            batch = memory.batch()
        if batch is None:
            raise self._lost or _Lost("a worker process left no batch")
        self._asked.popleft()
        if memory is not None:
            memory.close()
        return batch

    def _answer(self) -> Batch | None:
        """Wait until the DataLoader has what a process says. Raises UserError as reading did, _Lost for all else."""
        # In parts, of which one is over early where all processes were stopped for hours and go on: that is no silence.
        for _ in range(self._patience):
            try:
                answer = next(self._answers, None)
            except RuntimeError as error:  # all that a DataLoader says of its processes
                for process in self.processes:
                    if not process.is_alive():
                        raise _Lost(f"a worker process {_ended(process.exitcode)}") from None
                if "timed out" not in str(error):
                    raise
                continue
            except OSError as error:
                raise _Lost(f"cannot read from a worker process ({error.strerror or error})") from None
            if isinstance(answer, UserError):
                raise answer
            if isinstance(answer, str):
                _log.warning("a worker process raised\n%s", answer)
                raise _Lost(f"a worker process raised {answer.splitlines()[-1][:300]}")
            return answer
        raise _Lost(f"a worker process was silent for {self._loader.timeout.seconds:g} s (loader.timeout)")

    def _replace(self, lost: _Lost) -> None:
        """Have other processes read all that is to come. Raises UserError when it was done RESTARTS times before."""
        key, _ = self._asked[0]
        reading = f"loader, epoch {key[0]}, rows {few(map(str, key[1].tolist()), 8)} of {self._split.name}"
        self._restarts += 1
        if self._restarts > RESTARTS:
            self.close()
            again = f"; {RESTARTS} were replaced before" if RESTARTS else ""
            remedy = "set loader.workers=0 to read in the training process; --resume continues the run"
            raise UserError(reading, f"{lost}{again}", remedy=remedy) from None
        said = f"{reading}: {lost}; replaced ({self._restarts} of {RESTARTS} times)"
        _log.warning("%s", said)
        if self._tell is not None:
            self._tell(said)
        self._end()
        self._keys = itertools.chain([key for key, _ in self._asked], self._keys)
        self._asked.clear()
        self._start()

    def _end(self) -> None:
        """End all processes, whatever they are at; one that is stopped dies of that too."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(GRACE)
        # A DataLoader's end sets this event, whose lock a killed process may hold for ever.
        self._answers._workers_done_event = threading.Event()
        self._answers._shutdown_workers()
        self._answers = iter(())
        for process in self.processes:
            with contextlib.suppress(ValueError):  # of one that is still there
                process.close()
        for _, memory in self._asked:
            if memory is not None:
                memory.close()

    def close(self) -> None:
        """End all processes."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.processes:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class _Lost(Exception):
    """Raised with a sentence about what became of a worker."""


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Hold back what is sent to the whole group meanwhile: nothing reaches a new process before it ignores it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(code: int | None) -> str:
    """Describe the end of a process by its exit code."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", as a system out of memory does" if name == "SIGKILL" else "")


# ---- In a worker


class _Requests(Dataset):
    """A split as a DataLoader asks: a batch by its key, left in memory where there is some."""

    def __init__(self, split: Readable):
        self._split = split

    def __getitem__(self, request: tuple[int, np.ndarray, str | None]) -> Batch | UserError | str | None:
        epoch, rows, path = request
        try:
            with thread_pool.alone():
                batch = self._split.fetch(rows, epoch)
            if path is None:
                return batch
            batch_memory.write(path, batch)
            return None
        except UserError as error:
            return error
        except Exception:
            return traceback.format_exc().rstrip()


def _same(answer: Any) -> Any:
    return answer


def _begin(_: int) -> None:
    hide_in_logs()  # one that was not forked knows nothing of it
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for name in ("SIGSEGV", "SIGBUS", "SIGFPE"):  # of which torch would print a line that ends in a zero byte
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    with contextlib.suppress(AttributeError):  # it then ends when the DataLoader's watchdog finds its parent gone
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    # It may have died before. `is_alive` does not tell: siblings hold the pipe that it looks at.
    if parent is not None and os.getppid() == 1 != parent.pid:
        os._exit(1)
    batch_memory.close_all()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the only one on macOS and Windows

"""Processes that read batches for a training, and what happens when one of them dies, raises, hangs or is stopped.

Each has a socket of its own, over which either side hands the other a descriptor of anonymous memory that holds arrays.
There is no lock that a killed worker could hold, no thread, no file and no /dev/shm; a message comes whole or not at
all. PyTorch's DataLoader was left for this: one stopped worker (SIGSTOP) kept its process from ever leaving, and one
that died raised an exception wherever the training stood, within a step or a checkpoint as well.

What a worker reads is a pure function of its key, so another one in its place reads the same bits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import logging
import math
import mmap
import multiprocessing
import os
import signal
import socket
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from trainkit.config.schema import Loader
from trainkit.data.loader import thread_pool
from trainkit.errors import UserError, few
from trainkit.interfaces import Batch
from trainkit.redact import hide_in_logs

RESTARTS = 3
"""How often workers are replaced before their trouble ends the run."""

Key = tuple[int, np.ndarray]
"""Epoch, and rows."""

_HEADER = 1 << 16
"""Most bytes that describe the arrays of a message."""
_ALIGNED = 64
GRACE = 5.0
"""Seconds that a killed process has to be gone; one that waits for a disk that hangs is not waited for."""
SILENT = "a worker process was silent for {:g} s (loader.timeout)"
_IGNORED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)
"""Sent to a whole group of processes, they are for the training to answer: it still wants its batches."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

_log = logging.getLogger("trainkit")
_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""This process's ends of sockets. A worker closes its copies, so that each ends with the process it was made for."""


class Readable(Protocol):
    """A split as far as it is read: its name, and its samples."""

    name: str

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the samples at `indices`, as `Split.fetch`."""
        ...


def missing() -> list[str]:
    """List what these processes need and this platform lacks; none on Linux."""
    needed = {os: ("fork", "memfd_create", "pwrite"), socket: ("AF_UNIX", "SCM_RIGHTS"), signal: ("pthread_sigmask",)}
    return [
        f"{module.__name__}.{name}" for module, names in needed.items() for name in names if not hasattr(module, name)
    ]


class Workers:
    """Processes that read a split. Close it, or leave it as a context, and none is left."""

    def __init__(self, split: Readable, loader: Loader, tell: Callable[[str], None] | None = None):
        """Start them. `tell` is called with a sentence whenever one had to be replaced."""
        self._loader, self._tell = loader, tell
        self._restarts, self._owner, self._closed = 0, os.getpid(), False
        process = multiprocessing.get_context(loader.start).Process
        self._workers = [_Worker(process, split, loader.timeout.seconds) for _ in range(loader.workers)]
        # Before multiprocessing's own, registered earlier, which would wait for them.
        atexit.register(self.close)

    def read(self, keys: Iterable[Key]) -> Iterator[Batch]:
        """The batches of `keys`, in their order. Raises the UserError of a read where it stands, and no sooner.

        A worker that is lost is replaced, RESTARTS times in all; then a UserError says what it was reading.
        """
        keys, turns = iter(keys), deque()

        def ask(worker: _Worker) -> None:
            if (key := next(keys, None)) is not None:
                worker.ask(key)
                turns.append(worker)

        for _ in range(self._loader.prefetch):
            for worker in self._workers:
                ask(worker)
        while turns:
            worker = turns.popleft()
            batch = self._taken(worker)
            if batch is None:
                return
            ask(worker)
            yield batch

    def _taken(self, worker: _Worker) -> Batch | None:
        while not self._closed:
            try:
                return worker.take()
            except (Lost, OSError, ValueError) as lost:
                if self._closed:  # by another thread
                    return None
                if not isinstance(lost, Lost):
                    raise
                self._restarts += 1
                if self._restarts > RESTARTS:
                    self.close()
                tell_lost(worker.reading(), lost, self._restarts, self._tell)
                worker.replace()
        return None

    def close(self) -> None:
        """End all, whatever they are at."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def tell_lost(reading: str, lost: object, times: int, tell: Callable[[str], None] | None) -> None:
    """Report that a worker was lost and another one reads. Raises UserError once that has been done RESTARTS times."""
    if times > RESTARTS:
        again = f"; {RESTARTS} were replaced before" if RESTARTS else ""
        remedy = "set loader.workers=0 to read in the training process; --resume continues the run"
        raise UserError(f"loader, {reading}", f"{lost}{again}", remedy=remedy) from None
    said = f"loader, {reading}: {lost}; replaced ({times} of {RESTARTS} times)"
    _log.warning("%s", said)
    if tell is not None:
        tell(said)


def describe(key: Key, split: Readable) -> str:
    """Describe a batch by its epoch, its first rows and its split."""
    epoch, rows = key
    return f"epoch {epoch}, rows {few(map(str, rows.tolist()), 8)} of {split.name}"


class Lost(Exception):
    """Raised with a sentence about what became of a worker."""


class _Worker:
    """One process, and the batches that it was asked for and has not given yet."""

    def __init__(self, process: Callable[..., BaseProcess], split: Readable, timeout: float):
        self._process, self._split, self._timeout = process, split, timeout
        self._asked: deque[Key] = deque()
        self._start()

    def _start(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(self._timeout)
        _ours.add(self._link)
        self.process = self._process(target=_serve, args=(theirs, self._split), name="trainkit-worker", daemon=True)
        # Of what is sent to the whole group meanwhile nothing reaches the new one before it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def ask(self, key: Key) -> None:
        """Have it read a batch, when it has read what it was asked before."""
        self._asked.append(key)
        self._send(key)

    def _send(self, key: Key) -> None:
        with contextlib.suppress(OSError):  # it is lost: `take` finds out how
            _put(self._link, {"epoch": key[0]}, {"rows": torch.from_numpy(np.array(key[1]))})

    def take(self) -> Batch:
        """The batch that it was asked for first. Raises UserError as reading it did, Lost for all other ends."""
        # In parts, of which one is over early where all processes were stopped for hours and go on: that is no silence.
        parts = math.ceil(self._timeout)
        for _ in range(parts):
            if ready := wait([self._link, self.process.sentinel], self._timeout / parts):
                break
        else:
            raise Lost(SILENT.format(self._timeout))
        try:
            message = _get(self._link) if self._link in ready else None
        except ConnectionResetError:
            message = None
        except OSError as error:
            raise Lost(f"cannot read from a worker process ({error.strerror or error})") from None
        if message is None:
            self.process.join(GRACE)
            raise Lost(f"a worker process {ended(self.process.exitcode)}")
        said, batch = message
        if "raised" not in said:
            self._asked.popleft()
        return opened(said, batch)

    def reading(self) -> str:
        """Describe the batch that it was asked for first."""
        return describe(self._asked[0], self._split)

    def replace(self) -> None:
        """End it, and have another one read all that it was asked for."""
        self.process.kill()
        self.end()
        self._start()
        for key in self._asked:
            self._send(key)

    def end(self) -> None:
        """Wait until it is gone, after it was killed; one that is stopped dies of that too."""
        self.process.join(GRACE)
        self._link.close()
        with contextlib.suppress(ValueError):  # of one that is still there
            self.process.close()


def ended(code: int | None) -> str:
    """Describe the end of a process by its exit code."""
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", as a system out of memory does" if name == "SIGKILL" else "")


# ---- In a worker


def leave_signals() -> None:
    """Ignore the signals that are for the training to answer."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _serve(link: socket.socket, split: Readable) -> None:
    hide_in_logs()  # one that was not forked knows nothing of it
    leave_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    with contextlib.suppress(AttributeError):  # it then ends when it finds its socket closed
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    for other in list(_ours):
        other.close()
    torch.set_num_threads(1)
    with (
        thread_pool.alone(),
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):  # of whoever asked and is gone
        while (message := _get(link)) is not None:
            said, request = message
            _put(link, *answer(split, request["rows"].numpy(), said["epoch"]))
    os._exit(0)  # what the training would do at its end is not for its forks to do


def answer(split: Readable, rows: np.ndarray, epoch: int) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Read a batch, or describe in words and in letters the error that it raises."""
    try:
        return {}, split.fetch(rows, epoch)
    except UserError as error:
        said, text = {"mistake": True}, json.dumps([error.where, error.found, error.expected, error.remedy])
    except Exception:
        said, text = {"raised": True}, traceback.format_exc()
    return said, {"text": torch.frombuffer(bytearray(text, "utf-8", "backslashreplace"), dtype=torch.uint8)}


def opened(said: Mapping[str, Any], batch: Batch) -> Batch:
    """Return the batch that `answer` read. Raises the UserError of its read, Lost for any other error."""
    if "raised" in said:
        text = _text(batch["text"])
        _log.warning("a worker process raised\n%s", text.rstrip())
        raise Lost(f"a worker process raised {text.rstrip().splitlines()[-1][:300]}")
    if "mistake" in said:
        raise UserError(*json.loads(_text(batch["text"])))
    return batch


def _text(letters: Tensor) -> str:
    return letters.numpy().tobytes().decode("utf-8")


# ---- Messages


def _put(link: socket.socket, said: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
    """Send a few words, and arrays in memory that whoever receives them has to itself."""
    room = os.memfd_create("trainkit-batch")
    try:
        listed, place = [], 0
        for name, array in arrays.items():
            listed.append([name, str(array.dtype).removeprefix("torch."), list(array.shape), place])
            flat = array.contiguous().reshape(-1)  # of none, PyTorch sees no bytes
            content = flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")
            while content:
                written = os.pwrite(room, content, place)
                content, place = content[written:], place + written
            place += -place % _ALIGNED
        header = json.dumps({**said, "arrays": listed}).encode()
        if len(header) > _HEADER:
            raise ValueError(f"{len(arrays)} arrays in a batch, more than a message describes")
        socket.send_fds(link, [header], [room])
    finally:
        os.close(room)


def _get(link: socket.socket) -> tuple[dict[str, Any], Batch] | None:
    """Receive what `_put` sent; None where the other side is gone."""
    header, (*rooms,), _, _ = socket.recv_fds(link, _HEADER, 1)
    if not header:
        return None
    if not rooms:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        said = json.loads(header)
        size = os.fstat(rooms[0]).st_size
        # All pages at once: a batch of 5 MB is read through 1,200 of them.
        memory = mmap.mmap(rooms[0], size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) if size else b""
    finally:
        for room in rooms:
            os.close(room)
    arrays = {}
    for name, kind, shape, place in said.pop("arrays"):
        dtype, many = getattr(torch, kind), math.prod(shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=many, offset=place) if many else torch.empty(0, dtype=dtype)
        arrays[name] = flat.reshape(shape)
    return said, arrays

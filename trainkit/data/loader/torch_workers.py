"""Processes that read batches through torch's DataLoader, where the system lacks what `worker_pool` needs: no Linux.

The interface is that of `worker_pool.Workers`, and so are the batches: they are pure functions of their keys. When a
worker is lost all are replaced: one that dies takes batches with it that it had read and not handed over, so that the
rows that are named may come before those it was reading.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.config.schema import Loader
from trainkit.data.loader import thread_pool, worker_pool
from trainkit.data.loader.worker_pool import Key, Lost, Readable, Workers
from trainkit.errors import UserError
from trainkit.interfaces import Batch
from trainkit.redact import hide_in_logs

_LOOKS_EVERY = 5.0
"""Seconds after which a DataLoader that waits is interrupted, to see whether its processes live."""

_log = logging.getLogger("trainkit")


def workers(split: Readable, loader: Loader, tell: Callable[[str], None] | None = None) -> Workers | TorchWorkers:
    """Start worker processes: those of `worker_pool`, or torch's where the system lacks what these need.

    `tell` is called with a sentence whenever one had to be replaced. Raises UserError for a way to start them that this
    system has not.
    """
    if loader.start not in (None, *multiprocessing.get_all_start_methods()) or (
        loader.start == "fork" and not hasattr(os, "fork")
    ):
        remedy = "remove it to use the platform's default"
        raise UserError("loader.start", f"{loader.start}, which this platform does not have", "spawn", remedy)
    if lacks := worker_pool.missing():
        _log.warning(
            "loader.workers: this platform has no %s; PyTorch's DataLoader reads the batches", ", ".join(lacks)
        )
        return TorchWorkers(split, loader, tell)
    return Workers(split, loader, tell)


class TorchWorkers:
    """A DataLoader's processes that read a split. Close it, or leave it as a context, and none is left."""

    def __init__(self, split: Readable, loader: Loader, tell: Callable[[str], None] | None = None):
        self._split, self._loader, self._tell = split, loader, tell
        self._batches: Iterator[Any] = iter(())
        self._processes: list[BaseProcess] = []
        self._closed, self._owner = False, os.getpid()
        atexit.register(self.close)

    def read(self, keys: Iterable[Key]) -> Iterator[Batch]:
        """Read the batches of `keys`, in their order, as `Workers.read`."""
        keys, asked, restarts = iter(keys), deque[Key](), 0
        while not self._closed:
            try:
                if not self._processes:
                    self._begin(deque(asked), keys, asked)
                found = self._taken()
                if found is None or self._closed:
                    return
                batch = worker_pool.opened(*found)
            except Lost as lost:
                if self._closed:
                    return
                restarts += 1
                self._end()
                worker_pool.tell_lost(worker_pool.describe(asked[0], self._split), lost, restarts, self._tell)
                continue
            asked.popleft()
            yield batch

    def _begin(self, again: Iterable[Key], keys: Iterator[Key], asked: deque[Key]) -> None:
        """Start the processes, for keys that were asked for before and then new ones, which `asked` collects."""

        def fresh() -> Iterator[Key]:
            yield from again
            for key in keys:
                asked.append(key)
                yield key

        before, handler = set(multiprocessing.active_children()), _of_children()
        self._batches = iter(
            DataLoader(
                _Keyed(self._split),
                batch_size=None,
                sampler=fresh(),
                num_workers=self._loader.workers,
                prefetch_factor=self._loader.prefetch,
                timeout=min(_LOOKS_EVERY, self._loader.timeout.seconds),
                multiprocessing_context=self._loader.start,
                worker_init_fn=_begun,
                generator=torch.Generator(),  # or it draws a seed of its own from the training's
            )
        )
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        if handler is not None and threading.current_thread() is threading.main_thread():
            # torch's would raise wherever the training stands, within a step or a checkpoint as well.
            signal.signal(signal.SIGCHLD, handler)

    def _taken(self) -> Any:
        """Take the next batch, None behind the last. Raises Lost where a process is gone, or silent for too long."""
        patience = self._loader.timeout.seconds
        end = time.monotonic() + patience
        while True:
            try:
                return next(self._batches, None)
            except RuntimeError as error:  # all that a DataLoader says of its processes
                if gone := [process.exitcode for process in self._processes if not process.is_alive()]:
                    raise Lost(f"a worker process {worker_pool.ended(gone[0])}") from None
                if "timed out" not in str(error):
                    raise
                if time.monotonic() > end:
                    raise Lost(worker_pool.SILENT.format(patience)) from None

    def _end(self) -> None:
        self._batches = iter(())  # the DataLoader asks its processes to end, as it is deleted
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(worker_pool.GRACE)
        self._processes = []

    def close(self) -> None:
        """End all, whatever they are at."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class _Keyed(Dataset):
    """A split as a DataLoader asks: a batch by its key."""

    def __init__(self, split: Readable):
        self._split = split

    def __getitem__(self, key: Key) -> tuple[dict[str, Any], Any]:
        epoch, rows = key
        with thread_pool.alone():
            return worker_pool.answer(self._split, rows, epoch)


def _begun(number: int) -> None:
    hide_in_logs()
    worker_pool.leave_signals()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the only one on macOS and Windows


def _of_children() -> Any:
    return signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None

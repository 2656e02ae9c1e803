"""Batches in the order of the plan, read in this process or by workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from trainkit.config.schema import Loader
from trainkit.data.loader.damaged_samples import Damage
from trainkit.data.loader.workers import Key, Readable, Workers
from trainkit.interfaces import Batch, Split, ThreadSafeFetch


def training(
    split: Split,
    keys: Callable[[], Iterable[Key]],
    loader: Loader,
    pin: bool,
    tell: Callable[[str], None] | None = None,
    damage: Damage | None = None,
) -> Generator[Batch]:
    """Read the micro-batches of one rank, as host tensors.

    `keys` gives the (epoch, rows) of each from the first on, as often as it is called. One stream for the whole run: no
    epoch boundary restarts the workers. `pin` says whether the device is one for which memory can be page-locked; the
    recipe may do without. Such a device computes while this process reads: without workers a thread then reads
    `loader.prefetch` batches ahead, where the split may be read by any (`any_thread`). `tell` is called with a sentence
    when a worker was lost and another one reads in its place. With `damage`, samples that are damaged are replaced and
    noted there.
    """
    if damage is None:
        yield from _read(split, keys(), loader, pin, tell)
    else:
        read = _read(damage.split, keys(), loader, pin, tell)
        yield from damage.watched(keys(), read)


def _read(
    split: Readable, keys: Iterable[Key], loader: Loader, pin: bool, tell: Callable[[str], None] | None
) -> Iterator[Batch]:
    beside = pin and isinstance(split, ThreadSafeFetch) and split.any_thread
    pin = pin and loader.pin
    if loader.workers == 0:
        batches = (split.fetch(rows, epoch) for epoch, rows in keys)
        batches = _pinned(batches) if pin else batches
        yield from _ahead(batches, loader.prefetch) if beside else batches
        return
    with Workers(split, loader, tell) as some:
        batches = some.read(keys)
        if pin:
            batches = _ahead(_pinned(batches), loader.prefetch)
        # Not `yield from`: whoever closes this ends the workers first, so that no thread waits for one that hangs.
        for batch in batches:  # noqa: UP028
            yield batch


def _pinned(batches: Iterable[Batch]) -> Iterator[Batch]:
    return ({key: value.pin_memory() for key, value in batch.items()} for batch in batches)


def _ahead(batches: Iterator[Batch], many: int) -> Iterator[Batch]:
    """Yield the same batches, of which a thread makes up to `many` before they are asked for.

    On a processor that computes there is nothing to win by it, and whoever reads should be seen to.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def begin() -> None:
        if device is not None:  # a thread begins with the first GPU as its own, and would page-lock memory for that
            torch.cuda.set_device(device)

    pool = ThreadPoolExecutor(1, "trainkit-ahead", begin)
    try:
        waiting = deque(pool.submit(next, batches, None) for _ in range(many))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, batches, None))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def copied(batches: Iterator[Batch], place: Callable[[Batch], Batch], device: torch.device) -> Iterator[Batch]:
    """Copy each batch to a GPU by `place` while the one before it is trained on.

    For other devices the batches stay as they are: whoever takes them places them.
    """
    return _one_ahead(batches, place, device) if device.type == "cuda" else batches


def _one_ahead(batches: Iterator[Batch], place: Callable[[Batch], Batch], device: torch.device) -> Iterator[Batch]:
    copying = torch.cuda.Stream(device)
    before: tuple[Batch, torch.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            moved = place(batch)
        done = copying.record_event()
        if before is not None:
            yield _arrived(*before)
        before = moved, done
    if before is not None:
        yield _arrived(*before)


def _arrived(batch: Batch, done: torch.Event) -> Batch:
    # The host waits for nothing: the device is told to, and for how long the memory is in use by what it does next.
    current = torch.cuda.current_stream()
    current.wait_event(done)
    for value in batch.values():
        value.record_stream(current)
    return batch


def every_sample(split: Split, batch_size: int, world: int, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows for this rank that cover a split once, with the mask of those that are no padding.

    All batches have the same size, whatever the number of ranks, and all ranks equally many: nothing recompiles, no
    collective is missed, and a sample gets the same bits on one process and on eight.
    """
    batch_size = min(batch_size, split.at_once or batch_size, split.size)
    for first in range(rank * batch_size, split.size + rank * batch_size, batch_size * world):
        rows = np.arange(first, first + batch_size)
        yield np.minimum(rows, split.size - 1), rows < split.size


def stack(batches: Iterable[Batch]) -> Batch:
    """Concatenate several batches."""
    batches = list(batches)
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

"""Batches in the order of the plan, read in this process or by workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.errors import UserError
from trainkit.plan import Plan
from trainkit.recipe import Loader
from trainkit.task import Batch, Split


class _Fetch(Dataset):
    """Hands whole batches to a DataLoader: an item is a batch, and its key says which."""

    def __init__(self, split: Split):
        self.split = split

    def __getitem__(self, key: tuple[int, np.ndarray]) -> Batch | UserError:
        try:
            return self.split.fetch(key[1], key[0])
        except UserError as error:  # as an item: a DataLoader turns what is raised into another exception
            return error


class _Keys:
    """The keys of a plan as something a DataLoader can iterate over."""

    def __init__(self, split: Split, plan: Plan, step: int):
        self.split, self.plan, self.step = split, plan, step

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        return self.plan.keys(self.split, self.step)


def training(split: Split, plan: Plan, step: int, loader: Loader, pin: bool) -> Iterator[Batch]:
    """Micro-batches of this rank from `step` to the end of training, as host tensors.

    One stream for the whole run: no epoch boundary restarts the workers. `pin` says whether the device is one for which
    memory can be page-locked; the recipe may do without.
    """
    pin = pin and loader.pin
    if loader.workers == 0:
        for epoch, rows in plan.keys(split, step):
            batch = split.fetch(rows, epoch)
            yield {key: value.pin_memory() for key, value in batch.items()} if pin else batch
        return
    try:
        for batch in DataLoader(
            _Fetch(split),
            sampler=_Keys(split, plan, step),
            batch_size=None,
            num_workers=loader.workers,
            prefetch_factor=loader.prefetch,
            multiprocessing_context=loader.start,
            timeout=loader.timeout.seconds,
            pin_memory=pin,
        ):
            if isinstance(batch, UserError):
                raise batch
            yield batch
    except (RuntimeError, ConnectionResetError) as error:
        if "DataLoader worker" in str(error) or isinstance(error, ConnectionResetError):
            raise UserError(
                "loader",
                f"a worker process died or fell silent ({str(error).splitlines()[0]})",
                remedy="lower loader.workers, or look at memory and /dev/shm; --resume continues the run",
            ) from None
        raise


def every_sample(split: Split, batch_size: int, world: int, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows for this rank that cover a split once, with the mask of those that are no padding.

    All batches have the same size, whatever the number of ranks, and all ranks equally many: nothing recompiles, no
    collective is missed, and a sample gets the same bits on one process and on eight.
    """
    batch_size = min(batch_size, split.at_once or batch_size, split.size)
    rounds = -(-split.size // (batch_size * world))
    rows = np.arange(rounds * batch_size * world).reshape(rounds, world, batch_size)[:, rank]
    for row in rows:
        yield np.minimum(row, split.size - 1), row < split.size


def stack(batches: Iterable[Batch]) -> Batch:
    """Several batches as one."""
    batches = list(batches)
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

"""Anonymous memory in which a worker leaves a batch for the training.

The training makes it and the worker opens it by its path under /proc, so a batch that was read outlives the worker. It
has no name in /dev/shm, and the system frees it with the training, however that ends.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import weakref

import torch

from trainkit.interfaces import Batch

_ALIGNED = 64
_PLACE = struct.Struct("<QQ")
"""At the beginning of the memory, written last: where the description of the arrays is, and its length."""

_open: weakref.WeakSet[BatchMemory] = weakref.WeakSet()


class BatchMemory:
    """Memory of one batch."""

    def __init__(self):
        self._file = os.fdopen(os.memfd_create("trainkit-batch"), "rb", buffering=0)
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        _open.add(self)

    def batch(self) -> Batch | None:
        """Return the batch, which is the caller's to change; None where it was not written whole."""
        size = os.fstat(self._file.fileno()).st_size
        if size <= _ALIGNED:
            return None
        # All pages at once: a batch of 5 MB is read through 1,200 of them.
        memory = mmap.mmap(self._file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        place, length = _PLACE.unpack_from(memory)
        if not length:
            return None
        arrays = {}
        for name, kind, shape, at in json.loads(memory[place : place + length]):
            dtype, many = getattr(torch, kind), math.prod(shape)
            flat = torch.frombuffer(memory, dtype=dtype, count=many, offset=at) if many else torch.empty(0, dtype=dtype)
            arrays[name] = flat.reshape(shape)
        return arrays

    def close(self) -> None:
        """Give up the memory; arrays of the batch keep it."""
        self._file.close()


def possible() -> bool:
    """Return whether this system has such memory: Linux does."""
    return hasattr(os, "memfd_create") and os.path.isdir(f"/proc/{os.getpid()}/fd")


def write(path: str, batch: Batch) -> None:
    """Write a batch into the memory of another process."""
    with open(path, "wb") as file:
        listed, place = [], _ALIGNED
        for name, array in batch.items():
            listed.append([name, str(array.dtype).removeprefix("torch."), list(array.shape), place])
            flat = array.contiguous().reshape(-1)
            if len(flat):  # of none, PyTorch sees no bytes
                file.seek(place)
                place += file.write(flat.view(torch.uint8).numpy().data)
            place += -place % _ALIGNED
        file.seek(place)
        length = file.write(json.dumps(listed).encode())
        file.seek(0)
        file.write(_PLACE.pack(place, length))


def close_all() -> None:
    """Give up all that a fork has inherited."""
    for memory in list(_open):
        memory.close()

"""A number on its way from the device, read later, so that nobody waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncScalar:
    """A number of a step; a tensor is copied to the host without waiting for it."""

    def __init__(self, value: Tensor | bool | float, step: int):
        self.step = step
        self._value = value
        self._arrived: torch.cuda.Event | None = None
        if isinstance(value, Tensor):
            cuda = value.device.type == "cuda"
            self._value = torch.empty((), dtype=value.dtype, pin_memory=cuda).copy_(value, non_blocking=True)
            if cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> bool | float:
        """Return the number; waits for it alone."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value.item() if isinstance(self._value, Tensor) else self._value

"""One number of an update, read a step late, so that nobody waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Late:
    """The number that was handed in last, on its way from the device."""

    def __init__(self) -> None:
        self._value: Tensor | bool | float | None = None
        self._arrived: torch.cuda.Event | None = None
        self._step = 0

    def turn(self, value: Tensor | bool | float, step: int) -> tuple[int, bool | float] | None:
        """Hand in a number of `step`; returns the step and the number before it."""
        before = self.look()
        self._step, self._value, self._arrived = step, value, None
        if isinstance(value, Tensor):
            cuda = value.device.type == "cuda"
            self._value = torch.empty((), dtype=value.dtype, pin_memory=cuda).copy_(value, non_blocking=True)
            if cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()
        return before

    def look(self) -> tuple[int, bool | float] | None:
        """Step and number handed in last. Waits for that number alone."""
        if self._value is None:
            return None
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._step, self._value.item() if isinstance(self._value, Tensor) else self._value

    def clear(self) -> None:
        """Forget it."""
        self._value = self._arrived = None

"""Watch the steps of a training: the interface of guards, and the actions that they may request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trainkit.interfaces import Loss


@dataclass
class Update:
    """One optimizer step in progress."""

    step: int
    losses: list[Loss]
    buffers: list[Tensor] = field(default_factory=list)
    """Copies of what a forward changes, as it was before; empty where the step will not be undone."""
    norm: Tensor | float = 0.0
    """Gradient norm before clipping."""
    finite: Tensor | bool = True


@dataclass(frozen=True)
class Rollback:
    """Request to return to an earlier checkpoint and continue without some steps."""

    step: int
    """The step that went wrong."""
    why: str
    skip: range
    """The steps that are not made the second time; `step` is one of them."""


class Guard(Protocol):
    """Judge a step after the next one was queued, so that the host does not wait for the device."""

    def observe(self, update: Update) -> None:
        """Take in a step whose gradients are computed."""

    def verdict(self, wait: bool) -> Rollback | None:
        """Judge the steps before the last one; with `wait` the last one too. Raises UserError to end the run."""

    def reset(self) -> None:
        """Forget steps that are not judged yet."""


class AsyncScalar:
    """A number of a step; a tensor is copied to the host without waiting for it."""

    def __init__(self, value: Tensor | bool | float, step: int):
        self.step = step
        self._value = value
        self._arrived: torch.cuda.Event | None = None
        if isinstance(value, Tensor):
            cuda = value.device.type == "cuda"
            # Of MPS nothing says when a copy has arrived.
            self._value = torch.empty((), dtype=value.dtype, pin_memory=cuda).copy_(
                value, non_blocking=value.device.type != "mps"
            )
            if cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> bool | float:
        """Return the number; waits for it alone."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value.item() if isinstance(self._value, Tensor) else self._value


class Pending:
    """Numbers of steps that are not judged yet, oldest first."""

    def __init__(self) -> None:
        self._scalars: deque[AsyncScalar] = deque()

    def add(self, value: Tensor | bool | float, step: int) -> None:
        """Begin to copy a number from the device."""
        self._scalars.append(AsyncScalar(value, step))

    def take(self, wait: bool) -> list[tuple[int, bool | float]]:
        """Return step and number of all but the last one; of that too with `wait`."""
        ready = len(self._scalars) - (0 if wait else 1)
        return [(scalar.step, scalar.read()) for scalar in (self._scalars.popleft() for _ in range(ready))]

    def clear(self) -> None:
        """Forget them."""
        self._scalars.clear()

"""Find losses, gradients and tensors that are not finite, and handle them by `train.nonfinite`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError, few
from trainkit.interfaces import Loss
from trainkit.tensors import full_tensor, total


class NotFinite(UserError):
    """A loss or gradient that is not finite, which a run that is continued as it was meets again."""


class AsyncScalar:
    """A number of a step; a tensor is copied to the host without waiting for it."""

    def __init__(self, value: Tensor | bool, step: int):
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


class NonFiniteGuard:
    """End the run after a non-finite step, for `train.nonfinite: stop`.

    It judges a step after the next one was queued, so that the host does not wait for the device.
    """

    def __init__(self) -> None:
        self._pending: deque[AsyncScalar] = deque()
        """Flags of steps that are not judged yet, oldest first."""

    def observe(self, step: int, finite: Tensor | bool) -> None:
        """Begin to copy the flag of a step from the device."""
        self._pending.append(AsyncScalar(finite, step))

    def judge(self, wait: bool) -> None:
        """Judge the steps before the last one; with `wait` the last one too. Raises NotFinite for the first bad one."""
        while len(self._pending) > (0 if wait else 1):
            finite = self._pending.popleft()
            if not finite.read():
                raise NotFinite(
                    f"step {finite.step}",
                    "the loss or a gradient is not finite",
                    remedy="lower optim.lr or look at the data; no checkpoint holds this state. "
                    "--resume train.nonfinite=skip continues without such steps",
                )


def all_finite(norm: Tensor, losses: Sequence[Loss], runtime: Runtime) -> Tensor | bool:
    """Return whether loss and gradients of a step are finite: a device flag or a bool, equal on all ranks.

    The norm of averaged gradients is the same on all ranks; losses are not. Under fp16 the loss scaler meets infinite
    gradients on purpose and handles them, so only losses and their weights decide. An infinite weight gives zero
    gradients, and the scaler has checked them before they are divided; therefore weights are checked themselves.
    """
    scaled = runtime.accelerator.scaler is not None
    weights = [loss.weight for loss in losses if isinstance(loss.weight, Tensor)]
    if runtime.at_once and runtime.world == 1:
        whole = all(math.isfinite(loss.sum) for loss in losses)
        if weights:
            weight = float(total(weights))
            whole = whole and math.isfinite(weight) and weight != 0
        return whole and (scaled or math.isfinite(norm))
    bad = ~torch.isfinite(torch.stack([loss.sum for loss in losses])).all()
    given = [torch.as_tensor(total(weights)).float()] if weights else []
    told = runtime.sum(torch.stack([bad.float(), *given]))
    fine = told[0] == 0
    if weights:
        fine = fine & torch.isfinite(told[1]) & (told[1] != 0)
    return fine if scaled else fine & torch.isfinite(full_tensor(norm))


def not_finite(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Return the names, `<file>/<name>`, of the tensors that hold a NaN or an infinity, by file and name."""
    found = [
        (f"{file}/{name}", _extremes(t))
        for file, members in tensors.items()
        for name, t in members.items()
        if isinstance(t, Tensor) and t.numel() and (t.is_floating_point() or t.is_complex())
    ]
    # One transfer for all of them: each would wait for the device.
    fine = torch.stack([torch.isfinite(ends).all() for _, ends in found]).tolist() if found else []
    return [name for (name, _), good in zip(found, fine, strict=True) if not good]


def _extremes(t: Tensor) -> Tensor:
    """Return least and greatest entry, NaN where there is one: unlike `isfinite` it makes no tensor of that size."""
    t = torch.view_as_real(t) if t.is_complex() else t
    t = full_tensor(t.detach())
    return torch.stack(torch.aminmax(t.float() if t.element_size() == 1 else t))


def refuse_not_finite(tensors: Mapping[str, Mapping[str, Tensor]], constants: frozenset[str], step: int) -> None:
    """Raise UserError for a tensor of a checkpoint, by file and name, that became non-finite.

    Loss and gradients do not show this: a step that is too large makes weights infinite from finite gradients, and
    batch norm divides by an overflown variance and gives zeros. `constants` are tensors such as a mask of -inf.
    """
    if bad := [name for name in not_finite(tensors) if name not in constants]:
        raise UserError(
            f"step {step}",
            f"{few(bad)}: not finite, and not committed",
            remedy="lower optim.lr or clip the gradient (optim.clip_norm); the checkpoints before are intact",
        )

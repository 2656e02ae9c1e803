"""Tensors that are sharded, and operations over many tensors at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def full_tensor(x: Tensor) -> Tensor:
    """Return a sharded tensor (DTensor), such as a norm over sharded gradients, as a plain one: a collective."""
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def local_part(x: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, in place: kernels over many tensors take no mixture of both."""
    part = getattr(x, "to_local", None)
    return x.detach() if part is None else part()


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, but on MPS, which has none, float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def total(values: Iterable[Tensor | float]) -> Tensor | float:
    """Return the sum of numbers that may lie on a device, in order; 0 of none."""
    found: Tensor | float = 0
    for value in values:
        found = found + value
    return found


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Return the length of each tensor."""
    return list(torch._foreach_norm(tensors))  # pyright: ignore[reportPrivateImportUsage]


def foreach_mul_(tensors: list[Tensor], factor: Tensor | list[Tensor]) -> None:
    """Multiply tensors in place, all by one factor or each by its own."""
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage, reportCallIssue, reportArgumentType]


def foreach_lerp_(tensors: list[Tensor], to: list[Tensor], weight: float) -> None:
    """Move tensors towards others in place, by a share of the way."""
    torch._foreach_lerp_(tensors, to, weight)  # pyright: ignore[reportPrivateImportUsage]

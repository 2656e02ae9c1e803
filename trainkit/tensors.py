"""torch, imported where it is first used; sharded tensors, their precision and cosines, and operations over many.

Importing torch takes seconds, and reading a recipe needs none of it: modules that define blocks of recipes take `torch`
and `F` from here. Networks, which inherit from `nn.Module`, import torch itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any


class _Module:
    """Stands for a module, and imports it when something of it is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # whoever inspects or copies this does not use torch
            raise AttributeError(attribute)
        return getattr(sys.modules.get(self._name) or importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch, F = _Module("torch"), _Module("torch.nn.functional")


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


def at_least_float32(x: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 as they are."""
    return x if x.dtype == torch.float64 else x.float()


def cosines(x_BD: Tensor, centre_CD: Tensor) -> Tensor:
    """Return cosines (B, C) within [-1, 1], in float32 or wider, also under autocast."""
    # At scale 64 the eight bits of bfloat16 would move a logit by a quarter.
    with torch.autocast(x_BD.device.type, enabled=False):
        return F.linear(F.normalize(at_least_float32(x_BD)), F.normalize(at_least_float32(centre_CD))).clamp(-1, 1)


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

"""Bound what a recipe builds by the weights that it is built for.

A recipe that comes with weights may be a stranger's: one that asks for 100,000 layers builds for minutes, and one that
asks for a map of a terabyte takes all memory, before anything notices that the file beside it holds another network.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from trainkit.errors import UserError

FACTOR = 4
"""A network may register so many times the tensors and elements of the file, as builders drop parts that they made."""
SMALL_TENSORS, SMALL_ELEMENTS = 1_000, 1 << 24
"""What it may register beyond that."""
_SIZED = frozenset({"empty", "zeros", "ones", "rand", "randn", "full", "eye", "randint", "normal", "randperm"})
_RANGES = frozenset({"arange", "linspace", "logspace"})
_VALUED = frozenset({"full", "new_full", "randint", "normal"})
"""Of these a number is no size."""
_OF_ANOTHER = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "repeat", "tile", "repeat_interleave"})


@contextmanager
def no_larger_than(tensors: Mapping[str, Tensor], where: str) -> Iterator[None]:
    """Refuse within to build far more layers or elements than `tensors`, of the file `where`, hold.

    Raises UserError before the memory is taken.
    """
    limit = _Limit(tensors, where)
    removed = [
        hooks.register_module_parameter_registration_hook(limit.tensor),
        hooks.register_module_buffer_registration_hook(limit.tensor),
        hooks.register_module_module_registration_hook(limit.layer),
    ]
    try:
        with limit:
            yield
    finally:
        for handle in removed:
            handle.remove()


class _Limit(TorchFunctionMode):
    """Counts what one thread builds; calls of torch pass through it, so that sizes are seen before they are made."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str):
        super().__init__()
        self.where, self.held = where, (len(tensors), sum(tensor.numel() for tensor in tensors.values()))
        self.tensors_left = FACTOR * self.held[0] + SMALL_TENSORS
        self.layers_left = 4 * self.tensors_left
        self.most = self.elements_left = FACTOR * self.held[1] + SMALL_ELEMENTS
        self.thread = threading.get_ident()

    def tensor(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        """Count a parameter or buffer of a module."""
        if tensor is None or threading.get_ident() != self.thread:
            return
        self.tensors_left -= 1
        self.elements_left -= math.prod(tensor.shape)
        if self.tensors_left < 0:
            raise self._refusal("more tensors")
        if self.elements_left < 0:
            raise self._refusal("more elements")

    def layer(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Count a module within another one."""
        if threading.get_ident() == self.thread:
            self.layers_left -= 1
            if self.layers_left < 0:
                raise self._refusal("more layers")

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch unless its result would be larger than the whole network may be."""
        given = dict(kwargs or {})
        if _asked(getattr(func, "__name__", ""), args, given) > self.most:
            raise self._refusal("a larger tensor")
        return func(*args, **given)

    def _refusal(self, what: str) -> UserError:
        count, elements = self.held
        found = f"holds {count:,} tensors of {elements:,} elements, but its recipe builds {what} than would fit them"
        return UserError(self.where, found, remedy="use weights and recipe of the same network")


def _asked(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Estimate how many elements the result of a function of torch has; 0 where no size is given."""
    if name in _RANGES:
        return max(map(abs, _whole([*args, kwargs.get("end"), kwargs.get("steps")])), default=0)
    shapes = [one.shape for one in args if isinstance(one, Tensor)]
    if name in _SIZED or name in _OF_ANOTHER:
        times = math.prod(shapes[0]) if name in ("repeat", "tile", "repeat_interleave") and shapes else 1
        given = [*args, kwargs.get("size"), kwargs.get("repeats")]
        size = next((one for one in given if isinstance(one, list | tuple)), () if name in _VALUED else given)
        sides = _whole(size)
        return times * math.prod(max(0, side) for side in (sides * 2 if name == "eye" and len(sides) == 1 else sides))
    if len(shapes) > 1:
        try:
            return math.prod(torch.broadcast_shapes(*shapes))
        except RuntimeError:  # not element by element
            return 0
    return 0


def _whole(given: Sequence[Any]) -> list[int]:
    return [one for one in given if isinstance(one, int) and not isinstance(one, bool)]

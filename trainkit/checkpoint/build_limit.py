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
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.errors import UserError

FACTOR = 4
"""A network may register so many times the tensors and elements of the file, as builders drop parts that they made."""
SMALL_TENSORS, SMALL_ELEMENTS = 1_000, 1 << 24
"""What it may register beyond that."""


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


class _Limit(TorchDispatchMode):
    """Counts what one thread builds; operators pass through it, so that sizes are seen before they are made."""

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operator unless its result would be larger than the whole network may be."""
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        if _elements(func, given | dict(kwargs or {})) > self.most:
            raise self._refusal("a larger tensor")
        return func(*args, **(kwargs or {}))

    def _refusal(self, what: str) -> UserError:
        count, elements = self.held
        found = f"holds {count:,} tensors of {elements:,} elements, but its recipe builds {what} than would fit them"
        return UserError(self.where, found, remedy="use weights and recipe of the same network")


def _elements(func: Any, given: Mapping[str, Any]) -> int:
    """Return how many elements the result of an operator has, by its schema; 0 where that depends on its inputs alone.

    The result of a convolution or a matrix product is no larger than what went into it by more than a network is.
    """
    if any(result.alias_info for result in func._schema.returns):  # a view, or in place
        return 0
    if "size" in given:
        return math.prod(given["size"])
    if isinstance(repeats := given.get("repeats"), list | tuple):
        return given["self"].numel() * math.prod(repeats)
    name = func.overloadpacket.__name__
    if name in ("arange", "linspace", "logspace", "eye", "randperm"):
        start, end, step = (float(given.get(key) or other) for key, other in (("start", 0), ("end", 0), ("step", 1)))
        sides = [int(given[key]) for key in ("n", "m") if key in given]
        sides = sides * 2 if name == "eye" and len(sides) == 1 else sides
        return int(given["steps"]) if "steps" in given else math.prod(sides) if sides else int((end - start) / step)
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    if name == "clone" or torch.Tag.pointwise in func.tags:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    return 0

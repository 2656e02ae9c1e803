"""Recomputation in the backward pass: of a network's blocks, or of a micro-batch in parts.

Activation checkpointing (Chen et al. 2016, arXiv 1604.06174) keeps only the inputs of a network's blocks. timm's own
switch is not used: it moves the running statistics of batch norm twice.

A loss that compares all samples of a micro-batch gets their outputs in parts by GradCache (Gao et al., RepL4NLP 2021,
arXiv 2101.06983): compute the outputs of all parts without a graph, the loss on all of them and its gradients with
respect to them; then recompute each part and continue the backward pass. It costs a second forward pass. The result is
exact for layers that treat samples independently; batch norm sees one part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from trainkit.errors import UserError

T = TypeVar("T")

MOST_LAYERS = 12
"""Layers with weights that a block may have: those of a residual or transformer block of the usual networks."""


def apply(net: nn.Module) -> list[str]:
    """Have the blocks of a network recomputed in the backward pass; returns their names. No key of its state changes.

    Raises UserError for a network without blocks.
    """
    found = dict(blocks(net))
    if not found:
        raise UserError(
            "train.activation_checkpointing",
            f"{type(net).__name__} has no blocks to recompute",
            "a network with submodules of two layers or more",
            "leave it out; a smaller train.micro_batch also saves memory",
        )
    for block in found.values():
        block.forward = _recomputed(block, block.forward)
    return list(found)


def blocks(net: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest submodules of 2 to `MOST_LAYERS` layers with weights that are trained, by name."""
    for name, child in net.named_children():
        layers = sum(any(True for _ in module.parameters(recurse=False)) for module in child.modules())
        has_forward = not isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child) is not nn.Module
        if has_forward and 2 <= layers <= MOST_LAYERS and any(p.requires_grad for p in child.parameters()):
            yield prefix + name, child
        else:
            yield from blocks(child, f"{prefix}{name}.")


def _recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(list(arg) if isinstance(arg, list) else arg for arg in args)  # DenseNet appends to its list later
        if torch.compiler.is_compiling():  # the compiler moves changes of buffers out of the graph
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts(block, refuse=True), **kwargs)

    return run


def forward_in_parts(compute: Callable[[slice], T], count: int, size: int, net: nn.Module, device: torch.device) -> T:
    """Return `compute(rows)` of `count` rows, computed `size` rows at a time and joined along the first dimension.

    It is called again for each part in the backward pass, with the same random numbers and precision. Buffers of `net`,
    such as the statistics of batch norm, change only in the first call.
    """
    on = torch.empty(0, device=device)  # names the device whose random numbers are repeated, besides the CPU's

    def of(_: Tensor, first: int) -> T:
        return compute(slice(first, min(first + size, count)))

    made = [
        checkpoint(of, on, first, use_reentrant=False, context_fn=_contexts(net), early_stop=False)
        for first in range(0, count, size)
    ]
    return made[0] if len(made) == 1 else tree_map(lambda *parts: torch.cat(parts), *made)


Context = contextlib.AbstractContextManager[None]


def _contexts(net: nn.Module, refuse: bool = False) -> Callable[[], tuple[Context, Context]]:
    """Contexts of the first forward pass and of the one that is repeated."""
    return lambda: (contextlib.nullcontext(), buffers_kept(net, refuse))


@contextlib.contextmanager
def buffers_kept(net: nn.Module, refuse: bool = False) -> Iterator[None]:
    """Give a network copies of its buffers to change, for the first forward pass has changed them.

    With `refuse`, raises UserError where one changes that is no statistic of a norm: outputs might depend on it.
    """
    kept = [(module, dict(module._buffers)) for module in net.modules() if module._buffers]
    copies = []
    for module, buffers in kept:
        copies.append({name: t.clone() for name, t in buffers.items() if t is not None})
        module._buffers.update(copies[-1])
    try:
        yield
    finally:
        changed = False
        for (module, buffers), copied in zip(kept, copies, strict=True):
            if not isinstance(module, _NormBase):
                changed |= any(module._buffers[name] is not t or t._version > 0 for name, t in copied.items())
            module._buffers.update(buffers)
        if refuse and changed:
            found = f"{type(net).__name__} changes a buffer in its forward pass, which recomputation would repeat"
            raise UserError(
                "train.activation_checkpointing", found, remedy="leave activation_checkpointing out for this network"
            )

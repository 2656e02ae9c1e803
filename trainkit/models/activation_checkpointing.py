"""Activation checkpointing: keep only the inputs of a network's blocks, and recompute the rest in the backward pass.

Chen et al. 2016, arXiv 1604.06174. timm's own switch is not used: it moves the running statistics of batch norm twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from trainkit.errors import UserError

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

        def contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
            return contextlib.nullcontext(), _statistics_kept(block)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


@contextlib.contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Give batch norms copies of their running statistics to change. Raises UserError where another buffer changes."""
    norms = [m for m in block.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
    kept = [dict(norm._buffers) for norm in norms]
    for norm in norms:  # not None: as many tensors must be saved as in the forward pass
        norm._buffers.update({name: t.clone() for name, t in norm._buffers.items() if t is not None})
    before = [buffer._version for buffer in _others(block, norms)]
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)
        if [buffer._version for buffer in _others(block, norms)] != before:
            found = f"{type(block).__name__} changes a buffer in its forward pass, which recomputation would repeat"
            raise UserError(
                "train.activation_checkpointing", found, remedy="leave activation_checkpointing out for this network"
            )


def _others(block: nn.Module, norms: list[_NormBase]) -> Iterator[Tensor]:
    """Yield the buffers of a block but for those of the norms."""
    return (t for m in block.modules() if m not in norms for t in m.buffers(recurse=False))

"""Compile networks in the mode of a run, and copy their outputs out of the memory of CUDA graphs.

A CUDA graph writes its outputs, gradients included, into the same memory at every call. Values that a step keeps, such
as logs, features or the gradients of an earlier micro-batch, would be overwritten; so outputs are copied.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which torch records CUDA graphs."""


def compile_in_place(net: nn.Module, mode: str) -> None:
    """Compile the calls of a network without renaming its parameters; `off`: do nothing."""
    if mode == "off":
        return
    # Wrapped in a new module, every key of a checkpoint would start with `_orig_mod.`
    if type(net).compile is not nn.Module.compile:  # a network that compiles part of itself
        net.compile(mode=_torch_mode(mode))
    else:
        # The attribute that `Module.compile` sets; copies of a module do not have it.
        net._compiled_call_impl = by_mode(net, net._call_impl, mode=_torch_mode(mode))
    if mode in CUDA_GRAPHS:
        # A network may compile parts of itself only.
        net._compiled_call_impl = _copying(net._compiled_call_impl or net._call_impl)
        for p in net.parameters():
            if p.requires_grad:
                p.register_hook(Tensor.clone)  # pyright: ignore[reportArgumentType] - else `p.grad` is the graph's


def by_mode(net: nn.Module, call: Callable[..., Any], *, dynamic: bool | None = False, **options: Any) -> Any:
    """Compile `call`, a method of `net`, once for training and once for evaluation; `dynamic` is that of training.

    Training batches have one size, evaluation batches many. If both were compiled together, a training graph compiled
    after an evaluation would have a dynamic batch size, and all graphs would count against one limit.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.14 has it, 2.11 may not
        options["isolate_recompiles"] = True
    train, evaluate = torch.compile(call, dynamic=dynamic, **options), torch.compile(call, **options)

    @functools.wraps(call)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (train if net.training else evaluate)(*args, **kwargs)

    return either


def compiled(net: nn.Module, mode: str) -> Callable[[Tensor], Tensor]:
    """Return a compiled version of a network and leave the network unchanged; `off`: the network."""
    if mode == "off":
        return net
    call = torch.compile(net, mode=_torch_mode(mode))
    return _copying(call) if mode in CUDA_GRAPHS else call


def begin_step(mode: str) -> None:
    """Let CUDA graphs reuse their memory: their outputs, and what they keep for a backward pass, are not needed."""
    if mode in CUDA_GRAPHS:
        torch.compiler.cudagraph_mark_step_begin()


def _torch_mode(mode: str) -> str | None:
    return None if mode == "default" else mode


def _copying(call: Callable[..., Any]) -> Callable[..., Any]:
    def copied(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, Tensor.clone, call(*args, **kwargs))

    return copied

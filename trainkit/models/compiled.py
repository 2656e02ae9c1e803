"""Compile a network in place with torch.compile, apart for training and for evaluation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compile_in_place(net: nn.Module, **options: Any) -> None:
    """Compile the forward of a network; keys of its state stay as they are. `options` are those of `torch.compile`.

    A network with a `compile` of its own does it itself.
    """
    if type(net).compile is not nn.Module.compile:
        net.compile(**options)
    else:
        # What `Module.compile` sets, and copies of a module leave out.
        net._compiled_call_impl = by_mode(net, net._call_impl, **options)


def by_mode(net: nn.Module, call: Callable[..., Any], *, dynamic: bool | None = False, **options: Any) -> Any:
    """Compile `call`, a method of `net`, once for training and once for evaluation; `dynamic` is that of training.

    Batches of a training have one size, and those of evaluations many. Compiled together, a training graph that comes
    after an evaluation would leave the size of its batches open, and all graphs would count against one limit.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.14 has it, 2.11 may not
        options["isolate_recompiles"] = True
    train, evaluate = torch.compile(call, dynamic=dynamic, **options), torch.compile(call, **options)

    @functools.wraps(call)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (train if net.training else evaluate)(*args, **kwargs)

    return either

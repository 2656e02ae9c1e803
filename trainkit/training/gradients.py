"""Normalise, unscale and clip the gradients of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from trainkit.config.schema import Optim
from trainkit.distributed.runtime import Runtime
from trainkit.interfaces import Loss
from trainkit.tensors import foreach_mul_, total
from trainkit.training import optimizer as optim
from trainkit.training.plan import Plan


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


def finish_gradients(
    runtime: Runtime,
    params: Mapping[str, nn.Parameter],
    plan: Plan,
    losses: list[Loss],
    settings: Optim,
    divided: Collection[str] = (),
) -> Tensor:
    """Normalise, unscale and clip the gradients of a step; return their norm before clipping, on the device.

    Of parameters that are `divided` each rank has other rows: all of them count in the norm, once.
    """
    grads = [grad for p in params.values() if (grad := p.grad) is not None]
    if len(grads) < len(params):
        optim.refuse_idle(params)
    if runtime.accelerator.scaler is not None:
        runtime.accelerator.unscale_gradients()
    weight = total(loss.weight for loss in losses)
    if isinstance(weight, Tensor):  # a collective, so every rank must come here: the type decides, never the value
        foreach_mul_(grads, plan.batch_size / runtime.sum(weight.float()))
    elif weight != (plan.share if plan.rank < plan.active else 0):
        raise ValueError(f"the weight of a step is {weight}, not its number of samples; give it as a tensor")
    norm = optim.total_norm(grads) if not divided else _norm_over_ranks(runtime, params, divided)
    optim.clip(params, norm, settings)
    return norm


def _norm_over_ranks(runtime: Runtime, params: Mapping[str, nn.Parameter], divided: Collection[str]) -> Tensor:
    parts = [[p.grad for n, p in params.items() if (n in divided) == own and p.grad is not None] for own in (0, 1)]
    equal, own = (optim.total_norm(grads) for grads in parts)
    return (equal.square() + runtime.sum(own.square())).sqrt()

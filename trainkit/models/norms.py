"""Normalisation over the micro-batch, the micro-batches of all processes, or groups of channels.

Batch norm (Ioffe & Szegedy, ICML 2015) depends on the number of images per process and forward pass; gradient
accumulation does not change that, so two micro-batches of 32 differ from one of 64. `SyncBatchNorm2d` normalises over
the images of all processes; group norm (Wu & He, ECCV 2018, arXiv 1803.08494) over each image alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from trainkit.errors import UserError

Kind = Literal["sync", "group"]

LEAST_CHANNELS = 4
"""Smallest number of channels per group. In a map of one pixel, such as the mean of an image, a single channel is
normalised to 0, and of two channels only the order remains."""


def convert(net: nn.Module, kind: Kind, groups: int = 32) -> nn.Module:
    """Replace every 2-d batch norm of `net`, in place, and return the network.

    `sync`: `SyncBatchNorm2d`, with the same parameters, statistics and names. `group`: group norm with the scale and
    shift of the batch norm, in the largest number of groups that divides the channels, at most `groups` and with 4 or
    more channels each; the running statistics are dropped. Load weights of a network with batch norm before. If `net`
    itself is a batch norm, another module is returned. Raises UserError for an unknown class of batch norm.
    """
    if isinstance(net, nn.BatchNorm2d):
        return _converted(net, kind, groups)
    for name, child in net.named_children():
        net.add_module(name, convert(child, kind, groups))
    return net


def count_groups(channels: int, most: int) -> int:
    """The largest divisor of `channels` up to `most` that leaves 4 channels or more to a group; at least 1."""
    most = min(most, max(1, channels // LEAST_CHANNELS))
    return max(count for count in range(1, most + 1) if channels % count == 0)


def _converted(norm: nn.BatchNorm2d, kind: Kind, groups: int) -> nn.Module:
    if isinstance(norm, SyncBatchNorm2d):
        return norm
    plain = type(norm) is nn.BatchNorm2d
    # timm's has dropout and activation inside; any other might compute something else.
    if not plain and not (type(norm).__name__ == "BatchNormAct2d" and {"drop", "act"} <= set(norm._modules)):
        raise UserError(
            "task.norm",
            f"the network has norms of class {type(norm).__name__}, which cannot be converted to {kind} norms",
            remedy="use another network, or `norm: {name: batch}`",
        )
    channels = norm.num_features
    if kind == "sync":
        made: nn.Module = (SyncBatchNorm2d if plain else _SyncThenAct)(
            channels, norm.eps, norm.momentum, affine=False, track_running_stats=False
        )
        made.affine, made.track_running_stats = norm.affine, norm.track_running_stats
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            made.register_buffer(name, getattr(norm, name))
    else:
        made = (nn.GroupNorm if plain else _GroupThenAct)(
            count_groups(channels, groups), channels, norm.eps, affine=False
        )
        made.affine = norm.affine
    made.register_parameter("weight", norm.weight)
    made.register_parameter("bias", norm.bias)
    if not plain:
        for name in ("drop", "act"):
            made.add_module(name, norm.get_submodule(name))
    return made.train(norm.training)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the images of all processes, on CPUs (gloo) and GPUs (NCCL) alike; names as `BatchNorm2d`.

    torch's own does not run on CPUs. Here the means of all processes, and the squares about them, are all-gathered and
    combined as in Chan et al. (1979): processes may have different numbers of images, and large means lose no
    precision. Statistics are float32 under mixed precision. The running variance is the unbiased one of all samples, as
    with one process. In evaluation, and with one process, it is `BatchNorm2d`. All ranks must take part in every
    forward and backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (B, C, H, W) and the dtype."""
        self._check_input_dim(x)
        if (not self.training and self.running_mean is not None) or _world() == 1:
            return super().forward(x)
        return self._together(x)

    # Collectives are not compiled: a compiled network has a graph break here.
    @_disable_dynamo  # `torch.compiler.disable`, which imports the compiler here: 2 s of processor time
    def _together(self, x: Tensor) -> Tensor:
        out, mean, square, count = _Together.apply(x, self.weight, self.bias, self.eps)
        seen, means, variances = self.num_batches_tracked, self.running_mean, self.running_var
        if self.training and seen is not None and means is not None and variances is not None:
            with torch.no_grad():
                seen.add_(1)
                share = 1 / seen if self.momentum is None else self.momentum
                for running, now in ((means, mean), (variances, square / (count - 1).clamp_min(1))):
                    running += share * (now.to(running.dtype) - running)
        return out


class _Together(torch.autograd.Function):
    """Gives the normalised map, and of all processes the means, the sums of squares about them, and the count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, here = x.shape[1], x.numel() // x.shape[1]
        var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
        said = _gather(torch.cat([mean, var * here, mean.new_full((1,), here)]))
        means, squares, counts = said[:, :channels], said[:, channels:-1], said[:, -1:]
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        square = (squares + counts * (means - mean) ** 2).sum(0)
        inverse = (square / count + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight.float()
        out = (x - _each(mean)) * _each(scale)
        if bias is not None:
            out += _each(bias.float())
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.mark_non_differentiable(mean, square, count)
        return out.to(x.dtype), mean, square, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        grad = grad.float()
        normal = (x - _each(mean)) * _each(inverse)
        of_bias, of_weight = grad.sum((0, 2, 3)), (grad * normal).sum((0, 2, 3))
        # The gradients of scale and shift stay local: DDP averages them like all others.
        about, along = (_reduce(torch.stack([of_bias, of_weight])) / count).unbind()
        scale = inverse if weight is None else inverse * weight.float()
        to_x = (grad - _each(about) - normal * _each(along)) * _each(scale)
        needs = ctx.needs_input_grad
        return (
            to_x.to(x.dtype) if needs[0] else None,
            of_weight.to(weight.dtype) if weight is not None and needs[1] else None,
            of_bias if needs[2] else None,
            None,
        )


def _each(values: Tensor) -> Tensor:
    """(C,) to (C, 1, 1)."""
    return values[:, None, None]


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gather(values: Tensor) -> Tensor:
    """(n,) of each process to (processes, n)."""
    out = [torch.empty_like(values) for _ in range(_world())]
    dist.all_gather(out, values)
    return torch.stack(out)


def _reduce(values: Tensor) -> Tensor:
    """The sum over the processes."""
    dist.all_reduce(values)
    return values


class _SyncThenAct(SyncBatchNorm2d):
    """timm's batch norm with dropout and activation inside, over all processes."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class _GroupThenAct(nn.GroupNorm):
    """Group norm with the dropout and activation of timm's batch norm."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))

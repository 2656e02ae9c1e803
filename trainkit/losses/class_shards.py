"""Classes divided over processes: each has the centres of some, and the softmax over all of them is exact.

B samples of a process, N of all, C classes, c of a process, D embedding. A process takes the embeddings of all through
`margin_terms` of its own classes; sums and greatest values over processes give the terms of all classes. Of a step are
sent: embeddings and labels to all, their gradients back (`traffic`), and numbers of a row. Centres, their gradients and
the optimizer's state stay where they are; data parallelism would send each of these gradients twice.

Sampled negatives are those of Partial FC (An et al. 2021, arXiv 2010.05222; CVPR 2022, arXiv 2203.15565): the classes
of the batch, and of the others as many as fill a share. Here the gradient of the rest is zero instead of none, so
momentum and weight decay still move it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from trainkit.errors import UserError
from trainkit.losses.online_softmax import MarginTerms, margin_terms
from trainkit.tensors import at_least_float32

LEAST = 2
"""Classes that a process must have: each row needs another one than its own."""
ALL_GATHER = "all_gather_single", "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single", "reduce_scatter_tensor"
_PORTION = 16 << 20
"""Bytes of a process that are drawn or gathered at a time."""
_DIVISION: ContextVar[tuple[int, int]] = ContextVar("division", default=(0, 1))


@dataclass(frozen=True)
class ClassShard:
    """The classes `first` to `stop` of all: those of one process."""

    rank: int
    world: int
    classes: int

    @property
    def first(self) -> int:
        """Number of the first class; the first processes have one more where the classes do not divide."""
        each, more = divmod(self.classes, self.world)
        return self.rank * each + min(self.rank, more)

    @property
    def stop(self) -> int:
        """Number of the last class, plus one."""
        return ClassShard(self.rank + 1, self.world, self.classes).first

    @property
    def count(self) -> int:
        """Classes of this process."""
        return self.stop - self.first

    def part(self, whole: Tensor) -> Tensor:
        """Return the rows of this process of a tensor that has one for each class."""
        return whole[self.first : self.stop]

    def whole(self, own: Tensor, keep: bool = True) -> Tensor:
        """Return the rows of all classes on the CPU of rank 0, which keeps them: a collective."""
        if self.world == 1:
            return own.detach().to("cpu", copy=True)
        own, keep = own.detach().contiguous(), keep and self.rank == 0
        made = torch.empty(self.classes, *own.shape[1:], dtype=own.dtype) if keep else own
        most = -(-self.classes // self.world)
        rows = max(1, _PORTION // max(1, own[:1].nbytes))
        shards = [ClassShard(rank, self.world, self.classes) for rank in range(self.world)]
        for start in range(0, most, rows):
            sent = own.new_zeros(min(rows, most - start), *own.shape[1:])
            sent[: max(0, len(own) - start)] = own[start : start + len(sent)]
            came = [torch.empty_like(sent) for _ in shards] if self.rank == 0 else None
            dist.gather(sent, came)
            for shard, part in zip(shards, came or (), strict=False) if keep else ():
                stop = min(shard.count, start + len(sent))
                made[shard.first + start : shard.first + stop] = part[: stop - start].cpu()
        return made

    def normal(self, size: int, std: float, generator: torch.Generator | None = None) -> Tensor:
        """Draw the rows (c, size) of this process of normal numbers (classes, size), the same on any division.

        They are drawn in portions, of which the own rows are kept. The generator moves as for all of them at once.
        """
        # `normal_` draws 16 numbers together, and the last 16 again where they are not that many.
        each = 16 * max(1, _PORTION // (64 * size))
        starts = [*range(0, max(1, self.classes - 15), each)]
        own = torch.empty(self.count, size)
        for start, stop in zip(starts, [*starts[1:], self.classes], strict=True):
            drawn = torch.empty(stop - start, size).normal_(0.0, std, generator=generator)
            first, last = max(start, self.first), min(stop, self.stop)
            if first < last:
                own[first - self.first : last - self.first] = drawn[first - start : last - start]
        return own


@contextlib.contextmanager
def divided_over(rank: int, world: int) -> Iterator[None]:
    """Within, heads and centres that are built `sharded` have the classes of this process alone; else all."""
    token = _DIVISION.set((rank, world))
    try:
        yield
    finally:
        _DIVISION.reset(token)


def shard_of(classes: int) -> ClassShard:
    """Return the shard of this process. Raises UserError for too few classes."""
    rank, world = _DIVISION.get()
    if world > 1 and classes < LEAST * world:
        found = f"{classes} classes over {world} processes"
        raise UserError("task.head.sharded", found, f"at least {LEAST} classes for each", "leave task.head out")
    return ClassShard(rank, world, classes)


def divided(module: nn.Module | None) -> dict[str, ClassShard]:
    """Return the tensors of a module, by name, of which this process has the rows of a shard alone."""
    found = dict[str, ClassShard]()
    for prefix, part in module.named_modules() if module is not None else ():
        shard = getattr(part, "shard", None)
        if isinstance(shard, ClassShard) and shard.world > 1:
            found[f"{prefix}.weight".lstrip(".")] = shard
    return found


def traffic(samples: int, size: int, bytes_each: int = 4) -> dict[str, int]:
    """Return the bytes that a process gives to each kind of collective in a step, for `samples` of its own.

    Over W processes: of what is gathered it sends and receives W - 1 times as much, of what is summed over N = W x B
    rows about twice as much.
    """
    return {
        "all_gather": samples * (size + 1) * bytes_each,  # embeddings, and labels beside them
        "all_reduce": samples * 3 * bytes_each,  # of each of N rows: the greatest; the sum, and the target beside it
        "all_gather_backward": samples * 2 * bytes_each,  # gradients of sum and target
        "reduce_scatter": samples * size * bytes_each,  # gradients of embeddings, of each of N rows
    }


def sharded_terms(
    x_BD: Tensor, centre_cD: Tensor, label_B: Tensor, scale: float, shard: ClassShard, *, unit: bool, sample: float
) -> MarginTerms:
    """Compute the `margin_terms` of a process's samples over the classes of all processes. Every process calls it.

    Embeddings have any length, centres too unless `unit`; below 1 `sample` is the share of classes that is drawn. In
    the backward pass the gradient of the centres is divided by the number of processes, as that of other parameters is
    when it is averaged.
    """
    compute = _uncompiled if torch.compiler.is_compiling() else _terms
    return MarginTerms(*compute(x_BD, centre_cD, label_B, scale, shard, unit, sample))


def _terms(
    x_BD: Tensor, centre_cD: Tensor, label_B: Tensor, scale: float, shard: ClassShard, unit: bool, sample: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x_BD.device.type, enabled=False):
        x_BD = F.normalize(at_least_float32(x_BD))
        if not unit:
            centre_cD = at_least_float32(centre_cD)
        x_ND, label_N = _OfAll.apply(x_BD, label_B, shard.world)
        label_N = label_N - shard.first
        if sample < 1:
            centre_cD, label_N = _sampled(centre_cD, label_N, sample)
        own = margin_terms(x_ND, centre_cD, label_N, scale, unit)
        nearest_N = own.nearest.clone()
        if shard.world > 1:
            dist.all_reduce(nearest_N, op=dist.ReduceOp.MAX)
        sums_N2 = torch.stack([(own.others + scale * (own.nearest - nearest_N)).exp(), own.target], 1)
        rows = slice(shard.rank * len(x_BD), (shard.rank + 1) * len(x_BD))
        others_B, target_B = _Summed.apply(sums_N2, rows, shard.world).unbind(1)
        return target_B, nearest_N[rows], others_B.log()


@_disable_dynamo  # collectives in a compiled graph would be traced as others
def _uncompiled(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _terms(*given)


def _sampled(centre_cD: Tensor, label_N: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the centres of the batch's classes and of a random share, and labels by their place among these, or -1.

    Random numbers are those of the micro-batch (`rng.reseed`). As many are kept whatever the labels are, so no shape
    waits for the device.
    """
    count = len(centre_cD)
    kept = max(math.ceil(share * count), min(len(label_N), count), LEAST)
    if kept >= count:
        return centre_cD, label_N
    inside_N = (label_N >= 0) & (label_N < count)
    draw_c = torch.rand(count, device=centre_cD.device)
    draw_c.scatter_reduce_(0, label_N.clamp(0, count - 1), torch.where(inside_N, 2.0, 0.0), "amax")
    row_k = draw_c.topk(kept).indices.sort().values
    return centre_cD.index_select(0, row_k), torch.where(inside_N, torch.searchsorted(row_k, label_N), -1)


def collective(names: tuple[str, str]) -> Callable[[Tensor, Tensor], object]:
    """Return a collective by its name, or by that of before torch 2.14, which warns of it."""
    new, old = names
    return getattr(dist, new, None) or getattr(dist, old)


def gathered(x: Tensor, world: int) -> Tensor:
    """(b, ...) on each process -> (world*b, ...) on every one, in order, without gradient."""
    out = x.new_empty((world * x.shape[0], *x.shape[1:]))
    collective(ALL_GATHER)(out, x.contiguous())
    return out


class _OfAll(torch.autograd.Function):
    """Embeddings and labels of all processes in one collective. The gradient of own rows is summed over processes."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, label_B: Tensor, world: int) -> tuple[Tensor, Tensor]:
        ctx.world = world
        if world == 1:
            ctx.mark_non_differentiable(label_B)
            return x_BD.view_as(x_BD), label_B.clone()
        whole = torch.int64 if x_BD.dtype == torch.float64 else torch.int32
        both = gathered(torch.cat([x_BD, label_B.to(whole)[:, None].view(x_BD.dtype)], 1), world)
        label_N = both[:, -1].contiguous().view(whole).long()
        ctx.mark_non_differentiable(label_N)
        return both[:, :-1], label_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        if ctx.world == 1:
            return grad_ND, None, None
        grad_BD = grad_ND.new_empty(len(grad_ND) // ctx.world, grad_ND.shape[1])
        collective(REDUCE_SCATTER)(grad_BD, grad_ND.contiguous())
        return grad_BD.mul_(ctx.world), None, None  # `_Summed` has divided it, for the centres


class _Summed(torch.autograd.Function):
    """Own rows of a sum over processes. Their gradients go to all processes, divided by their number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: slice, world: int) -> Tensor:
        ctx.world = world
        if world > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x[rows].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (gathered(grad, ctx.world).div_(ctx.world) if ctx.world > 1 else grad), None, None


class ShardedMarginHead(nn.Module):
    """Trained centres of the classes of a process, `weight` (c, D); those of all processes make a `MarginHead`."""

    def __init__(self, classes: int, embedding: int, scale: float, sample: float = 1.0):
        super().__init__()
        self.scale, self.sample, self.shard = scale, sample, shard_of(classes)
        self.weight = nn.Parameter(self.shard.normal(embedding, 0.01))

    def forward(self, x_BD: Tensor, label_B: Tensor) -> MarginTerms:
        """Embeddings of any norm and their labels to `MarginTerms`, in float32. Every process calls it."""
        sample = self.sample if self.training else 1.0
        return sharded_terms(x_BD, self.weight, label_B, self.scale, self.shard, unit=False, sample=sample)

"""The softmax over many classes in one pass, without a matrix of batch x classes. B batch, C classes, D embedding.

A margin changes the logit of the target alone. Of all other classes the loss needs one number a sample, the logarithm
of the sum of their exponentials, and its gradient, which is their mean centre under the softmax: what attention
computes with centres for keys and values. Like attention (Milakov and Gimelshein 2018, arXiv 1805.02867; Rabe and
Staats 2021, arXiv 2112.05682) it is summed over portions of the classes, relative to the greatest logit so far. Logits
of attention have no bound; a cosine has one, and where `scale` is so small that no sum of exponentials can leave the
range of numbers, as 64 is in float32, they are summed as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

LARGE = 2**20
"""Cosines (batch x classes) from which on a head takes this way: 4 MB of float32. Smaller ones keep the plain chain."""
PORTION = {"cpu": 2**20, "cuda": 2**24}
"""Cosines that are in memory at a time, by kind of device. 2^18 to 2^21 took the same time on a core of a Xeon.

On a GPU, where a portion costs some ten launches, none was tried."""
_SHORTEST = 1e-12
"""Rows that are shorter are divided by this, as `F.normalize` does."""


class MarginTerms(NamedTuple):
    """Reduction of the cosines (B, C) with every centre that a margin softmax needs; each (B,)."""

    target: Tensor
    """Cosine with the centre of the sample's class. Rounding may carry it past 1."""
    nearest: Tensor
    """The greatest cosine with another centre. No gradient: that of the softmax over the others is all in `others`."""
    others: Tensor
    """ln of the sum, over all other classes, of exp(scale x (cosine - nearest))."""


def large(x_BD: Tensor, centre_CD: Tensor) -> bool:
    """Return True where a batch and its centres are so many that their cosines are not kept."""
    return len(x_BD) * len(centre_CD) >= LARGE


def margin_terms(x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, unit: bool = False) -> MarginTerms:
    """Compute what a margin softmax needs of embeddings of length 1 and centres of any length; two classes or more.

    Centres may be a slice of all: a label outside it, by its place in the slice, has the target 0 there, and all of the
    slice's classes among the others. Terms of slices are combined by their sum, greatest and logarithm of the sum.

    Gradients go to both: of embeddings they are computed at once, of centres backwards, from logits computed again. In
    memory are a portion of logits, one of centres unless `unit` says that these have length 1 already, and the
    embeddings three times. One precision, float32 or float64. A compiled network has a graph break here: a compiler
    would unroll the loop over portions.
    """
    apply = _uncompiled if torch.compiler.is_compiling() else _Rivals.apply
    return MarginTerms(*apply(x_BD, centre_CD, label_B, scale, unit))


@_disable_dynamo  # `torch.compiler.disable` would import the compiler here: 2 s of processor time
def _uncompiled(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Rivals.apply(*given)


class _Rivals(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, unit: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        inside_B = (label_B >= 0) & (label_B < len(centre_CD))
        target_BD = centre_CD[label_B.clamp(0, len(centre_CD) - 1)].mul_(inside_B[:, None])
        inverse_C1 = None
        if not unit:
            target_BD.mul_(_inverse_lengths(target_BD))
            inverse_C1 = centre_CD.new_empty(len(centre_CD), 1)
        x_BD = x_BD * scale
        most_B, others_B, mean_BD = _passed(x_BD, centre_CD, inverse_C1, label_B, scale, ctx.needs_input_grad[0])
        ctx.scale = scale
        trained = (centre_CD, label_B, x_BD, inverse_C1, most_B + others_B) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(mean_BD, target_BD, *trained)
        nearest_B = most_B / scale
        ctx.mark_non_differentiable(nearest_B)
        return torch.linalg.vecdot(x_BD, target_BD).div_(scale), nearest_B, others_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cosine_B: Tensor, _: Tensor, others_B: Tensor) -> tuple[Tensor | None, ...]:
        mean_BD, target_BD, *trained = ctx.saved_tensors
        x_grad = centre_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (mean_BD * others_B[:, None]).addcmul_(target_BD, cosine_B[:, None])
        if ctx.needs_input_grad[1]:
            centre_CD, label_B, x_BD, inverse_C1, total_B = trained
            with torch.autocast(x_BD.device.type, enabled=False):  # backward may be called under it
                centre_grad = _centre_grad(
                    centre_CD, label_B, x_BD, inverse_C1, total_B, cosine_B / ctx.scale, others_B
                )
        return x_grad, centre_grad, None, None, None


def _centre_grad(
    centre_CD: Tensor,
    label_B: Tensor,
    x_BD: Tensor,
    inverse_C1: Tensor | None,
    total_B: Tensor,
    target_grad_B: Tensor,
    others_grad_B: Tensor,
) -> Tensor:
    """Gradient of the centres; `total_B` is the logarithm of the sum over the other classes of exp(logit)."""
    centre_grad = torch.empty_like(centre_CD)
    for start, centre_cD, logit_Bc in _portions(x_BD, centre_CD, inverse_C1):
        weight_Bc = logit_Bc.sub_(total_B[:, None]).exp_().mul_(others_grad_B[:, None])
        _put(weight_Bc, label_B - start, target_grad_B[:, None])
        rows = slice(start, start + len(centre_cD))
        grad_cD = torch.mm(weight_Bc.T, x_BD, out=centre_grad[rows])
        if inverse_C1 is not None:
            # Along the centre itself nothing changes: only its direction counts.
            grad_cD.addcmul_(centre_cD, torch.linalg.vecdot(grad_cD, centre_cD)[:, None], value=-1)
            grad_cD.mul_(inverse_C1[rows])
    return centre_grad


def _passed(
    x_BD: Tensor, centre_CD: Tensor, inverse_C1: Tensor | None, label_B: Tensor, scale: float, centres_too: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Greatest logit of another class (B,), `MarginTerms.others`, and `scale` x the mean centre (B, D) of it.

    Embeddings have length `scale`.
    """
    bounded = _bounded(scale, centre_CD)
    most_B = torch.full_like(x_BD[:, 0], torch.finfo(x_BD.dtype).min)
    sum_B = torch.zeros_like(most_B)
    mean_BD = torch.zeros_like(x_BD) if centres_too else None
    for start, centre_cD, logit_Bc in _portions(x_BD, centre_CD, inverse_C1, measure=True):
        _put(logit_Bc, label_B - start, -torch.inf)
        more_B = torch.maximum(most_B, logit_Bc.amax(1))
        if not bounded:
            fade_B = (most_B - more_B).exp_()
            logit_Bc.sub_(more_B[:, None])
            sum_B.mul_(fade_B)
            if mean_BD is not None:
                mean_BD.mul_(fade_B[:, None])
        most_B = more_B
        p_Bc = logit_Bc.exp_()
        sum_B.add_(p_Bc.sum(1))
        if mean_BD is not None:
            torch.addmm(mean_BD, p_Bc, centre_cD, out=mean_BD)
    if mean_BD is not None:
        mean_BD.mul_(scale / sum_B[:, None])
    return most_B, (sum_B.mul_((-most_B).exp_()) if bounded else sum_B).log(), mean_BD


def _bounded(scale: float, centre_CD: Tensor) -> bool:
    """Return True where exponentials of logits and their sum are normal numbers for all cosines; e^2 is to spare."""
    return scale + math.log(len(centre_CD)) < math.log(torch.finfo(centre_CD.dtype).max) - 2


def _inverse_lengths(x_ND: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_ND, dim=1, keepdim=True).clamp_(min=_SHORTEST).reciprocal_()


def _portions(
    x_BD: Tensor, centre_CD: Tensor, inverse_C1: Tensor | None, measure: bool = False
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First class, centres of length 1 and their products with `x`, in memory that the next ones use again.

    To `measure` is to write the inverse lengths, while the centres of a portion are at hand.
    """
    classes, each = len(centre_CD), max(1, PORTION.get(x_BD.device.type, 2**20) // len(x_BD))
    logits = x_BD.new_empty(len(x_BD) * min(each, classes))
    centres = x_BD.new_empty(0 if inverse_C1 is None else min(each, classes), x_BD.shape[1])
    for start in range(0, classes, each):
        centre_cD = centre_CD[start : start + each]
        if inverse_C1 is not None:
            inverse_c1 = inverse_C1[start : start + each]
            if measure:
                inverse_c1.copy_(_inverse_lengths(centre_cD))
            centre_cD = torch.mul(centre_cD, inverse_c1, out=centres[: len(centre_cD)])
        logit_Bc = logits[: len(x_BD) * len(centre_cD)].view(len(x_BD), len(centre_cD))
        yield start, centre_cD, torch.mm(x_BD, centre_cD.T, out=logit_Bc)


def _put(table_Bc: Tensor, column_B: Tensor, value: Tensor | float) -> None:
    """Set one column of each row; columns outside the table are left out, without asking the device which those are."""
    column_B1 = column_B.clamp(0, table_Bc.shape[1] - 1)[:, None]
    inside_B1 = column_B1 == column_B[:, None]
    table_Bc.scatter_(1, column_B1, torch.where(inside_B1, value, table_Bc.gather(1, column_B1)))

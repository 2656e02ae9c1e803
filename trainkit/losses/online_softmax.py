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

    Gradients go to both: of embeddings they are computed at once, of centres backwards, from logits computed again. In
    memory are a portion of logits, one of centres unless `unit` says that these have length 1 already, and the
    embeddings three times. One precision, float32 or float64.
    """
    # A compiler would unroll the loop over portions. An operator of its own imports it, 2 s and 150 MB, where called.
    if torch.compiler.is_compiling():
        needs = torch.is_grad_enabled()
        trained = (needs and x_BD.requires_grad, needs and centre_CD.requires_grad)
        return MarginTerms(*_operator(x_BD, centre_CD, label_B, scale, unit, *trained)[:3])
    return MarginTerms(*_Rivals.apply(x_BD, centre_CD, label_B, scale, unit))


class _Rivals(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, unit: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms, kept = _terms(x_BD, centre_CD, label_B, scale, unit, ctx.needs_input_grad[0])
        ctx.scale = scale
        mean_BD, target_BD, *others = kept
        trained = ctx.needs_input_grad[1]
        ctx.save_for_backward(mean_BD, target_BD, *((centre_CD, label_B, *others) if trained else ()))
        ctx.mark_non_differentiable(terms.nearest)
        return terms.target, terms.nearest, terms.others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cosine_B: Tensor, _: Tensor, others_B: Tensor) -> tuple[Tensor | None, ...]:
        mean_BD, target_BD, *trained = ctx.saved_tensors
        x_grad = centre_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _x_grad(mean_BD, target_BD, cosine_B, others_B)
        if ctx.needs_input_grad[1]:
            centre_CD, label_B, x_BD, inverse_C1, total_B = trained
            whole = (centre_CD, label_B, x_BD, inverse_C1, total_B)
            centre_grad = _centre_grad(*whole, cosine_B, others_B, ctx.scale)
        return x_grad, centre_grad, None, None, None


def _terms(
    x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, unit: bool, x_trained: bool
) -> tuple[MarginTerms, tuple[Tensor | None, ...]]:
    """Compute the terms, and for the backward pass the mean and the target centre of each sample, embeddings of length
    `scale`, inverse lengths of the centres and the logarithm of the sum over the other classes."""
    target_BD = centre_CD[label_B]
    inverse_C1 = None
    if not unit:
        target_BD.mul_(_inverse_lengths(target_BD))
        inverse_C1 = centre_CD.new_empty(len(centre_CD), 1)
    x_BD = x_BD * scale
    most_B, others_B, mean_BD = _passed(x_BD, centre_CD, inverse_C1, label_B, scale, x_trained)
    cosine_B = torch.linalg.vecdot(x_BD, target_BD).div_(scale)
    kept = (mean_BD, target_BD, x_BD, inverse_C1, most_B + others_B)
    return MarginTerms(cosine_B, most_B / scale, others_B), kept


def _x_grad(mean_BD: Tensor, target_BD: Tensor, cosine_B: Tensor, others_B: Tensor) -> Tensor:
    return (mean_BD * others_B[:, None]).addcmul_(target_BD, cosine_B[:, None])


def _centre_grad(
    centre_CD: Tensor,
    label_B: Tensor,
    x_BD: Tensor,
    inverse_C1: Tensor | None,
    total_B: Tensor,
    cosine_B: Tensor,
    others_B: Tensor,
    scale: float,
) -> Tensor:
    centre_grad = torch.empty_like(centre_CD)
    with torch.autocast(x_BD.device.type, enabled=False):  # backward may be called under it
        for start, centre_cD, logit_Bc in _portions(x_BD, centre_CD, inverse_C1):
            weight_Bc = logit_Bc.sub_(total_B[:, None]).exp_().mul_(others_B[:, None])
            _put(weight_Bc, label_B - start, cosine_B[:, None] / scale)
            rows = slice(start, start + len(centre_cD))
            grad_cD = torch.mm(weight_Bc.T, x_BD, out=centre_grad[rows])
            if inverse_C1 is not None:
                # Along the centre itself nothing changes: only its direction counts.
                grad_cD.addcmul_(centre_cD, torch.linalg.vecdot(grad_cD, centre_cD)[:, None], value=-1)
                grad_cD.mul_(inverse_C1[rows])
    return centre_grad


# ---- The same as operators that a compiler takes as they are


@torch.library.custom_op("trainkit::margin_terms", mutates_args=())
def _operator(
    x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, unit: bool, x_trained: bool, centres_trained: bool
) -> list[Tensor]:
    """Return the terms and what the backward pass needs; empty tensors for what it does not."""
    terms, kept = _terms(x_BD, centre_CD, label_B, scale, unit, x_trained)
    needed = (x_trained, x_trained, centres_trained, centres_trained, centres_trained)
    none = [x_BD.new_empty(0) for _ in kept]
    return [*terms, *(t if t is not None and n else e for t, n, e in zip(kept, needed, none, strict=True))]


@_operator.register_fake
def _(
    x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, unit: bool, x_trained: bool, centres_trained: bool
) -> list[Tensor]:
    vectors = [torch.empty_like(x_BD) if n else x_BD.new_empty(0) for n in (x_trained, x_trained, centres_trained)]
    inverse = centre_CD.new_empty(len(centre_CD), 1) if centres_trained and not unit else x_BD.new_empty(0)
    terms = [x_BD.new_empty(len(x_BD)) for _ in range(3)]
    return [*terms, *vectors, inverse, x_BD.new_empty(len(x_BD) if centres_trained else 0)]


@torch.library.custom_op("trainkit::margin_terms_centre_grad", mutates_args=())
def _centre_grad_operator(
    centre_CD: Tensor,
    label_B: Tensor,
    x_BD: Tensor,
    inverse_C1: Tensor,
    total_B: Tensor,
    cosine_B: Tensor,
    others_B: Tensor,
    scale: float,
) -> Tensor:
    inverse = inverse_C1 if inverse_C1.numel() else None
    return _centre_grad(centre_CD, label_B, x_BD, inverse, total_B, cosine_B, others_B, scale)


@_centre_grad_operator.register_fake
def _(centre_CD: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(centre_CD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, centre_CD, label_B, ctx.scale, _, *ctx.trained = inputs
    ctx.save_for_backward(centre_CD, label_B, *output[3:])


def _operator_backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    centre_CD, label_B, mean_BD, target_BD, *kept = ctx.saved_tensors
    cosine_B, _, others_B, *_ = grads
    x_grad = centre_grad = None
    if ctx.trained[0]:
        x_grad = _x_grad(mean_BD, target_BD, cosine_B, others_B)
    if ctx.trained[1]:
        centre_grad = _centre_grad_operator(centre_CD, label_B, *kept, cosine_B, others_B, ctx.scale)
    return x_grad, centre_grad, None, None, None, None, None


_operator.register_autograd(_operator_backward, setup_context=_keep)


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

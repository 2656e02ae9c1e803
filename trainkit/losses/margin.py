"""Softmax losses with a margin on the target: ArcFace, CosFace, AdaFace; and none. B batch, C classes, D embedding.

The three take the cosine between an embedding and the centre of its class, lower it, and multiply every cosine by
`scale`; the cross-entropy of the result is the loss. Without a margin a linear layer gives the scores of the classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.losses.class_shards import ShardedMarginHead
from trainkit.losses.margin_specs import AnyMargin, ArcFace, CosFace, Head, NoMargin
from trainkit.losses.online_softmax import MarginTerms, large, margin_terms
from trainkit.tensors import at_least_float32, cosines

NORM_EPS = 1e-3
"""AdaFace: added to the standard deviation of the norms; also the least distance of angles from 0 and pi."""
NORM_RANGE = (1e-3, 100.0)
"""AdaFace: norms are clamped to this range."""


def arcface(cos_B: Tensor, m: float) -> Tensor:
    """Cosine of an angle that is larger by `m`.

    From theta = pi - m on, where cos(theta + m) would rise again, InsightFace's line cos(theta) - m sin(m) is used, so
    a harder sample always has a higher loss. (The line is below -1 there: the function steps down, never up.)
    """
    # The slope of sin is infinite at cos = 1; the clamp makes it zero there, which avoids a NaN.
    sin_B = (1 - cos_B.square()).clamp(min=1e-30).sqrt()
    shifted_B = cos_B * math.cos(m) - sin_B * math.sin(m)
    return torch.where(cos_B > -math.cos(m), shifted_B, cos_B - m * math.sin(m))


def cosface(cos_B: Tensor, m: float) -> Tensor:
    """A cosine that is lower by `m`."""
    return cos_B - m


def adaface(cos_B: Tensor, quality_B: Tensor, m: float) -> Tensor:
    """cos(theta - m q) - m (1 + q) for a quality q in [-1, 1]: q = -1 is ArcFace, q = 0 is CosFace.

    The angles stay `NORM_EPS` away from 0 and pi, as published.
    """
    theta_B = cos_B.clamp(-1 + NORM_EPS, 1 - NORM_EPS).acos()
    angle_B = (theta_B - m * quality_B).clamp(NORM_EPS, math.pi - NORM_EPS)
    return angle_B.cos() - m * (1 + quality_B)


class NormStatistics(nn.Module):
    """Running mean and standard deviation of embedding norms, for AdaFace. State without gradient."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))

    @torch.no_grad()
    def update(self, norm_N: Tensor, t_alpha: float) -> None:
        """Update with the norms of a micro-batch, of all ranks in global sample order, so that ranks stay equal.

        With accumulated micro-batches it is called for each: the norms of later ones do not exist yet.
        """
        norm_N = norm_N.float().clamp(*NORM_RANGE)
        self.mean.lerp_(norm_N.mean(), t_alpha)
        if norm_N.numel() > 1:  # The standard deviation of one norm is undefined.
            self.std.lerp_(norm_N.std(), t_alpha)

    @torch.no_grad()
    def quality(self, norm_B: Tensor, h: float, plus_B: Tensor | float = 0.0) -> Tensor:
        """Norms in standard deviations from the mean, times `h`, plus `plus_B`, within [-1, 1]; without gradient.

        Called after `update` with the same micro-batch, as published. `plus_B` is for a margin by geometry.
        """
        norm_B = at_least_float32(norm_B).clamp(*NORM_RANGE)
        return ((norm_B - self.mean) / (self.std + NORM_EPS) * h + plus_B).clamp(-1, 1)


def margin_ramp(margin: AnyMargin | NoMargin, epoch: int) -> float:
    """Share of the margin used in an epoch: min(1, epoch / ramp_epochs), epochs counted from 0.

    So the first epoch of a ramp has no margin, and epoch number `ramp_epochs` is the first with all of it. 1 without
    a ramp.
    """
    epochs = margin.ramp_epochs if isinstance(margin, ArcFace | CosFace) else 0
    return min(1.0, epoch / epochs) if epochs else 1.0


def margin_logits(
    score_BC: Tensor, label_B: Tensor, margin: AnyMargin | NoMargin, quality_B: Tensor | None = None, ramp: float = 1.0
) -> Tensor:
    """Turn scores of a head (B, C) into logits of the loss (B, C): margin on the target, scale. Float32 or wider.

    Scores are cosines; with NoMargin they are logits already and returned unchanged. AdaFace needs `quality_B` from
    `NormStatistics.quality`. `ramp`, from `margin_ramp`, is the share of `m` that is used.
    """
    score_BC = at_least_float32(score_BC)
    if isinstance(margin, NoMargin):
        return score_BC
    target_B1 = label_B[:, None]
    with_margin_B = with_margin(score_BC.gather(1, target_B1)[:, 0], margin, quality_B, ramp)
    return margin.scale * score_BC.scatter(1, target_B1, with_margin_B[:, None])


def with_margin(cos_B: Tensor, margin: AnyMargin, quality_B: Tensor | None = None, ramp: float = 1.0) -> Tensor:
    """Cosines with the centres of the samples' own classes, lowered; the last two as for `margin_logits`."""
    m = margin.m * ramp
    if isinstance(margin, ArcFace):
        return arcface(cos_B, m)
    if isinstance(margin, CosFace):
        return cosface(cos_B, m)
    if quality_B is None:
        raise ValueError("AdaFace needs quality_B")
    return adaface(cos_B, quality_B, m)


def class_logits(score_BC: Tensor, margin: AnyMargin | NoMargin) -> Tensor:
    """Turn scores of a head (B, C) into logits whose softmax is the probability of each class, float32 or wider.

    Without a margin, because the target is not known; cosines are multiplied by `scale_eval`.
    """
    score_BC = at_least_float32(score_BC)
    if isinstance(margin, NoMargin):
        return score_BC
    scale = margin.scale_eval if isinstance(margin, ArcFace | CosFace) else None
    return (margin.scale if scale is None else scale) * score_BC


def class_loss(
    logit_BC: Tensor, label_B: Tensor, margin: AnyMargin | NoMargin, weight_C: Tensor | None = None
) -> tuple[Tensor, Tensor | int]:
    """The loss of `margin_logits`: its sum over samples, and its divisor: their number, or the sum of weights.

    Cross-entropy; for NoMargin with `bce` the sum over classes of binary ones. `weight_C` weighs samples by class.
    """
    logit_BC = at_least_float32(logit_BC)
    if not (isinstance(margin, NoMargin) and margin.loss == "bce"):
        total = F.cross_entropy(logit_BC, label_B, weight_C, reduction="sum")
    else:
        if logit_BC.shape[1] == 2:
            logit_BC, target_BC = logit_BC[:, 1:] - logit_BC[:, :1], label_B[:, None]
        else:
            target_BC = F.one_hot(label_B, logit_BC.shape[1])
        loss_BC = F.binary_cross_entropy_with_logits(logit_BC, target_BC.to(logit_BC.dtype), reduction="none")
        total = (loss_BC if weight_C is None else loss_BC * weight_C[label_B, None]).sum()
    return total, len(label_B) if weight_C is None else weight_C[label_B].sum()


def margin_loss(
    score: Tensor | MarginTerms,
    label_B: Tensor,
    margin: AnyMargin | NoMargin,
    quality_B: Tensor | None = None,
    ramp: float = 1.0,
    weight_C: Tensor | None = None,
) -> tuple[Tensor, Tensor | int]:
    """Return `class_loss` of the output of a head: scores (B, C), or with many classes their `MarginTerms`."""
    if not isinstance(score, MarginTerms):
        return class_loss(margin_logits(score, label_B, margin, quality_B, ramp), label_B, margin, weight_C)
    if isinstance(margin, NoMargin):
        raise TypeError("without a margin the scores of all classes are needed")
    lead_B = with_margin(score.target.clamp(-1, 1), margin, quality_B, ramp) - score.nearest
    loss_B = -F.logsigmoid(margin.scale * lead_B - score.others)
    if weight_C is None:
        return loss_B.sum(), len(label_B)
    return (loss_B * weight_C[label_B]).sum(), weight_C[label_B].sum()


def class_head(
    margin: AnyMargin | NoMargin, classes: int, embedding: int, head: Head | None = None
) -> MarginHead | ShardedMarginHead | LinearHead:
    """The trained layer between embeddings and what `margin_loss` takes."""
    if isinstance(margin, NoMargin):
        return LinearHead(classes, embedding)
    if head is not None and head.sharded:
        return ShardedMarginHead(classes, embedding, margin.scale, head.sample)
    return MarginHead(classes, embedding, margin.scale)


class LinearHead(nn.Module):
    """A linear classifier: `weight` (C, D) and `bias` (C,). It starts near 0, so the loss starts near log(C)."""

    def __init__(self, classes: int, embedding: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, embedding))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.normal_(self.weight, 0.0, 0.01)

    def forward(self, x_BD: Tensor, label_B: Tensor | None = None) -> Tensor:
        """Embeddings to class scores (B, C), float32 whatever the precision of the run. Labels change nothing."""
        with torch.autocast(x_BD.device.type, enabled=False):
            x_BD = at_least_float32(x_BD)
            return F.linear(x_BD, self.weight.to(x_BD.dtype), self.bias.to(x_BD.dtype))


class MarginHead(nn.Module):
    """Class centres that are trained: `weight` (C, D), the orientation of InsightFace."""

    def __init__(self, classes: int, embedding: int, scale: float = 64.0):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(classes, embedding))
        nn.init.normal_(self.weight, 0.0, 0.01)

    def forward(self, x_BD: Tensor, label_B: Tensor | None = None) -> Tensor | MarginTerms:
        """Embeddings of any norm to cosines with every centre, (B, C), float32 whatever the precision of the run.

        Where labels are given and cosines are many, their `MarginTerms` at the head's `scale`: for `margin_loss`.
        """
        if label_B is not None and large(x_BD, self.weight):
            return margin_terms_of(x_BD, self.weight, label_B, self.scale)
        return cosines(x_BD, self.weight)


def margin_terms_of(x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, unit: bool = False) -> MarginTerms:
    """`margin_terms` of embeddings of any length, in float32 or wider, also under autocast."""
    with torch.autocast(x_BD.device.type, enabled=False):
        if not unit:  # those of length 1 are in bfloat16 on purpose
            centre_CD = at_least_float32(centre_CD)
        return margin_terms(F.normalize(at_least_float32(x_BD)), centre_CD, label_B, scale, unit)

"""Losses between the records of a batch: batch-hard triplets, distribution matching, circle, supervised contrast.

Batch-hard and soft-margin triplets: Hermans et al., 2017, arXiv 1703.07737. Similarity distribution matching (SDM):
Jiang and Ye, IRRA, CVPR 2023, arXiv 2303.12501; over every set of modalities that a query can be made of: Zuo et al.,
ReID5o, NeurIPS 2025, arXiv 2506.09385. Circle: Sun et al., CVPR 2020, arXiv 2002.10857. Supervised contrast: Khosla et
al., NeurIPS 2020, arXiv 2004.11362. Label smoothing: Szegedy et al., CVPR 2016, arXiv 1512.00567.

B records, D features, Q queries, G gallery records, S sets of modalities. All shapes are known without looking at a
value, so the host waits for nothing. An anchor or a query for which the batch has nothing to compare with is left out
of the mean; where none is left the loss is 0, with a gradient of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from trainkit.config.ranges import FractionBelowOne, Positive
from trainkit.interfaces import MODALITIES
from trainkit.losses.margin import at_least_float32, cosines

SDM_EPS = 1e-8
"""SDM: what is added to the labels' probabilities before their logarithm, as published."""


@dataclass(kw_only=True)
class Identity:
    """Cross-entropy over the persons of the training set, of records and of queries."""

    weight: Positive = 1.0
    smoothing: FractionBelowOne = 0.1
    """Share of the target that is spread evenly over all persons."""


@dataclass(kw_only=True)
class Triplet:
    """Each record: the farthest of its person should be nearer than the nearest of another, before the neck."""

    weight: Positive = 1.0
    margin: Literal["soft"] | Annotated[float, Field(ge=0, le=1000)] = "soft"
    """By how much nearer, as a Euclidean distance; `soft` is ln(1 + exp(difference)), which never ends."""


@dataclass(kw_only=True)
class Matching:
    """SDM: of each query the similarities to the RGB records, and back, become those that the labels ask for."""

    weight: Positive = 1.0
    temperature: Positive = 0.02
    """Divisor of the cosines."""


@dataclass(kw_only=True)
class Circle:
    """Circle loss over the cosines of all records: each pair counts by how far it is from where it should be."""

    weight: Positive = 1.0
    margin: FractionBelowOne = 0.25
    """Cosines of one person should exceed 1 - margin, those of two lie below it."""
    scale: Positive = 128.0
    """Factor of the cosines; the published one of person retrieval."""


@dataclass(kw_only=True)
class Contrast:
    """Supervised contrast over the cosines of all records: those of a person against all others."""

    weight: Positive = 1.0
    temperature: Positive = 0.1
    """Divisor of the cosines."""


def identity(logit_BC: Tensor, label_B: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each row, (B,), against (1 - smoothing) on its class and smoothing spread over all."""
    return F.cross_entropy(at_least_float32(logit_BC), label_B, reduction="none", label_smoothing=smoothing)


def triplet(x_BD: Tensor, label_B: Tensor, margin: Literal["soft"] | float) -> Tensor:
    """Batch-hard triplet loss, a scalar: mean over anchors of relu(margin + p - n), or of ln(1 + exp(p - n)).

    p is the Euclidean distance to the farthest other row with the label of the anchor, n to the nearest with another
    label. Rows nearer than 1e-6 count as so far apart, with gradient 0.
    """
    x_BD = at_least_float32(x_BD)
    same_BB, other_BB = _pairs(label_B)
    with torch.no_grad():
        # Which ones, by a matrix product around the mean, where little cancels; how far, below, from differences.
        y_BD = x_BD - x_BD.mean(0)
        square_B = y_BD.square().sum(1)
        far_BB = square_B[:, None] + square_B - 2 * y_BD @ y_BD.T
        hardest_B = far_BB.masked_fill(~same_BB, -torch.inf).argmax(1)
        nearest_B = far_BB.masked_fill(~other_BB, torch.inf).argmin(1)
    gap_B = _distance(x_BD, x_BD[hardest_B]) - _distance(x_BD, x_BD[nearest_B])
    loss_B = F.softplus(gap_B) if margin == "soft" else F.relu(margin + gap_B)
    return _mean(loss_B, same_BB.any(1) & other_BB.any(1))


def circle(x_BD: Tensor, label_B: Tensor, margin: float = 0.25, scale: float = 128.0) -> Tensor:
    """Circle loss (equation 6) with each row as an anchor, a scalar: the mean over anchors.

    Of an anchor ln(1 + sum over n of exp(scale a_n (s_n - margin)) * sum over p of exp(-scale a_p (s_p - 1 + margin))),
    with the cosines s to rows of its label (p) and of others (n), a_p = relu(1 + margin - s_p) and a_n = relu(s_n +
    margin), which have no gradient.
    """
    s_BB = cosines(x_BD, x_BD)
    same_BB, other_BB = _pairs(label_B)
    a_p, a_n = (1 + margin - s_BB.detach()).relu(), (s_BB.detach() + margin).relu()
    p_B = _logsumexp(-scale * a_p * (s_BB - (1 - margin)), same_BB)
    n_B = _logsumexp(scale * a_n * (s_BB - margin), other_BB)
    return _mean(F.softplus(p_B + n_B), same_BB.any(1) & other_BB.any(1))


def contrast(x_BD: Tensor, label_B: Tensor, temperature: float = 0.1) -> Tensor:
    """Supervised contrastive loss (equation 2, the sum outside the logarithm), a scalar: the mean over anchors.

    Of an anchor the mean, over the other rows of its label, of -ln of the softmax of its cosines to all other rows,
    divided by `temperature`.
    """
    s_BB = cosines(x_BD, x_BD) / temperature
    same_BB, other_BB = _pairs(label_B)
    log_p_BB = s_BB - _logsumexp(s_BB, same_BB | other_BB)[:, None]
    count_B = same_BB.sum(1)
    return _mean(-torch.where(same_BB, log_p_BB, 0).sum(1) / count_B.clamp(min=1), count_B > 0)


def matching(
    query_QD: Tensor,
    query_label_Q: Tensor,
    gallery_GD: Tensor,
    gallery_label_G: Tensor,
    temperature: float = 0.02,
    asks_SQ: Tensor | None = None,
    size_S: Tensor | None = None,
    in_gallery_G: Tensor | None = None,
) -> Tensor:
    """SDM of queries and a gallery, both ways, a scalar.

    One way: of each query KL(p || q) of the softmax p of its cosines to the gallery, divided by `temperature`, and q,
    the labels of which records are of its person, divided by their number; mean over queries. The other way the same of
    each gallery record over the queries. Both are added.

    `asks_SQ`, bool, says which queries are of which set of modalities, at most one each: each set has a loss of its
    own, and is alone in the softmax over queries. The sets in the batch are averaged within those of equal `size_S`, 1
    to 5 modalities, and these averages once more (ReID5o). None: one set of all queries. A query of no set, and a
    gallery row that `in_gallery_G` (bool) leaves out, is padding.
    """
    cosine_QG = cosines(query_QD, gallery_GD) / temperature
    if asks_SQ is None:
        asks_SQ = torch.ones_like(query_label_Q, dtype=torch.bool)[None]
    if size_S is None:
        size_S = query_label_Q.new_ones(len(asks_SQ))
    if in_gallery_G is None:
        in_gallery_G = torch.ones_like(gallery_label_G, dtype=torch.bool)
    same_QG = (query_label_Q[:, None] == gallery_label_G) & in_gallery_G
    counts_SQ = asks_SQ & same_QG.any(1)
    log_p_QG = F.log_softmax(cosine_QG.masked_fill(~in_gallery_G, torch.finfo(cosine_QG.dtype).min), dim=1)
    to_gallery_Q = _terms(log_p_QG, same_QG, same_QG.sum(1, keepdim=True)).masked_fill(~in_gallery_G, 0).sum(1)
    # The other way a softmax ends where a set ends: sums over the queries of a set, in a last column those of padding.
    sets = len(asks_SQ)
    set_Q = torch.where(asks_SQ.any(0), asks_SQ.to(torch.int8).argmax(0), sets)
    x_GQ, same_GQ = cosine_QG.T, same_QG.T
    with torch.no_grad():
        top_GS = x_GQ.new_full((len(x_GQ), sets + 1), torch.finfo(x_GQ.dtype).min)
        top_GS = top_GS.scatter_reduce(1, set_Q.expand_as(x_GQ), x_GQ, "amax")
    x_GQ = x_GQ - top_GS[:, set_Q]
    zeros_GS = x_GQ.new_zeros(top_GS.shape)
    log_p_GQ = x_GQ - zeros_GS.index_add(1, set_Q, x_GQ.exp()).clamp(min=1).log()[:, set_Q]  # at the top exp(0)
    matches_GS = zeros_GS.index_add(1, set_Q, same_GQ.to(x_GQ.dtype))
    to_queries_GS = zeros_GS.index_add(1, set_Q, _terms(log_p_GQ, same_GQ, matches_GS[:, set_Q]))[:, :sets]
    counts_SG = (matches_GS[:, :sets] > 0).T
    loss_S = _mean(to_gallery_Q.expand_as(counts_SQ), counts_SQ) + _mean(to_queries_GS.T, counts_SG)
    sizes_K = torch.arange(1, len(MODALITIES) + 1, device=loss_S.device)
    counts_KS = (size_S == sizes_K[:, None]) & counts_SQ.any(1)
    return _mean(_mean(loss_S.expand_as(counts_KS), counts_KS), counts_KS.any(1))


def _terms(log_p: Tensor, same: Tensor, matches: Tensor) -> Tensor:
    """The terms of KL(p || q), of q that is even over those that are the `same`, so many `matches` in all."""
    q = same.to(log_p.dtype) / matches.clamp(min=1)
    return log_p.exp() * (log_p - (q + SDM_EPS).log())


def _pairs(label_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the other rows with the label of a row, and of those with another label, bool (B, B)."""
    same_BB = label_B[:, None] == label_B
    others_BB = ~torch.eye(len(label_B), dtype=torch.bool, device=label_B.device)
    return same_BB & others_BB, ~same_BB


def _distance(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    # The root's slope at 0 has no bound; below the clamp it is 0.
    return (a_BD - b_BD).square().sum(1).clamp(min=1e-12).sqrt()


def _logsumexp(x_BB: Tensor, of_BB: Tensor) -> Tensor:
    """Over some of a row; very low where there is none, and never infinite, which would make gradients NaN."""
    return x_BB.masked_fill(~of_BB, torch.finfo(x_BB.dtype).min / 4).logsumexp(1)


def _mean(x: Tensor, of: Tensor) -> Tensor:
    """Mean over the last dimension of those that count; 0 where none does."""
    return torch.where(of, x, 0).sum(-1) / of.sum(-1).clamp(min=1)

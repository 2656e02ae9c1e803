"""Losses between the records of a batch: batch-hard triplets, distribution matching, supervised contrast.

Batch-hard and soft-margin triplets: Hermans et al., 2017, arXiv 1703.07737. Similarity distribution matching (SDM):
Jiang and Ye, IRRA, CVPR 2023, arXiv 2303.12501; over every set of modalities that a query can be made of: Zuo et al.,
ReID5o, NeurIPS 2025, arXiv 2506.09385. Supervised contrast: Khosla et al., NeurIPS 2020, arXiv 2004.11362. Label
smoothing: Szegedy et al., CVPR 2016, arXiv 1512.00567.

B records, D features, Q queries, G gallery records, S sets of modalities. No shape depends on a value, so the host
never waits for the device. An anchor or query without anything to compare with in the batch is left out of the mean; if
none is left, the loss is 0 with a gradient of 0.

With a `Share` a process computes the rows of its own anchors among the records of all: b of B, q of Q, g of G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainkit.config.ranges import FractionBelowOne, Positive
from trainkit.interfaces import MODALITIES
from trainkit.tensors import F, at_least_float32, cosines, torch

if TYPE_CHECKING:
    from torch import Tensor

SDM_EPS = 1e-8
"""SDM: added to the labels' probabilities before their logarithm, as published."""


@dataclass(kw_only=True)
class Identity:
    """Cross-entropy over the identities of the training set, for records and for queries."""

    weight: Positive = 1.0
    """Weight of this loss in the sum of all losses."""
    smoothing: FractionBelowOne = 0.1
    """Label smoothing: share of the target that is spread evenly over all identities."""
    single_queries: bool = field(default=True, metadata={"hash": "set"})
    """Count queries of one record too, which are records once more. false: each record counts once, as in ReID5o."""


@dataclass(kw_only=True)
class Triplet:
    """Batch-hard triplet loss on features before the neck (Hermans et al., 2017, arXiv 1703.07737)."""

    weight: Positive = 1.0
    """Weight of this loss in the sum of all losses."""
    margin: Literal["soft"] | Annotated[float, Field(ge=0, le=1000)] = "soft"
    """Euclidean distance by which the farthest record of the same identity should be nearer than the nearest one of
    another. `soft`: ln(1 + exp(difference)), which has no such limit."""


@dataclass(kw_only=True)
class Matching:
    """Similarity distribution matching (SDM) between queries and RGB records, in both directions (arXiv 2303.12501)."""

    weight: Positive = 1.0
    """Weight of this loss in the sum of all losses."""
    temperature: Positive = 0.02
    """Divisor of the cosines before the softmax."""


@dataclass(kw_only=True)
class Contrast:
    """Supervised contrastive loss over the cosines of all records (Khosla et al., NeurIPS 2020, arXiv 2004.11362)."""

    weight: Positive = 1.0
    """Weight of this loss in the sum of all losses."""
    temperature: Positive = 0.1
    """Divisor of the cosines before the softmax."""


@dataclass(frozen=True)
class Share:
    """Part of a process in a loss over the records of all processes; the sum over processes is the whole loss."""

    records: slice
    """Records of this process among those of all."""
    queries: slice
    total: Callable[[Tensor], Tensor]
    """Sum over processes."""

    def own(self, x: Tensor) -> Tensor:
        """Rows of the records of this process."""
        return x[self.records]


def identity(logit_BC: Tensor, label_B: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each row, (B,), against (1 - smoothing) on its class and smoothing spread over all."""
    return F.cross_entropy(at_least_float32(logit_BC), label_B, reduction="none", label_smoothing=smoothing)


def triplet(x_BD: Tensor, label_B: Tensor, margin: Literal["soft"] | float, share: Share | None = None) -> Tensor:
    """Batch-hard triplet loss, a scalar: mean over anchors of relu(margin + p - n), or of ln(1 + exp(p - n)).

    p is the Euclidean distance to the farthest other row with the label of the anchor, n to the nearest with another
    label. Rows nearer than 1e-6 count as so far apart, with gradient 0.
    """
    x_BD = at_least_float32(x_BD)
    same_bB, other_bB = _pairs(label_B, share)
    with torch.no_grad():
        # Select them by a matrix product of centred rows, which loses little; distances follow from differences.
        y_BD = x_BD - x_BD.mean(0)
        square_B = y_BD.square().sum(1)
        far_bB = _own(square_B, share)[:, None] + square_B - 2 * _own(y_BD, share) @ y_BD.T
        hardest_b = far_bB.masked_fill(~same_bB, -torch.inf).argmax(1)
        nearest_b = far_bB.masked_fill(~other_bB, torch.inf).argmin(1)
    x_bD = _own(x_BD, share)
    gap_b = _distance(x_bD, x_BD[hardest_b]) - _distance(x_bD, x_BD[nearest_b])
    loss_b = F.softplus(gap_b) if margin == "soft" else F.relu(margin + gap_b)
    return _mean(loss_b, same_bB.any(1) & other_bB.any(1), share)


def contrast(x_BD: Tensor, label_B: Tensor, temperature: float = 0.1, share: Share | None = None) -> Tensor:
    """Supervised contrastive loss (equation 2, the sum outside the logarithm), a scalar: the mean over anchors.

    Of an anchor the mean, over the other rows of its label, of -ln of the softmax of its cosines to all other rows,
    divided by `temperature`.
    """
    s_bB = cosines(_own(x_BD, share), x_BD) / temperature
    same_bB, other_bB = _pairs(label_B, share)
    log_p_bB = s_bB - _logsumexp(s_bB, same_bB | other_bB)[:, None]
    count_b = same_bB.sum(1)
    return _mean(-torch.where(same_bB, log_p_bB, 0).sum(1) / count_b.clamp(min=1), count_b > 0, share)


def matching(
    query_QD: Tensor,
    query_label_Q: Tensor,
    gallery_GD: Tensor,
    gallery_label_G: Tensor,
    temperature: float = 0.02,
    asks_SQ: Tensor | None = None,
    size_S: Tensor | None = None,
    in_gallery_G: Tensor | None = None,
    share: Share | None = None,
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
    if asks_SQ is None:
        asks_SQ = torch.ones_like(query_label_Q, dtype=torch.bool)[None]
    if size_S is None:
        size_S = query_label_Q.new_ones(len(asks_SQ))
    if in_gallery_G is None:
        in_gallery_G = torch.ones_like(gallery_label_G, dtype=torch.bool)
    own_q = slice(None) if share is None else share.queries
    cosine_qG = cosines(query_QD if share is None else query_QD[own_q], gallery_GD) / temperature
    same_qG = (query_label_Q[own_q, None] == gallery_label_G) & in_gallery_G
    counts_Sq = asks_SQ[:, own_q] & same_qG.any(1)
    log_p_qG = F.log_softmax(cosine_qG.masked_fill(~in_gallery_G, torch.finfo(cosine_qG.dtype).min), dim=1)
    to_gallery_q = _terms(log_p_qG, same_qG, same_qG.sum(1, keepdim=True)).masked_fill(~in_gallery_G, 0).sum(1)
    # The other way a softmax ends where a set ends: sums over the queries of a set, in a last column those of padding.
    sets = len(asks_SQ)
    set_Q = torch.where(asks_SQ.any(0), asks_SQ.to(torch.int8).argmax(0), sets)
    x_gQ, same_gQ = cosine_qG.T, same_qG.T
    if share is not None:
        x_gQ = cosines(share.own(gallery_GD), query_QD) / temperature
        same_gQ = (share.own(gallery_label_G)[:, None] == query_label_Q) & share.own(in_gallery_G)[:, None]
    with torch.no_grad():
        top_gS = x_gQ.new_full((len(x_gQ), sets + 1), torch.finfo(x_gQ.dtype).min)
        top_gS = top_gS.scatter_reduce(1, set_Q.expand_as(x_gQ), x_gQ, "amax")
    x_gQ = x_gQ - top_gS[:, set_Q]
    zeros_gS = x_gQ.new_zeros(top_gS.shape)
    log_p_gQ = x_gQ - zeros_gS.index_add(1, set_Q, x_gQ.exp()).clamp(min=1).log()[:, set_Q]  # at the top exp(0)
    matches_gS = zeros_gS.index_add(1, set_Q, same_gQ.to(x_gQ.dtype))
    to_queries_gS = zeros_gS.index_add(1, set_Q, _terms(log_p_gQ, same_gQ, matches_gS[:, set_Q]))[:, :sets]
    counts_Sg = (matches_gS[:, :sets] > 0).T
    loss_S = _mean(to_gallery_q.expand_as(counts_Sq), counts_Sq, share) + _mean(to_queries_gS.T, counts_Sg, share)
    sizes_K = torch.arange(1, len(MODALITIES) + 1, device=loss_S.device)
    counts_KS = (size_S == sizes_K[:, None]) & (_count(counts_Sq, share) > 0)
    return _mean(_mean(loss_S.expand_as(counts_KS), counts_KS), counts_KS.any(1))


def _terms(log_p: Tensor, same: Tensor, matches: Tensor) -> Tensor:
    """The terms of KL(p || q), of q that is even over those that are the `same`, so many `matches` in all."""
    q = same.to(log_p.dtype) / matches.clamp(min=1)
    return log_p.exp() * (log_p - (q + SDM_EPS).log())


def _own(x: Tensor, share: Share | None) -> Tensor:
    return x if share is None else share.own(x)


def _pairs(label_B: Tensor, share: Share | None = None) -> tuple[Tensor, Tensor]:
    """Return masks of the other rows with the label of a row, and of those with another label, bool (b, B)."""
    row_B = torch.arange(len(label_B), device=label_B.device)
    same_bB = _own(label_B, share)[:, None] == label_B
    return same_bB & (_own(row_B, share)[:, None] != row_B), ~same_bB


def _distance(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    # The root's slope at 0 has no bound; below the clamp it is 0.
    return (a_BD - b_BD).square().sum(1).clamp(min=1e-12).sqrt()


def _logsumexp(x_BB: Tensor, of_BB: Tensor) -> Tensor:
    """Over some of a row; very low where there is none, and never infinite, which would make gradients NaN."""
    return x_BB.masked_fill(~of_BB, torch.finfo(x_BB.dtype).min / 4).logsumexp(1)


def _mean(x: Tensor, of: Tensor, share: Share | None = None) -> Tensor:
    """Mean over the last dimension of those that count, of which a share adds up its own; 0 where none does."""
    return torch.where(of, x, 0).sum(-1) / _count(of, share).clamp(min=1)


def _count(of: Tensor, share: Share | None) -> Tensor:
    """Number of those that count, on all processes."""
    return of.sum(-1) if share is None else share.total(of.sum(-1))

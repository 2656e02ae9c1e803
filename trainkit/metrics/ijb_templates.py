"""IJB-B and IJB-C 1:1 verification: sets of images against sets of images.

Whitelam et al. 2017 (IJB-B), Maze et al. 2018 (IJB-C). Pooling as InsightFace's evaluation made customary: images of
one medium (a still, or the frames of one video) are averaged, the media of a template are summed, the sum is
normalised, templates are compared by cosine. An image is weighed by the norm of its embedding and by the score of its
face detector, as most published results do ("norm and detector score").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Templates
from trainkit.interfaces import Scores
from trainkit.metrics.verification import (
    as_array,
    auc_chance_level,
    check_kinds,
    operating_points,
    refuse_nonfinite,
    resolved,
)
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

IMAGES_AT_ONCE = 16384
PAIRS_AT_ONCE = 1024
"""Few enough that both sides stay in the processor's cache: 0.8 us per pair, 1.2 with 8192."""
IMPOSTORS_KEPT = 100_000


def score_templates(embedding: np.ndarray | Tensor, protocol: Templates, where: str = "template set") -> Scores:
    """Compute the metrics of pairs of templates.

    `embedding` is (N, D), image and mirrored image summed, not normalised. Metrics: tar_at_far_1e-1 .. 1e-6, each
    at the nearest false accept rate, auc, eer. A rate with too few impostor pairs is left out. The table keeps every
    genuine pair and the 100,000 impostor pairs with the highest scores. Raises UserError if a pair names a template
    without images, or if there is only one kind of pair.
    """
    check_kinds(protocol.same, where)
    same = np.asarray(protocol.same, dtype=bool)
    ids, unit = pool(embedding, protocol, where)
    score = cosine(ids, unit, protocol.first, protocol.second, where)
    impostor = score[~same]
    points = operating_points(score[same], impostor)
    metrics = {"auc": float(points.auc), "eer": float(points.eer)}
    metrics |= {f"tar_at_far_1e-{power}": points.tar_nearest(power) for power in resolved(same, 6)}
    others = np.flatnonzero(~same)
    if len(others) > IMPOSTORS_KEPT:
        others = others[np.argpartition(impostor, -IMPOSTORS_KEPT)[-IMPOSTORS_KEPT:]]
    kept = np.sort(np.concatenate([np.flatnonzero(same), others]))
    first, second = np.asarray(protocol.first), np.asarray(protocol.second)
    table = {"pair": kept, "first": first[kept], "second": second[kept], "same": same[kept], "score": score[kept]}
    return Scores(metrics, table, {"roc": points.curve()}, auc_chance_level(first, second, same))


def names(protocol: Templates, where: str) -> tuple[str, ...]:
    """Check the pairs, and return the metrics that they will have, except xnorm."""
    check_kinds(protocol.same, where)
    return ("auc", "eer", *(f"tar_at_far_1e-{power}" for power in resolved(protocol.same, 6)))


def pool(
    embedding: np.ndarray | Tensor, protocol: Templates, where: str = "template set"
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the templates, ascending, and their features of length 1, float32 (templates, D)."""
    embedding = as_array(embedding)
    if len(embedding) != len(protocol.template):
        raise ValueError(f"{len(embedding)} embeddings for {len(protocol.template)} images")
    ids, position = np.unique(protocol.template, return_inverse=True)
    media = np.unique(protocol.media, return_inverse=True)[1]
    # Averaging within media and summing over them is one weighted sum, which needs no array of media features.
    _, medium, size = np.unique(position * (media.max() + 1) + media, return_inverse=True, return_counts=True)
    weight = 1.0 / size[medium] * np.asarray(protocol.faceness, dtype=np.float64)
    feature = torch.zeros(len(ids), embedding.shape[1], dtype=torch.float64)
    length = np.empty(len(embedding))
    for at in range(0, len(embedding), IMAGES_AT_ONCE):
        part = slice(at, at + IMAGES_AT_ONCE)
        rows = torch.from_numpy(embedding[part].astype(np.float64))
        length[part] = rows.norm(dim=1).numpy()
        rows *= torch.from_numpy(weight[part])[:, None]
        feature.index_add_(0, torch.from_numpy(position[part]), rows)
    refuse_nonfinite(length, where)
    norm = feature.norm(dim=1, keepdim=True)
    feature /= torch.where(norm > 0, norm, 1)
    return ids, feature.float().numpy()


def cosine(ids: np.ndarray, unit: np.ndarray, first: np.ndarray, second: np.ndarray, where: str) -> np.ndarray:
    """Cosine of each pair of template ids, float32 (pairs,); `unit` (templates, D) holds features of length 1."""
    out = np.empty(len(first), dtype=np.float32)
    for at in range(0, len(first), PAIRS_AT_ONCE):
        part = slice(at, at + PAIRS_AT_ONCE)
        sides = []
        for name, column in (("first", first), ("second", second)):
            wanted = np.asarray(column[part])
            found = np.searchsorted(ids, wanted).clip(max=len(ids) - 1)
            if (ids[found] != wanted).any():
                bad = int(np.flatnonzero(ids[found] != wanted)[0])
                raise UserError(
                    where,
                    f"pair {at + bad} names template {wanted[bad]} as {name}, which has no images",
                    remedy="add its images, or remove the pair",
                )
            sides.append(unit[found])
        out[part] = np.einsum("ij,ij->i", *sides)
    return out

"""Metrics of closed-set 1:N identification: TinyFace (Cheng et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification
from trainkit.interfaces import Scores
from trainkit.metrics import significance
from trainkit.metrics.classification import chance_level
from trainkit.metrics.significance import Units
from trainkit.metrics.verification import as_array, refuse_nonfinite
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

RANKS = (1, 5, 20)
SCORES_AT_ONCE = 16_000_000


def score_identification(
    embedding: np.ndarray | Tensor, protocol: Identification, where: str = "identification set"
) -> Scores:
    """Share of probes whose identity is among the k gallery images with the highest cosine, for k of 1, 5 and 20.

    `embedding` is (N, D), image and mirrored image summed, not normalised. The gallery holds matches and
    distractors; a negative label marks a distractor, which matches no probe. A gallery image of another identity that
    scores as high as the best match is ranked before it, so a constant network scores 0. A k that reaches the size of
    the gallery is left out. Raises UserError if a probe has no match or is itself in the gallery.
    """
    probe, gallery, label = (np.asarray(x) for x in (protocol.probe, protocol.gallery, protocol.label))
    embedding = as_array(embedding)
    if len(embedding) != len(label):
        raise ValueError(f"{len(embedding)} embeddings for {len(label)} images")
    check_identification(protocol, where)
    rank, best, rival = ranks(embedding, probe, gallery, label, where)
    metrics = {name: float((rank <= k).mean()) for name, k in _reached(protocol).items()}
    table = {"probe": probe, "label": label[probe], "rank": rank, "match_score": best, "other_score": rival}
    # Chance: the share of the gallery that shows a probe's identity. A binomial with its mean over the probes varies no
    # less than their own.
    known, count = np.unique(label[gallery], return_counts=True)
    share = float(count[np.searchsorted(known, label[probe])].mean() / len(gallery))
    return Scores(metrics, table, chance=chance_level("rank_1", len(probe), share))


def names(protocol: Identification, where: str) -> tuple[str, ...]:
    """Check the protocol, and return the metrics that it will have, except xnorm."""
    check_identification(protocol, where)
    return tuple(_reached(protocol))


def _reached(protocol: Identification) -> dict[str, int]:
    return {f"rank_{k}": k for k in RANKS if k < len(protocol.gallery)}


def check_identification(protocol: Identification, where: str) -> None:
    """Raise UserError for no probes or gallery, and if a probe has no match or is itself in the gallery."""
    probe, gallery, label = (np.asarray(x) for x in (protocol.probe, protocol.gallery, protocol.label))
    if not len(probe) or not len(gallery):
        raise UserError(
            where, f"{len(probe)} probes and {len(gallery)} gallery images", "at least one of each", "add them"
        )
    unmatched = np.flatnonzero((label[probe] < 0) | ~np.isin(label[probe], label[gallery]))
    if len(unmatched):
        raise UserError(
            where,
            f"{len(unmatched)} of {len(probe)} probes have no match in the gallery, the first is row "
            f"{probe[unmatched[0]]}",
            "a gallery image of each probe's identity",
            "add the missing gallery images, or remove these probes",
        )
    twice = np.intersect1d(probe, gallery)
    if len(twice):
        found = f"{len(twice)} images are both probe and gallery, the first is row {twice[0]}"
        raise UserError(where, found, "disjoint sets", "remove them from one of the two")


def ranks(
    embedding: np.ndarray, probe: np.ndarray, gallery: np.ndarray, label: np.ndarray, where: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank of each probe's best match, from 1; its cosine; and the highest cosine of anyone else (-inf without one).

    Rows of length N in `embedding` and `label`; results are int64, float32 and float32 of (probes,).
    """
    length = np.sqrt(np.einsum("ij,ij->i", embedding, embedding, dtype=np.float64))
    refuse_nonfinite(length[np.concatenate([probe, gallery])], where)
    unit = embedding / np.where(length > 0, length, 1)[:, None].astype(np.float32)
    unit = torch.from_numpy(unit.astype(np.float32, copy=False))
    targets = unit[torch.from_numpy(gallery)]
    target_label = torch.from_numpy(label[gallery])
    rank = np.empty(len(probe), dtype=np.int64)
    best, rival = np.empty(len(probe), dtype=np.float32), np.empty(len(probe), dtype=np.float32)
    step = max(1, SCORES_AT_ONCE // len(gallery))
    for at in range(0, len(probe), step):
        part = slice(at, at + step)
        rows = torch.from_numpy(probe[part])
        score = unit[rows] @ targets.T
        match = torch.from_numpy(label[probe[part]])[:, None] == target_label[None, :]
        top = score.masked_fill(~match, -torch.inf).amax(dim=1, keepdim=True)
        score.masked_fill_(match, -torch.inf)
        rank[part] = ((score >= top).sum(dim=1) + 1).numpy()
        best[part] = top[:, 0].numpy()
        rival[part] = score.amax(dim=1).numpy()
    return rank, best, rival


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample identities with all their probes."""
    return Units.by(rows["label"], "people")


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """The rates of `score_identification`, (draws,) each, with probe i counted `times[:, i]` times."""
    return {f"rank_{k}": significance.mean(rows["rank"] <= k, times) for k in RANKS}

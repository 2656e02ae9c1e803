"""Metrics of retrieval: nearest images of the same class. The classes may differ from those of the training.

R-precision and MAP@R as in Musgrave et al., "A Metric Learning Reality Check" (ECCV 2020), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Retrieval
from trainkit.interfaces import Scores
from trainkit.metrics import significance
from trainkit.metrics.classification import chance_level
from trainkit.metrics.significance import Units
from trainkit.metrics.verification import normalised

if TYPE_CHECKING:
    from torch import Tensor

RANKS = (1, 5)
MANY = 20
"""Number of classes from which the bootstrap resamples classes instead of images."""
SCORES_AT_ONCE = 8_000_000
STEPS = 2.0**40
"""Cosines are rounded to multiples of 1 / STEPS, about 1e-12: equal cosines differ by up to 1e-15 in float64, and
rounding errors would decide their order."""


def score_retrieval(embedding: np.ndarray | Tensor, protocol: Retrieval, where: str = "retrieval set") -> Scores:
    """Look each image up among all others, by the cosine of their embeddings (N, D).

    With R the number of others of a query's class: recall_at_k, share of queries with one of them among the k nearest
    (k of 1 and 5; one that reaches the number of others is left out); r_precision, share of them among the R nearest;
    map_at_r, 1/R times the sum over places 1 to R of the precision down to a place, where its image is of the class,
    and 0 where it is not. Each is the mean over queries.

    An image of another class that is as near as one of the same is ranked before it, so a constant network scores 0. An
    image that is the only one of its class, or has label -1, is not a query, but the others are compared with it; in
    the table its `relevant` is 0. Raises UserError if no image has another one of its class, or an embedding is not
    finite.
    """
    label = np.asarray(protocol.label, dtype=np.int64)
    unit = normalised(embedding, where)
    if len(unit) != len(label):
        raise ValueError(f"{len(unit)} embeddings for {len(label)} images")
    check_retrieval(protocol, where)
    relevant, places = rank_others(unit, label)
    asked = relevant > 0
    rank, r_precision, map_at_r = np.zeros(len(label), np.int64), np.zeros(len(label)), np.zeros(len(label))
    for row in np.flatnonzero(asked):
        place, few = places[row], relevant[row]
        inside = place <= few
        rank[row] = place[0]
        r_precision[row] = inside.mean()
        map_at_r[row] = (np.arange(1, few + 1) / place)[inside].sum() / few
    table = {"label": label, "relevant": relevant, "rank": rank, "r_precision": r_precision, "map_at_r": map_at_r}
    metrics = {f"recall_at_{k}": float((rank[asked] <= k).mean()) for k in RANKS if k < len(label) - 1}
    metrics |= {name: float(table[name][asked].mean()) for name in ("r_precision", "map_at_r")}
    # Two images are often nearest to each other, and right or wrong together: count half as many queries.
    share = float(relevant[asked].mean() / (len(label) - 1))
    guessed = chance_level("recall_at_1", int(asked.sum()) // 2, share) if "recall_at_1" in metrics else {}
    return Scores(metrics, table, chance=guessed)


def names(protocol: Retrieval, where: str) -> tuple[str, ...]:
    """Check the protocol, and return the metrics that it will have."""
    check_retrieval(protocol, where)
    return (*(f"recall_at_{k}" for k in RANKS if k < len(protocol) - 1), "r_precision", "map_at_r")


def check_retrieval(protocol: Retrieval, where: str) -> None:
    """Raise UserError if all images are of one class, or none has another one of its class."""
    label = np.asarray(protocol.label, dtype=np.int64)
    if len(label) and (label == label[0]).all() and label[0] >= 0:
        raise UserError(where, f"all {len(label)} images are of one class", "two classes or more", "add another class")
    if not (np.unique(label[label >= 0], return_counts=True)[1] > 1).any():
        raise UserError(
            where,
            f"none of {len(label)} images has another image of its class",
            "two images or more per class",
            "add images, or remove this evaluation",
        )


def rank_others(unit: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rank the other images of its class for each of `unit` (N, D), rows of length 1, among all others.

    Returns R, their number, (N,), 0 without a label; and their places, from 1, ascending, exact up to R and up to 5.
    Places follow by counting, without sorting all images: the i-th best image of the class comes after the i - 1
    before it and all images of other classes that are at least as near.
    """
    total = len(unit)
    order = np.argsort(label, kind="stable")
    unit, label = unit[order] * STEPS**0.5, label[order]
    low, high = np.searchsorted(label, label, side="left"), np.searchsorted(label, label, side="right")
    relevant = np.where(label < 0, 0, high - low - 1)
    places = [np.zeros(0, np.int64)] * total
    step = max(1, SCORES_AT_ONCE // total)
    for at in range(0, total, step):
        score = np.rint(unit[at : at + step] @ unit.T)
        for row, line in enumerate(score, start=at):
            if few := relevant[row]:
                same = np.sort(np.delete(line[low[row] : high[row]], row - low[row]))[::-1]
                line[low[row] : high[row]] = -np.inf
                most = min(max(few, *RANKS), total)
                rivals = np.sort(np.partition(line, total - most)[total - most :])
                places[order[row]] = np.arange(1, few + 1) + most - np.searchsorted(rivals, same, side="left")
    back = np.empty(total, dtype=np.int64)
    back[order] = np.arange(total)
    return relevant[back], places


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample classes with all their images; with few classes, images."""
    asked = rows["relevant"] > 0
    if len(np.unique(rows["label"][asked])) >= MANY:
        return Units.by(rows["label"], "classes")
    return Units("images", np.arange(len(asked)))


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of `score_retrieval`, (draws,) each, with query i counted `times[:, i]` times.

    The gallery is not resampled.
    """
    asked = rows["relevant"] > 0
    times = times[:, asked]
    found = {f"recall_at_{k}": rows["rank"][asked] <= k for k in RANKS}
    found |= {name: rows[name][asked] for name in ("r_precision", "map_at_r")}
    return {name: significance.mean(values, times) for name, values in found.items()}

"""Retrieval: is the nearest other image of the same class? The classes need not be those that were trained on.

R-precision and MAP@R as in Musgrave et al., "A Metric Learning Reality Check" (ECCV 2020), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Retrieval
from trainkit.interfaces import Scores
from trainkit.metrics import significance
from trainkit.metrics.classification import chance_level
from trainkit.metrics.significance import Units
from trainkit.metrics.verification import normalised

RANKS = (1, 5)
MANY = 20
"""Classes from which the bootstrap draws classes and not images."""
SCORES_AT_ONCE = 8_000_000
STEPS = 2.0**40
"""Cosines are told apart in this many steps, about 1e-12: in exact numbers equal ones differ by up to 1e-15 in float64,
and their order would be one of rounding."""


def score_retrieval(embedding: np.ndarray | Tensor, protocol: Retrieval, where: str = "retrieval set") -> Scores:
    """Look every image up among all others, by the cosine of their embeddings (N, D).

    With R the number of others of a query's class: recall_at_k, share of queries with one of them among the k nearest
    (k of 1 and 5; one that reaches the number of others is left out); r_precision, share of them among the R nearest;
    map_at_r, 1/R times the sum over places 1 to R of the precision down to a place, where its image is of the class,
    and 0 where it is not. Each is the mean over queries.

    An image of another class that is as near as one of the same is placed before it, so a network that answers the
    same to all scores 0. An image that is the only one of its class is found by nobody and is no query, nor is one
    labelled -1; the others meet them all the same, and in the table their `relevant` is 0. Raises UserError when no
    image has another one of its class, or an embedding is not finite.
    """
    label = np.asarray(protocol.label, dtype=np.int64)
    unit = normalised(embedding, where)
    if len(unit) != len(label):
        raise ValueError(f"{len(unit)} embeddings for {len(label)} images")
    if len(label) and (label == label[0]).all() and label[0] >= 0:
        raise UserError(where, f"its {len(label)} images are all of one class", "two classes or more")
    if not (np.unique(label[label >= 0], return_counts=True)[1] > 1).any():
        raise UserError(
            where, f"none of its {len(label)} images has another one of its class", "two images or more of a class"
        )
    found = rank_others(unit, label)
    asked = found.relevant > 0
    metrics = {f"recall_at_{k}": float((found.rank[asked] <= k).mean()) for k in RANKS if k < len(label) - 1}
    metrics["r_precision"] = float(found.r_precision[asked].mean())
    metrics["map_at_r"] = float(found.map_at_r[asked].mean())
    table = {
        "label": label,
        "relevant": found.relevant,
        "nearest": found.nearest,
        "nearest_label": label[found.nearest],
        "similarity": found.similarity,
        "rank": found.rank,
        "r_precision": found.r_precision,
        "map_at_r": found.map_at_r,
    }
    # Two images are often nearest to each other and right or wrong together: as good as half as many queries.
    bound = chance_level(int(asked.sum()) // 2, float(found.relevant[asked].mean() / (len(label) - 1)))
    guessed = {"recall_at_1": bound} if bound is not None and "recall_at_1" in metrics else {}
    return Scores(metrics, table, chance=guessed)


@dataclass(frozen=True)
class Ranks:
    """Ranking of all others by each image, in numbers."""

    relevant: np.ndarray
    """int64 (N,), R: how many others are of its class; 0 where it has none or no label."""
    nearest: np.ndarray
    """int64 (N,), row of the nearest other image; of equally near ones one of another class, the lowest label."""
    similarity: np.ndarray
    """float64 (N,), the cosine to it."""
    rank: np.ndarray
    """int64 (N,), place of the first image of its class, from 1; told apart up to 5 and up to R, and 0 with R."""
    r_precision: np.ndarray
    """float64 (N,), share of its class among the R nearest; 0 with R."""
    map_at_r: np.ndarray
    """float64 (N,); 0 with R."""


def rank_others(unit: np.ndarray, label: np.ndarray) -> Ranks:
    """Place the images of its class for each of `unit` (N, D), rows of length 1; two at least.

    One place in the ranking of a query needs no ranking: the i-th best of its class comes after the i - 1 before it and
    all of other classes that are as near.
    """
    total = len(unit)
    if total < 2:
        raise ValueError(f"{total} images, two at least expected")
    order = np.argsort(label, kind="stable")
    unit, label = unit[order] * STEPS**0.5, label[order]
    low, high = np.searchsorted(label, label, side="left"), np.searchsorted(label, label, side="right")
    nobody = label < 0  # of no class: others to everyone, themselves included
    low[nobody], high[nobody] = np.flatnonzero(nobody), np.flatnonzero(nobody) + 1
    relevant = high - low - 1
    nearest, rank = np.empty(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    similarity = np.empty(total)
    precise, mean_precise = np.zeros(total), np.zeros(total)
    count_up, step = np.arange(1, total), max(1, SCORES_AT_ONCE // total)
    for at in range(0, total, step):
        score = unit[at : at + step] @ unit.T
        np.rint(score, out=score)
        for row, line in enumerate(score, start=at):
            few, own = relevant[row], slice(low[row], high[row])
            same = line[own].copy()
            same[row - low[row]] = line[own] = -np.inf  # the query itself; its class, to leave the rivals
            closest, rival = int(same.argmax()), int(line.argmax())
            if same[closest] > line[rival]:
                nearest[row], similarity[row] = low[row] + closest, same[closest]
            else:
                nearest[row], similarity[row] = rival, line[rival]
            if not few:
                continue
            upto = min(max(few, *RANKS), total)
            rivals = np.sort(np.partition(line, total - upto)[total - upto :])
            place = count_up[:few] + upto - np.searchsorted(rivals, np.sort(same)[:0:-1], side="left")
            inside = place <= few
            rank[row] = place[0]
            precise[row] = inside.mean()
            mean_precise[row] = (count_up[:few] / place)[inside].sum() / few
    back = np.empty(total, dtype=np.int64)
    back[order] = np.arange(total)
    return Ranks(
        relevant[back], order[nearest][back], similarity[back] / STEPS, rank[back], precise[back], mean_precise[back]
    )


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """A class is drawn with all its images, which look for each other; where there are few classes, an image."""
    asked = rows["relevant"] > 0
    if len(np.unique(rows["label"][asked])) >= MANY:
        return Units.by(rows["label"], "classes")
    return Units("images", np.arange(len(asked)))


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of `score_retrieval`, (draws,) each, where query i is there `times[:, i]` times.

    What was found is left as it was: among whom a query looks is not drawn.
    """
    asked = rows["relevant"] > 0
    times = times[:, asked]
    found = {f"recall_at_{k}": rows["rank"][asked] <= k for k in RANKS}
    found |= {name: rows[name][asked] for name in ("r_precision", "map_at_r")}
    return {name: significance.mean(values, times) for name, values in found.items()}

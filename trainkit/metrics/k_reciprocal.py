"""k-reciprocal re-ranking: near records should share their neighbourhoods.

Zhong et al., "Re-ranking Person Re-identification with k-reciprocal Encoding" (CVPR 2017), with the settings of its
section 4.1. A neighbourhood is joined to another that holds two thirds of it or more, as the paper writes; the authors'
code asks for more than two thirds (`strict`). Neighbour sets are kept as sparse matrices and distances computed where
they are asked for, so memory grows with the records and not with their pairs; time does with the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

NEAREST = 20
"""k1: number of nearest neighbours, in both directions."""
AVERAGED = 6
"""k2: a record's neighbourhood is the mean over this many nearest ones, including itself."""
SHARE = 0.3
"""Lambda: weight of the original distance."""
SCORES_AT_ONCE = 4_000_000
VALUES_AT_ONCE = 8_000_000


@dataclass(frozen=True)
class Reranked:
    """Queries and gallery after re-ranking, a `ranking.Similarity`; `make` it."""

    vectors: np.ndarray
    """int32 (Q + G, D), equally long: the queries, then the gallery."""
    queries: int
    """Q."""
    farthest: np.ndarray
    """float64 (Q + G,), the largest squared distance of each to any, by which its distances are divided."""
    near: sparse.csr_array
    """float64 (Q + G, Q + G), the neighbourhood of each: weights whose sum is 1."""
    length: float
    """Of the vectors."""
    share: float
    """Of the distance as it was."""

    @classmethod
    def make(
        cls,
        queries: np.ndarray,
        gallery: np.ndarray,
        length: float,
        nearest: int = NEAREST,
        averaged: int = AVERAGED,
        share: float = SHARE,
        strict: bool = False,
    ) -> Reranked:
        """Find the neighbourhoods of `queries` (Q, D) and `gallery` (G, D), whole numbers, rows as long as `length`."""
        if nearest < 1 or averaged < 1 or not 0 <= share <= 1:
            raise ValueError(f"nearest {nearest} and averaged {averaged} must be 1 or more, share {share} from 0 to 1")
        vectors = np.concatenate([queries, gallery])
        first, farthest = _neighbours(vectors, min(max(nearest + 1, averaged), len(vectors)), length)
        full, half = (_mutual(first[:, : k + 1]) for k in (nearest, round(nearest / 2)))
        sets = _expanded(full, half, strict)
        near = _weighted(sets, vectors, farthest, length)
        mean = _indicator(first[:, :averaged]) / min(averaged, first.shape[1])
        return cls(vectors, len(queries), farthest, sparse.csr_array(mean @ near), length, share)

    def scores(self, queries: np.ndarray | slice, gallery: slice) -> np.ndarray:
        """Minus the final distance, float64 (queries, gallery): from -1, for a neighbourhood of others, to 0."""
        who = np.arange(self.queries)[queries]
        rows = slice(self.queries + gallery.start, self.queries + gallery.stop)
        asked, theirs = self.vectors[who].astype(np.float64), self.vectors[rows].astype(np.float64)
        scores = asked @ theirs.T
        plain = _distance(scores, self.length) / self.farthest[who, None]
        near = self.near[rows]
        starts, weights = near.indptr[:-1], np.zeros(len(self.vectors))
        for line, record in enumerate(who):
            own = slice(self.near.indptr[record], self.near.indptr[record + 1])
            weights[self.near.indices[own]] = self.near.data[own]
            shared = np.add.reduceat(np.minimum(near.data, weights[near.indices]), starts)
            weights[self.near.indices[own]] = 0
            apart = 1 - shared / (2 - shared)
            scores[line] = -((1 - self.share) * apart + self.share * plain[line])
        return scores


def _distance(products: np.ndarray, length: float) -> np.ndarray:
    return 2 - 2 * products / length**2


def _neighbours(vectors: np.ndarray, count: int, length: float) -> tuple[np.ndarray, np.ndarray]:
    """The `count` nearest of each row, itself first, of equally near ones the lower; and how far the farthest is."""
    size = len(vectors)
    first, farthest = np.empty((size, count), dtype=np.int64), np.empty(size)
    every = vectors.astype(np.float64)
    step = max(1, SCORES_AT_ONCE // size)
    for at in range(0, size, step):
        scores = every[at : at + step] @ every.T
        farthest[at : at + step] = _distance(scores.min(axis=1), length)
        for row, line in enumerate(scores, start=at):
            line[row] = np.inf
            enough = np.partition(line, size - count)[size - count]
            few = np.flatnonzero(line >= enough)
            first[row] = few[np.argsort(-line[few], kind="stable")[:count]]
    return first, np.where(farthest > 0, farthest, 1)


def _indicator(columns: np.ndarray) -> sparse.csr_array:
    """1 at (i, columns[i, k]) for all k; the columns of a row differ."""
    size, count = columns.shape
    ones = np.ones(columns.size)
    return sparse.csr_array((ones, columns.ravel(), np.arange(0, columns.size + 1, count)), shape=(size, size))


def _mutual(first: np.ndarray) -> sparse.csr_array:
    """R(i, k): those among the k nearest of i that have i among theirs; i itself too."""
    near = _indicator(first)
    return sparse.csr_array(near.multiply(near.T))


def _expanded(full: sparse.csr_array, half: sparse.csr_array, strict: bool) -> sparse.csr_array:
    """R*(i, k): with the smaller set R(j, k/2) of each j in R(i, k), where 2/3 of it are in R(i, k).

    `strict`: where more than 2/3 are.
    """
    size = half.sum(axis=1)
    # The overlap of R(i, k) and R(j, k/2), kept where j is in R(i, k).
    overlap = (full @ half.T).multiply(full).tocoo()
    enough = (np.greater if strict else np.greater_equal)(3 * overlap.data, 2 * size[overlap.col])
    joined = sparse.csr_array((overlap.data[enough], (overlap.row[enough], overlap.col[enough])), shape=full.shape)
    return sparse.csr_array(full + joined @ half)


def _weighted(sets: sparse.csr_array, vectors: np.ndarray, farthest: np.ndarray, length: float) -> sparse.csr_array:
    """Weights exp(-d / farthest) of the members of each row's set, divided by their sum."""
    sets.sort_indices()
    row = np.repeat(np.arange(len(vectors)), np.diff(sets.indptr))
    weight = np.empty(len(row))
    step = max(1, VALUES_AT_ONCE // vectors.shape[1])
    for at in range(0, len(row), step):
        one, other = (vectors[x[at : at + step]].astype(np.float64) for x in (row, sets.indices))
        weight[at : at + step] = _distance(np.einsum("ij,ij->i", one, other), length)
    weight = np.exp(-weight / farthest[row])
    weight /= np.add.reduceat(weight, sets.indptr[:-1])[row]
    return sparse.csr_array((weight, sets.indices, sets.indptr), shape=sets.shape)

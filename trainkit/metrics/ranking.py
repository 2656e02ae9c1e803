"""Exact ranks of right records in a gallery in bounded memory: by counting, in parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from trainkit.evaluation_protocols import Search
from trainkit.tensors import torch

LENGTH = 2.0**26
"""Vectors are scaled to this length and rounded to whole numbers. No sum of products can then pass 2**53, so float64
holds each exactly, whatever order they are added in: a score depends on no block, library, thread or device. The
cosine is off by some 1e-8, a sixth of the last digit of float32."""
QUERIES_AT_ONCE = 512
GALLERY_AT_ONCE = 8192


def to_integers(rows: np.ndarray) -> np.ndarray:
    """Vectors (n, D) scaled to `LENGTH` and rounded, int32; a row of zeros stays zero."""
    out = np.empty(rows.shape, dtype=np.int32)
    for at in range(0, len(rows), GALLERY_AT_ONCE):
        part = rows[at : at + GALLERY_AT_ONCE].astype(np.float64)
        length = np.sqrt(np.einsum("ij,ij->i", part, part))
        part *= (LENGTH / np.where(length > 0, length, 1))[:, None]
        out[at : at + GALLERY_AT_ONCE] = np.rint(part)
    return out


class Similarity(Protocol):
    """How near each query is to each gallery record."""

    def scores(self, queries: np.ndarray | slice, gallery: slice) -> np.ndarray:
        """float64 (queries, gallery), higher is nearer; equal for a pair whatever else is asked with it."""
        ...


@dataclass(frozen=True)
class Cosines:
    """Vectors from `to_integers`: int32 (Q, D) and (G, D)."""

    queries: np.ndarray
    gallery: np.ndarray

    def scores(self, queries: np.ndarray | slice, gallery: slice) -> np.ndarray:
        """Exact inner products, `LENGTH` squared times the cosines."""
        first, second = (torch.from_numpy(x).double() for x in (self.queries[queries], self.gallery[gallery]))
        return (first @ second.T).numpy()


@dataclass(frozen=True)
class Gallery:
    """Gallery records in the order of their persons, distractors first."""

    rows: np.ndarray
    """int64 (G,), row of each in the split."""
    person: np.ndarray
    """int64 (G,), ascending."""
    place: np.ndarray
    """int64 (G,)."""
    vectors: np.ndarray
    """(G, D)."""

    @classmethod
    def make(cls, rows: np.ndarray, vectors: np.ndarray, protocol: Search) -> Gallery:
        """Put `rows` (G,) of a split and their vectors (G, D) in order."""
        order = np.lexsort((rows, protocol.person[rows]))
        rows = rows[order]
        return cls(rows, protocol.person[rows], protocol.place[rows], vectors[order])


@dataclass(frozen=True)
class QueryRanks:
    """Ranking of the gallery for each query of a list."""

    candidates: np.ndarray
    """int64 (Q,), number of records that are right or wrong."""
    places: list[np.ndarray]
    """Places of the right records of each query, from 1, the farthest first; empty for a query without a match."""

    @cached_property
    def relevant(self) -> np.ndarray:
        """int64 (Q,), R: number of right records."""
        return np.array([len(place) for place in self.places], np.int64)

    @cached_property
    def rank(self) -> np.ndarray:
        """int64 (Q,), place of the first right record; 0 without one."""
        return np.array([place[-1] if len(place) else 0 for place in self.places], np.int64)

    @cached_property
    def ap(self) -> np.ndarray:
        """float64 (Q,), average precision; 0 without a right record."""
        means = [(np.arange(len(p), 0, -1) / p).mean() if len(p) else 0.0 for p in self.places]
        return np.array(means, np.float64)

    @cached_property
    def inp(self) -> np.ndarray:
        """float64 (Q,), R / place of the last right record; 0 without one."""
        return np.array([len(p) / p[0] if len(p) else 0.0 for p in self.places], np.float64)


def rank_gallery(scored: Similarity, queries: np.ndarray, gallery: Gallery, protocol: Search) -> QueryRanks:
    """Rank the right records of each of `queries` (Q, 5), rows of the split, -1 for none.

    The i-th nearest right one comes after the i - 1 before it and all wrong ones at least as near. Their number is that
    of all compared records that are at least as near, minus those of the person: nothing is sorted, and at most
    `QUERIES_AT_ONCE` x `GALLERY_AT_ONCE` scores are in memory.
    """
    size = len(queries)
    person = person_of_query(queries, protocol)
    low, high = (np.searchsorted(gallery.person, person, side) for side in ("left", "right"))
    high = np.where(person < 0, low, high)
    found = QueryRanks(np.zeros(size, np.int64), [np.zeros(0, np.int64)] * size)
    order = np.argsort(person, kind="stable")
    for at in range(0, size, QUERIES_AT_ONCE):
        block = order[at : at + QUERIES_AT_ONCE]
        sought: list[np.ndarray] = []
        """Scores of the right ones of each query, ascending."""
        own: list[np.ndarray] = []
        """Of all records of its person, how many are as near as each of these."""
        for run in np.split(block, np.flatnonzero(np.diff(person[block])) + 1):
            theirs = slice(low[run[0]], high[run[0]])
            scores = scored.scores(run, theirs)
            right = ~excluded(queries[run], gallery, theirs, protocol)
            found.candidates[run] = len(gallery.rows) - (~right).sum(axis=1)
            for line, which in zip(scores, right, strict=True):
                sought.append(np.sort(line[which]))
                own.append(_as_near(line, sought[-1]))
        near = [np.zeros(len(s), np.int64) for s in sought]
        asked = [k for k, s in enumerate(sought) if len(s)]
        if not asked:
            continue
        for start in range(0, len(gallery.rows), GALLERY_AT_ONCE):
            scores = scored.scores(block, slice(start, start + GALLERY_AT_ONCE))
            for k in asked:
                near[k] += _as_near(scores[k], sought[k])
        for k in asked:
            found.places[block[k]] = np.arange(len(sought[k]), 0, -1) + near[k] - own[k]
    return found


def excluded(queries: np.ndarray, gallery: Gallery, part: slice, protocol: Search) -> np.ndarray:
    """Find the gallery records excluded for `queries` (q, 5), bool (q, part): their own and those of their place.

    Records of other persons are compared all the same.
    """
    used = queries >= 0
    place = np.where(used, protocol.place[queries], -1)[:, :, None]
    same = (place >= 0) & (place == gallery.place[part])
    return (same | (np.where(used, queries, -1)[:, :, None] == gallery.rows[part])).any(axis=1)


def _as_near(line: np.ndarray, sought: np.ndarray) -> np.ndarray:
    """Count the values of `line` that are at least each of `sought`, which is ascending."""
    # A score takes 0.75 ns to be compared, 11 ns to be sorted with 8,191 others, and more than that to be picked out
    # where every other one is.
    if len(sought) <= 8:
        return np.array([np.count_nonzero(line >= score) for score in sought], dtype=np.int64)
    at_least = line >= sought[0]
    if 8 * np.count_nonzero(at_least) < len(line):
        line = line[at_least]
    line = np.sort(line)
    return len(line) - np.searchsorted(line, sought, side="left")


def top_ranked(
    scored: Similarity, number: int, query: np.ndarray, gallery: Gallery, protocol: Search, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The `count` nearest records of query `number`, with records `query` (5,): rows (k,), and which are right (k,).

    Among ties, wrong records come before right ones, then lower rows before higher ones.
    """
    whole = slice(0, len(gallery.rows))
    scores = scored.scores(np.array([number]), whole)[0]
    of = gallery.person == person_of_query(query[None], protocol)[0]
    unseen = excluded(query[None], gallery, whole, protocol)[0]
    shown = ~(of & unseen)
    scores, right, rows = scores[shown], of[shown], gallery.rows[shown]
    first = np.lexsort((rows, right, -scores))[:count]
    return rows[first], right[first]


def person_of_query(queries: np.ndarray, protocol: Search) -> np.ndarray:
    """Return the person of each of `queries` (Q, 5), int64 (Q,)."""
    return protocol.person[queries.max(axis=1)] if len(queries) else np.zeros(0, dtype=np.int64)

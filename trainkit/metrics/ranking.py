"""Exact ranks of right records in a gallery in bounded memory: by counting, in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """int32 (G, D)."""

    @classmethod
    def make(cls, rows: np.ndarray, vectors: np.ndarray, protocol: Search) -> Gallery:
        """Put `rows` (G,) of a split and their vectors (G, D) in order."""
        order = np.lexsort((rows, protocol.person[rows]))
        rows = rows[order]
        return cls(rows, protocol.person[rows], protocol.place[rows], vectors[order])

    @property
    def firsts(self) -> np.ndarray:
        """Where each person begins; every distractor is a person of its own."""
        return np.flatnonzero(np.diff(self.person, prepend=-2).astype(bool) | (self.person < 0))

    def parts(self) -> Iterator[slice]:
        """Slices of some `GALLERY_AT_ONCE` records that part no person."""
        cuts, at = np.append(self.firsts, len(self.rows)), 0
        while at < len(self.rows):
            to = int(cuts[max(np.searchsorted(cuts, at + GALLERY_AT_ONCE, "right") - 1, np.searchsorted(cuts, at) + 1)])
            yield slice(at, to)
            at = to


@dataclass(frozen=True)
class QueryRanks:
    """Ranking of one gallery for each query of a list."""

    relevant: np.ndarray
    """int64 (Q,), R: number of right records; 0 for a query without a match, whose other values are 0."""
    candidates: np.ndarray
    """int64 (Q,), number of records that are right or wrong."""
    ap: np.ndarray
    """float64 (Q,), average precision."""
    inp: np.ndarray
    """float64 (Q,), R / place of the last right one."""
    rank: np.ndarray
    """int64 (Q,), place of the first right record, from 1."""
    person_rank: np.ndarray
    """int64 (Q,), rank of the person among the persons, each by their nearest record."""


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
    found = QueryRanks(*(np.zeros(size, kind) for kind in (np.int64, np.int64, float, float, np.int64, np.int64)))
    order = np.argsort(person, kind="stable")
    # Then records of all other persons are compared, and none has to be subtracted.
    everyone = protocol.hides == "person"
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
            found.relevant[run] = right.sum(axis=1)
            found.candidates[run] = len(gallery.rows) - (~right).sum(axis=1)
            for line, which in zip(scores, right, strict=True):
                sought.append(np.sort(line[which]))
                own.append(_as_near(line if everyone else line[which], sought[-1]))
        near = [np.zeros(len(s), np.int64) for s in sought]
        asked = [k for k, s in enumerate(sought) if len(s)]
        if not asked:
            continue
        persons = np.zeros(len(block), np.int64)
        best = np.array([s[-1] if len(s) else np.inf for s in sought])
        for part in gallery.parts():
            scores = scored.scores(block, part)
            if not everyone:
                unseen = excluded(queries[block], gallery, part, protocol)
                scores[unseen] = -np.inf
                others = gallery.person[part] != person[block][:, None]
                found.candidates[block] -= (unseen & others).sum(axis=1)
            for k in asked:
                near[k] += _as_near(scores[k], sought[k])
            if protocol.by_person:
                starts = gallery.firsts
                starts = starts[(starts >= part.start) & (starts < part.stop)] - part.start
                persons += np.logical_or.reduceat(scores >= best[:, None], starts, axis=1).sum(axis=1)
        for k in asked:
            q, count = block[k], np.arange(len(sought[k]), 0, -1)
            place = count + near[k] - own[k]
            found.ap[q] = (count / place).mean()
            found.inp[q] = count[0] / place[0]
            found.rank[q] = place[-1]
            found.person_rank[q] = persons[k]
    return found


def excluded(queries: np.ndarray, gallery: Gallery, part: slice, protocol: Search) -> np.ndarray:
    """Find the gallery records excluded for `queries` (q, 5), bool (q, part): their own and those of their place.

    With `hides` `person`, this applies only to records of the query's own person.
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


@dataclass(frozen=True)
class RankedQuery:
    """One query and its nearest gallery records."""

    list: str
    query: int
    """Index in its list."""
    rows: np.ndarray
    """int64 (5,), its records, -1 for none."""
    person: int
    relevant: int
    ap: float
    rank: int
    """Place of the first right record, from 1."""
    first: np.ndarray
    """int64 (k,), rows of the nearest gallery records, nearest first."""
    right: np.ndarray
    """bool (k,), which of them show the person."""


def top_ranked(
    scored: Similarity,
    name: str,
    which: np.ndarray,
    queries: np.ndarray,
    found: QueryRanks,
    gallery: Gallery,
    protocol: Search,
    count: int,
) -> list[RankedQuery]:
    """The `count` nearest records for some queries of a list, `which`.

    Among ties, wrong records come before right ones, then lower rows before higher ones.
    """
    if not len(which):
        return []
    person = person_of_query(queries[which], protocol)
    first = [np.zeros((3, 0))] * len(which)  # score, right, row
    for part in gallery.parts():
        scores = scored.scores(which, part)
        of = gallery.person[part] == person[:, None]
        unseen = excluded(queries[which], gallery, part, protocol)
        scores[unseen if protocol.hides == "place" else of & unseen] = -np.inf
        for k, line in enumerate(scores):
            least = np.partition(line, max(0, len(line) - count))[max(0, len(line) - count)]
            near = np.flatnonzero((line >= least) & (line > -np.inf))
            near = np.stack([line[near], of[k, near], gallery.rows[part][near]])
            some = np.concatenate([first[k], near], axis=1)
            first[k] = some[:, np.lexsort((some[2], some[1], -some[0]))[:count]]
    return [
        RankedQuery(
            *(name, int(q), queries[q], int(person[k]), int(found.relevant[q]), float(found.ap[q]), int(found.rank[q])),
            first=first[k][2].astype(np.int64),
            right=first[k][1].astype(bool),
        )
        for k, q in enumerate(which)
    ]


def person_of_query(queries: np.ndarray, protocol: Search) -> np.ndarray:
    """Return the person of each of `queries` (Q, 5), int64 (Q,)."""
    return protocol.person[queries.max(axis=1)] if len(queries) else np.zeros(0, dtype=np.int64)

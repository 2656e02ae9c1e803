"""Search: with one record of a person, or several of different modalities, find that person's others in a gallery.

AP and CMC as in Zheng et al., "Scalable Person Re-identification" (ICCV 2015), section 5.2, with AP the plain mean of
the precisions; mINP as in Ye et al., "Deep Learning for Person Re-identification" (TPAMI 2022), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trainkit.data.modalities import MODALITIES, RGB
from trainkit.data.protocols import Search
from trainkit.errors import UserError
from trainkit.metrics.classification import by_chance
from trainkit.metrics.verification import as_array, refuse_nonfinite
from trainkit.task import Scores, Split

RANKS = (1, 5, 10)
LENGTH = 2.0**26
"""Vectors are scaled to this length and rounded to whole numbers. No sum of products can then pass 2**53, so float64
holds each exactly, whatever order they are added in: a score depends on no block, library, thread or device. The
cosine is off by some 1e-8, a sixth of the last digit of float32."""
FINISHED_AT_ONCE = 2048
QUERIES_AT_ONCE = 512
GALLERY_AT_ONCE = 8192
FAILURES = 60

Finish = Callable[[Tensor, Tensor], Tensor]


def score_search(
    features: np.ndarray | Tensor,
    protocol: Search,
    finish: Finish,
    where: str = "search set",
    split: Split | None = None,
) -> Scores:
    """Look every query up in the gallery, by the cosine of what `finish` makes of its records.

    `features` is (N, D), one row a record. `finish` takes features (n, 5, D), one place a modality, and which are there
    (n, 5), bool, and gives (n, D); gallery records go through it alone. Of a query, gallery records of its own person
    from a place of one of its records are neither right nor wrong, nor are its records themselves.

    With R the number of right records: map, mean over queries of 1/R times the sum of the precisions at the right ones,
    over the whole gallery; rank_k, share of queries with a right one among the k first (of persons, where the protocol
    says so; a k that reaches the gallery is left out); minp, mean of R / place of the last right one. A wrong record
    as near as a right one is placed before it, so a network that answers the same to all finds nothing. Queries that
    have no match are counted (`unmatched`, where there are any) and are in no mean.

    Metrics: LIST.map and so on, means over its queries and over the trials; GROUP.map, means over its lists; and map,
    rank_1, ..., means over the groups, or over the lists where there are none. Raises UserError when no query has a
    match, or an embedding is not finite.
    """
    features = torch.from_numpy(features) if isinstance(features, np.ndarray) else features
    if len(features) != len(protocol):
        raise ValueError(f"{len(features)} features for {len(protocol)} records")
    lists = {name: _checked(name, rows, protocol) for name, rows in protocol.queries.items()}
    everyone = np.unique(np.concatenate(protocol.galleries))
    alone = np.full((len(everyone), len(MODALITIES)), -1)
    alone[:, RGB] = everyone
    known = whole(finished(features, alone, finish, f"{where}, gallery"))
    galleries = [Gallery.make(rows, known[np.searchsorted(everyone, rows)], protocol) for rows in protocol.galleries]
    found: dict[str, list[Found]] = {}
    for name, rows in lists.items():
        vectors = whole(finished(features, rows, finish, f"{where}, {name}"))
        found[name] = [look_up(Cosines(vectors, g.vectors), rows, g, protocol) for g in galleries]
    return _summed(found, lists, galleries, protocol, where)


def _checked(name: str, rows: np.ndarray, protocol: Search) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.int64).reshape(-1, len(MODALITIES))
    if len(rows) and (rows.max() >= len(protocol) or (rows < 0).all(axis=1).any()):
        raise ValueError(f"queries of {name}: rows beyond {len(protocol)} records, or a query without a record")
    strangers = (rows >= 0) & (protocol.person[rows] != _whom(rows, protocol)[:, None])
    if strangers.any():
        raise ValueError(f"queries of {name}: the records of query {strangers.any(axis=1).argmax()} show two persons")
    return rows


def _whom(queries: np.ndarray, protocol: Search) -> np.ndarray:
    return protocol.person[queries.max(axis=1)] if len(queries) else np.zeros(0, dtype=np.int64)


def finished(features: Tensor, rows: np.ndarray, finish: Finish, where: str) -> np.ndarray:
    """What `finish` makes of records `rows` (n, 5), -1 for none: (n, D), a part at a time.

    Raises UserError for what is not finite.
    """
    parts = []
    for at in range(0, len(rows), FINISHED_AT_ONCE):
        part = torch.from_numpy(rows[at : at + FINISHED_AT_ONCE]).to(features.device)
        present = part >= 0
        taken = features[part.clamp(min=0)] * present[..., None]
        with torch.no_grad():
            parts.append(as_array(finish(taken, present)))
    if not parts:
        return np.zeros((0, features.shape[1]), dtype=np.float32)
    out = np.concatenate(parts)
    refuse_nonfinite(np.sqrt(np.einsum("ij,ij->i", out, out, dtype=np.float64)), where)
    return out


def whole(rows: np.ndarray) -> np.ndarray:
    """Vectors (n, D) scaled to `LENGTH` and rounded, int32; a row of zeros stays zero."""
    out = np.empty(rows.shape, dtype=np.int32)
    for at in range(0, len(rows), GALLERY_AT_ONCE):
        part = rows[at : at + GALLERY_AT_ONCE].astype(np.float64)
        length = np.sqrt(np.einsum("ij,ij->i", part, part))
        part *= (LENGTH / np.where(length > 0, length, 1))[:, None]
        out[at : at + GALLERY_AT_ONCE] = np.rint(part)
    return out


class Scored(Protocol):
    """How near each query is to each gallery record."""

    def scores(self, queries: np.ndarray | slice, gallery: slice) -> np.ndarray:
        """float64 (queries, gallery), higher is nearer; equal for a pair whatever else is asked with it."""


@dataclass(frozen=True)
class Cosines:
    """Vectors from `whole`: int32 (Q, D) and (G, D)."""

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
class Found:
    """What each query of a list found in one gallery."""

    relevant: np.ndarray
    """int64 (Q,), R: how many records are right; 0 for a query without a match, whose other values are 0."""
    candidates: np.ndarray
    """int64 (Q,), how many are right or wrong."""
    ap: np.ndarray
    """float64 (Q,), average precision."""
    inp: np.ndarray
    """float64 (Q,), R / place of the last right one."""
    rank: np.ndarray
    """int64 (Q,), place of the first right record, from 1."""
    person_rank: np.ndarray
    """int64 (Q,), place of the person among the persons, each at their nearest record."""


def look_up(scored: Scored, queries: np.ndarray, gallery: Gallery, protocol: Search) -> Found:
    """Place the right records of each of `queries` (Q, 5), rows of the split, -1 for none.

    The i-th nearest right one comes after the i - 1 before it and all wrong ones at least as near. These are all
    records at least as near, less those of the person: nothing is sorted but the right ones, and no more than
    `QUERIES_AT_ONCE` x `GALLERY_AT_ONCE` scores are held at once.
    """
    size = len(queries)
    person = _whom(queries, protocol)
    low, high = (np.searchsorted(gallery.person, person, side) for side in ("left", "right"))
    high = np.where(person < 0, low, high)
    found = Found(*(np.zeros(size, kind) for kind in (np.int64, np.int64, float, float, np.int64, np.int64)))
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
            right = ~hidden(queries[run], gallery, theirs, protocol)
            found.relevant[run] = right.sum(axis=1)
            found.candidates[run] = len(gallery.rows) - (~right).sum(axis=1)
            for line, which in zip(scores, right, strict=True):
                sought.append(np.sort(line[which]))
                own.append(_as_near(line, sought[-1]))
        near = [np.zeros(len(s), np.int64) for s in sought]
        asked = [k for k, s in enumerate(sought) if len(s)]
        if not asked:
            continue
        persons = np.zeros(len(block), np.int64)
        best = np.array([s[-1] if len(s) else np.inf for s in sought])
        for part in gallery.parts():
            scores = scored.scores(block, part)
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


def hidden(queries: np.ndarray, gallery: Gallery, part: slice, protocol: Search) -> np.ndarray:
    """Which gallery records of their own person `queries` (q, 5) do not meet, bool (q, part).

    Those from the place of one of the query's records, and these themselves.
    """
    used = queries >= 0
    place = np.where(used, protocol.place[queries], -1)[:, :, None]
    same = (place >= 0) & (place == gallery.place[part])
    return (same | (np.where(used, queries, -1)[:, :, None] == gallery.rows[part])).any(axis=1)


def _as_near(line: np.ndarray, sought: np.ndarray) -> np.ndarray:
    """How many of `line` are at least each of `sought`, which ascends."""
    if len(sought) <= 4:
        return np.array([np.count_nonzero(line >= score) for score in sought], dtype=np.int64)
    few = np.sort(line[line >= sought[0]])
    return len(few) - np.searchsorted(few, sought, side="left")


def _summed(
    found: dict[str, list[Found]],
    lists: dict[str, np.ndarray],
    galleries: Sequence[Gallery],
    protocol: Search,
    where: str,
) -> Scores:
    reach = min(len(g.firsts if protocol.by_person else g.rows) for g in galleries)
    ranks = [k for k in RANKS if k < reach]
    total = sum(len(rows) for rows in lists.values())
    scores: dict[str, dict[str, float]] = {}
    table: dict[str, list] = {}
    for name, trials in found.items():
        unmatched = float(np.mean([(f.relevant == 0).sum() for f in trials]))
        if any(f.relevant.any() for f in trials):
            scores[name] = _means([_of(f, ranks, protocol.by_person) for f in trials if f.relevant.any()])
        row = {"list": name, "queries": len(lists[name]), "unmatched": unmatched}
        for key in ("map", *(f"rank_{k}" for k in ranks), "minp"):
            row[key] = scores.get(name, {}).get(key)
        for key, value in row.items():
            table.setdefault(key, []).append(value)
    if not scores:
        raise UserError(
            where,
            f"none of its {total} queries has a match in the gallery",
            "gallery records of the persons who are looked for, from another place than the query's",
        )
    groups = {
        group: _means([scores[name] for name in names if name in scores])
        for group, names in protocol.groups.items()
        if any(name in scores for name in names)
    }
    metrics = _means(list((groups or scores).values()))
    for title, values in (*groups.items(), *scores.items()):
        metrics |= {f"{title}.{key}": value for key, value in values.items()}
    if any(table["unmatched"]):
        metrics["unmatched"] = float(sum(table["unmatched"]))
    return Scores(
        metrics, _rows(found, lists, protocol), chance=_chance(found, lists, protocol), tables={"queries": table}
    )


def _of(found: Found, ranks: Sequence[int], by_person: bool) -> dict[str, float]:
    asked = found.relevant > 0
    place = (found.person_rank if by_person else found.rank)[asked]
    reached = {f"rank_{k}": float((place <= k).mean()) for k in ranks}
    return {"map": float(found.ap[asked].mean()), **reached, "minp": float(found.inp[asked].mean())}


def _means(scores: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([one[key] for one in scores])) for key in scores[0]}


def _rows(found: dict[str, list[Found]], lists: dict[str, np.ndarray], protocol: Search) -> dict[str, Any]:
    """A row for each query of each list, and of each trial where there are several."""
    trials = len(protocol.galleries)
    flat = [(name, t, f) for name, all_of in found.items() for t, f in enumerate(all_of)]
    columns: dict[str, Any] = {"list": [name for name, _, f in flat for _ in f.ap]}
    if trials > 1:
        columns["trial"] = np.concatenate([np.full(len(f.ap), t) for _, t, f in flat])
    columns["query"] = np.concatenate([np.arange(len(f.ap)) for _, _, f in flat])
    columns["person"] = np.concatenate([_whom(lists[name], protocol) for name, _, _ in flat])
    for title, key in (("relevant", "relevant"), ("rank", "rank"), ("ap", "ap"), ("inp", "inp")):
        columns[title] = np.concatenate([getattr(f, key) for _, _, f in flat])
    return columns


def _chance(found: dict[str, list[Found]], lists: dict[str, np.ndarray], protocol: Search) -> dict[str, float]:
    asked, odds = [], []
    for name, trials in found.items():
        matched = trials[0].relevant > 0
        asked.append(_whom(lists[name], protocol)[matched])
        odds.append(trials[0].relevant[matched] / trials[0].candidates[matched])
    # A person's queries may all be right or wrong together: no more guesses than persons.
    bound = by_chance(len(np.unique(np.concatenate(asked))), float(np.concatenate(odds).mean()))
    return {} if bound is None else {"rank_1": bound}

"""Metrics of re-identification: find a person in a gallery by one record, or by several of different modalities.

AP and CMC as in Zheng et al., "Scalable Person Re-identification" (ICCV 2015), section 5.2, with AP the plain mean of
the precisions; mINP as in Ye et al., "Deep Learning for Person Re-identification" (TPAMI 2022), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from trainkit import rng
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import MODALITIES, RGB, TEXT, Columns, ImageSplit, Scores, Split
from trainkit.metrics import significance
from trainkit.metrics.classification import chance_level
from trainkit.metrics.ranking import (
    LENGTH,
    Cosines,
    Gallery,
    QueryRanks,
    RankedQuery,
    Similarity,
    excluded,
    person_of_query,
    rank_gallery,
    to_integers,
    top_ranked,
)
from trainkit.metrics.significance import Units, nan_mean
from trainkit.metrics.verification import as_array, refuse_nonfinite
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

RANKS = (1, 5, 10)
FINISHED_AT_ONCE = 2048
FAILURES, LEAST = 60, 4
"""Queries in the table of failures: as many in all, and from each list at least so many."""
WORST, EVEN, SHOWN = 4, 6, 10
"""Ranked lists in the figure: of the worst queries, of queries that are the same at every step; and their length."""
TALL = 128
"""Largest height and width of images in the figure, in pixels."""

OF_A_LIST = ("map", "rank_1")
"""Scores of each list that become metrics: all five of 32 lists would be 160 charts. The table has them all."""

Finish = Callable[["Tensor", "Tensor"], "Tensor"]


@runtime_checkable
class RecordSplit(ImageSplit, Protocol):
    """A split whose images and captions can be shown."""

    def caption(self, row: int) -> str:
        """Caption of a record; empty for an image."""
        ...


def score_search(
    features: np.ndarray | Tensor,
    protocol: Search,
    finish: Finish,
    where: str = "search set",
    split: Split | None = None,
) -> Scores:
    """Look each query up in the gallery, by the cosine of the vectors that `finish` computes.

    `features` is (N, D), one row per record. `finish` maps features (n, 5, D), one per modality, and a mask of those
    present (n, 5) to (n, D); gallery records are fused with no other. Gallery records of the query's person (with
    `hides` `place`, of any person) from a place of one of its records are neither right nor wrong, nor are its own
    records.

    With R the number of right records: map, mean over queries of 1/R times the sum of the precisions at the right ones,
    over the whole gallery; rank_k, share of queries with a right one among the k first (counting persons if the
    protocol does; a k that reaches the gallery is left out); minp, mean of R / rank of the last right one. A wrong
    record as near as a right one is ranked before it, so a constant network finds nothing. Queries without a match are
    counted (`unmatched`) and are in no mean.

    Metrics: LIST.map and LIST.rank_1, means over its queries and over the trials; GROUP.map and so on, means over its
    lists; and map, rank_1, ..., means over the groups, or over the lists without groups. Kind `ranked` has only the
    last ones. Raises UserError if no query has a match, or an embedding is not finite.
    """
    features = torch.from_numpy(features) if isinstance(features, np.ndarray) else features
    if len(features) != len(protocol):
        raise ValueError(f"{len(features)} features for {len(protocol)} records")
    plain = as_array(features)
    refuse_nonfinite(np.sqrt(np.einsum("ij,ij->i", plain, plain, dtype=np.float64)), where)
    lists = {name: _checked(name, rows, protocol) for name, rows in protocol.queries.items()}
    everyone = np.unique(np.concatenate(protocol.galleries))
    alone = np.full((len(everyone), len(MODALITIES)), -1)
    alone[:, RGB] = everyone
    known = to_integers(finished(features, alone, finish, f"{where}, gallery"))
    galleries = [Gallery.make(rows, known[np.searchsorted(everyone, rows)], protocol) for rows in protocol.galleries]
    found: dict[str, list[QueryRanks]] = {}
    failed: list[RankedQuery] = []
    chosen: list[RankedQuery] = []
    same = _even(lists, galleries[0], protocol) if protocol.kind == "ranked" else {}
    for name, rows in lists.items():
        vectors = to_integers(finished(features, rows, finish, f"{where}, {name}"))
        scored = [_scored(vectors, g.vectors, protocol) for g in galleries]
        found[name] = [rank_gallery(s, rows, g, protocol) for s, g in zip(scored, galleries, strict=True)]
        asked = np.flatnonzero(found[name][0].relevant > 0)
        worst = asked[np.argsort(found[name][0].ap[asked], kind="stable")[: max(LEAST, FAILURES // len(lists))]]
        for which, kept in ((worst, failed), (np.array(same.get(name, []), np.int64), chosen)):
            kept += top_ranked(scored[0], name, which, rows, found[name][0], galleries[0], protocol, SHOWN)
    scores = _summed(found, lists, galleries, protocol, where)
    failed.sort(key=lambda one: one.ap)
    scores.tables["failures"] = _failures(failed, protocol)
    if protocol.kind == "ranked" and split is not None:
        if not isinstance(split, RecordSplit):
            raise ValueError(f"{where}: ranked lists need a split whose records can be shown")
        scores.pictures["ranked"] = _pictures(failed, chosen, sum(scores.tables["queries"]["queries"]), split)
    return scores


def _scored(queries: np.ndarray, gallery: np.ndarray, protocol: Search) -> Similarity:
    if protocol.kind != "reranked" or not len(queries):
        return Cosines(queries, gallery)
    from trainkit.metrics.k_reciprocal import Reranked

    return Reranked.make(queries, gallery, LENGTH, strict=protocol.strict)


def _checked(name: str, rows: np.ndarray, protocol: Search) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.int64).reshape(-1, len(MODALITIES))
    if len(rows) and (rows.max() >= len(protocol) or (rows < 0).all(axis=1).any()):
        raise ValueError(f"queries of {name}: rows beyond {len(protocol)} records, or a query without a record")
    strangers = (rows >= 0) & (protocol.person[rows] != person_of_query(rows, protocol)[:, None])
    if strangers.any():
        raise ValueError(f"queries of {name}: the records of query {strangers.any(axis=1).argmax()} show two persons")
    return rows


def finished(features: Tensor, rows: np.ndarray, finish: Finish, where: str) -> np.ndarray:
    """Apply `finish` to records `rows` (n, 5), -1 for none: (n, D), a part at a time.

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


def _even(lists: dict[str, np.ndarray], gallery: Gallery, protocol: Search) -> dict[str, list[int]]:
    """Choose a query with a match from some lists, evenly spread, independent of the embeddings."""
    chosen: dict[str, list[int]] = {}
    names = [name for name, rows in lists.items() if len(rows)]
    for k in range(EVEN):
        name = names[k * len(names) // EVEN]
        rows = lists[name]
        drawn = np.argsort(rng.uniform(0, f"ranked {k}", 0, np.arange(len(rows))), kind="stable")
        for q in drawn.tolist():
            person = person_of_query(rows[q : q + 1], protocol)[0]
            theirs = slice(*(int(np.searchsorted(gallery.person, person, side)) for side in ("left", "right")))
            if person < 0 or q in chosen.get(name, []) or excluded(rows[q : q + 1], gallery, theirs, protocol).all():
                continue
            chosen.setdefault(name, []).append(q)
            break
    return chosen


def _failures(failed: Sequence[RankedQuery], protocol: Search) -> dict[str, list]:
    """Table of the worst queries by AP: query, rank of the first right record, and nearest record."""
    return {
        "list": [one.list for one in failed],
        "query": [" + ".join(protocol.ids[row] for row in one.rows if row >= 0) for one in failed],
        **{name: [getattr(one, name) for one in failed] for name in ("person", "relevant", "ap", "rank")},
        "first": [protocol.ids[one.first[0]] for one in failed],
        "first_person": [int(protocol.person[one.first[0]]) for one in failed],
    }


def _pictures(failed: Sequence[RankedQuery], chosen: Sequence[RankedQuery], total: int, split: RecordSplit) -> Columns:
    """Return the data of `plots.ranked_lists`: the worst queries, of different persons, then the chosen ones."""
    worst: list[RankedQuery] = []
    for one in failed:
        if len(worst) < WORST and one.person not in [other.person for other in worst]:
            worst.append(one)
    shown = [*worst, *chosen]
    asked = np.array([one.rows for one in shown]).reshape(-1, len(MODALITIES))
    first = np.full((len(shown), SHOWN), -1)
    for k, one in enumerate(shown):
        first[k, : len(one.first)] = one.first
    return {
        "queries": _thumbnails(split, asked),
        "present": asked >= 0,
        "found": _thumbnails(split, first),
        "text": [split.caption(int(one.rows[TEXT])) if one.rows[TEXT] >= 0 else "" for one in shown],
        **{
            name: [getattr(one, name) for one in shown]
            for name in ("right", "list", "person", "relevant", "ap", "rank")
        },
        "worst": len(worst),
        "total": total,
    }


def _thumbnails(split: ImageSplit, rows: np.ndarray) -> np.ndarray:
    """Small images of records (n, k), uint8 (n, k, h, w, 3): white for none."""
    from PIL import Image

    small: dict[int, np.ndarray] = {}
    for row in np.unique(rows[rows >= 0]).tolist():
        picture = split.picture(row)
        if picture is not None:
            image = Image.fromarray(np.ascontiguousarray(picture))
            image.thumbnail((TALL, TALL), Image.Resampling.BOX)
            small[row] = np.asarray(image.convert("RGB"))
    tall, wide = (max((picture.shape[axis] for picture in small.values()), default=1) for axis in (0, 1))
    out = np.full((*rows.shape, tall, wide, 3), 255, dtype=np.uint8)
    for at in np.argwhere(np.isin(rows, list(small))).tolist():
        picture = small[int(rows[tuple(at)])]
        top, left = (tall - picture.shape[0]) // 2, (wide - picture.shape[1]) // 2
        out[*at, top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return out


def _summed(
    found: dict[str, list[QueryRanks]],
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
            f"none of {total} queries has a match in the gallery",
            "gallery records of the queried persons, from another place than the query's",
            "check the persons and cameras of this set",
        )
    groups = {
        group: _means([scores[name] for name in names if name in scores])
        for group, names in protocol.groups.items()
        if any(name in scores for name in names)
    }
    metrics = _means(list((groups or scores).values()))
    if protocol.kind != "ranked":  # images accompany the metrics of the same queries
        for title, values in groups.items():
            metrics |= {f"{title}.{key}": value for key, value in values.items()}
        for title, values in scores.items():
            metrics |= {f"{title}.{key}": values[key] for key in OF_A_LIST if key in values}
    if any(table["unmatched"]):
        metrics["unmatched"] = float(sum(table["unmatched"]))
    return Scores(
        metrics, _rows(found, lists, protocol), chance=_chance(found, lists, protocol), tables={"queries": table}
    )


def _of(found: QueryRanks, ranks: Sequence[int], by_person: bool) -> dict[str, float]:
    asked = found.relevant > 0
    place = (found.person_rank if by_person else found.rank)[asked]
    reached = {f"rank_{k}": float((place <= k).mean()) for k in ranks}
    return {"map": float(found.ap[asked].mean()), **reached, "minp": float(found.inp[asked].mean())}


def _means(scores: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([one[key] for one in scores])) for key in scores[0]}


def _rows(found: dict[str, list[QueryRanks]], lists: dict[str, np.ndarray], protocol: Search) -> Columns:
    """A row per query, list and trial.

    With the group of the list if no list is in two groups.
    """
    trials = len(protocol.galleries)
    flat = [(name, t, f) for name, all_of in found.items() for t, f in enumerate(all_of)]
    columns: Columns = {"list": [name for name, _, f in flat for _ in f.ap]}
    if trials > 1:
        columns["trial"] = np.concatenate([np.full(len(f.ap), t) for _, t, f in flat])
    titles = {name: title for title, names in protocol.groups.items() for name in names}
    if titles and len(titles) == sum(map(len, protocol.groups.values())):
        columns["group"] = [titles.get(name) for name, _, f in flat for _ in f.ap]
    columns["query"] = np.concatenate([np.arange(len(f.ap)) for _, _, f in flat])
    columns["person"] = np.concatenate([person_of_query(lists[name], protocol) for name, _, _ in flat])
    for title, key in (("relevant", "relevant"), ("rank", "rank"), ("ap", "ap"), ("inp", "inp")):
        columns[title] = np.concatenate([getattr(f, key) for _, _, f in flat])
    if protocol.by_person:
        columns["person_rank"] = np.concatenate([f.person_rank for _, _, f in flat])
    return columns


def _chance(found: dict[str, list[QueryRanks]], lists: dict[str, np.ndarray], protocol: Search) -> dict[str, float]:
    asked, odds = [], []
    for name, trials in found.items():
        matched = trials[0].relevant > 0
        asked.append(person_of_query(lists[name], protocol)[matched])
        odds.append(trials[0].relevant[matched] / trials[0].candidates[matched])
    if not sum(map(len, asked)):
        return {}
    # A person's queries may all be right or wrong together: count one guess per person.
    bound = chance_level(len(np.unique(np.concatenate(asked))), float(np.concatenate(odds).mean()))
    return {} if bound is None else {"rank_1": bound}


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample persons with all their queries, of every list and trial."""
    return Units.by(rows["person"], "people")


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of `score_search`, (draws,) each, with query i counted `times[:, i]` times.

    The gallery is not resampled. A list without a drawn query that has a match is in no mean.
    """
    asked = rows["relevant"] > 0
    lists, place = np.unique(rows["list"].astype(str), return_inverse=True)
    trial = rows.get("trial", np.zeros(len(asked), np.int64))
    trials = int(trial.max()) + 1
    cell = np.where(asked, place.reshape(-1) * trials + trial, -1)
    many = significance.group_sums(times, cell, len(lists) * trials)
    group = dict(zip(rows["list"].tolist(), rows["group"].tolist(), strict=True)) if "group" in rows else {}
    titles = [title for title in dict.fromkeys(group.values()) if title is not None]
    rank = rows.get("person_rank", rows["rank"])
    found = {"map": rows["ap"], **{f"rank_{k}": rank <= k for k in RANKS}, "minp": rows["inp"]}
    metrics: dict[str, np.ndarray] = {}
    for key, values in found.items():
        with np.errstate(invalid="ignore", divide="ignore"):
            each = significance.group_sums(times * values, cell, len(lists) * trials) / many
        of_list = nan_mean(each.reshape(len(times), len(lists), trials))
        own = {name: of_list[:, k] for k, name in enumerate(lists.tolist())}
        grouped = {t: nan_mean(np.stack([own[name] for name in own if group[name] == t], 1)) for t in titles}
        metrics |= {f"{title}.{key}": drawn for title, drawn in (own | grouped).items()}
        metrics[key] = nan_mean(np.stack(list((grouped or own).values()), 1))
    return metrics

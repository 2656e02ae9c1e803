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
    Similarity,
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
    present (n, 5) to (n, D); gallery records are fused with no other. Gallery records of the query's person from a
    place of one of its records are neither right nor wrong, nor are its own records.

    With R the number of right records: map, mean over queries of 1/R times the sum of the precisions at the right ones,
    over the whole gallery; rank_k, share of queries with a right one among the k first (a k that reaches the gallery is
    left out); minp, mean of R / rank of the last right one. A wrong record as near as a right one is ranked before it,
    so a constant network finds nothing. Queries without a match are counted (`unmatched`) and are in no mean.

    Metrics: LIST.map and LIST.rank_1, means over its queries; GROUP.map and so on, means over its lists; and map,
    rank_1, ..., means over the groups, or over the lists without groups. Kind `ranked` has only the last ones. Raises
    UserError if no query has a match, or an embedding is not finite.
    """
    features = torch.from_numpy(features) if isinstance(features, np.ndarray) else features
    if len(features) != len(protocol):
        raise ValueError(f"{len(features)} features for {len(protocol)} records")
    plain = as_array(features)
    refuse_nonfinite(np.sqrt(np.einsum("ij,ij->i", plain, plain, dtype=np.float64)), where)
    lists = {name: _checked(name, rows, protocol) for name, rows in protocol.queries.items()}
    alone = np.full((len(protocol.gallery), len(MODALITIES)), -1)
    alone[:, RGB] = protocol.gallery
    vectors = to_integers(finished(features, alone, finish, f"{where}, gallery"))
    gallery = Gallery.make(protocol.gallery, vectors, protocol)
    found: dict[str, QueryRanks] = {}
    near: dict[str, Similarity] = {}
    for name, rows in lists.items():
        vectors = to_integers(finished(features, rows, finish, f"{where}, {name}"))
        scored = _scored(vectors, gallery.vectors, protocol)
        found[name] = rank_gallery(scored, rows, gallery, protocol)
        if protocol.kind == "ranked":
            near[name] = scored
    scores = _summed(found, lists, protocol, where)
    if protocol.kind == "ranked" and split is not None:
        if not isinstance(split, RecordSplit):
            raise ValueError(f"{where}: ranked lists need a split whose records can be shown")
        worst, even = _worst(found, lists, protocol), _even(found)
        shown = [*worst, *even]
        first = [top_ranked(near[name], q, lists[name][q], gallery, protocol, SHOWN) for name, q in shown]
        total = {"worst": len(worst), "total": sum(map(len, lists.values()))}
        scores.pictures["ranked"] = _pictures(shown, first, found, lists, protocol, split) | total
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


def _worst(found: Mapping[str, QueryRanks], lists: Mapping[str, np.ndarray], protocol: Search) -> list[tuple[str, int]]:
    """Choose the queries with the lowest AP, of different persons: list and number of each."""
    asked = [(name, q) for name, ranks in found.items() for q in np.flatnonzero(ranks.relevant).tolist()]
    chosen: dict[int, tuple[str, int]] = {}
    for name, q in sorted(asked, key=lambda at: found[at[0]].ap[at[1]]):
        chosen.setdefault(int(person_of_query(lists[name][q : q + 1], protocol)[0]), (name, q))
        if len(chosen) == WORST:
            break
    return list(chosen.values())


def _even(found: Mapping[str, QueryRanks]) -> list[tuple[str, int]]:
    """Choose a query with a match from some lists, evenly spread, independent of the embeddings."""
    chosen: list[tuple[str, int]] = []
    names = [name for name, ranks in found.items() if len(ranks.relevant)]
    for k in range(EVEN):
        name = names[k * len(names) // EVEN]
        relevant = found[name].relevant
        drawn = np.argsort(rng.uniform(0, f"ranked {k}", 0, np.arange(len(relevant))), kind="stable")
        left = [(name, q) for q in drawn.tolist() if relevant[q] and (name, q) not in chosen]
        chosen += left[:1]
    return chosen


def _pictures(
    shown: Sequence[tuple[str, int]],
    first: Sequence[tuple[np.ndarray, np.ndarray]],
    found: Mapping[str, QueryRanks],
    lists: Mapping[str, np.ndarray],
    protocol: Search,
    split: RecordSplit,
) -> Columns:
    """Return the data of `plots.ranked_lists`: of queries (list, number) the rows that came `first`, and if right."""
    asked = [lists[name][q] for name, q in shown]
    rows = np.concatenate([*asked, *(near for near, _ in first)])
    small = {row: _thumbnail(split, row) for row in np.unique(rows[rows >= 0]).tolist()}
    ranks = {key: [getattr(found[name], key)[q] for name, q in shown] for key in ("relevant", "ap", "rank")}
    by_modality = [
        {name: row for name, row in zip(MODALITIES, query.tolist(), strict=True) if row >= 0} for query in asked
    ]
    return ranks | {
        "queries": [{name: small[row] for name, row in query.items()} for query in by_modality],
        "text": [split.caption(int(query[TEXT])) if query[TEXT] >= 0 else "" for query in asked],
        "found": [[small[row] for row in near.tolist()] for near, _ in first],
        "right": [right for _, right in first],
        "list": [name for name, _ in shown],
        "person": [int(protocol.person[query.max()]) for query in asked],
    }


def _thumbnail(split: ImageSplit, row: int) -> np.ndarray:
    """A small image of a record, uint8 (h, w, 3); white if there is none."""
    from PIL import Image

    picture = split.picture(row)
    if picture is None:
        return np.full((2, 1, 3), 255, dtype=np.uint8)
    image = Image.fromarray(np.ascontiguousarray(picture))
    image.thumbnail((TALL, TALL), Image.Resampling.BOX)
    return np.asarray(image.convert("RGB"))


def names(protocol: Search) -> tuple[str, ...]:
    """Return the metrics that the protocol may have."""
    own = ("map", *(f"rank_{k}" for k in _ranks(protocol)), "minp")
    of_lists = (f"{title}.{key}" for title in protocol.queries for key in OF_A_LIST if key in own)
    of_groups = (f"{title}.{key}" for title in protocol.groups for key in own)
    return (*own, "unmatched", *(() if protocol.kind == "ranked" else (*of_groups, *of_lists)))


def _ranks(protocol: Search) -> list[int]:
    """Return the k of rank_k that do not reach the size of the gallery."""
    return [k for k in RANKS if k < len(protocol.gallery)]


def _summed(found: dict[str, QueryRanks], lists: dict[str, np.ndarray], protocol: Search, where: str) -> Scores:
    ranks = _ranks(protocol)
    scores: dict[str, dict[str, float]] = {}
    table: dict[str, list] = {}
    for name, ranking in found.items():
        if ranking.relevant.any():
            scores[name] = _of(ranking, ranks)
        unmatched = float((ranking.relevant == 0).sum())
        row = {"list": name, "queries": len(lists[name]), "unmatched": unmatched}
        row |= {key: scores.get(name, {}).get(key) for key in ("map", *(f"rank_{k}" for k in ranks), "minp")}
        for key, value in row.items():
            table.setdefault(key, []).append(value)
    if not scores:
        raise UserError(
            where,
            f"none of {sum(table['queries'])} queries has a match in the gallery",
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
        metrics |= {f"{title}.{key}": value for title, values in groups.items() for key, value in values.items()}
        metrics |= {f"{title}.{key}": own[key] for title, own in scores.items() for key in OF_A_LIST if key in own}
    if any(table["unmatched"]):
        metrics["unmatched"] = float(sum(table["unmatched"]))
    rows = _rows(found, lists, protocol)
    return Scores(metrics, rows, chance=_chance(found, lists, protocol), tables={"queries": table})


def _of(found: QueryRanks, ranks: Sequence[int]) -> dict[str, float]:
    asked = found.relevant > 0
    reached = {f"rank_{k}": float((found.rank[asked] <= k).mean()) for k in ranks}
    return {"map": float(found.ap[asked].mean()), **reached, "minp": float(found.inp[asked].mean())}


def _means(scores: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([one[key] for one in scores])) for key in scores[0]}


def _rows(found: dict[str, QueryRanks], lists: dict[str, np.ndarray], protocol: Search) -> Columns:
    """A row per query and list, with the group of the list if no list is in two groups."""
    columns: Columns = {"list": [name for name, ranks in found.items() for _ in ranks.ap]}
    titles = {name: title for title, names in protocol.groups.items() for name in names}
    if titles and len(titles) == sum(map(len, protocol.groups.values())):
        columns["group"] = [titles.get(name) for name in columns["list"]]
    columns["query"] = np.concatenate([np.arange(len(ranks.ap)) for ranks in found.values()])
    columns["person"] = np.concatenate([person_of_query(lists[name], protocol) for name in found])
    for key in ("relevant", "rank", "ap", "inp"):
        columns[key] = np.concatenate([getattr(ranks, key) for ranks in found.values()])
    return columns


def _chance(found: dict[str, QueryRanks], lists: dict[str, np.ndarray], protocol: Search) -> dict[str, float]:
    asked, odds = [], []
    for name, ranks in found.items():
        matched = ranks.relevant > 0
        asked.append(person_of_query(lists[name], protocol)[matched])
        odds.append(ranks.relevant[matched] / ranks.candidates[matched])
    if not sum(map(len, asked)):
        return {}
    # A person's queries may all be right or wrong together: count one guess per person.
    return chance_level("rank_1", len(np.unique(np.concatenate(asked))), float(np.concatenate(odds).mean()))


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample persons with all their queries, of every list."""
    return Units.by(rows["person"], "people")


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of `score_search`, (draws,) each, with query i counted `times[:, i]` times.

    The gallery is not resampled. A list without a drawn query that has a match is in no mean.
    """
    asked = rows["relevant"] > 0
    lists, place = np.unique(rows["list"].astype(str), return_inverse=True)
    of = np.where(asked, place.reshape(-1), -1)
    many = significance.group_sums(times, of, len(lists))
    group = dict(zip(rows["list"].tolist(), rows["group"].tolist(), strict=True)) if "group" in rows else {}
    titles = [title for title in dict.fromkeys(group.values()) if title is not None]
    found = {"map": rows["ap"], **{f"rank_{k}": rows["rank"] <= k for k in RANKS}, "minp": rows["inp"]}
    metrics: dict[str, np.ndarray] = {}
    for key, values in found.items():
        with np.errstate(invalid="ignore", divide="ignore"):
            of_list = significance.group_sums(times * values, of, len(lists)) / many
        own = {name: of_list[:, k] for k, name in enumerate(lists.tolist())}
        grouped = {t: nan_mean(np.stack([own[name] for name in own if group[name] == t], 1)) for t in titles}
        metrics |= {f"{title}.{key}": drawn for title, drawn in (own | grouped).items()}
        metrics[key] = nan_mean(np.stack(list((grouped or own).values()), 1))
    return metrics

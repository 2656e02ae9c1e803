"""Queries and galleries of evaluation sets of people, and which gallery images a query ignores."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trainkit import rng
from trainkit.data.people.index import PeopleIndex
from trainkit.data.people.modalities import subsets, title
from trainkit.data.people.records import GALLERY, QUERY, SYSU
from trainkit.errors import UserError, number_of
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import MODALITIES, RGB, TEXT

TRIALS = 10
"""Galleries that SYSU-MM01's protocol draws (Wu et al., ICCV 2017, section 3.3)."""

_SYSU = {"": (False, 1), ".multi": (False, 10), ".indoor": (True, 1), ".indoor_multi": (True, 10)}
"""Its four settings by the end of a split's name: whether indoors alone, and images of a person and camera."""
_INDOORS = ("1", "2")
"""Cameras of its indoor gallery, by the last character of their names."""
_FIXED = 0
"""Seed of the galleries that are drawn: whatever the run's, so that runs are evaluated on the same ones."""


def searches(
    index: PeopleIndex, rows: np.ndarray, known: tuple[int, ...], where: str, strict: bool = False
) -> dict[str, tuple[np.ndarray, Search]]:
    """Return the searches in `rows` of a set, by the end of a split's name: rows of the index, queries and galleries.

    Queries are those that the set itself lists, else every combination of modalities, RGB apart, that are `known`;
    where there are none but RGB, RGB images. The gallery is RGB. Raises UserError where one of the two is empty.
    """
    queries = _queries(index, rows, known)
    gallery = rows[(index.modality[rows] == RGB) & (index.role[rows] != QUERY)]
    asking = sum(len(some) for some in queries.values())
    if not asking or not len(gallery):
        found = f"{asking} queries and {len(gallery)} gallery images"
        raise UserError(f"{where} ({index.where})", found, "at least one of each", "check its modalities and roles")
    drawn = {"": (gallery,)}
    if index.kind == SYSU:
        drawn = {end: _drawn(index, gallery, *setting) for end, setting in _SYSU.items()}
    place, rule = _camera_rule(index, queries, gallery)
    made = {end: _search(index, queries, galleries, place, rule, where) for end, galleries in drawn.items()}
    own, first = made[""]
    return made | {f".{kind}": (own, replace(first, kind=kind, strict=strict)) for kind in ("ranked", "reranked")}


def _queries(index: PeopleIndex, rows: np.ndarray, known: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Name of a list to rows of the index, (queries, 5)."""
    if index.lists:
        # A query with a record of somebody else, or of another modality, is not asked. Row -1 is none.
        there = np.zeros(len(index) + 1, bool)
        there[rows[np.isin(index.modality[rows], known)]] = there[-1] = True
        lists = {name: some[there[some].all(1)].astype(np.int64) for name, some in index.lists.items()}
        return {name: some for name, some in lists.items() if len(some)}
    asks = rows[(index.role[rows] != GALLERY) & (index.person[rows] >= 0) & np.isin(index.modality[rows], known)]
    person, modality = index.person[asks], index.modality[asks]
    wanted = subsets(tuple(MODALITIES[m] for m in known)) or [(RGB,)]
    # Row -1 stays that: it looks up the entry behind the last.
    asks = np.append(asks, -1)
    found = zip(wanted, combined(person, modality, wanted), strict=True)
    return {title(some): asks[rows] for some, rows in found if len(rows)}


def combined(
    person: np.ndarray,
    modality: np.ndarray,
    wanted: Sequence[tuple[int, ...]],
    cap: bool = False,
) -> list[np.ndarray]:
    """Combine records into queries by each of the `wanted` sets of modalities, int64 (queries, 5): rows, -1 for none.

    `person` is 0 or more for each record. Of whoever has records of all modalities of a set there are as many queries
    as records of the modality with the most of them; query t takes of each modality record t, and begins again where
    there are fewer. So with one modality each record asks once. With `cap` a person is asked for with several at once
    no more often than half of the person's records.
    """
    people, kinds = int(person.max(initial=-1)) + 1, len(MODALITIES)
    cell = np.asarray(person, np.int64) * kinds + modality
    ordered = np.argsort(cell, kind="stable")
    sizes = np.bincount(cell, minlength=people * kinds)
    starts = (np.cumsum(sizes) - sizes).reshape(people, kinds)
    sizes = sizes.reshape(people, kinds)
    chosen = np.zeros((len(wanted), 1, kinds), bool)
    for number, some in enumerate(wanted):
        chosen[number, 0, list(some)] = True
    # (sets, people, 5): how many records of each of its modalities.
    held = sizes * chosen
    times = held.max(2, initial=0) * ((held > 0) == chosen).all(2)
    if cap:
        times = np.where(chosen.sum(2) > 1, np.minimum(times, sizes.sum(1) // 2), times)
    flat = times.reshape(-1)
    # Which set and person each query is of, and the how manieth of these it is.
    which = np.repeat(np.arange(len(flat)), flat)
    turn = np.arange(len(which)) - np.repeat(np.cumsum(flat) - flat, flat)
    held, starts = held.reshape(-1, kinds)[which], starts[which % max(people, 1)]
    place = starts + turn[:, None] % np.maximum(held, 1)
    rows = np.where(held > 0, ordered[np.where(held > 0, place, 0)], -1) if len(which) else place
    return np.split(rows, np.cumsum(times.sum(1))[:-1])


def _drawn(index: PeopleIndex, gallery: np.ndarray, indoors: bool, most: int) -> tuple[np.ndarray, ...]:
    """Draw SYSU-MM01's galleries: of each person and camera `most` images, by a hash of their names."""
    if indoors:
        cameras = [number for number, name in enumerate(index.cameras) if name[-1:] in _INDOORS]
        gallery = gallery[np.isin(index.camera[gallery], cameras)]
    codes = np.asarray(
        [zlib.crc32(index.ids[row].encode(errors="surrogateescape")) for row in gallery.tolist()], np.int64
    )
    cell = index.person[gallery].astype(np.int64) * (len(index.cameras) + 1) + index.camera[gallery]
    trials = []
    for trial in range(TRIALS):
        order = np.lexsort((codes, rng.words(_FIXED, "gallery", trial, codes), cell))
        first = np.searchsorted(cell[order], cell[order], side="left")
        trials.append(np.sort(gallery[order[np.arange(len(order)) - first < most]]))
    return tuple(trials)


def _search(
    index: PeopleIndex,
    queries: Mapping[str, np.ndarray],
    galleries: tuple[np.ndarray, ...],
    place: np.ndarray,
    rule: str,
    where: str,
) -> tuple[np.ndarray, Search]:
    """Return rows of the index that take part, ascending, and the search among them."""
    if not all(len(rows) for rows in galleries):
        raise UserError(f"{where} ({index.where})", "an empty gallery", "rgb images of every setting")
    rows = np.unique(np.concatenate([*(some.reshape(-1) for some in queries.values()), *galleries]))
    rows = rows[rows >= 0]
    row_of = np.full(len(index) + 1, -1, np.int64)
    row_of[rows] = np.arange(len(rows))
    groups: dict[str, tuple[str, ...]] = {}
    for name, some in queries.items():
        group = f"modal_{int((some[0] >= 0).sum())}"
        groups[group] = (*groups.get(group, ()), name)
    search = Search(
        person=np.asarray(index.person[rows], np.int64),
        place=place[rows],
        galleries=tuple(row_of[some] for some in galleries),
        queries={name: row_of[some] for name, some in queries.items()},
        ids=tuple(index.ids[row] for row in rows.tolist()),
        groups=dict(sorted(groups.items())),
        by_person=index.kind == SYSU,
        hides="place" if index.kind == SYSU else "person",
        rule=rule,
    )
    return rows, search


# Gallery images from the camera of a query.


def _camera_rule(index: PeopleIndex, queries: Mapping[str, np.ndarray], gallery: np.ndarray) -> tuple[np.ndarray, str]:
    """Choose the places by which queries ignore gallery images, int64 (records,) as `Search.place`, and say how.

    Published sets have the places of their protocols; elsewhere each camera is a place, and a caption is from none.
    Where that would leave no query a match, as with one camera in all, nothing is ignored.
    """
    own = np.asarray(index.place, np.int64)
    if index.kind == SYSU:
        return own, "gallery images of anybody from the place of a query are ignored"
    place = own if (own >= 0).any() else np.where(index.modality == TEXT, -1, index.camera).astype(np.int64)
    there, hidden = _matches(np.concatenate(list(queries.values())), gallery, index.person, place)
    lost = int(((there > 0) & (there == hidden)).sum())
    if not hidden.any():
        return own, "no gallery image of a query's person is known to be from its camera, so none is ignored"
    if lost == (there > 0).sum():
        return np.full_like(own, -1), "every match is from the camera of its query, so none is ignored"
    said = f"gallery images of the person from the camera of a query are ignored, {hidden.sum():,} of {there.sum():,}"
    left = f"; {lost:,} of {number_of(len(there), 'queries', 'query')} have no other match and are in no mean"
    return place, said + left * bool(lost)


def _matches(
    queries: np.ndarray, gallery: np.ndarray, person: np.ndarray, place: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Count gallery records of the person of each of `queries` (Q, 5), and those of them from a place of the query.

    The query's own records are in neither. int64 (Q,) each.
    """
    places = int(place.max(initial=0)) + 2
    cell = person.astype(np.int64) * places + place + 1
    size = np.bincount(cell[gallery][person[gallery] >= 0], minlength=places * (int(person.max(initial=0)) + 1))
    there = size.reshape(-1, places).sum(1)[person[queries.max(1)]]
    used, within = queries >= 0, np.isin(queries, gallery) & (queries >= 0)
    at = np.sort(np.where(used, place[queries], -1), axis=1)
    first = (at >= 0) & (np.diff(at, axis=1, prepend=-1) != 0)
    same = np.where(first, size[person[queries.max(1)].astype(np.int64)[:, None] * places + at + 1], 0).sum(1)
    known = (within & (np.where(used, place[queries], -1) >= 0)).sum(1)
    return there - within.sum(1), same - known

"""Queries and gallery of evaluation sets of people, and which gallery images a query ignores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainkit.data.people.index import PeopleIndex
from trainkit.data.people.modalities import subsets, title
from trainkit.data.people.records import GALLERY, QUERY
from trainkit.errors import UserError, number_of
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import MODALITIES, RGB, TEXT


def search(index: PeopleIndex, rows: np.ndarray, known: tuple[int, ...], where: str) -> tuple[np.ndarray, Search]:
    """Return the rows of an index, of `rows` of it, that take part in the search among them, ascending, and that.

    Queries are those that the set itself lists, else every combination of modalities, RGB apart, that are `known`;
    where there are none but RGB, RGB images. The gallery is RGB. Raises UserError where one of the two is empty.
    """
    queries = _queries(index, rows, known)
    gallery = rows[(index.modality[rows] == RGB) & (index.role[rows] != QUERY)]
    asking = sum(len(some) for some in queries.values())
    if not asking or not len(gallery):
        found = f"{asking} queries and {len(gallery)} gallery images"
        raise UserError(f"{where} ({index.where})", found, "at least one of each", "check its modalities and roles")
    place, rule = _camera_rule(index, queries, gallery)
    rows = np.unique(np.concatenate([*(some.reshape(-1) for some in queries.values()), gallery]))
    rows = rows[rows >= 0]
    row_of = np.full(len(index) + 1, -1, np.int64)
    row_of[rows] = np.arange(len(rows))
    groups: dict[str, tuple[str, ...]] = {}
    for name, some in queries.items():
        group = f"modal_{int((some[0] >= 0).sum())}"
        groups[group] = (*groups.get(group, ()), name)
    return rows, Search(
        person=np.asarray(index.person[rows], np.int64),
        place=place[rows],
        gallery=row_of[gallery],
        queries={name: row_of[some] for name, some in queries.items()},
        ids=tuple(index.ids[row] for row in rows.tolist()),
        groups=dict(sorted(groups.items())),
        rule=rule,
    )


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


# Gallery images from the camera of a query.


def _camera_rule(index: PeopleIndex, queries: Mapping[str, np.ndarray], gallery: np.ndarray) -> tuple[np.ndarray, str]:
    """Choose the places by which queries ignore gallery images, int64 (records,) as `Search.place`, and say how.

    Published sets have the places of their protocols; elsewhere each camera is a place, and a caption is from none.
    Where that would leave no query a match, as with one camera in all, nothing is ignored.
    """
    own = np.asarray(index.place, np.int64)
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

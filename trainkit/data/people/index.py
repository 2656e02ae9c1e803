"""Index of a set of people: its records as arrays, in the order of their modalities, and in that of the set within one.

So images come first and captions last. What is in an image is not in the index.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.people import sources
from trainkit.data.people.records import DISTRACTOR, Records
from trainkit.data.record import Columns, Record, Source
from trainkit.errors import UserError
from trainkit.interfaces import TEXT


def indexed(text: str, part: str = "train", columns: Columns | None = None) -> PeopleIndex:
    """Read the set that a recipe names; see `sources.find`. Raises UserError at its first error, naming the row."""
    return PeopleIndex(sources.find(text, part, columns))


class PeopleIndex:
    """The records of a set of people."""

    def __init__(self, records: Records):
        """Sort the records. Raises UserError where there are none."""
        self.kind, self.where, self.root = records.kind, records.where, str(records.root)
        self.annotations, self.left_out = records.annotations, tuple(records.losses())
        if not records.every:
            raise UserError(self.where, "no records", "at least one")
        modality = np.asarray([record.modality for record in records.every], np.int8)
        order = np.argsort(modality, kind="stable")
        every = [records.every[row] for row in order.tolist()]
        # Where each record went, and behind them -1 to itself.
        moved = np.full(len(every) + 1, -1, np.int32)
        moved[order] = np.arange(len(every), dtype=np.int32)
        self.ids = tuple(record.id for record in every)
        self.texts = tuple(record.text for record in every)
        """The words of a caption; empty for images."""
        self.persons, self.person = _numbered([record.person for record in every])
        """Names of the persons, and int32 (records,), the place of each among them; -1 for a distractor."""
        self.cameras, self.camera = _numbered([record.camera or None for record in every])
        """Names of the cameras, and int32 (records,), the place of each among them; -1 unknown."""
        place = [*(records.places.get(name, -1) for name in self.cameras), -1]
        self.place = np.asarray(place, np.int32)[self.camera]
        """int32 (records,), as `Search.place`; -1 unknown."""
        self.modality = modality[order]
        """int8 (records,), a place in `interfaces.MODALITIES`, in ascending order."""
        self.role = np.asarray([record.role for record in every], np.int8)
        """int8 (records,): 0 as it comes, 1 query only, 2 gallery only."""
        self.of = moved[[record.of for record in every]]
        """int32 (records,): for a caption the record of the image that it describes, else -1."""
        self.lists = {name: moved[np.reshape(some, (-1, 5))] for name, some in records.lists.items()}
        """Queries that the set itself gives, int32 (queries, 5) by name, -1 for none; empty where it gives none."""

    def __len__(self) -> int:
        return len(self.modality)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ids": (), "texts": (), "lists": {}}  # which no worker needs

    @functools.cached_property
    def picture(self) -> np.ndarray:
        """int32 (records,), the row of each in `pictures()`; -1 for a caption."""
        return np.where(self.modality == TEXT, -1, np.arange(len(self))).astype(np.int32)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all that the records are, wherever the set lies."""
        hashed = hashlib.sha256()
        for names in ([self.kind], self.persons, self.cameras, self.ids, self.texts, [*self.lists]):
            hashed.update(json.dumps(names).encode())
        arrays = (self.person, self.camera, self.place, self.modality, self.role, self.of, *self.lists.values())
        for array in arrays:
            hashed.update(array.tobytes())
        return hashed.hexdigest()

    def pictures(self) -> Source:
        """Return the images as a source to pack, in their order; labels are the names of persons."""
        ids = self.ids[: int(np.count_nonzero(self.modality != TEXT))]
        paths = [os.path.join(self.root, id) for id in ids]

        def records() -> Iterator[Record]:
            names = (*self.persons, DISTRACTOR)  # -1 is the last
            for id, path, number in zip(ids, paths, self.person.tolist(), strict=False):
                yield Record(id, names[number], Path(path), path)

        return Source(self.kind, self.where, len(ids), records, (*self.annotations, *map(Path, paths)))


def _numbered(names: list[str | None]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names in their order, and of each entry its number, int32; -1 for none."""
    distinct = tuple(sorted({name for name in names if name is not None}))
    number: dict[str | None, int] = {name: n for n, name in enumerate(distinct)}
    number[None] = -1
    return distinct, np.asarray([number[name] for name in names], np.int32)

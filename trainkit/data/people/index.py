"""Index of a set of people, as arrays: scanned once, kept in the cache, reopened in milliseconds.

A folder of `rows` with the columns `id`, the path of an image below the root or a name for each caption, `text`, the
words of a caption, empty for images, and those that are attributes of `PeopleIndex`. Beside them lie `queries.npy`,
int32 (queries, 5), queries that the set itself gives, list after list, and `names.json`, names of persons and cameras.

Records are in the order of their modalities, and in that of the set within one: images first, captions last.

Whether a set has changed is seen by its annotation files and by the folders its images are in, not by every image:
a folder changes when a file is added, removed or renamed. What is in an image is not in the index.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from trainkit.data import cache, folders
from trainkit.data.folders import stamp
from trainkit.data.people import records as people_records
from trainkit.data.people import sources
from trainkit.data.people.records import Layout as SetLayout
from trainkit.data.people.records import Records
from trainkit.data.record import Columns, Record, Source
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import (
    REBUILD,
    Column,
    Form,
    Layout,
    Text,
    is_list,
    is_packed,
    is_text,
    mapped,
    unreadable,
)
from trainkit.data.rows.writer import Writer
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.interfaces import MODALITIES, TEXT

_log = logging.getLogger(__name__)

FORMAT = "trainkit-people"
VERSION = 1
"""Raised with any change to how a set is read, so that an older index is not taken for a new one."""

_ARRAYS = {"person": "int32", "camera": "int16", "place": "int16", "modality": "int8", "role": "int8", "of": "int32"}
_COLUMNS = (
    Text("id", "ids.txt"),
    *(Column(name, f"{name}.npy", dtype) for name, dtype in _ARRAYS.items()),
    Text("text", "texts.txt", sparse=True),
)
_BESIDE = ("names.json", "queries.npy")


def indexed(text: str, part: str = "train", columns: Columns | None = None) -> PeopleIndex:
    """Return the index of the set that a recipe names, scanned where that is not done yet; see `sources.find`.

    Processes that start together scan once. Raises UserError at the first error in the set, naming file and row.
    """
    layout = sources.find(text, part, columns)
    made = [FORMAT, VERSION, layout.kind, layout.where, *([sorted(columns.items())] if columns else [])]
    # The folders are known only from a scan, so they are noted under a name that the annotations alone give.
    first = cache.key(made, layout.annotations)
    noted = cache.place(f"{first}.folders")
    found: list[Path] = []

    def is_there(_: Path) -> bool:
        try:
            folders = noted.read_text("utf-8", errors="surrogateescape").split("\n")[:-1]
        except OSError:
            return False
        stamps = {name: stamp(f"{layout.root}/{name}") for name in folders}
        folder = noted.parent / _key(first, stamps)
        found[:] = [folder]
        return is_packed(folder)

    def make(_: object) -> None:
        begin = time.perf_counter()
        rows = Records(layout.root)
        layout.read(rows)
        folder = noted.parent / _key(first, rows.there.stamps)
        if not is_packed(folder):
            _write(folder, layout, rows, begin)
        aside = noted.with_name(f"{noted.name}.{uuid.uuid4().hex[:8]}")
        aside.write_text("".join(f"{name}\n" for name in rows.there.stamps), "utf-8", errors="surrogateescape")
        aside.rename(noted)
        found[:] = [folder]
        _log.info("scanned %s in %.2f s, once: %d records", layout.where, time.perf_counter() - begin, len(rows))
        for sentence in rows.losses():
            _log.warning("%s: %s", layout.where, sentence)

    cache.make_once(noted, is_there, make, f"scanning {layout.where}")
    return PeopleIndex(found[0])


def _key(first: str, stamps: Mapping[str, str]) -> str:
    """Name the index of a set by its annotations and by when each of its folders last changed."""
    text = "".join(f"\n{folder} {when}" for folder, when in stamps.items())
    return hashlib.sha256((first + text).encode(errors="surrogateescape")).hexdigest()[:24] + "-rows"


class PeopleIndex(Rows):
    """The index of a set of people, opened for reading; names and texts are read when asked for."""

    FORM = Form(FORMAT, VERSION, "an index of people", counted="records")
    ENTRIES: ClassVar = {
        "kind": is_text,
        "where": is_text,
        "root": is_text,
        "annotations": lambda files: is_list(files, is_text),
        "lists": lambda lists: is_list(lists, lambda one: isinstance(one, list) and [*map(type, one)] == [str, int]),
        "seconds": lambda seconds: type(seconds) is float,
    }

    kind: str
    """Its layout in words."""
    where: str
    """The set in words, with its split."""
    root: str
    """Where the paths of images begin."""
    seconds: float
    """Seconds that the scan took."""
    person: np.ndarray
    """int32 (records,), a place in `persons`; -1 for a distractor."""
    camera: np.ndarray
    """int16 (records,), a place in `cameras`; -1 unknown."""
    place: np.ndarray
    """int16 (records,), as `Search.place`: which records of a person hide each other; -1 hides nothing."""
    modality: np.ndarray
    """int8 (records,), a place in `modalities.MODALITIES`, in ascending order."""
    role: np.ndarray
    """int8 (records,): 0 as it comes, 1 query only, 2 gallery only."""
    of: np.ndarray
    """int32 (records,): for a caption the record of the image that it describes, else -1."""

    @classmethod
    def layout(cls, manifest: Mapping[str, Json]) -> Layout:
        """Return the columns."""
        return _COLUMNS

    @classmethod
    def beside(cls, manifest: Mapping[str, Json]) -> Sequence[str]:
        """Return the names, and the queries that the set gives."""
        return _BESIDE

    @property
    def sysu(self) -> bool:
        """Return True where it is evaluated by SYSU-MM01's protocol.

        That draws galleries, ignores gallery images of anybody from the place of a query, and counts persons for CMC.
        """
        return self.kind == people_records.SYSU

    @property
    def memory(self) -> int:
        """Bytes of its arrays when all are in memory, without ids and texts."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS) + self._queries.nbytes

    @property
    def left_out(self) -> list[str]:
        """Return sentences about what was found in the set and not taken; none of an index that did not note it."""
        return self.manifest.get("left_out", [])

    @property
    def persons(self) -> tuple[str, ...]:
        """Names of the persons, in the order of their numbers."""
        return self._names[0]

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras, in the order of their numbers."""
        return self._names[1]

    @functools.cached_property
    def picture(self) -> np.ndarray:
        """int32 (records,), the row of each in `images()`; -1 for a caption."""
        return np.where(self.modality == TEXT, -1, np.arange(len(self))).astype(np.int32)

    def words(self) -> list[str]:
        """Return the words of every record; empty for images."""
        return self.texts("text")

    def lists(self) -> dict[str, np.ndarray]:
        """Return the queries that the set gives, int32 (queries, 5) by name in its order; empty where it gives none."""
        found, begin = {}, 0
        for name, count in self.manifest["lists"]:
            found[name], begin = np.asarray(self._queries[begin : begin + count]), begin + count
        return found

    def pictures(self) -> Source:
        """Return the images as a source to pack, in the order of `image`; labels are the names of persons."""
        ids, root = self.ids()[: int(np.count_nonzero(self.modality != TEXT))], self.root

        def records() -> Iterator[Record]:
            names = (*self.persons, people_records.DISTRACTOR)  # -1 is the last
            for id, number in zip(ids, self.person.tolist(), strict=False):
                path = os.path.join(root, id)
                yield Record(id, names[number], Path(path), path)

        annotations = tuple(Path(file) for file in self.manifest["annotations"])
        files = (*annotations, *(Path(os.path.join(root, id)) for id in ids))
        return Source(self.kind, self.where, len(ids), records, files)

    @functools.cached_property
    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        try:
            names = json.loads((self.path / "names.json").read_text("utf-8"))
            persons, cameras = tuple(names["persons"]), tuple(names["cameras"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(self.path / "names.json", error) from None
        folders.check_names(self.where, (*persons, *cameras))
        return persons, cameras

    def _map(self) -> None:
        super()._map()
        for name in ("kind", "where", "root", "seconds"):
            setattr(self, name, self.manifest[name])
        for name in _ARRAYS:
            setattr(self, name, self.column(name))
        self._queries = mapped(self.path / "queries.npy")

    def _check_columns(self) -> None:
        n, persons, cameras = len(self), len(self.persons), len(self.cameras)
        above = {
            "person": persons,
            "camera": cameras,
            "place": 1 << 15,
            "modality": len(MODALITIES),
            "role": 3,
            "of": n,
        }
        sound = all(
            n == 0 or (array.min() >= (0 if name in ("modality", "role") else -1) and array.max() < above[name])
            for name, array in ((name, self.column(name)) for name in _ARRAYS)
        )
        asked = self._queries
        sound = sound and asked.dtype == np.int32 and asked.shape[1:] == (len(MODALITIES),)
        sound = sound and len(asked) == sum(count for _, count in self.manifest["lists"])
        if sound and len(asked):
            sound = asked.min() >= -1 and asked.max() < n
            # A query has a record in the place of its modality, or none.
            sound = sound and np.all((asked < 0) | (self.modality[asked] == np.arange(len(MODALITIES))))
        if not sound or not np.all(self.modality[1:] >= self.modality[:-1]):
            raise UserError(str(self.path), "arrays of inconsistent sizes", remedy=REBUILD)


def _write(folder: Path, layout: SetLayout, rows: Records, begin: float) -> None:
    """Bring records into their order, and write them as arrays."""
    if not len(rows):
        raise UserError(layout.where, "no records", "at least one")
    people_records.check_persons(rows)
    modality = np.asarray(rows.modality, np.int8)
    order = np.argsort(modality, kind="stable")
    # Where each record went, and behind them -1 to itself.
    moved = np.full(len(rows) + 1, -1, np.int32)
    moved[order] = np.arange(len(rows), dtype=np.int32)
    persons, person = _numbered(rows.person)
    cameras, camera = _numbered([name or None for name in rows.camera])
    if len(cameras) > np.iinfo(np.int16).max:
        raise UserError(layout.where, f"{len(cameras)} cameras", f"at most {np.iinfo(np.int16).max}")
    hidden = np.asarray([*(rows.places.get(name, -1) for name in cameras), -1], np.int16)
    arrays = {
        "person": person[order],
        "camera": camera[order].astype(np.int16),
        "place": hidden[camera[order]],
        "modality": modality[order],
        "role": np.asarray(rows.role, np.int8)[order],
        "of": moved[np.asarray(rows.of, np.int32)[order]],
    }
    asked = moved[np.asarray([q for some in rows.lists.values() for q in some], np.int32).reshape(-1, 5)]
    with Writer(folder, _COLUMNS) as writer:
        for row, numbers in zip(order.tolist(), zip(*arrays.values(), strict=True), strict=True):
            texts = {"id": rows.ids[row], "text": rows.text[row] if rows.modality[row] == TEXT else ""}
            writer.add({**texts, **dict(zip(arrays, numbers, strict=True))})
        writer.save("queries.npy", asked)
        writer.save_json("names.json", {"persons": persons, "cameras": cameras})
        manifest: dict[str, Json] = {"kind": layout.kind, "where": layout.where}
        manifest |= {"root": os.fspath(layout.root), "annotations": [os.fspath(file) for file in layout.annotations]}
        manifest["records"] = len(rows)
        manifest["lists"] = [[name, len(some)] for name, some in rows.lists.items()]
        manifest["left_out"] = rows.losses()
        manifest["seconds"] = time.perf_counter() - begin
        writer.publish(PeopleIndex, manifest)


def _numbered(names: list[str | None]) -> tuple[list[str], np.ndarray]:
    """Return the names in their order, and of each entry its number, int32; -1 for none."""
    distinct = sorted({name for name in names if name is not None})
    number: dict[str | None, int] = {name: n for n, name in enumerate(distinct)}
    number[None] = -1
    return distinct, np.asarray([number[name] for name in names], np.int32)

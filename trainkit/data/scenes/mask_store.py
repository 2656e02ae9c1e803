"""The classes of every pixel of a set of images: read from whatever the set has once, kept compressed.

Rows of `map_store` (a byte for each pixel: its class, or `IGNORED`) with

| column        | hashed as          | content                                                                      |
|---------------|--------------------|------------------------------------------------------------------------------|
| `id`          | `ids.txt`          | the name of the image in its source                                          |
| `counts`      | `counts.npy`       | int64 (classes + 1,), pixels of each class, and last of those without a label |
| `fingerprint` | `fingerprints.npy` | uint64, BLAKE2b of each mask, for finding duplicates                         |

Names and colours of the classes are in `manifest.json`, and `originals`, SHA-256 of what was packed: names of images,
names of classes, and the classes of all pixels before masks were resized.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from trainkit.data import cache
from trainkit.data.cache import Progress
from trainkit.data.rows.row_files import ABSENT, Column, Form, Layout, Text, is_count, is_list, is_text
from trainkit.data.rows.writer import Writer
from trainkit.data.scenes import files, map_store
from trainkit.data.scenes.lost_objects import Fates, Objects, Tally, fates, resized
from trainkit.data.scenes.map_store import CompressedMaps
from trainkit.data.threads import attempt, each, threads
from trainkit.errors import UserError, listing, number_of
from trainkit.files import Json
from trainkit.interfaces import IGNORED

if TYPE_CHECKING:
    from trainkit.data.scenes.files import Scene
    from trainkit.data.scenes.label_maps import Labels
    from trainkit.data.scenes.sources import SceneSource

FORMAT = "trainkit-masks"
VERSION = 1
"""Raised with any change to how masks are read, so that older ones are not taken for new ones."""

PREPARATION = 3
"""Raised where the same masks are judged otherwise, so that sets packed before are packed again, of the same digest."""


def fingerprint(mask: np.ndarray) -> int:
    """Compute 64 bits of BLAKE2b over the shape and the classes of a mask."""
    state = hashlib.blake2b(repr(mask.shape).encode(), digest_size=8)
    state.update(np.ascontiguousarray(mask, np.uint8).data)
    return int.from_bytes(state.digest(), "little")


def counted(mask: np.ndarray, classes: int) -> np.ndarray:
    """Count the pixels of each class of a mask, and last those without a label: int64 (classes + 1,)."""
    counts = np.bincount(mask.ravel(), minlength=IGNORED + 1)
    return np.append(counts[:classes], counts[IGNORED])


class PackedMasks(CompressedMaps):
    """A packed set of masks opened for reading."""

    FORM = Form(FORMAT, VERSION, "a packed set of masks")
    ENTRIES: ClassVar = {
        "names": lambda names: is_list(names, is_text, range(1, IGNORED + 1)),
        "colours": lambda colours: is_list(colours, lambda colour: _is_numbers(colour, 3, 255)),
        "size": lambda size: size is None or _is_numbers(size, 2, 1 << 24),
        "objects": lambda objects: objects is ABSENT or Objects.read(objects) is not None,
    }
    IDENTITY = ("rows", "names")

    @classmethod
    def layout(cls, manifest: Mapping[str, Json]) -> Layout:
        """Return the columns."""
        return _columns(len(manifest["names"]))

    @property
    def counts(self) -> np.ndarray:
        """int64 (rows, classes + 1), pixels of each class, and last of those without a label."""
        return self.column("counts")

    @property
    def fingerprints(self) -> np.ndarray:
        """uint64 (rows,), `fingerprint` of each mask."""
        return self.column("fingerprint")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return tuple(self.manifest["names"])

    @property
    def objects(self) -> Objects:
        """Counts of the objects in the masks and of those that are left; none of a set that was packed without them."""
        return Objects.read(self.manifest.get("objects")) or Objects()

    def mask(self, row: int) -> np.ndarray:
        """Read the class of every pixel of a row, uint8 (height, width), not to be written to; `IGNORED` for none.

        Raises UserError where it was damaged.
        """
        return self.bytes_of(row)

    def _check_columns(self) -> None:
        super()._check_columns()
        if (count := len(self.manifest["colours"])) not in (0, len(self.names)):
            raise self.damaged("manifest.json", f"colours of {count} classes", f"{len(self.names)}")
        sizes = self.shapes.astype(np.int64).prod(1)
        if (self.counts < 0).any() or not np.array_equal(self.counts.sum(1), sizes):
            raise self.damaged("rows.arrow", "counts that do not match the sizes of masks")


def _columns(classes: int) -> Layout:
    counts = Column("counts", "counts.npy", "int64", classes + 1)
    return [Text("id", "ids.txt"), *map_store.COLUMNS, counts, Column("fingerprint", "fingerprints.npy", "uint64")]


def pack_masks_once(
    source: SceneSource,
    labels: Labels,
    size: tuple[int, int] | None = None,
) -> PackedMasks:
    """Pack the masks of a source where they are not packed yet. Processes that start together make them once.

    `labels` says what the values or colours of files stand for. With `size` (height, width) masks are `resized`.

    Raises UserError naming all that is wrong, and how many: masks of another size than their images, files that cannot
    be read, values or colours that stand for no class.
    """
    made = [FORMAT, VERSION, PREPARATION, source.kind, source.where, dataclasses.astuple(labels), size]
    made += [source.columns] if source.columns else []

    def make(folder: Path, on_progress: Progress) -> None:
        _write(folder, source, labels, size, on_progress)

    return cache.pack_once(
        cache.key(made, source.files), PackedMasks, make, f"packing the masks of {source.where}", "mask"
    )


class _Row(NamedTuple):
    """The mask of an image, prepared."""

    id: str
    original: bytes
    """SHA-256 before it was resized."""
    columns: dict[str, object]
    fates: Fates


def _write(
    folder: Path,
    source: SceneSource,
    labels: Labels,
    size: tuple[int, int] | None,
    on_progress: Progress,
) -> None:
    def prepare(scene: Scene) -> _Row:
        mask, painted = files.read_classes(scene, labels, files.header(scene)[0])
        original = hashlib.sha256(repr(mask.shape).encode() + np.ascontiguousarray(mask).tobytes()).digest()
        found = fates(mask, painted, size)
        mask = mask if size is None else resized(mask, size)
        counts = {"counts": counted(mask, len(labels.names)), "fingerprint": fingerprint(mask)}
        return _Row(scene.id, original, {"id": scene.id, **map_store.packed(mask), **counts}, found)

    ids, originals, bad = [], [], []
    tally = Tally(labels.names, source.is_painted)
    with Writer(folder, _columns(len(labels.names))) as writer:
        for done, row in enumerate(each(attempt(prepare), source.scenes, threads()), start=1):
            on_progress(done, len(source.scenes))
            if isinstance(row, UserError):
                bad.append(str(row))
                continue
            writer.add(row.columns)
            ids.append(row.id)
            originals.append(row.original)
            tally.add(row.id, row.fates)
        if bad:
            found = f"{number_of(len(bad), 'masks that cannot be used', 'mask that cannot be used')}:{listing(bad)}\n"
            raise UserError(source.where, found, remedy="`trainkit data verify` lists all of them")
        manifest = {
            "rows": writer.rows,
            "names": list(labels.names),
            "colours": [list(colour) for colour in labels.colours],
            "size": None if size is None else list(size),
            "objects": dataclasses.asdict(tally.objects()),
            "made_from": f"{source.kind} {Path(source.where).name}",
            "originals": hashlib.sha256(json.dumps([ids, labels.names]).encode() + b"".join(originals)).hexdigest(),
        }
        writer.publish(PackedMasks, manifest)


def _is_numbers(value: Json, length: int, most: int) -> bool:
    return is_list(value, lambda number: is_count(number) and number <= most, (length,))

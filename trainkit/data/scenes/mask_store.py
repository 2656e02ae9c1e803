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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from trainkit.data import cache
from trainkit.data.cache import Progress
from trainkit.data.rows.row_files import ABSENT, Column, Form, Layout, Text, is_count, is_list, is_text
from trainkit.data.rows.writer import Writer, line
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

PREPARATION = 2
"""Raised where the same masks are judged otherwise, so that sets packed before are packed again, of the same digest."""

_NAMED = 20


def fingerprint(mask: np.ndarray) -> int:
    """Compute 64 bits of BLAKE2b over the shape and the classes of a mask."""
    state = hashlib.blake2b(repr(mask.shape).encode(), digest_size=8)
    state.update(np.ascontiguousarray(mask, np.uint8).data)
    return int.from_bytes(state.digest(), "little")


def counted(mask: np.ndarray, classes: int) -> np.ndarray:
    """Count the pixels of each class of a mask, and last those without a label: int64 (classes + 1,)."""
    counts = np.bincount(mask.ravel(), minlength=IGNORED + 1)
    return np.append(counts[:classes], counts[IGNORED])


def compared(scenes: Iterable[Scene]) -> tuple[list[tuple[int, int]], list[str]]:
    """Return height and width of each image, and sentences about masks of another size or without a header.

    Reads headers alone.
    """

    def one(scene: Scene) -> tuple[tuple[int, int], str | None]:
        try:
            picture = files.picture_shape(scene)
            mask = files.mask_shape(scene)
        except UserError as error:
            return (0, 0), str(error)
        return picture, None if mask == picture else of_another_size(scene, picture, mask)

    found = list(each(one, scenes, threads()))
    return [shape for shape, _ in found], [text for _, text in found if text]


def of_another_size(scene: Scene, picture: tuple[int, int], mask: tuple[int, int]) -> str:
    """Return a sentence about a mask that does not cover its image pixel by pixel; heights and widths."""
    said = f"{mask[1]} x {mask[0]} pixels, its image {picture[1]} x {picture[0]}"
    turned = " (is it rotated by its EXIF orientation?)" if mask == picture[::-1] else ""
    return f"{files.mask_where(scene)}: {said}{turned}"


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
    def colours(self) -> tuple[tuple[int, int, int], ...]:
        """Red, green and blue of each class; empty where the set has none."""
        return tuple((red, green, blue) for red, green, blue in self.manifest["colours"])

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width to which all were brought; None where they are as in their files."""
        size = self.manifest["size"]
        return None if size is None else (size[0], size[1])

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
        if len(self.colours) not in (0, len(self.names)):
            raise self.damaged("manifest.json", f"colours of {len(self.colours)} classes", f"{len(self.names)}")
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

    Raises UserError naming all that is wrong, and how many: masks of another size than their images, before any is
    read; files that cannot be read; values or colours that stand for no class.
    """
    made = [FORMAT, VERSION, PREPARATION, source.kind, source.where, labels.key, labels.names, labels.colours, size]
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
    white: bool


def _write(
    folder: Path,
    source: SceneSource,
    labels: Labels,
    size: tuple[int, int] | None,
    on_progress: Progress,
) -> None:
    classes = len(labels.names)
    pictures, bad = compared(source.scenes)
    refuse(source.where, bad, "masks that do not match their images", "mask that does not match its image")

    def one(numbered: tuple[int, Scene]) -> _Row:
        row, scene = numbered
        stored, painted = files.read_objects(scene, labels.coloured)
        mask = labels.classes(stored, files.mask_where(scene))
        # The header of a mask that says it is to be turned.
        if mask.shape != pictures[row]:
            raise UserError(*of_another_size(scene, pictures[row], mask.shape).split(": ", 1))
        original = hashlib.sha256(repr(mask.shape).encode() + np.ascontiguousarray(mask).tobytes()).digest()
        found = fates(mask, painted, size)
        mask = mask if size is None else resized(mask, size)
        counts = counted(mask, classes)
        white = painted is None and labels.drops_white(stored) and int((counts[:-1] > 0).sum()) == 1
        columns = {"id": line(scene.id), **map_store.packed(mask), "counts": counts, "fingerprint": fingerprint(mask)}
        return _Row(scene.id, original, columns, found, white)

    ids, originals = [], []
    tally = Tally(classes, source.is_painted)
    with Writer(folder, _columns(classes)) as writer:
        for done, found in enumerate(each(attempt(one), enumerate(source.scenes), threads()), start=1):
            on_progress(done, len(source.scenes))
            if isinstance(found, UserError):
                bad.append(str(found))
                continue
            writer.add(found.columns)
            ids.append(found.id)
            originals.append(found.original)
            tally.add(found.id, found.fates, found.white)
        refuse(source.where, bad, "masks that cannot be used")
        manifest = {
            "rows": writer.rows,
            "names": list(labels.names),
            "colours": [list(colour) for colour in labels.colours],
            "size": None if size is None else list(size),
            "objects": dataclasses.asdict(tally.objects(labels.names)),
            "made_from": f"{source.kind} {Path(source.where).name}",
            "originals": hashlib.sha256(json.dumps([ids, labels.names]).encode() + b"".join(originals)).hexdigest(),
        }
        writer.publish(PackedMasks, manifest)


def refuse(where: str, bad: Sequence[str], many: str, one: str = "") -> None:
    """Raise UserError that counts errors as `number_of` does and lists the first; nothing where there are none."""
    if bad:
        remedy = "`trainkit data verify` lists all of them"
        raise UserError(where, f"{number_of(len(bad), many, one)}:{listing(bad, _NAMED)}\n", remedy=remedy)


def _is_numbers(value: Json, length: int, most: int) -> bool:
    return is_list(value, lambda number: is_count(number) and number <= most, (length,))

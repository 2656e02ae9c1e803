"""The classes of every pixel of a set of images, and other maps of bytes: read or made once, kept compressed.

Columns of the `rows` of any kind of maps:

| column  | hashed as                 | content                                                      |
|---------|---------------------------|--------------------------------------------------------------|
| `shape` | `shapes.npy`              | int32 (2,), height and width                                 |
| `crc`   | `checksums.npy`           | uint32, CRC-32 of the stream, compared when it is first read |
| `map`   | `maps.bin`, `offsets.npy` | zlib stream of the map, uint8 in rows from the top           |

The length of a map follows from its shape, so a damaged stream fills no memory. Masks (a byte for each pixel: its
class, or `IGNORED`) also have

| column        | hashed as          | content                                                                       |
|---------------|--------------------|-------------------------------------------------------------------------------|
| `id`          | `ids.txt`          | the name of the image in its source                                           |
| `counts`      | `counts.npy`       | int64 (classes + 1,), pixels of each class, and last of those without a label |
| `fingerprint` | `fingerprints.npy` | uint64, BLAKE2b of each mask, for finding duplicates                          |

Names and colours of the classes are in `manifest.json`, and `originals`, SHA-256 of what was packed: names of images,
names of classes, and the classes of all pixels before masks were resized. `objects` counts under `there` the images
whose files have each class, and lists under `turned` the rows whose image EXIF turns without a change of its size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from trainkit.data import cache
from trainkit.data.cache import Progress
from trainkit.data.formats import image_decode
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import ABSENT, REBUILD, Column, Form, Layout, Part, Text, is_count, is_list, is_text
from trainkit.data.rows.writer import Writer
from trainkit.data.scenes import files
from trainkit.data.scenes.augment import nearest
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

PREPARATION = 4
"""Raised where the same masks are judged otherwise, so that sets packed before are packed again, of the same digest."""

MAP_COLUMNS = (
    Column("shape", "shapes.npy", "int32", 2),
    Column("crc", "checksums.npy", "uint32"),
    Part("map", "maps.bin", "offsets.npy"),
)

LEVEL = 6
"""Of zlib. A mask of 480 x 360 (CamVid) takes 4.8 kB and 1.9 ms so, 7.9 kB and 0.6 ms at level 1; reading takes 0.25 ms
either way, and it is written once."""


class CompressedMaps(Rows):
    """Maps of bytes opened for reading."""

    @functools.cached_property
    def shapes(self) -> np.ndarray:
        """int32 (rows, 2), height and width of each map."""
        return self.column("shape")

    def bytes_of(self, row: int) -> np.ndarray:
        """Unpack the map of a row, uint8 (height, width), not to be written to. Raises UserError for a damaged one."""
        stream = self.stored(*self.span("map", row)).tobytes()
        if not self._checked[row]:
            self.compare(row, stream)
            self._checked[row] = True
        height, width = self.shapes[row].tolist()
        unpack = zlib.decompressobj()
        try:
            data = unpack.decompress(stream, height * width + 1)
        except zlib.error as error:
            raise UserError(self.where(row), f"cannot be unpacked ({error})", remedy=REBUILD) from None
        if len(data) != height * width or not unpack.eof:
            found = f"{len(data)} pixels" if unpack.eof else f"more than {height} x {width} pixels"
            raise UserError(self.where(row), found, f"{height} x {width}", REBUILD)
        return np.frombuffer(data, np.uint8).reshape(height, width)

    def _map(self) -> None:
        super()._map()
        self._checked = np.zeros(len(self), bool)

    def _check_columns(self) -> None:
        sizes = self.shapes.astype(np.int64).prod(1)
        if len(self) and (self.shapes.min() < 1 or sizes.max() > image_decode.PIXEL_CAP):
            raise self.damaged("rows.arrow", "impossible sizes")


def packed(values: np.ndarray) -> dict[str, object]:
    """Compress a map, uint8 (height, width), into the columns of a row."""
    stream = zlib.compress(np.ascontiguousarray(values, np.uint8).data, LEVEL)
    return {"shape": values.shape, "crc": zlib.crc32(stream), "map": stream}


def resized(mask: np.ndarray, size: tuple[int, int] | None) -> np.ndarray:
    """Resize a mask to `size` (height, width): every pixel has the class of the one that its centre lies in."""
    if size is None or mask.shape == tuple(size):
        return mask
    rows, columns = map(nearest, mask.shape, size)
    return mask[rows[:, None], columns]


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
        "objects": lambda said: said is ABSENT or _are_objects(said),
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
    def there(self) -> Sequence[int]:
        """How many images have each class before masks are resized."""
        said = self.manifest.get("objects")
        return (self.counts[:, :-1] > 0).sum(0).tolist() if said is None else said.get("there", [])

    @property
    def turned(self) -> Sequence[int]:
        """Rows whose image is turned by its EXIF orientation, and of the same size as before: so may its mask be."""
        return (self.manifest.get("objects") or {}).get("turned", [])

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
        if len(self.there) != len(self.names) or max(self.turned, default=0) > len(self):
            raise self.damaged("manifest.json", "objects that do not fit the set")


def _columns(classes: int) -> Layout:
    counts = Column("counts", "counts.npy", "int64", classes + 1)
    return [Text("id", "ids.txt"), *MAP_COLUMNS, counts, Column("fingerprint", "fingerprints.npy", "uint64")]


def pack_masks_once(source: SceneSource, labels: Labels, size: tuple[int, int] | None = None) -> PackedMasks:
    """Pack the masks of a source where they are not packed yet. Processes that start together make them once.

    `labels` says what the values or colours of files stand for. With `size` (height, width) masks are `resized`.

    Raises UserError naming all that is wrong, and how many: masks of another size than their images, files that cannot
    be read, values or colours that stand for no class.
    """
    made = [FORMAT, VERSION, PREPARATION, source.kind, source.where, dataclasses.astuple(labels), size]

    def make(folder: Path, on_progress: Progress) -> None:
        _write(folder, source, labels, size, on_progress)

    key = cache.key(made, source.files)
    return cache.pack_once(key, PackedMasks, make, f"packing the masks of {source.where}", "mask")


def _write(
    folder: Path, source: SceneSource, labels: Labels, size: tuple[int, int] | None, on_progress: Progress
) -> None:
    def prepare(scene: Scene) -> tuple[dict[str, object], bytes, np.ndarray, bool]:
        """Return the columns of a mask, its SHA-256 before it is resized, which classes it had, and whether its image
        is turned in secret."""
        shape, turn = files.header(scene)
        mask = files.read_classes(scene, labels, shape)
        # By a quarter (5 to 8) shows in the size, unless that is square.
        is_turned = turn in range(2, 9 if shape[0] == shape[1] else 5)
        original = hashlib.sha256(repr(mask.shape).encode() + np.ascontiguousarray(mask).tobytes()).digest()
        had, mask = counted(mask, len(labels.names))[:-1] > 0, resized(mask, size)
        counts = {"counts": counted(mask, len(labels.names)), "fingerprint": fingerprint(mask)}
        return {"id": scene.id, **packed(mask), **counts}, original, had, is_turned

    there = np.zeros(len(labels.names), np.int64)
    ids, originals, turned, bad = list[str](), list[bytes](), list[int](), list[str]()
    with Writer(folder, _columns(len(labels.names))) as writer:
        for scene, row in zip(source.scenes, each(attempt(prepare), source.scenes, threads()), strict=True):
            if isinstance(row, UserError):
                bad.append(str(row))
            else:
                columns, original, had, is_turned = row
                turned += [len(ids)] if is_turned else []
                writer.add(columns)
                originals.append(original)
                ids.append(scene.id)
                there += had
            on_progress(len(ids) + len(bad), len(source))
        if bad:
            found = (
                f"{number_of(len(bad), 'masks that cannot be used', 'mask that cannot be used')}:{listing(bad, 100)}\n"
            )
            raise UserError(source.where, found)
        named = json.dumps([ids, labels.names]).encode()
        manifest = {
            "rows": writer.rows,
            "names": list(labels.names),
            "colours": [list(colour) for colour in labels.colours],
            "size": None if size is None else list(size),
            "objects": {"there": there.tolist(), "turned": turned},
            "made_from": f"{source.kind} {Path(source.where).name}",
            "originals": hashlib.sha256(named + b"".join(originals)).hexdigest(),
        }
        writer.publish(PackedMasks, manifest)


def _are_objects(value: Json) -> bool:
    return isinstance(value, dict) and all(is_list(value.get(of, []), is_count) for of in ("there", "turned"))


def _is_numbers(value: Json, length: int, most: int) -> bool:
    return is_list(value, lambda number: is_count(number) and number <= most, (length,))

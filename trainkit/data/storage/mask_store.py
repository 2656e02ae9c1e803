"""The classes of every pixel of a set of pictures: read from whatever the set has once, kept compressed.

A folder of `compressed_maps` (a byte for each pixel: its class, or `IGNORED`) with

| file               | content                                                                            |
|--------------------|------------------------------------------------------------------------------------|
| `counts.npy`       | int64 (rows, classes + 1), pixels of each class, and last of those without a label |
| `fingerprints.npy` | uint64 (rows,), BLAKE2b of each mask, for finding duplicates                       |
| `ids.txt`          | one line per row: the name of the picture in its source                            |

Names and colours of the classes are in `manifest.json`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.data.scenes import files
from trainkit.data.scenes.augment import nearest
from trainkit.data.storage import cache, hashed_folder, map_store
from trainkit.data.storage.hashed_folder import REBUILD
from trainkit.data.storage.import_images import threads
from trainkit.data.storage.map_store import CompressedMaps
from trainkit.errors import UserError, listing, number_of
from trainkit.interfaces import IGNORED

if TYPE_CHECKING:
    from trainkit.data.scenes.files import Scene
    from trainkit.data.scenes.label_maps import Labels
    from trainkit.data.scenes.sources import SceneSource

_log = logging.getLogger(__name__)

FORMAT = "trainkit-masks"
VERSION = 1
"""Raised with any change to how masks are read, so that older ones are not taken for new ones."""

_NAMED = 20


def fingerprint(mask: np.ndarray) -> int:
    """64 bits of BLAKE2b over the shape and the classes of a mask."""
    state = hashlib.blake2b(repr(mask.shape).encode(), digest_size=8)
    state.update(np.ascontiguousarray(mask, np.uint8).data)
    return int.from_bytes(state.digest(), "little")


def counted(mask: np.ndarray, classes: int) -> np.ndarray:
    """Pixels of each class of a mask, and last of those without a label: int64 (classes + 1,)."""
    counts = np.bincount(mask.ravel(), minlength=IGNORED + 1)
    return np.append(counts[:classes], counts[IGNORED])


def resized(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A mask at `size` (height, width): every pixel has the class of the one that its centre lies in."""
    if mask.shape == tuple(size):
        return mask
    rows, columns = map(nearest, mask.shape, size)
    return mask[rows[:, None], columns]


def compared(scenes: Iterable[Scene]) -> tuple[list[tuple[int, int]], list[str]]:
    """Height and width of each picture, and sentences about masks of another size and about what has no header.

    Reads headers alone.
    """

    def one(scene: Scene) -> tuple[tuple[int, int], str | None]:
        where = files.mask_where(scene)
        try:
            picture = files.picture_shape(scene)
            if scene.mask is None:
                raise UserError(where, "no mask", "one for each picture")
            mask = files.picture_shape(replace(scene, image=scene.mask, where=where))
        except UserError as error:
            return (0, 0), str(error)
        return picture, None if mask == picture else of_another_size(scene, picture, mask)

    found = list(map_store.each(one, scenes, threads()))
    return [shape for shape, _ in found], [text for _, text in found if text]


def of_another_size(scene: Scene, picture: tuple[int, int], mask: tuple[int, int]) -> str:
    """A sentence about a mask that does not cover its picture pixel by pixel; heights and widths."""
    said = f"{mask[1]} x {mask[0]} pixels, its picture {picture[1]} x {picture[0]}"
    turned = " (is that turned by its EXIF orientation?)" if mask == picture[::-1] else ""
    return f"{files.mask_where(scene)}: {said}{turned}"


class PackedMasks(CompressedMaps):
    """A packed set of masks opened for reading."""

    counts: np.ndarray
    """int64 (rows, classes + 1), pixels of each class, and last of those without a label."""
    fingerprints: np.ndarray
    """uint64 (rows,), `fingerprint` of each mask."""

    def __init__(self, path: Path | str):
        """Open and check: sizes of all files, hashes of the small ones, that they fit together. Raises UserError."""
        super().__init__(Path(path), _read_manifest(Path(path)))

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

    def ids(self) -> list[str]:
        """The name of every row in its source."""
        return hashed_folder.lines(self.path / "ids.txt", len(self))

    def where(self, row: int) -> str:
        """A row's place in words, for messages."""
        try:
            return f"{self.path}, row {row} ({self.ids()[row]})"
        except (OSError, IndexError, UnicodeDecodeError):
            return f"{self.path}, row {row}"

    def mask(self, row: int) -> np.ndarray:
        """Classes of the pixels of a row, uint8 (height, width), not to be written to; `IGNORED` where there is none.

        Raises UserError where it was damaged.
        """
        return self.bytes_of(row)

    def _map(self) -> None:
        super()._map()
        rows, classes = len(self), len(self.names)
        self.counts = self._array("counts.npy", "int64", (rows, classes + 1))
        self.fingerprints = self._array("fingerprints.npy", "uint64", (rows,))
        sizes = self.shapes.astype(np.int64).prod(1)
        if (np.asarray(self.counts) < 0).any() or not np.array_equal(self.counts.sum(1), sizes):
            raise UserError(str(self.path / "counts.npy"), "counts that do not fit the sizes of masks", remedy=REBUILD)


def pack_masks_once(
    source: SceneSource,
    labels: Labels,
    size: tuple[int, int] | None = None,
) -> PackedMasks:
    """The masks of a source in the packed form, made when they are not there yet. Processes make them once together.

    `labels` says what the values or colours of files stand for. With `size` (height, width) masks are `resized`.

    Raises UserError naming all that is wrong, and how many: masks of another size than their pictures, before any is
    read; files that cannot be read; values or colours that stand for no class.
    """
    made = [FORMAT, VERSION, source.kind, source.where, labels.key, labels.names, labels.colours, size]
    folder = cache.place(cache.key(made, source.files))

    def make() -> None:
        begin = time.perf_counter()
        _write(folder, source, labels, size)
        _log.info("packed the masks of %s in %.1f s, once", source.where, time.perf_counter() - begin)

    cache.make_once(folder, lambda path: (path / "manifest.json").is_file(), make)
    return PackedMasks(folder)


def digest_of(manifest: Mapping[str, Any]) -> str:
    """One SHA-256 for a packed set of masks, from the names of its classes and the hashes of its files."""
    said, files = [manifest["rows"], manifest["names"]], manifest["files"]
    lines = [FORMAT, str(VERSION), json.dumps(said), *(f"{name} {files[name]['sha256']}" for name in sorted(files))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _write(
    folder: Path,
    source: SceneSource,
    labels: Labels,
    size: tuple[int, int] | None,
) -> None:
    classes = len(labels.names)
    pictures, bad = compared(source.scenes)
    refuse(source.where, bad, "masks that do not fit their pictures", "mask that does not fit its picture")

    def one(numbered: tuple[int, Scene]) -> tuple[str, tuple[int, int], bytes, np.ndarray, int] | UserError:
        row, scene = numbered
        try:
            mask = files.classes_of(scene, labels)
        except UserError as error:
            return error
        # The header of a mask that says it is to be turned.
        if mask.shape != pictures[row]:
            return UserError(*of_another_size(scene, pictures[row], mask.shape).split(": ", 1))
        mask = mask if size is None else resized(mask, size)
        return scene.id, mask.shape, map_store.compress(mask), counted(mask, classes), fingerprint(mask)

    ids, counts, prints = [], [], []
    with map_store.Writer(folder) as writer:
        for found in map_store.each(one, enumerate(source.scenes), threads()):
            if isinstance(found, UserError):
                bad.append(str(found))
                continue
            id, shape, stream, own, mark = found
            writer.add(shape, stream)
            ids.append(id)
            counts.append(own)
            prints.append(mark)
        refuse(source.where, bad, "masks that cannot be used")
        writer.save("counts.npy", np.asarray(counts, np.int64).reshape(-1, classes + 1))
        writer.save("fingerprints.npy", np.asarray(prints, np.uint64))
        lines = (name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") for name in ids)
        (writer.folder / "ids.txt").write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "names": list(labels.names),
            "colours": [list(colour) for colour in labels.colours],
            "size": None if size is None else list(size),
            "made_from": f"{source.kind} {Path(source.where).name}",
        }
        writer.finish(manifest, digest_of)


def refuse(where: str, bad: Sequence[str], many: str, one: str = "") -> None:
    """Raise UserError that counts mistakes as `number_of` does and lists the first; nothing where there are none."""
    if bad:
        remedy = "trainkit data verify names all of them"
        raise UserError(where, f"{number_of(len(bad), many, one)}:{listing(bad, _NAMED)}\n", remedy=remedy)


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = hashed_folder.read_manifest(path, FORMAT, VERSION, "a packed set of masks", "trainkit")
    names, colours, size = (manifest.get(key, "") for key in ("names", "colours", "size"))
    wrong = {
        "rows": type(manifest.get("rows")) is not int or manifest["rows"] < 1,
        "names": not isinstance(names, list)
        or not 1 <= len(names) <= IGNORED
        or not all(isinstance(name, str) for name in names),
        "colours": not isinstance(colours, list)
        or len(colours) not in (0, len(names))
        or not all(_is_numbers(colour, 3, 255) for colour in colours),
        "size": size is not None and not _is_numbers(size, 2, 1 << 24),
    }
    for key in wrong:
        if wrong[key]:
            raise UserError(str(path / "manifest.json"), f"{key}: {manifest.get(key)!r}"[:200], remedy=REBUILD)
    needed = [*map_store.FILES, "counts.npy", "fingerprints.npy", "ids.txt"]
    hashed_folder.check_entries(path, manifest, needed)
    hashed_folder.check_digest(path, manifest, digest_of(manifest))
    return manifest


def _is_numbers(value: object, length: int, most: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(type(n) is int and 0 <= n <= most for n in value)

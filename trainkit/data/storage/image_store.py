"""The packed form of a set of images: made once, memory-mapped, and able to say whether it is still what was written.

A folder with

| file               | content                                                                                  |
|--------------------|------------------------------------------------------------------------------------------|
| `images.npy`       | store `decoded`: uint8 (rows, 3, height, width)                                          |
| `images.bin`, `offsets.npy` | store `encoded`: images end to end; int64 (rows + 1,) where each begins       |
| `labels.npy`       | int64 (rows,), 0 .. classes-1; -1 in evaluation sets, which have no classes              |
| `checksums.npy`    | uint32 (rows,), CRC-32 of each row of the images as stored, checked when it is first read |
| `contents.npy`     | uint64 (rows,), BLAKE2b of each row's pixels, for finding duplicates                      |
| `ids.txt`          | one line per row: the name it had in its source                                          |
| `names.json`       | class names: the labels of the source in the order of our class numbers                  |
| `groups.npy`, `groups.json` | only where groups are known: int64 (rows,), which person, video or alphabet a  |
|                    | row is of, and the names of these                                                        |
| `protocol.*.npy`   | evaluation sets: the fields of their protocol                                            |
| `manifest.json`    | version, counts, size and SHA-256 of every file, and the digest of the whole; beside it  |
|                    | `originals`, SHA-256 of what was packed: files, labels, groups and protocol              |

All images are of one size, or (store `encoded` only) each keeps its own.

Channels come first because that is what networks take: reading 128 shuffled 112 px images costs 3 us each this way
and 17 us with channels last.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np

from trainkit.data.formats import image_decode
from trainkit.data.loader import thread_pool
from trainkit.data.storage import hashed_folder
from trainkit.data.storage.hashed_folder import REBUILD, FolderWriter, Form, RowFolder
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification, Pairs, Protocol, Templates
from trainkit.files import Json

FORMAT = "trainkit-packed"
VERSION = 1
DECODED_LIMIT = 2 << 30
"""Sets below this many bytes of pixels are stored decoded: they fit the page cache of any training machine."""

Store = Literal["decoded", "encoded"]

_log = logging.getLogger(__name__)
_NEW, _CHECKED, _PLAIN = 0, 1, 2
"""Of a row: not read yet by this process, or is what was written; a JPEG that other decoders read as Pillow does."""
_PROOFS = 16
"""Images whose pixels are compared with those imported before a faster decoder than Pillow's is believed."""
_COPIED, _DECODED = 1 << 20, 1 << 16
"""Bytes of pixels from which a thread of their own copies, or decodes, faster: each takes 0.1 ms or more."""
_TURNS = 8
"""Slices a thread that decodes gets of a batch."""

_PROTOCOLS = {"Pairs": Pairs, "Templates": Templates, "Identification": Identification}


def is_packed(path: Path) -> bool:
    """Return True for a folder with a manifest."""
    return (path / "manifest.json").is_file()


def content(pixels: np.ndarray) -> int:
    """Compute a 64-bit fingerprint of an image's pixels, uint8 (3, height, width)."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=8).digest(), "little")


class Packed(RowFolder):
    """A packed set opened for reading."""

    FORM = Form(FORMAT, VERSION, "a packed set", "trainkit data import")

    @property
    def store(self) -> Store:
        """Form in which the images are kept."""
        return self.manifest["store"]

    @property
    def classes(self) -> int:
        """Number of classes; 0 in evaluation sets."""
        return self.manifest["classes"]

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of every image; None where images keep their own sizes."""
        return _size(self.manifest["image_size"])

    @property
    def image_size(self) -> int:
        """Side of every image of a set of squares. Raises ValueError for other sets."""
        if self.size is None or self.size[0] != self.size[1]:
            raise ValueError(f"{self.path} holds images of {describe(self.size)}, not squares of one size")
        return self.size[0]

    @property
    def originals(self) -> str | None:
        """SHA-256 of the images as they were before they were prepared, and of ids, labels, groups and protocol.

        Equal for sets of the same files that were packed in other sizes. None of a set that was packed without it.
        """
        found = self.manifest.get("originals")
        return found if isinstance(found, str) else None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The label each class had in its source."""
        return hashed_folder.listed(self.path / "names.json")

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups (people, videos, alphabets); empty where the source knew none."""
        return () if self.groups is None else hashed_folder.listed(self.path / "groups.json")

    def protocol(self) -> Protocol | None:
        """Protocol by which this set is evaluated; None for a training set."""
        name = self.manifest["protocol"]
        if name is None:
            return None
        kind = _PROTOCOLS[name]
        fields = {
            field: hashed_folder.mapped(self.path / f"protocol.{field}.npy") for field in kind.__dataclass_fields__
        }
        try:
            return kind(**fields)
        except ValueError as error:
            raise UserError(str(self.path), f"damaged protocol ({error})", remedy=REBUILD) from None

    def encoded(self, row: int) -> bytes:
        """Return the image of a row as it is stored; pixels of a decoded set."""
        if self.store == "decoded":
            return self._images[row].tobytes()
        begin, end = int(self._offsets[row]), int(self._offsets[row + 1])
        return self._images[begin:end].tobytes()

    def picture(self, row: int) -> np.ndarray:
        """Read one row of any set, uint8 (height, width, 3). Raises UserError where it was damaged."""
        if self.store == "decoded":
            return np.ascontiguousarray(self.fetch(np.asarray([row]))[0].transpose(1, 2, 0))
        if not 0 <= row < len(self):
            raise ValueError(f"row {row} of a set of {len(self)}")
        return self._decode(row)

    def pictures(self, rows: np.ndarray) -> list[np.ndarray]:
        """Read `rows` of any set by several threads, each as `image` does."""
        found = [np.empty(0, np.uint8)] * len(rows)

        def read(part: slice) -> None:
            found[part] = [self.picture(row) for row in rows[part].tolist()]

        thread_pool.in_parts(read, len(rows), 1, _TURNS)
        return found

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        """Read `rows` of a set of one size, a fresh uint8 array (rows, 3, height, width).

        Raises UserError at a row that was damaged, ValueError where images keep their own sizes.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise ValueError(f"rows {rows.min()} .. {rows.max()} of a set of {len(self)}")
        if (size := self.size) is None:
            raise ValueError(f"{self.path}: images of their own sizes are read one by one")
        images = np.empty((len(rows), 3, *size), np.uint8)

        def read(part: slice) -> None:
            if self.store == "decoded":
                self._copy(rows[part], images[part])
            else:
                self._decode_all(rows[part], images[part], image_decode.Room.of_thread(size))

        alike, turns = (_COPIED, 1) if self.store == "decoded" else (_DECODED, _TURNS)
        thread_pool.in_parts(read, len(rows), max(1, alike // (3 * size[0] * size[1])), turns)
        return images

    def _copy(self, rows: np.ndarray, images: np.ndarray) -> None:
        np.take(self._images, rows, axis=0, out=images, mode="clip")  # with another mode it would copy them twice
        for position in np.flatnonzero(self._known[rows] == _NEW):
            self._check_row(int(rows[position]), images[position].data)

    def _decode_all(self, rows: np.ndarray, images: np.ndarray, room: image_decode.Room) -> None:
        stored = self._images
        # Asked of all rows at once, and the same few words for each: what Python does for an image keeps other threads
        # from the interpreter. With a function and a question for each, two threads read 7 % fewer.
        decoder = self._decoder if self._proved >= _PROOFS and (self._known[rows] == _PLAIN).all() else None
        ends = list(zip(self._offsets[rows].tolist(), self._offsets[rows + 1].tolist(), strict=True))
        for first in range(0, len(rows), len(room.places)):
            some, pixels = slice(first, first + len(room.places)), None
            if decoder is not None:
                places = zip(room.places, ends[some], strict=False)
                with contextlib.suppress(RuntimeError, ValueError):
                    pixels = [decoder(stored[begin:end], place) for place, (begin, end) in places]
            if pixels is None:
                pixels = [
                    self._decode(row, place) for row, place in zip(rows[some].tolist(), room.places, strict=False)
                ]
            room.put(pixels, images[some])

    def _decode(self, row: int, room: np.ndarray | None = None) -> np.ndarray:
        """Decode an encoded row, (height, width, 3); where room is given, maybe there, (height, width, 4)."""
        if self._known[row] == _NEW:
            self._check_row(row, self.encoded(row))
        if self._known[row] == _PLAIN and self._decoder is not None:
            try:
                begin, end = self._offsets[row : row + 2].tolist()
                pixels = self._decoder(self._images[begin:end], room)
            except (RuntimeError, ValueError):
                pixels = None
            if pixels is not None and (self._proved >= _PROOFS or self._proves(row, pixels)):
                return pixels
        # The place is put into words only when needed: it reads the list of ids.
        try:
            pixels = image_decode.decode(self.encoded(row), "")
            return pixels if self.size is None else image_decode.fit(pixels, self.size, "")
        except UserError as error:
            raise UserError(self.where(row), error.found, error.expected, REBUILD) from None

    def _proves(self, row: int, pixels: np.ndarray) -> bool:
        """Return True for the pixels that were imported; where they are others, this decoder is not asked again."""
        if content(pixels[:, :, :3].transpose(2, 0, 1)) == int(self._contents[row]):
            self._proved += 1
            return True
        _log.warning("%s: the fast decoder gives other pixels than the import; using Pillow", self.where(row))
        self._decoder = None
        return False

    def _check_row(self, row: int, data: bytes | memoryview) -> None:
        # CRC-32 takes 16 us for a 112 px image, more than reading it; so each process checks a row once.
        if zlib.crc32(data) != int(self._checksums[row]):
            raise UserError(self.where(row), "is not what was written (checksum differs)", remedy=REBUILD)
        plain = isinstance(data, bytes) and (shape := image_decode.plain_jpeg(data)) and self.size in (None, shape)
        self._known[row] = _PLAIN if plain else _CHECKED

    def _map(self) -> None:
        rows = len(self)
        if self.store == "encoded":
            self._images, self._offsets = self.pieces("images.bin", rows)
        elif self.size is not None:
            self._images = self.array("images.npy", "uint8", (rows, 3, *self.size))
        self._checksums = self.array("checksums.npy", "uint32", (rows,))
        self._known, self._proved = np.zeros(rows, np.uint8), 0
        self.labels = self.array("labels.npy", "int64", (rows,))
        self._check_numbers("label", self.labels, 0 if self.classes else -1, self.classes - 1)
        self.groups: np.ndarray | None = None
        if "groups.npy" in self.manifest["files"]:
            self.groups = self.array("groups.npy", "int64", (rows,))
            self._check_numbers("group", self.groups, 0, len(self.group_names) - 1)

    def _check_numbers(self, what: str, numbers: np.ndarray, least: int, most: int) -> None:
        """Raise UserError naming the first row whose number is not from `least` to `most`."""
        if len(numbers) and (numbers.min() < least or numbers.max() > most):
            row = int(np.flatnonzero((numbers < least) | (numbers > most))[0])
            raise UserError(self.where(row), f"{what} {numbers[row]}", f"{least} to {most}", REBUILD)

    @functools.cached_property
    def _decoder(self) -> image_decode.Decoder | None:
        return image_decode.plain_decoder()

    @functools.cached_property
    def _contents(self) -> np.ndarray:
        return self.contents()

    def contents(self) -> np.ndarray:
        """Map the fingerprint of each row's pixels, uint64 (rows,)."""
        return hashed_folder.mapped(self.path / "contents.npy")

    @classmethod
    def identity(cls, manifest: Mapping[str, Json]) -> list[str]:
        """Return the numbers of rows and classes, and the size of images."""
        return ["x".join(map(str, (manifest["rows"], manifest["classes"], *_sides(manifest["image_size"]))))]

    def _check_manifest(self, manifest: dict[str, Json]) -> set[str]:
        store, protocol = manifest.get("store"), manifest.setdefault("protocol", None)
        for key in ("rows", "classes"):
            count = manifest.get(key)
            self.refuse_entries(manifest, {key: type(count) is not int or count < 0}, "a count")
        self.refuse_entries(manifest, {"store": store not in ("decoded", "encoded")}, "decoded or encoded")
        self.refuse_entries(manifest, {"protocol": protocol not in (None, *_PROTOCOLS)}, " or ".join(_PROTOCOLS))
        size, expected = manifest.get("image_size", ""), "a side, [height, width] or null"
        self.refuse_entries(
            manifest, {"image_size": not _is_size(size) or (size is None and store == "decoded")}, expected
        )
        large = math.prod(_size(size) or ()) > image_decode.PIXEL_CAP
        self.refuse_entries(manifest, {"image_size": large}, f"at most {image_decode.PIXEL_CAP} pixels")
        needed = {"labels.npy", "checksums.npy", "contents.npy", "ids.txt", "names.json"}
        needed |= {"images.npy"} if store == "decoded" else {"images.bin", "offsets.npy"}
        if protocol is not None:
            needed |= {f"protocol.{field}.npy" for field in _PROTOCOLS[protocol].__dataclass_fields__}
        files = manifest.get("files")
        return needed | ({"groups.npy", "groups.json"} if isinstance(files, dict) and "groups.npy" in files else set())


def describe(size: tuple[int, int] | None) -> str:
    """Describe a size: `32 x 64` (height x width), or `their own sizes`."""
    return "their own sizes" if size is None else f"{size[0]} x {size[1]}"


def _size(entry: int | list[int] | None) -> tuple[int, int] | None:
    # Squares are written as one number, as they were when there was nothing else.
    return None if entry is None else (entry, entry) if isinstance(entry, int) else (entry[0], entry[1])


def _entry(size: tuple[int, int] | None) -> int | list[int] | None:
    return None if size is None else size[0] if size[0] == size[1] else list(size)


def _is_size(entry: object) -> bool:
    """Return True for a side, two sides, or None."""
    sides = entry if isinstance(entry, list) and len(entry) == 2 else [entry]
    return entry is None or all(type(side) is int and side >= 1 for side in sides)


def _sides(entry: int | list[int] | None) -> list[int]:
    return [] if entry is None else [entry] if isinstance(entry, int) else entry


class Writer(FolderWriter):
    """Writes a packed set."""

    def __init__(self, out: Path, *, size: tuple[int, int] | None, store: Store):
        if size is None and store == "decoded":
            raise ValueError("images of their own sizes are stored encoded")
        self._file = "images.npy" if store == "decoded" else "images.bin"
        super().__init__(out, [self._file])
        self.size, self.store = size, store
        self.rows = 0
        self._offsets, self._checksums, self._contents = [0], [], []
        self._originals: list[bytes] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self._images = self._files[self._file]
        self._images.write(self._header())
        return self

    def _header(self) -> bytes:
        """Return a npy header of fixed length, so that the number of rows can be put in when it is known."""
        if self.store == "encoded" or self.size is None:
            return b""
        text = (
            f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({self.rows}, 3, {self.size[0]}, {self.size[1]}), }}"
        )
        return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode("ascii") + b"\n"

    def add(self, pixels: np.ndarray, encoded: bytes | None = None, original: bytes = b"") -> None:
        """Add one image: uint8 (3, height, width), and its encoded bytes where the store keeps those.

        `original` is a hash of what it was before it was prepared.
        """
        if pixels.shape != (3, *(self.size or pixels.shape[1:3])) or pixels.dtype != np.uint8:
            raise ValueError(f"{pixels.dtype} {pixels.shape} in a set of images of {describe(self.size)}")
        pixels = np.ascontiguousarray(pixels)
        data = (
            pixels.tobytes() if self.store == "decoded" else encoded or image_decode.encode(pixels.transpose(1, 2, 0))
        )
        self._images.write(data)
        self._offsets.append(self._offsets[-1] + len(data))
        self._checksums.append(zlib.crc32(data))
        self._contents.append(content(pixels))
        if original:
            self._originals.append(original)
        self.rows += 1

    def finish(
        self,
        *,
        labels: np.ndarray,
        class_names: Sequence[str],
        ids: Sequence[str],
        groups: np.ndarray | None = None,
        group_names: Sequence[str] = (),
        protocol: Protocol | None = None,
        made_from: str = "",
    ) -> Packed:
        """Write everything but the images, make it durable, and give it its name."""
        if not len(labels) == len(ids) == self.rows:
            raise ValueError(f"{self.rows} images, {len(labels)} labels, {len(ids)} ids")
        if groups is not None and len(groups) != self.rows:
            raise ValueError(f"{self.rows} images, {len(groups)} groups")
        if self.store == "decoded":
            self._images.seek(0)
            self._images.write(self._header())
        else:
            self.save("offsets.npy", np.asarray(self._offsets, np.int64))
        self.save("labels.npy", np.asarray(labels, np.int64))
        self.save("checksums.npy", np.asarray(self._checksums, np.uint32))
        self.save("contents.npy", np.asarray(self._contents, np.uint64))
        self.save_lines("ids.txt", ids)
        (self.folder / "names.json").write_bytes(json.dumps(list(class_names)).encode("utf-8"))
        if groups is not None:
            self.save("groups.npy", np.asarray(groups, np.int64))
            (self.folder / "groups.json").write_bytes(json.dumps(list(group_names)).encode("utf-8"))
        for field in protocol.__dataclass_fields__ if protocol is not None else ():
            self.save(f"protocol.{field}.npy", getattr(protocol, field))
        manifest = {
            "store": self.store,
            "rows": self.rows,
            "classes": len(class_names),
            "image_size": _entry(self.size),
            "protocol": None if protocol is None else type(protocol).__name__,
            "made_from": made_from,
        }
        if len(self._originals) == self.rows:
            arrays = [np.asarray(labels, np.int64), *([] if groups is None else [np.asarray(groups, np.int64)])]
            arrays += (
                [np.asarray(getattr(protocol, name)) for name in protocol.__dataclass_fields__] if protocol else []
            )
            manifest["originals"] = self._hash_originals([*ids, "", *class_names, "", *group_names], arrays)
        self.publish(Packed, manifest)
        return Packed(self.out)

    def _hash_originals(self, words: Sequence[str], arrays: Sequence[np.ndarray]) -> str:
        hashed = hashlib.sha256(json.dumps(list(words)).encode())
        for array in arrays:
            hashed.update(f"\n{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
        for original in self._originals:
            hashed.update(original)
        return hashed.hexdigest()

"""The packed form of a set of pictures: made once, memory-mapped, and able to say whether it is still what was written.

A folder with

| file               | content                                                                                  |
|--------------------|------------------------------------------------------------------------------------------|
| `images.npy`       | store `decoded`: uint8 (rows, 3, height, width)                                          |
| `images.bin`, `offsets.npy` | store `encoded`: pictures end to end; int64 (rows + 1,) where each begins       |
| `labels.npy`       | int64 (rows,), 0 .. classes-1; -1 in evaluation sets, which have no classes              |
| `checksums.npy`    | uint32 (rows,), CRC-32 of each row of the images as stored, checked when it is first read |
| `contents.npy`     | uint64 (rows,), BLAKE2b of each row's pixels, for finding duplicates                      |
| `ids.txt`          | one line per row: the name it had in its source                                          |
| `names.json`       | class names: the labels of the source in the order of our class numbers                  |
| `groups.npy`, `groups.json` | only where groups are known: int64 (rows,), which person, video or alphabet a  |
|                    | row is of, and the names of these                                                        |
| `protocol.*.npy`   | evaluation sets: the fields of their protocol                                            |
| `manifest.json`    | version, counts, size and SHA-256 of every file, and the digest of the whole             |

All pictures are of one size, or (store `encoded` only) each keeps its own.

Channels come first because that is what networks take: reading 128 shuffled 112 px pictures costs 3 us each this way
and 17 us with channels last.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from trainkit.data.formats import image_decode
from trainkit.data.loader import thread_pool
from trainkit.data.storage import hashed_folder
from trainkit.data.storage.hashed_folder import REBUILD
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification, Pairs, Protocol, Templates

FORMAT = "trainkit-packed"
VERSION = 1
DECODED_LIMIT = 2 << 30
"""Sets below this many bytes of pixels are stored decoded: they fit the page cache of any training machine."""

Store = Literal["decoded", "encoded"]

_log = logging.getLogger(__name__)
_NEW, _CHECKED, _PLAIN = 0, 1, 2
"""Of a row: not read yet by this process, or is what was written; a JPEG that other decoders read as Pillow does."""
_PROOFS = 16
"""Pictures whose pixels are compared with those imported before a faster decoder than Pillow's is believed."""
_COPIED, _DECODED = 1 << 20, 1 << 16
"""Bytes of pixels from which a thread of their own copies, or decodes, faster: each takes 0.1 ms or more."""
_TURNS = 8
"""Slices a thread that decodes gets of a batch."""

_PROTOCOLS = {"Pairs": Pairs, "Templates": Templates, "Identification": Identification}


def is_packed(path: Path) -> bool:
    """Whether `path` is a folder with the manifest of a packed set."""
    return (path / "manifest.json").is_file()


def content(pixels: np.ndarray) -> int:
    """A 64-bit fingerprint of a picture's pixels, uint8 (3, height, width)."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(pixels), digest_size=8).digest(), "little")


def digest_of(files: Mapping[str, Mapping[str, Any]], shape: Sequence[int]) -> str:
    """One SHA-256 for a packed set, from the hashes of its files."""
    lines = [FORMAT, str(VERSION), "x".join(map(str, shape)), *(f"{n} {files[n]['sha256']}" for n in sorted(files))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Packed(hashed_folder.Hashed):
    """A packed set opened for reading."""

    def __init__(self, path: Path | str):
        """Open and check: sizes of all files, hashes of the small ones, shapes, labels. Raises UserError."""
        super().__init__(Path(path), _read_manifest(Path(path)))
        self._check_arrays()

    def __len__(self) -> int:
        return self.manifest["rows"]

    @property
    def store(self) -> Store:
        """How the pictures are kept."""
        return self.manifest["store"]

    @property
    def classes(self) -> int:
        """Number of classes; 0 in evaluation sets."""
        return self.manifest["classes"]

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of every picture; None where pictures keep their own sizes."""
        return _size(self.manifest["image_size"])

    @property
    def image_size(self) -> int:
        """Side of every picture of a set of squares. Raises ValueError for other sets."""
        if self.size is None or self.size[0] != self.size[1]:
            raise ValueError(f"{self.path} holds pictures of {describe(self.size)}, not squares of one size")
        return self.size[0]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The label each class had in its source."""
        return hashed_folder.listed(self.path / "names.json")

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups (people, videos, alphabets); empty where the source knew none."""
        return () if self.groups is None else hashed_folder.listed(self.path / "groups.json")

    def ids(self) -> list[str]:
        """The name of every row in its source."""
        return hashed_folder.lines(self.path / "ids.txt", len(self))

    def where(self, row: int) -> str:
        """A row's place in words, for messages."""
        try:
            return f"{self.path}, row {row} ({self.ids()[row]})"
        except (OSError, IndexError, UnicodeDecodeError):
            return f"{self.path}, row {row}"

    def protocol(self) -> Protocol | None:
        """How this set is scored; None for a training set."""
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
        """The picture of a row as it is stored; pixels of a decoded set."""
        if self.store == "decoded":
            return self._images[row].tobytes()
        begin, end = int(self._offsets[row]), int(self._offsets[row + 1])
        return self._images[begin:end].tobytes()

    def picture(self, row: int) -> np.ndarray:
        """Pixels of one row of any set, uint8 (height, width, 3). Raises UserError where it was damaged."""
        if self.store == "decoded":
            return np.ascontiguousarray(self.fetch(np.asarray([row]))[0].transpose(1, 2, 0))
        if not 0 <= row < len(self):
            raise ValueError(f"row {row} of a set of {len(self)}")
        return self._decode(row)

    def pictures(self, rows: np.ndarray) -> list[np.ndarray]:
        """Pixels of `rows` of any set, each as `picture` gives it, read by several threads."""
        found: list[Any] = [None] * len(rows)

        def read(part: slice) -> None:
            found[part] = [self.picture(row) for row in rows[part].tolist()]

        thread_pool.in_parts(read, len(rows), 1, _TURNS)
        return found

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        """Pixels of `rows` of a set of one size, a fresh uint8 array (rows, 3, height, width).

        Raises UserError at a row that was damaged, ValueError where pictures keep their own sizes.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise ValueError(f"rows {rows.min()} .. {rows.max()} of a set of {len(self)}")
        if self.size is None:
            raise ValueError(f"{self.path}: pictures of their own sizes are read one by one, with picture()")
        images = np.empty((len(rows), 3, *self.size), np.uint8)

        def read(part: slice) -> None:
            (self._copy if self.store == "decoded" else self._decode_all)(rows[part], images[part])

        alike, turns = (_COPIED, 1) if self.store == "decoded" else (_DECODED, _TURNS)
        thread_pool.in_parts(read, len(rows), max(1, alike // (3 * self.size[0] * self.size[1])), turns)
        return images

    def _copy(self, rows: np.ndarray, images: np.ndarray) -> None:
        np.take(self._images, rows, axis=0, out=images, mode="clip")  # with another mode it would copy them twice
        for position in np.flatnonzero(self._known[rows] == _NEW):
            self._check_row(int(rows[position]), images[position])

    def _decode_all(self, rows: np.ndarray, images: np.ndarray) -> None:
        room, stored = image_decode.Room.of_thread(self.size), self._images
        # Asked of all rows at once, and the same few words for each: what Python does for a picture keeps other threads
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
        """Pixels of an encoded row, (height, width, 3); where room is given, maybe there, (height, width, 4)."""
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
        """Whether these are the pixels that were imported; where not, this decoder is not asked again."""
        if content(pixels[:, :, :3].transpose(2, 0, 1)) == int(self._contents[row]):
            self._proved += 1
            return True
        _log.warning("%s: the fast decoder reads it otherwise than it was imported; Pillow takes over", self.where(row))
        self._decoder = None
        return False

    def _check_row(self, row: int, data: bytes | np.ndarray) -> None:
        # CRC-32 takes 16 us for a 112 px picture, more than reading it; so each process checks a row once.
        if zlib.crc32(data) != int(self._checksums[row]):
            raise UserError(self.where(row), "is not what was written (checksum differs)", remedy=REBUILD)
        plain = self.store == "encoded" and (shape := image_decode.plain_jpeg(data)) and self.size in (None, shape)
        self._known[row] = _PLAIN if plain else _CHECKED

    def _map(self) -> None:
        # Views as plain arrays: a piece of a mapped one takes numpy six times as long.
        if self.store == "decoded":
            self._images = hashed_folder.mapped(self.path / "images.npy").view(np.ndarray)
        else:
            empty = self.manifest["files"]["images.bin"]["bytes"] == 0
            mapped = None if empty else np.memmap(self.path / "images.bin", dtype=np.uint8, mode="r")
            self._images = np.empty(0, np.uint8) if empty else mapped.view(np.ndarray)
            self._offsets = hashed_folder.mapped(self.path / "offsets.npy").view(np.ndarray)
        self.labels = hashed_folder.mapped(self.path / "labels.npy")
        self.groups: np.ndarray | None = (
            hashed_folder.mapped(self.path / "groups.npy") if "groups.npy" in self.manifest["files"] else None
        )
        self._checksums = hashed_folder.mapped(self.path / "checksums.npy")
        self._known = np.zeros(len(self), np.uint8)
        self._proved = 0

    @functools.cached_property
    def _decoder(self) -> pictures.Decoder | None:
        return image_decode.plain_decoder()

    @functools.cached_property
    def _contents(self) -> np.ndarray:
        return self.contents()

    def contents(self) -> np.ndarray:
        """Fingerprint of each row's pixels, uint64 (rows,)."""
        return hashed_folder.mapped(self.path / "contents.npy")

    def _check_arrays(self) -> None:
        rows = len(self)
        expected: dict[str, tuple[np.ndarray, tuple[int, ...], str]] = {
            "labels.npy": (self.labels, (rows,), "int64"),
            "checksums.npy": (self._checksums, (rows,), "uint32"),
        }
        if self.store == "decoded":
            expected["images.npy"] = (self._images, (rows, 3, *self.size), "uint8")
        else:
            expected["offsets.npy"] = (self._offsets, (rows + 1,), "int64")
        if self.groups is not None:
            expected["groups.npy"] = (self.groups, (rows,), "int64")
        for name, (array, shape, dtype) in expected.items():
            if array.shape != shape or array.dtype != dtype:
                found = f"{array.dtype} {array.shape}"
                raise UserError(str(self.path / name), found, f"{dtype} {shape}", REBUILD)
        if self.store == "encoded" and (
            self._offsets[0] != 0
            or self._offsets[-1] != self._images.size
            or (self._offsets[1:] < self._offsets[:-1]).any()
        ):
            raise UserError(str(self.path / "offsets.npy"), "offsets do not fit images.bin", remedy=REBUILD)
        lowest = 0 if self.classes else -1
        if rows and (self.labels.min() < lowest or self.labels.max() >= max(self.classes, 0)):
            row = int(np.flatnonzero((self.labels < lowest) | (self.labels >= self.classes))[0])
            raise UserError(
                self.where(row), f"label {self.labels[row]}", f"{lowest} to {max(self.classes, 0) - 1}", REBUILD
            )
        if self.groups is not None and rows:
            last = len(self.group_names) - 1
            strange = np.flatnonzero((self.groups < 0) | (self.groups > last))
            if len(strange):
                row = int(strange[0])
                raise UserError(self.where(row), f"group {self.groups[row]}", f"0 to {last}", REBUILD)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    manifest = hashed_folder.read_manifest(path, FORMAT, VERSION, "a packed set", "trainkit data import")
    types = {"store": str, "rows": int, "classes": int, "files": dict, "digest": str}
    for key, kind in types.items():
        if type(manifest.get(key)) is not kind:
            raise UserError(str(file), f"{key}: {manifest.get(key)!r}"[:200], kind.__name__, REBUILD)
    _check_size(file, manifest)
    protocol = manifest.get("protocol")
    needed = {"labels.npy", "checksums.npy", "contents.npy", "ids.txt", "names.json"}
    needed |= {"images.npy"} if manifest["store"] == "decoded" else {"images.bin", "offsets.npy"}
    if protocol is not None:
        if protocol not in _PROTOCOLS:
            raise UserError(str(file), f"protocol {protocol!r}"[:200], " or ".join(_PROTOCOLS), REBUILD)
        needed |= {f"protocol.{field}.npy" for field in _PROTOCOLS[protocol].__dataclass_fields__}
    manifest["protocol"] = protocol
    entries = manifest["files"]
    needed |= {"groups.npy", "groups.json"} if "groups.npy" in entries else set()
    if manifest["store"] not in ("decoded", "encoded"):
        raise UserError(str(file), f"store: {manifest['store']!r}"[:200], "decoded or encoded", REBUILD)
    hashed_folder.check_entries(path, manifest, needed)
    if min(manifest["rows"], manifest["classes"]) < 0:
        raise UserError(str(file), "a negative count", remedy=REBUILD)
    hashed_folder.check_digest(path, manifest, digest_of(entries, _shape(manifest)))
    return manifest


def describe(size: tuple[int, int] | None) -> str:
    """A size in words: `32 x 64` (height x width), or `their own sizes`."""
    return "their own sizes" if size is None else f"{size[0]} x {size[1]}"


def _size(entry: int | list[int] | None) -> tuple[int, int] | None:
    # Squares are written as one number, as they were when there was nothing else.
    return None if entry is None else (entry, entry) if isinstance(entry, int) else (entry[0], entry[1])


def _entry(size: tuple[int, int] | None) -> int | list[int] | None:
    return None if size is None else size[0] if size[0] == size[1] else list(size)


def _check_size(file: Path, manifest: Mapping[str, Any]) -> None:
    entry = manifest.get("image_size", "")
    sides = [] if entry is None else entry if isinstance(entry, list) and len(entry) == 2 else [entry]
    expected = "a side, [height, width] or null"
    if not all(type(side) is int and side >= 1 for side in sides):
        raise UserError(str(file), f"image_size: {entry!r}"[:200], expected, REBUILD)
    if sides and sides[0] * sides[-1] > image_decode.PIXEL_CAP:
        raise UserError(str(file), f"image_size: {entry!r}"[:200], f"at most {image_decode.PIXEL_CAP} pixels", REBUILD)
    if not sides and manifest["store"] != "encoded":
        raise UserError(str(file), f"image_size: null in store {manifest['store']!r}"[:200], expected, REBUILD)


def _shape(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    size = manifest["image_size"]
    sides = () if size is None else (size,) if isinstance(size, int) else tuple(size)
    return manifest["rows"], manifest["classes"], *sides


class Writer(hashed_folder.Aside):
    """Writes a packed set aside and renames it when it is whole; nothing is left of a failure."""

    def __init__(self, out: Path, *, size: tuple[int, int] | None, store: Store):
        if size is None and store == "decoded":
            raise ValueError("pictures of their own sizes are stored encoded")
        self._file = "images.npy" if store == "decoded" else "images.bin"
        super().__init__(out, [self._file])
        self.size, self.store = size, store
        self.rows = 0
        self._offsets, self._checksums, self._contents = [0], [], []

    def __enter__(self) -> Self:
        super().__enter__()
        self._images = self._files[self._file]
        if self.store == "decoded":
            self._images.write(_header(0, self.size))
        return self

    def add(self, pixels: np.ndarray, encoded: bytes | None = None) -> None:
        """One picture: uint8 (3, height, width), and its encoded bytes where the store keeps those."""
        if pixels.shape != (3, *(self.size or pixels.shape[1:3])) or pixels.dtype != np.uint8:
            raise ValueError(f"{pixels.dtype} {pixels.shape} in a set of pictures of {describe(self.size)}")
        pixels = np.ascontiguousarray(pixels)
        if self.store == "encoded" and encoded is None:
            encoded = image_decode.encode(pixels.transpose(1, 2, 0))
        data = pixels if self.store == "decoded" else encoded
        self._images.write(data)
        self._offsets.append(self._offsets[-1] + len(memoryview(data).cast("B")))
        self._checksums.append(zlib.crc32(data))
        self._contents.append(content(pixels))
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
        """Write everything but the pictures, make it durable, and give it its name."""
        if not len(labels) == len(ids) == self.rows:
            raise ValueError(f"{self.rows} pictures, {len(labels)} labels, {len(ids)} ids")
        if groups is not None and len(groups) != self.rows:
            raise ValueError(f"{self.rows} pictures, {len(groups)} groups")
        if self.store == "decoded":
            self._images.seek(0)
            self._images.write(_header(self.rows, self.size))
        else:
            self._save("offsets.npy", np.asarray(self._offsets, np.int64))
        self._save("labels.npy", np.asarray(labels, np.int64))
        self._save("checksums.npy", np.asarray(self._checksums, np.uint32))
        self._save("contents.npy", np.asarray(self._contents, np.uint64))
        # Line breaks in a name would shift all names after it.
        lines = (name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") for name in ids)
        (self.folder / "ids.txt").write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
        (self.folder / "names.json").write_bytes(json.dumps(list(class_names)).encode("utf-8"))
        if groups is not None:
            self._save("groups.npy", np.asarray(groups, np.int64))
            (self.folder / "groups.json").write_bytes(json.dumps(list(group_names)).encode("utf-8"))
        for field in protocol.__dataclass_fields__ if protocol is not None else ():
            self._save(f"protocol.{field}.npy", getattr(protocol, field))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "store": self.store,
            "rows": self.rows,
            "classes": len(class_names),
            "image_size": _entry(self.size),
            "protocol": None if protocol is None else type(protocol).__name__,
            "made_from": made_from,
        }
        self._publish(manifest, lambda made: digest_of(made["files"], _shape(made)))
        return Packed(self.out)

    def _save(self, name: str, array: np.ndarray) -> None:
        np.save(self.folder / name, array, allow_pickle=False)


def _header(rows: int, size: tuple[int, int]) -> bytes:
    # A npy header of fixed length, so that the number of rows can be put in when it is known.
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, 3, {size[0]}, {size[1]}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode("ascii") + b"\n"

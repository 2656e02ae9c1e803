"""The packed form of a set of images: made once, memory-mapped, and able to say whether it is still what was written.

A folder of `rows` with the columns

| column    | hashed as            | content                                                                         |
|-----------|----------------------|---------------------------------------------------------------------------------|
| `id`      | `ids.txt`            | the name that each had in its source                                            |
| `label`   | `labels.npy`         | int64, 0 .. classes-1; -1 in evaluation sets, which have no classes              |
| `group`   | `groups.npy`         | int64, which person, video or alphabet a row is of; where groups are known      |
| `crc`     | `checksums.npy`      | uint32, CRC-32 of each row of the images as stored, checked when it is first read |
| `content` | `contents.npy`       | uint64, BLAKE2b of each row's pixels, for finding duplicates                    |
| `image`   | `images.npy`         | store `decoded`: uint8 (3, height, width)                                       |
|           | `images.bin`, `offsets.npy` | store `encoded`: the encoded image                                       |

and beside them `names.json`, class names: the labels of the source in the order of our class numbers; `groups.json`,
the names of groups; `protocol.*.npy`, of evaluation sets the fields of their protocol. `originals` in the manifest is
the SHA-256 of what was packed: files, labels, groups and protocol.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from trainkit.data import thread_pool
from trainkit.data.formats import image_decode
from trainkit.data.rows import row_files
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import ABSENT, REBUILD, Column, Form, Part, Text, is_count, is_packed
from trainkit.data.rows.writer import BATCH_ROWS
from trainkit.data.rows.writer import Writer as RowWriter
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification, Pairs, Protocol, Templates
from trainkit.files import Json

__all__ = ["Packed", "Writer", "content", "describe", "is_packed"]

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
_DECODED = 1 << 16
"""Bytes of pixels from which a thread of their own decodes faster: each takes 0.1 ms or more."""
_TURNS = 8
"""Slices a thread that decodes gets of a batch."""

_PROTOCOLS = {"Pairs": Pairs, "Templates": Templates, "Identification": Identification}


def content(pixels: np.ndarray) -> int:
    """Compute a 64-bit fingerprint of an image's pixels, uint8 (3, height, width)."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=8).digest(), "little")


class Packed(Rows):
    """A packed set opened for reading."""

    FORM = Form(FORMAT, VERSION, "a packed set", "trainkit data import")
    REMEDY: ClassVar = REBUILD
    """What to do about an image that is damaged."""
    ENTRIES: ClassVar = {
        "classes": is_count,
        "store": lambda store: store in ("decoded", "encoded"),
        "protocol": lambda protocol: protocol in (None, ABSENT, *_PROTOCOLS),
        "image_size": lambda size: _is_size(size) and math.prod(_size(size) or ()) <= image_decode.PIXEL_CAP,
    }
    _fit: image_decode.Fit = "no"

    @classmethod
    def layout(cls, manifest: Mapping[str, Json]) -> list[Column | Text | Part]:
        """Return the columns; of a set of decoded images, which are of one size, with arrays."""
        image, size = Part("image", "images.bin", "offsets.npy"), _size(manifest["image_size"])
        if manifest["store"] == "decoded" and size is not None:
            image = Part("image", "images.npy", shape=(3, *size))
        return [
            Text("id", "ids.txt"),
            Column("label", "labels.npy", "int64", late=True),
            Column("group", "groups.npy", "int64", late=True),
            Column("crc", "checksums.npy", "uint32"),
            Column("content", "contents.npy", "uint64"),
            image,
        ]

    @classmethod
    def beside(cls, manifest: Mapping[str, Json]) -> list[str]:
        """Return the names of classes, of groups, and the fields of a protocol."""
        kind = _PROTOCOLS.get(manifest.get("protocol") or "")
        fields = [] if kind is None else [f"protocol.{field}.npy" for field in kind.__dataclass_fields__]
        return ["names.json", *fields, *(["groups.json"] if manifest.get("grouped") else [])]

    @classmethod
    def unlisted(cls, manifest: Mapping[str, Json]) -> list[str]:
        """Return the groups, where none are known."""
        return [] if manifest.get("grouped") else ["groups.npy"]

    @property
    def store(self) -> Store:
        """Form in which the images are kept."""
        return self.manifest["store"]

    @property
    def classes(self) -> int:
        """Number of classes; 0 in evaluation sets."""
        return self.manifest["classes"]

    @functools.cached_property
    def size(self) -> tuple[int, int] | None:
        """Height and width of every image; None where images keep their own sizes."""
        return _size(self.manifest["image_size"])

    @property
    def image_size(self) -> int:
        """Side of every image of a set of squares. Raises ValueError for other sets."""
        if self.size is None or self.size[0] != self.size[1]:
            raise ValueError(f"{self.path} holds images of {describe(self.size)}, not squares of one size")
        return self.size[0]

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """int64 (rows,), the class of each; -1 in evaluation sets."""
        return self.column("label")

    @functools.cached_property
    def groups(self) -> np.ndarray | None:
        """int64 (rows,), the group of each; None where none are known."""
        return self.column("group") if self.manifest.get("grouped") else None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The label each class had in its source."""
        return row_files.listed(self.path / "names.json")

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups (people, videos, alphabets); empty where the source knew none."""
        return () if self.groups is None else row_files.listed(self.path / "groups.json")

    def protocol(self) -> Protocol | None:
        """Protocol by which this set is evaluated; None for a training set."""
        kind = _PROTOCOLS.get(self.manifest.get("protocol") or "")
        if kind is None:
            return None
        fields = {field: row_files.mapped(self.path / f"protocol.{field}.npy") for field in kind.__dataclass_fields__}
        try:
            return kind(**fields)
        except ValueError as error:
            raise UserError(str(self.path), f"damaged protocol ({error})", remedy=REBUILD) from None

    def encoded(self, row: int) -> bytes:
        """Return the image of a row as it is stored; pixels of a decoded set."""
        return self.stored(*self.span("image", row)).tobytes()

    def picture(self, row: int) -> np.ndarray:
        """Read one row of any set, uint8 (height, width, 3). Raises UserError where it was damaged."""
        if self.store == "decoded":
            return np.ascontiguousarray(self.fetch(np.asarray([row]))[0].transpose(1, 2, 0))
        return self._decode(row, self.stored(*self.span("image", row)))

    def pictures(self, rows: np.ndarray) -> list[np.ndarray]:
        """Read `rows` of any set by several threads, each as `image` does."""
        found = [np.empty(0, np.uint8)] * len(rows)

        def read(part: slice) -> None:
            found[part] = [self.picture(row) for row in rows[part].tolist()]

        thread_pool.in_parts(read, len(rows), 1, _TURNS)
        return found

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        """Read `rows` of a set of one size, a fresh uint8 array (rows, 3, height, width).

        Raises UserError at a row that was damaged, ValueError where one is not there or images keep their own sizes.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if (size := self.size) is None:
            raise ValueError(f"{self.path}: images of their own sizes are read one by one")
        if self.store == "decoded":
            images = self.arrays("image", rows)
            for place in np.flatnonzero(self._known[rows] == _NEW).tolist():
                self._check_row(int(rows[place]), images[place].data)
            return images
        images = np.empty((len(rows), 3, *size), np.uint8)

        def read(part: slice) -> None:
            self._decode_all(rows[part], images[part])

        thread_pool.in_parts(read, len(rows), max(1, _DECODED // (3 * size[0] * size[1])), _TURNS)
        return images

    def _decode_all(self, rows: np.ndarray, images: np.ndarray) -> None:
        # Asked of all rows at once: what Python does for an image keeps other threads from the interpreter.
        decoder = self._decoder if self._proved >= _PROOFS and (self._known[rows] == _PLAIN).all() else None
        stored, (begins, ends) = self.stored, self.spans("image", rows)
        for out, row, begin, end in zip(images, rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
            data = stored(begin, end)
            try:
                out[:] = decoder(data) if decoder is not None else self._decode(row, data).transpose(2, 0, 1)
            except (RuntimeError, ValueError):
                out[:] = self._by_pillow(row, data.tobytes()).transpose(2, 0, 1)

    def _decode(self, row: int, stored: np.ndarray) -> np.ndarray:
        """Decode an encoded row, (height, width, 3)."""
        if self._known[row] == _NEW:
            self._check_row(row, stored.tobytes())
        if self._known[row] == _PLAIN and self._decoder is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                pixels = self._decoder(stored)
                if self._proved >= _PROOFS or self._proves(row, pixels):
                    return pixels.transpose(1, 2, 0)
        return self._by_pillow(row, stored.tobytes())

    def _by_pillow(self, row: int, stored: bytes) -> np.ndarray:
        # The place is put into words only when needed.
        try:
            pixels = image_decode.decode(stored, "")
            return pixels if self.size is None else image_decode.fit(pixels, self.size, "", self._fit)
        except UserError as error:
            raise UserError(self.where(row), error.found, error.expected, self.REMEDY) from None

    def _proves(self, row: int, pixels: np.ndarray) -> bool:
        """Return True for the pixels that were imported; where they are others, this decoder is not asked again."""
        if content(pixels) == int(self.at("content", np.asarray([row]))[0]):
            self._proved += 1
            return True
        _log.warning("%s: the fast decoder gives other pixels than the import; using Pillow", self.where(row))
        self._decoder = None
        return False

    def _check_row(self, row: int, data: bytes | memoryview) -> None:
        # CRC-32 takes 16 us for a 112 px image, more than reading it; so each process checks a row once.
        self.compare(row, data)
        plain = isinstance(data, bytes) and (shape := image_decode.plain_jpeg(data)) and self.size in (None, shape)
        self._known[row] = _PLAIN if plain else _CHECKED

    def _map(self) -> None:
        super()._map()
        self._known, self._proved = np.zeros(len(self), np.uint8), 0

    def _check_columns(self) -> None:
        self._check_numbers("label", 0 if self.classes else -1, self.classes - 1)
        if self.manifest.get("grouped"):
            self._check_numbers("group", 0, len(row_files.listed(self.path / "groups.json")) - 1)

    def _check_numbers(self, what: str, least: int, most: int) -> None:
        """Raise UserError naming the first row whose number is not from `least` to `most`."""
        first = 0
        for numbers in self.column_by_batch(what):
            if numbers.min() < least or numbers.max() > most:
                place = int(np.flatnonzero((numbers < least) | (numbers > most))[0])
                raise UserError(self.where(first + place), f"{what} {numbers[place]}", f"{least} to {most}", REBUILD)
            first += len(numbers)

    @functools.cached_property
    def _decoder(self) -> image_decode.Decoder | None:
        return image_decode.plain_decoder()

    def contents(self) -> np.ndarray:
        """Return the fingerprint of each row's pixels, uint64 (rows,)."""
        return self.column("content")

    @classmethod
    def identity(cls, manifest: Mapping[str, Json]) -> list[str]:
        """Return the numbers of rows and classes, and the size of images."""
        return ["x".join(map(str, (manifest["rows"], manifest["classes"], *_sides(manifest["image_size"]))))]


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


class Writer(RowWriter):
    """Writes a packed set."""

    def __init__(
        self,
        out: Path,
        *,
        size: tuple[int, int] | None,
        store: Store,
        key: str = "",
        state: Callable[[], Json] = lambda: None,
    ):
        """`key` and `state` as of the `Writer` of rows."""
        if size is None and store == "decoded":
            raise ValueError("images of their own sizes are stored encoded")
        self.size, self.store = size, store
        super().__init__(out, Packed.layout({"store": store, "image_size": _entry(size)}), key=key, state=state)

    def add_image(self, id: str, pixels: np.ndarray, encoded: bytes | None = None) -> None:
        """Add one image: uint8 (3, height, width), and its encoded bytes where the store keeps those."""
        if pixels.shape != (3, *(self.size or pixels.shape[1:3])) or pixels.dtype != np.uint8:
            raise ValueError(f"{pixels.dtype} {pixels.shape} in a set of images of {describe(self.size)}")
        pixels = np.ascontiguousarray(pixels)
        data = pixels.reshape(-1).data
        if self.store == "encoded":
            data = encoded or image_decode.encode(pixels.transpose(1, 2, 0))
        row = {"id": id, "label": -1, "group": -1, "crc": zlib.crc32(data), "content": content(pixels)}
        self.add({**row, "image": data})

    def finish(
        self,
        *,
        labels: np.ndarray,
        class_names: Sequence[str],
        groups: np.ndarray | None = None,
        group_names: Sequence[str] = (),
        protocol: Protocol | None = None,
        made_from: str = "",
        originals: Iterable[bytes] | None = None,
    ) -> Packed:
        """Write what is known only when all images are, make it durable, and give it its name.

        `originals` are hashes of the images as they were before they were prepared, end to end, in pieces.
        """
        if len(labels) != self.rows or (groups is not None and len(groups) != self.rows):
            raise ValueError(f"{self.rows} images, {len(labels)} labels, {0 if groups is None else len(groups)} groups")
        self.replace("label", labels)
        self.save_json("names.json", list(class_names))
        if groups is not None:
            self.replace("group", groups)
            self.save_json("groups.json", list(group_names))
        for field in protocol.__dataclass_fields__ if protocol is not None else ():
            self.save(f"protocol.{field}.npy", getattr(protocol, field))
        manifest: dict[str, Json] = {
            "store": self.store,
            "rows": self.rows,
            "classes": len(class_names),
            "image_size": _entry(self.size),
            "protocol": None if protocol is None else type(protocol).__name__,
            "made_from": made_from,
            **({} if groups is None else {"grouped": True}),
        }
        if originals is not None:
            fields = [] if protocol is None else [getattr(protocol, name) for name in protocol.__dataclass_fields__]
            numbers = [some for some in (labels, groups) if some is not None]
            words = ["", *class_names, "", *group_names]
            manifest["originals"] = self._hash_originals(manifest, words, numbers, fields, originals)
        self.publish(Packed, manifest)
        return Packed(self.out)

    def _hash_originals(
        self,
        manifest: Mapping[str, Json],
        words: Sequence[str],
        numbers: Sequence[np.ndarray],
        fields: Sequence[np.ndarray],
        originals: Iterable[bytes],
    ) -> str:
        """Hash the list of ids and other words, as JSON writes it, then numbers of rows as int64, then the fields of a
        protocol, then the hashes of images."""
        hashed = hashlib.sha256(b"[")
        for some in self.reading(Packed, manifest).texts_by_batch("id"):
            hashed.update(json.dumps(some)[1:-1].encode() + b", ")
        hashed.update(json.dumps(list(words))[1:].encode())
        for some in numbers:
            hashed.update(f"\nint64 {some.shape} ".encode())
            for begin in range(0, len(some), BATCH_ROWS):
                hashed.update(some[begin : begin + BATCH_ROWS].astype(np.int64).data)
        for array in fields:
            hashed.update(f"\n{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
        for piece in originals:
            hashed.update(piece)
        return hashed.hexdigest()

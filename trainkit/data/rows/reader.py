"""Rows: the one form in which prepared data lie on disk, whatever they are. Read here, written by `writer`.

A folder with

| file            | content                                                                                          |
|-----------------|--------------------------------------------------------------------------------------------------|
| `rows.arrow`    | the rows as an Arrow IPC stream, which `datasets.Dataset.from_file` opens                        |
| `*.npy`, `*.json` | what is of the set and not of a row: names of classes, a protocol                              |
| `manifest.json` | form and version; where the values of each batch of rows lie, and their CRC-32; size and SHA-256 |
|                 | of every file and of every column; the digest                                                    |

A kind of data is a subclass of `Rows` that lists its columns (`layout`): numbers of each row, texts, and parts (bytes:
an encoded image, a mask, voxels). The digest is of the content and not of the file: a column is hashed in the bytes of
the `.npy`, text or binary file that its `file` names, so that how rows are stored may change and digests do not.

**Reading** needs no Arrow and no Python object per row. The manifest says where the buffers of each batch begin, so a
row is found by one `searchsorted` and two numbers out of the mapped file: 5.8 million images open in 0.1 s. The
processes of a machine share its pages, and a forked worker inherits no thread of Arrow. Nothing in a file is believed:
before values of a batch are used for the first time they are compared with their CRC-32, and offsets must rise and stay
inside their buffer. Arrow itself checks neither: it opens a file that was cut between two batches as one of fewer rows,
and one offset that was changed ends the process. A part is compared with the CRC-32 of its own row by who reads it.

**One file**, not shards: what is mapped, copied or removed is one thing, and a patch of one of 500 volumes costs one
page lookup as it does in one of 5. Batches of bounded size keep the memory of writing flat, which shards would be for.

**Cold reads**: small parts are mapped for random access, so that one of 1 kB reads its page and not the 128 kB around
it; larger ones are read with `pread`, in one request. **Network disks**: a mapped file that is cut there ends the
process (SIGBUS), so on these the columns are read into memory when the file is opened, and parts with `pread`.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from trainkit import files
from trainkit.data.rows.row_files import (
    ABSENT,
    FILE,
    MANIFEST,
    REBUILD,
    Column,
    Form,
    Layout,
    Part,
    Text,
    entry_slices,
    is_count,
    read_manifest,
    unreadable,
)
from trainkit.errors import UserError
from trainkit.files import Json

HASHED_AT_OPEN = 64 << 20
"""Largest file whose SHA-256 is compared whenever the folder is opened, in bytes."""
_CHANGED = "is not what was written (SHA-256 differs)"
_SMALL = 32 << 10
"""Bytes up to which a part is read through the mapping, page by page where it is not in memory yet."""
_CHUNK = 8 << 20
_ALIGNED = 8
Spec = TypeVar("Spec", Column, Part)


class Rows(ABC):
    """A folder of rows opened for reading. Pickles as its path, so spawned workers map the file themselves."""

    FORM: ClassVar[Form]
    ENTRIES: ClassVar[Mapping[str, Callable[[Json], bool]]] = {}
    """Of entries of a manifest, whether a value can be one; the number of rows is known to `Rows`."""
    IDENTITY: ClassVar[Sequence[str]] = ()
    """Entries that the digest is of, where they are there, beside the hashes of columns and files."""

    def __init__(self, path: Path | str):
        """Check manifest, digest, sizes of all files and hashes of small ones, and map them. Raises UserError."""
        self.path = Path(path)
        self.manifest = manifest = read_manifest(self.path, self.FORM)
        for key, can_be in {self.FORM.counted: is_count, **self.ENTRIES}.items():
            if not can_be(manifest.get(key, ABSENT)):
                raise self.damaged(MANIFEST, f"{key}: {manifest.get(key)!r}"[:200])
        self._check_files()
        if manifest.get("digest") != self.digest_of(manifest):
            raise self.damaged(MANIFEST, "its digest does not match its entries")
        for name, entry in self._on_disk().items():
            try:
                size = (self.path / name).stat().st_size
            except OSError:
                raise self.damaged(name, "is missing") from None
            if size != entry["bytes"]:
                raise self.damaged(name, f"{size} bytes", f"{entry['bytes']}")
            if size <= HASHED_AT_OPEN and files.sha256(self.path / name) != entry["sha256"]:
                raise self.damaged(name, _CHANGED)
        self._map()
        self._check_columns()

    @classmethod
    def unchecked(cls, path: Path, manifest: Mapping[str, Json]) -> Rows:
        """Open rows that were just written."""
        found = cls.__new__(cls)
        found.__setstate__({"path": path, "manifest": manifest})
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.manifest = state["path"], state["manifest"]
        self._map()

    def __len__(self) -> int:
        return self.manifest[self.FORM.counted]

    # ---- What a kind of data says of itself

    @classmethod
    @abstractmethod
    def layout(cls, manifest: Mapping[str, Json]) -> Layout:
        """Return the columns of a set; of one of 0 rows without those that are not there yet."""

    @classmethod
    def identity(cls, manifest: Mapping[str, Json]) -> Sequence[str]:
        """Return lines that the digest is of, beside the hashes of columns and files."""
        known = [manifest[key] for key in cls.IDENTITY if key in manifest]
        return [json.dumps(known, sort_keys=True)] if known else []

    def _check_columns(self) -> None:  # noqa: B027 - not every kind has what to check
        """Raise UserError for numbers that cannot be."""

    @classmethod
    def beside(cls, manifest: Mapping[str, Json]) -> Iterable[str]:
        """Return the names of the files beside the rows."""
        return ()

    @classmethod
    def unlisted(cls, manifest: Mapping[str, Json]) -> Iterable[str]:
        """Return the files of columns that are written and not part of the set: of groups where none are known."""
        return ()

    # ---- Opening

    @classmethod
    def digest_of(cls, manifest: Mapping[str, Json]) -> str:
        """Compute the SHA-256 of a set from what its manifest says of it and the hashes of columns and files."""
        entries = ((name, entry["sha256"]) for name, entry in sorted(manifest["files"].items()))
        lines = [cls.FORM.format, str(cls.FORM.version), *cls.identity(manifest)]
        return hashlib.sha256("\n".join([*lines, *(f"{n} {hash}" for n, hash in entries)]).encode()).hexdigest()

    @classmethod
    def hashed_files(cls, manifest: Mapping[str, Json]) -> set[str]:
        """Return the names of the files that the digest is of."""
        columns = cls.layout(manifest)
        offsets = {spec.offsets for spec in columns if isinstance(spec, Part) and spec.offsets}
        return {*cls.beside(manifest), *(spec.file for spec in columns), *offsets} - {*cls.unlisted(manifest)}

    def _check_files(self) -> None:
        """Raise UserError where the manifest does not list the files that there must be, and these alone.

        They are a fixed list, so a manifest cannot point outside its folder.
        """
        manifest, file = self.manifest, str(self.path / MANIFEST)
        needed, entries = self.hashed_files(manifest), manifest.get("files")
        if not isinstance(entries, dict) or set(entries) != needed:
            found = sorted(entries) if isinstance(entries, dict) else entries
            raise UserError(file, f"files {found!r}"[:300], f"{sorted(needed)}", REBUILD)
        for name, entry in {**entries, FILE: manifest.get("arrow")}.items():
            if not (
                isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
            ):
                raise UserError(file, f"files.{name}: {entry!r}"[:200], "bytes and sha256", REBUILD)
        self._batches()

    def _batches(self) -> np.ndarray:
        """Return the numbers of each batch, int64 (batches, ...). Raises UserError for what the file cannot have."""
        arrow, layout = self.manifest["arrow"], self.layout(self.manifest)
        own = entry_slices(layout)
        width = max(one.stop for one in own.values())
        try:
            table = np.asarray(arrow["batches"], np.int64).reshape(-1, width)
        except (KeyError, ValueError, TypeError, OverflowError):
            raise self.damaged(MANIFEST, f"batches that are not {width} numbers each") from None
        rows, whole = table[:, 0], arrow["bytes"]
        sound = not len(rows) or (rows.min() > 0 and table.min() >= 0 and table.max() <= max(whole, _U32))
        if not sound or rows.sum() != len(self):
            raise self.damaged(MANIFEST, f"batches of {rows.sum()} rows in all", f"{len(self)}")
        for spec in layout:
            begin, *other = table[:, own[spec.name]].T
            if isinstance(spec, Column):
                end = begin + rows * spec.stride
            else:
                end = np.maximum(begin + 8 * (rows + 1), other[0] + other[1])
            if (begin % _ALIGNED).any() or (end > whole).any():
                raise self.damaged(MANIFEST, f"batches whose {spec.name} lies outside of {FILE}")
        return table

    def _on_disk(self) -> dict[str, Json]:
        """Return size and SHA-256 of the files in the folder."""
        entries = self.manifest["files"]
        return {name: entries[name] for name in self.beside(self.manifest)} | {FILE: self.manifest["arrow"]}

    def _map(self) -> None:
        """Map the file, and note where the values of each batch begin."""
        table, layout = self._batches(), self.layout(self.manifest)
        self._layout = {spec.name: spec for spec in layout}
        self._first = np.concatenate([[0], np.cumsum(table[:, 0])])
        self._entry = {name: table[:, own].T.copy() for name, own in entry_slices(layout).items()}
        self._sound = {name: np.zeros(len(table), bool) for name in self._entry}
        self._columns: dict[str, np.ndarray] = {}
        size = self.manifest["arrow"]["bytes"]
        try:
            self._file = (self.path / FILE).open("rb", buffering=0)
            self.on_network = files.on_network(self.path)
            if self.on_network:
                # Addresses like those in the file, of which only what is written to takes memory.
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
                block = mmap.mmap(-1, max(1, size), flags=flags)
                self._read_columns(np.frombuffer(block, np.uint8))
            else:
                block = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)
                self._advise(block)
        except (OSError, ValueError) as error:
            raise unreadable(self.path / FILE, error) from None
        self._bytes = np.frombuffer(block, np.uint8, size)
        whole = self._bytes[: size // _ALIGNED * _ALIGNED]
        kinds = {spec.dtype for spec in self._layout.values() if isinstance(spec, Column)} | {"int64"}
        self._as = {kind: whole.view(kind) for kind in kinds}

    def _advise(self, block: mmap.mmap) -> None:
        """Have what is asked for read without what follows it: small parts through the mapping, all else by `read`."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        lengths = [self._entry[name][2].sum() for name, spec in self._layout.items() if isinstance(spec, Part)]
        if hasattr(mmap, "MADV_RANDOM") and max(lengths, default=0) < _SMALL * len(self):
            block.madvise(mmap.MADV_RANDOM)

    def _read_columns(self, memory: np.ndarray) -> None:
        """Read all but the parts to where they are in the file."""
        for name, spec in self._layout.items():
            for batch, rows in enumerate(np.diff(self._first).tolist()):
                entry = self._entry[name][:, batch].tolist()
                spans = [(entry[0], spec.stride * rows if isinstance(spec, Column) else 8 * (rows + 1))]
                spans += [(entry[1], entry[2])] if isinstance(spec, Text) else []
                for begin, count in spans:
                    memory[begin : begin + count] = self.read(begin, begin + count)

    # ---- Reading

    def read(self, begin: int, end: int) -> np.ndarray:
        """Read bytes of the file, uint8. Raises UserError where it has become shorter or cannot be read."""
        out = np.empty(end - begin, np.uint8)
        done = 0
        try:
            while done < len(out):
                count = os.preadv(self._file.fileno(), [out[done:].data], begin + done)
                if count == 0:
                    raise self.damaged(FILE, f"ends at byte {begin + done}", f"{self.manifest['arrow']['bytes']} bytes")
                done += count
        except OSError as error:
            raise unreadable(self.path / FILE, error) from None
        return out

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of all rows, (rows,) or (rows, width): a view where there is one batch."""
        if name not in self._columns:
            spec, parts = self._spec(name, Column), list(self.column_by_batch(name))
            empty = np.empty((0, spec.width) if spec.width else 0, spec.dtype)
            self._columns[name] = parts[0] if len(parts) == 1 else np.concatenate([empty, *parts])
        return self._columns[name]

    def column_by_batch(self, name: str) -> Iterator[np.ndarray]:
        """Yield the numbers of the rows of each batch: views of the file, which take no memory of their own."""
        spec = self._spec(name, Column)
        yield from (self._values(spec, batch) for batch in range(len(self._first) - 1))

    def at(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of some rows of a column that has one each."""
        spec, batch = self._spec(name, Column), self._batch(name, rows)
        begins = self._entry[name][0] // np.dtype(spec.dtype).itemsize - self._first[:-1]
        return self._as[spec.dtype][begins[batch] + rows]

    def texts(self, name: str) -> list[str]:
        """Read the texts of all rows; millions take as many seconds."""
        return [text for some in self.texts_by_batch(name) for text in some]

    def texts_by_batch(self, name: str) -> Iterator[list[str]]:
        """Yield the texts of each batch, in the order of rows."""
        yield from (self._texts(name, batch) for batch in range(len(self._first) - 1))

    def text(self, name: str, row: int) -> str:
        """Read the text of a row."""
        (batch,) = self._batch(name, np.asarray([row])).tolist()
        return self._texts(name, batch, int(row - self._first[batch]))[0]

    def spans(self, name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where a part of some rows begins and ends in the file, int64. Raises UserError for damaged offsets."""
        batch = self._batch(name, rows)
        offsets, data, _, _ = self._entry[name]
        places, begins = (offsets // 8 - self._first[:-1])[batch] + rows, data[batch]
        words = self._as["int64"]
        return begins + words[places], begins + words[places + 1]

    def span(self, name: str, row: int) -> tuple[int, int]:
        """Return where a part of one row begins and ends, as `spans`."""
        begins, ends = self.spans(name, np.asarray([row]))
        return int(begins[0]), int(ends[0])

    def arrays(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Read a part that is an array of one shape, of some rows: a fresh array (rows, *shape).

        Raises UserError for damaged offsets, ValueError for rows that are not there.
        """
        spec = self._spec(name, Part)
        begins, ends = self.spans(name, rows)
        if self.on_network:
            found = np.empty((len(rows), spec.stride), np.uint8)
            for out, begin, end in zip(found, begins.tolist(), ends.tolist(), strict=True):
                out[:] = self.read(begin, end)
        else:
            # Overlapping rows, one for each byte of the file: numpy takes any of them in one call.
            places = (len(self._bytes) - spec.stride + 1, spec.stride)
            found = np.ndarray(places, np.uint8, self._bytes.data, strides=(1, 1))[begins]
        return found.view(spec.dtype).reshape(len(rows), *spec.shape)

    def stored(self, begin: int, end: int) -> np.ndarray:
        """Return bytes of a part, uint8, not to be written to; `begin` and `end` are of `spans`."""
        if self.on_network or end - begin > _SMALL:
            return self.read(begin, end)
        return self._bytes[begin:end]

    def array(self, name: str, row: int, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
        """Return a part as an array, not to be written to: a view of the file, of which only what is touched is read;
        on a network disk, read. Raises UserError where it has another size."""
        begin, end = self.span(name, row)
        found = self.read(begin, end) if self.on_network else self._bytes[begin:end]
        if found.nbytes != np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64)) or begin % _ALIGNED:
            raise self.damaged(FILE, f"{found.nbytes} bytes of {name} in row {row}", f"{np.dtype(dtype)} {shape}")
        return found.view(dtype).reshape(shape)

    def compare(self, row: int, data: bytes | memoryview) -> None:
        """Raise UserError where a part of a row is not what was written, by the column `crc`."""
        if zlib.crc32(data) != int(self.at("crc", np.asarray([row]))[0]):
            raise UserError(self.where(row), "is not what was written (checksum differs)", remedy=REBUILD)

    def _batch(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return in which batch each of some rows is, when what these say of a column was compared.

        Raises UserError where it differs from what was written, ValueError for rows that are not there.
        """
        outside = rows[(rows < 0) | (rows >= len(self))]
        if outside.size:
            raise ValueError(f"row {outside[0]} of a set of {len(self)}")
        batch = np.searchsorted(self._first, rows, side="right") - 1
        self._prove(name, batch)
        return batch

    def _spec(self, name: str, kind: type[Spec]) -> Spec:
        spec = self._layout[name]
        if not isinstance(spec, kind):
            raise TypeError(f"{name} is a {type(spec).__name__}, not a {kind.__name__}")
        return spec

    def _values(self, spec: Column, batch: int) -> np.ndarray:
        self._prove(spec.name, np.asarray([batch]))
        rows = int(self._first[batch + 1] - self._first[batch])
        begin = int(self._entry[spec.name][0][batch]) // np.dtype(spec.dtype).itemsize
        found = self._as[spec.dtype][begin : begin + rows * max(1, spec.width)]
        return found.reshape(rows, spec.width) if spec.width else found

    def _texts(self, name: str, batch: int, only: int | None = None) -> list[str]:
        self._prove(name, np.asarray([batch]))
        offsets = self._offsets(name, batch)
        offsets = offsets if only is None else offsets[only : only + 2]
        begin = int(self._entry[name][1][batch])
        data = self._bytes[begin + int(offsets[0]) : begin + int(offsets[-1])].tobytes()
        ends = (offsets - offsets[0]).tolist()
        try:
            return [data[a:b].decode() for a, b in pairwise(ends)]
        except UnicodeDecodeError as error:
            raise unreadable(self.path / FILE, error) from None

    def _offsets(self, name: str, batch: int) -> np.ndarray:
        begin = int(self._entry[name][0][batch]) // 8
        return self._as["int64"][begin : begin + int(self._first[batch + 1] - self._first[batch]) + 1]

    def _prove(self, name: str, batches: np.ndarray) -> None:
        """Compare what batches say of a column with what was written, once each. Raises UserError where it differs."""
        sound = self._sound[name]
        if sound[batches].all():
            return
        spec, entry = self._layout[name], self._entry[name]
        for batch in np.unique(batches[~sound[batches]]).tolist():
            begin, *other, crc = entry[:, batch].tolist()
            rows = int(self._first[batch + 1] - self._first[batch])
            if isinstance(spec, Column):
                found = zlib.crc32(self._at_once(begin, begin + rows * spec.stride).data)
            else:
                data, length = other
                offsets = self._at_once(begin, begin + 8 * (rows + 1)).view(np.int64)
                stride, steps = getattr(spec, "stride", 0), np.diff(offsets)
                if offsets[0] != 0 or offsets[-1] != length or (steps != stride if stride else steps < 0).any():
                    found = f"offsets of {name} in batch {batch} that do not match its {length} bytes"
                    raise self.damaged(FILE, found, "ones that rise from 0")
                found = zlib.crc32(offsets.data)
                if isinstance(spec, Text):
                    found = zlib.crc32(self._at_once(data, data + length).data, found)
            if found != crc:
                raise self.damaged(FILE, f"{name} of batch {batch} is not what was written (checksum differs)")
            sound[batch] = True

    def _at_once(self, begin: int, end: int) -> np.ndarray:
        """Read what belongs together in one request, before the mapping is asked for it page by page."""
        return self._bytes[begin:end] if self.on_network else self.read(begin, end)

    # ---- The whole

    def hashed(self, name: str) -> Iterator[bytes | memoryview]:
        """Yield the bytes in which a column is hashed: those of the file called `name`. Raises UserError for damage."""
        batches = range(len(self._first) - 1)
        for spec in self._layout.values():
            if name == spec.file and isinstance(spec, Column):
                shape = (len(self), spec.width) if spec.width else (len(self),)
                yield _npy_header(spec.dtype, shape)
                yield from (self._values(spec, batch).reshape(-1).view(np.uint8).data for batch in batches)
            elif name == spec.file and isinstance(spec, Text):
                for batch in batches:
                    found = self._texts(spec.name, batch)
                    yield "".join(f"{text}\n" for text in found if text or not spec.sparse).encode()
            elif name == spec.file and isinstance(spec, Part):
                yield _npy_header(spec.dtype, (len(self), *spec.shape)) if spec.shape else b""
                _, data, length, _ = self._entry[spec.name]
                for begin, end in zip(data.tolist(), (data + length).tolist(), strict=True):
                    yield from (self.read(at, min(at + _CHUNK, end)).data for at in range(begin, end, _CHUNK))
            elif isinstance(spec, Part) and name == spec.offsets:
                yield _npy_header("int64", (len(self) + 1,)) + bytes(8)
                whole = 0
                for batch in batches:
                    self._prove(spec.name, np.asarray([batch]))
                    offsets = self._offsets(spec.name, batch)
                    yield (offsets[1:] + whole).view(np.uint8).data
                    whole += int(offsets[-1])

    def entry(self, name: str) -> dict[str, Json]:
        """Return size and SHA-256 of a column or of a file beside the rows, as the manifest has them."""
        if name in self.beside(self.manifest):
            return {"bytes": (self.path / name).stat().st_size, "sha256": files.sha256(self.path / name)}
        state, size = hashlib.sha256(), 0
        for data in self.hashed(name):
            state.update(data)
            size += len(data)
        return {"bytes": size, "sha256": state.hexdigest()}

    def changed(self) -> list[str]:
        """Return sentences about files that are not what was written. Reads every byte."""
        return [
            f"{self.path / name}: {_CHANGED}"
            for name, entry in self._on_disk().items()
            if files.sha256(self.path / name) != entry["sha256"]
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return self.manifest["digest"]

    @property
    def originals(self) -> str | None:
        """SHA-256 of what was packed, before it was prepared; None of kinds and sets without it.

        Equal for sets of the same files that were packed in other sizes.
        """
        found = self.manifest.get("originals")
        return found if isinstance(found, str) else None

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry["bytes"] for entry in self._on_disk().values())

    def ids(self) -> list[str]:
        """Read the name of every row in its source."""
        return self.texts("id")

    def where(self, row: int) -> str:
        """Describe a row's place, for messages."""
        try:
            return f"{self.path}, row {row} ({self.text('id', row)})"
        except (UserError, KeyError, IndexError):
            return f"{self.path}, row {row}"

    def damaged(self, name: str, found: str, expected: str = "") -> UserError:
        """Return the UserError about one of the files."""
        return UserError(str(self.path / name), found, expected, REBUILD)


_U32 = 0xFFFFFFFF
"""Numbers in a batch's entry are places in the file or a CRC-32."""


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, about)
    return out.getvalue()

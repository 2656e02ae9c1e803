"""Writes `rows`: batch after batch into a folder aside, which gets its name when it is whole.

What is written of a batch is in no memory any more, so a set of any size takes that of one batch. Beside the rows a
journal notes each batch that is whole: with a `key`, a writing that was killed is resumed by the next one of that
key, which reads what is there once and compares it with its CRC-32. A failure leaves nothing, but where it is to be
resumed too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from trainkit.data.rows import row_files
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import Column, Layout, Part, Text
from trainkit.errors import UserError
from trainkit.files import Json, sha256, sync_file, sync_folder

PARTIAL = ".partial-"
"""Part of the name of a folder that is being written, between its final name and another one."""
BATCH_BYTES, BATCH_ROWS = 32 << 20, 1 << 16
"""Of a batch: bytes of parts and texts from which it is written, and most rows."""
JOURNAL, _LOCK = "progress.jsonl", "lock"
"""Files in the folder while it is written; the first only where it can be resumed."""


class Writer:
    """Writes a folder of rows."""

    def __init__(
        self,
        out: Path | str,
        layout: Layout,
        *,
        key: str = "",
        state: Callable[[], Json] = lambda: None,
        batch_rows: int = BATCH_ROWS,
        keep: bool = False,
    ):
        """Of equal `key`, another writing resumes one that was killed, with `keep` also one that failed or was given
        up; `state` gives what is to be known then of the rows since the last batch, and `restored` has it of those that
        are there. Raises UserError where `out` already exists."""
        self._keep = keep
        self.out, self.layout, self.key, self._state, self._most = Path(out), layout, key, state, batch_rows
        if self.out.exists():
            raise UserError(str(out), "exists", "a new folder", "remove it or choose another")
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:8] if key else uuid.uuid4().hex[:8]
        self.folder = self.out.with_name(f".{self.out.name}{PARTIAL}{name}")
        self.rows = 0
        self.restored: list[Json] = []
        self._own = row_files.entry_slices(layout)
        self._batches: list[list[int]] = []
        self._forget()

    def _forget(self) -> None:
        self._pending: dict[str, list[Any]] = {spec.name: [] for spec in self.layout}
        self._waiting = self._bytes = 0

    def __enter__(self) -> Self:
        import filelock
        import pyarrow as pa

        kinds = {
            spec.name: pa.large_string()
            if isinstance(spec, Text)
            else pa.large_binary()
            if isinstance(spec, Part)
            else pa.from_numpy_dtype(spec.dtype)
            if not spec.width
            else pa.list_(pa.from_numpy_dtype(spec.dtype), spec.width)
            for spec in self.layout
        }
        self._schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])
        self._lock = filelock.FileLock(self.folder / _LOCK, timeout=0)
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(self.key))
            self._lock.acquire()
            self._file = opened(self.folder / row_files.FILE)
            self._journal = opened(self.folder / JOURNAL if self.key else Path(os.devnull))
            self._restore()
        except filelock.Timeout:
            raise UserError(str(self.out), "is being written by another process", remedy="wait for it") from None
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise UserError(str(self.out), f"cannot be written ({error.strerror or error})") from None
        return self

    def _restore(self) -> None:
        """Resume behind the batches that are whole, or begin."""
        head, end, kept = self._schema.serialize(), 0, 0
        self._file.seek(0)
        if self._file.read(head.size) == head.to_pybytes():
            end = head.size
            self._journal.seek(0)
            for line in self._journal:
                try:
                    found = json.loads(line)
                    data = self._file.read(found["end"] - end)
                    if len(data) < found["end"] - end or self._crc(data, end, found["batch"]) != found["crc"]:
                        break
                except (ValueError, KeyError, TypeError, IndexError):
                    break
                self._batches.append(found["batch"])
                self.restored.append(found["state"])
                self.rows += found["batch"][0]
                end, kept = found["end"], kept + len(line)
        for file, size in ((self._file, end), (self._journal, kept)) if self.key else ((self._file, end),):
            file.truncate(size)
            file.seek(size)
        if end == 0:
            self._file.write(head.to_pybytes())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for file in (self._file, self._journal):
            # What a full disk kept from being written is written when closing, and fails again.
            try:
                file.close()
            except OSError as late:
                error = error or late
        self._lock.release()
        # Told to stop, it can be resumed as after a kill.
        stopped = error is not None and not isinstance(error, Exception)
        if not ((stopped or self._keep) and self.key and self._batches):
            shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(str(self.out), f"cannot be written ({error.strerror or error})") from error

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row: numbers, texts, and for parts bytes or arrays."""
        for spec in self.layout:
            value = row[spec.name]
            if isinstance(spec, Text):
                value = value.encode("utf-8", "replace")
            self._pending[spec.name].append(value)
            self._bytes += 0 if isinstance(spec, Column) else _size(value)
        self.rows, self._waiting = self.rows + 1, self._waiting + 1
        if self._waiting >= self._most or self._bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the rows that are waiting as a batch, and then that it is whole."""
        if not self._waiting:
            return
        import pyarrow as pa

        made, crcs = zip(*(self._array(spec) for spec in self.layout), strict=True)
        message = pa.RecordBatch.from_arrays(list(made), schema=self._schema).serialize()
        begin, places = self._file.seek(0, os.SEEK_END), self._places(message)
        entry = [self._waiting]
        for spec, crc in zip(self.layout, crcs, strict=True):
            at = [place + begin for place in places[spec.name]]
            entry += [at[0], crc] if isinstance(spec, Column) else [*at, self._length(spec), crc]
        self._file.write(message)
        self._file.flush()
        self._batches.append(entry)
        crc = self._crc(message, begin, entry)
        line = {"end": self._file.tell(), "crc": crc, "batch": entry, "state": self._state()}
        self._journal.write(json.dumps(line).encode() + b"\n")
        self._journal.flush()
        self._forget()

    def _array(self, spec: Column | Text | Part) -> tuple[Any, int]:
        """Return a column of the batch, and the CRC-32 of what is compared before it is used."""
        import pyarrow as pa

        values = self._pending[spec.name]
        if isinstance(spec, Column):
            array = np.ascontiguousarray(values, spec.dtype).reshape(-1)
            flat = pa.Array.from_buffers(pa.from_numpy_dtype(spec.dtype), len(array), [None, pa.py_buffer(array)])
            if spec.width:
                flat = pa.FixedSizeListArray.from_arrays(flat, spec.width)
            return flat, zlib.crc32(array.data)
        offsets = np.cumsum([0, *map(_size, values)], dtype=np.int64)
        data = _flat(values[0]) if len(values) == 1 else b"".join(map(_flat, values))
        crc = zlib.crc32(offsets.data)
        kind = pa.large_binary()
        if isinstance(spec, Text):
            kind, crc = pa.large_string(), zlib.crc32(data, crc)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, len(values), buffers), crc

    def _crc(self, batch: bytes | Any, begin: int, entry: Sequence[int]) -> int:
        """Compute the CRC-32 of a batch that begins at byte `begin`, with zeros for what is known only at the end."""
        data = bytearray(batch)
        for spec in self.layout:
            if isinstance(spec, Column) and spec.late:
                first = entry[self._own[spec.name].start] - begin
                place = slice(first, first + entry[0] * spec.stride)
                data[place] = bytes(len(data[place]))
        return zlib.crc32(data)

    def _length(self, spec: Text | Part) -> int:
        return sum(map(_size, self._pending[spec.name]))

    def _places(self, message: Any) -> dict[str, list[int]]:
        """Return where the buffers of each column begin in the message of a batch."""
        import pyarrow as pa

        found = pa.ipc.read_record_batch(message, self._schema)
        places = {}
        for spec in self.layout:
            # An empty buffer has no address; nothing is read there.
            buffers = [buffer for buffer in found.column(spec.name).buffers() if buffer is not None]
            places[spec.name] = [max(0, buffer.address - message.address) if buffer.size else 0 for buffer in buffers]
            if len(places[spec.name]) == 1 and not isinstance(spec, Column):
                places[spec.name].append(0)
        return places

    # ---- The end

    def replace(self, name: str, values: np.ndarray) -> None:
        """Write the numbers of all rows anew, of a column that is known only at the end."""
        self._flush()
        (dtype,) = (spec.dtype for spec in self.layout if spec.name == name and isinstance(spec, Column))
        first, at = 0, self._own[name].start
        for entry in self._batches:
            data = np.ascontiguousarray(values[first : first + entry[0]], dtype)
            os.pwrite(self._file.fileno(), data.data, entry[at])
            entry[at + 1], first = zlib.crc32(data.data), first + entry[0]

    def save(self, name: str, array: np.ndarray) -> None:
        """Write an array that is not of a row."""
        np.save(self.folder / name, array, allow_pickle=False)

    def save_json(self, name: str, value: Json) -> None:
        """Write names that are not of a row."""
        (self.folder / name).write_bytes(json.dumps(value).encode("utf-8"))

    def reading(self, kind: type[Rows], manifest: Mapping[str, Json]) -> Rows:
        """Open what was written, before it has its name."""
        self._flush()
        self._file.flush()
        form = {"format": kind.FORM.format, "version": kind.FORM.version}
        arrow = {"bytes": self._file.seek(0, os.SEEK_END), "batches": self._batches}
        return kind.unchecked(self.folder, {**form, **manifest, "files": {}, "arrow": arrow})

    def publish(self, kind: type[Rows], manifest: Mapping[str, Json]) -> None:
        """Write the manifest with form, sizes, hashes and digest, make all durable, and give the folder its name."""
        self._flush()
        self._file.write(b"\xff\xff\xff\xff\0\0\0\0")  # the end of a stream
        found = self.reading(kind, manifest)
        self._file.close()
        self._journal.close()
        whole = dict(found.manifest)
        whole["files"] = {name: found.entry(name) for name in sorted(kind.hashed_files(whole))}
        whole["arrow"] = {**whole["arrow"], "sha256": sha256(self.folder / row_files.FILE)}
        whole["digest"] = kind.digest_of(whole)
        (self.folder / row_files.MANIFEST).write_text(_text(whole), "utf-8")
        self._lock.release()
        for path in self.folder.iterdir():
            sync_file(path)
        sync_folder(self.folder)
        self.folder.rename(self.out)
        for name in (JOURNAL, _LOCK):  # not before: where the disk refuses the name, all but the name is there
            (self.out / name).unlink(missing_ok=True)
        sync_folder(self.out)
        sync_folder(self.out.parent)


def opened(path: Path) -> BinaryIO:
    """Open a file to read and write, made where it is not there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")


def _size(value: bytes | memoryview | np.ndarray) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes


def _flat(value: bytes | memoryview | np.ndarray) -> bytes | memoryview:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if isinstance(value, np.ndarray) else value


def _text(manifest: Mapping[str, Json]) -> str:
    """Write a manifest for readers: a line for each entry and for each batch."""
    batches = ",\n   ".join(json.dumps(entry) for entry in manifest["arrow"]["batches"])
    text = json.dumps({**manifest, "arrow": {**manifest["arrow"], "batches": ["BATCHES"]}}, indent=1)
    return text.replace('"BATCHES"', batches, 1)

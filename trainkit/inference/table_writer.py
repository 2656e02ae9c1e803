"""Write embeddings and classes as a table: a row per image or record.

Rows are written as they are predicted, to a hidden file beside the table that becomes the table at the end.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from trainkit.data.threads import threads
from trainkit.errors import UserError
from trainkit.files import sync_file
from trainkit.inference.output_folder import Predicted, Request

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

Item = TypeVar("Item")
Seen = TypeVar("Seen")
SUFFIXES = (".parquet", ".csv")
BATCH = 64
"""Entries per forward pass."""
ROWS = 16 * BATCH
"""Entries per row group of a parquet file."""
_METADATA = b"trainkit"
"""Key of the origin in the metadata of the parquet file."""

Columns = dict[str, Any]
"""Name to one value per row: texts, numbers (rows,), or vectors (rows, D)."""


@dataclass(frozen=True, kw_only=True)
class Entries(Generic[Item, Seen]):
    """Samples to predict, in a fixed order."""

    total: int
    items: Callable[[], Iterable[Item]]
    read: Callable[[Item], Seen]
    """Reads one, on any thread. Raises UserError for a damaged one, which then has no row."""
    columns: Callable[[Sequence[Seen]], Columns]
    """Predicts the rows of a batch or less."""
    example: Seen
    """A sample whose columns define the schema."""


def check_target(out: Path) -> None:
    """Raise UserError if a table cannot be written to `out`: wrong suffix, or it exists already."""
    if out.suffix.lower() not in SUFFIXES:
        found = "not the name of a table, which this run predicts"
        raise UserError(str(out), found, f"a file {' or '.join(SUFFIXES)}", f"use {out}.parquet")
    if out.exists():
        raise UserError(str(out), "exists already", remedy="name another file, or move it")


def predicted(rows: Mapping[str, Tensor], names: Sequence[str]) -> Columns:
    """Convert the rows of a task to columns: classes with probabilities, embeddings and their norms."""
    columns: Columns = {}
    if "logits" in rows:
        probabilities = rows["logits"].float().softmax(1).cpu().numpy()
        best = probabilities.argmax(1)
        columns["class"] = [names[number] for number in best.tolist()]
        columns["probability"] = probabilities[np.arange(len(best)), best]
        columns["probabilities"] = probabilities
    for name in ("embedding", "norm"):
        if name in rows:
            columns[name] = rows[name].float().cpu().numpy()
    return columns


def write(
    asked: Request,
    entries: Entries[Item, Seen],
    names: Sequence[str],
    said: Mapping[str, Any],
    weights: Path,
    notes: Sequence[str] = (),
) -> Predicted:
    """Write the table of all entries; nothing if all are damaged.

    `names` are the names of the classes; `said` describes the origin of the numbers. Raises UserError if it cannot be
    written.
    """
    out, on_progress = asked.out, asked.on_progress
    schema = _schema(entries.columns([entries.example]), {**said, "classes": list(names)})
    if out.suffix.lower() == ".csv" and "probabilities" not in schema.names:
        found = "CSV cannot store embeddings, the only output of this run"
        raise UserError(str(out), found, "a file .parquet", f"use {out.with_suffix('.parquet')}")
    seen, rows = 0, 0
    held: list[Columns] = []
    damaged: list[str] = []
    table = _Table(out, schema, names)
    try:
        with ThreadPoolExecutor(threads()) as pool:
            for batch in _prefetched(entries.items(), entries.read, pool):
                if on_progress:
                    on_progress(seen, entries.total)
                read = [one for one in batch if not isinstance(one, UserError)]
                damaged += [str(one) for one in batch if isinstance(one, UserError)]
                if read:
                    held.append(entries.columns(read))
                seen, rows = seen + len(batch), rows + len(read)
                if held and (seen % ROWS == 0 or seen == entries.total):
                    table.write(_arrow(held, schema))
                    held = []
        if seen != entries.total:
            found = f"{seen} of {entries.total} entries were read: the source changed meanwhile"
            raise UserError(str(out), found, remedy="run the command again")
        if rows:
            table.finish()
    finally:
        table.discard()
    if on_progress:
        on_progress(seen, entries.total)
    known = tuple(names) if "class" in schema.names else ()
    written = (out,) if rows else ()
    return Predicted(written, tuple(damaged), tuple(notes), known, weights, rows, table.columns)


class _Table:
    """A table that is being written beside `out`; `columns` are the names of its columns."""

    def __init__(self, out: Path, schema: pa.Schema, names: Sequence[str]):
        from pyarrow import csv, parquet

        self._out, self._aside = out, out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.part")
        self._flat = _flat_schema(schema, names) if out.suffix.lower() == ".csv" else None
        self.columns = tuple((self._flat or schema).names)
        with self._writable():
            out.parent.mkdir(parents=True, exist_ok=True)
            if self._flat is not None:
                self._file = csv.CSVWriter(self._aside, self._flat)
            else:
                self._file = parquet.ParquetWriter(self._aside, schema, compression="zstd", write_page_checksum=True)

    def write(self, table: pa.Table) -> None:
        """Append rows. Raises UserError."""
        with self._writable():
            self._file.write_table(table if self._flat is None else _flat(table, self._flat))

    def finish(self) -> None:
        """Put the table in its place. Raises UserError if there is a file by now."""
        with self._writable():
            self._file.close()
            sync_file(self._aside)
            if self._out.exists():
                raise UserError(str(self._out), "was created by another process meanwhile", remedy="name another file")
            os.replace(self._aside, self._out)

    def discard(self) -> None:
        """Remove what is not in its place."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            found = f"cannot be written ({error.strerror or error})"
            raise UserError(str(self._out), found, remedy="check permissions and free space") from None


def _prefetched(
    items: Iterable[Item], read: Callable[[Item], Seen], pool: ThreadPoolExecutor
) -> Iterator[list[Seen | UserError]]:
    """Read the items a batch at a time, while threads read the next one; a UserError stands for a damaged one."""

    def one(item: Item) -> Seen | UserError:
        try:
            return read(item)
        except UserError as error:
            return error

    items = iter(items)

    def begun() -> list[Future[Seen | UserError]]:
        return [pool.submit(one, item) for item in islice(items, BATCH)]

    waiting = begun()
    while waiting:
        coming = begun()
        yield [future.result() for future in waiting]
        waiting = coming


def _schema(like: Columns, said: Mapping[str, Any]) -> pa.Schema:
    """Derive the schema: texts, float32, int64, and vectors of one length."""
    import pyarrow as pa

    fields = []
    for name, column in like.items():
        array = np.asarray(column)
        kind = {"f": pa.float32(), "i": pa.int64()}.get(array.dtype.kind, pa.string())
        fields.append((name, pa.list_(kind, array.shape[1]) if array.ndim == 2 else kind))
    return pa.schema(fields, metadata={_METADATA: json.dumps(said).encode()})


def _arrow(held: Sequence[Columns], schema: pa.Schema) -> pa.Table:
    """Join the columns of batches to rows of a table."""
    import pyarrow as pa

    arrays = []
    for field in schema:
        if pa.types.is_fixed_size_list(field.type):
            flat = np.concatenate([np.asarray(columns[field.name], np.float32).reshape(-1) for columns in held])
            arrays.append(
                pa.FixedSizeListArray.from_arrays(pa.array(flat, field.type.value_type), field.type.list_size)
            )
        else:
            values = [value for columns in held for value in np.asarray(columns[field.name]).tolist()]
            if field.type == pa.string():  # file names may have bytes that are not UTF-8
                values = [str(value).encode(errors="backslashreplace").decode() for value in values]
            arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _flat_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Return the columns of a CSV: texts and numbers, and `p.NAME` with the probability of each class; no vectors."""
    import pyarrow as pa

    plain = [field for field in schema if not pa.types.is_fixed_size_list(field.type)]
    return pa.schema([*plain, *(pa.field(f"p.{name}", pa.float32()) for name in names)])


def _flat(table: pa.Table, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    plain = [table[name] for name in schema.names if name in table.column_names]
    every = np.stack(table["probabilities"].to_pylist()).astype(np.float32)
    return pa.Table.from_arrays([*plain, *map(pa.array, every.T)], schema=schema)

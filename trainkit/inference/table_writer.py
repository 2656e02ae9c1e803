"""Write embeddings and classes as a table: a row per image or record.

Rows are written as they are predicted, to a hidden file beside the table that becomes the table at the end.
"""

from __future__ import annotations

import functools
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
    import pyarrow as pa
    from pyarrow import csv, parquet

    out, progress, flat = asked.out, asked.on_progress or (lambda done, total: None), asked.out.suffix.lower() == ".csv"

    def table(read: Sequence[Seen]) -> pa.Table:
        columns = entries.columns(read)
        return _arrow(_flat(columns, names, out) if flat else columns)

    origin = {_METADATA: json.dumps({**said, "classes": list(names)}).encode()}
    schema = table([entries.example]).schema.with_metadata(origin)
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.part")
    with _writable(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        parquet_file = functools.partial(parquet.ParquetWriter, compression="zstd", write_page_checksum=True)
        file = (csv.CSVWriter if flat else parquet_file)(aside, schema)
    seen, rows, held, damaged = 0, 0, list[pa.Table](), list[str]()
    try:
        with ThreadPoolExecutor(threads()) as pool:
            for batch in _prefetched(entries.items(), entries.read, pool):
                progress(seen, entries.total)
                read = [one for one in batch if not isinstance(one, UserError)]
                damaged += [str(one) for one in batch if isinstance(one, UserError)]
                held += [table(read)] if read else []
                seen, rows = seen + len(batch), rows + len(read)
                if held and (seen % ROWS == 0 or seen == entries.total):
                    with _writable(out):
                        file.write_table(pa.concat_tables(held).combine_chunks().cast(schema))
                    held = []
        if seen != entries.total:
            found = f"{seen} of {entries.total} entries were read: the source changed meanwhile"
            raise UserError(str(out), found, remedy="run the command again")
        with _writable(out):
            file.close()
            if rows:
                sync_file(aside)
                if out.exists():
                    raise UserError(str(out), "was created by another process meanwhile", remedy="name another file")
                os.replace(aside, out)
    finally:
        file.close()
        aside.unlink(missing_ok=True)
    progress(seen, entries.total)
    known = tuple(names) if "class" in schema.names else ()
    return Predicted((out,) if rows else (), tuple(damaged), tuple(notes), known, weights, rows, tuple(schema.names))


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = f"cannot be written ({error.strerror or error})"
        raise UserError(str(out), found, remedy="check permissions and free space") from None


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


def _arrow(columns: Columns) -> pa.Table:
    """Make a table of columns: texts, float32, int64, and vectors of one length."""
    import pyarrow as pa

    arrays = {}
    for name, column in columns.items():
        values = np.asarray(column)
        if values.ndim == 2:
            flat = pa.array(values.astype(np.float32).reshape(-1))
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        elif values.dtype.kind in "fi":
            arrays[name] = pa.array(values.astype(np.float32 if values.dtype.kind == "f" else np.int64))
        else:  # file names may have bytes that are not UTF-8
            texts = [str(value).encode(errors="backslashreplace").decode() for value in values.tolist()]
            arrays[name] = pa.array(texts, pa.string())
    return pa.table(arrays)


def _flat(columns: Columns, names: Sequence[str], out: Path) -> Columns:
    """Return the columns of a CSV: texts and numbers, and `p.NAME` with the probability of each class; no vectors."""
    if "probabilities" not in columns:
        found = "CSV cannot store embeddings, the only output of this run"
        raise UserError(str(out), found, "a file .parquet", f"use {out.with_suffix('.parquet')}")
    plain = {name: column for name, column in columns.items() if np.ndim(column) == 1}
    return plain | {f"p.{name}": columns["probabilities"][:, k] for k, name in enumerate(names)}

"""Write embeddings and classes as a table: a row per image or record, written in parts.

Until a table is finished its parts are in a folder beside it, `OUT.parts`. An interrupted prediction keeps complete
parts and continues after them; batches begin at the same entries, so the numbers are the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainkit.data.threads import threads
from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.inference.output_folder import Predicted, Request

if TYPE_CHECKING:
    import pyarrow as pa

Item = TypeVar("Item")
Seen = TypeVar("Seen")
SUFFIXES = (".parquet", ".csv")
BATCH = 64
"""Entries per forward pass."""
ROWS = 16 * BATCH
"""Entries per part: at most this many are computed again after an interruption."""
ABOUT = "about.json"
_CHECK = "check permissions and free space"
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
    key: str
    """Hash of the source files."""


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
    """Write the table of all entries, and resume an interrupted attempt.

    `names` are the names of the classes; `said` describes the origin of the numbers. Raises UserError if existing parts
    are of another prediction.
    """
    out, on_progress = asked.out, asked.on_progress
    schema = _schema(entries.columns([entries.example]), {**said, "classes": list(names)})
    if out.suffix.lower() == ".csv" and "probabilities" not in schema.names:
        found = "CSV cannot store embeddings, the only output of this run"
        raise UserError(str(out), found, "a file .parquet", f"use {out.with_suffix('.parquet')}")
    folder = out.with_name(f"{out.name}.parts")
    done = _begun(folder, {**said, "key": entries.key, "total": entries.total, "rows": ROWS})
    seen = min(done * ROWS, entries.total)
    held: list[Columns] = []
    bad: list[str] = []
    with ThreadPoolExecutor(threads()) as pool:
        for batch in _prefetched(islice(entries.items(), seen, None), entries.read, pool):
            if on_progress:
                on_progress(seen, entries.total)
            read = [one for one in batch if not isinstance(one, UserError)]
            bad += [str(one) for one in batch if isinstance(one, UserError)]
            if read:
                held.append(entries.columns(read))
            seen += len(batch)
            if seen % ROWS == 0 or seen == entries.total:
                _keep(folder, (seen - 1) // ROWS, held, bad, schema)
                held, bad = [], []
    if seen != entries.total:
        found = f"{seen} of {entries.total} entries were read: the source changed meanwhile"
        raise UserError(str(out), found, remedy="run the command again")
    if on_progress:
        on_progress(seen, entries.total)
    rows, columns, damaged = _join(folder, out, schema, names)
    known = tuple(names) if "class" in columns else ()
    return Predicted((out,) if rows else (), damaged, tuple(notes), known, weights, rows, columns)


def _begun(folder: Path, said: Mapping[str, Any]) -> int:
    """Create the folder of parts, and count the complete parts of this prediction."""
    file, text = folder / ABOUT, json.dumps(said, indent=1, sort_keys=True) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            if any(not left.name.startswith(".") for left in folder.iterdir()):
                raise UserError(str(folder), "contains other files", remedy="move it, or name another table")
            write_aside(file, text)
        elif file.read_text(encoding="utf-8") != text:
            found = "contains parts of another prediction (other weights, images or settings)"
            raise UserError(str(folder), found, remedy="remove it to start again, or name another table")
    except OSError as error:
        raise UserError(str(folder), f"cannot be written ({error.strerror or error})", remedy=_CHECK) from None
    done = 0
    while _part(folder, done).is_file():
        done += 1
    return done


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


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


def _keep(folder: Path, number: int, held: Sequence[Columns], bad: Sequence[str], schema: pa.Schema) -> None:
    """Write a part atomically, with a file of the errors of damaged samples."""
    import pyarrow as pa
    from pyarrow import parquet

    arrays = []
    for field in schema:
        if pa.types.is_fixed_size_list(field.type):
            parts = [np.asarray(columns[field.name], np.float32).reshape(-1) for columns in held]
            flat = np.concatenate(parts) if parts else np.empty(0, np.float32)
            arrays.append(
                pa.FixedSizeListArray.from_arrays(pa.array(flat, field.type.value_type), field.type.list_size)
            )
        else:
            values = [value for columns in held for value in np.asarray(columns[field.name]).tolist()]
            if field.type == pa.string():  # file names may have bytes that are not UTF-8
                values = [str(value).encode(errors="backslashreplace").decode() for value in values]
            arrays.append(pa.array(values, field.type))
    path = _part(folder, number)
    aside = path.with_suffix(".new")
    try:
        write_aside(path.with_suffix(".json"), json.dumps(list(bad)) + "\n")
        table = pa.Table.from_arrays(arrays, schema=schema)
        parquet.write_table(table, aside, compression="zstd", write_page_checksum=True)
        _settle(aside)
        os.replace(aside, path)
    except OSError as error:
        raise UserError(str(path), f"cannot be written ({error.strerror or error})", remedy=_CHECK) from None


def _join(
    folder: Path, out: Path, schema: pa.Schema, names: Sequence[str]
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Join the parts and delete them; return rows, columns, and errors of damaged samples."""
    from pyarrow import parquet

    parts = sorted(folder.glob("part-*.parquet"))
    bad = [line for part in parts for line in json.loads(part.with_suffix(".json").read_text(encoding="utf-8"))]
    rows = sum(parquet.read_metadata(part).num_rows for part in parts)
    columns = tuple(schema.names)
    if rows:
        aside = folder / f"whole{out.suffix.lower()}"
        tables = (parquet.read_table(part, page_checksum_verification=True) for part in parts)
        try:
            if out.suffix.lower() == ".csv":
                columns = _write_csv(aside, tables, schema, names)
            else:
                first = next(tables)
                with parquet.ParquetWriter(aside, first.schema, compression="zstd", write_page_checksum=True) as writer:
                    for table in chain([first], tables):
                        writer.write_table(table)
            _settle(aside)
            if out.exists():
                raise UserError(str(out), "was created by another process meanwhile", remedy="name another file")
            os.replace(aside, out)
        except OSError as error:
            raise UserError(str(out), f"cannot be written ({error.strerror or error})", remedy=_CHECK) from None
    shutil.rmtree(folder, ignore_errors=True)
    return rows, columns, tuple(bad)


def _write_csv(file: Path, tables: Iterable[pa.Table], schema: pa.Schema, names: Sequence[str]) -> tuple[str, ...]:
    """Write texts and numbers, and a column `p.NAME` with the probability of each class, but no vectors."""
    import pyarrow as pa
    from pyarrow import csv

    plain = [field for field in schema if not pa.types.is_fixed_size_list(field.type)]
    flat = pa.schema([*plain, *(pa.field(f"p.{name}", pa.float32()) for name in names)])
    with csv.CSVWriter(file, flat) as writer:
        for table in tables:
            arrays = [table[field.name].combine_chunks() for field in plain]
            every = np.stack(table["probabilities"].to_pylist()) if len(table) else np.empty((0, len(names)))
            arrays += [pa.array(every[:, place].astype(np.float32)) for place in range(len(names))]
            writer.write_table(pa.Table.from_arrays(arrays, schema=flat))
    return tuple(flat.names)


def _settle(file: Path) -> None:
    with file.open("rb") as written:
        os.fsync(written.fileno())


def zeros(count: int, side: tuple[int, int]) -> Tensor:
    """Make black images, uint8 (count, 3, *side)."""
    return torch.zeros(count, 3, *side, dtype=torch.uint8)

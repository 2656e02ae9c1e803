"""Read the rows of files: CSV, JSON, parquet, Arrow streams, folders of images.

Files are read as they come: nothing is copied, and no more of one is in memory than some rows. Each is checked before
it is read, because nothing else bounds what it unpacks to.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainkit.data.formats import image_decode
from trainkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

BATCH_BYTES = 64 << 20
"""Bytes of rows of a parquet file that are read together, about; a single row may take more."""

RATIO = 100
"""Of the unpacked bytes of a row group to those of its file, where they are more than BATCH_BYTES."""

NAME_COLUMN = "image_path"
"""Where it is there, a row is called by it: groups are found in it."""

PATH_COLUMN = "file_name"
"""Column of the paths of images in their metadata."""

SUFFIXES = {".csv": ",", ".tsv": "\t", ".json": "", ".jsonl": "", ".parquet": ""}
"""Files that hold rows, and what parts the cells of a line."""

_ABSENT = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None"})
"""Cells of a CSV file that say nothing."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")

Cell = Any
"""What a row has in a column: bytes, text, a number, a mapping, None."""
Read = Callable[[Sequence[str]], Iterator[tuple[str, Sequence[Cell]]]]
"""The rows of a table, in order: place in words, and the cells of the columns that are named."""


class Column(NamedTuple):
    """The type of a column, as a message names it, and what its cells are."""

    type: str
    holds: Literal["images", "text", "numbers", "other"]


@dataclass(frozen=True)
class Content:
    """The rows of some files, not read yet."""

    columns: Mapping[str, Column]
    size: int
    read: Read
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of each column that is a ClassLabel."""


def open_rows(files: Sequence[Path], at_once: int = 256) -> Content:
    """Open files of one kind, known by their endings: CSV, JSON or parquet.

    Of parquet files about `at_once` rows are read together. Raises UserError where one cannot be read, or where it has
    other columns than those before.
    """
    suffix = files[0].suffix.lower()
    if suffix == ".parquet":
        return _open_parquet(files, at_once)
    return _open_texts(files, SUFFIXES.get(suffix, ""))


def open_metadata(file: Path, root: Path) -> Content:
    """Open the metadata of images, with paths that begin beside it, as a table of paths below `root`."""
    content, above = open_rows([file]), os.path.relpath(file.parent, root)

    def read(names: Sequence[str]) -> Iterator[tuple[str, Sequence[Cell]]]:
        for where, cells in content.read(names):
            yield (
                where,
                [
                    os.path.normpath(os.path.join(above, cell))
                    if name == PATH_COLUMN and isinstance(cell, str)
                    else cell
                    for name, cell in zip(names, cells, strict=True)
                ],
            )

    return Content(content.columns, content.size, read, content.classes)


def open_folders(files: Sequence[Path], root: Path) -> Content:
    """Open images in folders of classes as a table of their paths below `root` and the names of their folders."""
    paths = [file.relative_to(root) for file in files if image_decode.is_called_picture(file.name)]

    def read(names: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
        for path in paths:
            cells = {"image": path.as_posix(), "label": path.parent.name}
            yield f"{root}/{path}", [cells[name] for name in names]

    return Content(dict.fromkeys(("image", "label"), _column("string")), len(paths), read)


@contextlib.contextmanager
def naming(where: str, expected: str) -> Iterator[None]:
    """Turn what libraries raise over a file into UserErrors that name it."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise UserError(where, f"cannot be read ({said})", expected) from None


# Text.


def csv_lines(file: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a CSV file in UTF-8 and their numbers from 1, without empty ones. Raises UserError."""
    number = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            lines = csv.reader(text, strict=True, delimiter=delimiter)
            for line in lines:
                if line:
                    yield number + 1, line
                number = lines.line_num
    except (OSError, ValueError, csv.Error) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{file}, after line {number}", f"cannot be read ({text})", "a CSV file in UTF-8") from None


def csv_rows(file: Path, delimiter: str = ",") -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """Return the header of a CSV file, and its other lines with their places. Raises UserError as they are read."""
    lines = csv_lines(file, delimiter)
    header = next(lines, (0, []))[1]
    if not header:
        raise UserError(str(file), "cannot be read (no columns)", "a header, and a row a line")

    def rows() -> Iterator[tuple[str, list[str]]]:
        for number, line in lines:
            if len(line) != len(header):
                raise UserError(f"{file}, line {number}", f"{len(line)} cells", f"{len(header)}, as the first line has")
            yield f"{file}, line {number}", line

    return header, rows()


def _open_texts(files: Sequence[Path], delimiter: str) -> Content:
    """Open CSV or JSON files. Cells of CSV are read as text, also those of a column with nothing but numbers."""
    kinds: dict[str, str] = {}
    size = 0
    for file in files:
        if delimiter:
            header = csv_rows(file, delimiter)[0]
            if twice := [name for name, count in Counter(header).items() if count > 1]:
                raise UserError(str(file), f"the column {twice[0]} more than once"[:200], "each column once")
            if kinds and header != list(kinds):
                raise UserError(str(file), "other columns", f"those of {files[0].name}")
            kinds = kinds or dict.fromkeys(header, "null")
        for _, row in _text_rows(file, delimiter):
            size += 1
            for name, cell in row.items():
                if cell is not None:
                    kind = _kind_of(cell) if delimiter else _JSON.get(type(cell), "other")
                    kinds[name] = _common(kinds.get(name, "null"), kind)
                kinds.setdefault(name, "null")

    def read(names: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
        for file in files:
            for where, row in _text_rows(file, delimiter):
                yield where, [row.get(name) for name in names]

    return Content({name: _column(kind) for name, kind in kinds.items()}, size, read)


def _kind_of(cell: str) -> str:
    """Return the type of a cell of a CSV file."""
    if _WHOLE.fullmatch(cell):
        return "int64"
    try:
        float(cell)
    except ValueError:
        return "string"
    return "double"


def _common(before: str, kind: str) -> str:
    """Return the type of a column that has cells of two."""
    if before in ("null", kind):
        return kind
    return "double" if {before, kind} == {"int64", "double"} else "string"


def _column(kind: str) -> Column:
    return Column(kind, "text" if kind == "string" else "numbers" if kind in ("int64", "double") else "other")


_JSON = {str: "string", int: "int64", float: "double", bool: "bool", list: "list", dict: "struct"}


def _text_rows(file: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Yield the rows of a CSV file, or of a JSON file where nothing parts its cells, with their places."""
    if delimiter:
        header, rows = csv_rows(file, delimiter)
        for where, line in rows:
            yield where, {name: None if cell in _ABSENT else cell for name, cell in zip(header, line, strict=True)}
        return
    for where, row in _json_rows(file):
        if not isinstance(row, dict):
            raise UserError(where, "a row that is not a mapping of columns", "a mapping a row")
        yield where, row


def _json_rows(file: Path) -> Iterator[tuple[str, Cell]]:
    """Yield the values of a JSON file with their places: those of the list in all of a `.json`, else one a line."""
    if file.suffix.lower() == ".json":
        try:
            whole = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):  # it may be one value a line
            pass
        else:
            rows = whole if isinstance(whole, list) else [whole]
            yield from ((f"{file}, entry {n}", row) for n, row in enumerate(rows))
            return
    with naming(str(file), "a file of JSON"), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                with naming(f"{file}, line {number}", "JSON, a mapping a line"):
                    value = json.loads(line)
                yield f"{file}, line {number}", value


# Parquet and Arrow.


def _open_parquet(files: Sequence[Path], at_once: int) -> Content:
    """Open parquet files. Where they have checksums of their pages, a flipped bit is found."""
    import pyarrow.parquet as pq

    def about(file: Path) -> tuple[pyarrow.Schema, int]:
        with pq.ParquetFile(file) as table:
            return table.schema_arrow, table.metadata.num_rows

    def batches(file: Path, names: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        with pq.ParquetFile(file, page_checksum_verification=True) as table:
            yield from table.iter_batches(_bounded(table, file, at_once), columns=list(names))

    return _of_batches(files, "a whole parquet file", about, batches)


def _bounded(table: ParquetFile, file: Path, at_once: int) -> int:
    """Return the number of rows of a parquet file, `at_once` at most, that together take about BATCH_BYTES.

    In a column with a dictionary thousands of rows may be one large value, which is made once for each of them: so a
    row is taken to be as large as its row group. Raises UserError for what unpacks to too much.

    Of a footer no more is asked than these sums: where pyarrow's Python reads what one says of a column, nothing
    catches what Arrow throws, and 25.0.1 aborts the interpreter over a histogram of levels that is too long.
    """
    groups, size = table.metadata, file.stat().st_size
    largest = max((groups.row_group(n).total_byte_size for n in range(groups.num_row_groups)), default=0)
    if largest > max(BATCH_BYTES, RATIO * size) or largest < 0:
        found = f"a row group of {largest} bytes unpacked, of a file of {size}"
        raise UserError(str(file), found, f"at most {RATIO} times the file")
    return max(1, min(at_once, BATCH_BYTES // max(1, largest)))


def open_streams(files: Sequence[Path]) -> Content:
    """Open Arrow stream files, as `datasets` saves sets; they are memory-mapped. Raises UserError as `open_rows`."""

    def about(file: Path) -> tuple[pyarrow.Schema, int]:
        with _stream(file) as stream:
            return stream.schema, sum(batch.num_rows for batch in _counted(stream, file))

    def batches(file: Path, _: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        with _stream(file) as stream:
            yield from _counted(stream, file)

    return _of_batches(files, "a whole Arrow file", about, batches)


@contextlib.contextmanager
def _stream(file: Path) -> Iterator[pyarrow.RecordBatchReader]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        _refuse_compressed(file, source)
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        yield stream


def _counted(stream: pyarrow.RecordBatchReader, file: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yield record batches; one without columns may claim any number of rows, which pyarrow believes."""
    for batch in stream:
        if batch.num_rows < 0:
            raise UserError(str(file), f"a record batch of {batch.num_rows} rows", "0 or more", "save the set again")
        yield batch


def _refuse_compressed(file: Path, source: pyarrow.MemoryMappedFile) -> None:
    """Raise UserError for an Arrow stream with compressed buffers: `datasets` writes none, and 20 KB unpack to 600 MB.

    What is compressed is said in the metadata of each message (format/Message.fbs of Apache Arrow), which are read
    alone: buffers stay where they are.
    """
    import pyarrow as pa

    for message in pa.ipc.MessageReader.open_stream(source):
        if message.type in ("record batch", "dictionary") and _is_compressed(message):
            raise UserError(str(file), "compressed buffers", "an Arrow stream as `datasets` writes it")


def _is_compressed(message: pyarrow.ipc.Message) -> bool:
    """Return True where the flatbuffer of a message has the field `compression` of a record batch."""
    data = message.metadata.to_pybytes()

    def number(place: int, size: int = 4) -> int:
        if not 0 <= place <= len(data) - size:
            raise ValueError("a message with offsets outside itself")
        return int.from_bytes(data[place : place + size], "little", signed=size == 4)

    def entry(table: int, k: int) -> int:
        """Return the place of entry `k` of a table, 0 where it has none."""
        listed = table - number(table)
        offset = number(listed + 4 + 2 * k, 2) if 4 + 2 * k < number(listed, 2) else 0
        return table + offset if offset else 0

    header = entry(number(0), 2)
    table = header + number(header)
    if message.type == "dictionary":
        place = entry(table, 1)
        table = place + number(place)
    return entry(table, 3) != 0


def _of_batches(
    files: Sequence[Path],
    expected: str,
    about: Callable[[Path], tuple[pyarrow.Schema, int]],
    batches: Callable[[Path, Sequence[str]], Iterator[pyarrow.RecordBatch]],
) -> Content:
    """Return the rows of record batches, whose files say `about` themselves what columns and how many rows they have.

    Of images one at a time is turned into bytes.
    """
    schema, size = None, 0
    for file in files:
        with naming(str(file), expected):
            own, rows = about(file)
        if schema is not None and not own.equals(schema):
            raise UserError(str(file), "other columns", f"those of {files[0].name}")
        schema, size = own, size + rows
    columns = {part.name: _arrow_column(part.type) for part in schema or ()}
    place = str(files[0]) if len(files) == 1 else str(files[0].parent)

    def sound(names: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        for file in files:
            with naming(str(file), expected):
                for batch in batches(file, names):
                    batch.validate(full=True)
                    yield batch

    def read(names: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
        row = 0
        for batch in sound(names):
            cells = [batch.column(name) for name in names]
            cells = [
                some if columns[name].holds == "images" else some.to_pylist()
                for name, some in zip(names, cells, strict=True)
            ]
            for number in range(batch.num_rows):
                found = [some[number] for some in cells]
                yield f"{place}, row {row}", [cell.as_py() if hasattr(cell, "as_py") else cell for cell in found]
                row += 1

    return Content(columns, size, read, _classes_in(schema))


def _arrow_column(kind: pyarrow.DataType) -> Column:
    import pyarrow as pa

    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return Column(str(kind), "images")
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return Column(str(kind), "images")
    if pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_null(plain):
        return Column(str(kind), "text")
    return Column(str(kind), "numbers" if pa.types.is_integer(plain) or pa.types.is_floating(plain) else "other")


def _classes_in(schema: Any) -> dict[str, list[str]]:
    try:
        return class_names(json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def class_names(features: Any) -> dict[str, list[str]]:
    """Return the names of each column that is a ClassLabel, of features as `datasets` writes them."""
    found = {}
    for column, kind in features.items() if isinstance(features, dict) else ():
        names = kind.get("names") if isinstance(kind, dict) else None
        if isinstance(names, list) and all(isinstance(one, str) for one in names) and len(set(names)) == len(names):
            found[column] = names
    return found

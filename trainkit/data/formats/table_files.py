"""Read the rows of files, local or of the hub: CSV, JSON, parquet, Arrow streams, webdataset shards, folders of images.

Files are read as they come: nothing is copied, and no more of one is in memory than some rows. Each is checked before
it is read, because nothing else bounds what it unpacks to.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, cast

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
"""Where it is there, a row is called by it: groups are found in it. Of shards it is the name of a sample."""

PATH_COLUMN = "file_name"
"""Column of the paths of images in their metadata."""

SUFFIXES = {".csv": ",", ".tsv": "\t", ".json": "", ".jsonl": "", ".ndjson": "", ".parquet": "", ".tar": ""}
"""Files that hold rows, and what parts the cells of a line."""

_ABSENT = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None"})
"""Cells of a CSV file that say nothing."""
_NUMBERS = frozenset({"cls", "index", "id"})
_TEXTS = _NUMBERS | {"txt", "text", "json"}
"""Fields of the samples of a shard that are read beside images."""
_COMPARED = 5
"""Samples of a shard that must have the same fields."""
_TAR_BLOCK = 512
"""Bytes of a block of a tar file, of which the last ones are zero."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")

TWICE = "several columns of this name"
"""Type of a column of CSV whose name stands twice in the header."""

File = Path | str
"""A file of this machine, or the name of one of the hub, `hf://datasets/owner/name@revision/file`."""
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
    size: int | None
    """None where nothing says how many rows there are before all are read."""
    read: Read
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of each column that is a ClassLabel."""


def open_rows(files: Sequence[File], delimiter: str | None = None, at_once: int = 256) -> Content:
    """Open files of one kind, known by their endings: CSV, JSON, parquet or shards; `delimiter` parts cells of CSV.

    Of parquet files about `at_once` rows are read together. Raises UserError where one cannot be read, or where it has
    other columns than those before.
    """
    suffix = PurePosixPath(files[0]).suffix.lower()
    if suffix == ".parquet":
        return _open_parquet(files, at_once)
    if suffix == ".tar":
        return _open_shards(files)
    return _open_texts(files, delimiter or SUFFIXES.get(suffix, ""))


def open_metadata(files: Sequence[File], root: File) -> Content:
    """Open the metadata of images, with paths that begin beside it, as a table of paths below `root`."""
    contents = [open_rows([file]) for file in files]
    above = [os.path.relpath(posixpath.dirname(str(file)), str(root)) for file in files]

    def read(names: Sequence[str]) -> Iterator[tuple[str, Sequence[Cell]]]:
        place = names.index(PATH_COLUMN) if PATH_COLUMN in names else None
        for folder, content in zip(above, contents, strict=True):
            for where, cells in content.read(names):
                if place is not None and isinstance(path := cells[place], str):
                    cells = [*cells[:place], posixpath.normpath(posixpath.join(folder, path)), *cells[place + 1 :]]
                yield where, cells

    return Content(contents[0].columns, sum(content.size or 0 for content in contents), read, contents[0].classes)


def open_folders(files: Sequence[File], root: File) -> Content:
    """Open images in folders of classes as a table of their paths below `root` and the names of their folders."""
    paths = [str(file).removeprefix(f"{root}/") for file in files if image_decode.is_called_picture(str(file))]

    def read(names: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
        for path in paths:
            cells = {"image": path, "label": PurePosixPath(path).parent.name}
            yield f"{root}/{path}", [cells[name] for name in names]

    return Content(dict.fromkeys(("image", "label"), _column("string")), len(paths), read)


@contextlib.contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """Open a file of this machine, or one of the hub as it comes."""
    if isinstance(file, Path):
        with file.open("rb") as stream:
            yield stream
        return
    import fsspec

    with cast(Any, fsspec.open(file, "rb")) as stream:
        yield stream


@contextlib.contextmanager
def naming(where: str, expected: str) -> Iterator[None]:
    """Turn what libraries raise over a file into UserErrors that name it."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        said = f"{type(error).__name__}: {text}" if isinstance(error, RecursionError) else text
        raise UserError(where, f"cannot be read ({said})", expected) from None


# Text.


def csv_lines(file: File, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a CSV file in UTF-8 and their numbers from 1, without empty ones. Raises UserError."""
    number = 0
    try:
        with opened(file) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
            lines = csv.reader(text, strict=True, delimiter=delimiter)
            for line in lines:
                if line:
                    yield number + 1, line
                number = lines.line_num
    except (OSError, ValueError, csv.Error) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{file}, after line {number}", f"cannot be read ({text})", "a CSV file in UTF-8") from None


def csv_rows(file: File, delimiter: str = ",") -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
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


def _open_texts(files: Sequence[File], delimiter: str) -> Content:
    """Open CSV or JSON files. Cells of CSV are read as text, also those of a column with nothing but numbers."""
    kinds: dict[str, str] = {}
    size = 0
    for file in files:
        if delimiter:
            named = Counter(csv_rows(file, delimiter)[0])
            if kinds and list(named) != list(kinds):
                raise UserError(str(file), "other columns", f"those of {PurePosixPath(files[0]).name}")
            kinds = kinds or {name: "null" if count == 1 else TWICE for name, count in named.items()}
        for _, row in _text_rows(file, delimiter):
            size += 1
            for name, cell in row.items():
                before = kinds.setdefault(name, "null")
                if cell is None or before in ("string", TWICE):
                    continue
                kind = _kind_of(cell) if delimiter else _JSON.get(type(cell), "other")
                if before not in ("null", kind):
                    kind = "double" if {before, kind} == {"int64", "double"} else "string"
                kinds[name] = kind

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


def _column(kind: str) -> Column:
    return Column(kind, "text" if kind == "string" else "numbers" if kind in ("int64", "double") else "other")


_JSON = {str: "string", int: "int64", float: "double", bool: "bool", list: "list", dict: "struct"}


def _text_rows(file: File, delimiter: str) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Yield the rows of a CSV file, or of a JSON file where nothing parts its cells, with their places."""
    if not delimiter:
        yield from _json_rows(file)
        return
    header, rows = csv_rows(file, delimiter)
    for where, line in rows:
        yield where, {name: None if cell in _ABSENT else cell for name, cell in zip(header, line, strict=True)}


def _json_rows(file: File) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Yield the mappings of a JSON file with their places: one or a list of them a line, or in all of a `.json`."""
    for where, value in _json_values(file):
        several = isinstance(value, list)
        for place, row in enumerate(value if several else [value]):
            own = f"{where}, entry {place}" if several else where
            if not isinstance(row, dict):
                raise UserError(own, "a row that is not a mapping of columns", "a mapping a row")
            yield own, row


def _json_values(file: File) -> Iterator[tuple[str, Cell]]:
    with opened(file) as stream:
        lines: Iterable[bytes] = stream
        if PurePosixPath(file).suffix.lower() == ".json":
            data = stream.read()
            with contextlib.suppress(ValueError, RecursionError):  # where it is no single value, it may be one a line
                yield str(file), json.loads(data)
                return
            lines = io.BytesIO(data)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                with naming(f"{file}, line {number}", "JSON, a mapping a line or one list of them"):
                    value = json.loads(line)
                yield f"{file}, line {number}", value


# Shards.


def _open_shards(files: Sequence[File]) -> Content:
    """Open webdataset shards: the images, numbers, texts and JSON of each sample."""
    for file in files:
        _refuse_cut(file)
    first = [sample for sample, _ in zip(_samples(files[0], None), range(_COMPARED), strict=False)]
    if not first:
        raise UserError(str(files[0]), "no rows", "an image a row")
    if any(sample.keys() != first[0].keys() for sample in first):
        found = "samples whose files don't share the same prefix or the same types"
        raise UserError(str(files[0]), found, "files of one name for each sample, as a.jpg and a.cls")

    def read(names: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
        for file in files:
            for number, sample in enumerate(_samples(file, frozenset(names))):
                yield f"{file}, row {number}", [sample.get(name) for name in names]

    kinds = {name: Column("binary", "images") if type(cell) is bytes else _column(_JSON[type(cell)])
             for name, cell in first[0].items()}  # fmt: skip
    return Content(kinds, None, read)


def _samples(file: File, wanted: frozenset[str] | None) -> Iterator[dict[str, Cell]]:
    """Yield the samples of a shard: the fields of files of one name, one after another; only those `wanted`."""
    sample: dict[str, Cell] = {}
    with naming(str(file), "a tar file"), opened(file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for entry in tar:
            folder, stroke, name = entry.name.rpartition("/")
            name, _, field_name = name.partition(".")
            ending = field_name.rpartition(".")[2].lower()
            if not entry.isfile() or not (f".{ending}" in image_decode.SUFFIXES or ending in _TEXTS):
                continue
            name = f"{folder}{stroke}{name}"
            if sample and sample[NAME_COLUMN] != name:
                yield sample
                sample = {}
            sample[NAME_COLUMN] = name
            if wanted is None or field_name.lower() in wanted:
                content = cast(BinaryIO, tar.extractfile(entry))
                sample[field_name.lower()] = _field(f"{file}, {entry.name[:200]}", ending, content)
        if sample:
            yield sample


def _field(where: str, ending: str, stream: BinaryIO) -> Cell:
    """Read a file of a sample, none larger than an image may be."""
    data = stream.read(image_decode.BYTE_CAP + 1)
    if len(data) > image_decode.BYTE_CAP:
        raise UserError(where, f"more than {image_decode.BYTE_CAP} bytes", "an image or a text")
    if ending not in _TEXTS:
        return data
    if ending in _NUMBERS:
        if not data.strip().lstrip(b"-").isdigit():
            raise UserError(where, repr(data[:50]), "a whole number", "select another label column with `columns`")
        return int(data)
    with naming(where, "JSON or text in UTF-8"):
        return json.loads(data) if ending == "json" else data.decode()


def _refuse_cut(file: File) -> None:
    """Raise UserError for a tar file that does not end as one does: it was cut off, or is compressed."""
    with naming(str(file), "a tar file"), opened(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAR_BLOCK))
        tail = stream.read(_TAR_BLOCK)
    if size % _TAR_BLOCK or len(tail) < _TAR_BLOCK or any(tail):
        expected, remedy = "a complete tar file without compression", "write or download it again"
        raise UserError(str(file), f"{size} bytes that are truncated or not a tar file", expected, remedy)


# Parquet and Arrow.


def _open_parquet(files: Sequence[File], at_once: int) -> Content:
    size, schema = 0, None
    for file in files:
        with _parquet(file) as (table, _):
            size += table.metadata.num_rows
            schema = _same(file, table.schema_arrow, schema, files)

    def batches(names: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        for file in files:
            with _parquet(file) as (table, length):
                for batch in table.iter_batches(_bounded(table, file, length, at_once), columns=list(names)):
                    batch.validate(full=True)
                    yield batch

    return _of_batches(files, schema, size, batches)


@contextlib.contextmanager
def _parquet(file: File) -> Iterator[tuple[ParquetFile, int]]:
    """Open a parquet file; with its size. Where it has checksums of its pages, a flipped bit is found."""
    import pyarrow.parquet as pq

    with naming(str(file), "a whole parquet file"), opened(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        with pq.ParquetFile(file if isinstance(file, Path) else stream, page_checksum_verification=True) as table:
            yield table, size


def _bounded(table: ParquetFile, file: File, size: int, at_once: int) -> int:
    """Return the number of rows of a parquet file, `at_once` at most, that together take about BATCH_BYTES.

    In a column with a dictionary thousands of rows may be one large value, which is made once for each of them: so a
    row is taken to be as large as its row group. Raises UserError for what unpacks to too much.

    Of a footer no more is asked than these sums: where pyarrow's Python reads what one says of a column, nothing
    catches what Arrow throws, and 25.0.1 aborts the interpreter over a histogram of levels that is too long.
    """
    groups = table.metadata
    largest = max((groups.row_group(n).total_byte_size for n in range(groups.num_row_groups)), default=0)
    if largest > max(BATCH_BYTES, RATIO * size) or largest < 0:
        found = f"a row group of {largest} bytes unpacked, of a file of {size}"
        raise UserError(str(file), found, f"at most {RATIO} times the file")
    return max(1, min(at_once, BATCH_BYTES // max(1, largest)))


def open_streams(files: Sequence[Path]) -> Content:
    """Open Arrow stream files, as `datasets` saves sets; they are memory-mapped. Raises UserError as `open_rows`."""
    size, schema = 0, None
    for file in files:
        with _stream(file) as stream:
            schema = _same(file, stream.schema, schema, files)
            size += sum(batch.num_rows for batch in _counted(stream, file))

    def batches(_: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        for file in files:
            with _stream(file) as stream:
                for batch in _counted(stream, file):
                    batch.validate(full=True)
                    yield batch

    return _of_batches(files, schema, size, batches)


@contextlib.contextmanager
def _stream(file: Path) -> Iterator[pyarrow.RecordBatchReader]:
    import pyarrow as pa

    with naming(str(file), "a whole Arrow file"):
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


def _same(file: File, schema: Any, before: Any, files: Sequence[File]) -> Any:
    """Return the schema of a file. Raises UserError where it is not that of the files before."""
    if before is not None and not schema.equals(before):
        raise UserError(str(file), "other columns", f"those of {PurePosixPath(files[0]).name}")
    return schema


def _of_batches(
    files: Sequence[File], schema: Any, size: int, batches: Callable[[Sequence[str]], Iterator[pyarrow.RecordBatch]]
) -> Content:
    """Return the rows of record batches; of images one at a time is turned into bytes."""
    columns = {part.name: _arrow_column(part.type) for part in schema}
    place = str(files[0]) if len(files) == 1 else str(PurePosixPath(files[0]).parent)

    def read(names: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
        row = 0
        for batch in batches(names):
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

"""Images in tables: parquet files, sets saved by Hugging Face `datasets`, and what `dataset_files` opens with it.

Splits are files (`val-00000-of-00001.parquet`, the folders of a DatasetDict) or the values of a column `split`, as in
OCEC's parquet: split, label (`open`, `closed`), class_id, image_path, source, image_bytes.

Parquet and Arrow files are read with pyarrow alone, as `datasets` does; but here each file is looked at before it is
read, because nothing else bounds what it unpacks to.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.data.folders import visible
from trainkit.data.record import Columns, Record, Source
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "image_bytes", "bytes", "jpeg", "webp", "file_name", "path")
LABEL_COLUMNS = ("label", "identity", "person", "pid", "class", "class_id", "id", "labels", "fine_label", "cls")
SPLIT_COLUMN = "split"
NAME_COLUMN = "image_path"
"""Where it is there, a row is called by it: groups are found in it."""
GROUP_COLUMN = "image_group"
"""Where it is there, what an image shares with others (person, video, alphabet)."""
NUMBER_COLUMN = "class_id"
"""Beside a label in words: the same class as a number."""

MAP = "or set columns: {{{0}: NAME}} in the block `data`, or --columns {0}=NAME of `data import`"
_COLUMN_OF = {"name": NAME_COLUMN, "group": GROUP_COLUMN}
"""Columns by the words of recipes, where those differ."""

DEFAULT_SPLIT = "train"
_ROWS = 256
BATCH_BYTES = 64 << 20
"""Bytes of rows that are read together, about; a single row may take more."""
RATIO = 100
"""Of the unpacked bytes of a row group to those of its file, where they are more than BATCH_BYTES."""

Batches = Callable[["Sequence[str]"], "Iterator[pyarrow.RecordBatch]"]
"""The batches of a table, with at least the columns named."""


@dataclass(frozen=True)
class Table:
    """The rows of some files, not read yet."""

    kind: str
    path: Path | str
    files: list[Path]
    rows: int | None
    """None where nothing says how many before all are read."""
    schema: pyarrow.Schema
    batches: Batches
    classes: Mapping[str, list[str]] = field(default_factory=dict)
    """Names of each column that is a ClassLabel."""
    open: Callable[[str, str], Path | bytes] | None = None
    """Finds the file that a cell names, `(path, where)`; None where images are in the table itself."""
    root: str = ""
    """Where the paths in cells begin, where those are whole."""
    columns: tuple[tuple[str, str], ...] = ()
    """Names of columns as a recipe maps them, `("image", "img")`."""

    def mapped(self, columns: Columns | None) -> Table:
        """Return the table with columns under the names that they are looked for by: `{"label": "fine_label"}`.

        A column `json.who` is the field `who` of the column `json`. Raises UserError for one that is not there.
        """
        if not columns:
            return self
        import pyarrow as pa

        taken = {name: self._found(old) for name, old in columns.items()}
        kept = [f for f in self.schema if f.name not in taken and f.name not in columns.values()]
        schema = pa.schema([*kept, *(pa.field(name, kind) for name, (_, kind) in taken.items())])

        def batches(wanted: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
            paths = [taken[name][0] if name in taken else [name] for name in wanted]
            for batch in self.batches(list(dict.fromkeys(path[0] for path in paths))):
                yield pa.RecordBatch.from_arrays([_inner(batch, path) for path in paths], names=list(wanted))

        classes = {name: names for name, names in self.classes.items() if name not in columns}
        classes |= {name: self.classes[old] for name, old in columns.items() if old in self.classes}
        return replace(self, schema=schema, batches=batches, classes=classes, columns=tuple(sorted(columns.items())))

    def _found(self, name: str) -> tuple[list[str], pyarrow.DataType]:
        """Return the path to a column and its type."""
        import pyarrow as pa

        path = [name] if name in self.schema.names else name.split(".")
        if path[0] in self.schema.names:
            kind = self.schema.field(path[0]).type
            for part in path[1:]:
                kind = kind.field(part).type if pa.types.is_struct(kind) and kind.get_field_index(part) >= 0 else None
                if kind is None:
                    break
            if kind is not None:
                return path, kind
        near = difflib.get_close_matches(name, self.schema.names, 1)
        remedy = f"did you mean {near[0]!r}?" if near else ""
        raise UserError(str(self.path), f"no column {name!r}"[:200], self.listed_columns(), remedy)

    def may_hold_pictures(self, name: str) -> bool:
        """Return True for a column of images, or of texts that may be paths of them."""
        return holds_pictures(self.schema.field(name).type) or (
            self.open is not None and _holds_text(self.schema, name)
        )

    def listed_columns(self) -> str:
        """List the columns that there are, in words."""
        return f"one of its columns: {few(self.schema.names, 20)}"[:300]

    def name_of(self, value: Any) -> str | None:
        """Return the path below the root that a cell of images names, where it names one."""
        path = value.get("path") if isinstance(value, dict) else value
        return path.removeprefix(f"{self.root}/") if self.open is not None and isinstance(path, str) else None

    def picture(self, value: Any, where: str) -> bytes | Path:
        """Return the image of a cell: its bytes, or the file that it names."""
        path = value.get("path") if isinstance(value, dict) and value.get("bytes") is None else value
        if self.open is not None and isinstance(path, str):
            return self.open(path, where)
        return picture_bytes(value, where)


def is_saved(path: Path) -> bool:
    """Return True for a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def parquet_files(path: Path, split: str | None = None) -> list[Path]:
    """List the parquet files at `path`: itself, or those of a folder or its `data/`.

    Of a folder only those named after the split (`val.parquet`, `val-00000-of-00002.parquet`) where there are any;
    without a split those of `train*`.
    """
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    files = visible(path.glob("*.parquet")) or visible((path / "data").glob("*.parquet"))
    if split is None:
        return [file for file in files if file.name.startswith(DEFAULT_SPLIT)] or files
    return [file for file in files if _is_of(file, split)] or files


def _is_of(file: Path, split: str) -> bool:
    return file.stem == split or file.stem.startswith(f"{split}-")


def saved(path: Path, split: str | None = None, columns: Columns | None = None) -> Source:
    """Open a set saved by Hugging Face `datasets`; of a DatasetDict the split, `train` where none is named.

    Raises UserError when it holds no images, no labels or no such split.
    """
    return source(*_saved(path, split), columns)


def _saved(path: Path, split: str | None) -> tuple[Table, str | None, bool]:
    path, split, whole = _split_folder(path, split)
    files, classes = saved_files(path)
    rows, schema = _stream_size(files)
    return Table("datasets folder", path, files, rows, schema, lambda _: stream_batches(files), classes), split, whole


def parquet(path: Path, split: str | None = None, columns: Columns | None = None) -> Source:
    """Open parquet files with an image and a label column. Raises UserError when they have none, or no such split."""
    return source(*_parquet(path, split), columns)


def open_table(path: Path, split: str | None = None, at_once: int = _ROWS) -> tuple[Table, str | None, bool]:
    """Open a saved set or parquet files, whatever their columns; of parquet files `at_once` rows are read together.

    Returns the table, the split, and whether its files are those of the split. Raises UserError when there is nothing,
    it cannot be read, or there is no such split.
    """
    return _saved(path, split) if is_saved(path) else _parquet(path, split, at_once)


def rows_of(table: Table, split: str | None, whole: bool) -> tuple[str | None, int | None]:
    """Return the value of the split column whose rows are meant (None: all), and their number."""
    counts = _count(table) if _holds_text(table.schema, SPLIT_COLUMN) else None
    return _choose(table, counts, split, whole)


def _parquet(path: Path, split: str | None, at_once: int = _ROWS) -> tuple[Table, str | None, bool]:
    files = parquet_files(path, split)
    named = split is not None and path.is_dir() and all(_is_of(file, split) for file in files)
    return parquet_table(path, files, at_once), split, named


def parquet_table(path: Path | str, files: Iterable[Path | str], at_once: int = _ROWS) -> Table:
    """Return the table of some parquet files, those of `hf://...` as they come.

    Raises UserError where one cannot be read, or has other columns.
    """
    files = list(files)
    rows, schema = 0, None
    for file in files:
        with naming(str(file)), _opened(file) as (table, _):
            rows += table.metadata.num_rows
            if schema is not None and not table.schema_arrow.equals(schema):
                raise UserError(str(file), "other columns", f"those of {Path(files[0]).name}")
            schema = table.schema_arrow

    def batches(columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        for file in files:
            yield from parquet_batches(file, columns, at_once)

    if schema is None:
        raise UserError(str(path), "no parquet files", "at least one")
    local = [file for file in files if isinstance(file, Path)]
    return Table("parquet", path, local, rows, schema, batches, _classes_in(schema))


def parquet_batches(file: Path | str, columns: Sequence[str], at_once: int) -> Iterator[pyarrow.RecordBatch]:
    """Read some columns of a parquet file, checked, `at_once` rows together or fewer where they are large."""
    # Where the writer left checksums of its pages, a flipped bit is found; unasked, pyarrow does not look.
    with naming(str(file)), _opened(file) as (table, size):
        for batch in table.iter_batches(_bounded(table, str(file), size, at_once), columns=list(columns)):
            batch.validate(full=True)
            yield batch


@contextlib.contextmanager
def _opened(file: Path | str) -> Iterator[tuple[ParquetFile, int]]:
    """Open a parquet file, or one of `hf://...` as it comes; with its size."""
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        if isinstance(file, Path):
            source, size = file, file.stat().st_size
        else:
            import fsspec

            source: Any = stack.enter_context(fsspec.open(file, "rb"))
            size = source.size
        yield stack.enter_context(pq.ParquetFile(source, page_checksum_verification=True)), size


def _bounded(table: ParquetFile, where: str, size: int, at_once: int) -> int:
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
        raise UserError(where, found, f"at most {RATIO} times the file")
    return max(1, min(at_once, BATCH_BYTES // max(1, largest)))


def saved_files(path: Path) -> tuple[list[Path], dict[str, list[str]]]:
    """List the Arrow files of a saved set, and the names of each column that is a ClassLabel."""
    state = _json(path / "state.json")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise UserError(str(path / "state.json"), "no _data_files", "the Arrow files of the set")
    files = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise UserError(str(path / "state.json"), f"file {name!r}"[:200], "the name of an Arrow file beside it")
        files.append(path / name)
    features = _json(path / "dataset_info.json").get("features") if (path / "dataset_info.json").is_file() else None
    return files, class_names(features)


def stream_batches(files: list[Path]) -> Iterator[pyarrow.RecordBatch]:
    """Read the record batches of Arrow stream files, memory-mapped and checked."""
    import pyarrow as pa

    for file in files:
        _refuse_compressed(file)
        with naming(str(file)), pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            for batch in _counted(stream, file):
                batch.validate(full=True)
                yield batch


def _counted(stream: pyarrow.RecordBatchReader, file: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yield record batches; one without columns may claim any number of rows, which pyarrow believes."""
    for batch in stream:
        if batch.num_rows < 0:
            raise UserError(str(file), f"a record batch of {batch.num_rows} rows", "0 or more", "save the set again")
        yield batch


def picture_bytes(value: Any, where: str) -> bytes:
    """Return the encoded image in a cell: bytes, or the struct of bytes and path that `datasets` writes."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        remedy = "save the set with its images in it (to_parquet and save_to_disk do so)"
        raise UserError(where, "no image, only a path" if isinstance(value, dict) else "no image", "bytes", remedy)
    return data


def image_column(where: str, schema: pyarrow.Schema, paths: bool = False) -> str:
    """Find the column of images: of a known name, or else the only struct with a field `bytes`.

    With `paths` it may be text that names files.
    """
    fits = {f.name for f in schema if holds_pictures(f.type) or (paths and _holds_text(schema, f.name))}
    named = [name for name in IMAGE_COLUMNS if name in fits]
    structs = [f.name for f in schema if _is_picture_struct(f.type)]
    if not named and len(structs) != 1:
        named = [name for name in IMAGE_COLUMNS if name in schema.names]
        held = f"; {named[0]} holds {schema.field(named[0]).type}, which is not an image" if named else ""
        found = f"columns {', '.join(schema.names)}"[:300] + held[:200]
        raise UserError(where, found, f"images in one of {IMAGE_COLUMNS}", MAP.format("image"))
    return named[0] if named else structs[0]


def source(table: Table, split: str | None, whole: bool, columns: Columns | None = None) -> Source:
    """Make a source of the rows of a split; `whole` where files are those of the split, and no column need say so.

    `columns` says which are the images, labels, names and splits, where their names do not.
    Raises UserError when it holds no images, no labels or no such split.
    """
    table = table.mapped({_COLUMN_OF.get(name, name): old for name, old in (columns or {}).items()})
    image, label = _columns(table)
    texts = [name for name in (SPLIT_COLUMN, NAME_COLUMN, GROUP_COLUMN) if _holds_text(table.schema, name)]
    number = NUMBER_COLUMN if label != NUMBER_COLUMN and NUMBER_COLUMN in table.schema.names else None
    names = table.classes.get(label)
    chosen, size = rows_of(table, split, whole)
    place = str(table.path) if split is None and chosen is None else f"{table.path}#{chosen or split}"
    wanted = [image, label, *texts, *([number] if number else [])]

    def records() -> Iterator[Record]:
        row, numbers = -1, {}
        for batch in table.batches(wanted):
            cells = {name: batch.column(name) for name in wanted}
            splits = cells[SPLIT_COLUMN].to_pylist() if chosen is not None else None
            ids = cells[NAME_COLUMN].to_pylist() if NAME_COLUMN in cells else None
            for place in range(batch.num_rows):
                row += 1
                if splits is not None and splits[place] != chosen:
                    continue
                cell = cells[image][place].as_py()
                name = ids[place] if ids is not None and ids[place] else table.name_of(cell)
                where = f"{table.path}, row {row}" + (f" ({name[:200]})" if name else "")
                value = cells[label][place].as_py()
                if isinstance(value, bool) or not isinstance(value, int | str):
                    raise UserError(where, f"{label}: {value!r}"[:200], "a whole number or a name")
                if names is not None and not (isinstance(value, int) and 0 <= value < len(names)):
                    raise UserError(where, f"{label}: {value!r}"[:200], f"0 to {len(names) - 1}, its named classes")
                if number is not None and isinstance(value, str):
                    same = cells[number][place].as_py()
                    if numbers.setdefault(value, same) != same:
                        found = f"{number} {same!r} for {value!r}"[:200]
                        raise UserError(where, found, f"{numbers[value]!r}, as in rows before")
                group = cells[GROUP_COLUMN][place].as_py() if GROUP_COLUMN in cells else None
                yield Record(name or f"row {row}", value, table.picture(cell, where), where, group=group)

    return Source(
        table.kind,
        place,
        size,
        records,
        tuple(table.files),
        None if names is None else tuple(names),
        split=chosen or split,
        columns=table.columns,
        label=dict(table.columns).get(label, label),
    )


def _count(table: Table) -> dict[str, int]:
    """Count the rows of each split that the column names."""
    counts: Counter[str] = Counter()
    empty = 0
    for batch in table.batches([SPLIT_COLUMN]):
        for entry in batch.column(SPLIT_COLUMN).value_counts().to_pylist():
            if entry["values"] is None:
                empty += entry["counts"]
            else:
                counts[entry["values"]] += entry["counts"]
    if empty:
        raise UserError(str(table.path), f"{empty} rows whose {SPLIT_COLUMN} is empty", "a split in every row")
    return dict(counts)


def _choose(
    table: Table, counts: dict[str, int] | None, split: str | None, whole: bool
) -> tuple[str | None, int | None]:
    """Return the value of the split column whose rows are taken, or None for all; and how many rows that is."""
    counts = counts or {}
    there = sorted(counts)
    if split is None:
        if len(there) < 2:
            return None, table.rows
        split, whole = DEFAULT_SPLIT, False
    elif whole and split not in there:
        return None, table.rows
    if split not in there:
        listed = ", ".join(there[:10]) or ", ".join(sorted({_stem(file) for file in table.files})[:10])
        raise UserError(f"{table.path}#{split}", f"no such split; available: {listed}"[:300], "one of these after #")
    return split, counts[split]


def _stem(file: Path) -> str:
    return re.sub(r"-\d{5}-of-\d{5}.*", "", file.stem)


def _columns(table: Table) -> tuple[str, str]:
    where, names = str(table.path), table.schema.names
    image = image_column(where, table.schema, table.open is not None)
    label = next((name for name in LABEL_COLUMNS if name in names), None)
    if label is None:
        found = f"columns {', '.join(names)}"[:300]
        raise UserError(where, found, f"labels in one of {LABEL_COLUMNS}", MAP.format("label"))
    return image, label


def _inner(batch: pyarrow.RecordBatch, path: list[str]) -> pyarrow.Array:
    """Return a column, or a field of it."""
    column = batch.column(path[0])
    for part in path[1:]:
        fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
        column = fields[part]
    return column


def _holds_text(schema: pyarrow.Schema, name: str) -> bool:
    import pyarrow as pa

    if name not in schema.names:
        return False
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def holds_pictures(kind: pyarrow.DataType) -> bool:
    """Return True for a type that can hold encoded images: bytes, or the struct that `datasets` writes."""
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _is_picture_struct(kind)


def _is_picture_struct(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and "bytes" in [kind.field(i).name for i in range(kind.num_fields)]


def _stream_size(files: list[Path]) -> tuple[int, pyarrow.Schema]:
    import pyarrow as pa

    size, schema = 0, None
    for file in files:
        _refuse_compressed(file)
        with naming(str(file)), pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            if schema is not None and not stream.schema.equals(schema):
                raise UserError(str(file), "other columns", f"those of {files[0].name}")
            schema = stream.schema
            size += sum(batch.num_rows for batch in _counted(stream, file))
    return size, schema


def _split_folder(path: Path, split: str | None) -> tuple[Path, str | None, bool]:
    """The folder of the split, the split, and whether the folder is the split."""
    if (path / "state.json").is_file():
        own = _json(path / "state.json").get("_split")
        return path, split, split is not None and split == own
    splits = _json(path / "dataset_dict.json").get("splits")
    wanted = split or DEFAULT_SPLIT
    if not isinstance(splits, list) or wanted not in splits or not (path / wanted / "state.json").is_file():
        found = f"no such split; available: {splits}" if split else f"splits {splits}"
        where = f"{path}#{split}" if split else str(path)
        raise UserError(where, found[:300], f"a split {wanted!r}", "name one of these after #")
    return path / wanted, split, True


def _classes_in(schema: pyarrow.Schema) -> dict[str, list[str]]:
    try:
        info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return class_names(info["info"]["features"])
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


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > 64 << 20:
            raise UserError(str(path), "more than 64 MB", "a description")
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(path), f"cannot be read ({error})"[:300]) from None
    if not isinstance(value, dict):
        raise UserError(str(path), type(value).__name__, "a mapping")
    return value


def _refuse_compressed(file: Path) -> None:
    """Raise UserError for an Arrow stream with compressed buffers: `datasets` writes none, and 20 KB unpack to 600 MB.

    What is compressed is said in the metadata of each message (format/Message.fbs of Apache Arrow), which are read
    alone: buffers stay where they are.
    """
    import pyarrow as pa

    with naming(str(file)), pa.memory_map(str(file)) as source:
        for message in pa.ipc.MessageReader.open_stream(source):
            if message.type in ("record batch", "dictionary") and _compressed(message):
                raise UserError(str(file), "compressed buffers", "an Arrow stream as `datasets` writes it")


def _compressed(message: pyarrow.ipc.Message) -> bool:
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
        field = entry(table, 1)
        table = field + number(field)
    return entry(table, 3) != 0


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Turn pyarrow's exceptions into UserErrors that name the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # names of columns that are no UTF-8, too
        text = " ".join(str(error).split())[:200]
        raise UserError(where, f"cannot be read ({text})", "a whole Arrow or parquet file") from None

"""Pictures in Arrow tables: parquet files, and sets saved by Hugging Face `datasets`, read with pyarrow alone.

Reading the tables directly leaves out every decoder and builder that `datasets` would choose from the file's content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.data.record import Record, Source
from trainkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "image_bytes", "bytes")
LABEL_COLUMNS = ("label", "identity", "person", "pid", "class", "class_id", "id")
_ROWS = 256

Batches = Callable[[], "Iterator[pyarrow.RecordBatch]"]


def is_saved(path: Path) -> bool:
    """Whether `path` was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def parquet_files(path: Path) -> list[Path]:
    """The parquet files at `path`: itself, or those of a folder or its `data/`; only `train*` where there are any."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    files = sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet"))
    return [file for file in files if file.name.startswith("train")] or files


def saved(path: Path, split: str = "train") -> Source:
    """A set saved by Hugging Face `datasets`. Raises UserError when it holds no pictures or no labels."""
    path = _split_folder(path, split)
    files, names = saved_files(path)
    size, schema = _stream_size(files)
    return _source("datasets folder", path, files, size, schema, lambda: stream_batches(files), names)


def parquet(path: Path) -> Source:
    """Parquet files with a picture and a label column. Raises UserError when they have none."""
    import pyarrow.parquet as pq

    files = parquet_files(path)
    size, schema = 0, None
    for file in files:
        with _naming(str(file)), pq.ParquetFile(file) as table:
            size += table.metadata.num_rows
            if schema is not None and not table.schema_arrow.equals(schema):
                raise UserError(str(file), "other columns", f"those of {files[0].name}")
            schema = table.schema_arrow

    def batches() -> Iterator[pyarrow.RecordBatch]:
        image, label = _columns(str(path), schema)
        for file in files:
            with _naming(str(file)), pq.ParquetFile(file) as table:
                yield from table.iter_batches(_ROWS, columns=[image, label])

    if schema is None:
        raise UserError(str(path), "no parquet files", "at least one")
    return _source("parquet", path, files, size, schema, batches, _class_names(schema))


def saved_files(path: Path) -> tuple[list[Path], list[str] | None]:
    """The Arrow files of a saved set and the names of its ClassLabel, if it has one."""
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
    return files, _label_names(features)


def stream_batches(files: list[Path]) -> Iterator[pyarrow.RecordBatch]:
    """The record batches of Arrow stream files, memory-mapped and checked."""
    import pyarrow as pa

    for file in files:
        with _naming(str(file)), pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                batch.validate(full=True)
                yield batch


def picture_bytes(value: Any, where: str) -> bytes:
    """The encoded picture in a cell: bytes, or the struct of bytes and path that `datasets` writes."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        remedy = "save the set with its pictures in it (to_parquet and save_to_disk do so)"
        raise UserError(where, "no picture, only a path" if isinstance(value, dict) else "no picture", "bytes", remedy)
    return data


def image_column(where: str, schema: pyarrow.Schema) -> str:
    """The column of pictures: of a known name, or else the only struct with a field `bytes`."""
    named = [name for name in IMAGE_COLUMNS if name in schema.names and _holds_pictures(schema.field(name).type)]
    structs = [field.name for field in schema if _is_picture_struct(field.type)]
    if not named and len(structs) != 1:
        raise UserError(where, f"columns {', '.join(schema.names)}"[:300], f"pictures in one of {IMAGE_COLUMNS}")
    return named[0] if named else structs[0]


def _source(
    kind: str,
    path: Path,
    files: list[Path],
    size: int,
    schema: pyarrow.Schema,
    batches: Batches,
    names: list[str] | None,
) -> Source:
    image, label = _columns(str(path), schema)

    def records() -> Iterator[Record]:
        row = 0
        for batch in batches():
            for picture, value in zip(batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True):
                where = f"{path}, row {row}"
                if isinstance(value, bool) or not isinstance(value, int | str):
                    raise UserError(where, f"{label}: {value!r}"[:200], "a whole number or a name")
                if names is not None and not (isinstance(value, int) and 0 <= value < len(names)):
                    raise UserError(where, f"{label}: {value!r}"[:200], f"0 to {len(names) - 1}, its named classes")
                yield Record(f"row {row}", value, picture_bytes(picture, where), where)
                row += 1

    return Source(kind, str(path), size, records, tuple(files), None if names is None else tuple(names))


def _columns(where: str, schema: pyarrow.Schema) -> tuple[str, str]:
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    if label is None:
        raise UserError(where, f"columns {', '.join(schema.names)}"[:300], f"labels in one of {LABEL_COLUMNS}")
    return image_column(where, schema), label


def _holds_pictures(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _is_picture_struct(kind)


def _is_picture_struct(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and "bytes" in [kind.field(i).name for i in range(kind.num_fields)]


def _stream_size(files: list[Path]) -> tuple[int, pyarrow.Schema]:
    import pyarrow as pa

    size, schema = 0, None
    for file in files:
        with _naming(str(file)), pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            schema = stream.schema
            size += sum(batch.num_rows for batch in stream)
    return size, schema


def _split_folder(path: Path, split: str) -> Path:
    if (path / "state.json").is_file():
        return path
    splits = _json(path / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or split not in splits or not (path / split / "state.json").is_file():
        raise UserError(str(path), f"splits {splits}"[:200], f"a split {split!r}", "name the folder of one split")
    return path / split


def _class_names(schema: pyarrow.Schema) -> list[str] | None:
    try:
        info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return _label_names(info["info"]["features"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _label_names(features: Any) -> list[str] | None:
    if not isinstance(features, dict):
        return None
    label = next((features[name] for name in LABEL_COLUMNS if name in features), None)
    names = label.get("names") if isinstance(label, dict) else None
    usable = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return names if usable else None


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


class _naming:
    """Turns pyarrow's exceptions into UserErrors that name the file."""

    def __init__(self, where: str):
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        import pyarrow as pa

        if isinstance(error, pa.ArrowException | OSError):
            text = " ".join(str(error).split())[:200]
            raise UserError(self.where, f"cannot be read ({text})", "a whole Arrow or parquet file") from None

"""Sets that Hugging Face `datasets` reads: images with metadata, CSV, JSON, webdataset shards, sets with a card.

`datasets` finds configurations, splits and files, and reads them as they come, so that nothing is copied first. What it
would do beside that is left out: files elsewhere than the set says, archives that it would unpack, formats that are no
tables of images. Parquet is read by `arrow_tables`, which looks at a file before it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

from trainkit.data import folders
from trainkit.data.formats import arrow_tables, image_decode
from trainkit.data.formats.arrow_tables import DEFAULT_SPLIT, Table
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    import pyarrow
    from datasets import DatasetBuilder

SUFFIXES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".tar": "webdataset"}
"""Files that are a set by themselves, and by which module of `datasets` they are read."""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
CARDS = ("README.md", ".huggingface.yaml")
CARD_LIMIT = 1 << 20
"""Largest card, in bytes."""

_KINDS = {"csv": "CSV", "json": "JSON", "webdataset": "webdataset", "imagefolder": "image folder", "parquet": "parquet"}
_NUMBERS = frozenset({"cls", "index", "id"})
_TEXTS = _NUMBERS | {"txt", "text", "json"}
"""Fields of webdataset samples that are read beside images."""
_JSON = (".json", ".jsonl", ".ndjson")
_BLOCK = 512
"""Bytes of a block of a tar file, of which the last ones are zero."""
_HEAD = 1 << 16
_ROWS, _SAMPLES = 256, 16

Find = Callable[[str, str], Path | bytes]
"""Finds the image that a cell names: `(path, row in words)`."""


def is_laid_out(path: Path) -> bool:
    """Return True for a file, or a folder with metadata, shards or a card, that is read here."""
    if path.is_file():
        return path.suffix.lower() in SUFFIXES
    shards = folders.visible((*path.glob("*.tar"), *path.glob("*/*.tar")))
    return bool(_metadata_files(path) or shards) or _has_card(path)


def open_table(
    path: Path, split: str | None, config: str | None = None, boundary: Path | None = None
) -> tuple[Table, str | None, bool]:
    """Open a set on this machine: table, split, and whether its files are those of the split.

    Files lie below `boundary`, else below the folder of the set. Raises UserError where there is nothing to read, or no
    such configuration or split.
    """
    root, where = Path(os.path.abspath(path if path.is_dir() else path.parent)), str(path)
    with _naming(where):
        if path.is_file() and path.suffix.lower() not in SUFFIXES:
            raise UserError(where, "a file of unknown kind", f"one of {', '.join(SUFFIXES)}")
        if path.is_file():
            sep = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
            builder = _load(SUFFIXES[path.suffix.lower()], data_files={DEFAULT_SPLIT: [where]}, **sep)
        elif config is None and (found := _metadata_files(path)):
            builder = _load("imagefolder", data_files={name: [str(file)] for name, file in found.items()})
        else:
            _check_card(path)
            builder = _configured(where, where, config, config is not None and (path / config).is_dir())

    def find(name: str, row: str) -> Path:
        file = Path(os.path.normpath(root / name))
        if not file.is_relative_to(root) or folders.leads_out(boundary or root, str(file)):
            raise UserError(row, f"the path {name[:300]!r}", f"a path below {root}")
        return file

    return _table(builder, where, split, path.is_file(), root, find)


def open_remote(
    where: str, repository: str, revision: str | None, config: str | None, split: str | None
) -> tuple[Table, str | None, bool]:
    """Open a set of the hub, to be read as it comes; nothing of it is kept. As `open_table`."""
    builder = remote_builder(where, repository, revision, config)
    prefix = f"hf://datasets/{repository}@"

    def find(name: str, row: str) -> bytes:
        name = name if "://" in name else f"{builder.base_path}/{name}"
        if not name.startswith(prefix) or ".." in PurePosixPath(name).parts:
            raise UserError(row, f"the path {name[:300]!r}", "a path of the repository")
        with _naming(row), _opened(name) as file:
            return file.read(image_decode.BYTE_CAP + 1)

    return _table(builder, where, split, False, prefix, find)


def remote_builder(where: str, repository: str, revision: str | None, config: str | None) -> DatasetBuilder:
    """Ask the hub for the configuration of a set. Raises UserError where it has none, or needs code."""
    with _naming(where):
        return _configured(repository, where, config, None, revision=revision)


def files_of(builder: DatasetBuilder, where: str, root: Path | str) -> dict[str, list[str]]:
    """Return the files of each split. Raises UserError for files outside of `root`, and for formats not read here."""
    kind = builder_of(builder)
    found = {str(name): sorted(map(str, files)) for name, files in (builder.config.data_files or {}).items()}
    every = [file for files in found.values() for file in files]
    if kind not in _KINDS:
        raise UserError(where, f"files of the kind {kind}", f"one of {', '.join(sorted(_KINDS))}")
    for file in every:
        if not os.path.normpath(file).startswith(os.path.normpath(str(root))) or ".." in PurePosixPath(file).parts:
            raise UserError(where, f"its card names {file[:300]}", "files of the set itself")
        if file.endswith((".gz", ".zip", ".bz2", ".xz", ".zst", ".lz4", ".7z")) or "zip://" in file:
            raise UserError(file, "an archive", "files as they are", "unpack it")
    return found


def builder_of(builder: DatasetBuilder) -> str:
    """Return the name of the module of `datasets` that reads a set, such as `csv`."""
    return next((cls.__module__ for cls in type(builder).__mro__ if ".packaged_modules." in cls.__module__), "?").split(
        "."
    )[-1]


def _load(path: str, **how: Any) -> DatasetBuilder:
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it raises is told once
    return datasets.load_dataset_builder(path, **how)


def _configured(path: str, where: str, config: str | None, is_folder: bool | None, **how: Any) -> DatasetBuilder:
    """Load a folder or repository: a configuration of its card, else a folder of it by that name."""
    if config is None or not is_folder:
        try:
            return _load(path, name=config, **how)
        except ValueError as error:
            names = re.findall(r"'([^']+)'", str(error).partition("[")[2].partition("]")[0])
            if "onfig" not in str(error) or not (names or config):
                raise
            if config is None or (names and names != ["default"]):
                found = f"no configuration {config!r}" if config else "several configurations"
                example = f"{where.partition('#')[0]}/{names[0]}"
                raise UserError(where, f"{found}: there is {few(names, 10)}"[:500], "one", f"as in {example}") from None
    return _load(path, data_dir=config, **how)


def _metadata_files(path: Path) -> dict[str, Path]:
    """Find the metadata of images: in the folder itself, or in those of its splits."""
    places = {DEFAULT_SPLIT: path} if any(_names_files(path / name) for name in METADATA) else {}
    try:
        places = places or {inner.name: inner for inner in folders.visible(path.iterdir()) if inner.is_dir()}
    except OSError:
        return {}
    every = ((split, place / name) for split, place in places.items() for name in reversed(METADATA))
    return {split: file for split, file in every if _names_files(file)}


def _names_files(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError:
        return False
    return b"file_name" in (head if file.suffix == ".parquet" else head.partition(b"\n")[0])


def _has_card(path: Path) -> bool:
    try:
        head = (path / CARDS[0]).read_bytes()[:CARD_LIMIT]
    except OSError:
        return False
    return head.startswith(b"---") and re.search(rb"^(configs|dataset_info):", head, re.MULTILINE) is not None


def _check_card(path: Path) -> None:
    """Raise UserError for a card that names files outside of its folder, or on another machine."""
    import yaml

    for name in CARDS:
        file = path / name
        if not file.is_file():
            continue
        text = folders.read_text(file, CARD_LIMIT, "a card")
        head = text.split("---", 2)[1] if text.startswith("---") and text.count("---") > 1 else text
        head = head if name != CARDS[0] or text.startswith("---") else ""
        try:
            told = yaml.safe_load(head)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise UserError(str(file), f"cannot be read ({' '.join(str(error).split())[:200]})", "YAML") from None
        for word in _words(told.get("configs") if isinstance(told, dict) else None):
            if "://" in word or os.path.isabs(word) or ".." in PurePosixPath(word).parts:
                raise UserError(str(file), f"names {word[:200]!r}", "files of its folder")


def _words(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict) and depth < 8:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _words(one, depth + 1)


def _table(
    builder: DatasetBuilder,
    where: str,
    split: str | None,
    alone: bool,
    root: Path | str,
    find: Find,
) -> tuple[Table, str | None, bool]:
    """Return the table of a split; `alone` for a file, of which a column may say the split."""
    kind, there = builder_of(builder), files_of(builder, where, root)
    chosen = DEFAULT_SPLIT if alone else split
    if chosen is None:
        chosen = DEFAULT_SPLIT if DEFAULT_SPLIT in there else next(iter(there)) if len(there) == 1 else ""
    if chosen not in there:
        place = where if split is None or "#" in where else f"{where}#{split}"
        listed = "splits " if split is None else "no such split; available: "
        raise UserError(place, f"{listed}{few(sorted(there), 20)}"[:300], "one of these after #")
    files = there[chosen]
    local = [Path(file) for file in files] if isinstance(root, Path) else []
    if kind == "parquet":
        table = _parquet(where, files, bool(local), chosen)
    else:
        for file in files:
            if kind == "webdataset":
                _refuse_cut(file)
            elif file.endswith(_JSON):
                _check_json(file)
        builder = _shards(builder) if kind == "webdataset" else builder
        table = _read(builder, kind, where, chosen, local, find)
    told = builder.info.features
    classes = arrow_tables.class_names(told.to_dict()) if told is not None else {}
    return dataclasses.replace(table, classes={**table.classes, **classes}), split, split is not None and not alone


def _parquet(where: str, files: list[str], local: bool, split: str) -> Table:
    """Return the table of the parquet files of one split, which must be those of one configuration."""
    inner = (PurePosixPath(file).parent for file in files)
    places = sorted({str(place.parent if place.name == split else place) for place in inner})
    if len(places) > 1:
        names = ", ".join(PurePosixPath(place).name for place in places[:8])
        raise UserError(where, f"several configurations: {names}", "one", "name it: hf://owner/name/CONFIGURATION")
    return arrow_tables.parquet_table(Path(places[0]) if local else where, files if not local else map(Path, files))


def _read(builder: DatasetBuilder, kind: str, where: str, split: str, files: list[Path], find: Find) -> Table:
    """Return a table that `datasets` reads."""
    with _naming(where):
        stream: Any = builder.as_streaming_dataset(split)
        if stream.features is not None:
            stream = stream.decode(False)  # of images their bytes or paths, as with Image(decode=False)
        if kind == "webdataset":
            stream = stream.rename_column("__key__", arrow_tables.NAME_COLUMN)
        stream = stream.with_format("arrow")
        first = next(iter(stream.iter(1)), None)
    if first is None:
        raise UserError(f"{where}#{split}", "no rows", "an image a row")

    def batches(columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        with _naming(where):
            for table in stream.iter(_ROWS if kind != "webdataset" else _SAMPLES):
                if missing := [name for name in columns if name not in table.schema.names]:
                    raise UserError(where, f"rows without {few(missing)}", "the same columns in every row")
                for batch in table.select(list(columns)).combine_chunks().to_batches():
                    batch.validate(full=True)
                    yield batch

    told = (builder.info.splits or {}).get(split)
    rows = told.num_examples or None if told is not None else None
    if rows is None and kind != "webdataset":
        rows = sum(batch.num_rows for batch in batches([first.schema.names[-1]]))
    root = str(builder.base_path) if not files else os.path.abspath(where if os.path.isdir(where) else "")
    return Table(_KINDS[kind], Path(where) if files else where, files, rows, first.schema, batches, {}, find, root)


def _opened(file: str) -> Any:
    """Open a file of this machine or of the hub."""
    import fsspec

    return fsspec.open(file, "rb")


def _refuse_cut(file: str) -> None:
    """Raise UserError for a tar file that does not end as one does: it was cut off, or is compressed."""
    with _naming(file), _opened(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _BLOCK))
        tail = stream.read(_BLOCK)
    if size % _BLOCK or len(tail) < _BLOCK or any(tail):
        expected, remedy = "a complete tar file without compression", "write or download it again"
        raise UserError(file, f"{size} bytes that are truncated or not a tar file", expected, remedy)


def _check_json(file: str) -> None:
    """Raise UserError for JSON that is damaged or no rows: over some, the parsers of `datasets` end the process."""
    number = 0
    try:
        with _naming(file), _opened(file) as stream:
            for number, line in enumerate(stream, start=1):  # noqa: B007
                if line.strip():
                    _rows_of(json.loads(line))
            return
    except UserError as found:
        error = found
    with contextlib.suppress(UserError), _naming(file), _opened(file) as stream:
        if file.endswith(".json"):  # one value of many lines
            _rows_of(json.loads(stream.read()))
            return
    raise UserError(f"{file}, line {number}", error.found, "JSON, a mapping a line or one list of them")


def _rows_of(value: Any) -> None:
    if not all(isinstance(row, dict) for row in (value if isinstance(value, list) else [value])):
        raise ValueError("a row that is not a mapping of columns")


def _shards(builder: DatasetBuilder) -> DatasetBuilder:
    """Read shards as `datasets` does, but of each sample its images, numbers, texts and JSON alone."""
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    class Shards(WebDataset):
        DECODERS: ClassVar[Any] = {name: read for name, read in WebDataset.DECODERS.items() if name in _TEXTS}

        @classmethod
        def _get_pipeline_from_tar(cls, tar_path: str, tar_iterator: Any) -> Iterator[dict[str, Any]]:
            return super()._get_pipeline_from_tar(tar_path, _members(tar_path, tar_iterator))

    # `datasets` puts its own functions for files in place of those of the module of a builder.
    Shards.__module__ = WebDataset.__module__
    return Shards(data_files=builder.config.data_files, base_path=builder.base_path)


def _members(shard: str, found: Any) -> Iterator[tuple[str, io.BytesIO]]:
    """Yield the members of a shard that are read, none larger than an image may be."""
    for name, file in found:
        ending = name.rpartition(".")[2].lower()
        if f".{ending}" not in image_decode.SUFFIXES and ending not in _TEXTS:
            continue
        where = f"{shard}, {name[:200]}"
        with _naming(where):
            data = file.read(image_decode.BYTE_CAP + 1)
        if len(data) > image_decode.BYTE_CAP:
            raise UserError(where, f"more than {image_decode.BYTE_CAP} bytes", "an image or a text")
        if ending in _NUMBERS and not data.strip().lstrip(b"-").isdigit():
            raise UserError(where, repr(data[:50]), "a whole number", "select another label column with `columns`")
        yield name, io.BytesIO(data)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn what `datasets` raises into UserErrors of one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _told(where, error) from None


def _told(where: str, error: Exception) -> UserError:
    text = " ".join(str(error).split())
    script = re.search(r"scripts are no longer supported, but found (\S+)", text)
    if script:
        remedy = "use its parquet files, if the hub has them: hf://owner/name@refs/convert/parquet"
        return UserError(where, f"needs its own code to be read ({script[1]})", "data files; no code is run", remedy)
    if type(error).__name__ == "DatasetNotFoundError":
        found = (
            "is not on the hub, or requires a login" if "gated" not in text else "requires accepting a form on the hub"
        )
        return UserError(where, found, "the name of a set", "log in with `hf auth login`, or set HF_TOKEN")
    if type(error).__name__ in ("EmptyDatasetError", "DataFilesNotFoundError"):
        return UserError(where, f"no files of data ({text[:200]})", f"one of {', '.join(sorted(_KINDS.values()))}")
    if isinstance(error, ConnectionError):
        return UserError(where, f"cannot be reached ({text[:200]})", "a data set of the hub and a network connection")
    return UserError(where, f"cannot be read ({type(error).__name__}: {text[:300]})", "a set that `datasets` reads")

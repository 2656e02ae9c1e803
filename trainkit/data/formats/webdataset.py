"""Read webdataset shards: tar files in which files of one name, one after another, are a sample: `a.jpg`, `a.cls`.

Nothing is unpacked to disk, and no file of a sample may be larger than an image may be.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from trainkit.data.formats import image_decode
from trainkit.data.formats.table_files import NAME_COLUMN, Column, Content, naming
from trainkit.errors import UserError

_NUMBERS = frozenset({"cls", "index", "id"})
_TEXTS = _NUMBERS | {"txt", "text", "json"}
"""Fields that are read beside images."""
_BLOCK = 512
"""Bytes of a block of a tar file, of which the last ones are zero."""


def open_shards(files: Sequence[Path]) -> Content:
    """Open shards: the images, numbers, texts and JSON of each sample, in the fields that the first has.

    Raises UserError for a shard that is cut off or has no samples.
    """
    for file in files:
        _refuse_cut(file)
    first = next(_samples(files[0], None), None)
    if first is None:
        raise UserError(str(files[0]), "no rows", "files of one name for each sample, as a.jpg and a.cls")

    def read(names: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
        for file in files:
            for number, sample in enumerate(_samples(file, frozenset(names))):
                yield f"{file}, row {number}", [sample.get(name) for name in names]

    return Content({name: _column(cell) for name, cell in first.items()}, sum(1 for _ in read([])), read)


def _column(cell: Any) -> Column:
    match cell:
        case bytes():
            return Column("binary", "images")
        case int():
            return Column("int64", "numbers")
        case str():
            return Column("string", "text")
    return Column("struct", "other")


def _samples(file: Path, wanted: frozenset[str] | None) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard, by their fields; None: all fields are read."""
    sample: dict[str, Any] = {}
    with naming(str(file), "a tar file"), tarfile.open(file, mode="r|") as tar:
        for entry in tar:
            folder, stroke, name = entry.name.rpartition("/")
            name, _, field = name.partition(".")
            ending = field.rpartition(".")[2].lower()
            if not entry.isfile() or not (f".{ending}" in image_decode.SUFFIXES or ending in _TEXTS):
                continue
            name = f"{folder}{stroke}{name}"
            if sample and sample[NAME_COLUMN] != name:
                yield sample
                sample = {}
            sample[NAME_COLUMN] = name
            if wanted is None or field.lower() in wanted:
                content = cast(BinaryIO, tar.extractfile(entry))
                sample[field.lower()] = _field(f"{file}, {entry.name[:200]}", ending, content)
        if sample:
            yield sample


def _field(where: str, ending: str, stream: BinaryIO) -> Any:
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


def _refuse_cut(file: Path) -> None:
    """Raise UserError for a tar file that does not end as one does: it was cut off, or is compressed."""
    with naming(str(file), "a tar file"), file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _BLOCK))
        tail = stream.read(_BLOCK)
    if size % _BLOCK or len(tail) < _BLOCK or any(tail):
        expected, remedy = "a complete tar file without compression", "write or download it again"
        raise UserError(str(file), f"{size} bytes that are truncated or not a tar file", expected, remedy)

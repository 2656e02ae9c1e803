"""Edit packed sets: damage a byte, or write rows anew as a program that knows the form would."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from trainkit.data.rows import row_files
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import Column, Text
from trainkit.data.rows.writer import Writer
from trainkit.files import Json


def flip(folder: Path, place: int, mask: int = 4, file: str = row_files.FILE) -> None:
    """Change a byte of a file of a set."""
    content = bytearray((folder / file).read_bytes())
    content[place] ^= mask
    (folder / file).write_bytes(content)


def damage(data: Rows, part: str, row: int, byte: int = 20) -> None:
    """Change a byte of a part of a row."""
    flip(data.path, data.span(part, row)[0] + byte)


def rebuild(
    data: Rows,
    change: Callable[[int, dict[str, object]], None] = lambda row, values: None,
    manifest: Mapping[str, Json] | None = None,
) -> None:
    """Write a set anew with changed rows, or with changed entries of its manifest; all hashes are right afterwards."""
    known = {key: value for key, value in data.manifest.items() if key not in ("format", "version", "digest")}
    aside = data.path.with_name(f"{data.path.name}-rebuilt")
    with Writer(aside, data.layout(data.manifest)) as writer:
        for row in range(len(data)):
            values = {spec.name: _value(data, spec, row) for spec in data.layout(data.manifest)}
            change(row, values)
            writer.add(values)
        for name in data.beside(data.manifest):
            shutil.copy(data.path / name, writer.folder / name)
        writer.publish(type(data), known | dict(manifest or {}))
    shutil.rmtree(data.path)
    aside.rename(data.path)


def _value(data: Rows, spec: object, row: int) -> object:
    if isinstance(spec, Column):
        return data.column(spec.name)[row]
    return data.text(spec.name, row) if isinstance(spec, Text) else data.read(*data.span(spec.name, row))


def rewrite(data: Rows, **columns: np.ndarray) -> None:
    """Write numbers of all rows in place of others; all hashes are right afterwards."""
    rebuild(data, lambda row, values: values.update({name: values_[row] for name, values_ in columns.items()}))

"""Sets that are packed once, into the cache: of their sources, or of a set in the form of before `rows`.

That was a folder of one file for each column. What a user imported stays as it is and where it is; its content, and
with it its digest, is the same in the form of today.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainkit.data import cache
from trainkit.data.rows import row_files
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import Column, Part, Text
from trainkit.data.rows.writer import Writer
from trainkit.errors import UserError
from trainkit.files import Json, sha256

Kind = TypeVar("Kind", bound=Rows)

_log = logging.getLogger(__name__)
_HEADER = 128
"""Bytes of the header of `images.npy`, whatever the number of rows."""


def is_old(path: Path, kind: type[Rows]) -> bool:
    """Return True for a set of this kind in the form of before."""
    try:
        manifest = row_files.read_manifest(path, kind.FORM)
        return "arrow" not in manifest and all((path / name).is_file() for name in manifest["files"])
    except (UserError, KeyError, TypeError):
        return False


def current(path: Path, kind: type[Rows]) -> Path:
    """Return where a set is in the form of today: `path`, or, of one in that of before, a place in the cache.

    Raises UserError where one of before is damaged.
    """
    if not is_old(path, kind):
        return path
    key = cache.key([kind.FORM.format, kind.FORM.version], [path / row_files.MANIFEST])
    return _anew(path, cache.place(f"anew-{key}"), kind)


def is_there(key: str, kind: type[Rows]) -> bool:
    """Return True where a set was packed under this key before."""
    return row_files.is_packed(cache.place(f"{key}-rows")) or is_old(cache.place(key), kind)


def pack_once(
    key: str, kind: type[Kind], make: Callable[[Path, cache.Progress], object], what: str, unit: str = "image"
) -> Kind:
    """Open a set of the cache; where it is not there yet, `make` writes it to the folder that it is given.

    Processes that start together make it once. What an earlier version packed under this key is packed anew. `what`
    and `unit` as of `cache.make_once`; raises what `make` raises.
    """
    before, folder = cache.place(key), cache.place(f"{key}-rows")
    if not row_files.is_packed(folder) and is_old(before, kind):
        _anew(before, folder, kind)

    def made(on_progress: cache.Progress) -> None:
        _log.info("%s into %s, once", what, folder)
        make(folder, on_progress)

    cache.make_once(folder, row_files.is_packed, made, what, unit)
    return kind(folder)


def _anew(path: Path, folder: Path, kind: type[Rows]) -> Path:
    def make(on_progress: cache.Progress) -> None:
        _log.warning("%s is in the form of an earlier version: packed anew, once, into %s", path, folder)
        pack(path, folder, kind, on_progress)

    cache.make_once(folder, row_files.is_packed, make, f"packing {path} anew", "row")
    return folder


def pack(path: Path, out: Path, kind: type[Rows], on_progress: cache.Progress) -> None:
    """Write a set in the form of before to `out`. Raises UserError where it is damaged."""
    manifest = row_files.read_manifest(path, kind.FORM)
    entries = manifest.pop("files")
    for name, entry in entries.items():
        if Path(name).name != name or sha256(path / name) != entry["sha256"]:
            raise UserError(str(path / name), "is not what was written (SHA-256 differs)", remedy=row_files.REBUILD)
    manifest |= {"grouped": True} if "groups.npy" in entries else {}
    with Writer(out, kind.layout(manifest), batch_rows=kind.BATCH_ROWS) as writer:
        total = 0
        for total, row in enumerate(_rows(path, manifest, kind), start=1):
            writer.add(row)
            on_progress(total, manifest.get("rows", total))
        for name in kind.beside(manifest):
            (writer.folder / name).write_bytes((path / name).read_bytes())
        writer.publish(kind, {key: manifest[key] for key in manifest if key not in ("format", "version", "digest")})
    found = json.loads((out / row_files.MANIFEST).read_text("utf-8"))["digest"]
    if found != manifest["digest"]:
        raise UserError(str(path), "its digest does not match its entries", remedy=row_files.REBUILD)


def _rows(path: Path, manifest: Mapping[str, Json], kind: type[Rows]) -> Iterator[dict[str, object]]:
    """Yield the rows of a set in the form of before."""
    columns: dict[str, Callable[[int], object]] = {}
    found, count = kind.of_before(path, manifest), 0
    for spec in kind.layout(manifest):
        file = path / spec.file
        if isinstance(spec, Column):
            values = row_files.mapped(file) if file.exists() else None
            columns[spec.name] = (lambda row: 0) if values is None else values.__getitem__
        elif isinstance(spec, Text):
            texts = found[spec.name] if spec.name in found else file.read_text("utf-8").split("\n")[:-1]
            columns[spec.name], count = texts.__getitem__, len(texts)
        else:
            data = np.asarray(np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8))
            ends = _ends(path, spec, found, len(data))
            count = len(ends) - 1
            columns[spec.name] = lambda row, data=data, ends=ends: data[ends[row] : ends[row + 1]]
    for row in range(count):
        yield {name: read(row) for name, read in columns.items()}


def _ends(path: Path, spec: Part, found: Mapping[str, Sequence[Json]], length: int) -> np.ndarray:
    """Return where each row of a part begins in its file, and where the last ends."""
    if spec.offsets:
        return row_files.mapped(path / spec.offsets)
    if spec.name in found:
        return np.cumsum([0, *found[spec.name]])
    return np.arange(_HEADER, length + 1, spec.stride)

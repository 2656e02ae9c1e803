"""Where pictures of people come from: each source is a list of records, read in order when it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainkit.data.align import LANDMARKS, read_landmarks
from trainkit.data.pictures import SUFFIXES
from trainkit.data.record import Record, Source
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.data.packed import Packed


def folder(root: Path) -> Source:
    """A folder of identities, `root/<identity>/<picture>`, in the order of the names. Raises UserError when empty."""
    files: list[Path] = []
    try:
        people = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        for person in people:
            names = sorted(entry.name for entry in os.scandir(root / person) if entry.is_file())
            files += [root / person / name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES]
    except OSError as error:
        raise UserError(str(root), f"cannot be read ({error.strerror or error})", "a folder of identities") from None
    if not files:
        raise UserError(str(root), "no pictures", "pictures in <identity>/<picture>.jpg")

    def records() -> Iterator[Record]:
        points = read_landmarks(landmarks) if landmarks.is_file() else {}
        for file in files:
            name = f"{file.parent.name}/{file.name}"
            yield Record(name, file.parent.name, file, str(file), points.get(name))

    landmarks = root / LANDMARKS
    made_of = (*files, landmarks) if landmarks.is_file() else tuple(files)
    return Source("folder of identities", str(root), len(files), records, made_of)


def open_source(path: Path) -> Source:
    """The source at `path`, whatever its form. Raises UserError when there is none."""
    from trainkit.data import packed, recordio, tables

    if not path.exists():
        raise UserError(str(path), "does not exist", "a data set")
    if path.suffix == ".rec" or (path / "train.rec").is_file():
        return recordio.insightface(path)
    if packed.is_packed(path):
        return repacked(packed.Packed(path))
    if tables.is_saved(path):
        return tables.saved(path)
    if tables.parquet_files(path):
        return tables.parquet(path)
    if not path.is_dir():
        raise UserError(str(path), "a file of unknown kind", "a folder of identities, .parquet or train.rec")
    return folder(path)


def repacked(data: Packed) -> Source:
    """A packed set as a source, to be packed again at another size."""

    def records() -> Iterator[Record]:
        ids = data.ids()
        for row in range(len(data)):
            pixels = data.fetch(np.asarray([row]))[0].transpose(1, 2, 0)
            yield Record(ids[row], int(data.labels[row]), np.ascontiguousarray(pixels), data.where(row))

    return Source("packed set", str(data.path), len(data), records, (data.path / "manifest.json",), data.class_names)

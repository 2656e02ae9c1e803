"""Where pictures of people come from: each source is a list of records, read in order when it is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainkit.data.pictures import SUFFIXES
from trainkit.errors import UserError


@dataclass(frozen=True)
class Record:
    """One picture of a source."""

    id: str
    """Its name in the source: a relative path, or a row."""
    label: int | str
    """Who it shows, as the source has it."""
    data: Path | bytes | np.ndarray
    """A file, encoded bytes, or uint8 (height, width, 3) pixels."""
    where: str
    """Its place in words, for messages."""
    landmarks: np.ndarray | None = None
    """Five points (x, y) in pixels, where the source has them."""


@dataclass(frozen=True)
class Source:
    """A set of pictures in some foreign form."""

    kind: str
    where: str
    size: int
    """Number of records."""
    records: Callable[[], Iterator[Record]]
    files: tuple[Path, ...] = ()
    """What it is made of, for noticing changes."""


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
        for file in files:
            yield Record(f"{file.parent.name}/{file.name}", file.parent.name, file, str(file))

    return Source("folder of identities", str(root), len(files), records, tuple(files))


def open_source(path: Path) -> Source:
    """The source at `path`, whatever its form. Raises UserError when there is none."""
    if not path.exists():
        raise UserError(str(path), "does not exist", "a data set")
    return folder(path)

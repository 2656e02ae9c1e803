"""Parts of a folder of `rows`: its columns, its manifest, and files beside the rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from trainkit.data import folders
from trainkit.errors import UserError
from trainkit.files import Json

FILE, MANIFEST = "rows.arrow", "manifest.json"
MANIFEST_LIMIT = 16 << 20
"""Largest manifest that is read, in bytes: a batch takes 200 of them."""
ABSENT = object()
"""What an entry is that a manifest has not."""
REBUILD = "remove the folder and import the set again"
RENAME = f"rename them in its source, {REBUILD}"


@dataclass(frozen=True)
class Column:
    """A number of each row, or `width` of them."""

    name: str
    file: str
    """The `.npy` file in whose bytes the column is hashed."""
    dtype: str
    width: int = 0
    late: bool = False
    """True where it is known only when all rows are written: the numbers of classes."""

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return np.dtype(self.dtype).itemsize * max(1, self.width)


@dataclass(frozen=True)
class Text:
    """A text of each row without line breaks, hashed as lines; with `sparse` without empty ones."""

    name: str
    file: str
    sparse: bool = False


@dataclass(frozen=True)
class Part:
    """Bytes of each row, hashed end to end."""

    name: str
    file: str
    offsets: str = ""
    """The `.npy` file in whose bytes it is hashed where each row begins; empty where that follows from others."""
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    """Of each row, an array, where all have one shape: they are hashed as an `.npy` file of all then; else empty."""

    @property
    def stride(self) -> int:
        """Bytes of a row where all have as many, else 0."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape) if self.shape else 0


Layout = Sequence[Column | Text | Part]


@dataclass(frozen=True)
class Form:
    """A kind of rows."""

    format: str
    version: int
    """Of the content, which the digest covers."""
    described: str
    """Such a folder in words."""
    command: str = "trainkit"
    """The command that makes one."""
    counted: str = "rows"
    """The entry of a manifest that has the number of rows."""


def entry_slices(layout: Layout) -> dict[str, slice]:
    """Return where each column has its numbers in the entry of a batch, behind the number of rows.

    These are where values begin and their CRC-32; of texts and parts where offsets and data begin, bytes of data, and
    the CRC-32 of what is compared before it is used.
    """
    ends = list(accumulate((2 if isinstance(spec, Column) else 4 for spec in layout), initial=1))
    return {spec.name: slice(*pair) for spec, pair in zip(layout, pairwise(ends), strict=True)}


def unreadable(path: Path, error: Exception) -> UserError:
    """Return the UserError about a file that cannot be read."""
    text = " ".join(str(error).split())[:120] or type(error).__name__
    return UserError(str(path), f"cannot be read ({text})", remedy=REBUILD)


def mapped(path: Path) -> np.ndarray:
    """Map the array of an .npy file. Raises UserError where it cannot be read; objects are not."""
    try:
        # Not `np.load`, which would take an archive of arrays for one too. As a plain array: slicing a memmap object
        # takes several times as long.
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, OverflowError, TypeError) as error:
        raise unreadable(path, error) from None


def listed(path: Path) -> tuple[str, ...]:
    """Read a JSON file that is a list of names. Raises UserError for others, and for names that tables cannot hold."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise UserError(str(path), "no list of texts", remedy=REBUILD)
    folders.check_names(str(path), found, RENAME)
    return tuple(found)


def is_packed(path: Path, form: Form | None = None) -> bool:
    """Return True for a folder with a manifest; with `form` for one of this form."""
    file = path / MANIFEST
    if form is None or not file.is_file():
        return file.is_file()
    try:
        with file.open("rb") as manifest:
            return f'"{form.format}"'.encode() in manifest.read(MANIFEST_LIMIT)
    except OSError:
        return False


def is_count(value: Json) -> bool:
    """Return True for a whole number that is not below 0."""
    return type(value) is int and value >= 0


def is_text(value: Json) -> bool:
    """Return True for a text."""
    return isinstance(value, str)


def is_list(value: Json, of: Callable[[Json], bool], lengths: Container[int] = range(1 << 62)) -> bool:
    """Return True for a list of some length whose values `of` is true of."""
    return isinstance(value, list) and len(value) in lengths and all(map(of, value))


def read_manifest(path: Path, form: Form) -> dict[str, Json]:
    """Read the manifest of a folder. Raises UserError where there is none of this form and version."""
    file = path / MANIFEST
    try:
        if file.stat().st_size > MANIFEST_LIMIT:
            raise UserError(str(file), f"more than {MANIFEST_LIMIT >> 20} MB", "a manifest", REBUILD)
        manifest = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        found = "no manifest.json" if path.exists() else "does not exist"
        raise UserError(str(path), found, form.described, f"create one with {form.command}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:300], remedy=REBUILD) from None
    if not isinstance(manifest, dict) or manifest.get("format") != form.format:
        raise UserError(str(file), f"not the manifest of {form.described}", f'"format": "{form.format}"')
    if (version := manifest.get("version")) != form.version or "arrow" not in manifest:
        found = f"version {version}"[:100] if version != form.version else "a set of a version before 0.2"
        raise UserError(str(file), found, str(form.version), "import the set again")
    return manifest

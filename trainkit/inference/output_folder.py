"""Write folders of predictions: a file for each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.interfaces import DatasetInfo
from trainkit.tracking.run_folder import RunFolder

T = TypeVar("T")
R = TypeVar("R")
OnProgress = Callable[[int, int], None]
"""Called with the number of finished items and of all items."""


@dataclass(frozen=True)
class Request:
    """A requested prediction: run, source and output."""

    folder: RunFolder
    recipe: Recipe
    meta: DatasetInfo
    source: str
    out: Path
    mirror: bool
    on_progress: OnProgress | None


@dataclass(frozen=True)
class Predicted:
    """The files of a prediction, and errors of unreadable samples."""

    written: tuple[Path, ...]
    """Label maps, or a table."""
    damaged: tuple[str, ...]
    """Errors of unreadable samples, which have no label map and no row."""
    notes: tuple[str, ...]
    """Warnings."""
    names: tuple[str, ...]
    """Names of the classes 0, 1, ..., if classes are predicted."""
    weights: Path
    rows: int = 0
    """Number of rows of a table."""
    columns: tuple[str, ...] = ()
    """Columns of a table; empty for label maps."""


def check_free(out: Path, targets: Sequence[Path]) -> None:
    """Raise UserError instead of overwriting: a folder of images may have been named by accident."""
    if out.exists() and not out.is_dir():
        raise UserError(str(out), "is a file", "a folder to write to", "name another folder")
    there = [target for target in targets if target.exists()]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UserError(str(there[0]), f"exists already{more}", remedy="name another folder, or move the files")


def write_each(
    items: Sequence[tuple[Path, T]],
    predict: Callable[[T], R],
    write: Callable[[Path, R], None],
    on_progress: OnProgress | None,
) -> tuple[list[Path], list[str]]:
    """Predict each item and write its file.

    Returns the written files, and the errors of items for which `predict` raised UserError. Raises UserError if a file
    exists by now.
    """
    written, damaged = [], []
    for done, (target, item) in enumerate(items):
        if on_progress:
            on_progress(done, len(items))
        try:
            found = predict(item)
        except UserError as error:
            damaged.append(str(error))
            continue
        if target.exists():
            raise UserError(str(target), "was created by another process meanwhile", remedy="name another folder")
        write(target, found)
        written.append(target)
    if on_progress:
        on_progress(len(items), len(items))
    return written, damaged


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there as a whole or not at all. Raises UserError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, content)
    except OSError as error:
        found = f"cannot be written ({error.strerror or error})"
        raise UserError(str(path), found, remedy="check permissions and free space") from None

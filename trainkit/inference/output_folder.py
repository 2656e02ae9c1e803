"""Write folders of predictions that can be interrupted and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.interfaces import DatasetInfo
from trainkit.tracking.run_folder import RunFolder
from trainkit.training.best import best_weights

T = TypeVar("T")
R = TypeVar("R")
OnProgress = Callable[[int, int], None]
"""Called with the number of finished items and of all items."""

BEGUN = ".predicting"
"""File in a folder of label maps that lists those that an unfinished prediction has written."""


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


class ResumableFolder:
    """An output folder that an interrupted prediction resumes, keeping the files written so far.

    The hidden file `OUT/.predicting` has a line that describes the prediction, and one per file, written before the
    file. `end` removes it.
    """

    def __init__(self, asked: Request):
        """Raises UserError if the folder has a part of another prediction."""
        weights, out = best_weights(asked.folder.path), asked.out
        step = f"{weights.parent.name}/{weights.name}"
        self._out, self._file, self._on_progress = out, out / BEGUN, asked.on_progress
        head = {"run": asked.folder.name, "weights": step, "source": asked.source, "mirror": asked.mirror}
        self._head = json.dumps(head)
        try:
            text = self._file.read_text(encoding="utf-8") if self._file.is_file() else ""
        except (OSError, ValueError) as error:
            raise UserError(str(self._file), f"cannot be read ({error})", remedy="name another folder") from None
        begun, *lines = text.splitlines() or [self._head]
        if begun != self._head:
            found = "contains part of another prediction (other run, source or --mirror)"
            remedy = f"name another folder, or remove {BEGUN} and the label maps there to start again"
            raise UserError(str(out), found, remedy=remedy)
        # One name per line; the last line may be incomplete.
        self._names = {name for line in lines if (name := _name(line)) and (out / name).is_file()}
        self._ended = text.endswith("\n")

    def fill(
        self,
        items: Sequence[tuple[Path, T]],
        predict: Callable[[T], R],
        write: Callable[[Path, R], None],
    ) -> tuple[list[Path], list[str]]:
        """Predict and write each item whose file was not written before.

        Returns the written files, and the errors of items for which `predict` raised UserError.
        """
        written, damaged = [], []
        for done, (target, item) in enumerate(items):
            if self._on_progress:
                self._on_progress(done, len(items))
            if not self.has(target):
                try:
                    found = predict(item)
                except UserError as error:
                    damaged.append(str(error))
                    continue
                self.note(target)
                write(target, found)
            written.append(target)
        if self._on_progress:
            self._on_progress(len(items), len(items))
        return written, damaged

    def has(self, target: Path) -> bool:
        """Test whether a file was written before."""
        return target.relative_to(self._out).as_posix() in self._names

    def missing(self, targets: Iterable[Path]) -> list[Path]:
        """Return the files that are yet to be written."""
        return [target for target in targets if not self.has(target)]

    def note(self, target: Path) -> None:
        """Note a file that is about to be written. Raises UserError if it exists now, or nothing can be written."""
        if target.exists():
            raise UserError(str(target), "was created by another process meanwhile", remedy="name another folder")
        try:
            if not self._file.exists():
                self._out.mkdir(parents=True, exist_ok=True)
                write_aside(self._file, self._head + "\n")
                self._ended = True
            with self._file.open("a", encoding="utf-8") as file:
                file.write("" if self._ended else "\n")
                file.write(json.dumps(target.relative_to(self._out).as_posix()) + "\n")
            self._ended = True
        except OSError as error:
            found = f"cannot be written ({error.strerror or error})"
            raise UserError(str(self._file), found, remedy="check permissions and free space") from None

    def end(self) -> None:
        """Remove the list: all files are written."""
        self._file.unlink(missing_ok=True)


def _name(line: str) -> str:
    try:
        name = json.loads(line)
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""

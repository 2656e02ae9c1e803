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
"""Told how many of how many are done."""

BEGUN = ".predicting"
"""File in a folder of label maps that says which of them an unfinished prediction has written."""


@dataclass(frozen=True)
class Request:
    """A prediction that is asked for: of which run, for what data, and where to."""

    folder: RunFolder
    recipe: Recipe
    meta: DatasetInfo
    source: str
    out: Path
    mirror: bool
    on_progress: OnProgress | None


@dataclass(frozen=True)
class Predicted:
    """The files of a prediction, and what could not be read."""

    written: tuple[Path, ...]
    """Label maps, or a table."""
    damaged: tuple[str, ...]
    """Sentences about what could not be read: it has no label map, and no row."""
    notes: tuple[str, ...]
    """Sentences about what is odd."""
    names: tuple[str, ...]
    """Of the classes 0, 1, ..., where classes are predicted."""
    weights: Path
    rows: int = 0
    """Of a table."""
    columns: tuple[str, ...] = ()
    """Of a table; empty where label maps were written."""


def check_free(out: Path, targets: Sequence[Path]) -> None:
    """Refuse to write over anything: a folder of images may be named by mistake."""
    if out.exists() and not out.is_dir():
        raise UserError(str(out), "is a file", "a folder to write to")
    there = [target for target in targets if target.exists()]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UserError(str(there[0]), f"is there already{more}", remedy="name another folder, or move them away")


class ResumableFolder:
    """A folder of which an unfinished prediction has written some files: the same one, begun again, keeps them.

    The hidden file `OUT/.predicting` has a line that says what is predicted, and one for each file, put there before
    the file is. It goes with `end`.
    """

    def __init__(self, asked: Request):
        """Raises UserError where another prediction has begun in the folder."""
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
            found = "holds a part of another prediction, of another run, source or --mirror"
            remedy = f"name another folder; or, to begin anew, remove {BEGUN} and the label maps there"
            raise UserError(str(out), found, remedy=remedy)
        # Each stands on a line of its own, the last of which may have been cut short.
        self._names = {name for line in lines if (name := _name(line)) and (out / name).is_file()}
        self._ended = text.endswith("\n")

    def fill(
        self,
        items: Sequence[tuple[Path, T]],
        predict: Callable[[T], R],
        write: Callable[[Path, R], None],
    ) -> tuple[list[Path], list[str]]:
        """Predict and write each item whose file was not written before.

        Returns the files that are there, and sentences about items for which `predict` raised UserError.
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
        """Note a file that is about to be written. Raises UserError where one is there meanwhile, or nothing can be."""
        if target.exists():
            raise UserError(str(target), "is there, and was not when the work began", remedy="name another folder")
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
            raise UserError(str(self._file), f"cannot be written ({error.strerror or error})") from None

    def end(self) -> None:
        """End the prediction: all files are written."""
        self._file.unlink(missing_ok=True)


def _name(line: str) -> str:
    try:
        name = json.loads(line)
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""

"""Folders of predictions that can be interrupted and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.tracking.store import RunFolder
from trainkit.training.best import best_weights

if TYPE_CHECKING:
    pass


BEGUN = ".predicting"
"""File in a folder of label maps that says which of them an unfinished prediction has written."""


@dataclass(frozen=True)
class Predicted:
    """What was written, and what was not."""

    written: tuple[Path, ...]
    """Label maps, or a table."""
    damaged: tuple[str, ...]
    """Sentences about what could not be read: it has no label map, and no row."""
    notes: tuple[str, ...]
    """Sentences about what is odd."""
    names: tuple[str, ...]
    """What the labels 0, 1, ... stand for, where classes are predicted."""
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


class Begun:
    """Which files of a folder a prediction has written that is not finished: the same one, begun again, keeps them.

    The hidden file `OUT/.predicting` has a line that says what is predicted, and one for each file, put there before
    the file is. It goes with `end`.
    """

    def __init__(self, folder: RunFolder, source: Path | str, out: Path, mirror: bool):
        """Raises UserError where another prediction has begun in `out`."""
        weights = best_weights(folder.path)
        step = f"{weights.parent.name}/{weights.name}"
        self._out, self._file = out, out / BEGUN
        self._head = json.dumps({"run": folder.name, "weights": step, "source": str(source), "mirror": mirror})
        try:
            text = self._file.read_text(encoding="utf-8") if self._file.is_file() else ""
        except (OSError, ValueError) as error:
            raise UserError(str(self._file), f"cannot be read ({error})", remedy="name another folder") from None
        head, *lines = text.splitlines() or [self._head]
        if head != self._head:
            remedy = f"name another folder; or, to begin anew, remove {BEGUN} and the label maps there"
            raise UserError(
                str(out), "holds a part of another prediction, of another run, source or --mirror", remedy=remedy
            )
        # Each stands on a line of its own, the last of which may have been cut short.
        self._names = {name for line in lines if (name := _name(line)) and (out / name).is_file()}
        self._ended = text.endswith("\n")

    def has(self, target: Path) -> bool:
        """Whether it was written before."""
        return target.relative_to(self._out).as_posix() in self._names

    def missing(self, targets: Iterable[Path]) -> list[Path]:
        """Those that are yet to be written."""
        return [target for target in targets if not self.has(target)]

    def note(self, target: Path) -> None:
        """A file is about to be written. Raises UserError where one has come there meanwhile, or nothing can be."""
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
        """All has been written."""
        self._file.unlink(missing_ok=True)


def _name(line: str) -> str:
    try:
        name = json.loads(line)
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""

"""Copying a recipe for another data set, with the lines to change marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit import config
from trainkit.errors import UserError

MARK = "# <- change"
_OF_THE_DATA = ("data", "evaluations", "best", "stop_when", "downloads")


def headline(path: Path) -> str:
    """The first line of a recipe's header, without the comment sign."""
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ").rstrip(".")


def header(path: Path) -> str:
    """The comment at the top of a recipe, as it is written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))])


def copy(recipe: Path, new: Path, plugins: Sequence[str] = ()) -> int:
    """Write a copy of a valid recipe to a new file and return the number of marked lines.

    The header goes: its figures were measured on the old data. Marked are the name and whatever names data, evaluation
    sets, metrics, classes' weights or other files. Raises UserError when the new file exists.
    """
    config.load(recipe, (), tuple(plugins))
    if new.exists():
        raise UserError(str(new), "already exists", remedy="name another file")
    if not new.parent.is_dir():
        raise UserError(str(new.parent), "no such folder", remedy="make it first")
    lines = recipe.read_text(encoding="utf-8").split("\n")
    while lines and (lines[0].startswith("#") or not lines[0]):
        lines.pop(0)
    out, block, marked = [f"# Copied from {recipe.name}.", "#", "# result   not yet measured"], "", 0
    for line in lines:
        if line and not line[0].isspace() and not line.startswith("#"):
            block = line.split(":")[0]
        key, _, value = line.strip().partition(":")
        of_the_data = block == "name" or (block in _OF_THE_DATA and not (block == "data" and key == "name"))
        if key == "class_weights" or (value.strip() and (of_the_data or key in ("recipe", "weights", "centres"))):
            line, marked = f"{line.rstrip()}  {MARK}", marked + 1
        out.append(line)
    new.write_text("\n".join(out), encoding="utf-8")
    return marked

"""Splits of a source: `set.parquet#val` names one, and of those that are there the one that is meant is chosen here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from trainkit.data import folders
from trainkit.errors import UserError, few

TRAIN = "train"
"""The split that is meant where a path names none."""

_ALIKE = tuple((*words, f"{split}2017") for split, words in folders.SPLITS.items())
"""Names of the same split in different sets; those of COCO have a year."""

WORDS = frozenset(word for words in _ALIKE for word in words)

_T = TypeVar("_T")


def split_of(path: Path | str) -> tuple[Path, str | None]:
    """Divide `set.parquet#val` into path and name of the split; a path that is there with its `#` is a path."""
    path = Path(path)
    name, mark, split = path.name.rpartition("#")
    if not mark or not name or path.exists():
        return path, None
    if not re.fullmatch(r"\w[\w.-]*", split):
        raise UserError(str(path), f"split {split!r}"[:100], "a name after #")
    return path.with_name(name), split


def called(name: str) -> tuple[str, ...]:
    """Return the names of a split, the given one first: `val`, `validation`, `valid`, `dev`, `val2017`."""
    return (name, *(other for words in _ALIKE if name in words for other in words if other != name))


def choose(splits: Mapping[str, _T], split: str | None, where: str, part: str | None = None) -> tuple[str, _T]:
    """Choose of `splits`, by their names, the one of a path: its name and what it stands for.

    That is `split`, or where the path names none that of training, or the only one. `part` says what the set is for
    (`train`, `val`): a split then goes by any of the names that `called` lists, and the only one is not taken where
    its name says that it is for something else. Raises UserError naming `where` and the splits that are there.
    """
    wanted = split or part or TRAIN
    for name in (wanted,) if part is None else called(wanted):
        if name in splits:
            return name, splits[name]
    if split is None and len(splits) == 1 and (part is None or WORDS.isdisjoint(splits)):
        return next(iter(splits.items()))
    names = sorted(filter(None, splits))
    place, found = (where, f"no split {wanted!r}") if split is None else (f"{where}#{split}", "no such split")
    found += f"; available: {few(names, 20)}"[:300] if names else ""
    raise UserError(place, found, "one of these after #" if names else "the path alone")


def refuse(split: str | None, where: str, kind: str) -> None:
    """Raise UserError for the split of a path at which there is a set without splits: `packed set`."""
    if split is not None:
        raise UserError(f"{where}#{split}", f"a {kind} has no splits", "its path alone")

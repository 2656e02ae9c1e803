"""Differences between two recipes, in as few lines as say them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trainkit.config import dropped_keys, stored_recipes, yaml_reader
from trainkit.config.yaml_reader import Tree
from trainkit.errors import UserError

_WIDTH = 60
"""Letters of a value in a line."""


@dataclass(frozen=True)
class Change:
    """One key whose value differs."""

    key: str
    """Dotted, elements of lists by number: `optim.groups.0.lr`."""
    before: Tree | Absent
    after: Tree | Absent

    def __str__(self) -> str:
        return f"{self.key}  {_said(self.before)} -> {_said(self.after)}"


class Absent(Enum):
    """Stands where a recipe has no one value."""

    NONE = "(none)"
    """It has no such key."""
    SEVERAL = "(several)"
    """Of a run above others: those have values of their own."""


ABSENT = Absent.NONE


def diff(before: Mapping[str, Tree | Absent], after: Mapping[str, Tree | Absent]) -> list[Change]:
    """List the changes that make one resolved recipe the other, in the order of their keys.

    Where a block has another `name`, as another task or other data has, that is one change, and keys that only one of
    the two knows are left out: they come with the name.
    """
    return list(_tree((), dict(before), dict(after)))


def read(recipe: Path) -> dict[str, Tree]:
    """Read a resolved recipe from the folder of a run, without the defaults of the trainkit that reads it.

    A key of the data that is younger than the run has the value that the run was trained with. Raises UserError where
    it cannot be read.
    """
    try:
        tree = yaml_reader.read(recipe.read_text(encoding="utf-8")).tree
    except OSError as error:
        raise UserError(str(recipe), f"cannot be read: {error.strerror}") from None
    dropped_keys.drop(stored_recipes.complete(tree))
    return tree if isinstance(tree, dict) else {}


def varied(tree: Mapping[str, Tree], keys: Iterable[str]) -> dict[str, Tree | Absent]:
    """A recipe in which the values of these dotted keys, as far as it has them, are `Absent.SEVERAL`."""
    found: Any = copy.deepcopy(dict(tree))
    for key in keys:
        *way, last = key.split(".")
        block = found
        for word in way:
            block = block.get(word) if isinstance(block, dict) else None
        if isinstance(block, dict) and last in block:
            block[last] = Absent.SEVERAL
    return found


def lines(changes: Sequence[Change]) -> list[str]:
    """A line for each change, in columns."""
    width = max((len(change.key) for change in changes), default=0)
    return [f"{change.key:{width}}  {_said(change.before)} -> {_said(change.after)}" for change in changes]


def _tree(path: tuple[str, ...], before: Tree | Absent, after: Tree | Absent) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        other = "name" in before and "name" in after and before["name"] != after["name"] and bool(path)
        for key in [*before, *(key for key in after if key not in before)]:
            if not other or (key in before and key in after):
                yield from _tree((*path, str(key)), before.get(key, ABSENT), after.get(key, ABSENT))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after) and _blocks(before, after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from _tree((*path, str(number)), *pair)
    elif not _equal(before, after):
        yield Change(".".join(path), before, after)


def _blocks(*lists: list[Tree]) -> bool:
    return all(isinstance(element, dict) for elements in lists for element in elements)


def _equal(before: Tree | Absent, after: Tree | Absent) -> bool:
    # 1 and 1.0 are the same number, and 1 is not true.
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_equal, before, after))
    return before == after and isinstance(before, bool) == isinstance(after, bool)


def _said(value: Tree | Absent) -> str:
    return value.value if isinstance(value, Absent) else yaml_reader.cut(yaml_reader.flow(value), _WIDTH)

"""Keys of recipes that were renamed or dropped: recipes with them are read until 1.0, with equal digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from trainkit.config.yaml_reader import KeyPath, Tree
from trainkit.errors import hint_renamed

T = TypeVar("T")

OLD_KEYS = {("task", "adadistill"): {"products": "matmul_dtype"}}
"""(block, its `name`) to {key as it was: key as it is}."""


class Dropped(NamedTuple):
    """A key that is no more."""

    default: Tree
    """The default that it had."""
    instead: str
    """What to use instead."""
    hashed: bool = True
    """Whether digests of recipes covered it."""


DROPPED_KEYS: dict[tuple[str, str], dict[str, Dropped]] = {
    ("data", "volumes"): {
        "clinical": Dropped(None, "join tables/<evaluation>_per_case_last.csv with your table by the column patient")
    },
    ("train", ""): {
        "spikes": Dropped(None, "remove it, or set null: losses that jump are not looked for", hashed=False),
        "replay": Dropped(None, "remove it, or set null: steps are not computed twice", hashed=False),
    },
}
"""(dotted block, `name` of the task or the data, empty where it has none) to the keys that it had."""


def translate(tree: Tree) -> list[tuple[KeyPath, KeyPath]]:
    """Rename old keys in a recipe's tree, in place. Return the paths that changed, as they were and as they are.

    An old key beside its new name stays, to be refused as unknown.
    """
    done: list[tuple[KeyPath, KeyPath]] = []
    for (word,), block, keys in _blocks(tree, OLD_KEYS):
        for old, new in keys.items():
            if old in block and new not in block:
                block[new] = block.pop(old)
                done.append(((word, old), (word, new)))
                hint_renamed(f"{word}.{old}", f"{word}.{new}")
    return done


def drop(tree: Tree) -> list[tuple[KeyPath, str]]:
    """Take dropped keys out of a recipe's tree, in place. Return the paths of those that had another value than their
    default, which nothing stands for now, and what to use instead."""
    lost: list[tuple[KeyPath, str]] = []
    for path, block, keys in _blocks(tree, DROPPED_KEYS):
        for key, dropped in keys.items():
            if key in block and block.pop(key) != dropped.default:
                lost.append(((*path, key), dropped.instead))
    return lost


def current(parts: list[str], tree: Tree) -> list[str]:
    """Return the path of an override with an old key at its end replaced by the new one."""
    for (word,), _, keys in _blocks(tree, OLD_KEYS):
        if len(parts) == 2 and parts[0] == word and parts[1] in keys:
            hint_renamed(".".join(parts), f"{word}.{keys[parts[1]]}")
            return [word, keys[parts[1]]]
    return parts


def restore(tree: Tree) -> Tree:
    """Give a resolved recipe's tree its old names and dropped keys, in place, so that its digest is that of before."""
    for _, block, dropped in _blocks(tree, DROPPED_KEYS):
        block |= {key: one.default for key, one in dropped.items() if one.hashed}
    for _, block, keys in _blocks(tree, OLD_KEYS):
        for old, new in keys.items():
            if new in block:
                block[old] = block.pop(new)
    return tree


def _blocks(tree: Tree, table: Mapping[tuple[str, str], T]) -> Iterator[tuple[tuple[str, ...], dict[str, Tree], T]]:
    for (dotted, name), keys in table.items():
        path = tuple(dotted.split("."))
        above = [tree]
        for word in path:
            below = above[-1]
            above.append(below.get(word) if isinstance(below, dict) else None)
        outer, block = above[1], above[-1]
        if isinstance(block, dict) and (not name or (isinstance(outer, dict) and outer.get("name") == name)):
            yield path, block, keys

"""Keys of recipes that were renamed or dropped: recipes with them are read until 1.0, with equal digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from trainkit.config.yaml_reader import KeyPath, Tree
from trainkit.errors import hint_renamed

T = TypeVar("T")

OLD_KEYS = {("task", "adadistill"): {"products": "matmul_dtype"}}
"""(block, its `name`) to {key as it was: key as it is}."""

DROPPED_KEYS: dict[tuple[str, str], dict[str, tuple[Tree, str]]] = {
    ("data", "volumes"): {
        "clinical": (None, "join tables/<evaluation>_per_case_last.csv with your table by the column patient")
    }
}
"""(block, its `name`) to {key that is no more: the default that it had, and what to use instead}."""


def translate(tree: Tree) -> list[tuple[KeyPath, KeyPath]]:
    """Rename old keys in a recipe's tree, in place. Return the paths that changed, as they were and as they are.

    An old key beside its new name stays, to be refused as unknown.
    """
    done: list[tuple[KeyPath, KeyPath]] = []
    for word, block, keys in _blocks(tree, OLD_KEYS):
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
    for word, block, keys in _blocks(tree, DROPPED_KEYS):
        for key, (default, instead) in keys.items():
            if key in block and block.pop(key) != default:
                lost.append(((word, key), instead))
    return lost


def current(parts: list[str], tree: Tree) -> list[str]:
    """Return the path of an override with an old key at its end replaced by the new one."""
    for word, _, keys in _blocks(tree, OLD_KEYS):
        if len(parts) == 2 and parts[0] == word and parts[1] in keys:
            hint_renamed(".".join(parts), f"{word}.{keys[parts[1]]}")
            return [word, keys[parts[1]]]
    return parts


def restore(tree: Tree) -> Tree:
    """Give a resolved recipe's tree its old names and dropped keys, in place, so that its digest is that of before."""
    for _, block, dropped in _blocks(tree, DROPPED_KEYS):
        block |= {key: default for key, (default, _) in dropped.items()}
    for _, block, keys in _blocks(tree, OLD_KEYS):
        for old, new in keys.items():
            if new in block:
                block[old] = block.pop(new)
    return tree


def _blocks(tree: Tree, table: Mapping[tuple[str, str], T]) -> Iterator[tuple[str, dict[str, Tree], T]]:
    for (word, name), keys in table.items():
        block = tree.get(word) if isinstance(tree, dict) else None
        if isinstance(block, dict) and block.get("name") == name:
            yield word, block, keys

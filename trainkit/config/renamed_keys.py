"""Keys of recipes that were renamed: old names are read until 1.0, and digests of recipes are taken with them."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.config.yaml_reader import KeyPath, Tree
from trainkit.errors import hint_renamed

OLD_KEYS = {("task", "adadistill"): {"products": "matmul_dtype"}}
"""(block, its `name`) to {key as it was: key as it is}."""


def translate(tree: Tree) -> list[tuple[KeyPath, KeyPath]]:
    """Rename old keys in a recipe's tree, in place. Return the paths that changed, as they were and as they are.

    An old key beside its new name stays, to be refused as unknown.
    """
    done: list[tuple[KeyPath, KeyPath]] = []
    for word, block, keys in _blocks(tree):
        for old, new in keys.items():
            if old in block and new not in block:
                block[new] = block.pop(old)
                done.append(((word, old), (word, new)))
                hint_renamed(f"{word}.{old}", f"{word}.{new}")
    return done


def current(parts: list[str], tree: Tree) -> list[str]:
    """Return the path of an override with an old key at its end replaced by the new one."""
    for word, _, keys in _blocks(tree):
        if len(parts) == 2 and parts[0] == word and parts[1] in keys:
            hint_renamed(".".join(parts), f"{word}.{keys[parts[1]]}")
            return [word, keys[parts[1]]]
    return parts


def restore(tree: Tree) -> Tree:
    """Give keys of a resolved recipe's tree their old names, in place, so that its digest is that of before."""
    for _, block, keys in _blocks(tree):
        for old, new in keys.items():
            if new in block:
                block[old] = block.pop(new)
    return tree


def _blocks(tree: Tree) -> Iterator[tuple[str, dict[str, Tree], dict[str, str]]]:
    for (word, name), keys in OLD_KEYS.items():
        block = tree.get(word) if isinstance(tree, dict) else None
        if isinstance(block, dict) and block.get("name") == name:
            yield word, block, keys

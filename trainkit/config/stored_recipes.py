"""Recipes that runs stored: a key that is younger than a run has the value that the run was trained with."""

from __future__ import annotations

from typing import Any

from trainkit.config.yaml_reader import Tree

_DIVIDED = ("images", "people")
"""Kinds of data whose held-out part is drawn by `split_seed`; before that key it was drawn by the seed of the run."""


def complete(tree: Tree) -> Tree:
    """Add to a stored recipe, in place, the keys that came later, with the values that they had for its run."""
    data = tree.get("data") if isinstance(tree, dict) else None
    if isinstance(data, dict) and data.get("name") in _DIVIDED:
        data.setdefault("split_seed", tree.get("seed", 0))
    return tree


def split_seed(tree: Tree) -> Any:
    """Return the seed by which a recipe, as values with all defaults, divides its data; None where none divides it."""
    data = tree.get("data") if isinstance(tree, dict) else None
    if not isinstance(data, dict) or not isinstance(data.get("hold_out"), str):
        return None
    return data.get("split_seed")

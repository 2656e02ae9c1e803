"""Recipes that runs stored: a key that is younger than a run has the value that the run was trained with."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from trainkit.config.units import Share
from trainkit.config.yaml_reader import Tree

_DIVIDED = ("images", "people")
"""Kinds of data whose held-out part is drawn by `split_seed`; before that key it was drawn by the seed of the run."""

_FOLDED = "volumes"
"""The kind of data of which a fold is held out."""
_share = TypeAdapter(Share)


def complete(tree: Tree) -> Tree:
    """Add to a stored recipe, in place, the keys that came later, with the values that they had for its run."""
    data = tree.get("data") if isinstance(tree, dict) else None
    if isinstance(data, dict) and data.get("name") in _DIVIDED:
        data.setdefault("split_seed", tree.get("seed", 0))
    return tree


def split_seed(tree: Tree) -> Any:
    """Return the seed by which a recipe, as values with all defaults, divides its data; None where none divides it."""
    data = tree.get("data") if isinstance(tree, dict) else None
    if not isinstance(data, dict) or not any(isinstance(data.get(key), str) for key in ("hold_out", "hold_out_test")):
        return None
    return data.get("split_seed")


def exposed(trained: Tree, scored: Tree) -> str:
    """Return the key by which `scored` holds out samples that `trained` did not; empty where it holds out none of them.

    Both are blocks `data` as values, of one kind, training set and `split_seed`; `trained` may lack younger keys.
    """
    if scored.get("name") not in (*_DIVIDED, _FOLDED):  # a plug-in's keys may mean anything
        return ""
    if scored["name"] == _FOLDED:
        parts = [(block.get("fold"), block.get("folds", scored.get("folds"))) for block in (trained, scored)]
        return "fold" if parts[1][0] is not None and parts[0] != parts[1] else ""
    if scored.get("hold_out_test") != trained.get("hold_out_test"):  # the rest is divided otherwise
        return "hold_out_test"
    wider, held = trained.get("hold_out"), scored.get("hold_out")
    if held is None:
        return ""
    if isinstance(held, str) and isinstance(wider, str):
        # The smaller share of one order of the groups is a part of the larger.
        for key in ("group", "stratify"):
            if (trained.get(key) or None) != (scored.get(key) or None):
                return key
        return "hold_out" if _share.validate_python(held) > _share.validate_python(wider) else ""
    within = isinstance(held, list) and isinstance(wider, list) and set(held) <= set(wider)
    return "" if within else "hold_out"


def division(tree: Tree) -> dict[str, Any]:
    """Return the keys of `data`, with their values, by which a recipe chooses what it holds out; empty without."""
    data = tree.get("data") if isinstance(tree, dict) else None
    if not isinstance(data, dict) or data.get("hold_out") is data.get("fold") is None:
        return {}
    keys = ("hold_out", "hold_out_test", "split_seed", "group", "stratify", "fold", "folds")
    return {key: data[key] for key in keys if key in data and not (key == "split_seed" and split_seed(tree) is None)}

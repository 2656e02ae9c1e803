"""Every key of the recipe's own blocks and of the kinds of data is described, for the reference of keys."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from runs import PLUGIN, ROOT

from trainkit.config import key_docs, loader
from trainkit.config.schema import TABLES, Recipe


def blocks() -> dict[str, type]:
    """Classes of all blocks in trainkit.config and trainkit.data."""
    places = (place.partition(":") for place in TABLES["data"].values())
    left: list[Any] = [Recipe, *(getattr(importlib.import_module(module), name) for module, _, name in places)]
    found: dict[str, type] = {}
    while left:
        kind = left.pop()
        left += get_args(kind)
        ours = getattr(kind, "__module__", "").startswith(("trainkit.config", "trainkit.data"))
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and ours and kind.__qualname__ not in found:
            found[kind.__qualname__] = kind
            left += get_type_hints(kind, include_extras=True).values()
    return found


BLOCKS = blocks()


def sentences() -> Iterator[tuple[str, str]]:
    for name, cls in BLOCKS.items():
        yield name, cls.__doc__ or ""
        told = key_docs.of_fields(cls)
        for field in (f.name for f in dataclasses.fields(cls) if f.init):
            text = told[field]
            yield f"{name}.{field}", str(text)


def test_blocks_are_found():
    assert {"Optim", "Train", "Faces", "Volumes", "Light", "PK", "Gamma", "Curve", "Download"} <= set(BLOCKS)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_every_key_is_described(name):
    told = key_docs.of_fields(BLOCKS[name])
    missing = [f.name for f in dataclasses.fields(BLOCKS[name]) if f.init and not told.get(f.name)]
    assert not missing


def test_descriptions_say_what_a_key_does():
    for where, text in sentences():
        assert not re.match("(What|Whether|Who|Which|How) ", text), where
        assert not re.search(r"\b(pictures?|scored on|is told|is said|mistakes?|updates?|averaged weights)\b", text), (
            where
        )
        assert text.rstrip().endswith((".", ":")), where


def test_the_meaning_of_keys_is_found_in_plugins_and_in_blocks_of_blocks(monkeypatch):
    recipe = loader.load(ROOT / "recipes" / "reid.yaml")
    assert key_docs.meaning(recipe, ("data", "sampler", "people")).startswith(
        "P: number of different people in a block"
    )
    assert key_docs.meaning(recipe, ("evaluations", "val")) == "One named evaluation: its split and its schedule."
    assert key_docs.meaning(recipe, ("best", "metric")).startswith("Full name, such as")
    assert key_docs.meaning(recipe, ("name",)).startswith("Name of the recipe")
    assert key_docs.meaning(recipe, ("data", "evaluate", "val")).startswith("Evaluation sets by name")
    monkeypatch.syspath_prepend(str(PLUGIN))
    toy = loader.load(PLUGIN / "toy.yaml", (), ("toy",))
    assert key_docs.meaning(toy, ("data",)) and "toy" in sys.modules

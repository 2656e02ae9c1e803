"""Every key of the recipe's own blocks and of the kinds of data is described, for the reference of keys."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

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


def docstrings(cls: type) -> dict[str, str]:
    found = {}
    for one in reversed(cls.__mro__[:-1]):
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(defined, ast.ClassDef)
        for field, after in itertools.pairwise(defined.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                found[field.target.id] = text
    return found


def sentences() -> Iterator[tuple[str, str]]:
    for name, cls in BLOCKS.items():
        yield name, cls.__doc__ or ""
        told = docstrings(cls)
        for field in (f.name for f in dataclasses.fields(cls) if f.init):
            text = told[field]
            yield f"{name}.{field}", str(text)


def test_blocks_are_found():
    assert {"Optim", "Train", "Faces", "Volumes", "Light", "PK", "Elastic", "Curve", "Download"} <= set(BLOCKS)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_every_key_is_described(name):
    told = docstrings(BLOCKS[name])
    missing = [f.name for f in dataclasses.fields(BLOCKS[name]) if f.init and not told.get(f.name)]
    assert not missing


def test_descriptions_say_what_a_key_does():
    for where, text in sentences():
        assert not re.match("(What|Whether|Who|Which|How) ", text), where
        assert not re.search(r"\b(pictures?|scored on|is told|is said|mistakes?|updates?|averaged weights)\b", text), (
            where
        )
        assert text.rstrip().endswith((".", ":")), where

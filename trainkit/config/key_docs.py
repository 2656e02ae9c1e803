"""Docstrings of the fields of blocks: what the keys of a recipe mean."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from dataclasses import is_dataclass

from trainkit.config.yaml_reader import KeyPath


def meaning(block: object, path: KeyPath) -> str:
    """Return the docstring of the field that a key of a recipe sets; of a block without one, that of the block."""
    said = ""
    for key in path:
        if is_dataclass(block):
            said = of_fields(type(block)).get(str(key), "")
            block = getattr(block, str(key), None)
            continue
        if isinstance(block, list):
            block = block[key] if isinstance(key, int) and key < len(block) else None
        else:
            block = block.get(key) if isinstance(block, dict) else None
        said = "" if is_dataclass(block) else said
    if not said and is_dataclass(block):
        said = (type(block).__doc__ or "").split("\n\n")[0]
    return " ".join(said.split())


@functools.cache
def of_fields(cls: type) -> dict[str, str]:
    """Return the string that follows each field in the source of its class, or of one that this stands on."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        try:
            (defined,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except (OSError, TypeError, SyntaxError):
            continue
        body = defined.body if isinstance(defined, ast.ClassDef) else []
        for field, after in itertools.pairwise(body):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                found[field.target.id] = text
    return found

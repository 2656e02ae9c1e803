"""Values -> dataclasses: strict validation by pydantic, and its findings as problems that name key, place and remedy.

A block of the YAML is the constructor call of a dataclass. Which class a *named* block becomes is said by its `name`,
looked up in a table of plain words; the class is imported when it is used. Knows no machine learning.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from trainkit.config.yaml_reader import KeyPath, Problem, Source, Tree, cut, dotted, shown
from trainkit.errors import UserError

T = TypeVar("T")
Tables = Mapping[str, Mapping[str, str]]
"""Kind of block to {word: "package.module:Class"}."""

MAX_WORDED = 1000
"""Mistakes that are put into words; nobody reads more."""


@dataclass(frozen=True)
class Named:
    """Marks a field whose block says by its `name` which class it is; `table` is the kind of block.

    Written `task: Annotated[Task, Named("task")]`, where only type checkers read `Task`. The rest of the block is
    validated against the fields of the class; `name` is handed on only to a class that has such a field.
    """

    table: str
    words: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """The table's own words, for writing back a block that was not read; readers are given theirs, with plug-ins."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Validate through the class that `name` stands for."""
        return core_schema.with_info_plain_validator_function(
            lambda block, info: self._build(block, info.context),
            serialization=core_schema.plain_serializer_function_ser_schema(self._write),
        )

    def _build(self, block: Tree, tables: Tables) -> object:
        cls = self.resolve(block, tables)
        if cls is None:
            words = list(tables[self.table])
            wrong = f"a block whose name is {one_of(words)}"
            wrong += f"; write {{name: {block}}}" if isinstance(block, str) and block in words else ""
            known = {"discriminator": "'name'", "expected_tags": ", ".join(f"'{word}'" for word in words)}
            raise PydanticCustomError("named_block", "Input should be {wrong}", known | {"wrong": wrong})
        own = any(f.name == "name" for f in fields(cls))
        return validate(cls, {k: v for k, v in block.items() if k != "name" or own}, tables)

    def _write(self, value: object) -> dict[str, Tree]:
        return {"name": _word_of(self, type(value)), **to_tree(value)}

    def resolve(self, block: Tree, tables: Tables) -> type | None:
        """The class that a block names; None where it names none. Raises UserError when it cannot be imported."""
        word = block.get("name") if isinstance(block, dict) else None
        if not isinstance(word, str) or word not in tables[self.table]:
            return None
        try:
            cls = _load_class(tables[self.table][word])
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "trainkit":
                raise
            raise UserError(
                f"{self.table} {word!r}", f"needs the module {error.name!r}", remedy="install it"
            ) from error
        _used[self.table, cls] = word
        return cls


_used: dict[tuple[str, type], str] = {}
"""(kind, class) to the word it was last found by: the words of plug-ins are in no table of ours."""


@functools.cache
def _load_class(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _word_of(named: Named, cls: type) -> str:
    if (named.table, cls) in _used:
        return _used[named.table, cls]
    for word, place in named.words.items():
        if place == f"{cls.__module__}:{cls.__qualname__}":
            return word
    raise ValueError(f"{cls.__qualname__} has no word in the table of {named.table!r} blocks")


@functools.cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    # A list hands its configuration on to plain dataclasses at any depth; they cannot be given one directly.
    listed: Any = types.GenericAlias(list, (cls,))
    return TypeAdapter(listed, config=ConfigDict(strict=True, extra="forbid"))


def validate(cls: type[T], tree: Tree, tables: Tables) -> T:
    """Make a `cls` of a tree of values. Raises pydantic's ValidationError."""
    # JSON mode is strict about words and numbers, yet takes lists for tuples and blocks for dataclasses.
    return _adapter(cls).validate_json(json.dumps([tree]), context=tables)[0]


def to_tree(value: object) -> Tree:
    """A dataclass as the tree of values that it can be made of again."""
    return _adapter(type(value)).dump_python([value], mode="json")[0]


# ---- Types -----------------------------------------------------------------------------------------------------------


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def _bare(kind: Any) -> tuple[Any, tuple]:
    """Type without its annotations, and these. Of `X | None` it is X that counts."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0], get_args(kind)[1:]
    members = [m for m in get_args(kind) if m is not type(None)] if _is_union(kind) else []
    return _bare(members[0]) if len(members) == 1 else (kind, ())


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _named(marks: tuple) -> Named | None:
    return next((mark for mark in marks if isinstance(mark, Named)), None)


def _tag(marks: tuple) -> str | None:
    """Key by which the members of a union are told apart."""
    found = (mark.discriminator for mark in marks if isinstance(mark, FieldInfo))
    return next((tag for tag in found if isinstance(tag, str)), None)


def _resolve(kind: Any, tree: Tree, tables: Tables) -> Any:
    """The type without annotations that `tree` is to become."""
    bare, marks = _bare(kind)
    if named := _named(marks):
        return named.resolve(tree, tables) or bare
    if tag := _tag(marks):
        word = tree.get(tag) if isinstance(tree, dict) else None
        return next((m for m in get_args(bare) if is_dataclass(m) and word in get_args(_hints(m)[tag])), bare)
    return bare


def _blocks(kind: Any, tree: Tree, tables: Tables, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Path and keys of every block there could be, following the names that are given; `*` stands for any key."""
    bare, marks = _resolve(kind, tree, tables), _bare(kind)[1]
    if path.count(".") > 8 or any(hasattr(mark, "func") for mark in marks):
        return  # a class that contains itself, or has a validator of its own
    if isinstance(bare, type) and is_dataclass(bare):
        hints = _hints(bare)
        yield path, list(dict.fromkeys((*(["name"] if _named(marks) else []), *hints)))
        for name, member in hints.items():
            inner = tree.get(name) if isinstance(tree, dict) else None
            yield from _blocks(member, inner, tables, f"{path}.{name}" if path else name)
    elif get_origin(bare) in (dict, list, tuple) and get_args(bare):
        yield from _blocks(get_args(bare)[-1], None, tables, f"{path}.*")


# ---- Findings --------------------------------------------------------------------------------------------------------

_WORDS = {
    "a valid integer, got a number with a fractional part": "a whole number", "a valid integer": "a whole number",
    "a valid number": "a number", "a valid string": "text", "a valid boolean": "true or false", "an object": "a block",
    "a valid array": "a list", "greater than or equal to": "a value at least", "greater than": "a value above",
    "less than or equal to": "a value at most", "less than": "a value below",
}  # fmt: skip
"""Words of pydantic, and ours."""


def one_of(words: Sequence[str]) -> str:
    """A choice of words as messages name it."""
    return f"one of {', '.join(words)}" if len(words) > 1 else "".join(words)


def nearest(word: Tree, words: Iterable[str]) -> str:
    """The one of the words that was probably meant; empty when none comes near."""
    if not isinstance(word, str) or len(word) > 100:
        return ""
    known = {str(w).lower(): str(w) for w in words}
    return next((known[w] for w in difflib.get_close_matches(word.lower(), list(known), 1, 0.65)), "")


def explain(error: ValidationError, cls: type, source: Source, tables: Tables) -> list[Problem]:
    """Pydantic's findings about `source.tree` as problems, one a key."""
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for mistake in error.errors(include_url=False)[:MAX_WORDED]:
        found.setdefault(_path(mistake, source.tree), []).append(mistake)
    above = {path[:length] for path in found for length in range(len(path))}
    blocks: list[tuple[str, list[str]]] = []
    problems: list[Problem] = []
    for path, mistakes in found.items():
        said = next((one.get("ctx", {}).get("error") for one in mistakes if one["type"] == "value_error"), None)
        if any(path[: len(b)] == b or (said and b[: len(path)] == path) for b in source.broken):
            continue  # follows from a value that could not be read
        base = Problem(dotted(path), **source.at(path))
        if said is not None:
            problems.append(replace(base, found=_one_line(str(said))))
        elif mistakes[0]["type"] == "unexpected_keyword_argument":
            blocks = blocks or list(_blocks(cls, source.tree, tables))
            problems.append(_unknown(path, blocks, source.tree, base))
        elif path not in above:  # of the members of a union, the one that is meant has a finding further inside
            problems.append(_wrong(path, mistakes, source, base))
    return problems


def _path(mistake: ErrorDetails, tree: Tree) -> KeyPath:
    """The keys in pydantic's location, which also names members of unions."""
    path: KeyPath = ()
    for step in mistake["loc"][1:]:
        inner: Tree = dict(enumerate(tree)) if isinstance(tree, list) else tree
        if isinstance(inner, dict) and step in inner:
            path, tree = (*path, step), inner[step]
    return (*path, mistake["loc"][-1]) if mistake["type"] == "missing" else path


def _value(path: KeyPath, tree: Tree) -> Tree:
    for step in path:
        tree = tree[step]
    return tree


def _wrong(path: KeyPath, mistakes: list[ErrorDetails], source: Source, base: Problem) -> Problem:
    """Describe a value that does not fit, or one that is missing."""
    if mistakes[0]["type"] == "missing":
        return replace(base, found="this key is required")
    value, about = _value(path, source.tree), mistakes[0].get("ctx", {})
    expected = " or ".join(dict.fromkeys(_expected(one) for one in mistakes))
    choices = [word for one in mistakes for word in _literals(one)]
    if "discriminator" in about and isinstance(value, dict):
        path = (*path, about["discriminator"].strip("'"))
        choices = re.findall("'([^']*)'", about.get("expected_tags", ""))
        base, expected = Problem(dotted(path), **source.at(path)), one_of(choices)
        if path[-1] not in value:
            return replace(base, found="this key is required", remedy=expected)
        value = value[path[-1]]
    near = nearest(value, choices) if len(choices) > 1 else ""  # a single choice has been named
    return replace(base, found=shown(value), expected=_one_line(expected), nearest=near)


def _expected(mistake: ErrorDetails) -> str:
    """Return what pydantic expected, in our words."""
    if literals := _literals(mistake):
        return one_of(literals)
    text = re.sub(r"^Input should be |^\w+ should have | after validation, not .*", "", mistake["msg"])
    return functools.reduce(lambda text, pair: text.replace(*pair), _WORDS.items(), text)


def _literals(mistake: ErrorDetails) -> list[str]:
    said = mistake.get("ctx", {}).get("expected", "") if mistake["type"] == "literal_error" else ""
    return re.findall("'([^']*)'", said)


def _unknown(path: KeyPath, blocks: list[tuple[str, list[str]]], tree: Tree, base: Problem) -> Problem:
    """Describe an unknown key: the block it belongs in, or the nearest key."""
    key, around, base = str(path[-1]), dotted(path[:-1]), replace(base, found="unknown key")
    keys = [key for place, keys in blocks if _is_at(place, around) for key in keys]
    near = nearest(key, keys)

    homes = [place for place, keys in blocks if key in keys]
    if len(homes) == 1:
        return replace(base, remedy=f"it belongs in {homes[0]}" if homes[0] else "it belongs at the top level")
    return replace(base, nearest=near) if near else replace(base, remedy=f"the keys here are {', '.join(keys)}")


def _is_at(home: str, place: str) -> bool:
    """True where a dotted path is that of a block, in which `*` stands for any name."""
    steps, wanted = home.split("."), place.split(".")
    return len(steps) == len(wanted) and all(w in ("*", s) or s == "*" for s, w in zip(steps, wanted, strict=True))


def _one_line(text: str) -> str:
    return cut(" ".join(text.split()), 300)

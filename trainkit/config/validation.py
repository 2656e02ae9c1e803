"""Values -> dataclasses: strict validation by pydantic, and its findings in words that name key, place and remedy.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from trainkit.config import field_names
from trainkit.config.yaml_reader import KeyPath, Problem, Source, Tree, cut, dotted, flow, shown
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
            raise PydanticCustomError("named_block", "no such block")
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


def _own_validator(marks: tuple) -> bool:
    return any(hasattr(mark, "func") for mark in marks)


def _resolve(kind: Any, tree: Tree, tables: Tables) -> tuple[Any, bool]:
    """The type without annotations that `tree` is to become, and whether pydantic's location has a step for that."""
    bare, marks = _bare(kind)
    if named := _named(marks):
        cls = named.resolve(tree, tables)
        return (cls, True) if cls else (bare, False)
    if tag := _tag(marks):
        word = tree.get(tag) if isinstance(tree, dict) else None
        member = next((m for m in get_args(bare) if is_dataclass(m) and word in get_args(_hints(m)[tag])), None)
        return (member, True) if member else (bare, False)
    return bare, False


def _follow(cls: type, loc: Sequence, tree: Tree, tables: Tables) -> tuple[KeyPath, Any, Tree, list[str]]:
    """Key path, type and value that pydantic's location means, and the keys of the innermost block around it.

    It ends where the schema no longer follows the keys, as inside a union.
    """
    kind, path, keys, left = cls, (), [], list(loc)
    while left:
        bare, extra_step = _resolve(kind, tree, tables)
        if extra_step:
            left.pop(0)
            if not left:
                break
        step, members = left.pop(0), get_args(bare)
        if is_dataclass(bare):
            keys = list(_hints(bare))
            if _named(_bare(kind)[1]) and "name" not in keys:
                keys.insert(0, "name")
            kind = _hints(bare).get(step)
        elif get_origin(bare) is dict:
            kind = members[1]
        elif get_origin(bare) in (list, tuple) and isinstance(step, int):
            kind = members[0] if Ellipsis in members else members[min(step, len(members) - 1)]
        else:
            break
        path = (*path, step)
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            tree = None
    return path, kind, tree, keys


def _blocks(kind: Any, tree: Tree, tables: Tables, path: str = "") -> Iterator[tuple[str, type]]:
    """Path and class of every block there could be, following the names that are given."""
    bare, _ = _resolve(kind, tree, tables)
    if path.count(".") > 8 or _own_validator(_bare(kind)[1]):
        return  # 8: a class that contains itself
    if isinstance(bare, type) and is_dataclass(bare):
        yield path, bare
        for name, member in _hints(bare).items():
            inner = tree.get(name) if isinstance(tree, dict) else None
            yield from _blocks(member, inner, tables, f"{path}.{name}" if path else name)
    elif get_origin(bare) in (dict, list, tuple) and get_args(bare):
        yield from _blocks(get_args(bare)[-1], None, tables, f"{path}.*")


# ---- Words -----------------------------------------------------------------------------------------------------------

_SIMPLE = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_SIMPLE |= {list: "a list", tuple: "a list", dict: "a block", Path: "a path"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def _choices(kind: Any, tables: Tables) -> list:
    """Words that a value of this type is chosen from; empty when it isn't."""
    bare, marks = _bare(kind)
    if named := _named(marks):
        return list(tables[named.table])
    if tag := _tag(marks):
        return [word for member in get_args(bare) if is_dataclass(member) for word in get_args(_hints(member)[tag])]
    if _is_union(bare):
        return [word for member in get_args(bare) for word in _choices(member, tables)]
    return list(get_args(bare)) if get_origin(bare) is Literal else []


def _words(kind: Any, tables: Tables) -> str:
    """Describe the values of a type; empty where only its own validator knows.

    A text among the annotations, as in Annotated[Span, "a span such as 1 epoch", ...], is taken for its description.
    """
    bare, marks = _bare(kind)
    null = " or null" if _is_union(kind) and type(None) in get_args(kind) and bare is not kind else ""
    if told := next((mark for mark in marks if isinstance(mark, str)), None):
        return told + null
    if _named(marks) or _tag(marks):
        return f"a block whose name is {one_of(_choices(kind, tables))}{null}"
    if _own_validator(marks):
        return ""
    if _is_union(bare):
        parts = [_words(member, tables) for member in get_args(bare)]
        return " or ".join(dict.fromkeys(parts)) if all(parts) else ""
    members = get_args(bare)
    if get_origin(bare) is Literal:
        return one_of(members) + null
    if get_origin(bare) is tuple and Ellipsis not in members:
        return f"[{', '.join(_words(member, tables) or 'a value' for member in members)}]{null}"
    if get_origin(bare) in (list, tuple):
        entry = _words(members[0], tables)
        return (f"a list, each entry {entry}" if entry else "a list") + null
    if is_dataclass(bare) or get_origin(bare) is dict:
        return f"a block{null}"
    return _SIMPLE[bare] + null if bare in _SIMPLE else ""


def one_of(words: Sequence) -> str:
    """A choice of words as messages name it."""
    texts = [word if isinstance(word, str) else json.dumps(word) for word in words]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def nearest(word: Tree, words: Sequence) -> str:
    """The one of the words that was probably meant; empty when none comes near."""
    if not isinstance(word, str) or len(word) > 100:
        return ""
    known = {str(w).lower(): str(w) for w in words}
    return next((known[w] for w in difflib.get_close_matches(word.lower(), list(known), 1, 0.65)), "")


def _hint(word: Tree, choices: Sequence) -> str:
    return nearest(word, choices) if len(choices) > 1 else ""  # a single choice has been named


def explain(error: ValidationError, cls: type, source: Source, tables: Tables) -> list[Problem]:
    """Pydantic's findings about `source.tree` as problems, one a key."""
    problems: dict[KeyPath, Problem] = {}
    blocks: list[tuple[str, type]] = []
    for mistake in error.errors(include_url=False)[:MAX_WORDED]:
        path, kind, value, keys = _follow(cls, mistake["loc"][1:], source.tree, tables)
        sort, ctx = mistake["type"], mistake.get("ctx", {})
        said = sort in ("value_error", "assertion_error")
        if any(path[: len(b)] == b or (said and b[: len(path)] == path) for b in source.broken):
            continue  # follows from a value that could not be read
        if path in problems and not said:
            continue  # of the members of a union, the one with words of its own speaks
        text, at = dotted(path), source.at(path)
        bound = next((f"{word} {_number(ctx[key])}" for key, word in _BOUNDS.items() if key in ctx), "")
        if sort in ("unexpected_keyword_argument", "extra_forbidden"):
            blocks = blocks or list(_blocks(cls, source.tree, tables))
            problems[path] = _unknown(path, value, keys, blocks, source.tree, Problem(text, **at))
        elif sort.startswith("missing"):
            problems[path] = _missing(Problem(text, **at), _words(kind, tables))
        elif isinstance(value, dict) and sort in ("named_block", "union_tag_invalid", "union_tag_not_found"):
            key, choices = _tag(_bare(kind)[1]) or "name", _choices(kind, tables)
            base = Problem(dotted((*path, key)), **source.at((*path, key)))
            wrong = replace(base, found=shown(value.get(key)), expected=one_of(choices))
            wrong = replace(wrong, nearest=_hint(value.get(key), choices))
            problems[path] = wrong if key in value else _missing(base, one_of(choices))
        elif said:
            problems[path] = Problem(text, found=_one_line(str(ctx["error"])), **at)
        elif bound:
            problems[path] = Problem(text, found=shown(value), expected=f"a value {bound}", **at)
        elif (expected := _words(kind, tables)) and re.search("_type$|_error$|_from_|too_|named", sort):
            wrong, choices = Problem(text, found=shown(value), expected=expected, **at), _choices(kind, tables)
            tag = "name" if _named(_bare(kind)[1]) else _tag(_bare(kind)[1])
            if tag and value in choices:
                problems[path] = replace(wrong, remedy=f"write {{{tag}: {value}}}")
            else:
                problems[path] = replace(wrong, nearest=_hint(value, choices))
        else:
            problems[path] = Problem(text, found=f"{shown(value)}: {_one_line(mistake['msg'])}", **at)
    return list(problems.values())


def _missing(base: Problem, expected: str) -> Problem:
    if not expected:
        return replace(base, found="this key is required")
    return replace(base, found="nothing", expected=expected, remedy="this key is required")


def _unknown(
    path: KeyPath, value: Tree, keys: list[str], blocks: list[tuple[str, type]], tree: Tree, base: Problem
) -> Problem:
    """Describe an unknown key: its name in trainkit, the block it belongs in, or the nearest key."""
    key, around, base = str(path[-1]), dotted(path[:-1]), replace(base, found="unknown key")

    def has(other: str) -> bool:
        home, _, last = other.rpartition(".")
        return any(last in _hints(block) and _is_at(home, at) for at, block in blocks)

    near = nearest(key, keys)
    # Only the case differs: the plain hint is shorter.
    advice = "" if near.lower() == key.lower() else field_names.advise(key, has, tree, around, keys)
    homes = [home for home, block in blocks if key in _hints(block)]
    if advice:
        return replace(base, remedy=advice)
    if len(homes) == 1:
        where = f"in {homes[0]}" if homes[0] else "at the top level"
        if base.override and not isinstance(value, dict) and "*" not in homes[0]:
            home = f"{homes[0]}." if homes[0] else ""
            text = value if isinstance(value, str) else flow(value)
            return replace(base, remedy=f"it belongs {where}: write {field_names.quoted(home + key, text)}")
        return replace(base, remedy=f"it belongs {where}")
    if near:
        return replace(base, nearest=near)
    return replace(base, remedy=f"the keys here are {', '.join(keys)}")


def _is_at(home: str, place: str) -> bool:
    """True where a dotted path is that of a block, in which `*` stands for any name."""
    steps, wanted = home.split("."), place.split(".")
    return len(steps) == len(wanted) and all(w in ("*", s) for s, w in zip(steps, wanted, strict=True))


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _one_line(text: str) -> str:
    return cut(" ".join(text.split()), 300)

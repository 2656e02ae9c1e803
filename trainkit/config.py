"""YAML -> Recipe: every mistake at once, each with its place, what was found, what was expected and what to do.

The YAML is read event by event and never constructed: no tag, alias or anchor can do anything, every value keeps its
line, and numbers and words mean what YAML 1.2 says (`1e-3` is a number, `no` and `1:30` are text). Keys are text as
written. The tree then goes, as JSON, through pydantic's strict validation of the recipe's dataclasses; pydantic finds
the mistakes, this module words them. It knows no machine learning.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import json
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.recipe import Recipe

T = TypeVar("T")
Tree = Any
"""What YAML says: None, bool, int, float, str, list, or dict with str keys."""
KeyPath = tuple[str | int, ...]
Tables = Mapping[str, Mapping[str, str]]

MAX_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_SHOWN = 50
"""Problems that an error message spells out."""
RECIPES = Path(__file__).resolve().parents[1] / "recipes"

_SCALAR_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True,
                 "TRUE": True, "false": False, "False": False, "FALSE": False}  # fmt: skip
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
# Besides what YAML forbids: tabs, and the line breaks that editors do not count.
_FORBIDDEN = re.compile("[^\n\r -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_PLAIN = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./%*+-]| (?=[A-Za-z0-9_]))*")


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    path: str
    """Dotted key path; empty for the file as a whole."""
    line: int | None = None
    """Line of the file, from 1; None where there is none, or an override said it."""
    found: str = ""
    expected: str = ""
    nearest: str = ""
    """The word that was probably meant."""
    remedy: str = ""
    override: str = ""
    """The override word that the mistake is in."""

    def __str__(self) -> str:
        place = f"override {_shown(self.override)}" if self.override else f"line {self.line}" if self.line else ""
        head = f"{self.path} ({place})" if self.path and place else self.path or place
        text = f"found {self.found}, expected {self.expected}" if self.expected else self.found
        if self.nearest:
            text += f"{'; ' if self.expected else ', '}did you mean '{self.nearest}'?"
        if self.remedy:
            text += f"; {self.remedy}"
        return f"{head}: {text}" if head else text


class ConfigError(UserError):
    """A recipe or override that cannot be used; `problems` are all its mistakes."""

    def __init__(self, where: str, problems: Sequence[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__(where, count)
        lines = [f"  {problem}" for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            lines.append(f"  and {len(self.problems) - MAX_SHOWN} more")
        self.args = ("\n".join([f"{where}: {count}", *lines]),)


# ---- Named blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """Marks a field whose block says by its `name` which class it is; `table` is looked up in the tables of the recipe.

    Written `task: Annotated[Any, Named("task")]`. The class is imported when it is used, and the rest of the block is
    validated against its fields. `name` is handed on only to a class that has such a field.
    """

    table: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Validate through the class that `name` stands for."""
        return core_schema.with_info_plain_validator_function(
            lambda block, info: self._build(block, info.context),
            serialization=core_schema.plain_serializer_function_ser_schema(self._write),
        )

    def _build(self, block: Tree, tables: Tables) -> Any:
        if (
            not isinstance(block, dict)
            or not isinstance(block.get("name"), str)
            or block["name"] not in tables[self.table]
        ):
            raise PydanticCustomError("named_block", "no such block")
        cls = _import(self.table, block["name"], tables)
        rest = block if _has_name(cls) else {key: value for key, value in block.items() if key != "name"}
        return _validate(cls, rest, tables)

    def _write(self, value: Any) -> dict[str, Tree]:
        tree = _adapter(type(value)).dump_python([value], mode="json")[0]
        return {"name": _word_of(self.table, type(value)), **tree}


_imported: dict[tuple[str, type], str] = {}
"""(table, class) -> word, for writing back blocks of plug-ins."""


def _has_name(cls: type) -> bool:
    return any(f.name == "name" for f in fields(cls))


@functools.cache
def _load_class(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _import(table: str, word: str, tables: Tables) -> type:
    cls = _load_class(tables[table][word])
    _imported[table, cls] = word
    return cls


def _word_of(table: str, cls: type) -> str:
    if (table, cls) in _imported:
        return _imported[table, cls]
    from trainkit.recipe import TABLES

    for word, place in TABLES.get(table, {}).items():
        if place == f"{cls.__module__}:{cls.__qualname__}":
            return word
    raise ValueError(f"{cls.__qualname__} has no word in the table of {table!r} blocks")


@functools.cache
def _adapter(cls: type) -> TypeAdapter:
    # The list hands its configuration on to plain dataclasses at any depth; they cannot be given one directly.
    return TypeAdapter(list[cls], config=ConfigDict(strict=True, extra="forbid"))


def _validate(cls: type[T], tree: Tree, tables: Tables) -> T:
    # JSON mode is strict about words and numbers, yet takes lists for tuples and blocks for dataclasses.
    return _adapter(cls).validate_json(json.dumps([tree]), context=tables)[0]


# ---- Reading YAML ----------------------------------------------------------------------------------------------------


@dataclass
class _Source:
    """A tree with, for each key path, the line or the override word that says it."""

    tree: Tree = None
    places: dict[KeyPath, int | str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)
    """Paths of values that could not be read; None stands in for them."""

    def at(self, path: KeyPath) -> dict[str, Any]:
        """Line or override of the nearest known place around `path`."""
        while path and path not in self.places:
            path = path[:-1]
        place = self.places.get(path)
        return {"override": place} if isinstance(place, str) else {"line": place}


class _Stop(Exception):
    """Ends the reading of a text that cannot be read on."""


def _read_yaml(text: str, source: _Source, prefix: KeyPath = (), override: str = "") -> None:
    """Read one document into `source`, at `prefix`. Problems are recorded there, not raised."""

    def problem(path: KeyPath, line: int | None, found: str, remedy: str = "", **more: str) -> None:
        place = {"override": override} if override else {"line": line}
        source.problems.append(Problem(_dotted(path), found=found, remedy=remedy, **place, **more))

    def stop(line: int | None, found: str, remedy: str = "") -> None:
        problem(prefix, line, found, remedy)
        raise _Stop

    def check(event: yaml.Event, path: KeyPath) -> None:
        line = event.start_mark.line + 1
        if event.anchor is not None:
            problem(path, line, f"anchor {_shown('&' + event.anchor)}", "write the value where it is used")
        if event.tag is not None:
            problem(path, line, f"tag {_shown(event.tag)}", "leave it out; the type follows from the key")

    def value(event: yaml.Event, path: KeyPath, depth: int) -> Tree:
        line = event.start_mark.line + 1
        source.places.setdefault(path, override or line)
        if depth > MAX_DEPTH:
            stop(line, f"blocks nested more than {MAX_DEPTH} deep", "a recipe needs a few levels")
        if isinstance(event, yaml.AliasEvent):
            problem(path, line, f"alias {_shown('*' + event.anchor)}", "write the value itself; text is put in quotes")
            source.broken.add(path)
            return None
        check(event, path)
        if isinstance(event, yaml.ScalarEvent):
            try:
                return _scalar(event.value) if not event.style else _text(event.value)
            except ValueError as mistake:
                problem(path, line, str(mistake))
                source.broken.add(path)
                return None
        if isinstance(event, yaml.SequenceStartEvent):
            entries = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                entries.append(value(event, (*path, len(entries)), depth + 1))
            return entries
        return mapping(path, depth)

    def mapping(path: KeyPath, depth: int) -> dict[str, Tree]:
        block: dict[str, Tree] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent) or not isinstance(event, yaml.ScalarEvent):
                stop(line, "a key that is not a word", "keys are plain text")
            check(event, path)
            key = event.value
            if not key or "." in key or any("\ud800" <= c <= "\udfff" for c in key):
                problem(path, line, f"key {_shown(key)}", "a key is a word without dots; nest blocks instead")
                value(next(events), (*path, "?"), depth + 1)
            elif key in block:
                first = source.places[(*path, key)]
                also = f"given twice, first in line {first}" if isinstance(first, int) else "given twice"
                problem((*path, key), line, also, "keep one of them")
                value(next(events), (*path, "?"), depth + 1)
            else:
                source.places[(*path, key)] = override or line
                block[key] = None  # claims the key before its own value is read
                block[key] = value(next(events), (*path, key), depth + 1)
        return block

    if bad := _FORBIDDEN.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        found = "a tab" if bad[0] == "\t" else f"character U+{ord(bad[0]):04X}, which does not belong in a text file"
        problem(prefix, line, found, "use spaces" if bad[0] == "\t" else "remove it")
        return
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        next(events)
        start = next(events)
        if isinstance(start, yaml.StreamEndEvent):
            return
        if start.version or start.tags:
            stop(start.start_mark.line + 1, "a % directive", "leave it out")
        source.tree = value(next(events), prefix, 0)
        next(events)
        if not isinstance(more := next(events), yaml.StreamEndEvent):
            stop(more.start_mark.line + 1, "a second document", "one file is one recipe")
    except _Stop:
        return
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # the pure-Python parser lets bad escapes through as ValueError
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        problem(prefix, mark.line + 1 if mark else None, f"not YAML: {reason}", "check indentation, colons and quotes")


def _text(text: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("an escape that is no character; surrogates do not stand alone")
    return text


def _scalar(text: str) -> Tree:
    """Value of an unquoted scalar. Raises ValueError for numbers that are ambiguous, not finite or too large."""
    if text in _SCALAR_WORDS:
        return _SCALAR_WORDS[text]
    if _LEADING_ZERO.fullmatch(text):
        raise ValueError(
            f"{_cut(text)} has a leading zero, which some read as octal; write it without, or in quotes as text"
        )
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number")
    if _INT.fullmatch(text):
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            raise ValueError(f"{_cut(text)} does not fit 64 bits")
        return int(text)
    if _FLOAT.fullmatch(text):
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{_cut(text)} is too large for a number")
        return number
    return _text(text)


# ---- Overrides -------------------------------------------------------------------------------------------------------


def _override(word: str, source: _Source, seen: set[KeyPath]) -> None:
    """Apply one `key=value` word to the tree."""

    def wrong(found: str, remedy: str) -> None:
        source.problems.append(Problem("", found=found, remedy=remedy, override=word))

    key, equals, text = word.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return wrong("not of the form key=value", "write it like optim.lr=0.05")
    if not text.strip():
        return wrong("no value", f"write {_cut(key)}=null for none, {_cut(key)}='\"\"' for empty text")
    if len(parts) > MAX_DEPTH:
        return wrong(f"blocks nested more than {MAX_DEPTH} deep", "a recipe needs a few levels")
    node, path = source.tree, ()
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(node, list):
            if not (part.isascii() and part.isdecimal() and len(part) < 6 and int(part) < len(node)):
                return wrong(f"{_dotted(path)} is a list of {len(node)}; {_shown(part)} is none of its entries",
                             f"give an index below {len(node)}, or the whole list" if node else "give the whole list")  # fmt: skip
            part = int(part)
        elif not isinstance(node, dict):
            return wrong(
                f"{_dotted(path)} is {_shown(node)}, not a block", f"give the whole block: {_dotted(path)}={{...}}"
            )
        path = (*path, part)
        if not last:
            if isinstance(node, dict) and node.get(part) is None:
                node[part] = {}
                source.places[path] = word
            node = node[part]
    if path in seen:
        return wrong(f"{_dotted(path)} given twice", "keep one of them")
    seen.add(path)
    new = _Source()
    _read_yaml(text, new, path, word)
    for old in [p for p in source.places if p[: len(path)] == path]:
        del source.places[old]
    source.broken = {p for p in source.broken if p[: len(path)] != path} | new.broken
    source.places |= new.places | {path: word}
    source.problems += new.problems
    if new.problems and new.tree is None:
        source.broken.add(path)
    node[path[-1]] = new.tree
    return None


# ---- Types in words --------------------------------------------------------------------------------------------------


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def _bare(kind: Any) -> tuple[Any, tuple]:
    """Type without its annotations, and these."""
    return (get_args(kind)[0], get_args(kind)[1:]) if get_origin(kind) is Annotated else (kind, ())


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _discriminator(extras: tuple) -> str | None:
    return next(
        (x.discriminator for x in extras if isinstance(x, FieldInfo) and isinstance(x.discriminator, str)), None
    )


def _choices(kind: Any, tables: Tables) -> list:
    """Words that a value of this type is chosen from; empty when it isn't."""
    bare, extras = _bare(kind)
    if named := next((x for x in extras if isinstance(x, Named)), None):
        return list(tables[named.table])
    if (key := _discriminator(extras)) and _is_union(bare):
        return [word for member in get_args(bare) if is_dataclass(member) for word in get_args(_hints(member)[key])]
    if _is_union(bare):
        return [word for member in get_args(bare) for word in _choices(member, tables)]
    return list(get_args(bare)) if get_origin(bare) is Literal else []


def _words(kind: Any, tables: Tables) -> str:
    """What a value of this type looks like; empty where only its own validator knows."""
    bare, extras = _bare(kind)
    if told := next((x for x in extras if isinstance(x, str)), None):
        return told
    if any(isinstance(x, Named) for x in extras) or (_discriminator(extras) and _is_union(bare)):
        return f"a block whose name is {_either(_choices(kind, tables))}"
    if any(hasattr(x, "func") for x in extras):
        return ""
    if _is_union(bare):
        parts = [_words(member, tables) for member in get_args(bare)]
        return " or ".join(dict.fromkeys(parts)) if all(parts) else ""
    if get_origin(bare) is Literal:
        return _either(get_args(bare))
    if get_origin(bare) is tuple and Ellipsis not in get_args(bare):
        return f"[{', '.join(_words(member, tables) or 'a value' for member in get_args(bare))}]"
    if get_origin(bare) in (list, tuple):
        entry = _words(get_args(bare)[0], tables)
        return f"a list, each entry {entry}" if entry else "a list"
    simple = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null",
              list: "a list", tuple: "a list", Path: "a path"}  # fmt: skip
    if bare in simple:
        return simple[bare]
    return "a block of keys" if is_dataclass(bare) or get_origin(bare) is dict or bare is dict else ""


def _either(words: Sequence) -> str:
    texts = [str(word) if not isinstance(word, bool) else str(word).lower() for word in words]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def _resolve(kind: Any, block: Tree, tables: Tables) -> Any:
    """The dataclass that `block` is to become, following `name`; else the type itself."""
    bare, extras = _bare(kind)
    word = block.get("name") if isinstance(block, dict) else None
    word = word if isinstance(word, str) else None
    if named := next((x for x in extras if isinstance(x, Named)), None):
        return _import(named.table, word, tables) if word in tables[named.table] else kind
    if _is_union(bare):
        members = [member for member in get_args(bare) if member is not type(None)]
        if (key := _discriminator(extras)) and members:
            told = block.get(key) if isinstance(block, dict) else None
            return next((m for m in members if is_dataclass(m) and told in get_args(_hints(m)[key])), kind)
        if len(members) == 1:
            return _resolve(members[0], block, tables)
        return kind
    return kind


def _follow(cls: type, loc: Sequence, tree: Tree, tables: Tables) -> tuple[KeyPath, Any, Tree, list[str]]:
    """Key path, type and value that pydantic's location means, and the keys of the innermost block around it.

    It ends where the schema no longer follows the keys, as inside a union.
    """
    kind, path, keys, left = cls, (), [], list(loc)
    while left:
        whole, kind = kind, _resolve(kind, tree, tables)
        marks = _bare(_some(whole))[1]
        tagged = whole is not kind and (_discriminator(marks) or any(isinstance(x, Named) for x in marks))
        if tagged:
            left.pop(0)  # the tag of the union, or the list that a named block is validated in
        if not left:
            break
        bare, step = _bare(kind)[0], left.pop(0)
        members = get_args(bare)
        if is_dataclass(bare):
            keys = list(_hints(bare))
            if tagged and "name" not in keys:
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


def _some(kind: Any) -> Any:
    """X of `X | None`."""
    members = [m for m in get_args(kind) if m is not type(None)] if _is_union(kind) else []
    return members[0] if len(members) == 1 else kind


def _blocks(kind: Any, tree: Tree, tables: Tables, path: str = "", depth: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Path and keys of every block there could be, following the names that are given."""
    kind = _resolve(kind, tree, tables)
    bare, _ = _bare(_some(kind))
    if depth > 8:
        return
    if is_dataclass(bare) and isinstance(bare, type):
        if any(hasattr(x, "func") for x in _bare(_some(kind))[1]):
            return
        yield path, list(_hints(bare))
        for name, member in _hints(bare).items():
            inner = tree.get(name) if isinstance(tree, dict) else None
            yield from _blocks(member, inner, tables, f"{path}.{name}" if path else name, depth + 1)
    elif get_origin(bare) in (dict, list, tuple) and get_args(bare):
        yield from _blocks(get_args(bare)[-1], None, tables, f"{path}.*", depth + 1)


# ---- Mistakes in words -----------------------------------------------------------------------------------------------


def _explain(error: ValidationError, cls: type, source: _Source, tables: Tables) -> list[Problem]:
    problems: dict[KeyPath, Problem] = {}
    for mistake in error.errors(include_url=False):
        sort = mistake["type"]
        path, kind, value, keys = _follow(cls, mistake["loc"][1:], source.tree, tables)
        said = sort in ("value_error", "assertion_error")
        if any(path[: len(b)] == b or (said and b[: len(path)] == path) for b in source.broken):
            continue  # follows from a value that could not be read
        text, at = _dotted(path), source.at(path)
        if sort in ("unexpected_keyword_argument", "extra_forbidden"):
            problem = _unknown(
                path, keys, [home for home, its in _blocks(cls, source.tree, tables) if path[-1] in its], at
            )
        elif sort.startswith("missing"):
            problem = _missing(path, _words(kind, tables), at)
        elif isinstance(value, dict) and sort in ("named_block", "union_tag_invalid", "union_tag_not_found"):
            key = "name" if sort == "named_block" else mistake["ctx"]["discriminator"].strip("'")
            words, word, at = _choices(_some(kind), tables), value.get(key), source.at((*path, key))
            problem = _missing((*path, key), _either(words), at)
            if key in value:
                problem = Problem(_dotted((*path, key)), found=_shown(word), expected=_either(words), **at)
                problem = replace(problem, nearest=_nearest(word, words))
        elif said:
            problem = Problem(text, found=_one_line(str(mistake["ctx"]["error"])), **at)
        elif (expected := _words(kind, tables)) and re.search("_type$|_error$|_from_|too_|named", sort):
            nearest = _nearest(value, _choices(kind, tables))
            problem = Problem(text, found=_shown(value), expected=expected, nearest=nearest, **at)
        else:
            problem = Problem(text, found=f"{_shown(value)}: {_one_line(mistake['msg'])}", **at)
        if path not in problems or said:  # of the members of a union, the one with a message of its own speaks
            problems[path] = problem
    return list(problems.values())


def _missing(path: KeyPath, expected: str, at: dict) -> Problem:
    if not expected:
        return Problem(_dotted(path), found="required, but not there", **at)
    return Problem(_dotted(path), found="nothing", expected=expected, remedy="this key is required", **at)


def _unknown(path: KeyPath, known: list[str], homes: list[str], at: dict) -> Problem:
    """An unknown key: where it belongs, else what was meant, else what there is."""
    text, key = _dotted(path), str(path[-1])
    if len(homes) == 1:
        place = f"in {homes[0]}" if homes[0] else "at the top level"
        return Problem(text, found="unknown key", remedy=f"it belongs {place}", **at)
    if nearest := _nearest(key, known):
        return Problem(text, found="unknown key", nearest=nearest, **at)
    return Problem(text, found="unknown key", remedy=f"there are {', '.join(known)}", **at)


def _nearest(word: Tree, words: Sequence) -> str:
    if not isinstance(word, str) or len(word) > 100:
        return ""
    close = {str(w).lower(): str(w) for w in words}
    return next((close[w] for w in difflib.get_close_matches(word.lower(), list(close), 1, 0.6)), "")


def _cut(text: str, width: int = 60) -> str:
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _one_line(text: str) -> str:
    return _cut(" ".join(text.split()), 300)


def _shown(value: Tree) -> str:
    if isinstance(value, str):
        return f"'{_cut(value)}'"
    if isinstance(value, dict | list):
        return f"a {'block' if isinstance(value, dict) else 'list'}{'' if value else ' that is empty'}"
    return json.dumps(value)


def _dotted(path: KeyPath) -> str:
    return ".".join(_cut(str(step), 40) for step in path)


# ---- Loading ---------------------------------------------------------------------------------------------------------


def load(path: str | Path, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `key=value` words to it, and check it.

    `plugins` are packages whose `TABLES`, of the form of `trainkit.recipe.TABLES`, add words for named blocks.
    Raises ConfigError with every mistake.
    """
    from trainkit.recipe import TABLES, Recipe

    tables = _with_plugins(TABLES, plugins)
    return parse(Recipe, _read_file(Path(path)), str(path), overrides, tables)


def parse(
    cls: type[T], text: str | bytes, where: str, overrides: Sequence[str] = (), tables: Tables | None = None
) -> T:
    """Make a `cls` of a YAML text; `where` names the text in messages. Raises ConfigError with every mistake."""
    tables = tables or {}
    source = _Source()
    if isinstance(text, bytes):
        text = _decode(text, where)
    _read_yaml(text, source)
    if source.tree is None and not source.problems:
        raise ConfigError(where, [Problem("", found="an empty file", expected="a recipe: a block of keys")])
    if source.problems and source.tree is None:
        raise ConfigError(where, source.problems)
    if not isinstance(source.tree, dict):
        raise ConfigError(where, [Problem("", found=_shown(source.tree), expected="a block of keys", **source.at(()))])
    seen: set[KeyPath] = set()
    for word in overrides:
        _override(word, source, seen)
    try:
        made = _validate(cls, source.tree, tables)
    except ValidationError as error:
        source.problems += _explain(error, cls, source, tables)
    if source.problems:
        last = 1 << 60
        raise ConfigError(where, sorted(source.problems, key=lambda p: p.line or (last if p.override else 0)))
    return made


def _decode(text: bytes, where: str) -> str:
    if len(text) > MAX_BYTES:
        raise ConfigError(where, [Problem("", found=f"more than {MAX_BYTES} bytes", expected="a recipe")])
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{text[error.start]:02X}, which is not UTF-8"
        raise ConfigError(where, [Problem("", line, found, remedy="save the file as UTF-8")]) from None


def _read_file(path: Path) -> bytes:
    def wrong(found: str) -> ConfigError:
        return ConfigError(str(path), [Problem("", found=found, remedy=_near_file(path))])

    try:
        if path.is_dir():
            raise wrong("a folder, not a recipe")
        if path.suffix not in (".yaml", ".yml"):
            raise wrong("not the name of a YAML file" if path.exists() else "no such file")
        if not path.exists():
            raise wrong("no such file")
        if not path.is_file():
            raise wrong("not a regular file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise wrong(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _near_file(path: Path) -> str:
    """A remedy: the recipe whose name is nearest to the one asked for, else the recipes there are."""
    try:
        own = [p for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml") and p.is_file()]
    except (OSError, ValueError):
        own = []
    files = {p.stem: p for p in [*sorted(RECIPES.glob("*.yaml")), *sorted(own)]}
    if nearest := _nearest(path.stem, list(files)):
        found = files[nearest]
        return f"did you mean {Path('recipes', found.name) if found.parent == RECIPES else found}?"
    shipped = ", ".join(p.name for p in sorted(RECIPES.glob("*.yaml")))
    return f"in recipes/ there are {shipped}" if shipped else "give the path of a .yaml file"


def _with_plugins(tables: Tables, plugins: Sequence[str]) -> Tables:
    """The tables with the words of plug-in packages added. Raises UserError."""
    merged = {table: dict(words) for table, words in tables.items()}
    for plugin in plugins:
        where = f"--plugin {_cut(plugin)}"
        if not all(part.isidentifier() for part in plugin.split(".")):
            raise UserError(where, "not the name of a package", "a name such as mypackage")
        try:
            added = importlib.import_module(plugin).TABLES
        except ModuleNotFoundError as error:
            raise UserError(
                where, f"no module {error.name!r}", remedy="install it, or run where it is found"
            ) from error
        except AttributeError as error:
            raise UserError(where, "has no TABLES", 'TABLES = {"task": {"word": "package.module:Class"}}') from error
        for table, words in added.items():
            if table not in merged:
                raise UserError(where, f"adds to a table {table!r}", _either(list(merged)))
            if taken := sorted(set(words) & set(merged[table])):
                raise UserError(where, f"the {table} word {taken[0]!r} is taken", remedy="rename it")
            merged[table] |= words
    return merged


# ---- Writing ---------------------------------------------------------------------------------------------------------


def dump(recipe: Any) -> str:
    """The recipe with all its defaults as YAML, in the order of the fields; it loads back to an equal recipe."""
    return "".join(f"{line}\n" for line in _lines(_tree(recipe)))


def flat(recipe: Any) -> dict[str, bool | int | float | str | None]:
    """Dotted key to value. A list of plain values is one text, `[0.9, 0.999]`; one of blocks has numbered keys."""
    out: dict[str, bool | int | float | str | None] = {}

    def walk(tree: Tree, path: str) -> None:
        if isinstance(tree, list) and (not tree or not _holds_blocks(tree)):
            out[path] = _flow(tree)
        elif isinstance(tree, dict) and not tree:
            out[path] = "{}"
        elif isinstance(tree, dict | list):
            for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
                walk(value, f"{path}.{key}" if path else str(key))
        else:
            out[path] = tree

    walk(_tree(recipe), "")
    return out


def digest(recipe: Any) -> str:
    """SHA-256, hexadecimal, of the resolved recipe without the fields whose metadata says `{"hash": False}`."""
    text = json.dumps(_tree(recipe, hashed=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _tree(recipe: Any, hashed: bool = False) -> Tree:
    """The recipe as YAML values; `hashed` leaves out what does not count in the digest."""

    def prune(value: Any, tree: Tree) -> Tree:
        if is_dataclass(value) and isinstance(tree, dict):
            gone = {f.name for f in fields(value) if not f.init or (hashed and f.metadata.get("hash") is False)}
            return {k: prune(getattr(value, k, None), v) for k, v in tree.items() if k not in gone}
        if isinstance(value, list | tuple) and isinstance(tree, list):
            return [prune(v, t) for v, t in zip(value, tree, strict=True)]
        if isinstance(value, dict) and isinstance(tree, dict):
            return {k: prune(value.get(k), t) for k, t in tree.items()}
        return tree

    return prune(recipe, _adapter(type(recipe)).dump_python([recipe], mode="json")[0])


def _holds_blocks(tree: Tree) -> bool:
    return isinstance(tree, dict) or (isinstance(tree, list) and any(_holds_blocks(entry) for entry in tree))


def _lines(tree: Tree) -> Iterator[str]:
    """Lines of a block, or of a list that holds blocks."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if value and _holds_blocks(value):
                yield f"{_quoted(key)}:"
                yield from (f"  {line}" for line in _lines(value))
            else:
                yield f"{_quoted(key)}: {_flow(value)}"
    else:
        for entry in tree:
            lines = _lines(entry) if entry and _holds_blocks(entry) else iter([_flow(entry)])
            yield f"- {next(lines)}"
            yield from (f"  {line}" for line in lines)


def _flow(tree: Tree) -> str:
    if isinstance(tree, list):
        return f"[{', '.join(_flow(entry) for entry in tree)}]"
    if isinstance(tree, str):
        return _quoted(tree)
    return json.dumps(tree)  # numbers, true, false, null and {} are written alike in JSON and YAML


def _quoted(text: str) -> str:
    """Text that reads back as the same text: plain where that is safe, else in double quotes."""
    try:
        if _PLAIN.fullmatch(text) and _scalar(text) == text:
            return text
    except ValueError:
        pass
    # JSON's escapes are YAML's too, except that it writes characters beyond U+FFFF as two.
    marks = [c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else
             c if c.isalpha() else json.dumps(c)[1:-1] for c in text]  # fmt: skip
    return f'"{"".join(marks)}"'

"""reference/keys.md: every key of a recipe, from the dataclasses of the schema and of the registered blocks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from docs.generators.markdown import code, first_paragraph, prose, slug, table
from trainkit.config import key_docs, units, validation
from trainkit.config.schema import TABLES, Recipe
from trainkit.config.validation import Named

TITLE = "# Recipe keys\n\n"
ABOVE = """\
Every key that a recipe may have, with its values and its default. The page is generated from the code by `make docs`.
A key is written in the YAML file, or set on the command line: `trainkit run convnext optim.lr=0.05`.

**Values.** A *span* is a number and a unit: `500 steps`, `2 epochs`, `1M samples`, `30 s`, `30 min`, `2 h`. A *length*
is a span without the units of time. A *share* is a percentage such as `5%`. `null` stands for none.

**Identity.** Two runs with equal values of the keys that are marked "yes" are runs of the same experiment: they have
the same recipe digest. When you resume a run, these keys stay as they are. A key that is marked "no" may differ
([recipe files](recipe-file.md)). "if set": the key counts once it differs from its default.

`trainkit show NAME` prints a recipe with all its defaults, `trainkit check RECIPE` checks one. An unknown key or a
value that is not allowed is an error with the line, what is expected and the nearest key.

"""
HEAD = ("key", "values", "default", "identity", "description")
REQUIRED = "required"


@dataclass(frozen=True)
class Block:
    """A block of a recipe: where it stands, and the class whose fields are its keys."""

    path: str
    """Dotted, empty for the whole recipe."""
    cls: type
    word: str = ""
    """The `name` that chooses this class among those that may stand here."""
    identity: bool = True
    of: str = ""
    """The named block in which it is, such as `classify`: several of those may have a block of this path."""

    @property
    def title(self) -> str:
        """The heading of its section."""
        if self.word and self.word == self.of:
            return f"{self.path}: {self.word}"
        chosen = f": {self.word}" if self.word else ""
        return code(self.path) + chosen + (f" ({self.of})" if self.of else "")

    @property
    def anchor(self) -> str:
        """What its keys' anchors begin with."""
        first, _, rest = self.path.partition(".")
        words = [first, self.of, rest.replace(".", "-"), self.word if self.word != self.of else ""]
        return "-".join(word for word in words if word)


def page() -> str:
    """The text of the page."""
    parts, seen = [], {}
    sections = sorted(blocks(), key=lambda block: block.path.partition(".")[0] in TABLES)  # what all recipes have first
    below: dict[tuple[str, str], Block] = {}
    for block in sections:
        below.setdefault((block.path.removesuffix(".N").removesuffix(".NAME"), block.of), block)
    index = [f"- [{block.title}](#{slug(block.title)})\n" for block in sections if "." not in block.path and block.path]
    for block in sections:
        parts.append(section(block, seen, below))
        seen.setdefault((block.cls, block.word), block)
    return TITLE + ABOVE + "## Blocks\n\n" + "".join(index) + "\n" + "".join(parts)


def section(block: Block, seen: Mapping[tuple[type, str], Block], below: Mapping[tuple[str, str], Block]) -> str:
    """The heading of a block and the table of its keys; a block that was shown already is a link to it."""
    depth = "##" if "." not in block.path else "###"
    text = f"{depth} {block.title}\n\n" if block.path else "## Top level\n\n"
    about = first_paragraph(block.cls.__doc__)
    if earlier := seen.get((block.cls, block.word)):
        return f"{text}The same keys as [{earlier.title}](#{slug(earlier.title)}).\n\n"
    text += f"{prose(about)}\n\n" if about and not about.startswith(f"{block.cls.__name__}(") else ""
    return text + table(HEAD, rows(block, below))


def rows(block: Block, below: Mapping[tuple[str, str], Block]) -> Iterator[Sequence[str]]:
    """A row for each key of a block, of which `below` has the blocks within."""
    docs = key_docs.of_fields(block.cls)
    hints = validation._hints(block.cls)
    tag = _tag_of(block)
    if block.word and "name" not in hints and tag == "name":
        yield f"`name: {block.word}`", "", REQUIRED, _identity(block, None), ""
    for entry in fields(block.cls):
        if not entry.init:
            continue
        if block.word and entry.name == tag:
            yield f"`{tag}: {block.word}`", "", REQUIRED, _identity(block, entry), prose(docs.get(entry.name, ""))
            continue
        anchor = "-".join(word for word in (block.anchor, entry.name) if word)
        full = ".".join(word for word in (block.path, entry.name) if word)
        of = " ".join(dict.fromkeys(word for word in (block.of, block.word) if word))
        mark = f'<a id="{anchor}" name="{full}{f" ({of})" if of else ""}"></a>`{entry.name}`'
        said, inner = values(hints[entry.name]), below.get((full, block.of or block.word))
        if inner is not None:
            said = said.replace("block", f"[block](#{slug(inner.title)})", 1)
            mark = f"`{entry.name}`" if slug(inner.title) == anchor else mark
        yield mark, said, default(entry, said), _identity(block, entry), prose(docs.get(entry.name, ""))


def _tag_of(block: Block) -> str:
    hints = validation._hints(block.cls)
    literal = [name for name, kind in hints.items() if get_args(validation._bare(kind)[0]) == (block.word,)]
    return literal[0] if literal else "name"


def _identity(block: Block, entry: Field[Any] | None) -> str:
    rule = entry.metadata.get("hash") if entry is not None else None
    if not block.identity or rule is False:
        return "no"
    if rule == "set" or (callable(rule) and entry is not None and entry.name == "mode"):
        return "if set"
    if callable(rule):
        return "if it draws a part, and is not `seed`"
    if isinstance(rule, Mapping):
        return "yes; " + ", ".join(f"`{value}` counts as `{as_}`" for value, as_ in rule.items())
    return "yes"


def default(entry: Field[Any], said: str) -> str:
    """The default of a key whose values are `said`, as YAML writes it."""
    if entry.default is MISSING and entry.default_factory is MISSING:
        return REQUIRED
    value = entry.default if entry.default_factory is MISSING else entry.default_factory()
    if is_dataclass(value) and not isinstance(value, units.Span | units.PerProcess | type):
        return "its defaults" if _has_name(value) == "" else f"`{{name: {_has_name(value)}}}`"
    if isinstance(value, units.Span | units.PerProcess):
        return f"`{value}`"
    if value == {} or value == [] or value == ():
        return "none"
    share = isinstance(value, float) and said.startswith("share")
    return code(units._write_share(value) if share else _written(value))


def _has_name(value: object) -> str:
    return str(getattr(value, "name", "") or getattr(value, "kind", "") or "")


def _written(value: object) -> str:
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, tuple | list):
        return f"[{', '.join(_written(one) for one in value)}]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def values(kind: Any) -> str:
    """The values that a key may have, in words."""
    return " or ".join(dict.fromkeys(_kinds(kind, ()))) or "a value"


def _kinds(kind: Any, marks: tuple) -> Iterator[str]:
    while get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        marks = (*more, *marks)
    known = _of_validators(marks)
    if known:
        yield known
    elif named := next((mark for mark in marks if isinstance(mark, Named)), None):
        yield "block; `name` is " + _one_of(list(TABLES[named.table]))
    elif tag := validation._tag(marks):
        members = [validation._hints(member)[tag] for member in get_args(kind) if is_dataclass(member)]
        yield f"block; `{tag}` is {_one_of([word for member in members for word in get_args(member)])}"
    elif validation._is_union(kind):
        for member in get_args(kind):
            yield from _kinds(member, marks)
    elif kind is type(None):
        yield "`null`"
    else:
        yield _simple(kind, marks)


def _of_validators(marks: tuple) -> str:
    if told := next((mark for mark in marks if isinstance(mark, str)), None):
        return told
    names = {getattr(getattr(mark, "func", None), "__name__", "") for mark in marks}
    words = {"_read_untimed": "length", "_read_length": "length", "_read_span": "span", "_read_share": "share"}
    return next((word for name, word in words.items() if name in names), "")


def _simple(kind: Any, marks: tuple) -> str:
    origin, members = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _one_of(members)
    if is_dataclass(kind):
        return "block"
    if origin is dict:
        return f"block: names, each with {values(members[1])}"
    if origin is tuple and Ellipsis not in members:
        return f"[{', '.join(values(member) for member in members)}]"
    if origin in (list, tuple):
        return f"list of {values(members[0])}"
    plain = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    return f"{plain.get(kind, 'a value')}{_range(marks)}"


def _range(marks: tuple) -> str:
    bounds: dict[str, Any] = {}
    for mark in marks:
        for one in mark.metadata if isinstance(mark, FieldInfo) else (mark,):
            for name, cls in (
                ("gt", annotated_types.Gt),
                ("ge", annotated_types.Ge),
                ("lt", annotated_types.Lt),
                ("le", annotated_types.Le),
            ):
                if isinstance(one, cls):
                    bounds[name] = getattr(one, name)
    bounds = {name: bound for name, bound in bounds.items() if abs(bound) < 1e12 or isinstance(bound, int)}
    low = f"above {_short(bounds['gt'])}" if "gt" in bounds else f"{_short(bounds['ge'])}" if "ge" in bounds else ""
    high = f"below {_short(bounds['lt'])}" if "lt" in bounds else _short(bounds["le"]) if "le" in bounds else ""
    if low and high:
        return f", {low} to {high}" if "gt" not in bounds else f", {low}, {'' if 'lt' in bounds else 'up to '}{high}"
    return f", {low or high}" if low or high else ""


def _short(value: float) -> str:
    if isinstance(value, int) and value >= 1 << 40:
        power = (value + 1).bit_length() - 1
        return f"2^{power} - 1"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _one_of(words: Sequence[object]) -> str:
    texts = [code(word if isinstance(word, str) else json.dumps(word)) for word in words]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" or {texts[-1]}"


def blocks() -> Iterator[Block]:
    """Every block that a recipe may have, in the order of the fields, each below the one that it is in."""
    yield Block("", Recipe)
    yield from _below(Block("", Recipe), Recipe)


def _below(parent: Block, cls: type) -> Iterator[Block]:
    hints = validation._hints(cls)
    for entry in fields(cls):
        if not entry.init:
            continue
        path = f"{parent.path}.{entry.name}" if parent.path else entry.name
        identity = parent.identity and entry.metadata.get("hash") is not False
        for member, word, named, suffix in _classes(hints[entry.name]):
            of = word if named else parent.of
            if parent.word and not named and not parent.of:
                of = parent.word
            block = Block(path + suffix, member, word, identity, of)
            yield block
            if path.count(".") < 6:
                yield from _below(block, member)


def _classes(kind: Any) -> Iterator[tuple[type, str, bool, str]]:
    """Classes that a field of this type may hold: class, word, whether a table names it, and what follows the path."""
    marks: tuple = ()
    while get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        marks = (*more, *marks)
    if named := next((mark for mark in marks if isinstance(mark, Named)), None):
        for word, place in TABLES[named.table].items():
            module, _, name = place.partition(":")
            yield getattr(importlib.import_module(module), name), word, True, ""
        return
    if _of_validators(marks):
        return
    tag = validation._tag(marks)
    if validation._is_union(kind):
        for member in get_args(kind):
            if tag and is_dataclass(member):
                word = get_args(validation._bare(validation._hints(member)[tag])[0])[0]
                yield member, str(word), False, ""
            else:
                yield from _classes(Annotated[(member, *marks)] if marks else member)
    elif isinstance(kind, type) and is_dataclass(kind):
        yield kind, "", False, ""
    elif get_origin(kind) in (list, tuple):
        for member in get_args(kind):
            for cls, word, named_, _ in _classes(member):
                yield cls, word, named_, ".N"
    elif get_origin(kind) is dict:
        for cls, word, named_, _ in _classes(get_args(kind)[1]):
            yield cls, word, named_, ".NAME"

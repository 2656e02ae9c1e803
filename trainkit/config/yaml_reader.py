"""YAML text <-> plain values, with the line of each.

The text is read event by event and nothing is ever constructed: tags, anchors and aliases are refused, numbers and
words mean what YAML 1.2 says (`1e-3` is a number; `no`, `on` and `1:30` are text), and keys are text as written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

Tree = Any
"""Values of a text: None, bool, int, float, str, list, or dict with str keys."""
KeyPath = tuple[str | int, ...]

MAX_DEPTH = 50
MAX_VALUES = 20_000

_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
# Besides what YAML forbids: tabs, and the line breaks that editors do not count.
FORBIDDEN = re.compile("[^\n\r -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./%*+-]| (?=[A-Za-z0-9_]))*")


@dataclass(frozen=True)
class Problem:
    """One error."""

    path: str = ""
    """Dotted key path; empty for the text as a whole."""
    line: int | None = None
    """Line of the file, from 1; None where there is none, or an override said it."""
    found: str = ""
    expected: str = ""
    nearest: str = ""
    """The word that was probably meant."""
    remedy: str = ""
    override: str = ""
    """The override word that the error is in."""

    def __str__(self) -> str:
        place = f"override {shown(self.override)}" if self.override else f"line {self.line}" if self.line else ""
        head = f"{self.path} ({place})" if self.path and place else self.path or place
        text = f"found {self.found}, expected {self.expected}" if self.expected else self.found
        if self.nearest:
            text += f"{'; ' if self.expected else ', '}did you mean '{self.nearest}'?"
        if self.remedy:
            text += f"; {self.remedy}"
        return f"{head}: {text}" if head else text


@dataclass
class Source:
    """A document: its values, the line of each, and the errors in it."""

    tree: Tree = None
    places: dict[KeyPath, int | str] = field(default_factory=dict)
    """Key path to line, or to the override word that set it."""
    problems: list[Problem] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)
    """Paths of values that could not be read; None stands in for them."""

    def at(self, path: KeyPath) -> dict[str, Any]:
        """Line or override of the innermost known place around `path`, as fields of a Problem."""
        while path and path not in self.places:
            path = path[:-1]
        place = self.places.get(path)
        return {"override": place} if isinstance(place, str) else {"line": place}


def cut(text: str, width: int = 60) -> str:
    """Text fit for one short stretch of a message."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= width else f"{text[: width - 3]}..."


def shown(value: Tree) -> str:
    """A value as messages show it."""
    if isinstance(value, str):
        return f"'{cut(value)}'"
    if isinstance(value, dict | list):
        return f"{'a block' if isinstance(value, dict) else 'a list'}{'' if value else ' that is empty'}"
    return json.dumps(value)


def dotted(path: KeyPath) -> str:
    """A key path as messages and overrides write it."""
    return ".".join(cut(str(step), 40) for step in path)


# ---- Reading ---------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Ends the reading of a text that makes no sense from here on."""


def read(text: str, prefix: KeyPath = (), override: str = "") -> Source:
    """Read one document. What is wrong with it stands in `problems`; an unreadable one leaves `tree` None.

    `prefix` is the key path that the document is the value of; `override` the word that it comes from.
    """
    # The parser in C, where PyYAML has it, is 20 times faster; both are state machines and do not recurse.
    reader = _Reader(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), override)
    if bad := FORBIDDEN.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        found = f"found character U+{ord(bad[0]):04X}, which is not allowed in a text file"
        reader.problem(prefix, line, *(("found a tab", "use spaces") if bad[0] == "\t" else (found, "remove it")))
        return reader.source
    try:
        reader.source.tree = reader.document(prefix)
    except _Stop:
        pass
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The parser in Python lets escapes beyond Unicode through as ValueError and OverflowError.
        mark, reason = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark else None
        reader.problem(prefix, line, f"not YAML: {cut(reason, 200)}", "check indentation, colons and quotes")
    return reader.source


@dataclass
class _Reader:
    events: Iterator[yaml.Event]
    override: str
    source: Source = field(default_factory=Source)
    values: int = 0

    def problem(self, path: KeyPath, line: int | None, found: str, remedy: str = "") -> None:
        line = None if self.override else line
        self.source.problems.append(Problem(dotted(path), line, found, remedy=remedy, override=self.override))

    def stop(self, path: KeyPath, event: yaml.Event, found: str, remedy: str) -> NoReturn:
        self.problem(path, event.start_mark.line + 1, found, remedy)
        raise _Stop

    def document(self, prefix: KeyPath) -> Tree:
        next(self.events)
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            return None
        if isinstance(start, yaml.DocumentStartEvent) and (start.version or start.tags):
            self.stop(prefix, start, "found a % directive", "leave it out")
        tree = self.value(next(self.events), prefix, 0)
        next(self.events)
        if not isinstance(more := next(self.events), yaml.StreamEndEvent):
            self.stop(prefix, more, "found a second document", "write one recipe per file")
        return tree

    def value(self, event: yaml.Event, path: KeyPath, depth: int) -> Tree:
        line = event.start_mark.line + 1
        self.source.places.setdefault(path, self.override or line)
        self.values += 1
        if depth > MAX_DEPTH:
            self.stop((), event, f"found blocks nested more than {MAX_DEPTH} deep", "a recipe needs a few levels")
        if self.values > MAX_VALUES:
            self.stop((), event, f"found more than {MAX_VALUES} values", "a recipe needs a few dozen")
        self.refuse_marks(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            entries: list[Tree] = []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                entries.append(self.value(event, (*path, len(entries)), depth + 1))
            return entries
        if isinstance(event, yaml.MappingStartEvent):
            return self.block(path, depth)
        try:
            if isinstance(event, yaml.ScalarEvent):
                return _text(event.value) if event.style else scalar(event.value)
        except ValueError as mistake:
            self.problem(path, line, str(mistake))
        self.source.broken.add(path)
        return None

    def block(self, path: KeyPath, depth: int) -> dict[str, Tree]:
        block: dict[str, Tree] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.stop(path, event, "found a key that is not a word", "keys are plain text")
            self.refuse_marks(event, path)
            line, key = event.start_mark.line + 1, event.value
            inner = (*path, key)
            if not key or "." in key or _SURROGATE.search(key):
                # Overrides and flat names join keys with dots.
                self.problem(path, line, f"key {shown(key)}", "a key is a word without dots; nest blocks instead")
            elif key in block:
                self.problem(inner, line, "given twice", "keep one of them")
            else:
                self.source.places[inner] = self.override or line
                block[key] = None  # claims the key, should its own value repeat it
                block[key] = self.value(next(self.events), inner, depth + 1)
                continue
            self.value(next(self.events), (*path, "?"), depth + 1)
        return block

    def refuse_marks(self, event: yaml.Event, path: KeyPath) -> None:
        line, anchor, tag = event.start_mark.line + 1, getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor is not None:
            what = "alias '*" if isinstance(event, yaml.AliasEvent) else "anchor '&"
            self.problem(path, line, f"found {what}{cut(anchor)}'", "write the value itself, or quote the text")
        if tag is not None:
            self.problem(path, line, f"found tag {shown(tag)}", "leave it out; the type follows from the key")


def _text(text: str) -> str:
    if _SURROGATE.search(text):
        raise ValueError("an escape without a character")
    return text


def scalar(text: str) -> Tree:
    """Value of an unquoted word. Raises ValueError for numbers that are ambiguous, not finite or too large."""
    if text in _WORDS:
        return _WORDS[text]
    if _LEADING_ZERO.match(text) and _FLOAT.fullmatch(text):
        raise ValueError(
            f"{cut(text)} starts with 0, which some readers take for octal; remove the 0, or quote the text"
        )
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number")
    if _INT.fullmatch(text):
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            raise ValueError(f"{cut(text)} does not fit 64 bits")
        return int(text)
    if _FLOAT.fullmatch(text):
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{cut(text)} is too large for a number")
        return number
    return _text(text)


# ---- Writing ---------------------------------------------------------------------------------------------------------


def write(tree: dict[str, Tree]) -> str:
    """Values as text that reads back as the same values, here and by readers of YAML 1.1."""
    return "".join(f"{line}\n" for line in _lines(tree)) if tree else "{}\n"


def holds_blocks(tree: Tree) -> bool:
    """Return whether a value is a block or a list with one somewhere inside."""
    return isinstance(tree, dict) or (isinstance(tree, list) and any(holds_blocks(entry) for entry in tree))


def _lines(tree: Tree) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if value and holds_blocks(value):
                yield f"{_quoted(key)}:"
                yield from (f"  {line}" for line in _lines(value))
            else:
                yield f"{_quoted(key)}: {flow(value)}"
    else:
        for entry in tree:
            lines = _lines(entry) if entry and holds_blocks(entry) else iter([flow(entry)])
            yield f"- {next(lines)}"
            yield from (f"  {line}" for line in lines)


def flow(tree: Tree) -> str:
    """Return a value on one line, blocks too."""
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{_quoted(key)}: {flow(value)}' for key, value in tree.items())}}}"
    if isinstance(tree, list):
        return f"[{', '.join(flow(entry) for entry in tree)}]"
    if isinstance(tree, str):
        return _quoted(tree)
    text = json.dumps(tree)
    # YAML 1.1 wants a point in a number with an exponent.
    return text.replace("e", ".0e") if isinstance(tree, float) and "e" in text and "." not in text else text


def _quoted(text: str) -> str:
    """Text, plain where every reader takes it for text, else in double quotes."""
    if _PLAIN.fullmatch(text):
        readers = yaml.SafeLoader.yaml_implicit_resolvers.get(text[0], ())
        if text.lower() not in ("y", "n") and not any(pattern.match(text) for _, pattern in readers):
            try:
                if scalar(text) == text:
                    return text
            except ValueError:
                pass
    # JSON's escapes are YAML's too, but it writes characters beyond U+FFFF as two.
    escaped = (f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else c if c.isalpha() else json.dumps(c)[1:-1] for c in text)
    return f'"{"".join(escaped)}"'

"""Copying a recipe for another data set: what follows from the data is filled in, the lines to decide are marked."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import key_docs, loader, run_request, yaml_reader

if TYPE_CHECKING:
    from trainkit.autoconfig.fit import Asked, Key, Note
    from trainkit.config.schema import Recipe

SIGN = "# <- "
"""Begins a mark behind a line."""

MARK = f"{SIGN}change"
"""Behind each line that depends on the data, where the new data is not known."""

_OF_THE_DATA = ("data", "evaluations", "best", "stop_when", "promote", "downloads")
_IN_LINES = ("task", "data", "train", "evaluations")
"""Blocks that are written key by key."""
_WIDTH = 100
_COUNTS = re.compile(r": \d+ (images|records|volumes)")
"""Finds the sentence about a set that counts its samples."""


@dataclass(frozen=True)
class Copied:
    """Result of copying a recipe."""

    marked: int
    """Lines that are to be decided."""
    seen: tuple[str, ...] = ()
    """Sentences about the data."""
    decide: tuple[str, ...] = ()
    """Keys of these lines, and what is to be decided, where the data is known."""
    files: tuple[Path, ...] = ()
    """The new recipe, and those of the weights that it starts from."""


def copy(
    recipe: Path,
    new: Path,
    plugins: Sequence[str] = (),
    *,
    data: str | None = None,
    run: str = "",
    asked: Asked | None = None,
) -> Copied:
    """Write a copy of a valid recipe to a new file.

    The header goes: its figures were measured on the old data. Without `data` marked are the name and whatever names
    data, evaluation sets, metrics, classes' weights or other files. With it, a path or a set of the hub, the data is
    looked at, what follows from it is filled in, and what only its owner knows is marked; `asked` is how training is to
    start. A recipe that makes the weights this one starts from is copied too, for the same data. The recipe of `run`
    states every default: what is one is left out. Raises UserError when the new file exists.
    """
    loaded = loader.load(recipe, (), tuple(plugins), stored=bool(run), trains=True)
    loader.refuse_new(new)
    lines = loader.brief(loaded).split("\n") if run else _body(recipe)
    origin = f"run {run}" if run else recipe.name
    if data is not None:
        return _fitted(recipe, loaded, lines, new, tuple(plugins), data, origin, asked)
    text, marked = _marked(lines, origin)
    new.write_text(text, encoding="utf-8")
    return Copied(marked, files=(new,))


def open_lines(path: Path, recipe: Recipe) -> list[str]:
    """Sentences about the marked lines of a recipe's file: what is to be decided, and what the key means."""
    text = path.read_text(encoding="utf-8-sig")
    marks = {n: line.partition(SIGN)[2].strip() for n, line in enumerate(text.split("\n"), 1) if SIGN in line}
    if not marks:
        return []
    keys: dict[int, yaml_reader.KeyPath] = {}
    for key, place in yaml_reader.read(text).places.items():
        if key and isinstance(place, int) and len(key) < len(keys.get(place, (*key, ""))):
            keys[place] = key
    said = []
    for number, words in marks.items():
        if number in keys:
            parts = ["" if words == MARK.removeprefix(SIGN) else words, key_docs.meaning(recipe, keys[number])]
            end = "; ".join(part.rstrip(".") for part in parts if part)
            said.append(f"line {number}, {yaml_reader.dotted(keys[number])}{': ' if end else ''}{end}")
    return said


def _body(recipe: Path) -> list[str]:
    """The lines of a recipe below its header."""
    lines = recipe.read_text(encoding="utf-8-sig").split("\n")
    while lines and (lines[0].startswith("#") or not lines[0]):
        lines.pop(0)
    return lines


def _marked(lines: Sequence[str], origin: str) -> tuple[str, int]:
    """The text of a copy, with every line of the data marked, and how many these are."""
    out, block, marked = _header(origin), "", 0
    for line in lines:
        if line and not line[0].isspace() and not line.startswith("#"):
            block = line.split(":")[0]
        key, _, value = line.strip().partition(":")
        of_the_data = block == "name" or (block in _OF_THE_DATA and not (block == "data" and key == "name"))
        says = value.strip() not in ("", "null", "{}", "[]")
        if key == "class_weights" or (says and (of_the_data or key in ("recipe", "weights", "centres"))):
            line, marked = f"{line.partition(SIGN)[0].rstrip()}  {MARK}", marked + 1
        out.append(line)
    return "\n".join(out), marked


def _header(origin: str, seen: Sequence[str] = (), start: str = "") -> list[str]:
    """The header of a copy: where it is from, and before that, where the data is known, what is trained on what."""
    if not seen:
        return [f"# Copied from {origin}.", "#", "# result   not yet measured"]
    counted = next((sentence for sentence in seen if _COUNTS.search(sentence)), seen[0])
    title = f"{start.partition(': ')[0] or origin.removesuffix('.yaml')}; {counted}"
    data = [f"# {'data' if n == 0 else '    '}     {_printable(sentence)}" for n, sentence in enumerate(seen)]
    starts = [f"# start    {_printable(start)}"] if start else []
    return [f"# {_printable(title)}.", "#", *data, *starts, f"# Copied from {origin}.", "# result   not yet measured"]


def _printable(text: str) -> str:
    """Text as a comment may hold it: classes are called as folders are, and those may be called anything."""
    return yaml_reader.FORBIDDEN.sub("?", " ".join(text.split())).replace("<-", "?")


def _fitted(
    recipe: Path,
    loaded: Recipe,
    lines: Sequence[str],
    new: Path,
    plugins: tuple[str, ...],
    data: str,
    origin: str,
    asked: Asked | None,
) -> Copied:
    from trainkit.autoconfig import fit

    fitted = fit.fit(loaded, yaml_reader.read("\n".join(lines)).tree, data, new, asked or fit.Asked())
    fitted.put("name", "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in new.stem))
    others: list[tuple[Path, Path]] = []
    for name, source in loaded.task.required_weights().items():
        if source.recipe is not None:
            beside = new.with_name(f"{new.stem}_{name}{new.suffix}")
            loader.refuse_new(beside)
            others.append((run_request.beside(recipe, source.recipe), beside))
            _rename(fitted.tree["task"], source.recipe, beside.name)
    text = "\n".join((*_header(origin, fitted.seen, fitted.start), *_written(lines, fitted.tree, fitted.notes), ""))
    with tempfile.TemporaryDirectory() as aside:  # nothing is written that would be refused
        tried = Path(aside) / new.name
        tried.write_text(text, encoding="utf-8")
        loader.load(tried, (), plugins)
    same = fit.Asked(columns=asked.columns if asked else {})
    made = [copy(other, beside, plugins, data=data, asked=same) for other, beside in others]
    for file, content in fitted.files.items():
        file.write_text(content, encoding="utf-8")
    new.write_text(text, encoding="utf-8")
    marked = text.count(SIGN) + sum(one.marked for one in made)
    seen = (*fitted.seen, *([f"start: {fitted.start}"] if fitted.start else []))
    decide = [f"{yaml_reader.dotted(key)}: {note.text}" for key, note in fitted.notes.items() if note.decide]
    decide += [f"{one.files[0].name}, {sentence}" for one in made for sentence in one.decide]
    files = (new, *fitted.files, *(file for one in made for file in one.files))
    return Copied(marked, seen, tuple(decide), files)


def _rename(node: yaml_reader.Tree, old: str, new: str) -> None:
    """Another name for a recipe that is named somewhere in a block."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key == "recipe" and value == old:
            node[key] = new
        _rename(value, old, new)


def _written(lines: Sequence[str], tree: Mapping[str, Any], notes: Mapping[Key, Note]) -> Iterator[str]:
    """The lines of a recipe whose tree was changed: blocks that were not are written as they were."""
    before = yaml_reader.read("\n".join(lines)).tree
    starts = [n for n, line in enumerate(lines) if line and not line[0].isspace() and not line.startswith("#")]
    stretches = {
        lines[begin].split(":")[0].strip("\"'"): lines[begin:end]
        for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    }
    for key, value in tree.items():
        if key in before and before[key] == value and not any(path[0] == key for path in notes):
            yield from (line for line in stretches[key] if line.strip())
        else:
            yield from _entry((key,), value, notes)


def _entry(path: Key, value: Any, notes: Mapping[Key, Note]) -> Iterator[str]:
    """The lines of a key and its value: one where it is short, and nothing is noted inside."""
    indent = "  " * (len(path) - 1)
    note = notes.get(path)
    end = "" if note is None else f"  {SIGN if note.decide else '# '}{_printable(note.text)}"
    head, text = f"{indent}{yaml_reader.flow(path[-1])}:", yaml_reader.flow(value)
    inside = any(len(other) > len(path) and other[: len(path)] == path for other in notes)
    long = inside or len(head) + len(text) > _WIDTH or (path[0] in _IN_LINES and len(path) == 1)
    if isinstance(value, dict) and value and long:
        yield f"{head}{end}"
        for key, inner in value.items():
            yield from _entry((*path, key), inner, notes)
    elif isinstance(value, list) and yaml_reader.holds_blocks(value) and long:
        yield f"{head}{end}"
        yield from (f"{indent}  - {yaml_reader.flow(inner)}" for inner in value)
    else:
        yield f"{head} {text}{end}"

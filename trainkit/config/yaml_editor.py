"""Writing a recipe again with some keys changed: every comment, and all that is not changed, stays as it is."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from trainkit.config import loader, yaml_reader
from trainkit.errors import UserError


def rewrite(path: Path, words: Sequence[str], header: Sequence[str] = (), plugins: Sequence[str] = ()) -> str:
    """The text of the recipe at `path` with overrides in it, and lines of comment after those at its top.

    Raises ConfigError for overrides that do not fit, and RuntimeError should the text not say what they say.
    """
    wanted = loader.dump(loader.load(path, words, plugins))
    text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    for word in words:
        key, _, value = word.partition("=")
        text = change(text, tuple(key.strip().split(".")), yaml_reader.read(value).tree)
    lines = text.split("\n")
    top = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = "\n".join([*lines[:top], *(f"# {line}" if line else "#" for line in header), *lines[top:]])
    with tempfile.TemporaryDirectory() as aside:
        copy = Path(aside) / path.name
        copy.write_text(text, encoding="utf-8")
        if loader.dump(loader.load(copy, (), plugins)) != wanted:
            raise RuntimeError(f"{path}: a copy with {', '.join(words)} would say something else")
    return text


def refuse(new: Path, recipe: Path, names: Sequence[str]) -> None:
    """Raises UserError where a copy of `recipe` cannot be written to `new`; `names` are recipes that it names."""
    if new.exists():
        raise UserError(str(new), "already exists", remedy="name another file")
    if new.suffix not in (".yaml", ".yml"):
        raise UserError(str(new), "not the name of a YAML file", "NAME.yaml")
    if not new.parent.is_dir():
        raise UserError(str(new.parent), "no such folder", remedy="create it first")
    if names and new.parent.resolve() != recipe.parent.resolve():
        found = f"not beside {recipe}, from whose folder it names {', '.join(names)}"
        raise UserError(str(new), found, remedy=f"name a file in {recipe.parent}")


def change(text: str, path: Sequence[str], value: yaml_reader.Tree) -> str:
    """A YAML text, already known to be a valid recipe, with one value changed or added."""
    key, node = None, yaml.compose(text, Loader=yaml.SafeLoader)
    for done, part in enumerate(path):
        found = _child(node, part)
        if found is None:
            return _added(text, key, node, path[done:], yaml_reader.flow(value))
        key, node = found
    return _replaced(text, key, node, yaml_reader.flow(value))


def _child(node: yaml.Node, part: str) -> tuple[yaml.Node | None, yaml.Node] | None:
    """The key and the value of an entry; entries of a list have no key."""
    if isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
        return None, node.value[int(part)]
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == part), None)
    return None


def _added(text: str, key: yaml.Node | None, node: yaml.Node, path: Sequence[str], value: str) -> str:
    """The text with an entry at the end of a block; what is missing on the way to it is made."""
    first, *rest = path
    for part in reversed(rest):
        value = f"{{{part}: {value}}}"
    entry = f"{first}: {value}"
    if not isinstance(node, yaml.MappingNode):  # a key that has no value yet: its block begins here
        return _replaced(text, key, node, f"{{{entry}}}")
    if not node.value:
        return _replaced(text, key, node, f"{{{entry}}}")
    if node.flow_style:
        end = node.value[-1][1].end_mark.index
        return f"{text[:end]}, {entry}{text[end:]}"
    line = text.find("\n", _end(text, node))
    line = len(text) if line < 0 else line
    return f"{text[:line]}\n{' ' * node.value[0][0].start_mark.column}{entry}{text[line:]}"


def _replaced(text: str, key: yaml.Node | None, node: yaml.Node, new: str) -> str:
    """The text with another value in the place of a node's."""
    start, end = node.start_mark.index, _end(text, node)
    if key is not None and isinstance(node, yaml.CollectionNode) and not node.flow_style:
        # A block in lines of its own: what replaces it stands behind its key.
        start = text.index(":", key.end_mark.index) + 1
    space = "" if start == 0 or text[start - 1] in " [{" else " "
    return f"{text[:start]}{space}{new}{text[end:]}"


def _end(text: str, node: yaml.Node) -> int:
    """Where what a node holds ends; a block ends, for the parser, only where the next thing begins."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end = node.end_mark.index
    # Text in lines of its own has its last line break in it.
    return len(text[:end].rstrip()) if getattr(node, "style", None) in ("|", ">") else end

"""YAML -> Recipe: the file, the `key=value` words after it, and every error in both at once; and back again.

`yaml_reader` reads and writes the text, `validation` checks the values; this module joins them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from trainkit import paths
from trainkit.config import dropped_keys, metric_rules, metric_table, stored_recipes
from trainkit.config.schedule import Curve
from trainkit.config.schema import TABLES, Recipe
from trainkit.config.targets import Best, StopWhen
from trainkit.config.validation import Named, Tables, explain, nearest, one_of, to_tree, validate
from trainkit.config.yaml_reader import (
    FORBIDDEN,
    MAX_DEPTH,
    KeyPath,
    Problem,
    Source,
    Tree,
    cut,
    dotted,
    flow,
    holds_blocks,
    read,
    shown,
    write,
)
from trainkit.errors import UserError
from trainkit.redact import holds_secret

__all__ = ["ConfigError", "Named", "Problem", "digest", "dump", "flat", "load", "parse"]

T = TypeVar("T")

MAX_BYTES = 1_000_000
MAX_SHOWN = 50
"""Problems that an error message spells out."""
RECIPES = paths.shipped("recipes")


class ConfigError(UserError):
    """A recipe or override that cannot be used; `problems` are all its errors."""

    def __init__(self, where: str, problems: Sequence[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__(where, count)
        lines = [f"  {problem}" for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            lines.append(f"  and {len(self.problems) - MAX_SHOWN} more")
        self.args = ("\n".join([f"{where}: {count}", *lines]),)


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    stored: bool = False,
    trains: bool = False,
) -> Recipe:
    """Read a recipe, apply `key=value` words to it in their order, and check it.

    `plugins` are packages whose `TABLES`, of the form of `trainkit.config.schema.TABLES`, add words for named blocks.
    `stored`, `trains`: as `parse`. Raises ConfigError with every error.
    """
    tables = with_plugins(TABLES, plugins)
    return parse(Recipe, _read_file(Path(path)), str(path), overrides, tables, stored, trains)


def parse(
    cls: type[T],
    text: str | bytes,
    where: str,
    overrides: Sequence[str] = (),
    tables: Tables | None = None,
    stored: bool = False,
    trains: bool = False,
) -> T:
    """Make a `cls` of a YAML text; `where` names the text in messages. Raises ConfigError with every error.

    `stored`: the text is the recipe of a run. A mode in it that contradicts its metric may be a default of an older
    version, and is no error. Neither is a key that is no more, unless it is trained by it (`trains`).
    """
    tables = tables or {}
    source = read(_decode(text, where) if isinstance(text, bytes) else text)
    if source.tree is None and source.problems:
        raise ConfigError(where, source.problems)
    if not isinstance(source.tree, dict):
        found = "nothing" if source.tree is None else shown(source.tree)
        raise ConfigError(where, [Problem(found=found, expected="a block of keys", **source.at(()))])
    if source.tree.keys() >= _RESOLVED:
        stored_recipes.complete(source.tree)
    given: set[KeyPath] = set()
    for word in overrides:
        _override(word, source, given)
    for path, found, instead in dropped_keys.drop(source.tree):
        problem = Problem(dotted(path), found=found, remedy=instead, **source.at(path))
        if trains or not stored or problem.override:
            source.problems.append(problem)
    _refuse_secrets(source.tree, (), source)
    made = None
    try:
        made = validate(cls, source.tree, tables)
    except ValidationError as error:
        source.problems += explain(error, cls, source, tables)
    if isinstance(made, Recipe) and not stored:
        source.problems += metric_rules.problems(made, source)
    if made is None or source.problems:
        raise ConfigError(where, sorted(source.problems, key=lambda p: (bool(p.override), p.line or 0)))
    if source.tree.keys() >= _RESOLVED:
        _as_before(made, source.tree)
    return made


def states(path: Path, overrides: Sequence[str], block: str, key: str) -> bool:
    """Return True where a recipe's file, or a word after it, sets a key of a block. Raises ConfigError."""
    for word in overrides:
        named, _, text = word.partition("=")
        if named.strip() == f"{block}.{key}" or (named.strip() == block and key in text):
            return True
    tree = read(_decode(_read_file(path), str(path))).tree
    if not isinstance(tree, dict):
        return False
    return tree.keys() >= _RESOLVED or (isinstance(tree.get(block), dict) and key in tree[block])


_RESOLVED = {"seed", "evaluations", "best", "stop_when", "checkpoints", "integrity", "log", "limits"}
"""Keys with defaults that `dump` writes and a person never writes together: a recipe with all of them is resolved, as
runs and exported models keep it."""


def _as_before(block: object, tree: Tree) -> None:
    """Give fields that a resolved recipe lacks, being older than them, the value that its run had: `before` of their
    metadata, where it is not the default."""
    for f in fields(block) if is_dataclass(block) and isinstance(tree, dict) else ():
        if f.name in tree:
            _as_before(getattr(block, f.name, None), tree[f.name])
        elif "before" in f.metadata:
            setattr(block, f.name, f.metadata["before"])


# ---- The file --------------------------------------------------------------------------------------------------------


def _decode(text: bytes, where: str) -> str:
    if len(text) > MAX_BYTES:
        raise ConfigError(where, [Problem(found=f"more than {MAX_BYTES} bytes", expected="a recipe")])
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{text[error.start]:02X}, which is not UTF-8"
        raise ConfigError(where, [Problem(line=line, found=found, remedy="save the file as UTF-8")]) from None


def _read_file(path: Path) -> bytes:
    try:
        if not path.exists():
            found = "no such file"
        elif not path.is_file():
            found = "a folder, not a recipe file" if path.is_dir() else "not a regular file"
        elif path.suffix not in (".yaml", ".yml"):
            found = "not the name of a YAML file"
        else:
            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        found = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise ConfigError(cut(str(path), 200), [Problem(found=found, remedy=_near_file(path))])


def _near_file(path: Path) -> str:
    """A remedy: the shipped recipe whose name is nearest to the one asked for."""
    near = nearest(path.stem, [file.stem for file in RECIPES.glob("*.yaml")])
    return (
        f"did you mean recipes/{near}.yaml?"
        if near
        else "give the path of a .yaml file; trainkit ls lists the shipped recipes"
    )


# ---- Overrides -------------------------------------------------------------------------------------------------------


def _override(word: str, source: Source, given: set[KeyPath]) -> None:
    """Apply one `key=value` word to the tree: it replaces the value whole, and makes the blocks around it."""
    key, equals, text = word.partition("=")
    parts = key.strip().split(".")
    try:
        if FORBIDDEN.search(key) or not equals or not all(parts):
            raise ValueError("not of the form KEY=VALUE; write it like optim.lr=0.05")
        if not text.strip():
            # An unset variable of the shell looks like this, so it is no way to write null.
            raise ValueError(f"""no value; write {cut(key)}=null for none, {cut(key)}='""' for empty text""")
        if len(parts) > MAX_DEPTH:
            raise ValueError(f"blocks nested more than {MAX_DEPTH} deep; a recipe needs a few levels")
        path, holder = _place(parts, source, word)
        if path in given:
            raise ValueError(f"{dotted(path)} is given twice; keep one of them")
    except ValueError as mistake:
        source.problems.append(Problem(found=str(mistake), override=word))
        return
    given.add(path)
    new = read(text, path, word)
    unread = {path} if new.tree is None and new.problems else set()
    source.places = {p: at for p, at in source.places.items() if p[: len(path)] != path} | new.places | {path: word}
    source.broken = {p for p in source.broken if p[: len(path)] != path} | new.broken | unread
    source.problems += new.problems
    holder[path[-1]] = new.tree


def _place(parts: Sequence[str], source: Source, word: str) -> tuple[KeyPath, dict[str | int, Tree]]:
    """Return the path that these keys mean, and the block or list that holds its value; blocks on the way are made.

    Raises ValueError where a value on the way has no keys.
    """
    path: KeyPath = ()
    node: Tree = source.tree
    for at, part in enumerate(parts):
        if isinstance(node, list) and not (re.fullmatch("[0-9]{1,5}", part) and int(part) < len(node)):
            found = f"{dotted(path)} is a list of {len(node)} without an entry {shown(part)}"
            raise ValueError(f"{found}; give the whole list")
        if not isinstance(node, list | dict):
            found = f"{dotted(path)} is {shown(node)}, not a block"
            raise ValueError(f"{found}; give the whole block: {dotted(path)}={{...}}")
        holder = cast("dict[str | int, Tree]", node)  # a list is indexed by its step as a block is
        step = int(part) if isinstance(node, list) else part
        path = (*path, step)
        if at < len(parts) - 1:
            if isinstance(node, dict) and node.get(part) is None:
                holder[step] = {}
                source.places[path] = word
            node = holder[step]
    return path, cast("dict[str | int, Tree]", node)


def _refuse_secrets(tree: Tree, path: KeyPath, source: Source) -> None:
    """Note the values that are secrets: the whole recipe goes into the store, into checkpoints and to MLflow."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            _refuse_secrets(value, (*path, key), source)
    elif path and holds_secret(str(path[-1]), tree):
        remedy = "remove it from the recipe, which is stored with every run, and pass it in an environment variable"
        source.problems.append(Problem(dotted(path), found="holds a secret", remedy=remedy, **source.at(path)))


# ---- Plug-ins --------------------------------------------------------------------------------------------------------


def with_plugins(tables: Tables, plugins: Sequence[str]) -> Tables:
    """Import plug-in packages, and return the tables with their words added. Raises UserError."""
    merged = {table: dict(words) for table, words in tables.items()}
    for plugin in plugins:
        where = f"--plugin {cut(plugin)}"
        if not all(part.isidentifier() for part in plugin.split(".")):
            raise UserError(where, "not the name of a package", "a name such as mypackage")
        try:
            added = importlib.import_module(plugin).TABLES
        except ModuleNotFoundError as error:
            raise UserError(
                where, f"no module {error.name!r}", remedy="install it, or set PYTHONPATH to its folder"
            ) from error
        except AttributeError as error:
            raise UserError(where, "it has no TABLES", 'TABLES = {"task": {"word": "package.module:Class"}}') from error
        for table, words in added.items():
            if table not in merged:
                raise UserError(where, f"it adds names to unknown blocks {table!r}", one_of(list(merged)))
            for word, place in words.items():
                if word in merged[table]:
                    raise UserError(where, f"the {table} {word!r} already exists", remedy="choose another name")
                if not re.fullmatch(r"[\w.]+:\w+", place):
                    raise UserError(where, f"{table} {word!r} is {place!r}", "package.module:Class")
                merged[table][word] = place
    return merged


# ---- Back again ------------------------------------------------------------------------------------------------------


def dump(recipe: object) -> str:
    """The recipe with all its defaults as YAML, in the order of the fields; it loads back to an equal recipe."""
    return write(_resolved(recipe))


def brief(recipe: object) -> str:
    """The recipe as a person would write it, without what is as by default; it loads back to an equal recipe."""

    def stated(block: object, f: Field[Any], value: Tree) -> Tree:
        if f.name == "mode" and isinstance(block, Best | StopWhen | Curve):
            follows = block.metric is None or metric_table.mode(block.metric) is not None
        else:
            follows = f.name != "name" and getattr(block, f.name) == _default(f)
        return _LEFT_OUT if follows else value

    return write(_resolved(recipe, stated))


def _default(f: Field[Any]) -> object:
    return f.default if f.default_factory is MISSING else f.default_factory()


def flat(recipe: object) -> dict[str, bool | int | float | str | None]:
    """Dotted key to value. A list of plain values is one text, `[0.9, 0.999]`; one of blocks has numbered keys."""
    out: dict[str, bool | int | float | str | None] = {}

    def walk(tree: Tree, path: str) -> None:
        if tree and holds_blocks(tree):
            for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
                walk(value, f"{path}.{key}" if path else str(key))
        else:
            out[path] = flow(tree) if isinstance(tree, dict | list) else tree

    walk(_resolved(recipe), "")
    return out


def tree(recipe: object) -> dict[str, Tree]:
    """Return the recipe with all its defaults as plain values."""
    return _resolved(recipe)


def hashed(recipe: object) -> dict[str, Tree]:
    """Return the resolved recipe as plain values, as far as its digest covers it.

    The metadata of a field says what it covers, so that a key that is added changes no digest of before: not the field
    (`{"hash": False}`), only another value than its default (`"set"`), one value read as another, as where a default
    changed (`{"auto": "off"}`), or where a function of the block and the recipe is true.
    """

    def covered(block: object, f: Field[Any], value: Tree) -> Tree:
        rule = f.metadata.get("hash", True)
        if isinstance(rule, dict):
            return rule.get(value, value)
        if rule == "set":
            return _LEFT_OUT if getattr(block, f.name) == _default(f) else value
        return value if (rule(block, recipe) if callable(rule) else rule) else _LEFT_OUT

    return _resolved(recipe, covered)


def digest(recipe: object) -> str:
    """SHA-256, hexadecimal, of the recipe as `hashed` gives it."""
    text = json.dumps(dropped_keys.restore(hashed(recipe)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_LEFT_OUT = object()


def _resolved(
    recipe: object, change: Callable[[object, Field[Any], Tree], Tree] = lambda block, f, value: value
) -> dict[str, Tree]:
    """The recipe as values; `change` gives that of a field of a block, or `_LEFT_OUT`."""

    def walk(value: object, tree: Tree) -> Tree:
        if is_dataclass(value) and isinstance(tree, dict):
            known = {f.name: f for f in fields(value)}
            made = {key: walk(getattr(value, key, None), part) for key, part in tree.items()}
            made |= {
                key: change(value, f, made[key]) if f.init else _LEFT_OUT for key, f in known.items() if key in made
            }
            return {key: part for key, part in made.items() if part is not _LEFT_OUT}
        if isinstance(value, list | tuple) and isinstance(tree, list):
            return [walk(entry, part) for entry, part in zip(value, tree, strict=True)]
        if isinstance(value, dict) and isinstance(tree, dict):
            return {key: walk(value.get(key), part) for key, part in tree.items()}
        return tree

    return walk(recipe, to_tree(recipe))


def refuse_new(new: Path) -> None:
    """Raise UserError where a recipe cannot be written to `new`."""
    if new.exists():
        raise UserError(str(new), "already exists", remedy="name another file")
    if new.suffix not in (".yaml", ".yml"):
        raise UserError(str(new), "not the name of a YAML file", "NAME.yaml")
    if not new.parent.is_dir():
        raise UserError(str(new.parent), "no such folder", remedy="create it first")


def headline(path: Path) -> str:
    """The first line of a recipe's header, without the comment sign."""
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ").rstrip(".")


def header(path: Path) -> str:
    """The comment at the top of a recipe, as it is written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))])

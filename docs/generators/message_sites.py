"""Find in the source of trainkit what it tells its user: errors and warnings, with … in place of what is filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from docs.generators.markdown import ROOT

GAP = "…"
MOST = 6
"""Texts that one place may have, by conditions and variables in it."""
USER_ERRORS = ("UserError", "CheckpointError", "UnknownLabels", "Away")
PARTS = ("where", "found", "expected", "remedy")


@dataclass(frozen=True)
class Message:
    """What is said at one place of the source."""

    module: str
    kind: str
    """`error` or `warning`."""
    where: str
    found: str
    expected: str = ""
    remedy: str = ""

    @property
    def tells(self) -> bool:
        """True where there is more than what is filled in."""
        return len(re.findall(r"[^\W\d_]{2,}", f"{self.found} {self.expected} {self.remedy}")) > 1


def messages() -> Iterator[Message]:
    """All messages, file by file."""
    for file in sorted((ROOT / "trainkit").rglob("*.py")):
        yield from in_file(file)


def in_file(file: Path) -> Iterator[Message]:
    """Messages of one module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    constants = _assigned(tree.body)
    for function, scope in _functions(tree):
        texts = Texts({**constants, **scope})
        for node in _own_nodes(function):
            if isinstance(node, ast.Call):
                yield from _of_call(module, node, texts, function)


def _functions(tree: ast.Module) -> Iterator[tuple[ast.AST, dict[str, list[ast.expr]]]]:
    yield tree, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, _assigned(list(_own_nodes(node)))


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function without those of the functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own_nodes(child)


def _assigned(nodes: Sequence[ast.AST]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += list(zip(target.elts, node.value.elts, strict=False))
                else:
                    pairs.append((target, node.value))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs.append((node.target, node.value))
        for target, value in pairs:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return found


class Texts:
    """The texts that expressions stand for, as far as the source says them."""

    def __init__(self, scope: dict[str, list[ast.expr]]):
        self._scope = scope

    def of(self, node: ast.expr | None, depth: int = 0) -> list[str]:
        """Texts of an expression; `…` where it is not known."""
        if node is None:
            return [""]
        found = self._of(node, depth) if depth < 5 else [GAP]
        return list(dict.fromkeys(found))[:MOST]

    def _of(self, node: ast.expr, depth: int) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)] if isinstance(node.value, str | int | float) else [""]
        if isinstance(node, ast.JoinedStr):
            return self._joined([self._piece(value, depth) for value in node.values])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([self.of(node.left, depth + 1), self.of(node.right, depth + 1)])
        if isinstance(node, ast.IfExp):
            return [*self.of(node.body, depth + 1), *self.of(node.orelse, depth + 1)]
        if isinstance(node, ast.Name) and node.id in self._scope:
            known = [text for value in self._scope[node.id] for text in self.of(value, depth + 1)]
            return known if any(re.search(r"[^\W\d_]{2,}", text) for text in known) else [GAP]
        return [GAP]

    def _piece(self, value: ast.expr, depth: int) -> list[str]:
        if not isinstance(value, ast.FormattedValue):
            return self.of(value, depth + 1)
        inner = value.value
        if isinstance(inner, ast.IfExp):
            return self.of(inner, depth + 1)
        if isinstance(inner, ast.Name) and inner.id.isupper():
            return self.of(inner, depth + 1)
        return [GAP]

    @staticmethod
    def _joined(pieces: list[list[str]]) -> list[str]:
        texts: list[str] = []
        for chosen in product(*pieces):
            texts.append(re.sub(f"{GAP}+", GAP, "".join(chosen)))
            if len(texts) == MOST:
                break
        return texts


def _of_call(module: str, node: ast.Call, texts: Texts, function: ast.AST) -> Iterator[Message]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    given = {word.arg: word.value for word in node.keywords if word.arg}
    if name in USER_ERRORS:
        asked = dict(zip(PARTS, node.args, strict=False)) | given
        yield from _variants(module, "error", [texts.of(asked.get(part)) for part in PARTS])
    elif name == "Problem" and ("found" in given or "expected" in given):
        yield from _variants(module, "error", [[GAP], *(texts.of(given.get(part)) for part in PARTS[1:])])
    elif name == "UsageError" or (name == "ValueError" and getattr(function, "name", "") == "__post_init__"):
        yield from _variants(module, "error", [[""], texts.of(node.args[0] if node.args else None), [""], [""]])
    elif name == "warning" and isinstance(node.func, ast.Attribute) and node.args:
        said = [re.sub(r"%[sdrfg]|%\.\d+[fg]|%,d", GAP, text) for text in texts.of(node.args[0])]
        yield from _variants(module, "warning", [[""], said, [""], [""]])


def _variants(module: str, kind: str, parts: list[list[str]]) -> Iterator[Message]:
    for count, chosen in enumerate(product(*parts)):
        message = Message(module, kind, *(" ".join(part.split()) for part in chosen))
        if count < MOST and message.tells:
            yield message

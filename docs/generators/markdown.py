"""Pieces of Markdown that the generated pages are made of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"

_CODE = re.compile(r"(`+[^`]*`+)")
_PAGE = re.compile(r"\bdocs/([\w/.-]+\.(?:md|ipynb))(#[\w-]+)?")


def prose(text: str) -> str:
    """Text of a docstring as one line of Markdown, in which only code between backticks is markup."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part if n % 2 else _escaped(part) for n, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = re.sub(r"([*_\[\]\\])", r"\\\1", text).replace("<", "&lt;")
    return _PAGE.sub(_linked, text.replace("\\_", "_"))


def _linked(found: re.Match[str]) -> str:
    target = os.path.relpath(ROOT / "docs" / found[1], REFERENCE)
    return f"[{Path(found[1]).name}]({target}{found[2] or ''})"


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with a blank line behind it."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines) + "\n"


def code(text: object) -> str:
    """Text as code, whatever backticks are in it."""
    said = str(text)
    return f"`` {said} ``" if "`" in said else f"`{said}`"


def slug(text: str) -> str:
    """What a link to a heading ends in, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())

"""Escape texts for Markdown, so that names of classes, runs and files are no markup."""

from __future__ import annotations

import re

from trainkit.errors import visible

_MARKUP = re.compile(r"[\\`*\[\]<>&|~$]|(?<!\w)_|_(?!\w)|^[#+=-]")


def plain(text: object) -> str:
    """Escape a text that stands in a sentence; returns one line."""
    return _MARKUP.sub(r"\\\g<0>", _line(text))


def code(text: object) -> str:
    """Format a text as inline code."""
    line = _line(text)
    ticks = _fence(line, 1)
    space = " " if line.strip("` ") != line or not line else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def block(text: object, language: str = "") -> str:
    """Format lines as a block of code."""
    ticks = _fence(str(text), 3)
    return f"{ticks}{language}\n{visible(str(text))}\n{ticks}"


def _line(text: object) -> str:
    return visible(" ".join(str(text).split()))


def _fence(text: str, least: int) -> str:
    """Backticks, more of them than stand anywhere in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))

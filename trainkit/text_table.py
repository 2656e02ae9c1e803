"""Align columns of text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

_CLASSES = 12
"""Classes in a table; all are in MLflow."""
_WHOLE = 12
"""Scores of all classes together in a table of several runs; all are in MLflow."""


def split(names: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Split names of scores into those of all classes together, the first kind per class, and its first twelve names.

    `dice.sr` is the kind `dice` of a class.
    """
    whole = [name for name in names if "." not in name]
    each = [name for name in names if "." in name]
    kind = each[0].partition(".")[0] if each else ""
    return whole, kind, [name for name in each if name.startswith(f"{kind}.")][:_CLASSES]


def chosen(names: Sequence[str], evaluation: str) -> tuple[list[str], int]:
    """Return the scores of an evaluation that a table of several runs shows, and the number of the others.

    The ends of a run's own intervals count as neither.
    """
    own = [name for name in names if name.startswith(f"{evaluation}/") and not name.endswith(("_low", "_high"))]
    whole, _, classes = split(own)
    shown = whole[:_WHOLE] + classes
    return shown, len(own) - len(shown)


def numbers(values: Sequence[float]) -> list[str]:
    """Format values of one kind: counts without fractions, all else to four places; from 10 two, from 1,000 none."""
    places = 0 if all(value != value or float(value).is_integer() for value in values) else None
    words = []
    for value in values:
        large = abs(value)
        digits = places if places is not None else 4 if large < 10 else 2 if large < 1000 else 0
        words.append("-" if value != value else f"{value:.{digits}f}")
    return words


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows as lines with aligned columns, the first flush left and the others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
              for row in rows]  # fmt: skip
    return ["  ".join(row) for row in padded]

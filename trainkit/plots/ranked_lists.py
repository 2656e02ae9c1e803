"""Draw ranked lists of a retrieval: each query and its top results, framed by whether the identity is the same."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from trainkit.interfaces import MODALITIES, TEXT
from trainkit.plots.style import FINE_DPI, GREEN, QUIET, SMALL, VERMILION, WIDTH, Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIGHT, WRONG = GREEN, VERMILION
"""Frames of right and wrong results; that of a wrong one is dashed too."""
_GAP = 0.3
"""Between the query and its results, in images."""
_LETTERS, _LINES = 135, 3
"""Of a caption: letters in a line as wide as the figure, and the most lines shown."""
_TALLEST = 2.2
"""How much higher than wide an image may be drawn."""


def ranked(
    queries: np.ndarray,
    present: np.ndarray,
    text: Sequence[str],
    found: np.ndarray,
    right: Sequence[np.ndarray],
    captions: Sequence[str],
    title: str,
    about: str = "",
) -> Figure:
    """Draw a row for each query: its images at the left, then its top results; its caption above.

    `queries` (n, 5, h, w, 3) and `found` (n, k, h', w', 3) are uint8; `present` (n, 5) tells which modalities a query
    has; `text` (n,) its caption or ""; `right` holds a bool for each result of a query, k at most; `captions` (n,)
    stand above each row.
    """
    queries, found, present = np.asarray(queries), np.asarray(found), np.asarray(present, dtype=bool)
    size = len(captions)
    if queries.ndim != 5 or found.ndim != 5 or not size == len(queries) == len(found) == len(present) == len(right):
        raise ValueError(f"queries {queries.shape}, found {found.shape}, {size} captions")
    shown = present.copy()
    shown[:, TEXT] = False
    left, many = max(1, int(shown.sum(axis=1).max(initial=0))), found.shape[1]
    cell = WIDTH / (left + many + _GAP)
    ratio = max((x.shape[2] / x.shape[3] for x in (queries, found) if x.size), default=1)
    tall, wide = (cell - 0.06) * min(ratio, _TALLEST), cell - 0.06
    said = [_lines(words) for words in text]
    words = [0.2 + 0.13 * len(lines) for lines in said]
    top_of_key = Sheet.head(title, about)
    head, below = top_of_key + 0.3, 0.24
    page = Sheet(head + sum(words) + size * (tall + below), dpi=FINE_DPI)
    page.titled(title, about)
    for x, word, hit in ((0.3, "same identity", True), (1.6, "other identity", False)):
        _frame(page, x - 0.2, top_of_key + 0.07, 0.13, 0.13, hit)
        page.text(x, top_of_key + 0.135, word, SMALL, va="center")
    top = head
    for row, caption in enumerate(captions):
        page.text(0.05, top + 0.03, caption, SMALL)
        for k, line in enumerate(said[row]):
            page.text(0.11, top + 0.19 + 0.13 * k, line, 7.5, QUIET, style="italic")
        top += words[row]
        # Images of the query are aligned to the right, next to the results.
        asking = np.flatnonzero(shown[row]).tolist()
        cells = [(left - len(asking) + k, queries[row, m], MODALITIES[m], None) for k, m in enumerate(asking)]
        cells += [(left + _GAP + k, found[row, k], str(k + 1), bool(hit)) for k, hit in enumerate(right[row])]
        for place, image, name, hit in cells:
            box = page.image(image, place * cell + (cell - wide) / 2, top, wide, tall)
            if hit is not None:
                _frame(page, *box, hit)
            page.text((place + 0.5) * cell, top + tall + 0.03, name, 8, QUIET, ha="center")
        if not asking:
            page.text(left * cell / 2, top + tall / 2, "text\nonly", 7, QUIET, ha="center", va="center")
        top += tall + below
    return page.figure


def _frame(page: Sheet, x: float, y: float, wide: float, tall: float, hit: bool) -> None:
    """Draw the frame of a result, which is right or not."""
    dashes = "-" if hit else (0, (2, 1.2))
    page.box(x, y, wide, tall, fill=False, edgecolor=RIGHT if hit else WRONG, linewidth=1.8, linestyle=dashes)


def _lines(text: str) -> list[str]:
    lines = wrap(f"“{text.strip()}”", _LETTERS) if text else []
    return lines if len(lines) <= _LINES else [*lines[: _LINES - 1], f"{lines[_LINES - 1][:-1]}…"]

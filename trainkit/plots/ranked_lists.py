"""Draw ranked lists of a retrieval: each query and its top results, framed by whether the identity is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    queries: Sequence[Mapping[str, np.ndarray]],
    text: Sequence[str],
    found: Sequence[Sequence[np.ndarray]],
    right: Sequence[Sequence[bool] | np.ndarray],
    captions: Sequence[str],
    title: str,
    about: str = "",
) -> Figure:
    """Draw a row for each query: its images at the left, then its top results; its caption above.

    `queries` (n,) are the images of each by modality, `text` (n,) its caption or "", `found` (n,) the images of its
    results, all uint8 (h, w, 3); `right` (n,) holds a bool for each result; `captions` (n,) stand above each row.
    """
    size = len(captions)
    if not size == len(queries) == len(text) == len(found) == len(right):
        raise ValueError(f"{len(queries)} queries, {len(found)} rows of results, {size} captions")
    shown = [[(name, image) for name, image in query.items() if name != MODALITIES[TEXT]] for query in queries]
    left, many = max(1, *map(len, shown)), max(map(len, found), default=0)
    cell = WIDTH / (left + many + _GAP)
    every = [image for images in (*(query.values() for query in queries), *found) for image in images]
    ratio = max((image.shape[0] / image.shape[1] for image in every), default=1)
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
        cells = [(left - len(shown[row]) + k, image, name, None) for k, (name, image) in enumerate(shown[row])]
        hits = zip(found[row], right[row], strict=True)
        cells += [(left + _GAP + k, image, str(k + 1), bool(hit)) for k, (image, hit) in enumerate(hits)]
        for place, image, name, hit in cells:
            box = page.image(image, place * cell + (cell - wide) / 2, top, wide, tall)
            if hit is not None:
                _frame(page, *box, hit)
            page.text((place + 0.5) * cell, top + tall + 0.03, name, 8, QUIET, ha="center")
        if not shown[row]:
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

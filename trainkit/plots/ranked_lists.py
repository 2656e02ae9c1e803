"""Ranked lists: what was asked, and the records that came first, framed by whether they show the person."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.interfaces import MODALITIES, TEXT
from trainkit.plots.curves import INK, QUIET, WIDTH, empty

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIGHT, WRONG = "#009e73", "#d55e00"
"""Of Okabe and Ito's palette; a frame around a wrong record is broken too."""
_GAP = 0.3
"""Between the two, in pictures."""
_LETTERS, _LINES = 135, 3
"""Of a caption: in a line as wide as the figure, and how many such lines are shown."""
_TALLEST = 2.2
"""How much higher than wide a picture may be drawn."""


def ranked(
    queries: np.ndarray,
    present: np.ndarray,
    text: Sequence[str],
    found: np.ndarray,
    right: Sequence[np.ndarray],
    captions: Sequence[str],
    title: str,
) -> Figure:
    """One row a query: at the left the pictures that ask, then those that came first; above, what is asked in words.

    `queries` (n, 5, h, w, 3) and `found` (n, k, h', w', 3) are uint8; `present` (n, 5) says which records a query has,
    one a modality; `text` (n,) its caption or ""; `right` holds for each query as many bools as records came first, k
    at most; `captions` (n,) stand above each row.
    """
    queries, found, present = np.asarray(queries), np.asarray(found), np.asarray(present, dtype=bool)
    size = len(captions)
    if queries.ndim != 5 or found.ndim != 5 or not size == len(queries) == len(found) == len(present) == len(right):
        raise ValueError(f"queries {queries.shape}, found {found.shape}, {size} captions")
    from matplotlib.patches import Rectangle

    shown = present.copy()
    shown[:, TEXT] = False
    left, many = max(1, int(shown.sum(axis=1).max(initial=0))), found.shape[1]
    cell = WIDTH / (left + many + _GAP)
    ratio = max((x.shape[2] / x.shape[3] for x in (queries, found) if x.size), default=1)
    tall, wide = (cell - 0.06) * min(ratio, _TALLEST), cell - 0.06
    said = [_lines(words) for words in text]
    words = [0.2 + 0.13 * len(lines) for lines in said]
    head, below = 0.62, 0.24
    height = head + sum(words) + size * (tall + below) + (0 if size else 0.3)
    figure = empty(height, dpi=160)
    # One sheet in inches from the upper left corner, in place of 140 axes.
    sheet = figure.add_axes((0, 0, 1, 1))
    sheet.set_axis_off()

    def say(x: float, y: float, words: str, size: float, colour: str = INK, ha: str = "left", **look: str) -> None:
        sheet.text(x, y, words, ha=ha, va=look.pop("va", "top"), color=colour, fontsize=size, **look)

    say(WIDTH / 2, 0.08, title, 12, ha="center")
    if not size:
        say(WIDTH / 2, 0.7, "none", 11, QUIET, ha="center")
    for x, word, hit in ((0.36, "the person", True), (0.54, "someone else", False)) if size else ():
        frame = Rectangle((x * WIDTH - 0.2, 0.37), 0.13, 0.13, fill=False, **_frame(hit))
        sheet.add_patch(frame)
        say(x * WIDTH, 0.435, word, 9, va="center")
    top = head
    for row, caption in enumerate(captions):
        say(0.05, top + 0.03, caption, 8)
        for k, line in enumerate(said[row]):
            say(0.11, top + 0.19 + 0.13 * k, line, 7, QUIET, style="italic")
        top += words[row]
        # Records that ask end where those that were found begin.
        asking = np.flatnonzero(shown[row]).tolist()
        cells = [(left - len(asking) + k, queries[row, m], MODALITIES[m], None) for k, m in enumerate(asking)]
        cells += [(left + _GAP + k, found[row, k], str(k + 1), bool(hit)) for k, hit in enumerate(right[row])]
        for place, image, name, hit in cells:
            w = min(wide, tall * image.shape[1] / image.shape[0])
            h = w * image.shape[0] / image.shape[1]
            x, y = place * cell + (cell - w) / 2, top + (tall - h) / 2
            sheet.imshow(image, interpolation="antialiased", extent=(x, x + w, y + h, y))
            say((place + 0.5) * cell, top + tall + 0.03, name, 7, QUIET, ha="center")
            if hit is not None:
                sheet.add_patch(Rectangle((x, y), w, h, fill=False, **_frame(hit)))
        if not asking:
            say(left * cell / 2, top + tall / 2, "words\nalone", 7, QUIET, ha="center", va="center")
        top += tall + below
    sheet.set(xlim=(0, WIDTH), ylim=(height, 0), aspect="auto")
    return figure


def _frame(hit: bool) -> dict[str, Any]:
    return {"edgecolor": RIGHT if hit else WRONG, "linewidth": 1.8, "linestyle": "-" if hit else (0, (2, 1.2))}


def _lines(text: str) -> list[str]:
    lines = wrap(f"“{text.strip()}”", _LETTERS) if text else []
    return lines if len(lines) <= _LINES else [*lines[: _LINES - 1], f"{lines[_LINES - 1][:-1]}…"]

"""Draw rows of images, each with a caption above it, below a legend of the classes that occur in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainkit.plots.style import FINE_DPI, QUIET, SMALL, WIDTH, Sheet, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

_TALLEST = 1.6
"""How much higher than wide an image may be drawn."""
_CAPTION, _GAP = 0.24, 0.04
"""Inches above a row for its caption, and between images."""
_SMALL = 160
"""Pixels of the longer side up to which images are shown as squares of one colour."""
_LONGEST = 24
"""Letters of a class in the legend."""
_ABREAST = 112
"""Letters in a line of the legend, six for each patch of colour."""
_LINES = 4
"""Lines of the legend; of more classes the most frequent are in it."""


@dataclass(frozen=True)
class Classes:
    """Classes of the pixels in a figure."""

    names: Sequence[str]
    colours: Sequence[ColorType]
    counts: np.ndarray
    """Pixels of each class: those without one are not in the legend."""

    def lines(self) -> list[list[int]]:
        """Divide the classes of the legend among its lines."""
        present = np.flatnonzero(self.counts)
        if not len(present):
            return []
        longest = min(_LONGEST, max(len(self.names[k]) for k in present.tolist()))
        abreast = max(1, min(len(present), _ABREAST // (6 + longest)))
        kept = np.sort(present[np.argsort(-self.counts[present], kind="stable")][: abreast * _LINES])
        return [kept[k : k + abreast].tolist() for k in range(0, len(kept), abreast)]


def image_rows(
    rows: Sequence[Sequence[np.ndarray]],
    captions: Sequence[str],
    columns: Sequence[str],
    classes: Classes,
    title: str,
    about: str,
) -> Figure:
    """Draw a row for each caption: images (h, w, 3) of one size, as many as there are `columns`, which are named."""
    lines = classes.lines()
    cell = WIDTH / len(columns)
    tall = [min(images[0].shape[0] / images[0].shape[1], _TALLEST) * (cell - _GAP) for images in rows]
    above = Sheet.head(title, about) + 0.08
    top = above + 0.24 + 0.2 * len(lines) + 0.1 * bool(lines)
    page = Sheet(top + sum(tall) + (_CAPTION + _GAP) * len(tall) + (0 if tall else 0.4), dpi=FINE_DPI)
    page.titled(title, about)
    _draw_legend(page, classes, lines, above)
    for place, name in enumerate(columns):
        page.text((place + 0.5) * cell, top - 0.02, name, SMALL, QUIET, ha="center", va="bottom")
    if not tall:
        page.text(WIDTH / 2, page.height - 0.2, "none", 11, QUIET, ha="center", va="center")
    for images, caption, height in zip(rows, captions, tall, strict=True):
        page.text(0.045, top + _CAPTION - 0.05, caption, SMALL, va="bottom")
        for place, image in enumerate(images):
            sharp = max(image.shape[:2]) <= _SMALL
            page.image(image, place * cell + _GAP / 2, top + _CAPTION, cell - _GAP, height, sharp)
        top += _CAPTION + height + _GAP
    return page.figure


def _draw_legend(page: Sheet, classes: Classes, lines: Sequence[Sequence[int]], top: float) -> None:
    names = {k: short(classes.names[k], _LONGEST) for line in lines for k in line}
    wide = max((len(line) for line in lines), default=1)
    column = min((WIDTH - 0.1) / wide, 0.35 + 0.075 * max(map(len, names.values()), default=0))
    left = (WIDTH - wide * column) / 2
    for row, line in enumerate(lines):
        middle = top + 0.2 * row + 0.07
        for place, k in enumerate(line):
            x = left + place * column
            page.box(x, middle - 0.06, 0.2, 0.12, facecolor=classes.colours[k], edgecolor=QUIET, linewidth=0.5)
            page.text(x + 0.25, middle, names[k], 8, va="center")
    if more := np.count_nonzero(classes.counts) - len(names):
        page.text(0.995 * WIDTH, top - 0.02, f"and {more} rarer classes", 8, QUIET, ha="right", va="bottom")

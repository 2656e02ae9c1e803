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
_COLUMNS, _LINES = 5, 4
"""Names abreast and below each other in the legend; of more classes the most frequent are in it."""
_LONGEST = 16
"""Letters of a class in the legend."""


@dataclass(frozen=True)
class Classes:
    """Classes of the pixels in a figure."""

    names: Sequence[str]
    colours: Sequence[ColorType]
    counts: np.ndarray
    """Pixels of each class: those without one are not in the legend."""

    def shown(self) -> list[int]:
        """Return the classes of the legend."""
        order = np.argsort(-self.counts, kind="stable")[: _COLUMNS * _LINES]
        return sorted(k for k in order.tolist() if self.counts[k])


def image_rows(
    rows: Sequence[Sequence[np.ndarray]],
    captions: Sequence[str],
    columns: Sequence[str],
    classes: Classes,
    title: str,
    about: str,
) -> Figure:
    """Draw a row for each caption: images (h, w, 3) of one size, as many as there are `columns`, which are named."""
    named = classes.shown()
    cell = WIDTH / len(columns)
    tall = [min(images[0].shape[0] / images[0].shape[1], _TALLEST) * (cell - _GAP) for images in rows]
    above = Sheet.head(title, about) + 0.08
    top = above + 0.34 + 0.2 * -(-len(named) // _COLUMNS)
    page = Sheet(top + sum(tall) + (_CAPTION + _GAP) * len(tall), dpi=FINE_DPI)
    page.titled(title, about)
    for place, k in enumerate(named):
        row, column = divmod(place, _COLUMNS)
        x, middle = 0.05 + column * WIDTH / _COLUMNS, above + 0.2 * row + 0.07
        page.box(x, middle - 0.06, 0.2, 0.12, facecolor=classes.colours[k], edgecolor=QUIET, linewidth=0.5)
        page.text(x + 0.25, middle, short(classes.names[k], _LONGEST), 8, va="center")
    for place, name in enumerate(columns):
        page.text((place + 0.5) * cell, top - 0.02, name, SMALL, QUIET, ha="center", va="bottom")
    for images, caption, height in zip(rows, captions, tall, strict=True):
        page.text(0.045, top + _CAPTION - 0.05, caption, SMALL, va="bottom")
        for place, image in enumerate(images):
            sharp = max(image.shape[:2]) <= _SMALL
            page.image(image, place * cell + _GAP / 2, top + _CAPTION, cell - _GAP, height, sharp)
        top += _CAPTION + height + _GAP
    return page.figure

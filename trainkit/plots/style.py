"""Style of all figures: sizes, fonts, colours, titles, legends and axes.

A figure is 7.5 inches wide, 900 pixels at 120 dpi, so that text of 9 points stays legible where a page shows it at
860 pixels. Figures are made without pyplot, so nothing global is touched and any thread may draw.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import LegendLocType

_log = logging.getLogger(__name__)

WIDTH = 7.5
DPI, FINE_DPI = 120, 160
"""Dots per inch of charts, and of figures made of images."""
TITLE, TEXT, SMALL = 12.5, 10.0, 9.0
"""Font sizes in points: of titles; of labels and ticks; of legends, notes and the line below a title."""
INK, QUIET, GRID = "#1a1a1a", "#666666", "#e3e3e3"
# Okabe and Ito's palette, which the common kinds of colour blindness tell apart; dashes tell the rest.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "PingFang SC",
)
"""Families in which a letter is looked for, in this order."""
_LEFT = 0.1
"""Inches left of a title."""
_LETTERS = 60, 95
"""Letters in a line of a title, and of the text below it."""


def empty(height: float, dpi: int = DPI, **settings: Any) -> Figure:
    """Make an empty white figure of the usual width and this height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _plain_figure()(figsize=(WIDTH, height), dpi=dpi, facecolor="white", **settings)
    FigureCanvasAgg(figure)
    return figure


def blank(height: float) -> tuple[Figure, Axes]:
    """Make an empty figure of this height in inches, with one pair of axes. `titled` adds the height of the title."""
    figure = empty(height, layout="constrained")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(colors=INK, labelsize=TEXT)
    axes.xaxis.label.set(size=TEXT, color=INK)
    axes.yaxis.label.set(size=TEXT, color=INK)
    return figure, axes


def titled(figure: Figure, title: str, about: str = "") -> None:
    """Write a title and the line below it above the panels of a figure, which becomes higher by their height."""
    above, below = title_lines(title, about)
    head = Sheet.head(title, about)
    wide, tall = (float(size) for size in figure.get_size_inches())
    figure.set_size_inches(wide, tall + head)
    if (engine := figure.get_layout_engine()) is not None:
        engine.set(rect=(0, 0, 1, 1 - head / (tall + head)))  # pyright: ignore[reportCallIssue]
    at = {"ha": "left", "va": "top", "linespacing": 1.15}
    top = 1 - 0.07 / (tall + head)
    figure.text(_LEFT / wide, top, "\n".join(above), fontsize=TITLE, fontweight="bold", color=INK, **at)
    lower = 1 - (0.1 + 0.215 * len(above)) / (tall + head)
    figure.text(_LEFT / wide, lower, "\n".join(below), fontsize=SMALL, color=QUIET, **at)


def title_lines(title: str, about: str) -> tuple[list[str], list[str]]:
    """Return the lines of a title, and of the text below it."""
    above, below = (
        [row for part in text.split("\n") for row in wrap(part, letters)]
        for text, letters in zip((title, about), _LETTERS, strict=True)
    )
    return above, below


class Sheet:
    """A figure laid out by hand, in inches from its upper left corner: layout engines shrink images for captions.

    All images have one pair of axes: with a pair for each, drawing 140 would take seconds.
    """

    def __init__(self, height: float, dpi: int = DPI):
        self.figure, self.height = empty(height, dpi), height
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self._axes.set_axis_off()

    @staticmethod
    def head(title: str, about: str = "") -> float:
        """Return the height in inches of a title and the line below it."""
        above, below = title_lines(title, about)
        return 0.1 + 0.215 * len(above) + 0.17 * len(below)

    def titled(self, title: str, about: str = "") -> None:
        """Write a title and the line below it at the upper edge."""
        above, below = title_lines(title, about)
        self.text(_LEFT, 0.07, "\n".join(above), TITLE, weight="bold")
        if below:
            self.text(_LEFT, 0.1 + 0.215 * len(above), "\n".join(below), SMALL, QUIET)

    def text(
        self, x: float, y: float, words: str, size: float, colour: str = INK, ha: str = "left", va: str = "top",
        **more: Any,
    ) -> None:  # fmt: skip
        """Write words at a place, with a font size in points."""
        at = x / WIDTH, 1 - y / self.height
        self.figure.text(*at, words, ha=ha, va=va, color=colour, fontsize=size, linespacing=1.15, **more)

    def image(
        self, pixels: np.ndarray, x: float, y: float, wide: float, tall: float, sharp: bool = False
    ) -> tuple[float, float, float, float]:
        """Draw pixels (h, w, 3) into the middle of a box; return the left, top, width and height that they take.

        `sharp`: each pixel as a square of one colour.
        """
        scale = min(wide / pixels.shape[1], tall / pixels.shape[0])
        width, height = scale * pixels.shape[1], scale * pixels.shape[0]
        left, top = x + (wide - width) / 2, y + (tall - height) / 2
        smooth, place = "nearest" if sharp else "antialiased", (left, left + width, top + height, top)
        self._axes.imshow(pixels, interpolation=smooth, aspect="auto", extent=place)
        return left, top, width, height

    def box(self, x: float, y: float, wide: float, tall: float, **look: Any) -> None:
        """Draw a rectangle; `look` is what matplotlib's `Rectangle` takes."""
        from matplotlib.patches import Rectangle

        self._axes.add_patch(Rectangle((x, y), wide, tall, **look))


@functools.cache
def _plain_figure() -> type[Figure]:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    class PlainFigure(Figure):
        """A figure whose `savefig` draws text as it is.

        Between two `$` matplotlib would read a formula, and raise for one that is none; names of classes are anybody's.
        """

        def savefig(self, fname: Any, *, transparent: bool | None = None, **settings: Any) -> None:
            """Write the figure to a file."""
            axes = [axis for each in self.axes for axis in (each.xaxis, each.yaxis)]
            for axis in axes:  # what is drawn at ticks is asked of these again
                ticks = [text.get_text() for text in axis.get_ticklabels()]
                if (drawn := [_drawable(word) for word in ticks]) != ticks:
                    axis.set_ticks(axis.get_ticklocs(), drawn)
            powers = {text for axis in axes if axis.get_scale() == "log" for text in axis.findobj(Text)}
            for text in self.findobj(Text):
                if text not in powers:  # 10⁻³ is such a formula
                    text.set_parse_math(False)
                if unusual := _unusual(words := text.get_text()):
                    text.set_text(_drawable(words))
                    found = map(_family, sorted(unusual))
                    text.set_fontfamily([_FONTS[0], *dict.fromkeys(name for name in found if name)])
            super().savefig(fname, transparent=transparent, **settings)

    return PlainFigure


def _drawable(text: str) -> str:
    """Escape the letters that no font has, and say once that some are: `\\u732b`."""
    absent = {letter for letter in _unusual(text) if _family(letter) is None}
    if absent:
        _tell_absent()
    return "".join(letter.encode("unicode_escape").decode() if letter in absent else letter for letter in text)


def _unusual(text: str) -> set[str]:
    return {letter for letter in text if not (letter.isascii() and letter.isprintable()) and letter != "\n"}


@functools.cache
def _family(letter: str) -> str | None:
    """Return the family by which a letter is drawn, one of `_FONTS` if it can be; None where no font has it."""
    from matplotlib import font_manager

    fonts = [font for font in font_manager.fontManager.ttflist if font.style == "normal" and "Resort" not in font.name]
    fonts.sort(key=lambda font: _FONTS.index(font.name) if font.name in _FONTS else len(_FONTS))
    return next((font.name for font in fonts if ord(letter) in _letters(font.fname)), None)


@functools.cache
def _letters(file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    with contextlib.suppress(OSError, RuntimeError):  # a font that was removed, or is damaged
        return frozenset(FT2Font(file).get_charmap())
    return frozenset()


@functools.cache
def _tell_absent() -> None:
    _log.warning("no font has some letters of names in figures, which are escaped: install one, as Noto Sans CJK")


def line(number: int) -> dict[str, Any]:
    """Return colour and dashes of a curve, by its number: 28 curves look different."""
    # Seven colours and four dashes have no common factor.
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.8}


def legend(axes: Axes, loc: LegendLocType, fontsize: float = SMALL, **more: Any) -> None:
    """Add a legend of all that has a label, at `loc`."""
    axes.legend(loc=loc, fontsize=fontsize, frameon=True, framealpha=0.9, edgecolor=GRID, labelcolor=INK, **more)


def short(name: str, longest: int) -> str:
    """Cut a name that is longer than so many letters."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"

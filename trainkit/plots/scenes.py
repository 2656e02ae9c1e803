"""Draw semantic segmentations: the image, its labels, the prediction, and the wrong pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from trainkit.interfaces import IGNORED
from trainkit.plots.style import FINE_DPI, QUIET, SMALL, WIDTH, Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colours = tuple[tuple[int, int, int], ...]

WRONG = (213, 46, 0)
"""Wrong pixels, on the image in pale grey; close to the vermilion of Okabe and Ito's palette."""
_PALE = 0.45
"""Contrast of the image below the wrong pixels."""
_SQUARES = (244, 208)
"""Greys of the chequered pattern of unlabelled pixels; classes have plain colours."""
_SQUARE = 24
"""Squares across the longer side of an image."""
_LEVELS = 12
_APART_FROM = ((0, 0, 0), (255, 255, 255), (128, 128, 128))
_COLUMNS = ("image", "truth", "prediction", "wrong pixels")
_TALLEST = 1.6
"""How much higher than wide an image may be drawn."""
_ABREAST = 112
"""Letters in a line of the legend, six for each patch of colour."""
_LINES = 4
"""Lines of the legend; of more classes the most frequent are in it."""
_SMALL = 160
"""Pixels of the longer side up to which images are shown as squares of one colour."""


def scenes(
    images: Sequence[np.ndarray],
    truth: Sequence[np.ndarray],
    predicted: Sequence[np.ndarray],
    captions: Sequence[str],
    names: Sequence[str],
    colours: Sequence[tuple[int, int, int]],
    title: str,
    about: str = "",
) -> Figure:
    """Draw a row for each image: the image, truth, prediction and wrong pixels side by side, a caption above.

    `images` (h, w, 3), `truth` and `predicted` (h, w) are uint8, of one size image by image; truth may be IGNORED.
    `names` and `colours` are those of the classes, of which the legend has those that occur; without colours `palette`
    gives them.
    """
    if not len(images) == len(truth) == len(predicted) == len(captions):
        raise ValueError(f"{len(images)} images, {len(truth)} truths, {len(predicted)} predictions")
    colours = tuple(colours) or palette(len(names))
    if len(colours) != len(names):
        raise ValueError(f"{len(names)} classes, {len(colours)} colours")
    shown, more = _legend(truth, predicted, names)
    cell, words, key = WIDTH / 4, 0.24, 0.2 * len(shown) + 0.1 * bool(shown)
    tall = [min(image.shape[0] / image.shape[1], _TALLEST) * (cell - 0.04) for image in images]
    above = Sheet.head(title, about) + 0.08
    head = above + 0.24 + key
    page = Sheet(head + sum(tall) + (words + 0.04) * len(tall) + (0 if tall else 0.4), dpi=FINE_DPI)
    page.titled(title, about)
    unlabelled = any((labels == IGNORED).any() for labels in truth)
    for place, name in enumerate(_COLUMNS):
        name += " (chequered: no label)" * (unlabelled and name == "truth")
        page.text((place + 0.5) * cell, head - 0.02, name, SMALL, QUIET, ha="center", va="bottom")
    _draw_legend(page, shown, more, names, colours, above)
    if not len(images):
        page.text(WIDTH / 2, page.height - 0.2, "none", 11, QUIET, ha="center", va="center")
    top = head
    for row, caption in enumerate(captions):
        page.text(0.045, top + words - 0.05, caption, SMALL, va="bottom")
        top += words
        sharp = max(images[row].shape[:2]) <= _SMALL
        for place, panel in enumerate(panels(images[row], truth[row], predicted[row], colours)):
            page.image(panel, place * cell + 0.02, top, cell - 0.04, tall[row], sharp)
        top += tall[row] + 0.04
    return page.figure


def panels(
    image: np.ndarray, truth: np.ndarray, predicted: np.ndarray, colours: Sequence[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Make the four panels of a row, uint8 (h, w, 3) each; unlabelled truth has a chequered ground."""
    if not image.shape[:2] == truth.shape == predicted.shape:
        raise ValueError(f"an image {image.shape}, truth {truth.shape}, prediction {predicted.shape}")
    table = np.zeros((256, 3), dtype=np.uint8)
    table[: len(colours)] = colours
    ground, unknown = _chequered(truth.shape), truth == IGNORED
    wrong = (truth != predicted) & ~unknown
    grey = image.astype(np.float64) @ (0.299, 0.587, 0.114)
    pale = np.rint(255 - _PALE * (255 - grey)).astype(np.uint8)[..., None].repeat(3, 2)
    found = np.where((predicted == IGNORED)[..., None], ground, table[predicted])
    return (
        image,
        np.where(unknown[..., None], ground, table[truth]),
        found,
        np.where(wrong[..., None], np.array(WRONG, np.uint8), pale),
    )


def _chequered(shape: tuple[int, ...]) -> np.ndarray:
    side = max(1, max(shape) // _SQUARE)
    down, right = (np.arange(length) // side for length in shape)
    dark = (down[:, None] + right) % 2
    return np.array(_SQUARES, dtype=np.uint8)[dark][..., None].repeat(3, 2)


@cache
def palette(classes: int) -> Colours:
    """Choose colours for as many classes, 255 at most, where the data has none: red, green and blue of each.

    Each is the one of 1,728 that differs most from all before it and from black, white and grey, by distance in
    Ottosson's Oklab (2020). So the first few are far apart, and a class has its colour however many follow it.
    """
    if not 0 <= classes <= IGNORED:
        raise ValueError(f"{classes} classes; 0 to {IGNORED} have colours")
    levels = np.rint(np.linspace(0, 255, _LEVELS)).astype(int)
    every = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    points = _oklab(every)
    nearest = np.full(len(every), np.inf)
    for point in _oklab(np.array(_APART_FROM)):
        nearest = np.minimum(nearest, np.linalg.norm(points - point, axis=1))
    chosen = []
    for _ in range(classes):
        best = int(nearest.argmax())
        chosen.append(tuple(every[best].tolist()))
        nearest = np.minimum(nearest, np.linalg.norm(points - points[best], axis=1))
    return tuple(chosen)


def _oklab(rgb: np.ndarray) -> np.ndarray:
    """Convert sRGB (n, 3) of 0 to 255 to Oklab (n, 3), in which equal distances look about equally far apart."""
    share = rgb / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    cones = linear @ np.array(
        [[0.4122214708, 0.2119034982, 0.0883024619],
         [0.5363325363, 0.6806995451, 0.2817188376],
         [0.0514459929, 0.1073969566, 0.6299787005]]
    )  # fmt: skip
    return np.cbrt(cones) @ np.array(
        [[0.2104542553, 1.9779984951, 0.0259040371],
         [0.7936177850, -2.4285922050, 0.7827717662],
         [-0.0040720468, 0.4505937099, -0.8086757660]]
    )  # fmt: skip


def _legend(
    truth: Sequence[np.ndarray], predicted: Sequence[np.ndarray], names: Sequence[str]
) -> tuple[list[list[int]], int]:
    """Divide the classes that occur among the lines of the legend; return them, and how many are left out."""
    counts = np.zeros(256, dtype=np.int64)
    for labels in (*truth, *predicted):
        counts += np.bincount(labels.ravel(), minlength=256)
    there = np.flatnonzero(counts[: len(names)])
    if not len(there):
        return [], 0
    abreast = max(1, min(len(there), _ABREAST // (6 + min(24, max(len(names[k]) for k in there.tolist())))))
    kept = np.sort(there[np.argsort(-counts[there], kind="stable")][: abreast * _LINES])
    return [kept[k : k + abreast].tolist() for k in range(0, len(kept), abreast)], len(there) - len(kept)


def _draw_legend(
    page: Sheet,
    lines: list[list[int]],
    more: int,
    names: Sequence[str],
    colours: Sequence[tuple[int, int, int]],
    top: float,
) -> None:
    from matplotlib.patches import Rectangle

    wide = max((len(line) for line in lines), default=1)
    column = min(
        (WIDTH - 0.1) / wide, 0.35 + 0.075 * max((min(24, len(names[k])) for line in lines for k in line), default=0)
    )
    left = (WIDTH - wide * column) / 2
    for row, line in enumerate(lines):
        middle = top + 0.2 * row + 0.07
        for place, k in enumerate(line):
            x = left + place * column
            corner = x / WIDTH, 1 - (middle + 0.06) / page.height
            look = {"facecolor": [value / 255 for value in colours[k]], "edgecolor": QUIET, "linewidth": 0.5}
            page.figure.add_artist(Rectangle(corner, 0.2 / WIDTH, 0.12 / page.height, **look))
            name = names[k] if len(names[k]) <= 24 else f"{names[k][:23]}…"
            page.text(x + 0.25, middle, name, 8, va="center")
    if more:
        page.text(0.995 * WIDTH, top - 0.02, f"and {more} rarer classes", 8, QUIET, ha="right", va="bottom")

"""Draw semantic segmentations: the image, its labels, the prediction, and the wrong pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainkit.interfaces import IGNORED
from trainkit.plots.image_rows import Classes, image_rows

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
    `names` and `colours` are those of the classes; without colours `palette` gives them.
    """
    if not len(images) == len(truth) == len(predicted) == len(captions):
        raise ValueError(f"{len(images)} images, {len(truth)} truths, {len(predicted)} predictions")
    colours = tuple(colours) or palette(len(names))
    if len(colours) != len(names):
        raise ValueError(f"{len(names)} classes, {len(colours)} colours")
    counts = np.zeros(256, dtype=np.int64)
    for labels in (*truth, *predicted):
        counts += np.bincount(labels.ravel(), minlength=256)
    shades = [(red / 255, green / 255, blue / 255) for red, green, blue in colours]
    unlabelled = " (chequered: no label)" if any((labels == IGNORED).any() for labels in truth) else ""
    rows = [panels(*parts, colours) for parts in zip(images, truth, predicted, strict=True)]
    columns = ("image", f"truth{unlabelled}", "prediction", "wrong pixels")
    return image_rows(rows, captions, columns, Classes(names, shades, counts[: len(names)]), title, about)


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


def palette(classes: int) -> Colours:
    """Return the colours of PASCAL VOC for as many classes, 255 at most, where the data has none: red, green, blue.

    The three lowest bits of a class number are the highest of red, green and blue, the next three the next, and so on.
    """
    if not 0 <= classes <= IGNORED:
        raise ValueError(f"{classes} classes; 0 to {IGNORED} have colours")

    def colour(label: int) -> tuple[int, int, int]:
        red, green, blue = (sum(((label >> 3 * k + c) & 1) << 7 - k for k in range(3)) for c in range(3))
        return red, green, blue

    return tuple(colour(label) for label in range(classes))

"""Draw predictions over volumes: three planes per case, the truth as a tint, the prediction as an outline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainkit.plots.image_rows import Classes, image_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    "#e6194b", "#3cb44b", "#4aa8ff", "#f58231", "#f032e6", "#ffe119", "#42d4f4", "#bfef45", "#ff9ecf", "#a9b4ff",
    "#aa6e28", "#ffffff",
)  # fmt: skip
"""Of the organs; bright enough for dark tissue, and after twelve they begin again."""
_VIEWS = ("axial: A up, R left", "coronal: S up, R left", "sagittal: S up, A left")
_TINT = 0.35
_LIGHTER = 0.2
"""Share of white in a line: with none it is lost on the tint of its own colour, with twice as much pale ones are."""
_DIMMED = 0.75
"""White is shown as so much grey, so that colours stand out."""
_ENLARGED = 3
_LINE = 3
"""Pixels of the enlarged plane, of which 2.3 are one where a run keeps the image."""


def overlays(planes: np.ndarray, captions: Sequence[str], names: Sequence[str], title: str, about: str = "") -> Figure:
    """Draw a row per case: `planes` (n, 3, 3, S, S) as `metrics.segmentation_3d.planes` gives them, `captions` (n,).

    `names` are those of the classes 1, 2, ...; those that occur are in the legend.
    """
    planes = np.asarray(planes)
    if planes.ndim != 5 or planes.shape[1:3] != (3, 3) or len(planes) != len(captions):
        raise ValueError(f"planes {planes.shape}, {len(captions)} captions")
    counts = np.array([(planes[:, :, 1:] == k).sum() for k in range(1, len(names) + 1)])
    classes = Classes(names, [COLOURS[k % len(COLOURS)] for k in range(len(names))], counts)
    rows = [[painted(*plane) for plane in case] for case in planes]
    about = "; ".join(filter(None, (about, "tint: truth, outline: prediction")))
    return image_rows(rows, captions, _VIEWS, classes, title, about)


def painted(image: np.ndarray, truth: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """Colour one plane, three times as large: arrays (S, S) -> uint8 (3 S, 3 S, 3).

    Grey runs from the 1st to the 99th percentile of the image. The line of a class lies on its own outermost pixels.
    """
    low, high = np.percentile(image, (1, 99))
    grey = ((np.asarray(image, dtype=np.float64) - low) / max(high - low, 1e-12)).clip(0, 1)
    from matplotlib.colors import to_rgb

    palette = np.array([(0, 0, 0), *(to_rgb(colour) for colour in COLOURS)])
    truth, prediction = (_colour(labels) for labels in (truth, prediction))
    tint = np.where(truth > 0, _TINT, 0.0)[..., None]
    rgb = _large(_DIMMED * grey[..., None] * (1 - tint) + palette[truth] * tint)
    large = _large(prediction)
    edge = np.zeros(large.shape, dtype=bool)
    for axis in (0, 1):
        along, mark = np.moveaxis(large, axis, 0), np.moveaxis(edge, axis, 0)
        for far in range(1, _LINE + 1):
            differs = along[far:] != along[:-far]
            mark[far:] |= differs
            mark[:-far] |= differs
    edge &= large > 0
    rgb[edge] = palette[large[edge]] * (1 - _LIGHTER) + _LIGHTER
    return np.rint(255 * rgb).astype(np.uint8)


def _colour(labels: np.ndarray) -> np.ndarray:
    labels = np.asarray(labels).astype(np.int64)
    return np.where(labels > 0, (labels - 1) % len(COLOURS) + 1, 0)


def _large(plane: np.ndarray) -> np.ndarray:
    return plane.repeat(_ENLARGED, 0).repeat(_ENLARGED, 1)

"""Draw single samples: 2-D projections of their embeddings, and contact sheets of the images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainkit.plots.style import COLOURS, GRID, INK, QUIET, SMALL, WIDTH, Sheet, blank, legend, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAP_COLOURS = (*COLOURS, "#8b5a2b", "#8c8c8c", "#7030a0", "#9a9a00")
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Six markers and eleven colours have no common factor: 66 classes look different."""
_LISTED = 34


def scatter(
    points: np.ndarray,
    label: np.ndarray,
    wrong: np.ndarray,
    names: Sequence[str],
    about: str,
    axes_names: tuple[str, str] = ("", ""),
) -> Figure:
    """Draw a scatter plot of `points` (n, 2), coloured by `label` (n,), -1 for none; rings mark `wrong` (n,).

    Classes without a sample are left out of the legend; of more than 34 there is none.
    """
    points, label, wrong = np.asarray(points, dtype=float), np.asarray(label), np.asarray(wrong, dtype=bool)
    if points.shape != (len(label), 2) or wrong.shape != label.shape:
        raise ValueError(f"points {points.shape}, labels {label.shape}, wrong {wrong.shape}")
    figure, axes = blank(height=5.6)
    size = 30 if len(points) <= 300 else 18 if len(points) <= 1000 else 13
    present = np.unique(label)
    for k in present:
        of = label == k
        colour, marker = (MAP_COLOURS[k % len(MAP_COLOURS)], MARKERS[k % len(MARKERS)]) if k >= 0 else (GRID, "o")
        called = f"{names[k][:24] if k >= 0 else 'no label'} ({of.sum():,})"
        axes.scatter(*points[of].T, s=size, color=colour, marker=marker, alpha=0.65, linewidths=0, label=called)
    if wrong.any():
        # Many thick rings would hide the points.
        ring, line = (2.6, 0.9) if wrong.sum() <= 200 else (1.6, 0.5)
        axes.scatter(
            *points[wrong].T, s=size * ring, facecolors="none", edgecolors=INK, linewidths=line,
            label=f"misclassified ({wrong.sum():,})",
        )  # fmt: skip
    axes.set_xlabel(axes_names[0])
    axes.set_ylabel(axes_names[1])
    if not any(axes_names):
        # Neither coordinates nor distances between groups have a meaning in a t-SNE.
        axes.tick_params(labelleft=False, labelbottom=False, length=0)
        axes.grid(visible=False)
    if len(present) <= _LISTED:
        beside = {"bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0, "markerscale": 1.5}
        legend(axes, "upper left", fontsize=SMALL if len(present) <= 25 else 7, **beside)
    titled(figure, about, f"{int(wrong.sum()):,} of {int((label >= 0).sum()):,} samples shown are misclassified")
    return figure


def sheet(images: Sequence[np.ndarray], captions: Sequence[str], title: str, about: str = "") -> Figure:
    """Draw images side by side, each above its caption: uint8 (h, w, 3) each."""
    if len(images) != len(captions):
        raise ValueError(f"{len(images)} images, {len(captions)} captions")
    tall, wide = (max((image.shape[axis] for image in images), default=1 + 3 * axis) for axis in (0, 1))
    across, longest = (4, 32) if wide >= 3 * tall else (6, 20) if 1.5 * wide >= tall else (8, 15)
    down = max(1, -(-len(images) // across))
    lines = max((caption.count("\n") + 1 for caption in captions), default=1)
    cell, words, head = WIDTH / across, 0.09 + 0.135 * lines, Sheet.head(title, about)
    tile = (cell - 0.08) * min(tall / wide, 1.5)
    page = Sheet(head + 0.15 + down * (tile + words))
    page.titled(title, about)
    if not len(images):
        page.text(WIDTH / 2, head + 0.5 * (page.height - head), "none", 11, QUIET, ha="center", va="center")
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = place % across * cell + 0.04, head + 0.1 + place // across * (tile + words)
        page.image(image, left, top, cell - 0.08, tile, sharp=max(tall, wide) <= 96)
        shown = [line if len(line) <= longest else f"…{line[1 - longest :]}" for line in caption.splitlines()]
        page.text(left + cell / 2 - 0.04, top + tile + 0.03, "\n".join(shown), 7.5, ha="center")
    return page.figure

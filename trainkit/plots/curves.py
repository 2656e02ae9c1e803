"""Draw curves and counts of evaluations; each function returns a matplotlib Figure of 900 pixels at 120 dpi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainkit.plots.style import BLUE, DASHES, INK, QUIET, SMALL, TEXT, blank, legend, line, short, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Numbers = Sequence[float] | np.ndarray


def roc(curves: Mapping[str, tuple[Numbers, Numbers]], about: str = "ROC curve", positive: str | None = None) -> Figure:
    """Draw true against false accept rates, one curve for each label; the rates of a curve ascend.

    The left edge is the power of ten below the smallest false accept rate above 0 of any curve. `positive` is the
    class that is looked for, where the curves are of two classes and not of pairs; both axes are then linear, 0 to 1.
    """
    if not curves:
        raise ValueError("no curve to draw")
    figure, axes = blank(height=4.8)
    rates = {k: (np.asarray(far, dtype=float), np.asarray(tar, dtype=float)) for k, (far, tar) in curves.items()}
    above = [f for far, _ in rates.values() for f in far if f > 0]
    left = min(10.0 ** np.floor(np.log10(min(above, default=0.1)) + 1e-9), 0.1) if positive is None else 0.0
    lowest = 1.0
    for place, (label, (far, tar)) in enumerate(rates.items()):
        # A rate is kept until one more impostor is let in: a step, not a slope.
        axes.plot(np.maximum(far, left), tar, drawstyle="steps-post", label=label, **line(place))
        lowest = min(lowest, float(tar[far <= left].max(initial=0.0)))
    bottom = np.floor(lowest * 20 - 0.2) / 20 if lowest > 0.5 and positive is None else 0.0
    guess = np.geomspace(left, 1, 200) if left else np.linspace(0, 1, 2)
    if bottom == 0.0:
        axes.plot(guess, guess, color=QUIET, linewidth=1, linestyle=DASHES[2], label="chance level")
    if positive is None:
        axes.set_xscale("log")
        axes.set_xlabel("false accept rate, FAR (fraction of different pairs accepted, log scale)")
        axes.set_ylabel("true accept rate (fraction of same pairs accepted)")
    else:
        axes.set_xlabel(f"false positive rate (fraction of other samples predicted as {short(positive, 24)})")
        axes.set_ylabel(f"true positive rate (fraction of {short(positive, 24)} found)")
    axes.set_xlim(left, 1)
    axes.set_ylim(bottom, 1.0 + (1.0 - bottom) * 0.02)
    legend(axes, loc="lower right" if bottom or positive is not None else "best")
    titled(figure, about)
    return figure


def confusion(counts: np.ndarray, names: Sequence[str], about: str = "Confusion matrix") -> Figure:
    """Draw a confusion matrix: `counts` (C, C) of true classes (rows) by predictions, coloured by the share of the row.

    Cells show counts and percentages for up to 12 classes, percentages alone for up to 30.
    """
    counts = np.asarray(counts)
    classes, total, right = len(counts), int(counts.sum()), int(np.trace(counts))
    if counts.shape != (classes, classes) or len(names) != classes or not classes:
        raise ValueError(f"counts {counts.shape} and {len(names)} names; expected (C, C) and C")
    support = counts.sum(axis=1)
    share = counts / np.maximum(support, 1)[:, None]
    figure, axes = blank(height=min(6.0, 2.0 + 0.65 * classes))
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    # With many classes each error is a small share of its row: the square root makes them visible.
    few = classes <= 12
    shade = LinearSegmentedColormap.from_list("shade", ["#ffffff", BLUE])
    image = axes.imshow(share, cmap=shade, norm=PowerNorm(1.0 if few else 0.5, 0, 1), interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    said = "" if few else " (square-root scale)" if classes > 30 else " (square-root scale; numbers: %)"
    bar.set_label(f"fraction of the true class{said}", fontsize=TEXT, color=INK)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)
    if classes <= 30:
        size = 10.5 if classes <= 6 else 8 if few else 6.5
        dark = np.asarray(image.norm(share)) > 0.55
        for row, column in np.argwhere(counts > 0).tolist():
            per_cent = 100 * share[row, column]
            text = f"{_counted(int(counts[row, column]))}\n{per_cent:.1f} %" if few else f"{per_cent:.0f}"
            colour = "white" if dark[row, column] else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    every = -(-classes // 34)
    shown = range(0, classes, every)
    size = TEXT if few else 8 if classes <= 30 else 7.5
    labels = [short(names[k], 18) for k in shown]
    rows = [f"{name}  ({support[k]:,})" if classes <= 30 else name for name, k in zip(labels, shown, strict=True)]
    flat = classes <= 6 and max(map(len, labels)) <= 12
    axes.set_xticks(shown, labels, fontsize=size, rotation=0 if flat else 90)
    axes.set_yticks(shown, rows, fontsize=size)
    axes.grid(visible=False)
    axes.tick_params(length=0 if every == 1 else 2)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class (count)" if classes <= 30 else f"true class{f' (1 in {every} named)' * (every > 1)}")
    titled(figure, about, f"{right:,} of {total:,} correct ({100 * right / max(1, total):.1f} %)")
    return figure


def _counted(number: int) -> str:
    """Write a count whole below a million, then in millions, to three figures."""
    return f"{number:,}" if number < 999_500 else f"{number / 1e6:,.4g}M"

"""Draw the curves of a run: each function takes numbers and returns a matplotlib Figure of 900 pixels at 120 dpi.

Figures are made without pyplot, so nothing global is touched and any thread may draw.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.speed.clock import median

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import LegendLocType

    Numbers = Sequence[float] | np.ndarray

WIDTH = 7.5
INK, QUIET, GRID = "#1a1a1a", "#767676", "#e3e3e3"
# Okabe and Ito's palette, which the common kinds of colour blindness tell apart; dashes tell the rest.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
SMOOTHED_FROM = 150
"""Points from which a noisy curve gets a smooth one in front of it."""


def roc(
    curves: Mapping[str, tuple[Numbers, Numbers]], title: str = "Verification: ROC", positive: str | None = None
) -> Figure:
    """Draw true against false accept rates, one curve for each label; the rates of a curve ascend.

    The left edge is the power of ten below the smallest false accept rate above 0 of any curve. `positive` is the
    class that is looked for, where the curves are of two classes and not of pairs; both axes are then linear, 0 to 1.
    """
    if not curves:
        raise ValueError("no curve to draw")
    figure, (axes,) = blank(height=5.0)
    above = [f for far, _ in curves.values() for f in np.asarray(far, dtype=float) if f > 0]
    left = min(10.0 ** np.floor(np.log10(min(above, default=0.1)) + 1e-9), 0.1) if positive is None else 0.0
    lowest = 1.0
    for number, (label, (far, tar)) in enumerate(curves.items()):
        far, tar = np.asarray(far, dtype=float), np.asarray(tar, dtype=float)
        # A rate is kept until one more impostor is let in: a step, not a slope.
        axes.plot(np.maximum(far, left), tar, drawstyle="steps-post", label=label, **_line(number))
        lowest = min(lowest, float(tar[far <= left].max(initial=0.0)))
    bottom = np.floor(lowest * 20 - 0.2) / 20 if lowest > 0.5 and positive is None else 0.0
    guess = np.geomspace(left, 1, 200) if left else np.linspace(0, 1, 2)
    if bottom == 0.0:
        axes.plot(guess, guess, color=QUIET, linewidth=1, linestyle=DASHES[2], label="guessing")
    if positive is None:
        axes.set_xscale("log")
        axes.set_xlabel("false accept rate (share of different pairs accepted)")
        axes.set_ylabel("true accept rate (share of same pairs accepted)")
    else:
        axes.set_xlabel(f"false positive rate (share of the other class taken for {_short(positive, 24)})")
        axes.set_ylabel(f"true positive rate (share of {_short(positive, 24)} found)")
    axes.set_xlim(left, 1)
    axes.set_ylim(bottom, 1.0 + (1.0 - bottom) * 0.02)
    axes.set_title(title)
    legend(axes, loc="lower right" if bottom or positive is not None else "best")
    return figure


def loss_curve(
    step: Numbers,
    loss: Numbers,
    lr: Numbers | None = None,
    evals: Mapping[str, tuple[Numbers, Numbers]] | None = None,
    title: str = "Training",
) -> Figure:
    """Draw the loss over the optimizer step, and below it evaluations (name to steps and values) and learning rate.

    `step`, `loss` and `lr` are equally long. A loss that spans a factor of 20 gets a logarithmic axis.
    """
    if len(step) != len(loss) or (lr is not None and len(lr) not in (0, len(step))):
        raise ValueError(f"{len(step)} steps, {len(loss)} losses, {None if lr is None else len(lr)} learning rates")
    evals = {name: points for name, points in (evals or {}).items() if len(points[0])}
    rates = np.asarray(() if lr is None else lr, dtype=float)
    # Three panels stay under 760 pixels: MLflow shows an image at its full width, and cuts what is below the window.
    panels = [2.5] + [1.7] * bool(evals) + [1.1] * (len(rates) > 0)
    figure, axes = blank(height=1.0 + sum(panels), ratios=panels)
    figure.suptitle(title, color=INK, fontsize=12)
    top, *rest = axes
    step, loss = np.asarray(step, dtype=float), np.asarray(loss, dtype=float)
    if len(step) >= SMOOTHED_FROM:
        window = len(step) // 50 | 1
        top.plot(step, loss, color=COLOURS[0], linewidth=0.8, alpha=0.35, label="as logged")
        top.plot(step, _running_mean(loss, window), label=f"mean of {window} points", **_line(0))
        legend(top, loc="upper right")
    else:
        top.plot(step, loss, **_line(0), **_dots(len(step)))
    finite = loss[np.isfinite(loss)]
    if len(finite) and finite.min() > 0 and finite.max() > 20 * finite.min():
        top.set_yscale("log")
        top.set_ylabel("training loss (log)")
    else:
        top.set_ylabel("training loss")
    if evals:
        panel = rest.pop(0)
        for number, (name, (at, values)) in enumerate(evals.items()):
            panel.plot(at, values, label=name, **_line(number), **_dots(len(at)))
        panel.set_ylabel(next(iter(evals)) if len(evals) == 1 else "evaluations")
        if len(evals) > 1:
            legend(panel, loc="best")
    if len(rates):
        (panel,) = rest
        panel.plot(step, rates, color=COLOURS[2], linewidth=1.8, **_dots(len(step)))
        panel.set_ylim(bottom=0)
        panel.set_ylabel("learning rate")
        panel.ticklabel_format(axis="y", style="plain" if np.nanmax(rates) >= 1e-3 else "sci", scilimits=(-3, 3))
    _step_axis(axes)
    return figure


def speed_curve(step: Numbers, samples_per_s: Numbers, marks: Numbers = (), title: str = "Speed of training") -> Figure:
    """Draw samples per second over the optimizer step, from 0 up, and the steps of evaluations as `marks`."""
    if len(step) != len(samples_per_s):
        raise ValueError(f"{len(step)} steps, {len(samples_per_s)} speeds")
    figure, (axes,) = blank(height=3.8)
    rate = np.asarray(samples_per_s, dtype=float)
    finite = rate[np.isfinite(rate)]
    axes.plot(step, rate, **_line(0), **_dots(len(step)))
    if len(finite):
        middle = median(step, rate)
        axes.axhline(middle, color=QUIET, linewidth=1, linestyle=DASHES[1], label=f"median {_number(middle)}")
        axes.set_ylim(0, max(float(finite.max()), 1e-9) * 1.15)
    if len(marks):
        axes.plot(
            np.asarray(marks, dtype=float),
            np.zeros(len(marks)),
            linestyle="none",
            marker="^",
            markersize=8,
            color=COLOURS[1],
            clip_on=False,
            zorder=5,
            label="evaluation (its time is not in the rate)",
        )
    axes.set_ylabel("samples per second")
    axes.set_title(title)
    axes.yaxis.set_major_formatter(lambda value, _: _number(value))
    if axes.get_legend_handles_labels()[1]:
        legend(axes, loc="lower right")
    _step_axis([axes])
    return figure


def time_shares(shares: Mapping[str, float], title: str = "Where the time went") -> Figure:
    """Draw the share of the wall-clock in each phase, 0 to 1, largest first, without phases that took none."""
    shown = sorted(((name, float(share)) for name, share in shares.items() if share > 0), key=lambda pair: -pair[1])
    figure, (axes,) = blank(height=1.3 + 0.36 * max(len(shown), 1))
    values = [100 * share for _, share in shown]
    bars = axes.barh(range(len(shown)), values, color=COLOURS[0], height=0.66)
    labels = [f"{value:.1f} %" if value >= 0.05 else "< 0.1 %" for value in values]
    axes.bar_label(bars, labels, padding=5, color=INK, fontsize=10)
    axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name, _ in shown])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(values, default=100) * 1.14)
    axes.set_xlabel("share of the run's wall-clock (%)")
    axes.set_title(title)
    return figure


def confusion(counts: np.ndarray, names: Sequence[str], title: str = "Confusion") -> Figure:
    """Draw a confusion matrix: `counts` (C, C) of true classes (rows) by predictions, coloured by the share of the row.

    Counts stand in the cells of up to 30 classes, shares beside them up to 12; of more classes the three most frequent
    mistakes are named. Counts of pixels, which are too wide for that, are shortened, and left to the shares beyond 12.
    """
    counts = np.asarray(counts)
    classes, total = len(counts), int(counts.sum())
    if counts.shape != (classes, classes) or len(names) != classes or not classes:
        raise ValueError(f"counts {counts.shape} and {len(names)} names; expected (C, C) and C")
    support = counts.sum(axis=1)
    share = counts / np.maximum(support, 1)[:, None]
    figure, (axes,) = blank(height=min(6.3, 2.4 + 0.65 * classes))
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    # Where a class has many others to be mistaken for, each share is small: the root brings them out.
    few = classes <= 12
    shade = LinearSegmentedColormap.from_list("shade", ["#ffffff", COLOURS[0]])
    image = axes.imshow(share, cmap=shade, norm=PowerNorm(1.0 if few else 0.5, 0, 1), interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    said = "" if few or classes > 30 or counts.max() < 10_000 else "; numbers: %"
    bar.set_label(f"share of the row{'' if few else ' (root scale)'}{said}", fontsize=10, color=INK)
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)
    if classes <= 30:
        size = 10.5 if classes <= 6 else 8 if few else 6
        wide = counts.max() >= 10_000
        dark = np.asarray(image.norm(share)) > 0.55
        for row, column in np.argwhere(counts > 0).tolist():
            per_cent = 100 * share[row, column]
            if wide and not few:
                text = f"{per_cent:.0f}" if per_cent >= 0.5 else ""
            else:
                text = _counted(int(counts[row, column])) + f"\n{per_cent:.1f} %" * few
            colour = "white" if dark[row, column] else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    every = -(-classes // 50)
    shown = range(0, classes, every)
    size = 10 if few else 8 if classes <= 30 else 5.5
    short = [_short(names[k], 18) for k in shown]
    rows = [f"{name}  ({support[k]:,})" if classes <= 30 else name for name, k in zip(short, shown, strict=True)]
    flat = classes <= 6 and max(map(len, short)) <= 12
    axes.set_xticks(shown, short, fontsize=size, rotation=0 if flat else 90)
    axes.set_yticks(shown, rows, fontsize=size)
    axes.grid(visible=False)
    axes.tick_params(length=0 if every == 1 else 2)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel(
        "true class (how many)" if classes <= 30 else f"true class{f' (one in {every} named)' * (every > 1)}"
    )
    right = f"{np.trace(counts) / total:.4f} of {total:,} right" if total else "nothing counted"
    figure.suptitle(f"{title}: {right}", color=INK, fontsize=12)
    if not few and (told := _mistakes(counts, names)):
        figure.supxlabel(told, fontsize=min(8.5, 8.5 * 108 / len(told)), color=QUIET)
    return figure


def _mistakes(counts: np.ndarray, names: Sequence[str]) -> str:
    """Name the three most frequent mistakes; empty where there are none."""
    off = counts - np.diag(np.diag(counts))
    order = np.argsort(-off, axis=None, kind="stable")[:3]
    worst = [(*divmod(int(k), len(counts)), int(off.flat[k])) for k in order if off.flat[k]]
    told = "    ".join(f"{_short(names[a], 11)} → {_short(names[b], 11)} {_counted(n)}" for a, b, n in worst)
    return told and f"most often:  {told}"


def reliability(
    confidence: Numbers, accuracy: Numbers, count: Numbers, title: str = "Calibration", bins: int = 15
) -> Figure:
    """Draw a reliability diagram: accuracy against mean confidence by bin, and below it the samples of each bin.

    The bins divide 0 to 1 evenly, without their lower ends; empty ones may be left out. The title has the expected
    calibration error (Guo et al., ICML 2017).
    """
    count = np.asarray(count, dtype=float)
    if not len(confidence) == len(accuracy) == len(count) or not len(count):
        raise ValueError(f"{len(confidence)} confidences, {len(accuracy)} accuracies, {len(count)} counts")
    full = count > 0
    said, found = np.asarray(confidence, dtype=float)[full], np.asarray(accuracy, dtype=float)[full]
    error = float(np.sum(count[full] * np.abs(said - found)) / max(count.sum(), 1))
    figure, (top, low) = blank(height=6.0, ratios=(3, 1))
    top.plot([0, 1], [0, 1], color=QUIET, linewidth=1, linestyle=DASHES[1], label="as it should be")
    gap = {"color": COLOURS[1], "linewidth": 5, "alpha": 0.35, "label": "gap"}
    top.vlines(said, np.minimum(said, found), np.maximum(said, found), **gap)
    top.plot(said, found, marker="o", markersize=5, label="measured", **_line(0))
    top.set_ylim(0, 1.02)
    top.set_ylabel("share of right predictions")
    figure.suptitle(f"{title}: expected calibration error {error:.4f}", color=INK, fontsize=12)
    legend(top, loc="upper left")
    centre = (np.maximum(np.ceil(said * bins), 1) - 0.5) / bins
    bars = low.bar(centre, count[full], width=0.9 / bins, color=COLOURS[0])
    if bins <= 20:
        low.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=8, color=INK)
    low.set_ylim(0, max(float(count.max()), 1) * 1.22)
    low.set_xlim(0, 1)
    low.set_ylabel("samples")
    low.yaxis.set_major_formatter(lambda value, _: _number(value))
    low.set_xlabel("probability of the predicted class")
    return figure


def empty(height: float, dpi: int = 120, **settings: Any) -> Figure:
    """Make an empty white figure of the usual width and this height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _plain_figure()(figsize=(WIDTH, height), dpi=dpi, facecolor="white", **settings)
    FigureCanvasAgg(figure)
    return figure


class Sheet:
    """A figure laid out by hand, in inches from its upper left corner: layout engines shrink images for captions."""

    def __init__(self, height: float, dpi: int = 120):
        self.figure, self.height = empty(height, dpi), height

    def text(
        self, x: float, y: float, words: str, size: float, colour: str = INK, ha: str = "left", va: str = "top"
    ) -> None:
        """Write words at a place, with a font size in points."""
        self.figure.text(x / WIDTH, 1 - y / self.height, words, ha=ha, va=va, color=colour, fontsize=size)

    def image(self, pixels: np.ndarray, x: float, y: float, wide: float, tall: float, sharp: bool = False) -> None:
        """Draw pixels (h, w, 3) into a box; `sharp`: each as a square of one colour."""
        box = x / WIDTH, 1 - (y + tall) / self.height, wide / WIDTH, tall / self.height
        axes = self.figure.add_axes(box)
        axes.imshow(pixels, interpolation="nearest" if sharp else "antialiased")
        axes.set_axis_off()


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
            powers = {text for axis in axes if axis.get_scale() == "log" for text in axis.findobj(Text)}
            for text in self.findobj(Text):
                if text not in powers:  # 10⁻³ is such a formula
                    text.set_parse_math(False)
            super().savefig(fname, transparent=transparent, **settings)

    return PlainFigure


def blank(height: float, ratios: Sequence[float] = (1,), shared: bool = True) -> tuple[Figure, list[Axes]]:
    """Make an empty figure of this height in inches, with panels above each other in these proportions.

    `shared`: all have one horizontal axis.
    """
    figure = empty(height, layout="constrained")
    grid = figure.subplots(len(ratios), 1, sharex=shared, squeeze=False, gridspec_kw={"height_ratios": list(ratios)})
    axes = list(grid[:, 0])
    for each in axes:
        each.set_axisbelow(True)
        each.grid(color=GRID, linewidth=0.8)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(QUIET)
        each.tick_params(colors=INK, labelsize=10)
        each.xaxis.label.set(size=10.5, color=INK)
        each.yaxis.label.set(size=10.5, color=INK)
        each.title.set(size=12, color=INK)
    return figure, axes


def _line(number: int) -> dict[str, Any]:
    # Seven colours and four dashes have no common factor: 28 curves look different.
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.8}


def _dots(points: int) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3.5} if points <= 40 else {}


def legend(axes: Axes, loc: LegendLocType, fontsize: float = 9.5, **more: Any) -> None:
    """Add a legend of all that has a label, at `loc`."""
    axes.legend(loc=loc, fontsize=fontsize, frameon=True, framealpha=0.9, edgecolor=GRID, labelcolor=INK, **more)


def _step_axis(axes: list[Axes]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes[-1].set_xlabel("optimizer step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes[-1].xaxis.set_major_formatter(lambda value, _: _number(value))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def _counted(number: int) -> str:
    """Write a count whole below a million, then in millions and more, to three figures."""
    for unit, letter in ((10**9, "G"), (10**6, "M")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:,}"


def _short(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of up to `window` (odd) finite neighbours on and around each point; NaN where there is none."""
    good, ones = np.isfinite(values), np.ones(window)
    total, found = (np.convolve(x, ones, "same") for x in (np.where(good, values, 0.0), good.astype(float)))
    return np.where(found > 0.5, total / np.maximum(found, 1), np.nan)

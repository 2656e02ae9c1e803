"""Pictures of a run: each function takes numbers and returns a matplotlib Figure, 900 pixels wide at 120 dots an inch.

Figures are made without pyplot, so nothing global is touched and any thread may draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Numbers = Sequence[float] | np.ndarray

WIDTH = 7.5
INK, QUIET, GRID = "#1a1a1a", "#767676", "#e3e3e3"
# Okabe and Ito's palette, which the common kinds of colour blindness tell apart; dashes tell the rest.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
SMOOTHED_FROM = 150
"""Points from which a noisy curve gets a smooth one in front of it."""


def roc(curves: Mapping[str, tuple[Numbers, Numbers]], title: str = "Verification: ROC") -> Figure:
    """True against false accept rate, one curve for each label; the rates of a curve ascend.

    The left edge is the power of ten below the smallest false accept rate above 0 of any curve; what is accepted
    without any false accept starts there.
    """
    if not curves:
        raise ValueError("no curve to draw")
    figure, (axes,) = _figure(height=5.0)
    positive = [f for far, _ in curves.values() for f in np.asarray(far, dtype=float) if f > 0]
    left = min(10.0 ** np.floor(np.log10(min(positive, default=0.1)) + 1e-9), 0.1)
    lowest = 1.0
    for number, (label, (far, tar)) in enumerate(curves.items()):
        far, tar = np.asarray(far, dtype=float), np.asarray(tar, dtype=float)
        # A rate is kept until one more impostor is let in: a step, not a slope.
        axes.plot(np.maximum(far, left), tar, drawstyle="steps-post", label=label, **_line(number))
        lowest = min(lowest, float(tar[far <= left].max(initial=0.0)))
    bottom = np.floor(lowest * 20 - 0.2) / 20 if lowest > 0.5 else 0.0
    guess = np.geomspace(left, 1, 200)
    if bottom == 0.0:
        axes.plot(guess, guess, color=QUIET, linewidth=1, linestyle=DASHES[2], label="guessing")
    axes.set_xscale("log")
    axes.set_xlim(left, 1)
    axes.set_ylim(bottom, 1.0 + (1.0 - bottom) * 0.02)
    axes.set_xlabel("false accept rate (share of different pairs accepted)")
    axes.set_ylabel("true accept rate (share of same pairs accepted)")
    axes.set_title(title)
    _legend(axes, loc="lower right" if bottom else "best")
    return figure


def loss_curve(
    step: Numbers,
    loss: Numbers,
    lr: Numbers | None = None,
    evals: Mapping[str, tuple[Numbers, Numbers]] | None = None,
    title: str = "Training",
) -> Figure:
    """Loss over the optimizer step; below it the evaluations (name to steps and values) and the learning rate, if any.

    `step`, `loss` and `lr` are equally long. A loss that spans a factor of 20 gets a logarithmic axis.
    """
    if len(step) != len(loss) or (lr is not None and len(lr) not in (0, len(step))):
        raise ValueError(f"{len(step)} steps, {len(loss)} losses, {None if lr is None else len(lr)} learning rates")
    evals = {name: points for name, points in (evals or {}).items() if len(points[0])}
    with_lr = lr is not None and len(lr) > 0
    # Three panels stay under 760 pixels: MLflow shows a picture at its full width, and cuts what is below the window.
    panels = [2.5] + [1.7] * bool(evals) + [1.1] * with_lr
    figure, axes = _figure(height=1.0 + sum(panels), ratios=panels)
    figure.suptitle(title, color=INK, fontsize=12)
    top, *rest = axes
    step, loss = np.asarray(step, dtype=float), np.asarray(loss, dtype=float)
    if len(step) >= SMOOTHED_FROM:
        window = len(step) // 50 | 1
        top.plot(step, loss, color=COLOURS[0], linewidth=0.8, alpha=0.35, label="as logged")
        top.plot(step, _running_mean(loss, window), label=f"mean of {window} points", **_line(0))
        _legend(top, loc="upper right")
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
            _legend(panel, loc="best")
    if with_lr:
        (panel,) = rest
        panel.plot(step, np.asarray(lr, dtype=float), color=COLOURS[2], linewidth=1.8, **_dots(len(step)))
        panel.set_ylim(bottom=0)
        panel.set_ylabel("learning rate")
        panel.ticklabel_format(axis="y", style="plain" if np.nanmax(lr) >= 1e-3 else "sci", scilimits=(-3, 3))
    _step_axis(axes)
    return figure


def speed_curve(step: Numbers, samples_per_s: Numbers, marks: Numbers = (), title: str = "Speed of training") -> Figure:
    """Samples per second over the optimizer step, from 0 up, and a mark at each step in `marks`: the evaluations."""
    if len(step) != len(samples_per_s):
        raise ValueError(f"{len(step)} steps, {len(samples_per_s)} speeds")
    figure, (axes,) = _figure(height=3.8)
    rate = np.asarray(samples_per_s, dtype=float)
    finite = rate[np.isfinite(rate)]
    axes.plot(step, rate, **_line(0), **_dots(len(step)))
    if len(finite):
        median = float(np.median(finite))
        axes.axhline(median, color=QUIET, linewidth=1, linestyle=DASHES[1], label=f"median {_number(median)}")
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
        _legend(axes, loc="lower right")
    _step_axis([axes])
    return figure


def time_shares(shares: Mapping[str, float], title: str = "Where the time went") -> Figure:
    """Share of the wall-clock in each phase, 0 to 1, largest first; phases that took none are not drawn."""
    shown = sorted(((name, float(share)) for name, share in shares.items() if share > 0), key=lambda pair: -pair[1])
    figure, (axes,) = _figure(height=1.3 + 0.36 * max(len(shown), 1))
    values = [100 * share for _, share in shown]
    axes.barh(range(len(shown)), values, color=COLOURS[0], height=0.66)
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.1f} %" if value >= 0.05 else "< 0.1 %",
            (value, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=10,
        )
    axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name, _ in shown])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(values, default=100) * 1.14)
    axes.set_xlabel("share of the run's wall-clock (%)")
    axes.set_title(title)
    return figure


def _figure(height: float, ratios: Sequence[float] = (1,)) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": list(ratios)})
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


def _legend(axes: Axes, loc: str) -> None:
    axes.legend(loc=loc, fontsize=9.5, frameon=True, framealpha=0.9, edgecolor=GRID, labelcolor=INK)


def _step_axis(axes: list[Axes]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes[-1].set_xlabel("optimizer step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes[-1].xaxis.set_major_formatter(lambda value, _: _number(value))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of up to `window` (odd) finite neighbours on and around each point; NaN where there is none."""
    good = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    at = np.arange(len(values))
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    found = count[high] - count[low]
    return np.where(found > 0, (total[high] - total[low]) / np.maximum(found, 1), np.nan)

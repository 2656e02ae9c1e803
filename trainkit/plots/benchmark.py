"""Draw a benchmark: the throughput ratio of each switch of a recipe, with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.plots.style import BLUE, GREEN, INK, PURPLE, QUIET, SMALL, VERMILION, blank, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = {
    "kept": (GREEN, "kept"),
    "faster": (BLUE, "significantly faster, not kept"),
    "slower": (VERMILION, "significantly slower"),
    "computed": (PURPLE, "computed from single events"),
    "none": (QUIET, "inconclusive"),
}
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)


def figure(rows: Sequence[Mapping[str, Any]], about: str = "Throughput relative to the recipe as shipped") -> Figure:
    """Draw a row for each setting that has a ratio, fastest first: the ratio as a dot, its 95 % interval as a bar.

    `rows` are those of `diagnostics.benchmark.rows`: `switch`, `change`, `ratio`, `low`, `high`, `verdict`. The axis is
    logarithmic where a ratio is above 2 or below 0.5.
    """
    shown = sorted((row for row in rows if row["switch"] and row["ratio"] is not None), key=lambda row: -row["ratio"])
    figure, (axes,) = blank(height=1.2 + 0.3 * max(len(shown), 1))
    axes.axvline(1.0, color=QUIET, linewidth=1)
    used: set[str] = set()
    for place, row in enumerate(shown):
        kind = _kind(row)
        colour, label = _KINDS[kind]
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=3, alpha=0.4)
        mark = "D" if row["low"] is None else "o"
        own = label if kind not in used else None
        axes.plot([row["ratio"]], [place], color=colour, marker=mark, markersize=6, linestyle="none", label=own)
        used.add(kind)
        right = max(row["high"] or 0.0, row["ratio"])
        axes.annotate(
            f"{row['ratio']:.2f}", (right, place), xytext=(6, 0), textcoords="offset points", va="center",
            color=INK, fontsize=SMALL, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), [_name(row) for row in shown], fontsize=SMALL)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    ends = [end for row in shown for end in (row["low"], row["high"], row["ratio"]) if end]
    least, most = min([*ends, 0.95]), max([*ends, 1.05])
    if most > 2 or least < 0.5:
        axes.set_xscale("log")
        axes.set_xlim(least / 1.08, most * 1.2)
        ticks = [tick for tick in _TICKS if least / 1.08 <= tick <= most * 1.2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        room = (most - least) * 0.12
        axes.set_xlim(least - room / 2, most + room)
    axes.set_xlabel("throughput ratio (recipe as shipped = 1)")
    if used:
        figure.legend(loc="outside lower center", ncols=3, fontsize=SMALL, frameon=False, labelcolor=INK)
    titled(figure, _finding(shown), f"{about}; dot: ratio, bar: 95 % CI")
    return figure


def _finding(shown: Sequence[Mapping[str, Any]]) -> str:
    """State the setting that is kept, else the fastest that is significantly faster, else that there is none."""
    faster = [row for row in shown if row["verdict"] == "kept"]
    faster = faster or [row for row in shown if row["low"] is not None and row["low"] > 1]
    if not faster:
        return "No setting is significantly faster than the recipe" if shown else "No setting was measured"
    best = faster[0]
    ends = "" if best["low"] is None else f" (95 % CI {best['low']:.2f} to {best['high']:.2f})"
    return f"{best['ratio']:.2f}x the throughput with {_name(best)}{ends}"


def _kind(row: Mapping[str, Any]) -> str:
    if row["verdict"] == "kept":
        return "kept"
    if row["low"] is None:
        return "computed"
    return "slower" if row["high"] < 1 else "faster" if row["low"] > 1 else "none"


def _name(row: Mapping[str, Any]) -> str:
    name = f"{row['switch']}: {row['change']}" if row["switch"] not in row["change"] else row["change"]
    return name if len(name) <= 44 else f"{name[:43]}…"

"""Draw the time of a run step by step: the phases of each step stacked, and the time between steps.

From single times (`from_steps`: a short run, or the last steps of a long one) or from the log lines of a journal
(`from_history`: the whole of a long run); `figure` draws both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainkit.plots import findings
from trainkit.plots.style import COLOURS, INK, SMALL, blank, legend, number, seconds, step_axis, titled
from trainkit.speed.clock import BETWEEN, STEP, Steps
from trainkit.tracking.journal import History, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 240
"""Windows that an image shows side by side; more are joined."""
_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY, _BLACK = COLOURS
_COLOUR = {"data": _RED, "transfer": _ORANGE, "forward": _SKY, "compute": _SKY, "backward": _BLUE, "optimizer": _GREEN}
_COLOUR |= {"idle": "#cccccc", "eval": _PINK, "checkpoint": _BLACK, "log": "#999999"}
_DEVICE = ("transfer", "forward", "backward", "optimizer", "idle")


@dataclass(frozen=True)
class Windows:
    """Times of steps, in windows of one or more, each beginning where the one before it ends."""

    edge: np.ndarray
    """(n + 1,): window k holds the steps after `edge[k]` up to `edge[k + 1]`."""
    step_ms: Mapping[str, np.ndarray]
    """Mean milliseconds per step in each window, (n,), by phase."""
    between_s: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Seconds between steps in each window, (n,), by phase of `clock.BETWEEN`."""
    after_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds after the last step, by phase of `clock.BETWEEN`: of the last evaluation and checkpoint."""

    def __len__(self) -> int:
        return len(self.edge) - 1

    def joined(self, most: int) -> Windows:
        """Join adjacent windows to at most so many, of nearly equally many steps each."""
        if len(self) <= most:
            return self
        wanted = np.linspace(self.edge[0], self.edge[-1], most + 1)
        at = np.unique(np.append(np.searchsorted(self.edge, wanted[:-1]), len(self)))
        many = np.diff(self.edge)
        steps = np.add.reduceat(many, at[:-1])
        step = {name: np.add.reduceat(ms * many, at[:-1]) / steps for name, ms in self.step_ms.items()}
        between = {name: np.add.reduceat(s, at[:-1]) for name, s in self.between_s.items()}
        return Windows(self.edge[at], step, between, self.after_s)


def from_steps(steps: Steps, done: int = 0, device: bool = False) -> Windows:
    """Make a window of every step. `done`: steps before the clock began to count, those before a resume.

    With `device` the steps are those of a device's timeline: waiting for data is idle time there, and the time between
    steps is left out.
    """
    edge = done + np.append(steps.number[:1] - 1 if len(steps) else 0, steps.number)
    step: dict[str, np.ndarray] = dict(zip(STEP, 1e3 * steps.phases.T, strict=True))
    if device:
        step["idle"] = step.pop("data")
        return Windows(edge, {name: step[name] for name in _DEVICE})
    return Windows(edge, step, dict(zip(BETWEEN, steps.between.T, strict=True)), _after(steps))


def _after(steps: Steps) -> dict[str, float]:
    return dict(zip(BETWEEN, steps.after.tolist(), strict=True))


def from_history(history: History) -> Windows | None:
    """Make a window of each log line of a journal; None where it has none. `compute` is forward to optimizer.

    A line has the throughput and the shares since the line before, from which seconds follow. In the first line after a
    resume these are of fewer steps than lie between the lines, so the time between steps looks longer there.
    """
    phases = {name: f"time/{name}_share" for name in ("data", "transfer", "compute", *BETWEEN)}
    rate = "speed/steps_per_s"
    at, columns = _lines(history, [rate, *phases.values()])
    good = columns[rate] > 0
    if not good.any():
        return None
    edge = np.append(0, at[good])
    share = {name: columns[metric][good] for name, metric in phases.items()}
    ms = 1e3 / columns[rate][good]
    inside = share["data"] + share["transfer"] + share["compute"]
    step = {name: ms * share[name] / inside for name in ("data", "transfer", "compute")}
    total_s = np.diff(edge) * ms / 1e3 / inside
    return Windows(edge, step, {name: total_s * share[name] for name in BETWEEN})


def device_from_history(history: History) -> Windows | None:
    """Read the device's times from the log lines of a journal; None where they have none, as on a CPU."""
    at, columns = _lines(history, [f"device/{name}_ms" for name in _DEVICE])
    return Windows(np.append(0, at), {name: columns[f"device/{name}_ms"] for name in _DEVICE}) if len(at) else None


def of_run(steps: Steps, done: int, journal_file: Path) -> Figure:
    """Draw a run that ended after `done` steps: its single steps, or its log lines if it has more."""
    history = read(journal_file)
    whole = from_history(history) if steps.number[0] > 1 else None
    whole = whole and replace(whole, after_s=_after(steps))  # the last log line was written before the last evaluation
    return figure(whole or from_steps(steps, done - int(steps.number[-1])), device_from_history(history))


def figure(
    windows: Windows | Steps, device: Windows | Steps | None = None, about: str = "Time of each step by phase"
) -> Figure:
    """Draw milliseconds per step by phase, seconds between steps, and times of the device, if known.

    More than 240 windows are joined with adjacent ones. The scale leaves out the highest windows where they would
    flatten all others; a note says how high they are. Raises ValueError when there is no step to draw.
    """
    windows = from_steps(windows) if isinstance(windows, Steps) else windows
    device = from_steps(device, device=True) if isinstance(device, Steps) else device
    if not len(windows):
        raise ValueError("no step to draw")
    before = windows.between_s.get("setup", np.zeros(1)).sum()
    windows = windows.joined(MOST)
    # Of each phase the seconds before each window, and last those after the last step.
    between = {name: np.append(s, windows.after_s.get(name, 0.0)) for name, s in windows.between_s.items()}
    between = {name: s for name, s in between.items() if name != "setup" and s.any()}
    panels = [2.5] + [1.3] * bool(between) + [2.0] * (device is not None and len(device) > 0)
    drawn, axes = blank(height=0.6 + sum(panels), ratios=panels)
    _stack(axes[0], windows, "main thread (ms per step)")
    if between:
        _bars(axes[1], windows.edge, between, before)
    if device is not None and len(device):
        _stack(axes[-1], device.joined(MOST), "device (ms per step)")
    behind = any(s[-1] > 0 for s in between.values())
    axes[0].set_xlim(windows.edge[0], windows.edge[-1] + _strip(windows.edge) * behind)
    step_axis(axes)
    titled(drawn, findings.time(_of_steps(windows), "step time"), about)
    return drawn


def _of_steps(windows: Windows) -> dict[str, float]:
    """Return the share of step time of each phase, that of forward pass to optimizer step as `compute`."""
    many = np.diff(windows.edge)
    spent = {name: float((ms * many).sum()) for name, ms in windows.step_ms.items()}
    parts = {name: spent.get(name, 0.0) for name in ("data", "transfer")}
    parts["compute"] = sum(spent.values()) - sum(parts.values())
    return {name: part / (sum(spent.values()) or 1.0) for name, part in parts.items()}


def _stack(axes: Axes, windows: Windows, label: str) -> None:
    """Draw phases above each other, with their shares of all the time in the legend."""
    many = np.diff(windows.edge)
    spent = {name: float((ms * many).sum()) for name, ms in windows.step_ms.items()}
    total = sum(spent.values()) or 1.0
    base = np.zeros(len(windows))
    for name, ms in windows.step_ms.items():
        if spent[name] > 0:
            share = f"{100 * spent[name] / total:.0f} %" if spent[name] >= 0.005 * total else "< 1 %"
            said = f"{findings.phase(name)} {share}"
            axes.stairs(base + ms, windows.edge, baseline=base, fill=True, color=_COLOUR[name], label=said)
            base = base + ms
    usual = float(np.quantile(base, 0.98))
    top = float(base.max())
    if top > 2.5 * usual > 0:
        higher = int((base > 1.5 * usual).sum())
        axes.text(0.995, 0.8, f"{higher} higher, up to {number(top)} ms", transform=axes.transAxes, ha="right",
                  va="top", fontsize=SMALL, color=INK)  # fmt: skip
        top = 1.5 * usual
    axes.set_ylim(0, 1.4 * top or 1.0)  # room for the legend
    axes.set_ylabel(label)
    legend(axes, loc="upper center", ncols=3, columnspacing=1.2, handlelength=1.2)


def _bars(axes: Axes, edge: np.ndarray, between: Mapping[str, np.ndarray], before: float) -> None:
    """Draw seconds between steps, each at the step that follows; those after the last step come last."""
    wide = max((edge[-1] - edge[0]) / 160, float(np.diff(edge).max()))  # a single step of thousands is still seen
    widths = np.append(np.full(len(edge) - 1, wide), _strip(edge))
    base = np.zeros(len(edge))
    for name, spent in between.items():
        label = f"{findings.phase(name)} {seconds(spent.sum())}"
        some = spent > 0
        axes.bar(edge[some], spent[some], widths[some], base[some], align="edge", color=_COLOUR[name], label=label)
        base = base + spent
    axes.set_ylim(0, 1.4 * float(base.max()))
    axes.set_ylabel("between steps (s)")
    legend(axes, loc="upper right", ncols=3, columnspacing=1.2, handlelength=1.2)
    if before >= 0.05:
        note = f"start-up not drawn: {seconds(before)}"
        axes.text(0.005, 0.93, note, transform=axes.transAxes, va="top", fontsize=SMALL, color=INK)


def _strip(edge: np.ndarray) -> float:
    """Return the width, in steps, of the strip after the last step."""
    return (edge[-1] - edge[0]) / 60


def _lines(history: History, names: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the steps, ascending, at which all of these metrics have a finite value, and the values."""
    values = [{p.step: p.value for p in history.metrics.get(name, ()) if np.isfinite(p.value)} for name in names]
    at = sorted(set.intersection(*(set(each) for each in values)) - {0})
    columns = {name: np.array([each[step] for step in at]) for name, each in zip(names, values, strict=True)}
    return np.array(at, dtype=np.int64), columns

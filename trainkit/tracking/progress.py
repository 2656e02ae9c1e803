"""The training log in the terminal: a table of rows, and below it a line with the progress.

In a pipe, and in a log file, the rows are the same lines without colours, and there is no such line. The main thread
draws it: there is no thread that could disturb the device or a forked worker.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from trainkit.terminal import Page, Styled, clock_time, numbers, width

HEAD, BEST = "bold cyan", "green"
"""Styles of the header, and of the row of an evaluation that is the best so far."""

_COLUMNS = {"step": 6, "epoch": 7, "loss": 9, "lr": 8, "samples/s": 9, "left": 8}
"""Columns of every log table and their widths."""
_MOST = 8
"""Columns of evaluations."""


@dataclass
class LogTable:
    """Rows of the training log. The header is printed before the first row, and again when the columns change."""

    decides: str = ""
    """Full name of the metric that decides which evaluation is best."""
    has_ema: bool = False
    steps_per_epoch: int = 0
    """0 where it is not known: the column is then empty."""
    _metrics: list[str] = field(default_factory=list)
    """Columns of evaluations."""
    _head: str = ""
    """The header that was printed last."""

    def __post_init__(self) -> None:
        if self.decides:
            self._metrics = _pair(self.decides, self.has_ema)

    def log_row(self, step: int, loss: float, lr: float | None, rate: float, left: float) -> Page:
        """Return the row of a log line: loss, learning rate, samples/s and the seconds that are left."""
        cells = {"loss": f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.4g}"}
        cells |= {"lr": "" if lr is None else _short(lr), "samples/s": _rate(rate), "left": clock_time(left)}
        return self._row(step, cells)

    def evaluation_row(self, step: int, evaluation: str, metrics: Mapping[str, float], leads: bool) -> Page:
        """Return the row of an evaluation: its deciding metric, else its first, also of the EMA weights."""
        own = [name for name in metrics if "." not in name] or list(metrics)  # `val/dice.sr` is of a class
        if self.decides not in metrics and own:
            first = next((name for name in own if not name.startswith(f"{evaluation}/ema/")), own[0])
            pair = [name for name in _pair(first, True) if name in metrics]
            missing = [name for name in pair if name not in self._metrics]
            if len(self._metrics) + len(missing) <= _MOST:
                # The deciding metric stays last, beside the mark of the best.
                at = len(self._metrics) - (self.decides in self._metrics)
                self._metrics[at:at] = missing
        cells = {name: numbers([value])[0] for name, value in metrics.items() if name in self._metrics}
        return self._row(step, cells, leads)

    def _row(self, step: int, cells: Mapping[str, str], leads: bool = False) -> Page:
        epoch = f"{step / self.steps_per_epoch:.2f}" if self.steps_per_epoch else ""
        widths = _COLUMNS | {name: max(8, len(name)) for name in self._metrics}
        cells = {"step": str(step), "epoch": epoch, **cells}
        head = "  ".join(name.rjust(columns) for name, columns in widths.items())
        row = "  ".join(cells.get(name, "").rjust(columns) for name, columns in widths.items()).rstrip()
        rows: list[str | Styled] = [Styled(f"{row}  *best", BEST) if leads else row]
        if head != self._head:
            self._head = head
            rows.insert(0, Styled(head, HEAD))
        return rows


def _pair(name: str, has_ema: bool) -> list[str]:
    """Return a metric of the trained weights and that of the EMA weights, the given one last."""
    evaluation, _, rest = name.partition("/")
    if rest.startswith("ema/"):
        return [f"{evaluation}/{rest.removeprefix('ema/')}", name]
    return [f"{evaluation}/ema/{rest}", name] if has_ema else [name]


def _short(lr: float) -> str:
    if lr == 0 or lr >= 1e-3:
        return f"{lr:.3g}"
    mantissa, _, exponent = f"{lr:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


class ProgressLine:
    """A line at the bottom of a terminal: percent, step, time left, loss and throughput.

    It is redrawn at most once in `seconds`. Other text is printed with `above`, so that the line stays last.
    """

    def __init__(
        self,
        stream: TextIO,
        steps: int,
        seconds: float,
        label: str = "",
        now: Callable[[], float] = time.perf_counter,
    ):
        self._stream, self._steps, self._seconds, self._label, self._now = stream, steps, seconds, label, now
        self._first: tuple[int, float] | None = None
        self._drawn = -float("inf")
        self._line = ""

    def update(self, step: int, facts: Callable[[], Sequence[str]]) -> None:
        """Draw the line, if that is due; `facts` gives what is shown last: loss and throughput."""
        now = self._now()
        if self._first is None:
            self._first = (step, now)
        elif now - self._drawn < self._seconds and step < self._steps:
            return
        self._drawn = now
        first, began = self._first
        texts = [self._label] * bool(self._label) + [f"{100 * step // max(1, self._steps):3d} %"]
        texts.append(f"{step}/{self._steps}")
        if step > first:  # evaluations and checkpoints are counted in
            texts.append(f"{clock_time((now - began) / (step - first) * (self._steps - step))} left")
        self._line = "  ".join([*texts, *facts()])[: width(self._stream) - 1]
        self._write(f"\r\x1b[2K{self._line}")

    def above(self, text: str) -> None:
        """Print lines to stdout, above this one."""
        if self._stream is sys.stdout:
            self._write(f"\r\x1b[2K{text}\n{self._line}")
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Take the line away."""
        if self._line:
            self._write("\r\x1b[2K")
            self._line = ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            self._stream.write(text)
            self._stream.flush()

"""Format text for a terminal: tables, colours and progress, and the same text plain for pipes and logs.

What is printed goes through `print` or `click.echo`, so that a pipe whose reader is gone, and a disk that is full, are
handled in one place.

- A pipe, a file and `TERM=dumb` get plain text without control codes and without wrapping.
- `NO_COLOR` switches colours and bold text off; `FORCE_COLOR` switches them on in pipes as well. `NO_COLOR` wins.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import click

from trainkit.errors import visible
from trainkit.redact import without_secrets

_DUMB = ("dumb", "unknown")
_SILENT, _BETWEEN = 2.0, 30.0
"""Seconds before the first line on progress in a log, and between two."""
_NARROW = 20
"""Fewest columns that are believed of a terminal."""
_WIDE = 10_000
"""Columns of a pipe: nothing is wrapped."""
_CLASSES = 12
"""Classes in a table; all are in MLflow."""
_WHOLE = 12
"""Scores of all classes together in a table of several runs; all are in MLflow."""
HEAD, BEST = "bold cyan", "green"
"""Styles of a header, and of the row of an evaluation that is the best so far."""
_COLUMNS = {"step": 6, "epoch": 7, "loss": 9, "lr": 8, "samples/s": 9, "left": 8}
"""Columns of every log table and their widths."""
_MOST = 8
"""Columns of evaluations in a log table."""


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of them the header; the first column is flush left, the others are flush right."""

    rows: Sequence[Sequence[str]]
    emphasised: Sequence[int] = ()
    """Rows in bold, by number; the header is row 0."""


@dataclass(frozen=True)
class Styled:
    """A line with a style, such as `bold green`; without colours it is the text alone."""

    text: str
    style: str


Part = str | Styled | Table
Page = Sequence[Part]
"""Parts that are printed together, in order."""


def is_interactive(stream: TextIO | None) -> bool:
    """Return True for a terminal that obeys control codes."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB
    except (ValueError, OSError):  # closed
        return False


def has_colours(stream: TextIO | None) -> bool:
    """Return True where text may have colours and bold letters."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_interactive(stream)


def bar_stream() -> TextIO | None:
    """Return the stream for a progress bar: stdout, or stderr where stdout is a file; None without a terminal.

    With stdout in a pipe, such as `| tee log`, another program writes to the same terminal: there is no bar then.
    """
    if is_interactive(sys.stdout):
        return sys.stdout
    return sys.stderr if is_interactive(sys.stderr) and _is_file(sys.stdout) else None


def _is_file(stream: TextIO | None) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode)  # /dev/null is a character device


@contextlib.contextmanager
def bar(what: str, unit: str = "image") -> Iterator[Callable[[int, int], None]]:
    """Show on stderr how far some work is, with the time left; call what it gives with the number done and the total.

    In a terminal it is a progress bar; elsewhere a line is printed after two seconds, and then twice a minute.
    """
    if not is_interactive(sys.stderr):
        yield _Lines(what, unit).on_progress
        return
    # Redrawn here and not by a thread: what is called may fork.
    with click.progressbar(length=1, label=f"{what}, {unit}s", show_pos=True, file=sys.stderr) as shown_bar:
        drawn = 0.0

        def on_progress(done: int, total: int) -> None:
            nonlocal drawn
            if (now := time.perf_counter()) - drawn >= 0.2 or done == total:
                drawn = now
                shown_bar.length = total or None
                shown_bar.update(done - shown_bar.pos)

        yield on_progress


@dataclass
class _Lines:
    """Progress as lines of text, for logs."""

    what: str
    unit: str
    began: float = field(default_factory=lambda: time.perf_counter())
    said: float = -math.inf

    def on_progress(self, done: int, total: int) -> None:
        """Print a line if one is due."""
        now = time.perf_counter()
        if not done:  # the time left follows from what was done since then
            self.began = now
        if now - self.began < _SILENT or now - self.said < _BETWEEN:
            return
        self.said = now
        left = f" of {total:,}" if total else ""
        left += f" {self.unit}s"
        if total:
            left += f", {duration((now - self.began) / done * (total - done))} left"
        with contextlib.suppress(OSError, ValueError):
            print(f"{visible(self.what)}: {done:,}{left}", file=sys.stderr, flush=True)


def width(stream: TextIO | None) -> int:
    """Return the columns of a terminal; of a pipe so many that nothing is wrapped."""
    if not is_interactive(stream):
        return _WIDE
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and int(given):
        return max(_NARROW, int(given))
    try:
        return max(_NARROW, os.get_terminal_size(stream.fileno()).columns) if stream is not None else 80
    except (OSError, ValueError, AttributeError):
        return 80


def painted(text: str, style: str, stream: TextIO | None) -> str:
    """Return a text with a style, or as it is where there are no colours. Its control characters are escaped."""
    text = _safe(text)
    if not style or not has_colours(stream):
        return text
    colours = [word for word in style.split() if word != "bold"]
    return click.style(text, fg=colours[0] if colours else None, bold="bold" in style or None)


def plain(page: Page) -> str:
    """Return a page as plain text."""
    return shown(page, None, coloured=False)


def shown(page: Page, stream: TextIO | None, coloured: bool = True) -> str:
    """Return a page for a stream: with colours where it has them, else plain; the text is the same."""
    lines: list[tuple[str, str]] = []
    for part in page:
        if isinstance(part, Table):
            styles = {0: HEAD} | dict.fromkeys(part.emphasised, "bold")
            rows = aligned([[_safe(cell) for cell in row] for row in part.rows])
            lines += [(row.rstrip(), styles.get(number, "")) for number, row in enumerate(rows)]
        else:
            lines.append((part.text, part.style) if isinstance(part, Styled) else (part, ""))
    return "\n".join(painted(text, style if coloured else "", stream) for text, style in lines)


def _safe(text: str) -> str:
    return visible(without_secrets(text))


def duration(seconds: float) -> str:
    """Return a time as text: `23 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    for small, large, size, limit in (("s", "min", 60, 3600), ("min", "h", 3600, 86400), ("h", "d", 86400, None)):
        if limit is None or whole < limit:
            rest = whole % size // (size // (24 if large == "d" else 60))
            return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
    raise ValueError(f"duration of {seconds} s")


def clock_time(seconds: float) -> str:
    """Return a time as on a clock: `0:05`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# ---- Rows and numbers of tables


def split(names: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Split names of scores into those of all classes together, the first kind per class, and its first twelve names.

    `dice.sr` is the kind `dice` of a class.
    """
    whole = [name for name in names if "." not in name]
    each = [name for name in names if "." in name]
    kind = each[0].partition(".")[0] if each else ""
    return whole, kind, [name for name in each if name.startswith(f"{kind}.")][:_CLASSES]


def chosen(names: Sequence[str], evaluation: str) -> tuple[list[str], int]:
    """Return the scores of an evaluation that a table of several runs shows, and the number of the others.

    The ends of a run's own intervals count as neither.
    """
    own = [name for name in names if name.startswith(f"{evaluation}/") and not name.endswith(("_low", "_high"))]
    whole, _, classes = split(own)
    shown = whole[:_WHOLE] + classes
    return shown, len(own) - len(shown)


def numbers(values: Sequence[float]) -> list[str]:
    """Format values of one kind: counts without fractions, all else to four places; from 10 two, from 1,000 none."""
    places = 0 if all(value != value or float(value).is_integer() for value in values) else None
    words = []
    for value in values:
        large = abs(value)
        digits = places if places is not None else 4 if large < 10 else 2 if large < 1000 else 0
        words.append("-" if value != value else f"{value:.{digits}f}")
    return words


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows as lines with aligned columns, the first flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
              for row in rows]  # fmt: skip
    return ["  ".join(row) for row in padded]


# ---- The training log: a table of rows, and below it a line with the progress


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

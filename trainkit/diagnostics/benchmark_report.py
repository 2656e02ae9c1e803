"""Results of a benchmark, kept in a file and written as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.diagnostics import switches
from trainkit.diagnostics.stepped_process import Ratio
from trainkit.errors import number_of
from trainkit.files import write_aside

LEAST = 1.01
"""Least speed-up of a setting that is chosen."""
LOSS_DRIFT = 0.02
"""Largest loss difference from float32, in any of the first steps, of a setting that is chosen."""
OUTPUT_DRIFT = 0.05
"""The same for the outputs after the first step, root mean square."""
TOGETHER = "together"
"""Title of what helps, measured together."""
_ALIKE = 1.05
"""An interval around 1 that is narrower than this, end over end, says that there is no difference."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measurements of one setting."""

    switch: str
    title: str
    words: tuple[str, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()
    gives_up: str = ""
    number: int = 0
    rates: tuple[float, ...] = ()
    """Samples a second, by repeat."""
    shipped: tuple[float, ...] = ()
    """Of the recipe as shipped, in the same repeats."""
    ratio: float | None = None
    low: float | None = None
    """Ends of the ratio's 95 % interval; None where the ratio was computed."""
    high: float | None = None
    memory_gb: float | None = None
    loss_drift: float | None = None
    """Greatest difference from float32, eager, in the first steps, as a share of the mean loss."""
    output_drift: float | None = None
    failed: str = ""
    """Why there are no figures."""
    note: str = ""

    @property
    def rate(self) -> float | None:
        """Samples a second, median over the repeats."""
        return float(np.median(self.rates)) if self.rates else None

    @property
    def interval(self) -> Ratio | None:
        """Ratio with its 95 % interval; None where it was computed, or there are no figures."""
        if self.ratio is None or self.low is None or self.high is None:
            return None
        return Ratio(self.ratio, self.low, self.high)

    @property
    def drifts(self) -> bool:
        """True where the difference from float32 is too large to be chosen."""
        limits = ((self.loss_drift, LOSS_DRIFT), (self.output_drift, OUTPUT_DRIFT))
        return any(drift is not None and not drift <= limit for drift, limit in limits)

    @property
    def helps(self) -> bool:
        """True where it is significantly faster, and by enough."""
        return self.interval is not None and self.interval.low > 1 and self.interval.value >= LEAST

    @property
    def choosable(self) -> bool:
        """True where the benchmark may choose it."""
        return self.helps and not self.failed and not self.gives_up and not self.drifts

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.failed:
            return self.failed
        if (found := self.interval) is None:
            return f"computed; not kept: {self.gives_up}"
        if found.high < 1:
            return "slower"
        if found.low <= 1:
            return "no difference" if found.high / found.low < _ALIKE else "inconclusive"
        if self.gives_up:
            return f"faster; not kept: {self.gives_up}"
        if self.drifts:
            return "faster; not kept: numerical drift"
        return "faster" if self.helps else f"faster by less than {100 * (LEAST - 1):.0f} %"


@dataclass
class BenchmarkState:
    """Results of a benchmark so far; a file, so that an interrupted one can be resumed."""

    machine: dict[str, Any] = field(default_factory=dict)
    shipped_gb: float | None = None
    shipped_drift: tuple[float | None, float | None] = (None, None)
    """Of loss and outputs of the recipe as shipped, from float32."""
    shipped: list[float] = field(default_factory=list)
    """Samples a second of the recipe as shipped, in all blocks."""
    compared: int = 0
    results: list[Result] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """Switches without anything to measure, and why."""

    def save(self, path: Path) -> None:
        """Write it; a crash leaves the old one."""
        write_aside(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> BenchmarkState:
        """Read it back; a file that is missing or cannot be read is a benchmark that begins."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(BenchmarkState)}
            state = BenchmarkState(**{key: value for key, value in kept.items() if key in known})
            state.results = [_result(values) for values in kept["results"]]
            loss, outputs = state.shipped_drift
            state.shipped_drift = (loss, outputs)
            return state
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return BenchmarkState()

    def found(self, switch: str, title: str) -> Result | None:
        """Return the result of a setting, where it was measured."""
        return next((r for r in self.results if (r.switch, r.title) == (switch, title)), None)


def _result(values: Mapping[str, Any]) -> Result:
    lists = {"words": tuple, "rates": tuple, "shipped": tuple, "environment": lambda v: tuple(tuple(e) for e in v)}
    return Result(**{key: lists[key](value) if key in lists else value for key, value in values.items()})


def metrics(result: Result) -> dict[str, float]:
    """Return the figures of a setting under names of metrics; what was not measured is not there."""
    found = {
        "speed/samples_per_s": result.rate,
        "speed/shipped_samples_per_s": float(np.median(result.shipped)) if result.shipped else None,
        "speed/ratio": result.ratio,
        "speed/ratio_low": result.low,
        "speed/ratio_high": result.high,
        "speed/peak_memory_gb": result.memory_gb,
        "speed/loss_drift": result.loss_drift,
        "speed/output_drift": result.output_drift,
    }
    return {name: value for name, value in found.items() if value is not None}


def describe(result: Result) -> str:
    """Return a result as a line."""
    head = f"{result.switch:18} {result.title}: "
    if result.failed:
        return head + result.failed
    if result.interval is None:
        return head + f"x {result.ratio:.3f} ({result.note}); {result.verdict}"
    parts = [f"{result.rate:.4g} samples/s", str(result.interval)]
    parts.append(f"{result.memory_gb:.2f} GB")
    if result.loss_drift is not None:
        parts.append(f"loss drift {_percent(result.loss_drift)}")
    return head + ", ".join(parts) + f": {result.verdict}" + (f" ({result.note})" if result.note else "")


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return "not finite" if math.isinf(share) else "0" if share == 0 else f"{100 * share:.2g} %"


def rows(state: BenchmarkState, kept: Result | None) -> list[dict[str, Any]]:
    """The table: one row for each setting, by column; the recipe as shipped first, switches without a setting last."""
    loss, outputs = state.shipped_drift
    table = [
        {
            "switch": "",
            "change": "as shipped",
            "samples_per_s": float(np.median(state.shipped)) if state.shipped else None,
            "ratio": 1.0,
            "low": None,
            "high": None,
            "memory_gb": state.shipped_gb,
            "loss_drift": loss,
            "output_drift": outputs,
            "words": "",
            "verdict": "",
        }
    ]
    for r in state.results:
        chosen = kept is not None and (r is kept or (kept.switch == TOGETHER and r.title in kept.title.split(" + ")))
        table.append(
            {
                "switch": r.switch,
                "change": r.title,
                "samples_per_s": r.rate,
                "ratio": r.ratio,
                "low": r.low,
                "high": r.high,
                "memory_gb": r.memory_gb,
                "loss_drift": r.loss_drift,
                "output_drift": r.output_drift,
                "words": " ".join([*r.words, *(f"{k}={v}" if v is not None else f"-{k}" for k, v in r.environment)]),
                "verdict": "kept" if chosen and r.choosable else r.verdict,
            }
        )
    return table


def largest(state: BenchmarkState) -> tuple[int, str] | None:
    """The largest micro-batch that was trained, and in words whether a larger one fits; None where none was tried."""
    tried = [result for result in state.results if result.switch == "batch"]
    fit = max((result.number for result in tried if not result.failed), default=0)
    over = next((result for result in tried if result.failed.startswith("out of memory")), None)
    if not fit:
        return None
    return fit, f"{over.number} is out of memory" if over is not None else "larger ones were not tried"


def table(state: BenchmarkState, kept: Result | None) -> str:
    """The table as text."""
    head = ["switch", "change", "samples/s", "ratio (95 % CI)", "GB", "loss drift", "output drift", ""]
    lines = [head]
    for row in rows(state, kept):
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        if row["low"] is not None:
            ratio += f" ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(
            [
                row["switch"],
                row["change"],
                "" if row["samples_per_s"] is None else f"{row['samples_per_s']:.4g}",
                ratio,
                "" if row["memory_gb"] is None else f"{row['memory_gb']:.2f}",
                _percent(row["loss_drift"]),
                _percent(row["output_drift"]),
                row["verdict"],
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    machine = state.machine
    where = machine.get("gpu") or f"{machine.get('cpu')} ({machine.get('instructions')})"
    text += [
        "",
        f"{where}, {machine.get('cores'):g} cores, {number_of(machine['threads'], 'threads')} as shipped, "
        f"torch {machine.get('torch')}, {switches.WORDS.get(machine['precision'], machine['precision'])} as "
        f"shipped. Drift is the difference from float32, eager: of the loss over the first {state.compared} steps, of "
        "the outputs after the first step.",
    ]
    if (most := largest(state)) is not None:
        text.append(f"micro-batch {most[0]} fits into memory; {most[1]}")
    text += [f"not measured  {name}: {why}" for name, why in state.absent.items()]
    return "\n".join(text)


def outcome(kept: Result | None) -> str:
    """Return what a benchmark has chosen, as a line."""
    if kept is None:
        return "no setting is significantly faster without a trade-off: keep the recipe as shipped"
    return f"kept: {kept.title}, {kept.interval}: {' '.join(kept.words) or 'environment variables only'}"

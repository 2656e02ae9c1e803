"""Compare settings of a recipe by throughput, one by one and together, on this machine.

Each setting and the recipe as it is train in separate processes, in alternating blocks of seconds (`stepped_process`).
The ratio is taken within each pair of adjacent blocks, and its interval over the pairs. The losses of the first steps
are compared with those of the recipe as it is. Settings that help are then measured together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.config.run_request import RunRequest
from trainkit.diagnostics import stepped_process
from trainkit.diagnostics.bench_settings import Axis, changes_training, compares_losses, merge
from trainkit.diagnostics.stepped_process import Block, Ratio, SteppedProcess, SteppedProcessError
from trainkit.errors import UserError
from trainkit.terminal import aligned

SECONDS = 2.0
"""Length of a block, unless the number of steps is given."""
LEAST = 1.01
"""Least speed-up of a setting that is kept."""
DRIFT = 0.02
"""Largest difference of a loss in the first steps, as a share of the mean loss, of a setting that is kept."""
TOGETHER = "together"
_COMPARED = (3, 10)
"""Least and most steps whose losses are compared; they also warm up."""
_COMPARED_SECONDS = 5.0
_ALIKE = 1.05
"""An interval around 1 that is narrower than this, end over end, says that there is no difference."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measurements of one setting."""

    words: tuple[str, ...]
    """Overrides that make the setting of the recipe."""
    rates: tuple[float, ...] = ()
    """Samples a second, by repeat."""
    base: tuple[float, ...] = ()
    """Of the recipe as it is, in the same repeats."""
    ratio: Ratio | None = None
    memory_gb: float | None = None
    loss_drift: float | None = None
    failed: str = ""
    """Why there are no figures."""
    changes: str = ""
    """How it changes the training; such a setting is measured and never kept."""
    note: str = ""

    @property
    def helps(self) -> bool:
        """True where it is significantly faster, by enough, and trains as the recipe does."""
        faster = self.ratio is not None and self.ratio.low > 1 and self.ratio.value >= LEAST
        return faster and not self.changes and not self._drifts

    @property
    def _drifts(self) -> bool:
        return self.loss_drift is not None and not self.loss_drift <= DRIFT

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.ratio is None:
            return self.failed
        if self.ratio.high < 1:
            return "slower"
        if self.ratio.low <= 1:
            return "no difference" if self.ratio.high / self.ratio.low < _ALIKE else "inconclusive"
        if self.changes or self._drifts:
            return f"faster; not kept: {self.changes or 'its losses differ'}"
        return "faster" if self.helps else f"faster by less than {100 * (LEAST - 1):.0f} %"

    def cells(self) -> list[str]:
        """Return the row of a table of results."""
        rate = f"{np.median(self.rates):.4g}" if self.rates else ""
        memory = "" if self.memory_gb is None else f"{self.memory_gb:.2f}"
        drift = "" if self.loss_drift is None else f"{100 * self.loss_drift:.2g} %"
        verdict = f"{self.verdict} ({self.note})" if self.note else self.verdict
        return [" ".join(self.words), rate, str(self.ratio or ""), memory, drift, verdict]


@dataclass
class Benchmark:
    """Compares settings with the recipe as it is. At most two trainings run at a time."""

    request: RunRequest
    repeats: int
    steps: int | None = None
    within: Path | None = None
    say: Callable[[str], object] = print
    results: list[Result] = field(default_factory=list)
    _base: SteppedProcess | None = None
    _losses: tuple[float, ...] = ()
    _step_s: float = 0.0
    _took: float = 0.0

    def open(self) -> SteppedProcess:
        """Return the training of the recipe as it is, started if need be. Raises UserError where it cannot train."""
        if self._base is None:
            try:
                self._base = self._start()
            except SteppedProcessError as error:
                raise error.user_error or UserError("the recipe as it is", error.reason) from None
        return self._base

    def _start(self) -> SteppedProcess:
        began = time.monotonic()
        child = self._child(())
        try:
            first = child.go(_COMPARED[0] - 1)
            losses, self._step_s = [*child.first.losses, *first.losses], min(first.each)
            least, most = _COMPARED
            if (more := int(min(max(_COMPARED_SECONDS / self._step_s, least), most)) - len(losses)) > 0:
                block = child.go(more)
                losses += block.losses
                self._step_s = float(np.median(block.each))
        except BaseException:
            child.close()
            raise
        self._losses, self._took = tuple(losses), time.monotonic() - began
        return child

    def close(self) -> None:
        """End the training of the recipe as it is."""
        if self._base is not None:
            self._base.close()
            self._base = None

    def seconds(self, axes: Sequence[Axis]) -> float:
        """Return about how many seconds it takes to measure these, and what helps together."""
        block = max(SECONDS, self._step_s) if self.steps is None else self.steps * self._step_s
        return (1 + sum(len(axis.values) for axis in axes)) * (self._took + 2 * self.repeats * block)

    def run(self, axes: Sequence[Axis]) -> None:
        """Measure each value alone, and then those that help together."""
        for axis in axes:
            best = 1.0
            for word in axis.words:
                found = self._try((word,))
                if axis.rising and (found.ratio is None or found.ratio.high * LEAST < best):
                    break
                best = max(best, found.ratio.value if found.ratio is not None else 0.0)
        fastest = [max(helping, key=_ratio) for axis in axes if (helping := self._helping(axis))]
        if len(fastest) > 1:
            self._try(tuple(word for result in fastest for word in result.words))

    def kept(self) -> Result | None:
        """Return the fastest of what helps, alone or together; or None."""
        return max((result for result in self.results if result.helps), key=_ratio, default=None)

    def table(self) -> str:
        """Return all results as text."""
        head = ["setting", "samples/s", "ratio (95 % CI)", "GB", "loss drift", ""]
        base = [rate for result in self.results for rate in result.base]
        as_is = ["as it is", f"{np.median(base):.4g}" if base else "", "1", "", "", ""]
        return "\n".join(line.rstrip() for line in aligned([head, as_is, *(r.cells() for r in self.results)]))

    def columns(self) -> dict[str, list[Any]]:
        """Return all results as columns of a table; what was not measured is NaN."""
        rows = [
            {
                "setting": " ".join(r.words),
                "samples_per_s": float(np.median(r.rates)) if r.rates else math.nan,
                "ratio": r.ratio.value if r.ratio else math.nan,
                "low": r.ratio.low if r.ratio else math.nan,
                "high": r.ratio.high if r.ratio else math.nan,
                "memory_gb": math.nan if r.memory_gb is None else r.memory_gb,
                "loss_drift": math.nan if r.loss_drift is None else r.loss_drift,
                "verdict": r.verdict,
            }
            for r in self.results
        ]
        return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}

    def _helping(self, axis: Axis) -> list[Result]:
        return [r for r in self.results if r.helps and len(r.words) == 1 and r.words[0] in axis.words]

    def _try(self, words: tuple[str, ...]) -> Result:
        result = self._measure(words)
        self.results.append(result)
        setting, rate, ratio, memory, _, verdict = result.cells()
        figures = f"{rate} samples/s, {ratio}, {memory} GB: " if rate else ""
        self.say(f"{f'{TOGETHER}: ' if len(words) > 1 else ''}{setting}: {figures}{verdict}")
        return result

    def _measure(self, words: tuple[str, ...]) -> Result:
        ready = self.open().ready
        keys = [word.partition("=")[0] for word in words]
        result = Result(words=words, changes=next(filter(None, (changes_training(key, ready) for key in keys)), ""))
        compares = all(map(compares_losses, keys))
        try:
            with self._child(words) as child:
                losses = self._begin(child)
                pairs = self._pairs(child)
        except SteppedProcessError as error:
            if error.kind == "memory" and ready.machine["device"] == "cuda":
                return self._alone(result, compares)
            return replace(result, failed=_why(error))
        rates, base = [b.rate for _, b in pairs], [a.rate for a, _ in pairs]
        figures = replace(result, ratio=stepped_process.ratio(rates, base), base=tuple(base))
        return self._with_blocks(figures, [b for _, b in pairs], losses if compares else ())

    def _alone(self, result: Result, compares: bool) -> Result:
        """Measure a setting that needs more memory than the recipe as it is leaves, after closing that."""
        self.close()
        try:
            with self._child(result.words) as child:
                losses, steps = self._begin(child), self._steps_in_block(child.go(1).seconds)
                blocks = [child.go(steps) for _ in range(self.repeats)]
        except SteppedProcessError as error:
            return replace(result, failed=_why(error))
        as_it_is, steps = self.open(), self._steps_in_block(self._step_s)
        base = [as_it_is.go(steps).rate for _ in range(self.repeats)]
        ratio = stepped_process.unpaired([block.rate for block in blocks], base)
        note = "out of memory beside the recipe as it is: not measured in alternating blocks"
        return self._with_blocks(
            replace(result, ratio=ratio, base=tuple(base), note=note), blocks, losses if compares else ()
        )

    def _with_blocks(self, result: Result, blocks: Sequence[Block], losses: tuple[float, ...]) -> Result:
        return replace(
            result,
            rates=tuple(block.rate for block in blocks),
            memory_gb=max(block.memory_gb for block in blocks),
            loss_drift=drift(losses, self._losses) if losses else None,
        )

    def _pairs(self, child: SteppedProcess) -> list[tuple[Block, Block]]:
        steps = self._steps_in_block(self._step_s), self._steps_in_block(child.go(1).seconds)
        try:
            return list(stepped_process.in_turns(self.open(), child, steps, self.repeats))
        except SteppedProcessError as error:
            if error.child is not self._base:
                raise
        # After thousands of steps at its full rate even a good recipe may diverge: it restarts once.
        self.close()
        base = self.open()
        try:
            return list(stepped_process.in_turns(base, child, steps, self.repeats))
        except SteppedProcessError as error:
            if error.child is base:
                raise error.user_error or UserError("the recipe as it is", error.reason) from None
            raise

    def _child(self, words: Sequence[str]) -> SteppedProcess:
        request = replace(self.request, overrides=merge(self.request.overrides, words), resume=None)
        return SteppedProcess(request, within=self.within)

    def _begin(self, child: SteppedProcess) -> tuple[float, ...]:
        """Run the first steps of a child, and return their losses."""
        return (*child.first.losses, *child.go(len(self._losses) - 1).losses)

    def _steps_in_block(self, seconds_each: float) -> int:
        return self.steps or max(1, round(SECONDS / max(seconds_each, 1e-6)))


def drift(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the greatest difference of a loss as a share of the mean loss; infinite for what is not finite."""
    a, b = np.asarray(losses), np.asarray(others)
    part, whole = float(np.max(np.abs(a - b))), float(np.mean(np.abs(b)))
    if not math.isfinite(part) or not math.isfinite(whole):
        return math.inf
    return part / whole if whole else (math.inf if part else 0.0)


def _why(error: SteppedProcessError) -> str:
    first = (error.reason.splitlines() or [""])[0][:300]
    return f"{'out of memory' if error.kind == 'memory' else 'failed'}: {first}"


def _ratio(result: Result) -> float:
    return result.ratio.value if result.ratio else 0.0

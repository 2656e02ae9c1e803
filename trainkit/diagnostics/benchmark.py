"""Compare settings of a recipe by throughput, one by one and together, on this machine.

Each setting and the recipe as it is train in separate processes, in alternating blocks of seconds (`stepped_process`).
The ratio is taken within each pair of adjacent blocks, and its interval over the pairs. The losses of the first steps
are compared with those of the recipe as it is. Settings that help are then measured together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trainkit.config.run_request import RunRequest
from trainkit.diagnostics import stepped_process
from trainkit.diagnostics.bench_settings import Axis, changes_training, compares_losses, merge
from trainkit.diagnostics.stepped_process import Ratio, Ready, SteppedProcess, SteppedProcessError
from trainkit.errors import UserError
from trainkit.terminal import aligned

SECONDS = 2.0
"""Length of a block, unless the number of steps is given."""
LEAST = 1.01
"""Least speed-up of a setting that is kept."""
DRIFT = 0.02
"""Largest difference of a loss in the first steps, as a share of the mean loss, of a setting that is kept."""
TOGETHER = "together"
COMPARED = 5
"""Steps whose losses are compared; they also warm up."""
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
        return [" ".join(self.words), rate, str(self.ratio or ""), memory, drift, self.verdict]


@dataclass
class Benchmark:
    """Compares settings with the recipe as it is. At most two trainings run at a time."""

    request: RunRequest
    repeats: int
    steps: int | None = None
    within: Path | None = None
    say: Callable[[str], object] = print
    results: list[Result] = field(default_factory=list)
    _took: float = 0.0

    @cached_property
    def ready(self) -> Ready:
        """Facts about the recipe as it is, which trains its first steps. Raises UserError where it cannot train."""
        began = time.monotonic()
        with self._as_it_is() as child:
            self._begin(child)
            self._took = time.monotonic() - began
            return child.ready

    def seconds(self, axes: Sequence[Axis]) -> float:
        """Return about how many seconds it takes to measure these, and what helps together."""
        each = 2 * (self._took + self.repeats * SECONDS) if self.steps is None else 2 * self._took * (1 + self.repeats)
        return (1 + sum(len(axis.values) for axis in axes)) * each

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
        keys = [word.partition("=")[0] for word in words]
        changes = next(filter(None, (changes_training(key, self.ready) for key in keys)), "")
        result = Result(words=words, changes=changes)
        with self._as_it_is() as base:
            expected = self._begin(base)
            try:
                with self._child(words) as child:
                    losses = self._begin(child)
                    steps = self._steps_in_block(base), self._steps_in_block(child)
                    pairs = list(stepped_process.in_turns(base, child, steps, self.repeats))
            except SteppedProcessError as error:
                if error.child is base:
                    raise
                return replace(result, failed=_why(error))
        as_is, blocks = zip(*pairs, strict=True)
        rates, base_rates = tuple(block.rate for block in blocks), tuple(block.rate for block in as_is)
        return replace(
            result,
            rates=rates,
            base=base_rates,
            ratio=stepped_process.ratio(rates, base_rates),
            memory_gb=max(block.memory_gb for block in blocks),
            loss_drift=drift(losses, expected) if all(map(compares_losses, keys)) else None,
        )

    @contextmanager
    def _as_it_is(self) -> Iterator[SteppedProcess]:
        """Train the recipe as it is. Raises UserError where that cannot be done."""
        try:
            with self._child(()) as child:
                yield child
        except SteppedProcessError as error:
            raise error.user_error or UserError("the recipe as it is", error.reason) from None

    def _child(self, words: Sequence[str]) -> SteppedProcess:
        request = replace(self.request, overrides=merge(self.request.overrides, words), resume=None)
        return SteppedProcess(request, within=self.within)

    def _begin(self, child: SteppedProcess) -> tuple[float, ...]:
        """Run the first steps of a child, which warm it up; returns their losses."""
        return (*child.first.losses, *child.go(COMPARED - 1).losses)

    def _steps_in_block(self, child: SteppedProcess) -> int:
        return self.steps or max(1, round(SECONDS / max(child.go(1).seconds, 1e-6)))


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

"""Measure the switches of a recipe one by one and together, on this machine.

Each setting and the recipe as shipped train in separate processes, in alternating blocks of seconds
(`stepped_process`). The ratio is taken within each pair of adjacent blocks, and its interval over the pairs. The losses
of the first steps are compared with float32, eager, on the same samples. Settings that help and drift little are then
measured together, and `--write` puts them into a copy of the recipe.

Results are kept in `benchmark.json` in the folder of the run; `--resume` does not measure them again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.diagnostics import stepped_process, switches
from trainkit.diagnostics.benchmark_report import (
    LEAST,
    TOGETHER,
    BenchmarkState,
    Result,
    describe,
)  # fmt: skip
from trainkit.diagnostics.stepped_process import Block, Ratio, SteppedProcess, SteppedProcessError
from trainkit.diagnostics.switches import Setting, Switch
from trainkit.errors import UserError
from trainkit.speed.eta import checkpoint_cost

SECONDS = 2.0
"""Length of a block, unless the number of steps is given."""
_COMPARED = (3, 10)
"""Least and most steps whose losses are compared; they also warm up."""
_COMPARED_SECONDS = 5.0
_OUTPUT_SECONDS = 30.0
"""Outputs that take longer than this are not compared."""


@dataclass(frozen=True)
class Start:
    """The first steps of a training, for the comparison with float32."""

    losses: tuple[float, ...]
    outputs: Mapping[str, np.ndarray]


class Benchmark:
    """Compares the settings of a recipe with the recipe as shipped. At most two trainings run at a time."""

    def __init__(
        self,
        request: RunRequest,
        recipe: Recipe,
        state: BenchmarkState,
        *,
        repeats: int,
        steps: int | None,
        within: Path | None = None,
        say: Callable[[str], object] = print,
        save: Callable[[Result | None], None] = lambda result: None,
    ):
        self._request, self._recipe, self.state = request, recipe, state
        self._repeats, self._steps, self._within, self._say, self._save = repeats, steps, within, say, save
        self._plain: SteppedProcess | None = None
        self._start: Start | None = None
        self._reference: Start | None = None
        self._step_s = self._took = self._begun = 0.0
        self._compare_outputs = True
        self._ready: stepped_process.Ready | None = None

    @property
    def ready(self) -> stepped_process.Ready:
        """Facts of the recipe as shipped. Raises RuntimeError before `open`."""
        if self._ready is None:
            raise RuntimeError("the recipe as shipped was not started")
        return self._ready

    @property
    def _shipped(self) -> SteppedProcess:
        if self._plain is None:
            raise RuntimeError("the recipe as shipped is not running")
        return self._plain

    def close(self) -> None:
        """End the training of the recipe as shipped."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None

    # ---- the recipe as shipped, and float32

    def open(self) -> None:
        """Start the recipe as shipped, unless it is there. Raises UserError where it cannot be trained."""
        if self._plain is not None:
            return
        try:
            self._open()
        except SteppedProcessError as error:
            self.close()
            raise error.user_error or UserError("the recipe as shipped", error.reason) from None

    def _open(self) -> None:
        began = time.monotonic()
        self._plain = self._child((), ())
        self._begun = time.monotonic() - began
        self._ready = self._plain.ready
        machine = dict(self.ready.machine)
        if self.state.machine and self.state.machine != machine:
            changed = [key for key in machine if machine[key] != self.state.machine.get(key)]
            was = ", ".join(f"{key} was {self.state.machine.get(key)} and is {machine[key]}" for key in changed)
            raise UserError(
                "--resume", f"the benchmark was started on another machine or version: {was}", remedy="remove --resume"
            )
        self.state.machine = machine
        if self._start is not None:  # it was there before, and made room for a moment
            self._plain.go(self.state.compared)
            return
        outputs, seconds = self._outputs(self._plain)
        self._compare_outputs = bool(outputs) and seconds <= _OUTPUT_SECONDS
        first = self._plain.go(_COMPARED[0] - 1)
        self._step_s = min(first.each)
        least, most = _COMPARED
        compared = int(min(max(_COMPARED_SECONDS / self._step_s, least), most))
        losses = [*self._plain.first.losses, *first.losses]
        if compared > len(losses):
            block = self._plain.go(compared - len(losses))
            losses += block.losses
            self._step_s = float(np.median(block.each))
        self.state.compared = compared
        self._start = Start(tuple(losses), outputs if self._compare_outputs else {})
        self._took = time.monotonic() - began
        self._reference = self._float32(machine)
        self.state.shipped_drift = drift(self._start, self._reference)

    def _float32(self, machine: Mapping[str, Any]) -> Start | None:
        device = self._recipe.device
        if machine["precision"] == "no" and machine["compile"] == "off" and not (machine["tf32"] and device.tf32):
            return self._start
        try:
            with self._child(switches.REFERENCE, ()) as child:
                return self._begin(child, compare=True)
        except SteppedProcessError as error:
            self._say(f"float32, eager: {error.reason}; drift is not measured")
            return None

    def _child(
        self, words: Sequence[str], environment: Sequence[tuple[str, str | None]], **more: Any
    ) -> SteppedProcess:
        request = replace(self._request, overrides=switches.merge(self._request.overrides, words), resume=None)
        return SteppedProcess(request, dict(environment), within=self._within, **more)

    def _begin(self, child: SteppedProcess, compare: bool) -> Start:
        """Run the first steps of a child after its first one: all that are compared, or the warm-up only."""
        outputs = child.outputs() if compare and self._compare_outputs else {}
        block = child.go((self.state.compared if compare else _COMPARED[0]) - 1)
        return Start((*child.first.losses, *block.losses), outputs)

    def _outputs(self, child: SteppedProcess) -> tuple[dict[str, np.ndarray], float]:
        began = time.monotonic()
        return child.outputs(), time.monotonic() - began

    def _steps_in_block(self, seconds_each: float) -> int:
        return self._steps or max(1, round(SECONDS / max(seconds_each, 1e-6)))

    # ---- Settings

    def estimate(self, chosen: Sequence[str]) -> tuple[int, float]:
        """Return how many settings these switches have, and about how many seconds the unmeasured ones take."""
        self.open()
        settings = [(switch, one) for switch in self.listed() if switch.name in chosen for one in switch.settings]
        left = [
            one for switch, one in settings if not switch.derived and self.state.found(switch.name, one.title) is None
        ]
        return len(settings), sum(map(self._expected, (*left, Setting(TOGETHER))))

    def _expected(self, one: Setting) -> float:
        """About how many seconds a setting takes, if its samples take as long as those of the recipe as shipped."""
        sizes = (word.partition("=")[2] for word in one.words if word.startswith("train.batch_size="))
        step = self._step_s * int(next(sizes, self.ready.batch_size)) / self.ready.batch_size
        before = self._took if one.same_samples else self._begun + _COMPARED[0] * step
        blocks = self._steps_in_block(self._step_s) * self._step_s, self._steps_in_block(step) * step
        return before + step + self._repeats * sum(blocks)

    def listed(self) -> list[Switch]:
        """All switches, as far as is known now."""
        best = self._best_of("workers")
        workers = best.number if best is not None else None
        return switches.listed(self._recipe, self.ready, os.environ, workers)

    def _best_of(self, switch: str) -> Result | None:
        """Return the fastest setting of a switch that may be chosen."""
        found = [r for r in self.state.results if r.switch == switch and r.choosable]
        return max(found, key=_ratio, default=None)

    def run(self, chosen: Sequence[str]) -> None:
        """Measure the settings of these switches, and then what helps, together."""
        self.open()
        for name in switches.NAMES:
            if name in chosen:
                switch = next(switch for switch in self.listed() if switch.name == name)
                self._run_switch(switch)
        self._together()

    def _run_switch(self, switch: Switch) -> None:
        if not switch.settings:
            self.state.absent[switch.name] = switch.absent or "no other setting"
            self._say(f"{switch.name:18} not measured: {self.state.absent[switch.name]}")
            return
        if switch.derived:
            self._compute(switch)
            return
        best = 1.0
        for one in switch.settings:
            result = self._try(switch.name, one)
            if result.ratio is not None:
                if switch.ends_when_slower and (result.high or math.inf) * LEAST < best:
                    break
                best = max(best, result.ratio)
            elif switch.ends_when_slower or switch.ends_when_full:
                break
        if switch.name == "workers":
            self._refine(switch)

    def _refine(self, switch: Switch) -> None:
        """Look for the best number of workers between those that were tried."""
        best = self._best_of("workers")
        if best is not None:
            tried = {one.number for one in switch.settings} | {self._recipe.loader.workers}
            for number in switches.refine(sorted(tried), best.number, int(self.ready.machine["cores"])):
                self._try("workers", switches.with_workers(number))

    def _try(self, switch: str, one: Setting) -> Result:
        found = self.state.found(switch, one.title)
        if found is None:
            found = self._measure(switch, one)
            self._keep(found)
        self._say(describe(found))
        return found

    def _keep(self, result: Result) -> None:
        self.state.results.append(result)
        self._save(result)

    def _measure(self, switch: str, one: Setting) -> Result:
        result = Result(
            switch=switch,
            title=one.title,
            words=one.words,
            environment=one.environment,
            gives_up=one.gives_up,
            number=one.number,
        )
        self.open()
        try:
            with self._child(one.words, one.environment) as child:
                start = self._begin(child, one.same_samples)
                pairs = self._pairs(child)
        except SteppedProcessError as error:
            if error.kind == "memory" and self.ready.machine["device"] == "cuda":
                return self._alone(result, one)
            return replace(result, failed=_why(error))
        rates, shipped = [b.rate for _, b in pairs], [a.rate for a, _ in pairs]
        self.state.shipped += shipped
        self.state.shipped_gb = max([self.state.shipped_gb or 0.0, *(a.memory_gb for a, _ in pairs)])
        return self._figures(
            result, one, start, stepped_process.ratio(rates, shipped), rates, shipped, [b for _, b in pairs]
        )

    def _pairs(self, child: SteppedProcess) -> list[tuple[Block, Block]]:
        own = child.go(1)
        steps = self._steps_in_block(self._step_s), self._steps_in_block(own.seconds)
        try:
            return list(stepped_process.in_turns(self._shipped, child, steps, self._repeats))
        except SteppedProcessError as error:
            if error.child is not self._plain:
                raise
            # After thousands of steps at its full rate even a good recipe may diverge: it restarts once.
            self.close()
            self.open()
            try:
                return list(stepped_process.in_turns(self._shipped, child, steps, self._repeats))
            except SteppedProcessError as again:
                if again.child is self._plain:
                    raise again.user_error or UserError("the recipe as shipped", again.reason) from None
                raise

    def _alone(self, result: Result, one: Setting) -> Result:
        """Measure a setting that needs more memory than the recipe as shipped leaves, after closing that."""
        self.close()
        try:
            with self._child(one.words, one.environment) as child:
                start = self._begin(child, one.same_samples)
                own = child.go(1)
                blocks = [child.go(self._steps_in_block(own.seconds)) for _ in range(self._repeats)]
        except SteppedProcessError as error:
            return replace(result, failed=_why(error))
        finally:
            self.open()
        shipped = [self._shipped.go(self._steps_in_block(self._step_s)).rate for _ in range(self._repeats)]
        rates = [block.rate for block in blocks]
        result = replace(result, note="out of memory next to the recipe as shipped: not measured in alternating blocks")
        return self._figures(result, one, start, stepped_process.unpaired(rates, shipped), rates, shipped, blocks)

    def _figures(
        self,
        result: Result,
        one: Setting,
        start: Start,
        ratio: Ratio,
        rates: Sequence[float],
        shipped: Sequence[float],
        blocks: Sequence[Block],
    ) -> Result:
        loss, outputs = drift(start, self._reference) if one.same_samples else (None, None)
        return replace(
            result,
            rates=tuple(rates),
            shipped=tuple(shipped),
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            memory_gb=max(block.memory_gb for block in blocks),
            loss_drift=loss,
            output_drift=outputs,
        )

    def _compute(self, switch: Switch) -> None:
        """Compute the effect of fewer evaluations or checkpoints from the seconds of one and the recipe's plan."""
        left = [one for one in switch.settings if self.state.found(switch.name, one.title) is None]
        costs: dict[str, float] = {}
        if left:
            try:
                costs = self._costs(switch.name)
            except SteppedProcessError as error:
                for one in left:
                    failed = Result(switch=switch.name, title=one.title, words=one.words, failed=_why(error))
                    self._keep(replace(failed, gives_up=one.gives_up))
                left = []
        for one in left:
            changed = load(replace(self._request, overrides=switches.merge(self._request.overrides, one.words)))
            before, after = (seconds(r, self.ready, self._step_s, costs) for r in (self._recipe, changed))
            took = ", ".join(f"{name} {cost:.2g} s" for name, cost in costs.items())
            self._keep(
                Result(
                    switch=switch.name,
                    title=one.title,
                    words=one.words,
                    gives_up=one.gives_up,
                    number=one.number,
                    ratio=before / after,
                    note=f"for the whole training, computed from {took}",
                )
            )
        for one in switch.settings:
            if (result := self.state.found(switch.name, one.title)) is not None:
                self._say(describe(result))

    def _costs(self, switch: str) -> dict[str, float]:
        """Return the seconds of one evaluation or checkpoint."""
        if switch == "evaluations":
            twice = 2 if self._recipe.train.ema else 1
            return {name: twice * self._shipped.evaluate(name)[0] for name in self._recipe.evaluations}
        with self._child(("checkpoints.every=1 step",), (), keep=("checkpoints",)) as child:
            block = child.go(3)
        written = block.phases["checkpoint"] / block.steps  # each waits for the one before
        apart = max(3, math.ceil(written / self._step_s) + 1)
        with self._child((f"checkpoints.every={apart} steps",), (), keep=("checkpoints",)) as child:
            peace, beside = child.go(apart - 1), child.go(apart)
        slowed = beside.steps * (np.median(beside.each) - np.median(peace.each))
        return {"checkpoint": beside.phases["checkpoint"] + max(0.0, float(slowed)), "writing": written}

    # ---- together

    def _together(self) -> None:
        best = [result for name in switches.NAMES if (result := self._best_of(name)) is not None]
        # A later one that sets a key of an earlier one, as prefetch sets workers, stands in its place if it is faster.
        best.sort(key=_ratio, reverse=True)
        taken: list[Result] = []
        for result in best:
            clash = [other for other in taken if _keys(other) & _keys(result)]
            if not clash:
                taken.append(result)
        if len(taken) > 1:
            words: tuple[str, ...] = ()
            for result in taken:
                words = switches.merge(words, result.words)
            environment = tuple(dict(pair for result in taken for pair in result.environment).items())
            self._try(TOGETHER, Setting(" + ".join(result.title for result in taken), words, environment))

    def kept(self) -> Result | None:
        """Return the choice: the settings together, or the best single one where together is not better; or None."""
        single = max((r for r in self.state.results if r.choosable and r.switch != TOGETHER), key=_ratio, default=None)
        joint = [r for r in self.state.results if r.switch == TOGETHER and r.choosable]
        if single is not None and joint and _ratio(joint[-1]) >= _ratio(single):
            return joint[-1]
        return single


def _why(error: SteppedProcessError) -> str:
    first = (error.reason.splitlines() or [""])[0][:300]
    return f"{'out of memory' if error.kind == 'memory' else 'failed'}: {first}"


def _ratio(result: Result) -> float:
    return result.ratio or 0.0


def _keys(result: Result) -> set[str]:
    return {word.partition("=")[0] for word in result.words} | {key for key, _ in result.environment}


def drift(start: Start, reference: Start | None) -> tuple[float | None, float | None]:
    """Return how far losses and outputs are from the reference.

    Greatest difference of a loss, as a share of the mean loss; and root mean square of the difference of outputs, as a
    share of the outputs', of the column where it is greatest. None where there is nothing to compare. Infinite where
    one is not a number and the other is.
    """
    if reference is None:
        return None, None
    many = min(len(start.losses), len(reference.losses))
    a, b = np.asarray(start.losses[:many]), np.asarray(reference.losses[:many])
    loss = _share(float(np.max(np.abs(a - b))), float(np.mean(np.abs(b)))) if many else None
    outputs = None
    for key, found in start.outputs.items():
        there = reference.outputs.get(key)
        if there is None or there.shape != found.shape or not found.size:
            continue
        x, y = found.astype(np.float64), there.astype(np.float64)
        both = np.isnan(x) & np.isnan(y)
        x, y = np.where(both, 0, x), np.where(both, 0, y)
        share = _share(float(np.sqrt(np.mean((x - y) ** 2))), float(np.sqrt(np.mean(y**2))))
        outputs = share if outputs is None else max(outputs, share)
    return loss, outputs


def _share(part: float, whole: float) -> float:
    if not math.isfinite(part) or not math.isfinite(whole):
        return math.inf
    return part / whole if whole else (math.inf if part else 0.0)


def seconds(recipe: Recipe, ready: stepped_process.Ready, step_s: float, costs: Mapping[str, float]) -> float:
    """Seconds of a whole training at `step_s` seconds per step: steps, and the events in `costs` between them.

    Names of `costs` are evaluations; `checkpoint`, the seconds for which one blocks training; and `writing`, the
    seconds one takes to write. An evaluation with a budget takes no more than that share.
    """
    per_epoch, batch = ready.steps_per_epoch, ready.batch_size
    steps = recipe.train.length.steps(per_epoch, batch)
    training_s = steps * step_s
    total = training_s

    def times(every: Span | None, at_end: bool) -> float:
        if every is None:
            return float(at_end)
        events = training_s / every.seconds if every.timed else steps // every.steps(per_epoch, batch)
        exact = not every.timed and steps % every.steps(per_epoch, batch) == 0
        return events + (at_end and not exact)

    for name, evaluation in recipe.evaluations.items():
        if name in costs:
            spent = costs[name] * times(evaluation.every, False)
            if evaluation.budget:
                spent = min(spent, training_s * evaluation.budget / (1 - evaluation.budget))
            ends = times(evaluation.every, evaluation.at_end) - times(evaluation.every, False)
            total += spent + costs[name] * (ends + evaluation.at_start)
    if "checkpoint" in costs:
        many, written = times(recipe.checkpoints.every, recipe.checkpoints.at_end), costs.get("writing", 0.0)
        each = checkpoint_cost(costs["checkpoint"], written, training_s / max(many, 1))
        total += each * many + (max(0.0, written - each) if recipe.checkpoints.at_end else 0.0)
    return total

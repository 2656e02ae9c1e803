"""The ladder: the switches of a recipe measured one by one and together, on this machine.

Every try trains beside the recipe as shipped, in processes of their own, in blocks of seconds that take turns
(`paced`): the ratio is of neighbours in time, its interval from their repeats. The first updates of every try are
compared with those of float32, eager: the same samples, so that what differs is arithmetic. What helps and drifts
little is measured together, and `--write` puts it into a copy of the recipe.

What is done is kept in `ladder.json` in the folder of the ladder's run; with `--resume` it is not measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.config import loader, yaml_editor
from trainkit.config.run_request import Order, load
from trainkit.config.schema import Recipe
from trainkit.diagnostics import stepped_process, switches
from trainkit.diagnostics.stepped_process import Block, Paced, PaceError, Ratio
from trainkit.diagnostics.switches import Rung, Try
from trainkit.errors import UserError, number_of
from trainkit.files import write_aside
from trainkit.speed.eta import checkpoint_cost
from trainkit.tracking.run_lifecycle import about, begin, ending
from trainkit.tracking.store import Store

LEAST = 1.01
"""Ratio from which a switch is worth a line in a recipe."""
LOSS_DRIFT = 0.02
"""Of the loss: what is chosen may differ from float32 by so much in any of the first updates."""
OUTPUT_DRIFT = 0.05
"""Of the outputs, root mean squares: the same after the first update."""
SECONDS = 2.0
"""Of a block, where the number of updates is not given."""
TOGETHER = "together"
_COMPARED = (3, 10)
"""Least and most updates whose losses are compared; they warm up too."""
_COMPARED_SECONDS = 5.0
_OUTPUT_SECONDS = 30.0
"""Outputs that take longer than this are not compared."""
_ALIKE = 1.05
"""An interval around 1 that is narrower than this, end over end, says that there is no difference."""
_STATE = "ladder.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured of one try."""

    rung: str
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
    """Greatest difference from float32, eager, in the first updates, as a share of the mean loss."""
    output_drift: float | None = None
    failed: str = ""
    """Why there are no figures."""
    note: str = ""

    @property
    def rate(self) -> float | None:
        """Samples a second, median over the repeats."""
        return float(np.median(self.rates)) if self.rates else None

    @property
    def drifts(self) -> bool:
        """Whether it differs from float32 by more than is chosen without asking."""
        limits = ((self.loss_drift, LOSS_DRIFT), (self.output_drift, OUTPUT_DRIFT))
        return any(drift is not None and not drift <= limit for drift, limit in limits)

    @property
    def helps(self) -> bool:
        """Whether it is faster beyond doubt, and by enough to be worth a line."""
        return self.low is not None and self.low > 1 and self.ratio >= LEAST

    @property
    def choosable(self) -> bool:
        """Whether the ladder may choose it."""
        return self.helps and not self.failed and not self.gives_up and not self.drifts

    @property
    def verdict(self) -> str:
        """In words."""
        if self.failed:
            return self.failed
        if self.low is None:
            return f"computed, not chosen: {self.gives_up}"
        if self.high < 1:
            return "slower"
        if self.low <= 1:
            return "no difference" if self.high / self.low < _ALIKE else "not certain"
        if self.gives_up:
            return f"faster, not chosen: {self.gives_up}"
        if self.drifts:
            return "faster, not chosen: it drifts"
        return "faster" if self.helps else f"faster by less than {100 * (LEAST - 1):.0f} %"


@dataclass
class State:
    """What a ladder has found so far; a file, so that an interrupted one goes on."""

    machine: dict[str, Any] = field(default_factory=dict)
    shipped_gb: float | None = None
    shipped_drift: tuple[float | None, float | None] = (None, None)
    """Of loss and outputs of the recipe as shipped, from float32."""
    shipped: list[float] = field(default_factory=list)
    """Samples a second of the recipe as shipped, in all blocks."""
    compared: int = 0
    results: list[Result] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """Rungs without anything to measure, and why."""

    def save(self, path: Path) -> None:
        """Write it; a crash leaves the old one."""
        write_aside(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> State:
        """Read it back; a file that is missing or cannot be read is a ladder that begins."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(State)}
            state = State(**{key: value for key, value in kept.items() if key in known})
            state.results = [_result(values) for values in kept["results"]]
            state.shipped_drift = tuple(state.shipped_drift)
            return state
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return State()

    def found(self, rung: str, title: str) -> Result | None:
        """What was measured of a try."""
        return next((r for r in self.results if (r.rung, r.title) == (rung, title)), None)


def _result(values: Mapping[str, Any]) -> Result:
    lists = {"words": tuple, "rates": tuple, "shipped": tuple, "environment": lambda v: tuple(tuple(e) for e in v)}
    return Result(**{key: lists[key](value) if key in lists else value for key, value in values.items()})


@dataclass(frozen=True)
class Start:
    """The first updates of a training: what is compared with float32."""

    losses: tuple[float, ...]
    outputs: Mapping[str, np.ndarray]


class Ladder:
    """Measures the tries of a recipe beside the recipe as shipped. At most two trainings are alive at a time."""

    def __init__(
        self,
        order: Order,
        recipe: Recipe,
        state: State,
        *,
        repeats: int,
        steps: int | None,
        within: Path | None = None,
        say: Callable[[str], Any] = print,
        save: Callable[[Result | None], None] = lambda result: None,
    ):
        self._order, self._recipe, self.state = order, recipe, state
        self._repeats, self._steps, self._within, self._say, self._save = repeats, steps, within, say, save
        self._plain: Paced | None = None
        self._start: Start | None = None
        self._reference: Start | None = None
        self._pace = self._took = self._begun = 0.0
        self._compare_outputs = True
        self.ready: stepped_process.Ready | None = None

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
        except PaceError as error:
            self.close()
            raise error.mistake or UserError("the recipe as shipped", error.reason) from None

    def _open(self) -> None:
        began = time.monotonic()
        self._plain = self._child((), ())
        self._begun = time.monotonic() - began
        self.ready = self._plain.ready
        machine = dict(self.ready.machine)
        if self.state.machine and self.state.machine != machine:
            changed = [key for key in machine if machine[key] != self.state.machine.get(key)]
            was = ", ".join(f"{key} was {self.state.machine.get(key)} and is {machine[key]}" for key in changed)
            raise UserError("--resume", f"the ladder was begun elsewhere: {was}", remedy="leave --resume out")
        self.state.machine = machine
        if self._start is not None:  # it was there before, and made room for a moment
            self._plain.go(self.state.compared)
            return
        outputs, seconds = self._outputs(self._plain)
        self._compare_outputs = bool(outputs) and seconds <= _OUTPUT_SECONDS
        first = self._plain.go(_COMPARED[0] - 1)
        self._pace = min(first.each)
        least, most = _COMPARED
        compared = int(min(max(_COMPARED_SECONDS / self._pace, least), most))
        losses = [*self._plain.first.losses, *first.losses]
        if compared > len(losses):
            block = self._plain.go(compared - len(losses))
            losses += block.losses
            self._pace = float(np.median(block.each))
        self.state.compared = compared
        self._start = Start(tuple(losses), outputs if self._compare_outputs else {})
        self._took = time.monotonic() - began
        self._reference = self._float32(machine)
        self.state.shipped_drift = drift(self._start, self._reference)

    def _float32(self, machine: Mapping[str, Any]) -> Start | None:
        train, device = self._recipe.train, self._recipe.device
        if machine["precision"] == "no" and train.compile == "off" and not (machine["tf32"] and device.tf32):
            return self._start
        try:
            with self._child(switches.REFERENCE, ()) as child:
                return self._begin(child, compare=True)
        except PaceError as error:
            self._say(f"float32, eager: {error.reason}; drift is left out")
            return None

    def _child(self, words: Sequence[str], environment: Sequence[tuple[str, str | None]], **more: Any) -> Paced:
        order = replace(self._order, overrides=switches.merge(self._order.overrides, words), resume=None)
        return Paced(order, dict(environment), within=self._within, **more)

    def _begin(self, child: Paced, compare: bool) -> Start:
        """The first updates of a child that has made one: as many as are compared, or only those that warm it up."""
        outputs = child.outputs() if compare and self._compare_outputs else {}
        block = child.go((self.state.compared if compare else _COMPARED[0]) - 1)
        return Start((*child.first.losses, *block.losses), outputs)

    def _outputs(self, child: Paced) -> tuple[dict[str, np.ndarray], float]:
        began = time.monotonic()
        return child.outputs(), time.monotonic() - began

    def _updates(self, seconds_each: float) -> int:
        return self._steps or max(1, round(SECONDS / max(seconds_each, 1e-6)))

    # ---- tries

    def estimate(self, chosen: Sequence[str]) -> tuple[int, float]:
        """How many tries there are in these rungs, and about how many seconds what is not measured yet will take."""
        self.open()
        tries = [(rung, one) for rung in self.listed() if rung.name in chosen for one in rung.tries]
        left = [one for rung, one in tries if not rung.derived and self.state.found(rung.name, one.title) is None]
        return len(tries), sum(map(self._expected, (*left, Try(TOGETHER))))

    def _expected(self, one: Try) -> float:
        """About how many seconds a try takes, if its samples take as long as those of the recipe as shipped."""
        sizes = (word.partition("=")[2] for word in one.words if word.startswith("train.batch_size="))
        update = self._pace * int(next(sizes, self.ready.batch_size)) / self.ready.batch_size
        before = self._took if one.same_samples else self._begun + _COMPARED[0] * update
        blocks = self._updates(self._pace) * self._pace, self._updates(update) * update
        return before + update + self._repeats * sum(blocks)

    def listed(self) -> list[Rung]:
        """All rungs, as far as is known now."""
        best = self._best_of("workers")
        workers = best.number if best is not None else None
        return switches.listed(self._recipe, self.ready, os.environ, workers)

    def _best_of(self, rung: str) -> Result | None:
        """The fastest try of a rung that may be chosen."""
        found = [r for r in self.state.results if r.rung == rung and r.choosable]
        return max(found, key=lambda r: r.ratio, default=None)

    def climb(self, chosen: Sequence[str]) -> None:
        """Measure the tries of these rungs, and then what helps, together."""
        self.open()
        for name in switches.NAMES:
            if name in chosen:
                rung = next(rung for rung in self.listed() if rung.name == name)
                self._climb(rung)
        self._together()

    def _climb(self, rung: Rung) -> None:
        if not rung.tries:
            self.state.absent[rung.name] = rung.absent or "there is nothing else to try"
            self._say(f"{rung.name:18} not measured: {self.state.absent[rung.name]}")
            return
        if rung.derived:
            self._compute(rung)
            return
        best = 1.0
        for one in rung.tries:
            result = self._try(rung.name, one)
            if result.ratio is not None:
                if rung.climbs and result.high * LEAST < best:
                    break
                best = max(best, result.ratio)
            elif rung.climbs or rung.fills:
                break
        if rung.name == "workers":
            self._refine(rung)

    def _refine(self, rung: Rung) -> None:
        """Look for the best number of workers between those that were tried."""
        best = self._best_of("workers")
        if best is not None:
            tried = {one.number for one in rung.tries} | {self._recipe.loader.workers}
            for number in switches.refine(sorted(tried), best.number, int(self.ready.machine["cores"])):
                self._try("workers", switches.with_workers(number))

    def _try(self, rung: str, one: Try) -> Result:
        found = self.state.found(rung, one.title)
        if found is None:
            found = self._measure(rung, one)
            self._keep(found)
        self._say(said(found))
        return found

    def _keep(self, result: Result) -> None:
        self.state.results.append(result)
        self._save(result)

    def _measure(self, rung: str, one: Try) -> Result:
        result = Result(
            rung=rung,
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
        except PaceError as error:
            if error.kind == "memory" and self.ready.machine["device"] == "cuda":
                return self._alone(result, one)
            return replace(result, failed=_why(error))
        rates, shipped = [b.rate for _, b in pairs], [a.rate for a, _ in pairs]
        self.state.shipped += shipped
        self.state.shipped_gb = max([self.state.shipped_gb or 0.0, *(a.memory_gb for a, _ in pairs)])
        return self._figures(
            result, one, start, stepped_process.ratio(rates, shipped), rates, shipped, [b for _, b in pairs]
        )

    def _pairs(self, child: Paced) -> list[tuple[Block, Block]]:
        own = child.go(1)
        updates = self._updates(self._pace), self._updates(own.seconds)
        try:
            return list(stepped_process.in_turns(self._plain, child, updates, self._repeats))
        except PaceError as error:
            if error.child is not self._plain:
                raise
            # After thousands of updates at its full rate even a sound recipe may diverge: it begins again, once.
            self.close()
            self.open()
            try:
                return list(stepped_process.in_turns(self._plain, child, updates, self._repeats))
            except PaceError as again:
                if again.child is self._plain:
                    raise again.mistake or UserError("the recipe as shipped", again.reason) from None
                raise

    def _alone(self, result: Result, one: Try) -> Result:
        """A try that does not fit beside the recipe as shipped, measured after that has made room."""
        self.close()
        try:
            with self._child(one.words, one.environment) as child:
                start = self._begin(child, one.same_samples)
                own = child.go(1)
                blocks = [child.go(self._updates(own.seconds)) for _ in range(self._repeats)]
        except PaceError as error:
            return replace(result, failed=_why(error))
        finally:
            self.open()
        shipped = [self._plain.go(self._updates(self._pace)).rate for _ in range(self._repeats)]
        rates = [block.rate for block in blocks]
        result = replace(result, note="too large to stand beside the recipe as shipped: not measured in turns")
        return self._figures(result, one, start, stepped_process.unpaired(rates, shipped), rates, shipped, blocks)

    def _figures(
        self,
        result: Result,
        one: Try,
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

    def _compute(self, rung: Rung) -> None:
        """What fewer evaluations or checkpoints would bring, from the seconds of one and the recipe's plan."""
        left = [one for one in rung.tries if self.state.found(rung.name, one.title) is None]
        costs: dict[str, float] = {}
        if left:
            try:
                costs = self._costs(rung.name)
            except PaceError as error:
                for one in left:
                    failed = Result(rung=rung.name, title=one.title, words=one.words, failed=_why(error))
                    self._keep(replace(failed, gives_up=one.gives_up))
                left = []
        for one in left:
            changed = load(replace(self._order, overrides=switches.merge(self._order.overrides, one.words)))
            before, after = (seconds(r, self.ready, self._pace, costs) for r in (self._recipe, changed))
            took = ", ".join(f"{name} {cost:.2g} s" for name, cost in costs.items())
            self._keep(
                Result(
                    rung=rung.name,
                    title=one.title,
                    words=one.words,
                    gives_up=one.gives_up,
                    number=one.number,
                    ratio=before / after,
                    note=f"of the whole training; computed from {took}",
                )
            )
        for one in rung.tries:
            self._say(said(self.state.found(rung.name, one.title)))

    def _costs(self, rung: str) -> dict[str, float]:
        """Seconds of one of what is held between updates."""
        if rung == "evaluations":
            twice = 2 if self._recipe.train.ema else 1
            return {name: twice * self._plain.evaluate(name)[0] for name in self._recipe.evaluations}
        with self._child(("checkpoints.every=1 step",), (), keep=("checkpoints",)) as child:
            block = child.go(3)
        written = block.phases["checkpoint"] / block.updates  # each waits for the one before
        apart = max(3, math.ceil(written / self._pace) + 1)
        with self._child((f"checkpoints.every={apart} steps",), (), keep=("checkpoints",)) as child:
            peace, beside = child.go(apart - 1), child.go(apart)
        slowed = beside.updates * (np.median(beside.each) - np.median(peace.each))
        return {"checkpoint": beside.phases["checkpoint"] + max(0.0, float(slowed)), "writing": written}

    # ---- together

    def _together(self) -> None:
        best = [result for name in switches.NAMES if (result := self._best_of(name)) is not None]
        # A later one that sets a key of an earlier one, as prefetch sets workers, stands in its place if it is faster.
        best.sort(key=lambda result: -result.ratio)
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
            self._try(TOGETHER, Try(" + ".join(result.title for result in taken), words, environment))

    def kept(self) -> Result | None:
        """What is chosen: what helps together, or the best alone where together is not better; None for nothing."""
        single = max((r for r in self.state.results if r.choosable and r.rung != TOGETHER), key=_ratio, default=None)
        joint = [r for r in self.state.results if r.rung == TOGETHER and r.choosable]
        if single is not None and joint and joint[-1].ratio >= single.ratio:
            return joint[-1]
        return single


def _why(error: PaceError) -> str:
    first = (error.reason.splitlines() or [""])[0][:300]
    return f"{'out of memory' if error.kind == 'memory' else 'failed'}: {first}"


def _ratio(result: Result) -> float:
    return result.ratio


def _keys(result: Result) -> set[str]:
    return {word.partition("=")[0] for word in result.words} | {key for key, _ in result.environment}


def drift(start: Start, reference: Start | None) -> tuple[float | None, float | None]:
    """How far losses and outputs are from the reference's: greatest difference of a loss, as a share of the mean loss;
    root mean square of the difference of outputs, as a share of the outputs', of the column where it is greatest.

    None where there is nothing to compare. Infinite where one is not a number and the other is.
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


def seconds(recipe: Recipe, ready: stepped_process.Ready, pace: float, costs: Mapping[str, float]) -> float:
    """Seconds of a whole training at `pace` seconds an update: updates, and what of `costs` is held in between.

    Names of `costs` are evaluations; `checkpoint`, for how long one beside the training holds it up; and `writing`, how
    long one takes. An evaluation with a budget takes no more than that share.
    """
    per_epoch, batch = ready.steps_per_epoch, ready.batch_size
    steps = recipe.train.length.steps(per_epoch, batch)
    learned = steps * pace
    total = learned

    def times(every: Any, at_end: bool) -> float:
        if every is None:
            return float(at_end)
        held = learned / every.seconds if every.timed else steps // every.steps(per_epoch, batch)
        exact = not every.timed and steps % every.steps(per_epoch, batch) == 0
        return held + (at_end and not exact)

    for name, evaluation in recipe.evaluations.items():
        if name in costs:
            spent = costs[name] * times(evaluation.every, False)
            if evaluation.budget:
                spent = min(spent, learned * evaluation.budget / (1 - evaluation.budget))
            ends = times(evaluation.every, evaluation.at_end) - times(evaluation.every, False)
            total += spent + costs[name] * (ends + evaluation.at_start)
    if "checkpoint" in costs:
        many, written = times(recipe.checkpoints.every, recipe.checkpoints.at_end), costs.get("writing", 0.0)
        each = checkpoint_cost(costs["checkpoint"], written, learned / max(many, 1))
        total += each * many + (max(0.0, written - each) if recipe.checkpoints.at_end else 0.0)
    return total


# ---- In words --------------------------------------------------------------------------------------------------------


def said(result: Result) -> str:
    """A result as a line."""
    head = f"{result.rung:18} {result.title}: "
    if result.failed:
        return head + result.failed
    if result.low is None:
        return head + f"x {result.ratio:.3f} ({result.note}); {result.verdict}"
    parts = [f"{result.rate:.4g} samples/s", f"x {result.ratio:.3f} ({result.low:.3f} to {result.high:.3f})"]
    parts.append(f"{result.memory_gb:.2f} GB")
    if result.loss_drift is not None:
        parts.append(f"loss {_percent(result.loss_drift)} off float32")
    return head + ", ".join(parts) + f": {result.verdict}" + (f" ({result.note})" if result.note else "")


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return "not finite" if math.isinf(share) else "0" if share == 0 else f"{100 * share:.2g} %"


def rows(state: State, kept: Result | None) -> list[dict[str, Any]]:
    """The table: one row for each try, by column; the recipe as shipped first, rungs without a try last."""
    loss, outputs = state.shipped_drift
    table = [
        {
            "rung": "",
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
        chosen = kept is not None and (r is kept or (kept.rung == TOGETHER and r.title in kept.title.split(" + ")))
        table.append(
            {
                "rung": r.rung,
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


def largest(state: State) -> tuple[int, str] | None:
    """The largest micro-batch that was trained, and in words whether a larger one fits; None where none was tried."""
    tried = [result for result in state.results if result.rung == "batch"]
    fit = max((result.number for result in tried if not result.failed), default=0)
    over = next((result for result in tried if result.failed.startswith("out of memory")), None)
    if not fit:
        return None
    return fit, f"{over.number} do not" if over is not None else "more were not tried"


def table(state: State, kept: Result | None) -> str:
    """The table as text."""
    head = ["rung", "change", "samples/s", "x as shipped (95 %)", "GB", "loss drift", "output drift", ""]
    lines = [head]
    for row in rows(state, kept):
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        if row["low"] is not None:
            ratio += f" ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(
            [
                row["rung"],
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
        f"{where}, {machine.get('cores'):g} cores, {number_of(machine.get('threads'), 'threads')} as shipped, "
        f"torch {machine.get('torch')}, {switches.WORDS.get(machine.get('precision'), machine.get('precision'))} as "
        f"shipped. Drift is from float32, eager: of the loss over the first {state.compared} updates, of the outputs "
        "after the first.",
    ]
    if (most := largest(state)) is not None:
        text.append(f"micro-batches of {most[0]} fit into memory; {most[1]}")
    text += [f"not measured  {name}: {why}" for name, why in state.absent.items()]
    return "\n".join(text)


# ---- The verb --------------------------------------------------------------------------------------------------------


def command(
    order: Order,
    *,
    only: Sequence[str] = (),
    repeats: int = 5,
    steps: int | None = None,
    write: Path | None = None,
    resume: bool = False,
    say: Callable[[str], Any] = print,
) -> int:
    """`trainkit bench`. Returns 0. Raises UserError for what the user can mend."""
    recipe = load(order)
    chosen = _refuse(order, recipe, only, repeats, steps, write)
    store = Store.locate()
    store.ready()
    begun = replace(order, resume="" if resume else None)
    with _told_to_stop(), _tracked(begun, recipe, store, say) as (tracker, folder):
        for left in folder.path.glob(f"{stepped_process.PREFIX}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        file = folder.path / _STATE
        state = State.read(file)

        def save(result: Result | None) -> None:
            state.save(file)
            if result is not None:
                _nested(order, recipe, result, folder, store)

        ladder = Ladder(order, recipe, state, repeats=repeats, steps=steps, within=folder.path, say=say, save=save)
        try:
            many, took = ladder.estimate(chosen)
            state.save(file)
            size = f"{steps} updates" if steps else f"about {SECONDS:g} s"
            say(
                f"{number_of(many, 'tries', 'try')} of {repeats} pairs of blocks of {size}: {_duration(took)} or so; "
                "what is compiled takes longer. Interrupted, it goes on with --resume."
            )
            ladder.climb(chosen)
        finally:
            ladder.close()
        kept = ladder.kept()
        _conclude(state, kept, tracker)
        say("\n" + table(state, kept))
        say(_outcome(kept))
        if write is not None:
            say(_write(order, recipe, state, kept, write, tracker))
    return 0


def _refuse(
    order: Order, recipe: Recipe, only: Sequence[str], repeats: int, steps: int | None, write: Path | None
) -> list[str]:
    """The rungs that are asked for. Raises UserError."""
    unknown = [name for name in only if name not in switches.NAMES]
    if unknown:
        raise UserError("--only", f"no rung {', '.join(map(repr, unknown))}", f"one of {', '.join(switches.NAMES)}")
    if repeats < 2:
        raise UserError("--repeats", f"{repeats}", "2 or more", "an interval needs repeats")
    if steps is not None and steps < 1:
        raise UserError("--steps", f"{steps}", "1 or more")
    if not hasattr(os, "killpg"):
        raise UserError("ladder", "this system cannot freeze processes", remedy="run it on Linux or macOS")
    if missing := recipe.data.missing():
        raise UserError(str(order.path), "; ".join(missing))
    if write is not None:
        yaml_editor.refuse(write, order.path, [s.recipe for s in recipe.task.needs().values() if s.recipe is not None])
    return [name for name in switches.NAMES if name in only] if only else list(switches.NAMES)


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """A scheduler's signal ends the ladder as Ctrl-C does: trainings closed, state kept, run KILLED."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _tracked(order: Order, recipe: Recipe, store: Store, say: Callable[[str], Any]) -> Iterator[tuple[Any, Any]]:
    """The tracker and the folder of the run that stands above those of the tries."""
    from trainkit.tracking.tracker import Silent, Tracker

    text = loader.dump(recipe)
    # Of the whole text: what bears on speed, such as the loader, is no part of a recipe's hash.
    digest = hashlib.sha256(f"ladder\n{text}".encode()).hexdigest()
    tracker: Any = Silent()
    with ending(lambda: tracker):
        folder, resuming = begin(order, store, f"{recipe.name}-ladder", recipe.seed, digest, text, False)
        tracker = Tracker.start(
            folder,
            store,
            experiment=_experiment(recipe),
            run_name=folder.name,
            params=loader.flat(recipe),
            tags={"trainkit.recipe": recipe.name, "trainkit.ladder": "ladder"},
            note=f"What switches bring: `trainkit bench {order.path.name}`.\n\n{about(order)}",
            resume=resuming,
            system_metrics_every=0.0,
        )
        if resuming:
            tracker.cut_back(0)
        tracker.artifact_text("recipe/original.yaml", order.path.read_text(encoding="utf-8"))
        tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in order.overrides))
        say(f"run {folder.name}{', continued' if resuming else ''}")
        yield tracker, folder
        tracker.finish("FINISHED")


def _experiment(recipe: Recipe) -> str:
    return f"{recipe.log.experiment or recipe.name}-ladder"


def _nested(order: Order, recipe: Recipe, result: Result, folder: Any, store: Store) -> None:
    """Write one try down as a run beneath the ladder's."""
    from trainkit.tracking.tracker import Tracker

    digest = hashlib.sha256(json.dumps(asdict(result), sort_keys=True).encode()).hexdigest()
    own = store.new_run(f"{recipe.name}-{result.rung}", recipe.seed, digest, parent=folder.name)
    tracker = Tracker.start(
        own,
        store,
        experiment=_experiment(recipe),
        run_name=f"{result.rung}: {result.title}"[:200],
        params={
            "rung": result.rung,
            "change": result.title,
            "overrides": " ".join(result.words),
            "environment": " ".join(f"{k}={v}" for k, v in result.environment),
            "gives_up": result.gives_up,
        },
        tags={"trainkit.recipe": recipe.name, "trainkit.ladder": folder.name, "trainkit.verdict": result.verdict},
        parent=folder.name,
        system_metrics_every=0.0,
    )
    tracker.log(0, metrics(result))
    tracker.finish("FAILED" if result.failed else "FINISHED", result.failed or None)


def metrics(result: Result) -> dict[str, float]:
    """The figures of a try under names of metrics; what was not measured is not there."""
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


def _conclude(state: State, kept: Result | None, tracker: Any) -> None:
    from trainkit.plots import benchmark as drawing

    listed = rows(state, kept)
    found = metrics(kept) if kept is not None else {"speed/ratio": 1.0}
    if (most := largest(state)) is not None:
        found["speed/largest_micro_batch"] = most[0]
    tracker.log(0, found)
    tracker.artifact_text("tables/ladder.txt", table(state, kept) + "\n")
    # A column of CSV holds one kind: what was not measured is not a number.
    numbers = ("samples_per_s", "ratio", "low", "high", "memory_gb", "loss_drift", "output_drift")
    columns = {
        key: [math.nan if row[key] is None else row[key] for row in listed]
        if key in numbers
        else [row[key] for row in listed]
        for key in listed[0]
    }
    tracker.table("tables/ladder.csv", columns)
    tracker.figure("figures/ladder.png", drawing.figure(listed))


def _outcome(kept: Result | None) -> str:
    if kept is None:
        return "nothing helps beyond doubt without giving something up: the recipe stays as it is"
    ratio = Ratio(kept.ratio, kept.low, kept.high)
    return f"kept: {kept.title}, {ratio}: {' '.join(kept.words) or 'in the environment alone'}"


def _write(order: Order, recipe: Recipe, state: State, kept: Result | None, new: Path, tracker: Any) -> str:
    if kept is None or not kept.words:
        return f"{new} is not written: there is no switch to put into it"
    machine = state.machine
    lines = [f"speed    {Ratio(kept.ratio, kept.low, kept.high)} as {order.path.name}, {kept.rate:.4g} samples/s, by"]
    lines.append(f"         {kept.title}; trainkit bench, {time.strftime('%Y-%m-%d')}")
    where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores'):g} cores"
    lines.append(f"         on {where}, torch {machine.get('torch')}, {platform.system()}")
    lines += [f"         with {key}={value}" for key, value in kept.environment if key != "OMP_NUM_THREADS"]
    text = yaml_editor.rewrite(
        order.path, switches.merge(order.overrides, kept.words), [line[:117] for line in lines], order.plugins
    )
    new.write_text(text, encoding="utf-8")
    tracker.artifact_text(f"recipe/{new.name}", text)
    return f"wrote {new}"


def _duration(took: float) -> str:
    return f"{took / 60:.0f} minutes" if took >= 90 else f"{took:.0f} seconds"

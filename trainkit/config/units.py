"""When things happen: spans of training, learning-rate curves and gates. Pure functions of the step where they can be.

A span is written with its unit: `500 steps`, `1 epoch`, `1M samples`, `30 min`. A gate turns a span into the next step
at which something is due, so that between two events the loop pays one comparison of integers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from trainkit.config import metric_table
from trainkit.config.metric_table import Mode
from trainkit.config.ranges import BatchSize, Count, FractionBelowOne, FractionBetween, Whole

_UNITS = {
    "step": "steps", "steps": "steps", "epoch": "epochs", "epochs": "epochs", "sample": "samples",
    "samples": "samples", "s": "seconds", "sec": "seconds", "second": "seconds", "seconds": "seconds",
    "min": "minutes", "minute": "minutes", "minutes": "minutes", "h": "hours", "hour": "hours", "hours": "hours",
}  # fmt: skip
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600}
_LONGEST = 100_000 * 3600
"""Seconds; clocks of the system and of torch take no time that is much longer."""
_WRITTEN = {"seconds": "s", "minutes": "min", "hours": "h"}
_FACTORS = {"": 1, "k": 1_000, "K": 1_000, "M": 1_000_000}
NUMBER = r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,6})?"
"""A number before a unit: no sign, no leading zero, no exponent, no other digits than ASCII's."""
_SPAN = re.compile(rf"({NUMBER}) *([kKM]?) +([a-z]+)")


@dataclass(frozen=True)
class Span:
    """A length of training in steps, epochs or samples, or of wall-clock time."""

    amount: float
    """Number of units."""
    unit: str
    """Unit: steps, epochs, samples, seconds, minutes or hours."""

    @staticmethod
    def parse(text: object) -> Span:
        """Read `500 steps`, `1 epoch`, `0.5 epochs`, `1M samples`, `30 min`. Raises ValueError."""
        match = _SPAN.fullmatch(text.strip(" ")) if isinstance(text, str) else None
        unit = _UNITS.get(match[3]) if match else None
        # A millionth is the least that is written, so that the text of a span reads back as the same span.
        amount = round(float(match[1]) * _FACTORS[match[2]], 6) if match else 0
        if match is None or unit is None or not 0 < amount < 1e12:
            raise ValueError(
                f"{text!r} is not a length; write a number and a unit: 500 steps, 1 epoch, 1M samples, 30 min"
            )
        span = Span(amount, unit)
        if span.timed and span.seconds > _LONGEST:
            raise ValueError(f"{text!r} is longer than the maximum of {_LONGEST / 3600:g} h")
        if unit in ("steps", "samples") and amount != int(amount):
            raise ValueError(f"{text!r}: {unit} are counted in whole numbers")
        return span

    def __str__(self) -> str:
        amount = f"{self.amount:.6f}".rstrip("0").rstrip(".")
        unit = _WRITTEN.get(self.unit, self.unit)
        return f"{amount} {unit[:-1] if self.amount == 1 and unit in ('steps', 'epochs', 'samples') else unit}"

    @property
    def timed(self) -> bool:
        """True for a span of wall-clock."""
        return self.unit in _SECONDS

    @property
    def seconds(self) -> float:
        """Length of a timed span."""
        return self.amount * _SECONDS[self.unit]

    def steps(self, steps_per_epoch: int, batch_size: int) -> int:
        """Length of an untimed span in optimizer steps, at least 1."""
        steps = {"steps": 1, "epochs": steps_per_epoch, "samples": 1 / batch_size}[self.unit] * self.amount
        return max(1, round(steps))


@dataclass(frozen=True)
class PerProcess:
    """A batch size per process: the samples of a step are this number times the processes."""

    samples: BatchSize
    """Samples of each process per step."""

    @staticmethod
    def parse(text: str) -> PerProcess:
        """Read `4 per process`. Raises ValueError."""
        match = re.fullmatch("([1-9][0-9]{0,6}) +per +process", text.strip(" "))
        if match is None or int(match[1]) > 1 << 20:
            raise ValueError(f"{text!r} is not a batch size; write a number, such as 64, or '4 per process'")
        return PerProcess(int(match[1]))

    def __str__(self) -> str:
        return f"{self.samples} per process"


def samples_per_update(batch_size: int | PerProcess, processes: int) -> int:
    """Return the samples of a step over all processes."""
    return batch_size if isinstance(batch_size, int) else batch_size.samples * processes


def read_batch_size(value: object) -> Any:
    """Return what `4 per process` says, and a number as it is. Raises ValueError for other text, and for blocks."""
    if isinstance(value, dict | list):
        raise ValueError("a block is not a batch size; write a number, such as 64, or '4 per process'")
    return PerProcess.parse(value) if isinstance(value, str) else value


def _read_span(value: object) -> Span:
    return value if isinstance(value, Span) else Span.parse(value)


def _read_untimed(value: object) -> Span:
    span = _read_span(value)
    if span.timed:
        raise ValueError(f"'{span}' is a time; expected a length of training in steps, epochs or samples")
    return span


def _read_share(value: object) -> float:
    share = value
    if isinstance(value, str) and (match := re.fullmatch(f"({NUMBER}) *%", value.strip(" "))):
        share = float(match[1]) / 100
    # Eight digits are what a percentage with six says, so that the text of a share reads back as the same share.
    if isinstance(share, float) and 0 < round(share, 8) < 1:
        return round(share, 8)
    raise ValueError(f"{value!r} is not a percentage; write one between 0% and 100%, such as 5%")


def sides(text: str, count: int) -> list[float]:
    """Read `3.85x0.5x0.5`: so many numbers with an `x` between them; return none where the text is another."""
    return [float(side) for side in text.split("x")] if re.fullmatch("x".join([NUMBER] * count), text) else []


def _write_share(share: float) -> str:
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"


_as_text = PlainSerializer(str, return_type=str)
AnySpan = Annotated[Span, BeforeValidator(_read_span), _as_text]
"""A span of training or of wall-clock."""
TrainingSpan = Annotated[Span, BeforeValidator(_read_untimed), _as_text]
"""A span of training."""
Share = Annotated[FractionBetween, BeforeValidator(_read_share), PlainSerializer(_write_share, return_type=str)]
"""A percentage."""
UpdateSize = Annotated[
    BatchSize | PerProcess,
    BeforeValidator(read_batch_size),
    PlainSerializer(lambda size: str(size) if isinstance(size, PerProcess) else size),
    "a whole number, or a text such as '4 per process'",
]
"""Samples of a step: over all processes, or for each."""


@dataclass(kw_only=True)
class Warmup:
    """Warm-up of the learning rate at the start of the training.

    Over W steps, step t (counted from 0) uses the fraction (t + 1) / W of the climb: the first step uses 1 / W, step W
    the full rate, and the schedule begins with the step after it. docs/reference/recipe-file.md compares this with
    published code.
    """

    over: TrainingSpan
    """Length of the warm-up; not longer than the training."""
    kind: Literal["linear", "exponential", "quadratic"] = "linear"
    """Shape of the climb."""
    start: FractionBelowOne = 0.0
    """Factor of the full rate before the first step. `exponential` needs a value above 0."""

    def __post_init__(self) -> None:
        if self.kind == "exponential" and self.start == 0:
            raise ValueError("an exponential warm-up needs start above 0, such as 0.1")

    def factor(self, done: float) -> float:
        """Factor when the share `done` of the warm-up is behind."""
        if self.kind == "exponential":
            return self.start ** (1 - done)
        return self.start + (1 - self.start) * (done if self.kind == "linear" else done * done)


_HASHED_IF_SET = {"hash": "set"}


@dataclass(kw_only=True)
class Curve:
    """Learning rate schedule: the factor on `optim.lr` over the training."""

    name: Literal["constant", "steps", "cosine", "poly", "plateau"] = "constant"
    """Shape of the schedule."""
    at: list[TrainingSpan] = field(default_factory=list)
    """For `steps`: the points at which the rate is multiplied by `gamma`."""
    gamma: FractionBetween = 0.1
    """For `steps` and `plateau`: the factor of each reduction."""
    power: Annotated[float, Field(gt=0, le=100)] = 0.9
    """For `poly`: the exponent in (1 - fraction of training)^power."""
    floor: FractionBelowOne = 0.0
    """Final factor of `cosine` and `poly`, and smallest factor of `plateau`."""
    warmup: Warmup | None = None
    """Warm-up at the start. null: none."""
    metric: str | None = field(default=None, metadata=_HASHED_IF_SET)
    """For `plateau`: full name of the watched metric, such as `val/miou`."""
    mode: Mode | None = field(default=None, metadata={"hash": ("max",)})
    """For `plateau`: `max` if higher is better, `min` if lower is better. null: as the metric is defined."""
    lower: bool = field(init=False, default=False)
    """True where lower values of the metric are better."""
    patience: Count | None = field(default=None, metadata=_HASHED_IF_SET)
    """For `plateau`: number of evaluations without an improvement after which the rate is reduced; PyTorch's `patience:
    2` is 3 here. Evaluations during the warm-up are not counted."""
    cooldown: Whole = field(default=0, metadata=_HASHED_IF_SET)
    """For `plateau`: number of evaluations after a reduction that are not counted."""
    min_delta: Annotated[float, Field(ge=0, le=1e12)] = field(default=0.0, metadata=_HASHED_IF_SET)
    """For `plateau`: smallest change of the metric that counts as an improvement."""

    def __post_init__(self) -> None:
        if (self.name == "plateau") != (self.metric is not None) or (self.metric is None) != (self.patience is None):
            raise ValueError("a `plateau` schedule needs `metric` and `patience`, and other schedules take neither")
        if (self.name == "steps") != bool(self.at):
            raise ValueError("a `steps` schedule needs `at`, and other schedules do not take it")
        if self.metric is not None:
            self.mode, self.lower = metric_table.settled(self.metric, self.mode)
        else:  # without a meaning: as recipes of older runs have it
            self.mode = self.mode or "max"

    def refuse_short(self, length: Span, steps_per_epoch: int | None, batch_size: int) -> None:
        """Raise ValueError when the warm-up is longer than the training, which would end below the full rate.

        `steps_per_epoch` is None where the data is not known yet: then only spans that compare without it are refused.
        """
        if self.warmup is None:
            return
        over = self.warmup.over
        if steps_per_epoch is None:
            if (over.unit == "epochs") != (length.unit == "epochs"):
                return
            steps_per_epoch = 1_000_000  # an epoch of this many steps compares two spans in epochs exactly
        warm, steps = (span.steps(steps_per_epoch, batch_size) for span in (over, length))
        if warm > steps:
            part = length.amount / 10
            tenth = Span(max(1e-6, round(part, 6)) if length.unit == "epochs" else max(1, part // 1), length.unit)
            raise ValueError(
                f"the warm-up, schedule.warmup.over '{over}', is longer than the training, length '{length}', which "
                f"would end at {self.warmup.factor(steps / warm):.2g} of the full rate; shorten the warm-up too: "
                f'train.schedule.warmup.over="{tenth}"'
            )

    def warm(self, steps_per_epoch: int, batch_size: int) -> int:
        """Updates of the warm-up."""
        return self.warmup.over.steps(steps_per_epoch, batch_size) if self.warmup else 0

    def without_scores(self) -> Curve:
        """Return the curve for a training that is not evaluated: that of `plateau` is constant then."""
        return Curve(warmup=self.warmup) if self.name == "plateau" else self

    def factor(self, step: int, steps: int, steps_per_epoch: int, batch_size: int, reduced: int = 0) -> float:
        """Factor for the update that follows `step` finished ones, of `steps` in all.

        A function of the step, and for `plateau` of how often the rate was `reduced`: equal on any number of processes.
        """
        warm = self.warm(steps_per_epoch, batch_size)
        if self.warmup and step < warm:
            # Its last update has the full rate, and no update is spent on a rate of 0.
            return self.warmup.factor((step + 1) / warm)
        if self.name == "steps":
            return self.gamma ** sum(step >= at.steps(steps_per_epoch, batch_size) for at in self.at)
        if self.name == "plateau":
            return max(self.floor, self.gamma**reduced)
        done = min(1.0, (step - warm) / max(1, steps - warm))
        if self.name == "cosine":
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
        if self.name == "poly":
            return self.floor + (1 - self.floor) * (1 - done) ** self.power
        return 1.0


@dataclass
class Gate:
    """Decides when something is due, as a step number known in advance.

    A gate in steps, epochs or samples is a pure function of the step. One in wall-clock, or one held to a share of
    wall-clock, looks at the clock when its step has come and moves the step on if it is too early: the caller makes
    that decision on one process, shares it and writes it down, so that a resumed run can repeat it.
    """

    every: Span | None
    """Interval; None: never due."""
    steps_per_epoch: int
    """Steps of an epoch."""
    batch_size: int
    """Samples of a step."""
    budget: float | None = None
    """Largest fraction of wall-clock time that the events may take."""
    due: int = 0
    """Step at which to ask next."""
    spent: float = 0.0
    """Seconds that past events took."""
    cost: float = 0.0
    """Seconds that the last event took: the estimate for the next."""
    last: float = 0.0
    """Elapsed seconds at the last event of a timed gate."""

    NEVER = 1 << 62
    REPEATED: ClassVar[bool] = True
    """True where decisions that depend on the clock are recorded and repeated by a resumed run."""

    def __post_init__(self) -> None:
        every = self.every
        self.clocked = every is not None and (every.timed or self.budget is not None)
        """True where the gate depends on the clock."""
        self._length = every.steps(self.steps_per_epoch, self.batch_size) if every and not every.timed else 0
        self.due = self.after(0)

    def after(self, step: int, seconds_per_step: float = 0.0) -> int:
        """The first step after `step` at which the event may be due."""
        if self._length:
            return (step // self._length + 1) * self._length
        if self.every is None:
            return self.NEVER
        # Rather too early than too late, since the pace of now may not last: then it asks again.
        ahead = 0.5 * self.every.seconds / seconds_per_step if seconds_per_step > 0 else 1
        return step + max(1, min(int(ahead), 1_000_000))

    def decide(self, step: int, elapsed: float, seconds_per_step: float) -> tuple[bool, int]:
        """Return whether the event happens at `step`, and the step at which to ask again.

        `elapsed` is wall-clock since training began, in seconds. Called on one process only.
        """
        if self.every is None:
            return False, self.NEVER
        pace = max(seconds_per_step, 1e-9)
        if self.every.timed and elapsed - self.last < self.every.seconds:
            return False, step + max(1, math.ceil(0.5 * (self.every.seconds - (elapsed - self.last)) / pace))
        if self.budget is not None and self.spent + self.cost > self.budget * (elapsed + self.cost):
            wait = (self.spent + self.cost) / self.budget - self.cost - elapsed
            later = step + max(1, math.ceil(wait / pace))
            # Stretched gates keep to their own grid: an evaluation `every: 1 epoch` stays at ends of epochs.
            return False, later if self.every.timed else self.after(later - 1)
        return True, self.after(step, seconds_per_step)

    def took(self, seconds: float, elapsed: float) -> None:
        """Record that an event took place."""
        self.cost = seconds
        self.spent += seconds
        self.last = elapsed


@dataclass
class Safeguard(Gate):
    """Decides when a checkpoint has to be written so that a process which is killed takes little with it.

    `every` seconds after the last at the latest. Before that the distance between two doubles, from 5 s on: a process
    that is killed loses at most half of what it did since it began, so that a run gets on however often that happens,
    and one that is left alone writes seven more for an `every` of 10 minutes. The copies of a large network hold the
    training up; the distance is at least 20 times that. Nothing of a training hangs on when a checkpoint is written:
    decisions are not repeated, and every process begins anew.
    """

    REPEATED: ClassVar[bool] = False
    SOONEST: ClassVar[float] = 5.0
    DEAREST: ClassVar[float] = 20.0
    began: float | None = None
    """Elapsed seconds when this process was first asked."""

    def decide(self, step: int, elapsed: float, seconds_per_step: float) -> tuple[bool, int]:
        """As `Gate.decide`."""
        if self.every is None:
            return False, self.NEVER
        if self.began is None:
            self.began = elapsed
        last = max(self.began, self.last)
        distance = max(self.SOONEST, self.DEAREST * self.cost, last - self.began)
        wait = last + min(self.every.seconds, distance) - elapsed
        if wait <= 0:
            return True, step + 1
        return False, step + max(1, math.floor(0.5 * wait / max(seconds_per_step, 1e-9)))

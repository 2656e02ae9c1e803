"""Learning rate schedules: the factor on the rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from trainkit.config import metric_table
from trainkit.config.metric_table import Mode
from trainkit.config.ranges import Count, FractionBelowOne, FractionBetween, Whole
from trainkit.config.units import Span, TrainingSpan


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


def _mode_counts(curve: Curve, recipe: object) -> bool:
    """Return whether digests cover the mode: not the default that it had."""
    return metric_table.SIGNS.get(curve.mode or "min") != 1


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
    mode: Mode | None = field(default=None, metadata={"hash": _mode_counts})
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

"""The blocks of a recipe that name a metric: the best checkpoint, early stopping, and times to a target value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from trainkit.config import metric_table
from trainkit.config.metric_table import Mode
from trainkit.config.ranges import Count, Score


@dataclass(kw_only=True)
class Best:
    """The metric that selects the best checkpoint."""

    metric: str
    """Full name, such as `lfw/accuracy`. With a metric of the EMA weights (`val/ema/top1`), the run's result are the
    EMA weights."""
    mode: Mode | None = None
    """`max`: higher is better. `min`: lower is better. null: as the metric is defined (docs/reference/metrics.md)."""
    lower: bool = field(init=False, default=False)
    """True where lower values are better."""

    def __post_init__(self) -> None:
        self.mode, self.lower = metric_table.settled(self.metric, self.mode)

    @property
    def better(self) -> Mode:
        """The mode by which values are compared: that of the metric, also where an older run has another."""
        return "min" if self.lower else "max"


@dataclass(kw_only=True)
class StopWhen:
    """Early stopping: ends the training when a metric no longer improves."""

    metric: str
    """Full name of the metric, such as `val/top1`."""
    mode: Mode | None = None
    """As of `best`."""
    lower: bool = field(init=False, default=False)
    """True where lower values are better."""
    patience: Count
    """Number of evaluations without an improvement after which the training ends."""
    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Smallest change that counts as an improvement."""

    def __post_init__(self) -> None:
        self.mode, self.lower = metric_table.settled(self.metric, self.mode)


TIME_TO = "time_to/"
"""Begins the names of metrics that hold the time to a score."""


@dataclass(kw_only=True)
class Targets:
    """Target values of a metric; the wall-clock time until each is first reached is measured.

    Time to quality measures the speed of a training better than samples per second alone (DAWNBench, Coleman et al.,
    NIPS ML Systems Workshop 2017; MLPerf Training, Mattson et al., MLSys 2020, arXiv 1910.01500).
    """

    at: list[Score]
    """Target values."""
    mode: Mode | None = None
    """As of `best`. null: that of `best` or `stop_when` for the same metric, else as the metric is defined."""
    lower: bool = field(init=False, default=False)
    """True where lower values are better."""

    def __post_init__(self) -> None:
        self.lower = self.mode == "min"  # until the recipe, which knows the metric, settles it
        if not self.at:
            raise ValueError("at is empty; give a target value, such as [0.9]")
        texts = [_number_in_name(value) for value in self.at]
        twice = [text for n, text in enumerate(texts) if text in texts[:n]]
        if twice:
            raise ValueError(f"{twice[0]} is given twice; keep one of them")


def as_targets(asked: Mapping[str, list[float] | Targets]) -> dict[str, Targets]:
    """Make `Targets` of lists of values. Raises ValueError for a list that is empty or holds a value twice."""
    found = {}
    for metric, values in asked.items():
        try:
            found[metric] = values if isinstance(values, Targets) else Targets(at=values)
        except ValueError as mistake:
            raise ValueError(f"time_to of {metric}: {mistake}") from None
    return found


def targets_reached(
    asked: Mapping[str, list[float] | Targets], metrics: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return `seconds` under the name of each target that these metrics reach: `time_to/lfw/accuracy_0.9`."""
    return {
        f"{TIME_TO}{metric}_{_number_in_name(value)}": seconds
        for metric, targets in asked.items()
        if metric in metrics and isinstance(targets, Targets)  # lists became such with the recipe
        for value in targets.at
        if (metrics[metric] <= value if targets.lower else metrics[metric] >= value)
    }


def _number_in_name(value: float) -> str:
    return f"{value:.10g}".replace("+", "")  # MLflow takes no plus sign in the name of a metric

"""The blocks of a recipe that name a metric: the best checkpoint, and early stopping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from trainkit.config import metric_table
from trainkit.config.metric_table import Mode
from trainkit.config.ranges import Count


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

"""When a score is first as good as was asked for: seconds of wall-clock from the beginning of the training.

What makes a training fast is the time to a quality, and not samples a second alone (DAWNBench, Coleman et al., NIPS ML
Systems Workshop 2017; MLPerf Training, Mattson et al., MLSys 2020, arXiv 1910.01500).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainkit.config.ranges import Score

PREFIX = "time_to/"


@dataclass(kw_only=True)
class Targets:
    """Values of a metric whose first reaching is timed."""

    at: list[Score]
    mode: Literal["max", "min"] = "max"
    """`min`: the metric comes from above, as an error rate does."""

    def __post_init__(self) -> None:
        if not self.at:
            raise ValueError("at is empty; give a value to be reached, such as [0.9]")
        twice = [value for n, value in enumerate(self.at) if _written(value) in map(_written, self.at[:n])]
        if twice:
            raise ValueError(f"{_written(twice[0])} is given twice; keep one of them")


def settled(asked: Mapping[str, Targets | list[float]], rules: Iterable[Any]) -> dict[str, Targets]:
    """What is asked for, lists of values as `Targets`: of the mode that a rule (`metric`, `mode`) of that metric has.

    Raises ValueError for a list that is empty or holds a value twice.
    """
    modes = {rule.metric: rule.mode for rule in rules if rule is not None}
    found = {}
    for metric, values in asked.items():
        try:
            found[metric] = values if isinstance(values, Targets) else Targets(at=values, mode=modes.get(metric, "max"))
        except ValueError as mistake:
            raise ValueError(f"time_to of {metric}: {mistake}") from None
    return found


def reached(asked: Mapping[str, Targets], metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """`seconds` under the name of each target that these metrics reach: `time_to/lfw/accuracy_0.9`."""
    return {
        f"{PREFIX}{metric}_{_written(value)}": seconds
        for metric, targets in asked.items()
        if metric in metrics
        for value in targets.at
        if (metrics[metric] >= value if targets.mode == "max" else metrics[metric] <= value)
    }


def _written(value: float) -> str:
    """A value in the name of a metric, where MLflow takes no plus sign."""
    return f"{value:.10g}".replace("+", "")

"""The table of metrics: what each is, its unit, and whether higher or lower is better. Nothing else states a direction.

The metrics are in `metric_definitions`; a task of a plug-in declares those of its metrics in its field `directions`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from trainkit.config.metric_definitions import CUSTOMARY, DEFINITIONS, GROUPS, Direction, Metric

Mode = Literal["max", "min"]
Declared = Mapping[str, Literal["higher", "lower"]]
"""Metrics of a plug-in's task, or patterns of them with `*`, and the values that are better."""

SIGNS: dict[Mode, int] = {"max": 1, "min": -1}
"""Factor by which values are turned so that higher is better."""
MODES: dict[Direction | None, Mode] = {"higher": "max", "lower": "min"}


def definition(metric: str) -> tuple[str, Metric] | None:
    """Return name and definition of what every training logs, by its exact name where there is one; None for scores."""
    every = [one for group in DEFINITIONS.values() for one in group.items()]
    exact = [one for one in every if one[0] == metric]
    return next(iter(exact or [one for one in every if _form(one[0]).fullmatch(metric)]), None)


def score(metric: str) -> Metric | None:
    """Return the definition of a score, with or without its evaluation and class: `val/ema/nll`, `iou.road`."""
    words = metric.split("/")
    names = (".".join(words[at:]) for at in reversed(range(len(words))))  # `val/iou/road` is `iou.road`, too
    return next((found for name in names if (found := _score(name)) is not None), None)


def direction(metric: str, declared: Declared | None = None) -> Direction | None:
    """Return the values of a metric that are better; None for one that nobody defines.

    `metric` is a full name (`at_best/val/ema/nll`, `time/eval_val_s`) or one without an evaluation (`nll`). `declared`
    are those of the task.
    """
    for pattern, better in (declared or {}).items():
        if any(fnmatchcase(name, pattern) for name in (metric.rpartition("/")[2], metric)):
            return better
    words = metric.split("/")
    for at in range(len(words)):  # `final/time/wall_s` as it is, `final/train/loss` as `train/loss`
        found = definition("/".join(words[at:]))
        if found is not None and found[1].direction is not None:
            return found[1].direction
    one = score(metric)
    return one.direction if one is not None else None


def mode(metric: str, declared: Declared | None = None) -> Mode | None:
    """Return `max` or `min` for a metric of an evaluation, `EVALUATION/NAME`; None where neither is known to be better.

    The evaluation has a name of its own choice, which is left out: `time/nll` is no time.
    """
    return MODES.get(direction(metric.partition("/")[2], declared))


def is_lower(metric: str, declared: Declared | None = None) -> bool:
    """Return True for a metric of an evaluation, `EVALUATION/NAME`, of which lower values are better."""
    return mode(metric, declared) == "min"


def settled(metric: str, given: Mode | None, declared: Declared | None = None) -> tuple[Mode | None, bool]:
    """Return the mode of a rule as its recipe says it, else that of the metric; and whether lower values are better.

    Of a mode that contradicts the metric, which only the recipe of an older run can have, the metric counts.
    """
    known = mode(metric, declared)
    return given or known, (known or given) == "min"


def declared_by(task: object) -> Declared:
    """Return the directions that a task declares of its metrics; none of a shipped task, whose are in the table."""
    found = getattr(type(task), "directions", None)
    return found if isinstance(found, dict) else {}


def is_score(metric: str) -> bool:
    """Return True for a metric of quality, False for a threshold, a count, or the end of an interval."""
    return direction(metric) != "none"


def names() -> list[str]:
    """Return the names of scores without those that are patterns."""
    return [name for group in GROUPS for name in group.metrics if "*" not in name]


def unit(metric: str) -> str:
    """Return the unit of a score; empty where it has none, or nobody defines it."""
    one = score(metric)
    return one.unit if one is not None else ""


@functools.cache
def _form(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<[a-z ]+>)", name)
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in parts))


@functools.cache
def _score(name: str) -> Metric | None:
    every = [one for group in (*GROUPS, CUSTOMARY) for one in group.metrics.items()]
    exact = [metric for known, metric in every if known == name]
    # `hd95_mm.map` is that of the organ `map`, and no `*.map`: the pattern that begins with the most of a name counts.
    ordered = sorted(every, key=lambda one: -len(one[0].partition("*")[0]))
    return next(iter(exact or [metric for pattern, metric in ordered if fnmatchcase(name, pattern)]), None)

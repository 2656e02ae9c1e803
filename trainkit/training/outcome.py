"""How a training ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainkit.speed.clock import Steps


@dataclass
class Outcome:
    """How a training ended."""

    status: str
    """FINISHED, or KILLED when a signal asked it to stop."""
    step: int
    final: dict[str, float] = field(default_factory=dict)
    """The last scores of every evaluation, by full name."""
    best: list[dict[str, Any]] = field(default_factory=list)
    """The best evaluations, best first: value, step."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per-sample columns of the last evaluations, by `records.kept_rows`."""
    speed: dict[str, float] = field(default_factory=dict)
    """Rates and time shares over the whole training."""
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Curves of the last evaluation of each network, by evaluation and network."""
    steps: Steps | None = None
    """Single times of the last steps."""
    verdict: str = ""
    """Where the time went and what it would take to be faster, in words."""

"""Count what torch.compile did after the warm-up: recompilations and graph breaks, the time they took and why.

Read from the counters and metrics that torch keeps anyway: nothing is switched on, and torch's compiler is not
imported where nothing was compiled.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from trainkit.speed.evidence import Compiled

KEPT = 1024
"""Compilations that torch is asked to remember; as given it remembers 64."""
ADVICE = 'the fixes are in docs/how-to/tune-speed.md, "Avoid recompilations"'


class Recompiles:
    """The compilations since the last `mark()`, or since this was made."""

    def __init__(self) -> None:
        self.mark()
        self._first_break = len(_breaks())

    def mark(self) -> None:
        """End the warm-up: what is compiled from here on is compiled again."""
        self._from_us = time.time() * 1e6
        dynamo = _dynamo()
        if dynamo is not None and hasattr(dynamo, "set_compilation_metrics_limit"):
            dynamo.set_compilation_metrics_limit(KEPT)

    def since(self) -> Compiled | None:
        """Return what was compiled since the mark; None where this process has compiled nothing at all.

        Graph breaks are source lines, those of all graphs since this was made: a graph that was broken in the warm-up
        costs something in every step that follows.
        """
        dynamo = _dynamo()
        if dynamo is None or not dynamo.counters["frames"]["total"]:
            return None
        made = [done for done in dynamo.get_compilation_metrics() if (done.start_time_us or 0) >= self._from_us]
        again = [_short(done.recompile_reason) for done in made if done.recompile_reason is not None]
        broken = [_placed(reason) for reason in _breaks()[self._first_break :]]
        return Compiled(
            recompiles=len(again),
            graph_breaks=len(set(broken)),
            seconds=sum(done.duration_us or 0 for done in made) / 1e6,
            reasons=tuple(_commonest(again)),
            breaks=tuple(_commonest(broken)),
        )


def advice(compiled: Compiled | None) -> str:
    """Write a warning about recompilations and graph breaks, with reasons; empty where there were none."""
    if compiled is None or not (compiled.recompiles or compiled.graph_breaks):
        return ""
    lines = []
    if compiled.recompiles:
        lines.append(
            f"torch.compile recompiled the model {compiled.recompiles} times after the warm-up, "
            f"{compiled.seconds:.1f} s: {'; '.join(compiled.reasons[:3])}"
        )
    if compiled.graph_breaks:
        lines.append(f"{compiled.graph_breaks} graph breaks: {'; '.join(compiled.breaks[:3])}")
    return "\n".join([*lines, ADVICE])


def _dynamo() -> Any:
    """Return torch's compiler if it was imported; otherwise None."""
    return sys.modules.get("torch._dynamo.utils")


def _breaks() -> list[Any]:
    """Graph breaks, without those that torch's DDP optimizer makes between gradient buckets."""
    return [each for each in getattr(_dynamo(), "graph_break_reasons", []) if "DDPOptimizer" not in each.reason]


def _placed(broken: Any) -> str:
    """A graph break with its line."""
    frames = broken.user_stack
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
    return f"{place}: {_short(broken.reason)}"


def _short(reason: str) -> str:
    """A reason in one line, without the number of the graph."""
    return re.sub(r"^\d+/\d+: ", "", " ".join(reason.strip().partition("\n")[0].split()))


def _commonest(reasons: Iterable[str]) -> list[str]:
    return [f"{reason} ({often} times)" if often > 1 else reason for reason, often in Counter(reasons).most_common()]

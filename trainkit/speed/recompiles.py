"""Count what torch.compile did after the warm-up: recompiles, graph breaks, the time they took and why.

Read from the counters and metrics that torch keeps anyway: nothing is switched on, and torch's compiler is not
imported where nothing was compiled.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from trainkit.speed.evidence import Compiled

KEPT = 1024
"""Compilations that torch is asked to remember; as given it remembers 64. It gives up on a function after 8, and
altogether after 256."""
_BREAK, _LIMIT = "graph break", "not compiled any more"
_OVER = "Dynamo recompile limit exceeded"


class Recompiles:
    """The compilations since the last `mark()`, or since this was made."""

    def __init__(self) -> None:
        self.mark()
        self._made_us = self._from_us
        self._first_break = len(_breaks())

    def mark(self) -> None:
        """End the warm-up: what is compiled from here on is compiled again."""
        self._from_us = time.time() * 1e6
        dynamo = _dynamo()
        if dynamo is not None and hasattr(dynamo, "set_compilation_metrics_limit"):
            dynamo.set_compilation_metrics_limit(KEPT)

    def since(self) -> Compiled | None:
        """Return what was compiled since the mark; None where this process has compiled nothing at all.

        Graph breaks are source lines, those of all graphs since this was made and not since the mark: a graph that was
        broken in the warm-up costs something in every step that follows. So does what torch gave up on.
        """
        dynamo = _dynamo()
        if dynamo is None or not dynamo.counters["frames"]["total"]:
            return None
        again: list[str] = []
        given_up: list[str] = []
        us = 0
        for done in dynamo.get_compilation_metrics():
            if (done.start_time_us or 0) < self._made_us:
                continue
            if done.fail_reason is not None and done.fail_reason.startswith(_OVER):
                given_up.append(f"{_LIMIT}: {_short(done.recompile_reason or '')}")
            if (done.start_time_us or 0) < self._from_us:
                continue
            us += done.duration_us or 0
            if done.recompile_reason is not None and done.fail_type is None:
                again.append(_short(done.recompile_reason))
        broken = [_placed(reason) for reason in _breaks()[self._first_break :]]
        return Compiled(
            recompiles=len(again),
            graph_breaks=len(set(broken)),
            seconds=us / 1e6,
            reasons=(*_commonest(again), *_commonest(given_up), *_commonest(broken)),
        )


def advice(compiled: Compiled | None) -> str:
    """Write a warning about recompilations and graph breaks, with reasons and fixes; empty where there were none."""
    if compiled is None:
        return ""
    given_up = [reason for reason in compiled.reasons if reason.startswith(_LIMIT)]
    broken = [reason for reason in compiled.reasons if reason.startswith(_BREAK)]
    again = [reason for reason in compiled.reasons if reason not in given_up and reason not in broken]
    lines = []
    if compiled.recompiles:
        times = "once" if compiled.recompiles == 1 else f"{compiled.recompiles} times"
        why = "; ".join(again[:3])
        lines.append(f"torch.compile recompiled the model {times} after the warm-up, {compiled.seconds:.1f} s: {why}")
        lines += _remedies(again)
    if given_up:
        lines.append(
            "torch.compile gave up on part of the model, which now runs uncompiled, because it recompiled too often: "
            f"{'; '.join(given_up[:3]).replace(f'{_LIMIT}: ', '')}"
        )
        lines += [line for line in _remedies(given_up) if line not in lines]
    if compiled.graph_breaks:
        many = "1 graph break" if compiled.graph_breaks == 1 else f"{compiled.graph_breaks} graph breaks"
        lines.append(f"{many}: {'; '.join(broken[:3]).replace(f'{_BREAK} at ', '')}")
        lines.append(
            "  fix: remove print, .item() and branches on tensor values from forward; compute logged values in the loss"
        )
    return "\n".join(lines)


_REMEDIES = (
    (
        ("size mismatch", "stride mismatch", "rank mismatch", ".size()", ".stride()"),
        "  fix: use batches of one size: crop or pad",
    ),
    (
        ("training", "grad_mode", "GLOBAL_STATE"),
        "  fix: use the same train/eval mode and autograd mode at every call",
    ),
    (
        ("dtype mismatch", "requires_grad mismatch", "dispatch key set mismatch", "device mismatch"),
        "  fix: pass tensors of one dtype and device, with requires_grad always on or always off",
    ),
    ((" == ",), "  fix: forward reads a Python number that changes between calls; keep it in a tensor"),
)


def _remedies(reasons: Sequence[str]) -> list[str]:
    """List what to change, for reasons as torch words them."""
    found: list[str] = []
    for reason in reasons:
        fits = [said for words, said in _REMEDIES if any(word in reason for word in words)]
        found += fits[:1] or ["  fix: set train.compile=off if you cannot avoid this"]
    return list(dict.fromkeys(found))


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
    return f"{_BREAK} at {place}: {_short(broken.reason)}"


def _short(reason: str) -> str:
    """A reason in one line, without the number of the graph."""
    return re.sub(r"^\d+/\d+: ", "", " ".join(reason.strip().partition("\n")[0].split()))


def _commonest(reasons: Iterable[str]) -> list[str]:
    """Reasons that differ in numbers alone as one, the commonest first."""
    reasons = list(reasons)
    kind = {reason: re.sub(r"(?<![:\d])\d+", "N", reason) for reason in reasons}
    example = {kind[reason]: reason for reason in reversed(reasons)}
    counted = Counter(kind[reason] for reason in reasons).most_common()
    return [example[k] + (f" ({n} times)" if n > 1 else "") for k, n in counted]

"""Trainings whose networks torch's compiler traces and then runs as they are: graph breaks, and what is traced late.

Inductor takes a minute a network; what comes before it is the same with a backend that runs each graph eagerly. As a
plug-in (`--plugin dynamo_traces`), where `FOLDER` is set, this counts in the processes of a launch too.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import fx

from trainkit.speed.recompiles import Recompiles
from trainkit.training.trainer import Trainer

TABLES: dict[str, Any] = {}
"""As a plug-in it adds no words."""
WARM_UP = 2
"""Updates after which, and after the evaluations due there, nothing may be traced any more."""
FOLDER = "TRAINKIT_TEST_TRACES"
"""Environment variable: each process writes here what it counted."""


@dataclass
class Traced:
    """What was traced in a process, in the trainings since `count`."""

    train: list[list[str]] = field(default_factory=list)
    """Of each graph to train with the sizes that are left open."""
    evaluate: list[list[str]] = field(default_factory=list)
    """Of each graph to evaluate with."""
    breaks: int = 0
    late: int = 0
    """Functions that were traced, or given up, after the warm-up."""
    steps: int = 0
    """Updates after the warm-up."""
    reasons: tuple[str, ...] = ()

    def check(self, train: int = 1, evaluate: bool = True) -> None:
        """Assert that there is one graph to train with, with all sizes known, and nothing broken or late.

        With `train` 2 the second has sizes left open.
        """
        assert len(self.train) == train and not self.train[0] and bool(self.evaluate) == evaluate, self
        assert self.steps > 0 and self.breaks == self.late == 0, self


def count(put: Callable[[Any, str, Any], None] = setattr) -> Traced:
    """From now on what is compiled runs eagerly; returns what a training comes to, filled in as it ends."""
    traced = Traced()
    counters, found = torch._dynamo.utils.counters, Recompiles()
    function, after, finish = torch.compile, Trainer.after_step, Trainer.finish

    def eager(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        of = traced.train if torch.is_grad_enabled() else traced.evaluate
        of.append([str(size) for size in given if isinstance(size, torch.SymInt)])
        return graph.forward

    @functools.wraps(function)
    def traced_only(model: Any = None, **options: Any) -> Any:
        return function(model, **options | {"mode": None, "backend": eager})

    def marked(self: Trainer, asked: bool = False) -> bool:
        goes_on = after(self, asked)
        if self.state.step == WARM_UP:
            found.mark()
            traced.late = -counters["frames"]["total"]
        return goes_on

    def summed_up(self: Trainer, stopped: bool) -> Any:
        outcome, since = finish(self, stopped), found.since()
        traced.late += counters["frames"]["total"]
        traced.steps = self.state.step - WARM_UP
        if since is not None:
            traced.breaks, traced.reasons = since.graph_breaks, since.reasons
        if folder := os.environ.get(FOLDER):
            Path(folder, f"{self.runtime.rank}.json").write_text(json.dumps(asdict(traced)))
        return outcome

    put(torch, "compile", traced_only)
    put(Trainer, "after_step", marked)
    put(Trainer, "finish", summed_up)
    torch._dynamo.reset()
    counters.clear()
    return traced


if os.environ.get(FOLDER):
    count()

"""Trainings whose networks torch's compiler traces and runs as they are: graph breaks and recompiles after the warm-up.

Inductor takes a minute a network; the tracing before it is the same with the backend that runs a graph eagerly. As a
plug-in (`--plugin dynamo_traces`) it counts in the processes of a launch too.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

from trainkit.speed.recompiles import Recompiles
from trainkit.training.trainer import Trainer

WARM_UP = 2
"""Updates after which, and after the evaluations due there, nothing may be compiled any more."""
FOLDER = "TRAINKIT_TEST_TRACES"
"""Environment variable: each process writes here what it counted."""


@dataclass
class Traced:
    """What was traced in a process, in the trainings since `count`."""

    graphs: int = 0
    """Graphs altogether: one to train with and one to evaluate with, of each function that is compiled."""
    breaks: int = 0
    late: int = 0
    """Functions traced after the warm-up."""
    steps: int = 0
    """Updates after the warm-up."""
    reasons: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.graphs > 0 and self.steps > 0 and self.breaks == self.late == 0


def count(put: Callable[[Any, str, Any], None] = setattr) -> Traced:
    """From now on networks are compiled by the eager backend; returns what the last training came to, once it ends."""
    traced = Traced()
    counters, found = torch._dynamo.utils.counters, Recompiles()
    function, after, finish = torch.compile, Trainer.after_step, Trainer.finish

    def marked(self: Trainer, asked: bool = False) -> bool:
        goes_on = after(self, asked)
        if self.state.step == WARM_UP:
            found.mark()
            traced.late = -counters["frames"]["total"]
        return goes_on

    def summed_up(self: Trainer, stopped: bool) -> Any:
        outcome, since = finish(self, stopped), found.since()
        traced.graphs = counters["stats"]["unique_graphs"]
        traced.late += counters["frames"]["total"]
        traced.steps = self.state.step - WARM_UP
        if since is not None:
            traced.breaks, traced.reasons = since.graph_breaks, since.reasons
        if folder := os.environ.get(FOLDER):
            Path(folder, f"{self.runtime.rank}.json").write_text(json.dumps(asdict(traced)))
        return outcome

    def eager(graph: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        sizes = [x for x in given if isinstance(x, torch.SymInt)]
        print("GRAPH", torch.is_grad_enabled(), [tuple(x.shape) for x in given if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter)][:3], sizes)
        return graph.forward

    @functools.wraps(function)
    def traced_only(model: Any = None, **options: Any) -> Any:
        return function(model, **{**options, "mode": None, "backend": eager})

    put(torch, "compile", traced_only)
    put(Trainer, "after_step", marked)
    put(Trainer, "finish", summed_up)
    torch._dynamo.reset()
    counters.clear()
    return traced


if os.environ.get(FOLDER):
    count()

"""Summarise how a training ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.files import Json
from trainkit.interfaces import Columns
from trainkit.training.evaluator import Evaluator
from trainkit.training.plan import Plan
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState
from trainkit.training.throughput_monitor import ThroughputMonitor


@dataclass
class Outcome:
    """Result of a training."""

    status: str
    """FINISHED, or KILLED when a signal asked it to stop."""
    step: int
    final: dict[str, float] = field(default_factory=dict)
    """The last scores of every evaluation, by full name."""
    best: list[dict[str, Json]] = field(default_factory=list)
    """The best evaluations, best first: value, step."""
    rows: dict[str, Columns] = field(default_factory=dict)
    """Per-sample columns of the last evaluations, by `best.kept_rows`."""
    speed: dict[str, float] = field(default_factory=dict)
    """Rates and time shares over the whole training."""
    spent: dict[str, float] = field(default_factory=dict)
    """Hours of cores and GPUs, by metric name."""
    curves: dict[str, Columns] = field(default_factory=dict)
    """Curves of the last evaluation of each network, by evaluation and network."""
    verdict: str = ""
    """Where the time went and what it would take to be faster, in words."""
    page: str = ""
    """The run's description in MLflow, as Markdown."""


def summarize(
    status: str, state: TrainState, plan: Plan, evaluator: Evaluator, monitor: ThroughputMonitor, logger: RunLogger
) -> Outcome:
    """Log the final scores of a finished training, and return its outcome. Every process calls this."""
    clock = logger.clock
    if status == "FINISHED":
        logger.tracker.log(state.step, {f"final/{key}": value for key, value in state.final.items()})
    clock.to("log")
    verdict = monitor.close()
    return Outcome(
        status,
        state.step,
        final=state.final,
        best=state.best,
        rows=evaluator.rows,
        speed=clock.whole(plan.batch_size * state.step, state.total_trained(clock)),
        spent=state.total_spent(clock, logger.rates, logger.used()),
        curves=evaluator.curves,
        verdict=verdict,
        page=monitor.page,
    )

"""Microseconds of a step that go into watching it: the clock, and the observer that looks at what the clock kept.

    python benchmarks/clock.py
    ... --rounds 31 --steps 2000 --cold 300

Sides, all on one thread; figures are medians of rounds that run the sides in turns, of processor time, since others
may be using the machine:

    bare       a loop that does nothing
    clock      five changes of phase and the end of a step
    observer   and what the loop asks of the observer after each step

`look` is what the observer does every 25 steps (the search for a change of pace), `line` what each log line costs,
both on steps of 10 ms with the spread of real ones (log-normal, 15 %). That is how it goes where the clock stays in the
caches of the processor. In a training it does not: so each call is timed on its own as well, in wall-clock, beside a
call of an empty function, medians again, in the loop of a real training (the toy recipe of the tests, 300 steps),
whose observer is the one above, and `cold`, after 32 MB have been read and written before each call. Shares are of a
step of 10 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from trainkit.config.run_request import RunRequest, load
from trainkit.distributed.runtime import Runtime
from trainkit.speed.clock import STEP, Clock
from trainkit.training import trainer
from trainkit.training.throughput_monitor import EVERY, ThroughputMonitor
from trainkit.training.trainer import Trainer

TOY = Path(__file__).resolve().parents[1] / "tests" / "plugin" / "toy.yaml"
UPDATES = 300
STEP_US = 10_000.0
TARGET = 0.002
"""Share of a step that watching may take."""


def _nothing(clock: Clock, phase: str = "") -> None:
    pass


class Timed(Clock):
    """A clock whose calls are timed; in every other step calls of an empty function in their place, and as cold."""

    def __init__(self, *rest, **more):
        super().__init__(*rest, **more)
        self.spent: dict[tuple[str, bool], list[int]] = {}

    def to(self, phase: str, plain=Clock.to) -> None:
        empty = self.steps % 2 == 1
        act = _nothing if empty else plain
        began = time.perf_counter_ns()
        act(self, phase)
        took = time.perf_counter_ns() - began
        self.spent.setdefault((phase, empty), []).append(took)
        if empty:
            plain(self, phase)

    def step(self, plain=Clock.step) -> None:
        empty = self.steps % 2 == 1
        act = _nothing if empty else plain
        began = time.perf_counter_ns()
        act(self)
        took = time.perf_counter_ns() - began
        self.spent.setdefault(("step", empty), []).append(took)
        if empty:
            plain(self)

    @property
    def a_step(self) -> float:
        """Microseconds that the calls of a step take beyond those of an empty function: of each the median."""
        medians = {key: statistics.median(each) for key, each in self.spent.items()}
        return sum(medians[name, False] - medians[name, True] for name in (*STEP, "step")) / 1e3


def trained() -> tuple[ThroughputMonitor, Timed]:
    """The monitor of a training that has just ended, and its clock."""
    sys.path.insert(0, str(TOY.parent))
    length = [f"train.length={UPDATES} steps", "train.batch_size=16", "train.micro_batch=16"]
    recipe = load(RunRequest(TOY, [*length, "evaluations={}", "best=null", "log.every=50 steps"], ("toy",)))
    runtime = Runtime(recipe)
    before, trainer.Clock = trainer.Clock, Timed
    try:
        with Trainer(recipe, recipe.data.open(recipe.seed), runtime) as training:
            training.open()
            for _ in range(training.plan.steps):
                training.step()
                training.after_step()
    finally:
        trainer.Clock = before
    return training.monitor, training.clock


def hot(sides: dict[str, Callable[[int], None]], steps: int, rounds: int) -> dict[str, float]:
    """Microseconds of processor time of each side a step, in turns: medians."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 else reversed(sides):
            began = time.thread_time_ns()
            sides[name](steps)
            took[name].append((time.thread_time_ns() - began) / 1e3 / steps)
    return {name: statistics.median(each) for name, each in took.items()}


def cold(steps: int) -> float:
    """Microseconds that the calls of a step take where others have filled the caches before each."""
    memory, clock = torch.zeros(4 * 2**20), Timed()
    for _ in range(steps):
        for phase in STEP:
            memory.add_(1.0)
            clock.to(phase)
        memory.add_(1.0)
        clock.step()
    return clock.a_step


def looks(observer: ThroughputMonitor, clock: Clock, steps: int) -> tuple[float, float]:
    """Microseconds of processor time of a look and of a log line, over steps of 10 ms."""
    rng = np.random.default_rng(0)
    times = iter((time.perf_counter() + np.cumsum(rng.lognormal(0, 0.15, (6 * steps, 1)) * STEP_US / 6e6)).tolist())
    before, clock._now = clock._now, lambda: next(times)
    each, lines = [], []
    for step in range(1, steps + 1):
        for phase in STEP:
            clock.to(phase)
        clock.step()
        began = time.thread_time_ns()
        observer.step(UPDATES + step)
        each.append(time.thread_time_ns() - began)
    clock._now = before
    for _ in range(30):
        for phase in STEP:
            clock.to(phase)
        clock.step()
        began = time.thread_time_ns()
        observer.window()
        lines.append(time.thread_time_ns() - began)
    dear = sorted(each)[-(steps // EVERY) :]
    return statistics.mean(dear) / 1e3, statistics.median(lines) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=2000, help="steps of a side in a round")
    parser.add_argument("--cold", type=int, default=300, help="steps with full caches")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    observer, clock = trained()
    own = Clock()

    def bare(steps: int) -> None:
        for _ in range(steps):
            pass

    def clocked(steps: int) -> None:
        for _ in range(steps):
            own.to("data")
            own.to("transfer")
            own.to("forward")
            own.to("backward")
            own.to("optimizer")
            own.step()

    def watched(steps: int) -> None:
        step = UPDATES  # no look is due before the next: those are timed apart
        for _ in range(steps):
            own.to("data")
            own.to("transfer")
            own.to("forward")
            own.to("backward")
            own.to("optimizer")
            own.step()
            observer.step(step)

    found = hot({"bare": bare, "clock": clocked, "observer": watched}, asked.steps, asked.rounds)
    calls, without_looks = found["clock"] - found["bare"], found["observer"] - found["bare"]
    inside, full = clock.a_step, cold(asked.cold)
    look, line = looks(observer, clock, 100 * EVERY)
    rows = [
        ("clock", calls),
        ("observer, between looks", without_looks - calls),
        (f"observer, a look ({look:.0f} us) every {EVERY} steps", look / EVERY),
        (f"observer, a log line ({line:.0f} us) every 50 steps", line / 50),
    ]
    rows.append(("together", sum(us for _, us in rows)))
    rows += [("clock, in a training", inside), ("together, in a training", rows[-1][1] - calls + inside)]
    rows.append(("clock, cold", full))
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}\n")
    print("| a step costs | us | % of 10 ms |\n|---|---|---|")
    for name, us in rows:
        print(f"| {name} | {us:.2f} | {100 * us / STEP_US:.3f} |")
    worst = dict(rows)["together, in a training"]
    print(f"\nin a training {'within' if worst <= TARGET * STEP_US else 'ABOVE'} the target of {100 * TARGET:.1f} %")


if __name__ == "__main__":
    main()

"""Nanoseconds a step of what is asked in every step and mostly has nothing to do, and the moving average of weights.

    python benchmarks/gates.py
    ... --rounds 7 --cases gates bar

Cases, each against the way it is often written:

    gates     five things that happen now and then (log, two evaluations, checkpoint, figures): `callbacks` asks each of
              them in every step whether its number of steps has come, here the step is compared with one number. Proof:
              the steps at which they happened.
    bar       a progress bar with the loss, in a terminal: `callbacks` hands tqdm the loss in every step, here the line
              is set where a log line is written.
    average   600 tensors of 256 numbers, averaged: `callbacks` goes over them one by one. Proof: sums of the average.

An empty loop over the steps is taken off.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

import torch
from contest import Contest, Sample, Target
from torch import nn

STEPS = 20_000
PERIODS = {"log": 50, "evaluate.a": 1000, "evaluate.b": 2000, "checkpoint": 500, "figures": 5000}
LOG = 50


def timed(act: Callable[[], None], empty: Callable[[], None], steps: int, repeats: int = 7) -> float:
    """Nanoseconds of processor time a step, beyond the empty loop's: the median."""
    took = []
    for _ in range(repeats):
        began = time.thread_time_ns()
        empty()
        between = time.thread_time_ns()
        act()
        took.append((time.thread_time_ns() - between - (between - began)) / steps)
    return statistics.median(took)


def nothing() -> None:
    for _ in range(STEPS):
        pass


# ---- Gates


class Callback:
    """What asks in every step whether its time has come."""

    def __init__(self, name: str, every: int, happened: list[tuple[int, str]]):
        self.name, self.every, self.happened = name, every, happened

    def on_step_end(self, step: int) -> None:
        if step % self.every == 0:
            self.happened.append((step, self.name))


def callback_gates() -> Sample:
    happened: list[tuple[int, str]] = []
    callbacks = [Callback(name, every, happened) for name, every in PERIODS.items()]

    def act() -> None:
        happened.clear()
        for step in range(1, STEPS + 1):
            for callback in callbacks:
                callback.on_step_end(step)

    return Sample(timed(act, nothing, STEPS), [[step, name] for step, name in happened])


def our_gates() -> Sample:
    from trainkit.config.gates import Gate
    from trainkit.config.units import Span
    from trainkit.training.events import EventSchedule

    happened: list[tuple[int, str]] = []

    def act() -> None:
        happened.clear()
        gates = {name: Gate(Span(every, "steps"), 100, 64) for name, every in PERIODS.items()}
        agenda = EventSchedule(gates, lambda thing: thing, lambda *what: None)
        for step in range(1, STEPS + 1):
            if step >= agenda.next:
                happened.extend((step, name) for name in agenda.ask(step, 0.0, 0.0))

    return Sample(timed(act, nothing, STEPS), [[step, name] for step, name in happened])


# ---- The bar


class Terminal(io.TextIOWrapper):
    """Where a bar is drawn and nobody looks."""

    def isatty(self) -> bool:
        return True


def callback_bar() -> Sample:
    from tqdm import tqdm

    def act() -> None:
        bar = tqdm(total=STEPS, unit="step", dynamic_ncols=True)
        for step in range(1, STEPS + 1):
            bar.update(1)
            bar.set_postfix(loss=1 / step)
        bar.close()

    with open(os.devnull, "wb") as nowhere, redirect_stderr(Terminal(nowhere, write_through=True)):
        return Sample(timed(act, nothing, STEPS, 3))


def our_bar() -> Sample:
    from types import SimpleNamespace

    from trainkit.config.schema import Log
    from trainkit.training.run_logger import RunLogger

    recipe = SimpleNamespace(log=Log(), best=None, train=SimpleNamespace(batch_size=64, ema=None))

    def act() -> None:
        run = RunLogger(recipe, main=True, batch_size=64)
        for step in range(1, STEPS + 1):
            run.progress(step, STEPS)
            if step % LOG == 0:
                run.line(step, STEPS, 64, {"train/loss": 1 / step}, {"speed/samples_per_s": 64.0})
        run.close()

    with open(os.devnull, "wb") as nowhere, redirect_stdout(Terminal(nowhere, write_through=True)):
        return Sample(timed(act, nothing, STEPS, 3))


# ---- The average

UPDATES = 30


def tensors() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Module()
    for number in range(600):
        net.register_parameter(f"p{number}", nn.Parameter(torch.randn(256, generator=generator)))
    return net


def sums(kept: list[torch.Tensor]) -> list[float]:
    return [float(t.double().sum()) for t in kept]


@torch.no_grad()
def callback_average() -> Sample:
    net = tensors()
    kept = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.mul_(-1)

    def act() -> None:
        for _ in range(UPDATES):
            for name, p in net.named_parameters():
                kept[name].mul_(0.9).add_(p, alpha=0.1)

    return Sample(timed(act, lambda: None, UPDATES), sums(list(kept.values())))


@torch.no_grad()
def our_average() -> Sample:
    from trainkit.training.optimizer import Average

    net = tensors()
    average = Average(net, 0.9)
    for p in net.parameters():
        p.mul_(-1)

    def act() -> None:
        for _ in range(UPDATES):
            average.update(net, 1000)

    return Sample(timed(act, lambda: None, UPDATES), sums(list(average.tensors.values())))


def callbacks(case: str) -> Sample:
    return {"schedule": callback_gates, "progress bar": callback_bar, "EMA": callback_average}[case]()


def trainkit(case: str) -> Sample:
    return {"schedule": our_gates, "progress bar": our_bar, "EMA": our_average}[case]()


CONTEST = Contest(
    title="Evaluation schedule, progress bar and EMA",
    unit="ns per step",
    baseline="callbacks",
    sides={"callbacks": callbacks, "trainkit": trainkit},
    cases=("schedule", "progress bar", "EMA"),
    tolerance=1e-4,
    targets=[
        Target("schedule", "trainkit", 100, "value", words="evaluation schedule, ns per step"),
        Target("progress bar", "trainkit", 1000, "value", words="progress bar, ns per step"),
        Target("EMA", "trainkit", 1 / 8, words="EMA of 600 small tensors, time relative to the callback"),
    ],
    share=0.67,
)


if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

"""Compare steps early and late in a training of 20,000: step times, memory and file descriptors.

    python benchmarks/steadiness.py
    ... --rounds 7

The model, data and settings of `step.py`, with an evaluation every 1,000 steps, a checkpoint every 2,000, a log line
every 50 and the load of the machine noted as ever. Before each step of the training a step of a loop written by hand is
taken, on a model of its own, so that what else runs on the machine falls on both alike. `bare` is that loop alone.

Slope: of the differences between the two, in medians over 100 steps, a straight line; `slope / interval` is its slope
over half the width of its 95 % interval: beyond 1 either way it is none of chance. p99 / p50 leaves out the steps in
which something is logged, scored or kept, from 1,000 on. MB and descriptors: of the last step less those of step 2,500.

The threads that send to MLflow and read the load of the machine hold up both steps alike, so `p99 / p50, / by hand` is
of the training's thread alone. `waited us` has theirs: from step 2,500 on, how long in each step, by hand or not, that
thread neither ran nor stood in line for a processor. It had to wait for the interpreter or a disk. Linux alone tells.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import step
import torch.nn.functional as F
from contest import Contest, Sample, Target
from torch import Tensor, nn

from trainkit.interfaces import Loss, Networks

STEPS, BLOCK, SETTLED = 20_000, 100, 2_500
SPAN = STEPS - 1 - SETTLED
TABLES = {"task": {"steady": "steadiness:Paired"}, "data": {"step": "step:InMemory"}}
RECIPE = f"""
name: steadiness
seed: {step.SEED}
task: {{name: steady}}
data: {{name: step}}
optim: {{name: adamw, lr: {step.RATE}, weight_decay: {step.DECAY}, clip_norm: {step.CLIP}}}
train: {{length: {STEPS} steps, batch_size: {step.BATCH}, schedule: {{name: cosine}}}}
evaluations: {{val: {{every: 1000 steps}}}}
best: {{metric: val/accuracy}}
checkpoints: {{every: 2000 steps, keep_last: 2}}
log: {{every: {step.EVERY} steps, ceilings: 'off'}}
"""


def by_hand() -> Callable[[int], None]:
    """A step of a loop written by hand, on a model of its own."""
    net = step.network()
    moves, (points, labels) = step.optimizer(net), step.data()

    def take(number: int) -> None:
        chosen = own_rows(number)
        F.cross_entropy(net(points[chosen]), labels[chosen]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), step.CLIP)
        moves.step()
        moves.zero_grad()

    return take


def own_rows(number: int) -> np.ndarray:
    return (number * step.BATCH + np.arange(step.BATCH)) % step.SAMPLES


class Notes:
    """When steps by hand began and ended, memory and descriptors."""

    def __init__(self) -> None:
        import psutil

        self.began, self.ended = np.zeros(STEPS), np.zeros(STEPS)
        self.number, self.take, self.process = 0, by_hand(), psutil.Process()
        self.held: list[tuple[float, int, float]] = []

    def step(self) -> None:
        """Take a step by hand."""
        if self.number in (SETTLED, STEPS - 1):
            self.held.append((self.process.memory_info().rss / 1e6, self.process.num_fds(), waited()))
        self.began[self.number] = time.perf_counter()
        self.take(self.number)
        self.ended[self.number] = time.perf_counter()
        self.number += 1

    def grown(self, steps: int) -> dict[str, float]:
        """What is held more at the end than before, and what was waited in each of so many steps between."""
        memory, files, waits = np.subtract(self.held[1], self.held[0])
        return {"MB grown": memory, "descriptors grown": files, "waited us": 1e6 * waits / steps}


def waited() -> float:
    """Seconds that this thread has had to wait for others or a disk, from some moment on."""
    in_line = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - time.thread_time() - 1e-9 * in_line


NOTES: Notes | None = None


@dataclass(kw_only=True)
class Paired(step.Told):
    """The task of `step.py`, before each of whose steps one is taken by hand."""

    def loss(self, net: nn.Module, networks: Networks, batch: dict[str, Tensor], at: Any) -> Loss:
        assert NOTES is not None
        NOTES.step()
        return super().loss(net, networks, batch, at)


def bare(case: str) -> Sample:
    notes = Notes()
    for _ in range(STEPS):
        notes.step()
    times = 1e6 * (notes.ended - notes.began)
    return Sample(float(np.median(times)), None, {"p99 / p50": spread(times[1000:]), **notes.grown(SPAN)})


def trainkit(case: str) -> Sample:
    import steadiness  # as a plug-in

    from trainkit.config.run_request import RunRequest
    from trainkit.experiments.launch import launch

    steadiness.NOTES = notes = steadiness.Notes()
    with tempfile.TemporaryDirectory() as home:
        os.environ["TRAINKIT_STORE"] = home
        recipe = Path(home) / "steadiness.yaml"
        recipe.write_text(RECIPE)
        with contextlib.redirect_stdout(sys.stderr):
            launch(RunRequest(recipe, (), ("steadiness",)), lambda: False)
    own = 1e6 * (notes.began[1:] - notes.ended[:-1])
    hand = 1e6 * (notes.ended - notes.began)[:-1]
    plain = ~np.isin(np.arange(1, STEPS) % step.EVERY, (0, 1))
    plain[:1000] = False
    more = {
        "p99 / p50": spread(own[plain]),
        "p99 / p50, / by hand": spread(own[plain]) / spread(hand[plain]),
        "slope / interval": slope(own, hand),
        **notes.grown(2 * SPAN),
    }
    return Sample(float(np.median(own)), None, more)


def spread(times: np.ndarray) -> float:
    """How many times the median the slowest hundredth takes."""
    return float(np.percentile(times, 99) / np.median(times))


def slope(own: np.ndarray, hand: np.ndarray) -> float:
    """Slope of the differences over half its 95 % interval."""
    blocks = len(own) // BLOCK
    medians = [np.median(times[: blocks * BLOCK].reshape(blocks, BLOCK), axis=1) for times in (own, hand)]
    first = 1000 // BLOCK
    y = (medians[0] - medians[1])[first:]
    x = np.arange(len(y)) - (len(y) - 1) / 2
    found = float((x * y).sum() / (x * x).sum())
    rest = y - y.mean() - found * x
    error = float(np.sqrt((rest * rest).sum() / (len(y) - 2) / (x * x).sum()))
    return found / (1.96 * error)


CONTEST = Contest(
    title="Stability of step time and memory",
    unit="us per step, median",
    baseline="bare",
    sides={"bare": bare, "trainkit": trainkit},
    targets=(
        Target("", "trainkit", 1.0, of="slope / interval", words="slope / interval,"),
        Target("", "trainkit", 1.1, of="p99 / p50, / by hand", words="p99 / p50, relative to the bare loop,"),
        Target("", "trainkit", 8.0, of="MB grown", words="MB grown over 17,500 steps"),
        Target("", "trainkit", 0.0, of="descriptors grown", words="descriptors grown"),
        Target("", "trainkit", 50.0, of="waited us", words="us per step waiting for other threads or a disk"),
    ),
    timeout=600,
    share=0.34,
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

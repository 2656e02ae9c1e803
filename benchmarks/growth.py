"""Whether a step, its memory or a start-up grows with what it should not grow with.

    python benchmarks/growth.py
    ... --rounds 7 --sides least most

Sides are sizes, and the ratio is to the least. `samples`: a step of a tiny network on a set of so many samples in an
order of its own, whose pictures are made when they are asked for. `identities`: the same on batches of 8 people x 4,
of 10 pictures each. `runs`: from the order to the first step in a store that holds so many finished runs. `metrics`: a
step that logs so many metrics every 10 steps: that grows, as it must. MB is all memory of the process at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contest import Contest, Sample, Target
from torch import Tensor, nn

from trainkit import seeding
from trainkit.task import Loss, Meta, Opened, Parts, Scores

FEATURES, BATCH, EACH = 64, 32, 4
FIRST, STEPS = 300, 1500
"""The steps between whose losses time runs."""
PER_PERSON = 10
TABLES = {"task": {"growth": "growth:Tiny"}, "data": {"growth": "growth:Made"}}
SIDES = ("least", "middle", "most")
SIZES = {
    "samples 1e4, 1e6, 1e8": (10**4, 10**6, 10**8),
    "identities 1e2, 1e4, 1e6": (10**2, 10**4, 10**6),
    "runs 1, 1e2, 1e4": (1, 10**2, 10**4),
    "metrics 1, 1e2, 1e3": (1, 10**2, 10**3),
}
RECIPE = """
name: growth
task: {{name: growth, metrics: {metrics}}}
data: {{name: growth, size: {size}, people: {people}}}
optim: {{name: adamw, lr: 0.001}}
train: {{length: {steps} steps, batch_size: 32, ema: null}}
evaluations: {{}}
best: null
checkpoints: {{every: null, at_end: false}}
log: {{every: {every} steps, ceilings: off}}
"""


@dataclass(kw_only=True)
class Tiny:
    """A linear layer that says how long its steps take."""

    metrics: int = 1

    def needs(self) -> dict[str, Any]:
        return {}

    def build(self, meta: Meta, found: Any, seed: int) -> Parts:
        torch.manual_seed(0)
        return Parts(nn.Linear(FEATURES, 10))

    def loss(self, net: nn.Module, parts: Parts, batch: dict[str, Tensor], at: Any) -> Loss:
        TIMES.append((time.perf_counter(), time.thread_time()))
        loss = F.cross_entropy(net(batch["image"]), batch["label"], reduction="sum")
        return Loss(loss, len(batch["label"]), {f"m{k}": loss.detach() for k in range(self.metrics)})

    def predict(self, net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError

    def score(self, rows: dict[str, Tensor], split: Any) -> Scores:
        raise NotImplementedError


TIMES: list[tuple[float, float]] = []
"""When each loss was asked for, by the clock and in processor time of the training's thread."""


@dataclass(kw_only=True)
class Made:
    """Samples that are made when they are asked for."""

    size: int
    people: bool = False
    train: str = "made up"
    evaluate: dict[str, str] = field(default_factory=dict)

    def open(self, seed: int) -> Opened:
        return Opened(Meta(10, (FEATURES,), "made up"), Split(self.size, self.people, seed), {})

    def missing(self) -> list[str]:
        return []


class Split:
    """The samples of `Made`: in an order of their own, or as many people at a time."""

    protocol = at_once = None
    name = digest = "train"
    views = 1

    def __init__(self, size: int, people: bool, seed: int):
        self.size, self.seed, self.draw = size, seed, None
        if people:
            from trainkit.data.sampling import PK, Cells, Draw

            person = np.arange(size) // PER_PERSON
            cells = Cells.make(person, np.zeros(size, np.int64), size // PER_PERSON)
            self.draw = Draw(PK(people=BATCH // EACH, each=EACH), cells, seed)
            self.size = self.draw.size

    def order(self, epoch: int, batch_size: int) -> Any:
        if self.draw is not None:
            return self.draw.order(epoch, batch_size)
        return seeding.order(self.seed, epoch, self.size, batch_size)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> dict[str, Tensor]:
        rows = torch.from_numpy(np.ascontiguousarray(indices))
        points = (rows[:, None] * 0.1 + torch.arange(FEATURES)).sin()
        return {"image": points.float(), "label": rows % 10, "index": rows}

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch


def side(place: int) -> Any:
    """What is measured at one size of a case."""

    def measure(case: str) -> Sample:
        what, many = case.partition(" ")[0], SIZES[case][place]
        with tempfile.TemporaryDirectory() as home:
            os.environ["TRAINKIT_STORE"] = home
            return to_first_step(many) if what == "runs" else step(what, many)

    return measure


def trained(**words: Any) -> list[tuple[float, float]]:
    """Train; the times of its losses."""
    import growth  # as a plug-in

    from trainkit.launch import launch
    from trainkit.order import Order

    recipe = Path(os.environ["TRAINKIT_STORE"]) / "growth.yaml"
    recipe.write_text(RECIPE.format(**{"metrics": 1, "size": 10_000, "people": "false", "every": 50} | words))
    growth.TIMES.clear()
    with contextlib.redirect_stdout(sys.stderr):
        launch(Order(recipe, (), ("growth",)), lambda: False)
    return growth.TIMES


def step(case: str, many: int) -> Sample:
    import psutil

    words: dict[str, Any] = {"samples": {"size": many}, "metrics": {"metrics": many, "every": 10}}.get(case, {})
    if case == "identities":
        words = {"size": many * PER_PERSON, "people": "true"}
    wall, cpu = 1e6 * np.diff(np.array(trained(steps=STEPS, **words)[FIRST:]), axis=0).T
    more = {"cpu us": float(cpu.mean()), "median us": float(np.median(wall))}
    return Sample(float(wall.mean()), None, {**more, "MB": psutil.Process().memory_info().rss / 1e6})


def to_first_step(many: int) -> Sample:
    """From the order to the first loss, in a process that has trained before, beside so many finished runs."""
    import psutil

    from trainkit.store import Store

    trained(steps=2)
    (first,) = Store.locate().runs()
    about, lines = json.loads((first.path / "run.json").read_text()), first.journal.read_bytes()
    for number in range(many - 1):
        copy = first.path.with_name(f"{first.path.name}-{number}")
        copy.mkdir()
        (copy / "run.json").write_text(json.dumps({**about, "name": copy.name}))
        (copy / first.journal.name).write_bytes(lines)
    taken = []
    for _ in range(3):
        began = np.array([time.perf_counter(), time.thread_time()])
        taken.append(1e6 * (np.array(trained(steps=2)[0]) - began))
    wall, cpu = np.median(taken, axis=0)
    return Sample(float(wall), None, {"cpu us": float(cpu), "MB": psutil.Process().memory_info().rss / 1e6})


CONTEST = Contest(
    title="Growth",
    unit="us a step; with runs, to the first step",
    baseline="least",
    sides={name: side(place) for place, name in enumerate(SIDES)},
    cases=tuple(SIZES),
    targets=(
        Target("samples 1e4, 1e6, 1e8", "most", 1.1, words="a step on 1e8 samples, / on 1e4,"),
        Target("identities 1e2, 1e4, 1e6", "most", 1.2, words="a step on 1e6 identities, / on 1e2,"),
        Target("runs 1, 1e2, 1e4", "most", 1.5, words="the first step beside 1e4 runs, / beside one,"),
    ),
    timeout=600,
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

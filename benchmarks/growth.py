"""Measure how step time, memory and start-up grow with the size of data, runs and metrics.

    python benchmarks/growth.py
    ... --rounds 7 --cases "samples 1e4, 1e8"

Sides are the two sizes of a case, which take turns, and the ratio is to the least. `samples`: a step of a tiny model
on a set of so many samples in an order of its own, whose images are made when they are asked for. `identities`: the
same on batches of 8 people x 4, of 10 images each. `metrics`: a step whose task logs so many, with a line of their
means every 50 steps: that grows, as it must, and `us a metric` is what each of them adds to a step in processor time of
the training's thread. By the clock it is more: sending each to MLflow keeps the interpreter busy for about 0.1 ms.
`runs`: from the order to the first loss in a store that holds so many finished runs; `ms named` finds one of these by
its name, `ms searched` the newest unfinished one, as `--resume` does (`trainkit ls` lists recipes and reads no run). MB
is all memory of the process at the end.

Steps are counted from the 100th on, in turns of 50, so that each has a line in it. Four decades at 1.05 are 1.22.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contest import Contest, Sample, Target, next_turn
from torch import Tensor, nn

from trainkit import rng
from trainkit.interfaces import Dataset, DatasetInfo, Loss, Networks, Scores

FEATURES, BATCH, EACH = 64, 32, 4
FIRST, STEPS, BLOCK = 100, 700, 50
"""The steps between whose losses time runs, in turns of so many."""
STARTS = 5
"""Trainings that are started beside other runs."""
PER_PERSON = 10
TABLES = {"task": {"growth": "growth:Tiny"}, "data": {"growth": "growth:Made"}}
SIDES = ("least", "most")
SIZES = {
    "samples 1e4, 1e8": (10**4, 10**8),
    "identities 1e2, 1e6": (10**2, 10**6),
    "runs 1, 1e4": (1, 10**4),
    "metrics 1, 1e3": (1, 10**3),
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
log: {{every: 50 steps, ceilings: off}}
"""


@dataclass(kw_only=True)
class Tiny:
    """A linear layer that says how long its steps take."""

    metrics: int = 1

    def __post_init__(self) -> None:
        self.names = tuple(f"m{number}" for number in range(self.metrics))

    def required_weights(self) -> dict[str, Any]:
        return {}

    def build(self, meta: DatasetInfo, found: Any, seed: int) -> Networks:
        torch.manual_seed(0)
        return Networks(nn.Linear(FEATURES, 10))

    def loss(self, net: nn.Module, networks: Networks, batch: dict[str, Tensor], at: Any) -> Loss:
        WATCH.step()
        loss = F.cross_entropy(net(batch["image"]), batch["label"], reduction="sum")
        return Loss(loss, len(batch["label"]), dict.fromkeys(self.names, loss.detach()))

    def predict(self, net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError

    def score(self, rows: dict[str, Tensor], split: Any) -> Scores:
        raise NotImplementedError


class Watch:
    """When the first loss of a training was asked for, and the times of blocks of steps."""

    def __init__(self) -> None:
        self.steps, self.first, self.began = 0, np.zeros(2), np.zeros(2)
        self.blocks: list[np.ndarray] = []
        """Microseconds of a step of each, by the clock and in processor time of the training's thread."""

    def now(self) -> np.ndarray:
        return 1e6 * np.array([time.perf_counter(), time.thread_time()])

    def step(self) -> None:
        """A loss is asked for."""
        self.steps += 1
        if self.steps == 1:
            self.first = self.now()
        if self.steps >= FIRST and (self.steps - FIRST) % BLOCK == 0:
            if self.steps > FIRST:
                self.blocks.append((self.now() - self.began) / BLOCK)
            next_turn()
            self.began = self.now()


WATCH = Watch()


@dataclass(kw_only=True)
class Made:
    """Samples that are made when they are asked for."""

    size: int
    people: bool = False
    train: str = "made up"
    evaluate: dict[str, str] = field(default_factory=dict)

    def open(self, seed: int) -> Dataset:
        return Dataset(DatasetInfo(10, (FEATURES,), "made up"), Split(self.size, self.people, seed), {})

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
            from trainkit.data.people.pk_sampler import PK, Cells, Draw

            person = np.arange(size) // PER_PERSON
            cells = Cells.make(person, np.zeros(size, np.int64), size // PER_PERSON)
            self.draw = Draw(PK(people=BATCH // EACH, each=EACH), cells, seed)
            self.size = self.draw.size

    def order(self, epoch: int, batch_size: int) -> Any:
        if self.draw is not None:
            return self.draw.order(epoch, batch_size)
        return rng.order(self.seed, epoch, self.size, batch_size)

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


def trained(**words: Any) -> Watch:
    """Train, and what was seen of it."""
    import growth  # as a plug-in

    from trainkit.config.run_request import RunRequest
    from trainkit.experiments.launch import launch

    recipe = Path(os.environ["TRAINKIT_STORE"]) / "growth.yaml"
    recipe.write_text(RECIPE.format(**{"metrics": 1, "size": 10_000, "people": "false", "steps": STEPS} | words))
    growth.WATCH = growth.Watch()
    with contextlib.redirect_stdout(sys.stderr):
        launch(RunRequest(recipe, (), ("growth",)), lambda: False)
    return growth.WATCH


def sample(taken: list[np.ndarray], **more: float) -> Sample:
    """Of microseconds by the clock and in processor time, block by block."""
    import psutil

    wall, cpu = np.array(taken).T
    more |= {"cpu us": float(np.median(cpu)), "MB": psutil.Process().memory_info().rss / 1e6}
    return Sample(float(np.median(wall)), None, more, wall.tolist())


def step(case: str, many: int) -> Sample:
    if case == "metrics":
        found = sample(trained(metrics=many).blocks)
        if many == 1:
            return found
        os.environ.pop("CONTEST_TURN", None)  # the other side has had its turns
        alone = sample(trained().blocks)
        each = (found.more["cpu us"] - alone.more["cpu us"]) / (many - 1)
        return replace(found, more={**found.more, "us a metric": each})
    words = {"size": many} if case == "samples" else {"size": many * PER_PERSON, "people": "true"}
    return sample(trained(**words).blocks)


def to_first_step(many: int) -> Sample:
    """From the order to the first loss, in a process that has trained before, beside so many finished runs."""
    from trainkit.tracking.store import Store

    trained(steps=2)
    store = Store.locate()
    (first,) = store.runs()
    about = json.loads((first.path / "run.json").read_text())
    for number in range(many - 1):
        copy = first.path.with_name(f"{first.path.name}-{number}")
        copy.mkdir()
        (copy / "run.json").write_text(json.dumps({**about, "name": copy.name}))
    taken = []
    for _ in range(STARTS):
        next_turn()
        began = Watch().now()
        taken.append(trained(steps=2).first - began)
    looks = {"named": lambda: store.find(first.name), "searched": lambda: store.newest_unfinished("growth", "0" * 64)}
    return sample(taken, **{f"ms {name}": min(milliseconds(look) for _ in range(5)) for name, look in looks.items()})


def milliseconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


CONTEST = Contest(
    title="Growth",
    unit="us per step; for runs, to the first step",
    baseline="least",
    sides={name: side(place) for place, name in enumerate(SIDES)},
    cases=tuple(SIZES),
    targets=(
        Target("samples 1e4, 1e8", "most", 1.1, words="step time, 1e8 samples / 1e4,"),
        Target("identities 1e2, 1e6", "most", 1.22, words="step time, 1e6 identities / 1e2,"),
        Target("runs 1, 1e4", "most", 1.22, words="first step, 1e4 runs in the store / one,"),
        Target("metrics 1, 1e3", "most", 2.0, of="us a metric", words="us per step and metric,"),
    ),
    turns=True,
    timeout=300,
    share=0.34,
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

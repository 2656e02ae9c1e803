"""Forecast how long a copied recipe for images of classes takes, from a few batches of its network on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.speed.eta import Forecast
from trainkit.terminal import duration

BATCH = 8
"""Images of a measured batch: small, since `cp` is to answer within seconds."""
START = 9.0
"""Processor seconds of a run's start and end, beside its data and network, where they were measured."""
SHARED = 0.8
"""A training of several threads is as many times to this power faster than one: two, on quiet cores, 1.74 times."""
SLOW = 2.0
"""Seconds of a batch from which it is not run again."""
FIT = 4e-4
"""Processor seconds of the fit of a probe for an image and a class: 240 images of 10 classes 1.6 s, 1,000 3.2 s."""


@dataclass(frozen=True)
class Pace:
    """Seconds that an image takes, as busy as the machine is now."""

    side: int
    """Pixels at which it was measured; other sizes take time by their area."""
    predicted: float
    """Forward."""
    trained: float
    """Forward and backward; with a frozen backbone, nothing is trained step by step."""
    busy: float
    """Seconds for one of the processor: 1 on an idle machine, more where others use its cores."""
    read: float = 0.0
    """Reading an image once, to its size."""

    def at(self, side: int) -> Pace:
        """The pace at another size."""
        area = (side / self.side) ** 2
        return replace(self, side=side, predicted=self.predicted * area, trained=self.trained * area)

    @property
    def idle(self) -> Pace:
        """The pace on this machine with nothing else to do."""
        predicted, trained, read = (seconds / self.busy for seconds in (self.predicted, self.trained, self.read))
        return Pace(self.side, predicted, trained, 1.0, read)


@dataclass(frozen=True)
class Length:
    """How much a recipe does."""

    images: int
    """Images that are trained on."""
    evaluated: Mapping[str, int]
    """Images of each evaluation, by name."""
    steps: int
    batch: int
    times: int
    """Evaluations of the first set."""
    classes: int = 0
    """Of a probe that is fitted first; 0: none is."""
    budget: float | None = None
    """Largest share of the whole that they may take."""


def measure(net: Any, side: int, read: float = 0.0) -> Pace:
    """Time a network of timm on images of `side` pixels: two batches forward and backward, three forward.

    One thread works: on a busy machine several wait for each other, for 28 processor seconds instead of 3.
    """
    import torch
    from torch.nn import functional

    images = torch.zeros(BATCH, 3, side, side).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    label = torch.zeros(BATCH, dtype=torch.long)

    def train() -> None:
        functional.cross_entropy(net(images), label).backward()
        net.zero_grad(set_to_none=True)

    def predict() -> None:
        with torch.inference_mode():
            net(images)

    threads, wall, processor = torch.get_num_threads(), time.perf_counter(), time.thread_time()
    torch.set_num_threads(1)
    try:
        net.train()
        trained = _seconds(train, 2) / BATCH / threads**SHARED
        net.eval()
        predicted = _seconds(predict, 3) / BATCH / threads**SHARED
    finally:
        torch.set_num_threads(threads)
    busy = (time.perf_counter() - wall) / max(1e-3, time.thread_time() - processor)
    return Pace(side, predicted, trained, max(1.0, busy), read)


def _seconds(work: Callable[[], object], times: int) -> float:
    """Mean seconds of a call, after one that is not counted; of a slow one that is the only one."""
    began = time.perf_counter()
    work()
    if (first := time.perf_counter() - began) > SLOW:
        return first
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def seconds(pace: Pace, length: Length) -> float:
    """Return the seconds that a run of a recipe takes."""
    first, *others = [count * pace.predicted for count in length.evaluated.values()]
    every = sum(length.evaluated.values())
    before = pace.busy * START + (length.images + every) * pace.read
    before += 2 * every * pace.predicted  # a first batch of each is read twice, to tell what they take
    if length.classes:
        before += length.images * (pace.predicted + pace.busy * FIT * length.classes)
    return Forecast(
        steps=length.steps,
        step_s=length.batch * pace.trained,
        step_error=0.0,
        evaluations={"first": (length.times, first), "others": (1, sum(others))},
        budgets={"first": length.budget} if length.budget else {},
        before_s=before,
    ).total()


def about(s: float) -> str:
    """Write a forecast: `about 4 min`."""
    return f"about {duration(s if s < 60 else 60 * round(s / 60))}"

"""Time a training loop that is not trainkit's, with three lines, and name its bottleneck.

    from trainkit.speed.stopwatch import Stopwatch

    watch = Stopwatch(batch_size=256)                    # 1
    for images, labels in watch.batches(loader):         # 2: was `in loader`
        ...                                              # the loop as it was
    print(watch.verdict())                               # 3

Data loading is the time in which the loop waits for the next batch of `loader`. A clock that is started in the body of
the loop, after the batch has arrived, does not measure it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from trainkit.speed import bottleneck
from trainkit.speed.clock import BETWEEN, COMPUTE, STEP, Clock
from trainkit.speed.device_timeline import of
from trainkit.speed.evidence import Drop, Evidence
from trainkit.speed.slowdowns import SlowdownDetector
from trainkit.tracking.system.cgroup import cores
from trainkit.tracking.system.load import Load, Reading

T = TypeVar("T")
_EVERY_S = 5.0
"""Seconds between two readings of the machine's load."""


class Stopwatch:
    """Times of a training loop of your own: data loading, step times, and slowdowns.

    `batch_size` is the number of samples of a step, over all processes. The body of the loop counts as compute:
    `watch.to("backward")` ends one phase and begins another, and `with watch.phase("eval"):` is for work between
    steps. `device` is the device of the model.
    """

    def __init__(self, batch_size: int, device: str | torch.device = "cpu"):
        device = torch.device(device)
        self._load, self._slowdowns = Load(), SlowdownDetector()  # before the clock: their time is not the loop's
        self._clock, self._batch_size, self._device = Clock(of(device)), batch_size, device.type
        self._readings: list[Reading] = []
        self._drops: list[Drop] = []
        self._divided = False

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader; a step lasts from asking for one to asking for the next."""
        waiting = iter(loader)
        while True:
            self._clock.to("data")
            try:
                batch = next(waiting)
            except StopIteration:
                self._clock.to("log")
                return
            self._clock.to("forward")
            yield batch
            self._clock.step()
            self._look()

    def to(self, phase: str) -> None:
        """End the running phase and begin another of `data transfer forward backward optimizer`."""
        if phase not in STEP:
            raise ValueError(f"phase {phase!r}; a step has the phases {', '.join(STEP)}")
        self._divided = self._divided or phase in COMPUTE
        self._clock.to(phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time work that is not part of a step: `eval checkpoint log setup`."""
        if name not in BETWEEN:
            raise ValueError(f"phase {name!r}; between steps the phases are {', '.join(BETWEEN)}")
        before = self._clock.phase
        self._clock.to(name)
        try:
            yield
        finally:
            self._clock.to(before)

    def metrics(self) -> dict[str, float]:
        """Return throughput and time shares since the last call, by metric name; empty before the first step."""
        return self._clock.window(self._batch_size)

    def evidence(self) -> Evidence:
        """Return all that was measured so far."""
        drops = self._drops if self._divided else [_of_the_body(drop) for drop in self._drops]
        return Evidence(
            steps=self._clock.recent(),
            batch_size=self._batch_size,
            seconds=dict(self._clock.seconds),
            trained=self._clock.steps,
            device=self._device,
            load=self._readings,
            drops=drops,
            settings={"cores": cores(), "threads": torch.get_num_threads()},
            absent={name: why for name, why in self._load.absent.items() if "gpu" not in name},
        )

    def verdict(self) -> str:
        """Return throughput, bottlenecks and slowdowns as text."""
        self._clock.to("log")
        if not self._clock.steps:
            return "no step has ended: iterate over `watch.batches(loader)`"
        e = self.evidence()
        found = [replace(finding, options=()) for finding in bottleneck.judge(e)]  # a benchmark needs a recipe
        return "\n".join([*bottleneck.describe(e, found), *bottleneck.describe_unmeasured(e)])

    def _look(self) -> None:
        if self._clock.steps % 25:
            return
        self._clock.to("log")
        drop = self._slowdowns.look(self._clock.recent(25))
        if drop is not None:
            self._drops.append(drop)
        if not self._readings or time.perf_counter() - self._readings[-1].at > _EVERY_S:
            self._readings.append(self._load.read())


def _of_the_body(drop: Drop) -> Drop:
    """Name the body of a loop as a whole for a slowdown in it: nothing more is known."""
    return replace(drop, phase="body") if drop.phase in (*COMPUTE, "compute") else drop

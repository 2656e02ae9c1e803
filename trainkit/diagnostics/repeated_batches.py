"""Batches that are read once and repeated."""

from __future__ import annotations

import time

import numpy as np
import torch

from trainkit.data.split import SplitView
from trainkit.distributed.runtime import Runtime
from trainkit.interfaces import Batch, Split
from trainkit.training.plan import Plan

KEPT = 4
"""Micro-batches that are kept."""


class RepeatedBatches(SplitView):
    """A training split of one step whose batches are read once, on this process, and repeated."""

    def __init__(self, split: Split, plan: Plan, runtime: Runtime):
        super().__init__(split)
        self.size, self.any_thread = plan.batch_size, False  # the time of `fetch` is part of the step
        self._rows = np.array(split.order(0, plan.batch_size)[0, 0 : plan.batch_size])
        # On a CPU a batch is not copied to where it is used, and may be changed there.
        self.copied = runtime.device.type == "cpu"
        pin = runtime.device.type == "cuda"
        self._kept: dict[int, Batch] = {}
        for micro in range(plan.accumulation):
            first = int(plan.rows(self, self.order(0, self.size), 0, micro)[0])
            if micro >= KEPT:  # a step of many needs no more memory than one of a few
                self._kept[first] = list(self._kept.values())[micro % KEPT]
                continue
            batch = self._numbered(split.fetch(plan.rows(split, self._rows[None], 0, micro), 0))
            self._kept[first] = {key: value.pin_memory() if pin else value for key, value in batch.items()}
        self.seconds = 0.0
        """Time spent in handing out."""

    def order(self, epoch: int, batch_size: int) -> np.ndarray:
        """Return the one step."""
        return np.arange(self.size)[None]

    def divide(self, rows: np.ndarray, number: int, parts: int) -> np.ndarray:
        """The rows by which `fetch` knows a block: what it hands out is this process's part of it."""
        return rows

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Return a kept batch; read numbered views of its samples, for cached teacher outputs."""
        if view is not None:
            return self._numbered(super().fetch(self._rows[indices], 0, view))
        began = time.perf_counter()
        batch = self._kept[int(indices[0])]
        batch = {key: value.clone() if self.copied else value for key, value in batch.items()}
        self.seconds += time.perf_counter() - began
        return batch

    def _numbered(self, batch: Batch) -> Batch:
        # Tables are looked up by `index`, so it counts the samples of this split.
        places = {int(row): place for place, row in enumerate(self._rows)}
        index = [places.get(int(row), -1) for row in batch["index"]]
        return {**batch, "index": torch.tensor(index, dtype=torch.int64)}

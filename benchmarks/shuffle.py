"""From a new epoch to its first batch, and what an index costs after it: stateless shuffling against torch's samplers.

    python benchmarks/shuffle.py
    python benchmarks/shuffle.py --rounds 7 --json FILE

An epoch of 10 million rows, in batches of 512: until the first batch is there (ms), then ns of CPU time an index over a
million rows, and MB that the process has grown by. Our side is also asked for 1,000 million rows, where a list of
torch's takes 8 GB and its sampler five times that. The proof: a million rows, no two of them equal, all within the set.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from contest import Contest, Sample, Target

ROWS, MANY, BATCH, INDICES = 10_000_000, 1_000_000_000, 512, 1_000_000
STARTS = 3


def randperm(case: str) -> Sample:
    """A tensor of all rows, cut into batches."""
    import torch

    return measured(lambda epoch: torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).split(BATCH))


def sampler(case: str) -> Sample:
    """`RandomSampler` in a `BatchSampler`, as a DataLoader puts them together."""
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    def epoch(number: int) -> Iterable:
        rows = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(number))
        return BatchSampler(rows, BATCH, drop_last=True)

    return measured(epoch)


def ours(case: str) -> Sample:
    from trainkit import rng

    def batches(size: int) -> Callable[[int], Iterator]:
        def epoch(number: int) -> Iterator:
            order = rng.order(0, number, size, BATCH)
            return (order[update, 0:BATCH] for update in range(len(order)))

        return epoch

    small, large = measured(batches(ROWS)), measured(batches(MANY))
    more = {f"{name}, of 1e9": value for name, value in {"first batch, ms": large.value, **large.more}.items()}
    return Sample(small.value, small.proof if large.proof == small.proof else large.proof, {**small.more, **more})


def measured(epoch: Callable[[int], Iterable]) -> Sample:
    """Medians of what `epoch(number)` takes; the memory of the last one."""
    import psutil

    process = psutil.Process()
    starts, each, grown, drawn = [], [], 0.0, []
    next(iter(epoch(0)))
    for number in range(1, STARTS + 1):
        drawn = []
        gc.collect()
        before = process.memory_info().rss
        began = time.perf_counter()
        batches = iter(epoch(number))
        drawn.append(next(batches))
        starts.append(time.perf_counter() - began)
        grown = process.memory_info().rss - before
        began = time.process_time()
        drawn += itertools.islice(batches, INDICES // BATCH)
        each.append((time.process_time() - began) / (BATCH * (len(drawn) - 1)))
        del batches
    rows = np.concatenate([np.asarray(batch) for batch in drawn])
    proof = [len(rows), len(np.unique(rows)), int(rows.min()) >= 0]
    return Sample(
        1e3 * statistics.median(starts), proof, {"ns an index": 1e9 * statistics.median(each), "MB": grown / 1e6}
    )


CONTEST = Contest(
    title="Shuffling an epoch",
    unit="ms to the first batch",
    baseline="sampler",
    sides={"sampler": sampler, "randperm": randperm, "trainkit": ours},
    targets=(
        Target("", "trainkit", 1.0, of="first batch, ms, of 1e9", words="first batch, 1,000 million rows, ms,"),
        Target("", "trainkit", 50, of="ns an index, of 1e9", words="ns per index, 1,000 million rows"),
        Target("", "trainkit", 1.0, of="MB, of 1e9", words="MB kept, 1,000 million rows"),
        Target("", "trainkit", 0.001, words="first batch, time relative to sampler,"),
    ),
    share=0.67,
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

"""Microseconds per P x K batch, from 15,000 records of 320 people to 10 million of 150,000.

    python benchmarks/samplers.py
    python benchmarks/samplers.py --rounds 7 --json FILE

Batches of 8 people with 4 records each:

    modal_pk     ours: an RGB record and three of other modalities, one of each before a second of any
    pk           ours: four records of any modality
    m_per_class  pytorch-metric-learning's MPerClassSampler: four of any modality
    popular      dictionaries as in much re-identification code: eight are drawn from the list of the people that have
                 four records left in this epoch, and those that have not are taken out of the list

us of CPU a batch of the largest set, and of the smaller ones in columns of their own; a process holds all three and
takes blocks of batches from one after another, and `growth` is the median ratio of largest to smallest within such a
cycle. New epochs belong to the cost. The proof: every batch is checked to be eight different people with four of their
own records, `modal_pk` to have one RGB record among them. Bytes are of our arrays, of others what the process grew by
while the sampler was made. The dictionaries are filled by sorting, faster than by the loop over records that usually
fills them.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from contest import Contest, Sample, Target

PEOPLE, EACH = 8, 4
SHARES = (296, 171, 118, 118, 297)
"""Of the modalities in 1,000, as in ORBench: photographs and captions 45,113, infrared 26,071, each drawing 18,000."""
SIZES = ((15_000, 320), (150_000, 3_200), (10_000_000, 150_000))
"""Records and people."""
BATCHES, CYCLES = 512, 9
"""Of a block, and blocks of each set. Ours draws 256 batches at once: each block pays for two such draws."""
FEWER, SLOW = 0.1, 1000.0
"""Of a sampler that takes more than so many microseconds a batch, blocks take about so many seconds."""


def made_up(records: int, people: int) -> tuple[np.ndarray, np.ndarray]:
    """Person and modality of each record, in no order."""
    rng = np.random.default_rng(0)
    modalities = np.repeat(np.arange(5, dtype=np.int8), SHARES)
    person = rng.integers(0, people, records, dtype=np.int32)
    return person, modalities[rng.integers(0, sum(SHARES), records, dtype=np.int16)]


# ---- samplers: each call of `epoch` begins another one


class Ours:
    """trainkit's; `name` is the sampler's in a recipe."""

    def __init__(self, name: str, person: np.ndarray, modality: np.ndarray, people: int):
        from trainkit.data.people import pk_sampler

        spec = {"modal_pk": pk_sampler.ModalPK, "pk": pk_sampler.PK}[name](people=PEOPLE, each=EACH, epoch="records")
        self.draw = pk_sampler.Draw(spec, pk_sampler.Cells.make(person, modality, people), 0)
        cells = self.draw.cells
        self.bytes, self.number = cells.rows.nbytes + cells.starts.nbytes, 0

    def epoch(self) -> Iterator[np.ndarray]:
        self.number += 1
        order = self.draw.order(self.number, PEOPLE * EACH)
        return (order[update, 0 : PEOPLE * EACH] for update in range(len(order)))


class MPerClass:
    """pytorch-metric-learning's. Draws all that it was asked for before the first batch, so it is asked for few."""

    def __init__(self, person: np.ndarray, modality: np.ndarray, people: int):
        from pytorch_metric_learning.samplers import MPerClassSampler

        self.sampler = MPerClassSampler(person, EACH, PEOPLE * EACH, length_before_new_iter=len(person))

    def some(self, batches: int) -> list[np.ndarray]:
        """So many batches."""
        self.sampler.list_size = batches * PEOPLE * EACH
        return list(np.asarray(list(self.sampler)).reshape(batches, -1))


def dictionary(person: np.ndarray, rows: np.ndarray) -> dict[int, list[int]]:
    """Each person's rows."""
    rows = rows[np.argsort(person[rows], kind="stable")]
    who, begins = np.unique(person[rows], return_index=True)
    each = np.split(rows, begins[1:])
    return dict(zip(who.tolist(), (some.tolist() for some in each), strict=True))


class Popular:
    """People drawn from the list of those with enough records left; records are shuffled when first drawn."""

    def __init__(self, person: np.ndarray, modality: np.ndarray, people: int):
        self.rows = dictionary(person, np.arange(len(person)))

    def epoch(self) -> Iterator[list[int]]:
        left, parts = list(self.rows), {}
        while len(left) >= PEOPLE:
            batch = []
            for who in np.random.choice(left, PEOPLE, replace=False).tolist():
                if who not in parts:
                    rows = self.rows[who]
                    parts[who] = random.sample(rows, len(rows)) if len(rows) >= EACH else random.choices(rows, k=EACH)
                batch += [parts[who].pop() for _ in range(EACH)]
                if len(parts[who]) < EACH:
                    left.remove(who)
            yield batch


# ---- what is measured


class Source:
    """Batches of a sampler, epoch after epoch."""

    def __init__(self, sampler: Any):
        self.sampler, self._batches = sampler, iter(())

    def take(self, count: int) -> tuple[float, list]:
        """Microseconds of processor time a batch, and so many batches."""
        began = time.thread_time()
        taken = self._taken(count)
        return 1e6 * (time.thread_time() - began) / count, taken

    def _taken(self, count: int) -> list:
        if isinstance(self.sampler, MPerClass):
            return self.sampler.some(count)
        taken = []
        while len(taken) < count:
            batch = next(self._batches, None)
            if batch is None:
                self._batches = self.sampler.epoch()
            else:
                taken.append(batch)
        return taken


def measured(make: Callable[..., Any], modal: bool = False) -> Sample:
    """Blocks of all sets in turn."""
    import psutil

    drawn = {size: made_up(*size) for size in SIZES}
    process, least, most = psutil.Process(), SIZES[0], SIZES[-1]
    gc.collect()
    gc.disable()  # as timeit does
    before, began = process.memory_info().rss, time.process_time()
    largest = make(*drawn[most], most[1])
    more = {"ready, s": time.process_time() - began}
    more["B a record"] = (getattr(largest, "bytes", 0) or process.memory_info().rss - before) / most[0]
    sources = {size: Source(largest if size == most else make(*drawn[size], size[1])) for size in SIZES}
    counts, taken = {}, {size: [] for size in SIZES}
    for size, source in sources.items():
        taken[size] = source.take(2)[1]  # what begins an epoch
        each, batches = source.take(2)
        counts[size] = BATCHES if each < SLOW else max(2, int(1e6 * FEWER / each))
        taken[size] += batches
    cycles = []
    for _ in range(CYCLES):
        cycles.append({})
        for size, source in sources.items():
            cycles[-1][size], batches = source.take(counts[size])
            taken[size] += batches
    for size in SIZES[:-1]:
        more[f"of {size[0]:,}"] = statistics.median(cycle[size] for cycle in cycles)
    more["growth"] = statistics.median(cycle[most] / cycle[least] for cycle in cycles)
    proofs = [proof(taken[size], *drawn[size], modal) for size in SIZES]
    return Sample(statistics.median(cycle[most] for cycle in cycles), proofs, more)


def proof(batches: list, person: np.ndarray, modality: np.ndarray, modal: bool) -> list[int]:
    """Least and most of the different people of a batch, and of the records that it has of one of them.

    Raises ValueError where records of a person do not stand together, or `modal` and one of four is not RGB.
    """
    rows = np.asarray(batches).reshape(-1, PEOPLE, EACH)
    who = person[rows]
    if (who != who[..., :1]).any():
        raise ValueError("a group has two people")
    if modal and ((modality[rows] == 0).sum(2) != 1).any():
        raise ValueError("not one RGB record and three others")
    who = np.sort(who[..., 0], axis=1)
    people = 1 + (who[:, 1:] != who[:, :-1]).sum(1)
    return [int(people.min()), int(people.max()), *rows.shape[1:]]


def modal_pk(case: str) -> Sample:
    from trainkit.data.people import pk_sampler  # noqa: F401  here and below, so that no import counts as getting ready

    return measured(partial(Ours, "modal_pk"), modal=True)


def pk(case: str) -> Sample:
    from trainkit.data.people import pk_sampler  # noqa: F401

    return measured(partial(Ours, "pk"))


def m_per_class(case: str) -> Sample:
    from pytorch_metric_learning import samplers  # noqa: F401

    return measured(MPerClass)


def popular(case: str) -> Sample:
    return measured(Popular)


CONTEST = Contest(
    title="P x K batches from 10 million records",
    unit="us of CPU per batch",
    baseline="modal_pk",
    sides={"modal_pk": modal_pk, "pk": pk, "m_per_class": m_per_class, "popular": popular},
    ours=("modal_pk", "pk"),
    targets=(
        Target("", "modal_pk", 20, "value", words="modal_pk, us per batch,"),
        Target("", "modal_pk", 5, "value", words="modal_pk, us per batch (goal)"),
        Target("", "pk", 5, "value", words="pk, us per batch (goal)"),
        Target("", "modal_pk", 1.2, "growth", words="modal_pk, growth from 15,000 records to 10 million,"),
        Target("", "pk", 1.2, "growth", words="pk, growth from 15,000 records to 10 million,"),
        Target("", "popular", 4000, least=True, words="popular, time relative to modal_pk (goal)"),
        Target("", "modal_pk", 8, "B a record", words="index, bytes per record"),
    ),
    bounds=(
        "Nearly all of the time of a batch is its share of sampling 256 batches together with numpy, on arrays of "
        "8,192 records: about 3 ms."
    ),
)


if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

"""Microseconds per P x K batch, from 15,000 records of 320 people to 10 million of 150,000, side by side in one run.

    python benchmarks/samplers.py
    ... --rounds 5 --batches 2000 --sizes 15000/320 10000000/150000 --sides modal_pk cached

Sides, each giving batches of 8 people with 4 records:

    modal_pk     ours: an RGB record and three of other modalities, one of each before a second of any
    pk           ours: four records of any modality
    m_per_class  pytorch-metric-learning's MPerClassSampler: four of any modality
    cached       dictionaries of each person's RGB and other records, made once; people are shuffled once an epoch
    popular      dictionaries as in much re-identification code: eight are drawn from the list of the people that have
                 four records left in this epoch, and those that have not are taken out of the list

Rounds run all sides at all sizes in turn; figures are medians of rounds, `longest` is of all. Equal work is proved: a
batch is checked to be eight different people with four of their own records, an RGB record among them where that is
promised. The first batch of an epoch is timed apart, later beginnings of epochs belong to the cost of a batch. Bytes
are of our arrays; of others what the process grew by while a sampler was made. One thread; CPU time stands beside
wall-clock time because others may be using the machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil

from trainkit import seeding
from trainkit.data.sampling import PK, Cells, Draw, ModalPK

PEOPLE, EACH = 8, 4
SHARES = (0.296, 0.171, 0.118, 0.118, 0.297)
"""Of the modalities, as in ORBench: 45,113 photographs and captions, 26,071 infrared, 18,000 of each drawing."""
SIZES = ((15_000, 320), (150_000, 3_200), (1_000_000, 20_000), (10_000_000, 150_000))
LIMIT = 1.5
"""Seconds that a side may take in a round, its first batch apart."""


def made_up(records: int, people: int) -> tuple[np.ndarray, np.ndarray]:
    """Person and modality of each record, in no order."""
    rng = np.random.default_rng(0)
    return rng.integers(0, people, records).astype(np.int32), rng.choice(5, records, p=SHARES).astype(np.int8)


# ---- the sides: made from person and modality; each call of `epoch` begins another epoch and yields batches


class Ours:
    """trainkit's."""

    def __init__(self, person: np.ndarray, modality: np.ndarray, people: int, modal: bool):
        spec = (ModalPK if modal else PK)(people=PEOPLE, each=EACH, epoch="records")
        self.draw = Draw(spec, Cells.make(person, modality, people), 0)
        self.bytes, self.number = self.draw.bytes, 0

    def epoch(self) -> Iterator[np.ndarray]:
        self.number += 1
        order = self.draw.order(self.number, PEOPLE * EACH)
        return (order[update, 0:32] for update in range(len(order)))


class MPerClass:
    """pytorch-metric-learning's. Draws all that it was asked for before the first batch, so it is asked for few."""

    def __init__(self, person: np.ndarray, modality: np.ndarray, people: int):
        from pytorch_metric_learning.samplers import MPerClassSampler

        self.sampler = MPerClassSampler(person, EACH, PEOPLE * EACH, length_before_new_iter=len(person))

    def some(self, batches: int) -> list[np.ndarray]:
        """So many batches."""
        self.sampler.list_size = batches * PEOPLE * EACH
        return list(np.asarray(list(self.sampler)).reshape(batches, -1))


class Cached:
    """Dictionaries of RGB and of other records, and people shuffled once an epoch."""

    def __init__(self, person: np.ndarray, modality: np.ndarray, people: int):
        self.rgb, self.other = defaultdict(list), defaultdict(list)
        for row, (who, what) in enumerate(zip(person.tolist(), modality.tolist(), strict=True)):
            (self.other if what else self.rgb)[who].append(row)
        self.people = [who for who in self.rgb if who in self.other]

    def epoch(self) -> Iterator[list[int]]:
        people = self.people.copy()
        random.shuffle(people)
        for first in range(0, len(people) - PEOPLE + 1, PEOPLE):
            batch = []
            for who in people[first : first + PEOPLE]:
                other = self.other[who]
                batch.append(random.choice(self.rgb[who]))
                if len(other) >= EACH - 1:
                    batch += random.sample(other, EACH - 1)
                else:
                    batch += random.choices(other, k=EACH - 1)
            yield batch


class Popular:
    """People drawn from the list of those with enough records left; records are shuffled when first drawn."""

    def __init__(self, person: np.ndarray, modality: np.ndarray, people: int):
        self.rows = defaultdict(list)
        for row, who in enumerate(person.tolist()):
            self.rows[who].append(row)

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


SIDES = {
    "modal_pk": lambda *set_: Ours(*set_, modal=True),
    "pk": lambda *set_: Ours(*set_, modal=False),
    "m_per_class": MPerClass,
    "cached": Cached,
    "popular": Popular,
}
MODAL = ("modal_pk", "cached")


@dataclass
class Line:
    """One side at one size."""

    sampler: object
    setup: float
    grown: int
    firsts: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    longest: float = 0.0
    batches: int = 0


def make(side: str, person: np.ndarray, modality: np.ndarray, people: int) -> Line:
    """Make a sampler, timed, and see what memory it took."""
    gc.collect()
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    sampler = SIDES[side](person, modality, people)
    seconds = time.perf_counter() - began
    gc.collect()
    grown = getattr(sampler, "bytes", None) or psutil.Process().memory_info().rss - before
    return Line(sampler, seconds, grown)


def measure(line: Line, batches: int) -> list:
    """One round; the batches, to be checked."""
    gc.disable()  # as timeit does
    began = time.perf_counter()
    if isinstance(line.sampler, MPerClass):
        line.sampler.some(2)
        line.firsts.append((time.perf_counter() - began) / 2)
        count = max(2, min(batches, int(LIMIT / line.firsts[-1])))
        began, cpu = time.perf_counter(), time.thread_time()
        taken = line.sampler.some(count)
        line.means.append((time.perf_counter() - began) / count)
        line.cpu.append((time.thread_time() - cpu) / count)
        line.p99s.append(float("nan"))
    else:
        source = line.sampler.epoch()
        taken = [next(source)]
        line.firsts.append(time.perf_counter() - began)
        times, cpu, until = [], time.thread_time(), time.perf_counter() + LIMIT
        while len(times) < batches and (now := time.perf_counter()) < until:
            batch = next(source, None)
            if batch is None:  # another epoch, which is part of the cost of its batches
                source = line.sampler.epoch()
                batch = next(source)
            times.append(time.perf_counter() - now)
            taken.append(batch)
        line.cpu.append((time.thread_time() - cpu) / len(times))
        line.means.append(statistics.fmean(times))
        line.p99s.append(float(np.percentile(times, 99)))
        line.longest = max(line.longest, *times)
    gc.enable()
    line.batches += len(taken)
    return taken


def check(side: str, taken: list, person: np.ndarray, modality: np.ndarray) -> None:
    """That these are batches of eight people with four records each, or an AssertionError."""
    rows = np.asarray(taken).reshape(-1, PEOPLE, EACH)
    who = person[rows]
    assert (who == who[..., :1]).all(), f"{side}: a group has two people"
    apart = np.sort(who[..., 0], axis=1)
    assert (apart[:, 1:] > apart[:, :-1]).all(), f"{side}: a person is twice in a batch"
    if side in MODAL:
        assert ((modality[rows] == 0).sum(2) == 1).all(), f"{side}: not one RGB record and three others"


def main() -> None:
    """Print one line for each side and size, and what follows from them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2000, help="most batches of a side in a round")
    parser.add_argument("--sizes", nargs="+", default=[f"{n}/{p}" for n, p in SIZES], metavar="RECORDS/PEOPLE")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    given = parser.parse_args()
    sizes = [tuple(map(int, text.split("/"))) for text in given.sizes]
    import pytorch_metric_learning.samplers  # noqa: F401  so that its memory is not taken for a sampler's

    sets, lines = {}, {}
    for size in sizes:
        sets[size] = made_up(*size)
        for side in given.sides:
            print(f"making {side} of {size[0]:,}", file=sys.stderr, flush=True)
            lines[size, side] = make(side, *sets[size], size[1])
    for _ in range(given.rounds):
        for (size, side), line in lines.items():
            check(side, measure(line, given.batches), *sets[size])
    print(f"load {os.getloadavg()[0]:.1f}; batches of {PEOPLE} x {EACH}, {given.rounds} rounds, all batches checked")
    head = (
        "records",
        "people",
        "sampler",
        "us a batch",
        "CPU us",
        "p99 us",
        "longest us",
        "first, ms",
        "set-up, s",
        "B a record",
    )
    print(("{:>10} {:>8} {:>12}" + " {:>11}" * 7).format(*head))
    for (size, side), line in lines.items():
        told = [1e6 * statistics.median(figures) for figures in (line.means, line.cpu, line.p99s)]
        told.append(1e6 * line.longest)
        told += [1e3 * statistics.median(line.firsts), line.setup, line.grown / size[0]]
        words = ["-" if number != number or not number else f"{number:,.3g}" for number in told]
        words = [word if "e" not in word else f"{number:,.0f}" for word, number in zip(words, told, strict=True)]
        print(("{:>10,} {:>8,} {:>12}" + " {:>11}" * 7).format(*size, side, *words))
    for side in given.sides:
        least, most = (lines[size, side].cpu for size in (sizes[0], sizes[-1]))
        grown = statistics.median(b / a for a, b in zip(least, most, strict=True))
        against = [m / o for m, o in zip(most, lines[sizes[-1], given.sides[0]].cpu, strict=True)]
        told = f"x {grown:.2f} from smallest to largest; there {statistics.median(against):,.1f} times {given.sides[0]}"
        print(f"{side}: {told} (CPU; medians of ratios within a round)")
    for size, side in lines:
        if side != "modal_pk":
            continue
        draw, times = lines[size, side].sampler.draw, []
        for batch in (draw.batches // 2, draw.batches - 1, draw.batches // 3) * 5:
            began = time.perf_counter()
            draw.order(1, PEOPLE * EACH)[batch, 0:32]
            times.append(time.perf_counter() - began)
        told = f"{1e3 * statistics.median(times):.2f} ms (least {1e3 * min(times):.2f})"
        if (size, "cached") in lines:
            skipped = statistics.median(lines[size, "cached"].means) * (draw.batches // 2)
            told += f"; cached, skipping {draw.batches // 2:,}: {skipped:.2g} s, computed"
        print(f"{size[0]:,} records: any batch is there after {told}")
    times = []
    for key in range(20):
        began = time.perf_counter()
        seeding.permuted(0, "order", key, 10**9, np.arange(32))
        times.append(time.perf_counter() - began)
    print(f"first 32 of a permutation of 10^9: {1e3 * statistics.median(times):.2f} ms")


if __name__ == "__main__":
    main()

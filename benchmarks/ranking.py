"""Ranking a gallery: scores by counting in parts against a full matrix that is sorted, the same scores of both.

    python benchmarks/ranking.py                prints the table; the largest set by a part of its queries
    python benchmarks/ranking.py --full         the largest set with all its queries: some ten minutes of a core
    python benchmarks/ranking.py --sizes 1000   other sizes, queries and gallery each

Drawn features of 128 dimensions, 20 gallery records a person, six cameras of which the query's own is hidden. Each side
runs in a process of its own, one after the other. Time is the processor's, of all threads, which other work on the
machine lengthens little; memory is the peak above what the process held with the features loaded and its side warm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from trainkit.data.protocols import Search
from trainkit.metrics.search import score_search

SIZES = (1_000, 3_000, 10_000)
LARGEST = 100_000
PART = 1_024
WIDTH, EACH, CAMERAS = 128, 20, 6
PLAIN_BYTES = 25
"""A pair in the full matrix: a float32, its order in int64, the float32 that is sorted, and what argsort works in."""


def drawn(queries: int, gallery: int) -> tuple[np.ndarray, Search]:
    """Features (queries + gallery, 128) that lean towards their person, and who meets whom."""
    rng = np.random.default_rng(0)
    persons = max(1, gallery // EACH)
    person = np.concatenate([rng.integers(0, persons, queries), np.arange(gallery) % persons])
    features = rng.standard_normal((queries + gallery, WIDTH), dtype=np.float32)
    features += 0.45 * rng.standard_normal((persons, WIDTH), dtype=np.float32)[person]
    asks = np.full((queries, 5), -1)
    asks[:, 1] = np.arange(queries)
    rows = np.arange(queries, queries + gallery)
    place = rng.integers(0, CAMERAS, queries + gallery)
    return features, Search(person, place, (rows,), {"nir": asks}, ("",) * len(person))


def counted(features: np.ndarray, protocol: Search) -> dict[str, float]:
    """Scores as trainkit takes them."""
    metrics = score_search(features, protocol, lambda x, there: x.sum(1)).metrics
    return {key: metrics[key] for key in ("map", "rank_1", "rank_5", "rank_10", "minp")}


def sorted_whole(features: np.ndarray, protocol: Search) -> dict[str, float]:
    """Scores from the whole matrix of cosines, each line of it sorted."""
    asks, rows = protocol.queries["nir"][:, 1], protocol.galleries[0]
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    order = np.argsort(-(unit[asks] @ unit[rows].T), axis=1)
    ap, inp, first = [], [], []
    for query, line in zip(asks, order, strict=True):
        same = protocol.person[rows[line]] == protocol.person[query]
        right = same[~(same & (protocol.place[rows[line]] == protocol.place[query]))]
        places = np.flatnonzero(right) + 1
        if len(places):
            ap.append((np.arange(1, len(places) + 1) / places).mean())
            inp.append(len(places) / places[-1])
            first.append(places[0])
    ranks = {f"rank_{k}": float((np.array(first) <= k).mean()) for k in (1, 5, 10)}
    return {"map": float(np.mean(ap)), **ranks, "minp": float(np.mean(inp))}


SIDES = {"counted": counted, "sorted": sorted_whole}


def _status(field: str) -> float:
    """MiB that `/proc` says of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def one(side: str, queries: int, gallery: int) -> dict:
    """One side's seconds by the clock and of the processor, MiB and scores, in this process."""
    SIDES[side](*drawn(64, 200))
    features, protocol = drawn(queries, gallery)
    held, began, worked = _status("VmRSS"), time.perf_counter(), time.process_time()
    scores = SIDES[side](features, protocol)
    took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - worked}
    return {**took, "mib": max(0.0, _status("VmHWM") - held), "scores": scores}


def child(side: str, queries: int, gallery: int) -> dict:
    """The same in a process of its own, whose peak nothing else has a part in."""
    words = [sys.executable, __file__, "--side", side, "--queries", str(queries), "--gallery", str(gallery)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{side}, {queries} x {gallery}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def line(queries: int, gallery: int, repeats: int, room: float) -> list[str]:
    """One line of the table; `room` is how many MiB the matrix may take."""
    needs = queries * gallery * PLAIN_BYTES / 2**20
    sides = ["counted", "sorted"] if needs < room else ["counted"]
    runs = [{side: child(side, queries, gallery) for side in sides} for _ in range(repeats)]
    ours = [run["counted"] for run in runs]
    cells = [f"{queries:,} x {gallery:,}", _range([x["cpu"] for x in ours]), f"{max(x['mib'] for x in ours):,.0f}"]
    if len(sides) == 1:
        return [*cells, f"about {needs / 1024:,.0f} GiB needed", "", "", f"{ours[0]['scores']['map']:.4f}", ""]
    plain = [run["sorted"] for run in runs]
    ratio = [b["cpu"] / a["cpu"] for a, b in zip(ours, plain, strict=True)]
    scores = ours[0]["scores"], plain[0]["scores"]
    gap = max(abs(scores[0][key] - scores[1][key]) for key in scores[0])
    # In float32 a wrong record may change places with a right one that is as near but for a rounding.
    if gap > max(1e-4, 3 / queries):
        raise ValueError(f"unequal work: {scores[0]} counted and {scores[1]} sorted, {queries} x {gallery}")
    return [*cells, _range([x["cpu"] for x in plain]), f"{max(x['mib'] for x in plain):,.0f}", _range(ratio),
            f"{scores[0]['map']:.4f}", f"{gap:.0e}"]  # fmt: skip


def _range(values: list[float]) -> str:
    low, middle, high = min(values), float(np.median(values)), max(values)
    return f"{middle:.3g} ({low:.3g}-{high:.3g})" if len(values) > 1 else f"{middle:.3g}"


def table(sizes: list[int], largest: int, part: int, repeats: int, room: float) -> str:
    """The table, a line a size and one for the largest gallery with `part` queries."""
    head = [
        "queries x gallery",
        "counted, CPU s",
        "MiB",
        "sorted, CPU s",
        "MiB",
        "times as fast",
        "mAP",
        "largest difference",
    ]
    lines = [line(size, size, repeats, room) for size in sizes]
    if largest:
        lines.append(line(part, largest, 1, room))
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    out += ["| " + " | ".join(cells) + " |" for cells in lines]
    said = f"{torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f} at the end, {repeats} repeats"
    if largest and part < largest:
        minutes = float(lines[-1][1]) * largest / part / 60
        said += (
            f". With {largest:,} queries the last line would take {minutes:.0f} minutes of a core, and no more memory"
        )
        said += " but for the queries themselves"
    return "\n".join([*out, "", said + "."])


def main() -> None:
    """Print the table, or what one side took."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    words.add_argument("--largest", type=int, default=LARGEST, help="gallery of the last line; 0 for none")
    words.add_argument("--full", action="store_true", help="the last line with as many queries")
    words.add_argument("--repeats", type=int, default=3)
    words.add_argument("--room", type=float, default=6_000, help="MiB that a full matrix may take")
    words.add_argument("--side", choices=SIDES)
    words.add_argument("--queries", type=int, default=1_000)
    words.add_argument("--gallery", type=int, default=1_000)
    given = words.parse_args()
    if given.side:
        print(json.dumps(one(given.side, given.queries, given.gallery)))
    else:
        part = given.largest if given.full else min(PART, given.largest)
        print(table(given.sizes, given.largest, part, given.repeats, given.room))


if __name__ == "__main__":
    main()

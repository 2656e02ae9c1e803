"""Scores of a gallery: places by counting in parts against a full matrix of cosines, each line of it sorted.

    python benchmarks/ranking.py
    ... --cases 1024x100000            1,024 queries, a gallery of 100,000
    ... --cases 100000 --rounds 1      as many queries: some minutes of a core, and 233 GiB for the matrix

Drawn features of 128 dimensions, as many queries as the gallery has records, 20 of these a person, six cameras of which
the query's own is hidden. CPU seconds; MB are the peak above what the process held with the features loaded and its
side warm. The proof: mAP, ranks 1, 5 and 10 and mINP, equal but for 3 in 10,000: in float32 a wrong record may change
places with a right one that is as near but for a rounding.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from contest import Contest, Sample, Target

WIDTH, EACH, CAMERAS = 128, 20, 6
RANKS = (1, 5, 10)


def drawn(queries: int, gallery: int) -> tuple[np.ndarray, Any]:
    """Features (queries + gallery, 128) that lean towards their person, and who meets whom."""
    from trainkit.evaluation_protocols import Search

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


def counted_scores(features: np.ndarray, protocol: Any) -> list[float]:
    """As trainkit takes them."""
    from trainkit.metrics.reid import score_search

    found = score_search(features, protocol, lambda x, there: x.sum(1)).metrics
    return [found[key] for key in ("map", *(f"rank_{k}" for k in RANKS), "minp")]


def sorted_scores(features: np.ndarray, protocol: Any) -> list[float]:
    """From the whole matrix."""
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
    return [float(np.mean(ap)), *(float((np.array(first) <= k).mean()) for k in RANKS), float(np.mean(inp))]


def measured(scores: Callable[[np.ndarray, Any], list[float]], case: str) -> Sample:
    """CPU seconds of all queries of a case, `QUERIESxGALLERY` or one number for both."""
    queries, _, gallery = case.partition("x")
    scores(*drawn(64, 200))
    features, protocol = drawn(int(queries), int(gallery or queries))
    held, began = _memory("VmRSS"), time.process_time()
    found = scores(features, protocol)
    return Sample(time.process_time() - began, found, {"MB": max(0.0, _memory("VmHWM") - held)})


def _memory(field: str) -> float:
    """MB that `/proc` says of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / 1e6


def counted(case: str) -> Sample:
    return measured(counted_scores, case)


def sorted_whole(case: str) -> Sample:
    return measured(sorted_scores, case)


CONTEST = Contest(
    title="Ranking a retrieval gallery",
    unit="s of CPU",
    baseline="sorted",
    sides={"sorted": sorted_whole, "counted": counted},
    ours=("counted",),
    cases=("1000", "3000", "10000", "1024x100000", "100000"),
    on_request=("1024x100000", "100000"),
    only={"100000": ("counted",)},
    tolerance=3e-4,
    timeout=1800,
    targets=(
        Target("1000", "counted", 1.0, words="1,000 queries and records, time relative to sorted,"),
        Target("10000", "counted", 0.5, words="10,000 queries and records, time relative to sorted,"),
        Target("10000", "counted", 150, "MB", words="10,000 queries and records, MB"),
        Target("100000", "counted", 1000, "MB", words="100,000 queries and records, MB"),
    ),
    share=0.67,
)


if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

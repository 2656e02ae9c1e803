"""How often the intervals of scores of pairs of faces hold the truth, in simulated test sets: coverage by score.

    python benchmarks/pair_intervals.py
    ... --sets 1000 --people 100

Every set has other people and other pairs; so many pairs of one person and so many of two for each person. The distance
of a pair is that of its kind, 2.6 standard deviations apart, plus what its people add and what the pair alone adds, in
the proportion `person` to the rest of the variance, half of each the same for two models. A person whose pairs of one
person are far apart is near to others. Coverage of the difference of the two is how often the interval holds 0, of one
score how often it holds the mean over all sets. 0.95 is said; of 400 sets 0.93 to 0.97 are within chance.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from trainkit.analysis import saved_rows
from trainkit.metrics import significance, verification

PEOPLE, PAIRS, PERSON = (20, 50, 100, 300), ((1, 1), (2, 6)), (0.0, 0.5, 0.9)
"""Numbers of people; pairs of one person and of two for each person; shares of the variance that are of people."""
SCORES = ("accuracy", "auc", "eer", "tar_at_far_1e-1", "tar_at_far_1e-2")


def networks(
    rng: np.random.Generator, people: int, same: int, other: int, person: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows as `score_pairs` keeps them of two models that are as good, on a new set."""
    one = rng.integers(0, people, people * other)
    first = np.concatenate([np.repeat(np.arange(people), same), one])
    second = np.concatenate([first[: people * same], (one + rng.integers(1, people, len(one))) % people])
    order = rng.permutation(len(first))
    first, second = first[order], second[order]
    known = first == second

    def effect() -> np.ndarray:
        of_person, of_pair = math.sqrt(person) * rng.normal(size=people), rng.normal(size=len(known))
        both = np.where(known, of_person[first], -(of_person[first] + of_person[second]) / math.sqrt(2))
        return math.sqrt(0.5) * (both + math.sqrt(1 - person) * of_pair)

    shared = effect()
    rows = {"first": 2 * first, "second": 2 * second + known, "same": known}
    rows["fold"] = verification.contiguous_folds(len(known))
    distance = [np.clip(2 - 0.9 * known + 0.35 * (shared + effect()), 0, 3.99) for _ in range(2)]
    return rows | {"distance": distance[0]}, rows | {"distance": distance[1]}


def scored(rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Scores of all rows once."""
    found = verification.resampled(rows, np.ones((1, len(rows["same"]))))
    return {name: float(found[name][0]) for name in SCORES if math.isfinite(found[name][0])}


def intervals(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], draws: int
) -> tuple[dict[str, significance.Interval], dict[str, significance.Interval]]:
    """Of the differences of two models, as `compare` finds them, and of the scores of the first."""
    units, one, other = verification.units(first), scored(first), scored(second)

    def differences(times: np.ndarray) -> dict[str, np.ndarray]:
        before, after = (verification.resampled(rows, times) for rows in (first, second))
        return {name: after[name] - before[name] for name in one}

    drawn = significance.resampled(units, differences, draws)
    gaps = {
        name: significance.bootstrap_interval(other[name] - one[name], drawn[name], units.independent) for name in one
    }
    single = saved_rows.intervals(first, one, draws)[0]
    return {name: interval for name, interval in gaps.items() if interval}, single


def coverage(
    people: int, same: int, other: int, person: float, sets: int, draws: int, seed: int = 0
) -> Iterator[tuple[str, float, float, float]]:
    """Score; coverage of the difference, of the score; standard deviation of the difference over the sets."""
    rng = np.random.default_rng(seed)
    made = [networks(rng, people, same, other, person) for _ in range(sets)]
    values = [tuple(map(scored, pair)) for pair in made]
    found = [intervals(*pair, draws) for pair in made]
    for name in SCORES:
        gaps = [gap[name] for gap, _ in found if name in gap]
        single = [one[name] for _, one in found if name in one]
        if min(len(gaps), len(single)) < sets / 2:  # a rate that so few pairs do not resolve
            continue
        truth = float(np.mean([one[name] for one, _ in values if name in one]))
        yield (
            name,
            float(np.mean([interval.low <= 0 <= interval.high for interval in gaps])),
            float(np.mean([interval.low <= truth <= interval.high for interval in single])),
            float(np.std([interval.difference for interval in gaps])),
        )


def main() -> None:
    """Print the table."""
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--sets", type=int, default=400)
    ask.add_argument("--draws", type=int, default=300)
    ask.add_argument("--people", type=int, nargs="*", default=PEOPLE)
    ask.add_argument("--person", type=float, nargs="*", default=PERSON)
    words = ask.parse_args()
    print(
        "| identities | pairs each, same + other | identity | metric | difference | single value | sd of difference |"
    )
    print("|---|---|---|---|---|---|---|")
    for people, (same, other), person in itertools.product(words.people, PAIRS, words.person):
        for name, gap, single, spread in coverage(people, same, other, person, words.sets, words.draws):
            line = f"| {people} | {same} + {other} | {person} | {name} | {gap:.3f} | {single:.3f} | {spread:.4f} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()

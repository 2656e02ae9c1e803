"""People found again in colour by any mixture of modalities: does each one added help, and does a larger model?

    python benchmarks/reid.py            runs what is missing, prints the tables
    python benchmarks/reid.py --table    prints the tables of what is there

Faces of LFW, a quarter of the people held out, with modalities derived from photographs that are not in the gallery;
and drawn people. Two widths of one model, three seeds each, scores of the last weights. `pixels` are small copies of
the images, which know nothing of words: a query with a caption is to them what it is without.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import comparison
from comparison import Row

SMALLER = "task.net.args={layers: [1, 1, 1, 1], channels: [16, 32, 64, 128], output_stride: 16}"
TITLES = ("half as wide", "as shipped")
RECIPES = {"reid_faces": "reid-faces", "reid": "reid"}
"""Recipe to the experiment that its runs are kept in."""
SET, PIXELS = "val", "pixels"
COLUMNS = {
    "mAP": f"{SET}/map",
    "rank-1": f"{SET}/rank_1",
    "mAP of 1": f"{SET}/modal_1.map",
    "of 2": f"{SET}/modal_2.map",
    "of 3": f"{SET}/modal_3.map",
    "of 4 modalities": f"{SET}/modal_4.map",
}
ADDED = ("nir", "nir_cp", "nir_cp_sk", "nir_cp_sk_text")
"""Modalities one by one, in the order in which codes have them."""

Histories = Mapping[str, Sequence[Any]]
"""Journals of the runs of each row that are there, in the order of seeds."""


def rows(recipe: str) -> list[Row]:
    """The narrower model, and the recipe as it is."""
    return [Row(TITLES[0], recipe, (SMALLER,)), Row(TITLES[1], recipe)]


def read(listed: Sequence[Row], experiment: str) -> Histories:
    """What the finished runs of rows wrote down; rows without one are left out."""
    from trainkit.tracking import journal

    found = {}
    for row in listed:
        runs = [comparison.finished(row, seed, experiment) for seed in comparison.SEEDS]
        if histories := [journal.read(run.journal) for run in runs if run is not None]:
            found[row.title] = histories
    return found


def by_query(found: Histories, lists: Sequence[str]) -> str:
    """mAP and rank-1 of each kind of query, as Markdown: pixels, then each row's mean and standard deviation."""
    first = next(iter(found.values()))[0]
    heads = [f"{title}: {score}" for title in (PIXELS, *found) for score in ("mAP", "rank-1")]
    lines = [f"| query | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in lists:
        metrics = [f"{SET}/{name}.{score}" for score in ("map", "rank_1")]
        cells = [f"{first.series(f'{PIXELS}/{metric}')[1][0]:.3f}" for metric in metrics]
        cells += [comparison.spread(last(runs, metric)) for runs in found.values() for metric in metrics]
        lines.append(f"| {said(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def added(found: Histories, lists: Sequence[str] = ADDED) -> str:
    """What each modality adds to a query, as Markdown: mAP, and its difference to the line above by seeds."""
    lines = [
        f"| query | {' | '.join(f'{title}: mAP | more' for title in found)} |",
        "|---" * (1 + 2 * len(found)) + "|",
    ]
    for i, name in enumerate(lists):
        cells = []
        for runs in found.values():
            now = last(runs, f"{SET}/{name}.map")
            cells.append(comparison.spread(now))
            cells.append(difference(now, last(runs, f"{SET}/{lists[i - 1]}.map")) if i else "")
        lines.append(f"| {said(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def larger(found: Histories) -> str:
    """How far the worst run of the last row is above the best run of the one before it, in mAP, in a sentence."""
    if len(found) < 2:
        return "Only one model was trained: nothing to compare."
    (small, theirs), (large, ours) = list(found.items())[-2:]
    least, most = min(last(ours, f"{SET}/map")), max(last(theirs, f"{SET}/map"))
    order = "above" if least > most else "NOT above"
    said = f"{large}: its worst run has mAP {least:.3f}, {order} the {most:.3f} of the best run of {small}"
    now, before = last(ours, f"{SET}/map"), last(theirs, f"{SET}/map")
    if len(now) == len(before):
        each = ", ".join(f"{a - b:+.3f}" for a, b in zip(now, before, strict=True))
        said += f"; seed by seed it is {difference(now, before)} ({each})"
    return f"{said}."


def difference(now: Sequence[float], before: Sequence[float]) -> str:
    """Mean and standard deviation of paired differences, with its sign."""
    differ = [a - b for a, b in zip(now, before, strict=True)]
    mean = f"{statistics.mean(differ):+.3f}"
    return mean if len(differ) < 2 else f"{mean} ± {statistics.stdev(differ):.3f}"


def last(runs: Sequence[Any], metric: str) -> list[float]:
    """The last value of a metric in each run."""
    return [history.series(metric)[1][-1] for history in runs]


def said(name: str) -> str:
    """`nir_sk_text` as a reader says it."""
    return name.replace("_", " + ")


def main() -> None:
    """Train what is missing and print the tables of both sets."""
    from trainkit.data.people.modalities import subsets, title

    every = [title(some) for some in subsets()]
    for recipe, experiment in RECIPES.items():
        listed = rows(recipe)
        print(f"{recipe}\n")
        comparison.run(listed, COLUMNS, experiment, reference=PIXELS)
        if found := read(listed, experiment):
            print(f"\n{larger(found)}\n\n{added(found)}\n\n{by_query(found, every)}\n")


if __name__ == "__main__":
    comparison.need_data()
    main()

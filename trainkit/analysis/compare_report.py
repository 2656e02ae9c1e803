"""A comparison of runs as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainkit.analysis.compare import Comparison, Score, Side
from trainkit.config import diff
from trainkit.errors import few
from trainkit.terminal import aligned, numbers, split

VERDICTS = {"better": "significantly better", "worse": "significantly worse", "not decided": "inconclusive"}
_SHOWN = 8
"""Metrics of an evaluation that are shown, without those of classes."""


def text(found: Comparison) -> str:
    """Return the text of a comparison for the terminal."""
    lines = ["", *(f"{letter}  {about(side)}" for letter, side in zip("AB", found.sides, strict=True)), ""]
    lines += [f"note   {note}" for note in found.notes] + ([""] if found.notes else [])
    lines += ["changes in B", *(diff.lines(found.changes) or ["none: the recipes are the same"]), ""]
    if found.place:
        lines += ["other differences in B", *diff.lines(found.place), ""]
    for evaluation, scores in by_evaluation(found.scores):
        lines += [*_table(evaluation, scores), ""]
    lines += [*aligned(speeds(found)), ""]
    alone = {change.key for change in found.changes} <= {"seed"}
    return "\n".join([*lines, f"verdict  {sentence(found.primary, alone)}"])


def _table(evaluation: str, scores: Sequence[Score]) -> list[str]:
    """Return the scores of an evaluation in columns, without those of classes."""
    whole = split([score.metric for score in scores])[0]
    shown = [score for score in scores if score.primary or score.metric in whole[:_SHOWN]]
    seeds = any(score.seeds for score in shown)
    rows = [[evaluation, "A", "B", "B - A", "95 % CI", *["CI over repeats"] * seeds, "verdict"]]
    for score in shown:
        again = ends(score.seeds.low, score.seeds.high, score.values) if score.seeds else "-"
        name = f"{score.metric}{' *' if score.primary else ''}{' (lower is better)' if score.lower_is_better else ''}"
        rows.append([name, *numbers(score.values), gap(score), span(score), *[again] * seeds, verdict(score)])
    drawn = next((score for score in shown if score.units), None)
    under = [f"  CI: {method(drawn)}"] if drawn else []
    under += ["  * primary metric"] if any(score.primary for score in shown) else []
    return [*aligned(rows), *under, *(f"  {why}" for why in whys(shown))]


# ---- Words and numbers ----------------------------------------------------------------------------------------------


def sentence(score: Score | None, alone: bool) -> str:
    """State the verdict on a side by the primary metric, its interval, and what the interval leaves out.

    `alone`: the recipes differ in their seed at most.
    """
    said = f"{headline(score)}{evidence(score)}"
    if score is None or score.verdict not in ("better", "worse") or score.seeds is not None:
        return said
    if alone:
        return f"{said}. The recipes are the same: another seed, or training again, can change the metric as much"
    return f"{said}. Variation between seeds is not included; measure it with: trainkit repeat RECIPE --seeds 5"


def headline(score: Score | None) -> str:
    """State the verdict on a side by the primary metric, with the difference."""
    if score is None:
        return "B and A share no primary metric; name one in the recipe: `best: {{metric: ...}}`"
    if score.verdict == "not comparable":
        return f"B and A are not comparable on {score.name}: {score.why}"
    if score.verdict == "not decided":
        return f"B vs. A is inconclusive on {score.name}: {gap(score)}"
    return f"B is {VERDICTS[score.verdict]} than A on {score.name}: {gap(score)}"


def evidence(score: Score | None) -> str:
    """Return the intervals behind a verdict, in brackets; empty where there are none."""
    if score is None or score.verdict == "not comparable":
        return ""
    parts = [f"95 % CI {span(score)}; {method(score)}"] * bool(score.draws)
    if score.seeds is not None:
        parts.append(f"95 % CI over repeats {ends(score.seeds.low, score.seeds.high, score.values)}")
    if score.verdict == "not decided" and score.why:
        parts.append(score.why)
    return f" ({'; '.join(parts)})" if parts else ""


def method(score: Score) -> str:
    """Name the bootstrap, its resamples and its units."""
    return f"paired bootstrap, n = {score.draws:,} over {score.units}"


def about(side: Side) -> str:
    """Return a side's name, status, last step, and its repeats or folds."""
    several = f", {len(side.runs)} repeats" if len(side.runs) > 1 else f", {len(side.folds)} folds" * bool(side.folds)
    info = side.folder.info()
    return f"{side.name}  {info.status.lower()}, step {info.last_step}{several}"


def by_evaluation(scores: Sequence[Score]) -> Iterator[tuple[str, list[Score]]]:
    """Yield the scores of each evaluation, the primary one first; none twice where final and best are the same."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.evaluation, []).append(score)
    values = {name: {score.metric: score.values for score in own} for name, own in found.items()}
    for name in sorted(found, key=lambda name: not any(score.primary for score in found[name])):
        if values[name] != values.get(f"best/{name}"):
            yield name, found[name]


def whys(scores: Sequence[Score]) -> list[str]:
    """List the reasons why scores have no verdict, with the scores where it is not all."""
    found: dict[str, list[str]] = {}
    for score in scores:
        if score.why:
            found.setdefault(score.why, []).append(score.metric)
    return [why if len(names) == len(scores) else f"{few(names)}: {why}" for why, names in found.items()]


def verdict(score: Score) -> str:
    """Return the verdict on a score in words."""
    return VERDICTS.get(score.verdict, score.verdict)


def gap(score: Score) -> str:
    """Return the difference with its sign."""
    return "-" if score.difference is None else f"{score.difference:+.{_places(score.values)}f}"


def ends(low: float, high: float, values: Sequence[float]) -> str:
    """Return the ends of an interval."""
    return f"{low:.{_places(values)}f} to {high:.{_places(values)}f}"


def _places(values: Sequence[float]) -> int:
    """Return how many places a difference has: as many as `terminal.numbers` gives such values."""
    largest = max((abs(one) for one in values if math.isfinite(one)), default=0.0)
    return 4 if largest < 10 else 2 if largest < 1000 else 0


def span(score: Score) -> str:
    """Return the interval of the difference."""
    return "-" if score.low is None or score.high is None else ends(score.low, score.high, score.values)


def speeds(found: Comparison) -> list[list[str]]:
    """Return rates, times and costs of both sides as rows of a table, with their ratio.

    Shares below half a percent on both sides are left out.
    """
    rows = [["speed and cost", "A", "B", "B / A"]]
    for name, values in found.speed.items():
        one, other = (math.nan if value is None else value for value in values)
        if name.endswith("_share") and not (one >= 0.005 or other >= 0.005):
            continue
        ratio = f"{other / one:.2f}" if one and not math.isnan(one + other) else "-"
        rows.append([name, *numbers([one, other]), ratio])
    return rows

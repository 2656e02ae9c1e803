"""A comparison of runs as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainkit.analysis.compare import Comparison, Pair, Score, Side
from trainkit.config import diff
from trainkit.errors import few
from trainkit.terminal import aligned, numbers, split

VERDICTS = {"better": "significantly better", "worse": "significantly worse", "not decided": "inconclusive"}
_SHOWN = 8
"""Metrics of an evaluation that are shown, without those of classes."""


def text(found: Comparison) -> str:
    """Return the text of a comparison for the terminal."""
    called = letters(len(found.sides))
    lines = ["", *(f"{letter}  {about(side)}" for letter, side in zip(called, found.sides, strict=True)), ""]
    lines += [f"note   {note}" for note in found.notes] + ([""] if found.notes else [])
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        lines += [f"changes in {letter}", *(diff.lines(pair.changes) or ["none: the recipes are the same"]), ""]
        if pair.place:
            lines += [f"other differences in {letter}", *diff.lines(pair.place), ""]
        for evaluation, scores in by_evaluation(pair.scores):
            lines += [*_table(evaluation, scores, called[0], letter, found.level), ""]
    lines += [*aligned(speeds(found)), ""]
    lines += verdicts(found)
    return "\n".join(lines)


def _table(evaluation: str, scores: Sequence[Score], first: str, letter: str, level: float) -> list[str]:
    """Return the scores of an evaluation in columns, without those of classes."""
    whole = split([score.metric for score in scores])[0]
    shown = [score for score in scores if score.primary or score.metric in whole[:_SHOWN]]
    seeds = any(score.seeds for score in shown)
    head = [evaluation, first, letter, f"{letter} - {first}", f"{percent(level)} CI"]
    rows = [[*head, *["CI over repeats"] * seeds, "verdict"]]
    for score in shown:
        again = ends(score.seeds.low, score.seeds.high, score.values) if score.seeds else "-"
        name = f"{score.metric}{' *' if score.primary else ''}{' (lower is better)' if score.lower_is_better else ''}"
        rows.append([name, *numbers(score.values), gap(score), span(score), *[again] * seeds, verdict(score)])
    drawn = next((score for score in shown if score.units), None)
    under = [f"  CI: {method(drawn)}"] if drawn else []
    under += ["  * primary metric"] if any(score.primary for score in shown) else []
    return [*aligned(rows), *under, *(f"  {why}" for why in whys(shown))]


# ---- Words and numbers ----------------------------------------------------------------------------------------------


def letters(many: int) -> list[str]:
    """Return the letters of sides in tables: A, B, ..., Z, A1, ..."""
    return [chr(65 + k % 26) + (str(k // 26) if k >= 26 else "") for k in range(many)]


def primary(pair: Pair) -> Score | None:
    """Return the score that decides a pair, if both sides have it."""
    return next((score for score in pair.scores if score.primary), None)


def verdicts(found: Comparison) -> list[str]:
    """Return a sentence for each side but the first."""
    called, lines = letters(len(found.sides)), []
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        alone = {change.key for change in pair.changes} <= {"seed"}
        lines.append(f"verdict  {sentence(primary(pair), called[0], letter, found.level, alone)}")
    return lines


def sentence(score: Score | None, first: str, letter: str, level: float, alone: bool) -> str:
    """State the verdict on a side by the primary metric, its interval, and what the interval leaves out.

    `alone`: the recipes differ in their seed at most.
    """
    said = f"{headline(score, first, letter)}{evidence(score, level)}"
    if score is None or score.verdict not in ("better", "worse") or score.seeds is not None:
        return said
    if alone:
        return f"{said}. The recipes are the same: another seed, or training again, can change the metric as much"
    return f"{said}. Variation between seeds is not included; measure it with: trainkit repeat RECIPE --seeds 5"


def headline(score: Score | None, first: str, letter: str) -> str:
    """State the verdict on a side by the primary metric, with the difference."""
    if score is None:
        return f"{letter} and {first} share no primary metric; name one in the recipe: `best: {{metric: ...}}`"
    if score.verdict == "not comparable":
        return f"{letter} and {first} are not comparable on {score.name}: {score.why}"
    if score.verdict == "not decided":
        return f"{letter} vs. {first} is inconclusive on {score.name}: {gap(score)}"
    return f"{letter} is {VERDICTS[score.verdict]} than {first} on {score.name}: {gap(score)}"


def evidence(score: Score | None, level: float) -> str:
    """Return the intervals behind a verdict, in brackets; empty where there are none."""
    if score is None or score.verdict == "not comparable":
        return ""
    parts = [f"{percent(level)} CI {span(score)}; {method(score)}"] * bool(score.draws)
    if score.seeds is not None:
        parts.append(f"{percent(level)} CI over repeats {ends(score.seeds.low, score.seeds.high, score.values)}")
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


def percent(level: float) -> str:
    """Return the level of an interval: `95 %`."""
    return f"{100 * level:.3g} %"


def speeds(found: Comparison) -> list[list[str]]:
    """Return rates, times and costs of all sides as rows of a table; of two sides with the ratio.

    Shares below half a percent everywhere are left out.
    """
    called = letters(len(found.sides))
    two = len(called) == 2
    rows = [["speed and cost", *called, *["B / A"] * two]]
    for name, values in found.speed.items():
        known = [math.nan if one is None else one for one in values]
        if name.endswith("_share") and not any(one >= 0.005 for one in known):
            continue
        ratio = f"{known[1] / known[0]:.2f}" if known[0] and not any(map(math.isnan, known[:2])) else "-"
        rows.append([name, *numbers(known), *[ratio] * two])
    return rows

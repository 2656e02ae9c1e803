"""A comparison of runs as text, as an image, as plain values, and as an MLflow run."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.analysis.compare import Comparison, Pair, Score
from trainkit.analysis.compare_words import (
    about,
    at_their_best,
    by_evaluation,
    by_scale,
    ends,
    farthest,
    gap,
    headline,
    letters,
    method,
    percent,
    reach,
    span,
    speeds,
    value,
    verdict,
    verdicts,
    whys,
)
from trainkit.config import diff
from trainkit.environment.record import origin
from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.terminal import aligned, numbers, split
from trainkit.tracking import markdown
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARED = "trainkit.compared"
"""Tag of the MLflow run that holds a comparison: the names of the runs compared."""
_SHOWN = 8
"""Metrics of an evaluation in the terminal, without those of classes; the values have all."""
_DRAWN = 24
"""Differences in the image."""


def text(found: Comparison) -> str:
    """Return the text of a comparison for the terminal."""
    called = letters(len(found.sides))
    lines = ["", *(f"{letter}  {about(side)}" for letter, side in zip(called, found.sides, strict=True)), ""]
    lines += [f"note   {note}" for note in found.notes] + ([""] if found.notes else [])
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        lines += [f"changes in {letter}", *(diff.lines(pair.changes) or ["none: the recipes are the same"]), ""]
        if pair.place:
            width = max(len(change.key) for change in pair.place)
            beside = [f"{c.key:{width}}  {value(c.before)} -> {value(c.after)}" for c in pair.place]
            lines += [f"other differences in {letter}", *beside, ""]
        for evaluation, scores in by_evaluation(pair.scores):
            lines += [*_table(evaluation, scores, called[0], letter, found.level), ""]
        for line in at_their_best(pair.scores):
            lines += [line, ""]
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


def write(found: Comparison, file: Path) -> None:
    """Write a comparison in the format of a file's ending: png, json, or else text."""
    if file.suffix == ".png":
        figure(found).savefig(file, dpi=120, bbox_inches="tight", format="png")
        return
    content = json.dumps(values(found), indent=1) if file.suffix == ".json" else text(found).lstrip("\n")
    file.write_text(content + "\n", encoding="utf-8")


def values(found: Comparison) -> dict[str, Any]:
    """Return the whole comparison as values of JSON."""
    return {
        "runs": [{"name": side.name, "runs": [run.name for run in side.folds or side.runs]} for side in found.sides],
        "notes": list(found.notes),
        "level": found.level,
        "compared": [_pair_values(pair) for pair in found.pairs],
        "speed": {speed.name: list(speed.values) for speed in found.speed},
        "verdicts": verdicts(found),
    }


def _pair_values(pair: Pair) -> dict[str, Any]:
    kept = ("name", "values", "difference", "low", "high", "draws", "units", "seeds", "verdict", "why", "primary")
    scores = [{key: getattr(score, key) for key in (*kept, "lower_is_better")} for score in pair.scores]
    for score in scores:
        score["seeds"] = score["seeds"] and [score["seeds"].low, score["seeds"].high]
    return {
        "run": pair.run,
        "changes": [str(change) for change in pair.changes],
        "place": [str(change) for change in pair.place],
        "same_data": pair.same_data,
        "scores": scores,
    }


def log(store: Store, found: Comparison) -> str:
    """Log a comparison as an MLflow run `comparison` in the experiment of the first run; returns its id.

    Its artifacts are the text, the image and the values. It has no folder and no metrics, so that no table
    of runs ranks it. Raises UserError where the store does not accept it.
    """
    client, info = store.client(), found.sides[0].folder.info()
    names = ", ".join(side.name for side in found.sides)
    note = "  \n".join(map(markdown.plain, verdicts(found)))
    tags = {**origin(), COMPARED: names, "mlflow.note.content": note}
    tags = {key: without_secrets(value)[:8000] for key, value in tags.items()}
    with tempfile.TemporaryDirectory() as aside, store.asking():
        for ending in ("txt", "png", "json"):
            write(found, Path(aside) / f"comparison.{ending}")
        experiment = client.get_experiment_by_name(info.experiment or "")
        if experiment is None:
            where = f"run {found.sides[0].name}"
            raise UserError(where, f"its experiment is not in {store.shown}", remedy="--no-log")
        run_id = client.create_run(experiment.experiment_id, run_name="comparison", tags=tags).info.run_id
        client.log_artifacts(run_id, aside)
        client.set_terminated(run_id)
    return run_id


# ---- The image -----------------------------------------------------------------------------------------------------


def figure(found: Comparison) -> Figure:
    """Draw the intervals of the differences, a row each, better to the right; scores of one scale share a panel.

    Scores of classes are left out, and those without an interval; the primary one of each pair comes first.
    """
    from trainkit.plots.style import GREEN, INK, QUIET, SMALL, VERMILION, blank, titled

    called = letters(len(found.sides))
    letter_of = {pair.run: letter for letter, pair in zip(called[1:], found.pairs, strict=True)}
    shown = []
    for pair in found.pairs:
        own = [score for _, scores in by_evaluation(pair.scores) for score in scores]
        own = [score for score in own if reach(score) and (score.primary or "." not in score.metric)]
        shown += sorted(own, key=lambda score: not score.primary)
    left_out, shown = max(0, len(shown) - _DRAWN), shown[:_DRAWN]
    panels = list(by_scale(shown).values()) or [[]]
    rows = [max(len(own), 1) for own in panels]
    drawn, grid = blank(height=0.7 + 0.5 * len(panels) + 0.32 * sum(rows), ratios=rows, shared=False)
    looks = {"better": (GREEN, GREEN), "worse": (VERMILION, VERMILION)}
    for axes, own in zip(grid, panels, strict=True):
        axes.axvline(0.0, color=QUIET, linewidth=1)
        for place, score in enumerate(own):
            low, middle, high = reach(score) or (math.nan, math.nan, math.nan)
            colour, inside = looks.get(score.verdict, (QUIET, "white"))
            axes.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.45)
            axes.plot(
                [middle], [place], color=colour, markerfacecolor=inside, marker="o", markersize=6, linestyle="none"
            )
            axes.annotate(
                f"{gap(score)}  ({span(score)})", (1.02, place), va="center", color=INK,
                xycoords=axes.get_yaxis_transform(), fontsize=SMALL, annotation_clip=False,
            )  # fmt: skip
        names = [f"{f'{letter_of[score.run]}: ' if len(found.pairs) > 1 else ''}{score.name}" for score in own]
        names = [name if len(name) <= 40 else f"{name[:39]}…" for name in names]
        axes.set_yticks(range(len(own)), names, fontsize=SMALL)
        axes.set_ylim(max(len(own), 1) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=SMALL)
        axes.grid(visible=False, axis="y")
        edge = farthest(own) or 1.0
        axes.set_xlim(-1.05 * edge, 1.05 * edge)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda tick, _: f"{abs(tick):.4g}")
    more = f"; {left_out} more are among the values" if left_out else ""
    more = more if shown else "; no difference has an interval"
    grid[-1].set_xlabel(f"worse than {called[0]}   |   better than {called[0]}{more}", fontsize=SMALL)
    sides = ", ".join(f"{letter}: {side.name}" for letter, side in zip(called, found.sides, strict=True))
    primary = [next((score for score in pair.scores if score.primary), None) for pair in found.pairs]
    title = "\n".join(
        _title(score, called[0], letter, found) for letter, score in zip(called[1:], primary, strict=True)
    )
    titled(drawn, title, f"{sides}\nDot: difference, bar: {percent(found.level)} CI; hollow: inconclusive")
    return drawn


def _title(score: Score | None, first: str, letter: str, found: Comparison) -> str:
    """Return the verdict on a side with its interval, without the method."""
    if score is None:
        return f"{letter} and {first} share no primary metric"
    if score.verdict == "not comparable":
        return f"{letter} and {first} are not comparable on {score.name}"
    interval = f"({percent(found.level)} CI {span(score)})".replace(" ", "\N{NO-BREAK SPACE}")
    return f"{headline(score, first, letter)} {interval if score.draws else ''}".rstrip()

"""A comparison of runs as text, as a page that needs nothing else, as an image, and as plain values."""

from __future__ import annotations

import html as markup
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.analysis.compare import Comparison, Pair, Score, Side
from trainkit.config import diff, yaml_reader
from trainkit.config.diff import Change
from trainkit.environment.record import origin
from trainkit.errors import UserError, few
from trainkit.metrics import bootstrap
from trainkit.redact import without_secrets
from trainkit.text_table import aligned, numbers, split
from trainkit.tracking import markdown
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARED = "trainkit.compared"
"""Tag of the MLflow run that holds a comparison: the names of what was compared."""
_SHOWN = 8
"""Scores of an evaluation in the terminal, those of classes apart; the page has all."""
_DRAWN = 24
"""Differences in the image."""
_VERDICTS = {"better": "better beyond chance", "worse": "worse beyond chance"}


def letters(many: int) -> list[str]:
    """Return the letters of sides in tables: A, B, ..., Z, A1, ..."""
    return [chr(65 + k % 26) + (str(k // 26) if k >= 26 else "") for k in range(many)]


def text(found: Comparison) -> str:
    """Return the text of a comparison for the terminal."""
    called = letters(len(found.sides))
    lines = ["", *(f"{letter}  {_about(side)}" for letter, side in zip(called, found.sides, strict=True)), ""]
    lines += [f"note   {note}" for note in found.notes] + ([""] if found.notes else [])
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        lines += [f"what {letter} changes", *(diff.lines(pair.changes) or ["the recipe is the same"]), ""]
        if pair.place:
            width = max(len(change.key) for change in pair.place)
            beside = [f"{c.key:{width}}  {_word(c.before)} -> {_word(c.after)}" for c in pair.place]
            lines += [f"what else differed at {letter}", *beside, ""]
        for evaluation, scores in _by_evaluation(pair.scores):
            lines += [*_table(evaluation, scores, called[0], letter, found.level), ""]
        for line in _at_their_best(pair.scores):
            lines += [line, ""]
    lines += [*aligned(_speeds(found)), ""]
    lines += verdicts(found)
    return "\n".join(lines)


def verdicts(found: Comparison) -> list[str]:
    """Return a sentence for each side but the first, and the speed verdicts."""
    called, lines = letters(len(found.sides)), []
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        score = next((score for score in pair.scores if score.primary), None)
        alone = {change.key for change in pair.changes} <= {"seed"}
        lines.append(f"verdict  {_sentence(score, called[0], letter, found.level, alone)}")
    for letter, side in zip(called, found.sides, strict=True):
        if word := side.tags.get("trainkit.verdict"):
            lines.append(f"speed    {letter}: {word}")
    return lines


def _sentence(score: Score | None, first: str, letter: str, level: float, alone: bool) -> str:
    """Say whether a side is better by the deciding score; `alone` where the recipes differ in their seed at most."""
    if score is None:
        return f"{letter}: no score decides; name one in the recipe: `best: {{metric: ...}}`"
    if score.verdict == "not comparable":
        return f"{letter} and {first} cannot be compared by {score.name}: {score.why}"
    gap = f"{score.name} {_gap(score)}"
    spans = [f"{_percent(level)} interval {_span(score)}, {score.draws:,} draws of {score.units}"] * bool(score.draws)
    if score.seeds is not None:
        ends = _ends(score.seeds.low, score.seeds.high, score.values)
        spans.append(f"{_percent(level)} interval over the repeats {ends}")
    shown = "; ".join([gap, *spans])
    if score.verdict == "not decided":
        return f"{letter} against {first} is not decided: {shown}{f' ({score.why})' if score.why else ''}"
    one = "" if score.seeds else "; another seed is not in it: trainkit repeat RECIPE --seeds 5"
    if alone and not score.seeds:
        one = "; their recipe is the same: so much another seed, or training again, may do"
    return f"{letter} is {_VERDICTS[score.verdict]} than {first}: {shown}{one}"


def _about(side: Side) -> str:
    several = f", {len(side.runs)} repeats" if len(side.runs) > 1 else f", {len(side.folds)} folds" * bool(side.folds)
    info = side.folder.info()
    return f"{side.name}  {info.status.lower()}, step {info.last_step}{several}"


def _word(value: Any) -> str:
    """A value of a recipe, or of where a run ran, as a word."""
    if isinstance(value, diff.Absent):
        return "(none)"
    return yaml_reader.cut(value if isinstance(value, str) else yaml_reader.flow(value))


def _by_evaluation(scores: Sequence[Score]) -> Iterator[tuple[str, list[Score]]]:
    """The scores of each evaluation, that with the deciding one first; not twice where both ended at their best."""
    names = dict.fromkeys(score.evaluation for score in scores)
    first = {score.evaluation for score in scores if score.primary}
    again = _again(scores)
    for name in sorted(names, key=lambda name: name not in first):
        if name not in again:
            yield name, [score for score in scores if score.evaluation == name]


def _again(scores: Sequence[Score]) -> list[str]:
    """Evaluations whose scores at the end are those at their best, of both sides."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for score in scores:
        found.setdefault(score.evaluation, {})[score.metric] = score.values
    return [name for name, own in found.items() if own == found.get(f"best/{name}")]


def _at_their_best(scores: Sequence[Score]) -> list[str]:
    """A line for each evaluation that is left out for that."""
    return [f"{name}: both ended at their best" for name in _again(scores)]


def _table(evaluation: str, scores: Sequence[Score], first: str, letter: str, level: float) -> list[str]:
    """The scores of an evaluation in columns; those of classes are left to the page."""
    whole = split([score.metric for score in scores])[0]
    shown = [score for score in scores if score.primary or score.metric in whole[:_SHOWN]]
    seeds = any(score.seeds for score in shown)
    head = [evaluation, first, letter, f"{letter} - {first}", f"{_percent(level)} interval"]
    rows = [[*head, *["over repeats"] * seeds, ""]]
    for score in shown:
        again = _ends(score.seeds.low, score.seeds.high, score.values) if score.seeds else "-"
        name = f"{score.metric}{' *' if score.primary else ''}{' (less is better)' if score.lower_is_better else ''}"
        rows.append([name, *numbers(score.values), _gap(score), _span(score), *[again] * seeds, _verdict(score)])
    units = next((score.units for score in shown if score.units), "")
    under = [f"  drawn again: {units}"] if units else []
    return [*aligned(rows), *under, *(f"  {why}" for why in _whys(shown))]


def _whys(scores: Sequence[Score]) -> list[str]:
    """List the reasons that keep scores from being judged, with the scores where it is not all."""
    found: dict[str, list[str]] = {}
    for score in scores:
        if score.why:
            found.setdefault(score.why, []).append(score.metric)
    return [why if len(names) == len(scores) else f"{few(names)}: {why}" for why, names in found.items()]


def _verdict(score: Score) -> str:
    return _VERDICTS.get(score.verdict, score.verdict)


def _signed(gap: float, values: Sequence[float]) -> str:
    """Format a difference with as many digits as `text_table.numbers` gives such values."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return f"{gap:+.{4 if largest < 10 else 2 if largest < 1000 else 0}f}"


def _gap(score: Score) -> str:
    return "-" if score.difference is None else _signed(score.difference, score.values)


def _ends(low: float, high: float, values: Sequence[float]) -> str:
    return f"{_signed(low, values)} to {_signed(high, values)}"


def _span(score: Score) -> str:
    return "-" if score.low is None or score.high is None else _ends(score.low, score.high, score.values)


def _percent(level: float) -> str:
    return f"{100 * level:.3g} %"


def _speeds(found: Comparison) -> list[list[str]]:
    """Rates, times and costs of all sides, as the rows of a table; of two sides with the ratio of what is no share.

    Shares below half a percent everywhere are left out.
    """
    called = letters(len(found.sides))
    two = len(called) == 2
    rows = [["speed and cost", *called, *["B / A"] * two]]
    for speed in found.speed:
        share = speed.name.endswith("_share")
        if share and all(value is None or value < 0.005 for value in speed.values):
            continue
        if share:
            words = ["-" if value is None else f"{100 * value:.0f} %" for value in speed.values]
        else:
            words = numbers([math.nan if value is None else value for value in speed.values])
        rows.append([speed.name, *words, *[_ratio(*speed.values[:2]) if not share else ""] * two])
    return rows


def _ratio(before: float | None, after: float | None) -> str:
    return f"{after / before:.2f}" if before and after is not None else "-"


def write(found: Comparison, file: Path) -> None:
    """Write a comparison as what the ending of a file says: html, png, json, or else text."""
    if file.suffix == ".png":
        figure(found).savefig(file, dpi=120, bbox_inches="tight", format="png")
        return
    kinds = {".html": html, ".json": lambda found: json.dumps(values(found), indent=1) + "\n"}
    file.write_text(kinds.get(file.suffix, lambda found: text(found).lstrip("\n") + "\n")(found), encoding="utf-8")


def values(found: Comparison) -> dict[str, Any]:
    """Everything, as JSON takes it."""
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
    """Keep a comparison as an MLflow run `comparison` in the experiment of the first run; returns its id.

    Its artifacts are the text, the page, the image and the values. It has no folder and no metrics, so that no table
    of runs ranks it. Raises UserError where the store does not take it.
    """
    client, info = store.client(), found.sides[0].folder.info()
    names = ", ".join(side.name for side in found.sides)
    note = "  \n".join(map(markdown.plain, verdicts(found)))
    tags = {**origin(), COMPARED: names, "mlflow.note.content": note}
    tags = {key: without_secrets(value)[:8000] for key, value in tags.items()}
    with tempfile.TemporaryDirectory() as aside, store.asking():
        for ending in ("txt", "html", "png", "json"):
            write(found, Path(aside) / f"comparison.{ending}")
        experiment = client.get_experiment_by_name(info.experiment or "")
        if experiment is None:
            where = f"run {found.sides[0].name}"
            raise UserError(where, f"its experiment is not in {store.shown}", remedy="--no-log")
        run_id = client.create_run(experiment.experiment_id, run_name="comparison", tags=tags).info.run_id
        client.log_artifacts(run_id, aside)
        client.set_terminated(run_id)
    return run_id


# ---- The page --------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #6b6b6b; --line: #dcdcdc; --paper: #ffffff;
        --better: #00705a; --worse: #b34700; --bar: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --quiet: #a0a0a0; --line: #3a3a3a; --paper: #16181b;
          --better: #4cc9a6; --worse: #f0935a; --bar: #66b3e6; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 68rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
code { font: 13px ui-monospace, monospace; }
.verdict { font-weight: 600; } .speed { color: var(--quiet); }
.note { border-left: 3px solid var(--worse); padding-left: .8rem; }
.better { color: var(--better); } .worse { color: var(--worse); } .quiet { color: var(--quiet); }
svg { vertical-align: middle; }
.curves { width: 100%; max-width: 48rem; } .curves text { fill: var(--quiet); font-size: 12px; }
"""


_HUES = ("#0072b2", "#d55e00", "#009e73", "#b85c94", "#b87a00", "#3b8fc0")
"""Of the sides."""


def html(found: Comparison) -> str:
    """One file without scripts or anything from elsewhere; light or dark as the reader's system is."""
    called = letters(len(found.sides))
    body = ["<h1>Comparison of runs</h1>"]
    heads = [
        [letter, side.name, _about(side).removeprefix(side.name)]
        for letter, side in zip(called, found.sides, strict=True)
    ]
    body.append(_cells(["", "", ""], heads))
    body += [f'<p class="note">{_safe(note)}</p>' for note in found.notes]
    body += [f'<p class="{line.split()[0]}">{_safe(line.partition("  ")[2].strip())}</p>' for line in verdicts(found)]
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        body.append(f"<h2>What {letter} changes</h2>")
        body.append(_changed(pair.changes, called[0], letter) if pair.changes else "<p>The recipe is the same.</p>")
        if pair.place:
            body += [f"<h2>What else differed at {letter}</h2>", _changed(pair.place, called[0], letter)]
        for evaluation, scores in _by_evaluation(pair.scores):
            body += [f"<h2>{_safe(evaluation)}</h2>", _scores(scores, called[0], letter, found.level)]
        body += [f'<p class="quiet">{_safe(line)}</p>' for line in _at_their_best(pair.scores)]
    body += [_curves(found), "<h2>Speed and cost</h2>"]
    head, *rows = _speeds(found)
    body.append(_cells(["", *head[1:]], rows))
    inside = "\n".join(body)
    style = _STYLE + "".join(f".s{k} {{ stroke: {hue}; color: {hue}; }}\n" for k, hue in enumerate(_HUES))
    title = _safe(" and ".join(side.name for side in found.sides))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{style}</style>\n</head>\n'
        f"<body>\n{inside}\n</body>\n</html>\n"
    )


def _curves(found: Comparison) -> str:
    """The score that decides over the steps, a line for each run; empty where it was measured once."""
    if found.primary is None:
        return ""
    name = found.primary.name.removeprefix("best/").removeprefix("pooled/")
    lines = [
        (k, [(point.step, point.value) for point in metrics.get(name, []) if math.isfinite(point.value)])
        for k, side in enumerate(found.sides)
        for metrics in side.metrics
    ]
    steps, heights = ([point[axis] for _, points in lines for point in points] for axis in (0, 1))
    if len(set(steps)) < 2:
        return ""
    left, right, low, high = min(steps), max(steps), min(heights), max(heights)
    tall = (high - low) or 1.0
    drawn = []
    for k, points in lines:
        path = " ".join(
            f"{60 + 560 * (x - left) / (right - left):.1f},{210 - 190 * (y - low) / tall:.1f}" for x, y in points
        )
        drawn.append(f'<polyline class="s{k % len(_HUES)}" points="{path}" fill="none" stroke-width="2"/>')
    words = [(55, 214, "end", numbers([low])[0]), (55, 24, "end", numbers([high])[0])]
    words += [(60, 232, "start", f"{left:,}"), (620, 232, "end", f"{right:,}"), (340, 232, "middle", "optimizer step")]
    drawn += [f'<text x="{x}" y="{y}" text-anchor="{at}">{_safe(word)}</text>' for x, y, at, word in words]
    called = "  ".join(
        f'<span class="s{k % len(_HUES)}">{letter}</span>' for k, letter in enumerate(letters(len(found.sides)))
    )
    return (
        f"<h2>{_safe(name)}</h2><p>{called}</p>"
        f'<svg class="curves" viewBox="0 0 640 240" role="img" aria-label="{_safe(name)}">{"".join(drawn)}</svg>'
    )


def _safe(word: Any) -> str:
    return markup.escape(str(word))


def _cells(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain words."""
    return _raw([_safe(word) for word in head], [[_safe(word) for word in row] for row in rows])


def _raw(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{word}</th>" for word in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{word}</td>" for word in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def _changed(found: Sequence[Change], first: str, letter: str) -> str:
    words = [(change.key, _word(change.before), _word(change.after)) for change in found]
    rows = [[f"<code>{_safe(word)}</code>" for word in line] for line in words]
    return _raw(["", first, letter], rows)


def _scores(scores: Sequence[Score], first: str, letter: str, level: float) -> str:
    """All scores of an evaluation; those of classes are folded away."""
    whole = [score for score in scores if score.primary or "." not in score.metric]
    each = [score for score in scores if score not in whole]
    again = "over repeats" if any(score.seeds for score in scores) else ""
    head = ["", first, letter, f"{letter} - {first}", f"{_percent(level)} interval", "", again, ""]
    said = _raw(head, _rows_of(whole))
    units = next((score.units for score in scores if score.units), "")
    under = "; ".join([*([f"drawn again: {units}"] if units else []), *_whys(scores)])
    said += f'<p class="quiet">{_safe(under)}</p>'
    if each:
        said += f"<details><summary>{len(each)} scores of classes and lists</summary>"
        said += _raw(head, _rows_of(each)) + "</details>"
    return said


def _rows_of(scores: Sequence[Score]) -> list[list[str]]:
    """A line of cells for each score; the bars of one scale are drawn as one."""
    farthest = {name: _farthest(own) for name, own in _by_scale(scores).items()}
    return [_cells_of(score, farthest.get(bootstrap.scale(score.metric), 0.0)) for score in scores]


def _cells_of(score: Score, farthest: float) -> list[str]:
    name = f"{_safe(score.metric)}{' <b>decides</b>' if score.primary else ''}"
    name += ' <span class="quiet">less is better</span>' if score.lower_is_better else ""
    again = _ends(score.seeds.low, score.seeds.high, score.values) if score.seeds else ""
    verdict = f'<span class="{score.verdict if score.verdict in _VERDICTS else "quiet"}">{_verdict(score)}</span>'
    return [name, *map(_safe, numbers(score.values)), _gap(score), _span(score), _bar(score, farthest), again, verdict]


def _bar(score: Score, farthest: float) -> str:
    """The interval as a line around 0, better to the right; `farthest` from 0 is at the edge."""
    reach = _reach(score)
    if reach is None:
        return ""
    at = [60 + 55 * value / (farthest or 1.0) for value in reach]
    return (
        '<svg width="120" height="14" role="img" aria-label="interval">'
        '<line x1="60" x2="60" y1="0" y2="14" stroke="var(--quiet)"/>'
        f'<line x1="{at[0]:.1f}" x2="{at[2]:.1f}" y1="7" y2="7" stroke="var(--bar)" stroke-width="4" opacity="0.5"/>'
        f'<circle cx="{at[1]:.1f}" cy="7" r="3.5" fill="var(--bar)"/></svg>'
    )


def _reach(score: Score) -> tuple[float, float, float] | None:
    """Low end, difference and high end, turned so that better is positive; None without an interval."""
    if score.low is None or score.high is None or score.difference is None:
        return None
    if score.lower_is_better:
        return -score.high, -score.difference, -score.low
    return score.low, score.difference, score.high


def _by_scale(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Those that have an interval, by the scale that they share: shares of 1, millimetres."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        if _reach(score):
            found.setdefault(bootstrap.scale(score.metric), []).append(score)
    return found


def _farthest(scores: Sequence[Score]) -> float:
    """How far from 0 their intervals reach."""
    return max((abs(end) for score in scores for end in _reach(score) or ()), default=0.0)


# ---- The image -----------------------------------------------------------------------------------------------------


def figure(found: Comparison) -> Figure:
    """The intervals of the differences, a line each, better to the right; scores of one scale share a panel.

    Scores of classes are left out, and what has no interval; the deciding score of each pair comes first.
    """
    from trainkit.plots.curves import COLOURS, INK, QUIET, blank

    called = letters(len(found.sides))
    letter_of = {pair.run: letter for letter, pair in zip(called[1:], found.pairs, strict=True)}
    shown = []
    for pair in found.pairs:
        own = [score for _, scores in _by_evaluation(pair.scores) for score in scores]
        own = [score for score in own if _reach(score) and (score.primary or "." not in score.metric)]
        shown += sorted(own, key=lambda score: not score.primary)
    left_out, shown = max(0, len(shown) - _DRAWN), shown[:_DRAWN]
    panels = list(_by_scale(shown).values()) or [[]]
    rows = [max(len(own), 1) for own in panels]
    drawn, grid = blank(height=1.3 + 0.5 * len(panels) + 0.32 * sum(rows), ratios=rows, shared=False)
    colours = {"better": COLOURS[2], "worse": COLOURS[1]}
    for axes, own in zip(grid, panels, strict=True):
        axes.axvline(0.0, color=QUIET, linewidth=1)
        for place, score in enumerate(own):
            low, gap, high = _reach(score) or (math.nan, math.nan, math.nan)
            colour = colours.get(score.verdict, QUIET)
            axes.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.45)
            axes.plot([gap], [place], color=colour, marker="o", markersize=6, linestyle="none")
            axes.annotate(
                f"{_gap(score)}   {_span(score)}", (1.02, place), va="center", color=INK,
                xycoords=axes.get_yaxis_transform(), fontsize=8.5, annotation_clip=False,
            )  # fmt: skip
        names = [f"{f'{letter_of[score.run]}: ' if len(found.pairs) > 1 else ''}{score.name}" for score in own]
        names = [name if len(name) <= 40 else f"{name[:39]}…" for name in names]
        axes.set_yticks(range(len(own)), names, fontsize=9)
        axes.set_ylim(max(len(own), 1) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8.5)
        axes.grid(visible=False, axis="y")
        farthest = _farthest(own) or 1.0
        axes.set_xlim(-1.05 * farthest, 1.05 * farthest)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):.4g}")
    more = f"; {left_out} more are in the page" if left_out else ""
    more = more if shown else "; no difference has an interval"
    grid[-1].set_xlabel(f"by how much worse than {called[0]}   |   better{more}", fontsize=9.5)
    sides = ",  ".join(f"{letter}: {side.name}" for letter, side in zip(called, found.sides, strict=True))
    drawn.suptitle(f"Differences and their {_percent(found.level)} intervals\n{sides}", color=INK, fontsize=10)
    return drawn

"""A comparison of runs as one self-contained web page without scripts, light or dark as the reader's system.

The first screen has the verdict, the metrics of the evaluation that decides, their intervals and the changed keys; the
other evaluations, the primary metric over the steps, speed and notes follow.
"""

from __future__ import annotations

import html as markup
import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainkit.analysis.compare import Comparison, Pair, Score
from trainkit.analysis.compare_words import (
    about,
    at_their_best,
    by_evaluation,
    by_scale,
    caveat,
    diagnoses,
    ends,
    evidence,
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
    whys,
)
from trainkit.config.diff import Change
from trainkit.terminal import numbers

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #5f6368; --line: #dcdfe3; --paper: #ffffff; --card: #f6f7f9;
        --better: #00704f; --worse: #b34700; --none: #5f6368; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --quiet: #a4a9b0; --line: #3a3f45; --paper: #15181b; --card: #1e2226;
          --better: #4cc9a6; --worse: #f0935a; --none: #a4a9b0; } }
* { box-sizing: border-box; }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
       max-width: 1360px; padding: 1.2rem 1.5rem 3rem; }
h1 { font-size: 1.45rem; line-height: 1.3; margin: .2rem 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .5rem; } h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
section { margin-top: 1.4rem; }
.kicker, .quiet { color: var(--quiet); } .kicker { margin: 0; }
.quiet { font-size: .87rem; margin: .4rem 0; }
.verdict { border-left: 5px solid var(--none); padding: .1rem 0 .1rem 1rem; }
.verdict.better { border-color: var(--better); } .verdict.worse { border-color: var(--worse); }
.verdict p { color: var(--ink); margin: .2rem 0; }
.runs { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: .8rem 0 0; padding: 0; list-style: none; }
.runs b { margin-right: .4rem; }
.grid { display: grid; grid-template-columns: minmax(0, 6fr) minmax(0, 5fr); gap: 1.4rem 2rem; margin-top: 1.2rem; }
@media (max-width: 1100px) { .grid { grid-template-columns: minmax(0, 1fr); } }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
th:last-child, td:last-child { padding-right: 0; }
td.key { white-space: normal; overflow-wrap: anywhere; } td.from { color: var(--quiet); }
.changes td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
code { font: 13px ui-monospace, monospace; }
.mark { font-size: .78rem; color: var(--quiet); border: 1px solid var(--line); border-radius: 4px; padding: 0 .3rem; }
.note { border-left: 3px solid var(--worse); margin: .4rem 0; padding-left: .8rem; overflow-wrap: anywhere; }
.better { color: var(--better); } .worse { color: var(--worse); } .none { color: var(--none); }
.better.word, .worse.word { font-weight: 600; }
svg { display: block; width: 100%; height: auto; max-width: 690px; }
.forest { max-width: 560px; }
svg text { fill: var(--ink); font: 12.5px system-ui, sans-serif; } svg .soft { fill: var(--quiet); }
svg .grid-line { stroke: var(--line); } svg .zero { stroke: var(--quiet); }
.ci { stroke: currentColor; stroke-width: 4; stroke-opacity: .4; stroke-linecap: round; }
.dot { fill: currentColor; } .dot.open { fill: var(--paper); stroke: currentColor; stroke-width: 2; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--quiet); }
"""
_HUES = ("#0072b2", "#d55e00", "#009e73", "#b85c94", "#b87a00", "#3b8fc0")
_DARK_HUES = ("#56b4e9", "#f0935a", "#4cc9a6", "#cc79a7", "#e69f00", "#8ac7ee")
"""Colours of the sides."""
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_LABELS, _PLOT = 180, 330
"""Widths of the columns of the intervals' figure."""


def html(found: Comparison) -> str:
    """Return the page."""
    called = letters(len(found.sides))
    body = ['<p class="kicker">Comparison of runs</p>']
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        body += _first_screen(found, pair, called, letter, alone=len(found.pairs) == 1)
    for letter, pair in zip(called[1:], found.pairs, strict=True):
        body += _more(found, pair, called[0], letter)
    body += [_curves(found), '<section id="speed"><h2>Speed and cost</h2>']
    head, *rows = speeds(found)
    body += [_cells(["", *head[1:]], rows)]
    body += [f'<p class="quiet">{letter}: {_safe(said)}</p>' for _, letter, said in diagnoses(found)]
    body += ["</section>", *_notes(found)]
    inside = "\n".join(body)
    dark = "".join(f".s{k} {{ stroke: {hue}; color: {hue}; }}\n" for k, hue in enumerate(_DARK_HUES))
    style = _STYLE + "".join(f".s{k} {{ stroke: {hue}; color: {hue}; }}\n" for k, hue in enumerate(_HUES))
    style += f"@media (prefers-color-scheme: dark) {{\n{dark}}}\n.curve text {{ stroke: none; }}\n"
    title = _safe(" and ".join(side.name for side in found.sides))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{style}</style>\n</head>\n'
        f"<body>\n{inside}\n</body>\n</html>\n"
    )


def _first_screen(found: Comparison, pair: Pair, called: Sequence[str], letter: str, alone: bool) -> Iterator[str]:
    """The verdict on a side, its metrics on the evaluation that decides, the intervals, and the changed keys."""
    score = next((score for score in pair.scores if score.primary), None)
    judged = score.verdict if score is not None and score.verdict in ("better", "worse") else "none"
    only_seed = {change.key for change in pair.changes} <= {"seed"}
    yield f'<section class="verdict {judged}"><h1>{_safe(headline(score, called[0], letter))}</h1>'
    lines = [evidence(score, found.level).strip(" ()"), caveat(score, only_seed)]
    if found.notes:
        lines.append(f"{len(found.notes)} {'note limits' if len(found.notes) == 1 else 'notes limit'} this comparison")
    yield "".join(f"<p>{_safe(line)}.</p>" for line in lines[:2] if line)
    yield "".join(f'<p><a href="#notes">{_safe(line)}</a></p>' for line in lines[2:])
    yield "</section>"
    if alone or letter == called[1]:
        sides = zip(called, found.sides, strict=True)
        yield '<ul class="runs">' + "".join(f"<li><b>{k}</b>{_safe(about(side))}</li>" for k, side in sides) + "</ul>"
    first = next(iter(by_evaluation(pair.scores)), None)
    yield '<div class="grid"><div>'
    if first is not None:
        yield f"<h2>{_safe(first[0])}</h2>{_scores(first[1], called[0], letter, found.level)}"
    yield "</div><div>"
    yield f"<h2>Changes in {letter}</h2>"
    yield _changed(pair.changes, called[0], letter) if pair.changes else "<p>None: the recipes are the same.</p>"
    if first is not None and (drawn := _forest(first[1], called[0], found.level)):
        yield f"<h3>{letter} - {called[0]} with {percent(found.level)} CI</h3>{drawn}"
    yield "</div></div>"


def _more(found: Comparison, pair: Pair, first: str, letter: str) -> Iterator[str]:
    """The other evaluations of a side, and what differed beside the recipe."""
    for evaluation, scores in list(by_evaluation(pair.scores))[1:]:
        yield f"<section><h2>{_safe(evaluation)}{f': {letter} and {first}' if len(found.pairs) > 1 else ''}</h2>"
        yield f'<div class="grid"><div>{_scores(scores, first, letter, found.level)}</div>'
        yield f"<div>{_forest(scores, first, found.level)}</div></div></section>"
    yield from (f'<p class="quiet">{_safe(line)}</p>' for line in at_their_best(pair.scores))
    if pair.place:
        yield f"<section><h2>Other differences in {letter}</h2>{_changed(pair.place, first, letter)}</section>"


def _notes(found: Comparison) -> Iterator[str]:
    if found.notes:
        yield '<section id="notes"><h2>Notes</h2>'
        yield from (f'<p class="note">{_safe(note)}</p>' for note in found.notes)
        yield "</section>"


def _safe(word: Any) -> str:
    return markup.escape(str(word))


def _cells(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain words."""
    return _raw([_safe(word) for word in head], [[_safe(word) for word in row] for row in rows])


def _raw(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    lines = ["<tr>" + "".join(f"<th>{word}</th>" for word in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{word}</td>" for word in row) + "</tr>" for row in rows]
    return f'<div class="wide"><table{kind}>' + "\n".join(lines) + "</table></div>"


def _changed(found: Sequence[Change], first: str, letter: str) -> str:
    words = [(change.key, value(change.before), value(change.after)) for change in found]
    rows = [[f"<code>{_safe(word)}</code>" for word in line] for line in words]
    return _raw(["key", first, letter], rows, ' class="changes"')


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def _scores(scores: Sequence[Score], first: str, letter: str, level: float) -> str:
    """Return the table of all scores of an evaluation; those of classes are folded away."""
    whole = [score for score in scores if score.primary or "." not in score.metric]
    each = [score for score in scores if score not in whole]
    again = ["CI over repeats"] if any(score.seeds for score in scores) else []
    head = ["metric", first, letter, f"{letter} - {first}", f"{percent(level)} CI", *again, "verdict"]
    said = _raw(head, [_row(score, bool(again)) for score in whole])
    drawn = next((score for score in scores if score.units), None)
    under = "; ".join([*([f"CI: {method(drawn)}"] if drawn else []), *whys(scores)])
    said += f'<p class="quiet">{_safe(under)}</p>' if under else ""
    if each:
        said += f"<details><summary>{len(each)} metrics of classes and lists</summary>"
        said += _raw(head, [_row(score, bool(again)) for score in each]) + "</details>"
    return said


def _row(score: Score, repeats: bool) -> list[str]:
    name = _safe(score.metric) + (' <span class="mark">primary</span>' if score.primary else "")
    name += ' <span class="mark">lower is better</span>' if score.lower_is_better else ""
    again = [ends(score.seeds.low, score.seeds.high, score.values) if score.seeds else "-"] * repeats
    word = f'<span class="{_colour(score)} word">{_safe(verdict(score))}</span>'
    return [name, *map(_safe, numbers(score.values)), gap(score), span(score), *again, word]


def _colour(score: Score) -> str:
    return score.verdict if score.verdict in ("better", "worse") else "none"


# ---- Figures ---------------------------------------------------------------------------------------------------------


def _forest(scores: Sequence[Score], first: str, level: float) -> str:
    """Return the intervals of an evaluation as a figure, better to the right; scores of one scale share an axis."""
    whole = [score for score in scores if score.primary or "." not in score.metric]
    drawn, top, middle = [], 8.0, _LABELS + _PLOT / 2
    for own in by_scale(whole).values():
        edge = farthest(own) or 1.0
        ticks = [tick * sign for tick in (_nice(edge),) for sign in (-1, 0, 1)]
        bottom = top + 24 * len(own)
        for tick in ticks:
            x = middle + 0.46 * _PLOT * tick / edge
            look = "zero" if tick == 0 else "grid-line"
            drawn.append(f'<line class="{look}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{bottom:.0f}"/>')
            drawn.append(_word(x, bottom + 14, f"{abs(tick):g}", "middle", "soft"))
        for place, score in enumerate(own):
            drawn.append(_interval(score, top + 24 * place + 12, middle, 0.46 * _PLOT / edge))
        top = bottom + 26
    if not drawn:
        return ""
    drawn.append(_word(middle - 8, top + 10, f"worse than {first}", "end", "soft"))
    drawn.append(_word(middle + 8, top + 10, f"better than {first}", "start", "soft"))
    label = f"differences with {percent(level)} intervals"
    wide = _LABELS + _PLOT
    return (
        f'<svg class="forest" viewBox="0 0 {wide} {top + 18:.0f}" role="img" aria-label="{label}">'
        f"{''.join(drawn)}</svg>"
    )


def _interval(score: Score, y: float, middle: float, scale: float) -> str:
    low, at, high = (middle + scale * end for end in reach(score) or (0.0, 0.0, 0.0))
    judged = score.verdict in ("better", "worse")
    return (
        f"{_word(0, y + 4, _cut(score.metric, 28), 'start', '')}"
        f'<g class="{_colour(score)}"><line class="ci" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.0f}" y2="{y:.0f}"/>'
        f'<circle class="dot{"" if judged else " open"}" cx="{at:.1f}" cy="{y:.0f}" r="5"/></g>'
    )


def _word(x: float, y: float, word: str, anchor: str, kind: str) -> str:
    look = f' class="{kind}"' if kind else ""
    return f'<text{look} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(word)}</text>'


def _cut(word: str, longest: int) -> str:
    return word if len(word) <= longest else f"{word[: longest - 1]}…"


def _nice(edge: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is not beyond an edge."""
    power = 10.0 ** math.floor(math.log10(edge))
    return next(times * power for times in (5, 2, 1) if times * power <= edge * (1 + 1e-9))


def _curves(found: Comparison) -> str:
    """Return the primary metric over the steps, a line for each run; empty where it was measured once."""
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
    called, drawn = letters(len(found.sides)), []
    for place, height in enumerate([low, low + tall / 2, low + tall]):
        y = 210 - 95 * place
        drawn.append(f'<line class="grid-line" x1="64" x2="660" y1="{y}" y2="{y}"/>')
        drawn.append(_word(58, y + 4, f"{height:.4g}", "end", "soft"))
    for k, points in lines:
        at = [(64 + 576 * (x - left) / (right - left), 210 - 190 * (y - low) / tall) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        look = f'class="s{k % len(_HUES)}" stroke-dasharray="{_DASHES[k % len(_DASHES)]}"'
        drawn.append(f'<polyline {look} points="{path}" fill="none" stroke-width="2"/>')
        drawn += [_word(at[-1][0] + 8, at[-1][1] + 4, called[k], "start", "")] if at else []
    drawn += [_word(64, 230, f"{left:,}", "start", "soft"), _word(640, 230, f"{right:,}", "end", "soft")]
    drawn.append(_word(352, 230, "step", "middle", "soft"))
    key = ", ".join(
        f'<b class="s{k % len(_HUES)}">{letter}</b> {_safe(side.name)}'
        for k, (letter, side) in enumerate(zip(called, found.sides, strict=True))
    )
    label, inside = _safe(name), "".join(drawn)
    svg = f'<svg class="curve" viewBox="0 0 690 240" role="img" aria-label="{label}">{inside}</svg>'
    return f'<section><h2>{label} over steps</h2><p class="quiet">{key}</p>{svg}</section>'

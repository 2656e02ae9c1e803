"""Write `report.html` of a run, and the first lines of its description in MLflow.

One file without scripts or anything from elsewhere; light or dark as the reader's system is.
"""

from __future__ import annotations

import html as markup
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainkit.analysis import run_scores
from trainkit.analysis.run_scores import duration
from trainkit.environment import record
from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.terminal import numbers
from trainkit.tracking import journal, lineage, markdown, mlflow_run
from trainkit.tracking.markdown import plain

if TYPE_CHECKING:
    from trainkit.analysis.baselines import Comparison
    from trainkit.training.outcome import Outcome
    from trainkit.training.run_logger import RunLogger

FILE = "report.html"
_MOST = 40
"""Scores of an evaluation in the table."""
_DIGITS = 12
"""Shown of commits and digests."""


@dataclass(frozen=True)
class Report:
    """Content of the report of a run."""

    run: str
    recipe: str
    status: str
    step: int
    metric: str
    """Full name of the primary score; empty without one."""
    best: tuple[int, float] | None
    """Step and value of the primary score at the best evaluation."""
    final: float | None
    """The primary score of the last evaluation."""
    baseline: tuple[str, float] | None
    """Name and primary score of the best trivial baseline."""
    samples_per_s: float
    total_s: float
    training_s: float
    compared_with: str | None
    changes: str
    scores: Mapping[str, Sequence[Sequence[str]]]
    """By evaluation the cells of a table: a row for each score, a column for each network and trivial baseline."""
    verdict: Sequence[str]
    warning: str
    facts: Mapping[str, Mapping[str, str]]
    """Tables of names and values by heading: time, data, environment."""


def of(run: RunLogger, outcome: Outcome, beside: Comparison | None, digests: Mapping[str, str]) -> Report:
    """Collect the report of a run that was trained; `beside`: its trivial baselines."""
    folder = run.require_folder()
    history = journal.read(folder.journal)
    metric = run.recipe.best.metric if run.recipe.best else ""
    best = history.metrics.get(f"best/{metric}", [])
    final = history.metrics.get(metric, [])
    scored = beside.scored if beside is not None else []
    first = scored[0].metrics.get(metric.rpartition("/")[2]) if scored else None
    info = folder.info()
    sets = {tag: digest[:_DIGITS] for tag, digest in digests.items() if tag.startswith(lineage.DATA)}
    named = {tag.removeprefix(lineage.DATA).removeprefix(".") or "train": digest for tag, digest in sets.items()}
    return Report(
        folder.name,
        run.recipe.name,
        outcome.status,
        outcome.step,
        metric,
        (best[-1].step, best[-1].value) if best else None,
        final[-1].value if final else None,
        (scored[0].title, first) if scored and first is not None else None,
        outcome.speed["speed/samples_per_s"],
        outcome.speed["time/wall_s"],
        outcome.speed["time/total_s"],
        info.follows,
        lineage.read(folder).strip(),
        {name: _scores(run_scores.networks(history, name, metric, beside)) for name in run.recipe.evaluations},
        outcome.verdict.splitlines(),
        beside.warning if beside is not None else "",
        {
            "Time of training": run_scores.time_shares(outcome.speed),
            "Data (digests)": named,
            "Environment": _environment(run),
        },
    )


def head(report: Report) -> str:
    """Return the first lines of a run's description, in Markdown: score, throughput and time."""
    lines = []
    if report.best is not None:
        step, value = report.best
        words = [f"{plain(report.metric)} **{_number(value)}** best (step {step:,})"]
        words += [f"{_number(report.final)} final"] if report.final is not None else []
        if report.baseline is not None:
            words.append(f"{_number(report.baseline[1])} best trivial baseline ({plain(report.baseline[0])})")
        lines.append(", ".join(words))
    lines.append(
        f"**{_number(report.samples_per_s)} samples/s**, {duration(report.total_s)} in total, "
        f"{duration(report.training_s)} of training, {report.step:,} steps. Details: artifact {markdown.code(FILE)}"
    )
    return "".join(f"{line}  \n" for line in lines) + "\n"


def html(report: Report) -> str:
    """Return the report as one HTML file."""
    body = [f"<h1>{_safe(report.run)}</h1>", f'<p class="quiet">{_safe(_subtitle(report))}</p>', _tiles(report)]
    if report.warning:
        body.append(f'<p class="note">{_safe(report.warning)}</p>')
    body += ["<h2>What changed</h2>", f"<pre>{_safe(report.changes or 'unknown')}</pre>"]
    for name, scores in report.scores.items():
        if scores:
            body += [f"<h2>Scores: {_safe(name)}</h2>", _table(scores[0], scores[1:])]
    body += ["<h2>Bottleneck</h2>", *(f"<p>{_safe(line)}</p>" for line in report.verdict or ["not measured"])]
    for title, facts in report.facts.items():
        if facts:
            body += [f"<h2>{_safe(title)}</h2>", _table((), [list(pair) for pair in facts.items()], "facts")]
    body += ["<h2>Commands</h2>", _table((), [[what, line] for what, line in _commands(report)], "facts")]
    inside = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_safe(report.run)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{inside}\n</body>\n</html>\n"
    )


def write(run: RunLogger, outcome: Outcome, beside: Comparison | None, digests: Mapping[str, str]) -> None:
    """Keep the report of a run among its artifacts, and begin its description with score, throughput and time."""
    report = of(run, outcome, beside, digests)
    run.tracker.artifact_text(FILE, html(report))
    run.tracker.tags({"mlflow.note.content": head(report) + outcome.page})


def _scores(networks: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a row for each score of an evaluation, without those of classes, and a column for each network."""
    names = [name for name in run_scores.score_names(networks) if "." not in name][:_MOST]
    rows = [[name, *numbers([scores.get(name, math.nan) for scores in networks.values()])] for name in names]
    return [["", *networks], *rows] if rows else []


def _environment(run: RunLogger) -> dict[str, str]:
    """Return versions, hardware and state of the source of a run, by readable names."""
    try:
        creation = mlflow_run.read(run.require_folder())
    except UserError:  # its record is damaged
        creation = None
    tags = creation.tags if creation is not None else {}
    return {"versions": tags.get(record.VERSIONS, "unknown"), **record.described(tags)}


def _subtitle(report: Report) -> str:
    return f"Recipe {report.recipe}, {report.status.lower()} at step {report.step:,}"


def _tiles(report: Report) -> str:
    tiles = []
    if report.best is not None:
        under = [f"best, step {report.best[0]:,}"]
        under += [f"final {_number(report.final)}"] if report.final is not None else []
        under += [f"baseline {_number(report.baseline[1])} ({report.baseline[0]})"] if report.baseline else []
        tiles.append((report.metric, _number(report.best[1]), "; ".join(under)))
    tiles.append(("Throughput", f"{_number(report.samples_per_s)}", "samples/s in training"))
    tiles.append(("Time", duration(report.total_s), f"{duration(report.training_s)} of training"))
    shown = (
        f"<div><span>{_safe(title)}</span><strong>{_safe(value)}</strong><span>{_safe(under)}</span></div>"
        for title, value, under in tiles
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


def _commands(report: Report) -> list[tuple[str, str]]:
    run, before = shlex.quote(report.run), report.compared_with
    return [
        ("Train again", f"trainkit cp {run} again.yaml && trainkit run again.yaml"),
        ("Resume, if unfinished", f"trainkit run --resume {run}"),
        *([("Compare", f"trainkit compare {shlex.quote(before)} {run}")] if before else []),
        ("Show", f"trainkit show {run}"),
        ("Export", f"trainkit export {run} {shlex.quote(f'{report.recipe}-export')}"),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _safe(word: Any) -> str:
    return markup.escape(without_secrets(str(word)))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    lines = ["<tr>" + "".join(f"<th>{_safe(word)}</th>" for word in head) + "</tr>"] if any(head) else []
    lines += ["<tr>" + "".join(f"<td>{_safe(word)}</td>" for word in row) + "</tr>" for row in rows]
    return f'<div class="wide"><table class="{kind}">' + "\n".join(lines) + "</table></div>"


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #6b6b6b; --line: #dcdcdc; --paper: #ffffff;
        --tile: #f5f6f7; --note: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --quiet: #a0a0a0; --line: #3a3a3a; --paper: #16181b; --tile: #212429; --note: #f0935a; } }
* { box-sizing: border-box; }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto;
       max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p { margin: .3rem 0; } .quiet { color: var(--quiet); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tiles div { background: var(--tile); border-radius: 8px; flex: 1 1 12rem; padding: .7rem 1rem; }
.tiles span { color: var(--quiet); display: block; font-size: 13px; } .tiles strong { font-size: 1.6rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; white-space: normal; } .facts td:first-child { color: var(--quiet); white-space: nowrap; }
.facts td:last-child, pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--tile); border-radius: 8px; overflow-x: auto; padding: .7rem 1rem; }
.note { border-left: 3px solid var(--note); padding-left: .8rem; }
"""

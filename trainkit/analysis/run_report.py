"""Write `report.html` of a run, and the first lines of its description in MLflow.

The report is the closing summary in the terminal as one HTML file, without scripts or anything from elsewhere; light or
dark as the reader's system is.
"""

from __future__ import annotations

import html as markup
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.analysis.run_scores import duration
from trainkit.errors import few
from trainkit.redact import without_secrets
from trainkit.tracking import desired_state, journal, lineage
from trainkit.tracking.markdown import code, plain
from trainkit.tracking.run_folder import META

if TYPE_CHECKING:
    from trainkit.analysis.baselines import Comparison
    from trainkit.config.schema import Recipe
    from trainkit.tracking.run_folder import RunFolder
    from trainkit.training.outcome import Outcome
    from trainkit.training.run_logger import RunLogger

FILE = "report.html"


def head(run: RunLogger, outcome: Outcome, beside: Comparison | None) -> str:
    """Return the first lines of a run's description, in Markdown: score, throughput, time, what was trained on what."""
    lines, words, folder = [], [], run.require_folder()
    metric = run.recipe.best.metric if run.recipe.best else ""
    metrics = journal.read(folder.journal).metrics
    if best := metrics.get(f"best/{metric}"):
        words.append(f"{plain(metric)} **{_number(best[-1].value)}** best (step {best[-1].step:,})")
        words += [f"{_number(metrics[metric][-1].value)} final"] if metric in metrics else []
        scored = beside.scored[0] if beside is not None and beside.scored else None
        if scored is not None and (score := scored.metrics.get(metric.rpartition("/")[2])) is not None:
            words.append(f"{_number(score)} best trivial baseline ({plain(scored.title)})")
        lines.append(", ".join(words))
    speed = outcome.speed
    lines.append(
        f"**{_number(speed['speed/samples_per_s'])} samples/s**, {duration(speed['time/wall_s'])} in total, "
        f"{duration(speed['time/total_s'])} of training, {outcome.step:,} steps. Details: artifact {code(FILE)}"
    )
    return "".join(f"{line}  \n" for line in [*lines, plain(trained(run.recipe, folder))]) + "\n"


def trained(recipe: Recipe, folder: RunFolder) -> str:
    """Return what was trained, from which weights, on what, and what it was evaluated on, in one sentence."""
    net = vars(recipe.task).get("net") or vars(recipe.task).get("student")
    word = next((vars(net)[key] for key in ("model", "encoder", "name") if vars(net).get(key)), "") if net else ""
    weights = recipe.task.required_weights().get("net")
    start = f"from {weights.weights or weights.recipe}" if weights else "from scratch"
    start += ", its last layer fitted first" if net and vars(net).get("probe") else ""
    meta = json.loads((folder.path / META).read_text(encoding="utf-8"))
    names = f": {few(meta['class_names'], 8)}" if meta.get("class_names") else ""
    sets = [entry.value for entry in desired_state.read(folder) if entry.kind == "dataset"]
    on = [f"{one['source'] or one['name']} ({one['size']:,} samples" for one in sets if one["context"] == "train"]
    on = [f"trained on {on[0]}, {meta['classes']:,} classes{names})"] if on else []
    scored = [f"{one['name']} ({one['size']:,})" for one in sets if one["context"] == "test"]
    on += [f"evaluated on {few(scored, 4)}"] if scored else []
    return f"{' '.join(filter(None, (type(recipe.task).__name__, word, start)))}; {', '.join(on)}."


def html(run: str, page: terminal.Page, changes: str, commands: Sequence[str]) -> str:
    """Return a page of the terminal as one HTML file, with what changed and commands that may follow."""
    body, lines = [f"<h1>{_safe(run)}</h1>"], list[str]()
    for part in [*page, terminal.Table([])]:
        if isinstance(part, str):
            lines += [part] if part != run else []
            continue
        body += [_block(lines)] if any(lines) else []
        lines = []
        if isinstance(part, terminal.Styled):
            body.append(f'<p class="{"note" if "yellow" in part.style else "key"}">{_safe(part.text)}</p>')
        elif part.rows:
            body.append(_table(part))
    body += ["<h2>What changed</h2>", _block([changes or "unknown"]), "<h2>Commands</h2>", _block(commands)]
    inside = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_safe(run)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{inside}\n</body>\n</html>\n"
    )


def write(run: RunLogger, outcome: Outcome, beside: Comparison | None, page: terminal.Page) -> None:
    """Keep the report of a run among its artifacts, and begin its description with score, throughput and time."""
    folder = run.require_folder()
    name, before = shlex.quote(folder.name), folder.info().follows
    commands = [f"trainkit compare {shlex.quote(before)} {name}"] if before else []
    commands += [f"trainkit show {name}", f"trainkit cp {name} again.yaml", f"trainkit export {name} OUT"]
    run.tracker.artifact_text(FILE, html(folder.name, page, lineage.read(folder).strip(), commands))
    run.tracker.tags({"mlflow.note.content": head(run, outcome, beside) + outcome.page})


def _block(lines: Sequence[str]) -> str:
    text = "\n".join(lines).strip()
    return f"<pre>{_safe(text)}</pre>"


def _table(table: terminal.Table) -> str:
    head, *rows = table.rows
    lines = ["<tr>" + "".join(f"<th>{_safe(word)}</th>" for word in head) + "</tr>"]
    for number, row in enumerate(rows, 1):
        cells = "".join(f"<td>{_safe(word)}</td>" for word in row)
        lines.append(f"<tr{' class=key' if number in table.emphasised else ''}>{cells}</tr>")
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _safe(word: str) -> str:
    return markup.escape(without_secrets(word))


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #6b6b6b; --line: #dcdcdc; --paper: #ffffff;
        --tile: #f5f6f7; --note: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --quiet: #a0a0a0; --line: #3a3a3a; --paper: #16181b; --tile: #212429; --note: #f0935a; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto;
       max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
.key { font-weight: 600; } .note { border-left: 3px solid var(--note); padding-left: .8rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
pre { background: var(--tile); border-radius: 8px; font: 13px/1.5 ui-monospace, monospace; padding: .7rem 1rem;
      white-space: pre-wrap; overflow-wrap: anywhere; }
"""

"""Figures and models of a run, and its closing summary in the terminal."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit import terminal
from trainkit.analysis import run_report
from trainkit.analysis.baselines import Comparison
from trainkit.checkpoint import storage
from trainkit.config.targets import TIME_TO
from trainkit.inference import mlflow_model
from trainkit.speed import cost
from trainkit.text_table import numbers, split
from trainkit.tracking import journal
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights
from trainkit.training.outcome import Outcome
from trainkit.training.run_logger import RunLogger

_OTHERS = ("best", "final", "eval", "baseline", TIME_TO.strip("/"))
"""First words of metrics in which no network comes before the evaluation."""

_BASELINE = "baseline: "
_PHASES = {
    "data": "data loading",
    "transfer": "copy to device",
    "compute": "forward, backward and optimizer",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
    "log": "logging",
    "setup": "start-up",
}
"""Names of the parts of a training's time."""
_COST = {"core_hours": "core hours", "gpu_hours": "GPU hours"}


def write(
    run: RunLogger,
    outcome: Outcome,
    hurried: bool = False,
    beside: Comparison | None = None,
    digests: Mapping[str, str] | None = None,
) -> None:
    """Draw the figures of a run, keep the rows of its last evaluations, and log its models.

    `hurried`: draw none. A machine that is taken away leaves seconds, and the resumed run draws them.
    """
    from trainkit.plots import curves, timeline

    tracker, journal_file = run.tracker, run.require_folder().journal
    if not hurried:
        run.draw(outcome.curves)
        tracker.figure("figures/time.png", curves.time_shares(_shares(outcome)))
        if outcome.steps is not None and len(outcome.steps):
            tracker.figure("figures/timeline.png", timeline.of_run(outcome.steps, outcome.step, journal_file))
    for name, rows in outcome.rows.items() if run.recipe.log.rows else ():
        tracker.table(f"rows/{name}_final.parquet", rows)
    newest = run.newest_checkpoint()
    if newest is not None:
        history = journal.read(journal_file)

        def scored(step: int) -> dict[str, float]:
            # Of this step alone: the last scores of a run that was stopped are from an earlier one.
            return {k: p.value for k in outcome.final for p in history.metrics.get(k, []) if p.step == step}

        models = {"last": newest / "model.safetensors"}
        models |= {"best": best_weights(run.require_folder().path)} if outcome.best else {}
        for name, weights in models.items():
            # Their own step: behind the last checkpoint a recipe may have had more updates, and other scores.
            step = storage.state_of(weights.parent)["step"]
            scores = scored(step)
            described = mlflow_model.describe(run.recipe, run.require_folder(), weights.name, step, scores)
            tracker.model(name, weights, step, scores, described=described)
    outcome.speed["time/wall_s"] = time.perf_counter() - run.began
    if outcome.status == "FINISHED":
        tracker.log(outcome.step, {f"final/{key}": value for key, value in outcome.speed.items()} | outcome.spent)
    with contextlib.suppress(OSError):  # the table is then of what the disk has taken
        tracker.commit()
    tracker.table("tables/metrics.csv", _last_values(journal.read(journal_file)))
    run_report.write(run, outcome, beside, digests or {}, hurried)


def _last_values(history: journal.History) -> dict[str, list[Any]]:
    """Return all metrics of a run as columns: the last value, that of the best evaluation, and how many there are."""
    best, points = journal.at_best(history.metrics), history.metrics
    names = sorted(name for name in points if not name.startswith(("best/", "at_best/")))
    at_best = [best.get(f"best/{name}") for name in names]
    return {
        "metric": names,
        "last": [points[name][-1].value for name in names],
        "at_best": [found[-1].value if found else None for found in at_best],
        "step": [points[name][-1].step for name in names],
        "values": [len(points[name]) for name in names],
    }


def table(run: RunLogger, outcome: Outcome, store: Store, beside: Comparison | None = None) -> str:
    """Return the closing summary as plain text: `page` and `closing`."""
    return terminal.plain([*page(run, outcome, beside), *closing(run, outcome, store)])


def page(run: RunLogger, outcome: Outcome, beside: Comparison | None = None) -> terminal.Page:
    """Return how a run ended: its best score, tables of scores, throughput, time, cost and bottleneck.

    `beside`: scores of the trivial baselines.
    """
    history, speed = journal.read(run.require_folder().journal), outcome.speed
    parts: list[str | terminal.Styled | terminal.Table] = ["", _ended(run, outcome), ""]
    parts += _tables(run, history, beside)
    shares = ", ".join(
        f"{_PHASES.get(k[5:-6], k[5:-6])} {100 * v:.0f} %"
        for k, v in speed.items()
        if k.endswith("_share") and v >= 0.005
    )
    parts += [
        _fact("Throughput", f"{speed['speed/samples_per_s']:.1f} samples/s in training"),
        _fact("Time", f"{_seconds(speed['time/total_s'])} of training" + (f": {shares}" if shares else "")),
        *_once(history),
    ]
    if beside is not None and beside.warning:
        parts += ["", terminal.Styled(f"Warning: {beside.warning}", "yellow")]
    parts += ["", *_verdict(outcome.verdict)] if outcome.verdict else []
    return [*parts, ""]


def _ended(run: RunLogger, outcome: Outcome) -> terminal.Styled:
    """Return the first line: how and when it ended, and its best score."""
    took, finished = _seconds(outcome.speed["time/wall_s"]), outcome.status == "FINISHED"
    ended = f"Finished in {took}." if finished else f"Stopped after {took}, at step {outcome.step}."
    rule = run.recipe.best
    if rule is not None and outcome.best:
        first = outcome.best[0]
        (value,) = numbers([first["value"]])
        ended += f" Best {rule.metric} {value} at step {first['step']}."
    return terminal.Styled(ended, "bold green" if finished else "bold yellow")


def _tables(
    run: RunLogger, history: journal.History, beside: Comparison | None
) -> list[str | terminal.Styled | terminal.Table]:
    """Return the scores of each evaluation as tables, the run's name in the heading of the first."""
    parts: list[str | terminal.Styled | terminal.Table] = []
    best = run.recipe.best.metric if run.recipe.best else ""
    for evaluation in run.recipe.evaluations:
        trivial, rows = _baselines(beside, evaluation), _scores(history, evaluation, best)
        # `pixels` is a reference that was evaluated at step 0, and a baseline.
        rows = trivial | {title: row for title, row in rows.items() if f"{_BASELINE}{title}" not in trivial}
        known = dict.fromkeys(name for row in reversed(rows.values()) for name in row)
        names = [name for name in known if not name.startswith(("xnorm", "val_at"))]
        whole, kind, classes = split(names)
        emphasised = [number for number, title in enumerate(rows, 1) if title == _deciding(evaluation, best)]
        if rows and not parts:
            parts += [f"{run.require_folder().name}", ""]
        if rows:
            parts += [terminal.Table([[evaluation, *whole[:6]], *_numbers(rows, whole[:6])], emphasised), ""]
        if classes and (not best or best.startswith(f"{evaluation}/")):  # of the set that counts
            head = [f"{evaluation}, {kind}", *(name.partition(".")[2] for name in classes)]
            parts += [terminal.Table([head, *_numbers(rows, classes)], emphasised), ""]
    return parts


def _fact(key: str, text: str) -> str:
    return f"{key:12}{text}"


def _seconds(seconds: float) -> str:
    """Return a time as text; a short one with a fraction."""
    return f"{seconds:.1f} s" if seconds < 9.95 else terminal.duration(seconds)


def _verdict(verdict: str) -> list[str | terminal.Styled]:
    """Return the lines on the bottleneck, without the throughput, which has a line of its own."""
    lines = verdict.splitlines()
    if lines and "samples/s" in lines[0] and not lines[0].startswith("Bottleneck"):
        lines = lines[1:]
    if lines and not any(line.startswith(("Bottleneck", "Compute-bound")) for line in lines):
        lines[0] = f"Bottleneck: {lines[0]}"
    return [terminal.Styled(line, "bold") if number == 0 else line for number, line in enumerate(lines)]


def closing(run: RunLogger, outcome: Outcome, store: Store) -> terminal.Page:
    """Return where the run can be seen, where its files are, and what to do next."""
    folder = run.require_folder()
    parts = [
        f"View:   trainkit ui   (or: mlflow ui --backend-store-uri {store.shown})",
        f"Files:  {os.path.relpath(folder.path) if folder.path.is_relative_to(Path.cwd()) else folder.path}",
    ]
    if outcome.status == "FINISHED":
        steps = _next(run)
        width = max(len(command) for command, _ in steps)
        parts += [f"Next:   {command.ljust(width)}  # {why}" for command, why in steps]
    return parts


def _next(run: RunLogger) -> list[tuple[str, str]]:
    """Return commands that may follow a finished run, and what each is for."""
    folder, found = run.require_folder(), []
    if (before := folder.info().follows) is not None:
        found.append((f"trainkit compare {before} {folder.name}", "which scores differ significantly"))
    elif run.recipe.evaluations:
        found.append((f"trainkit repeat {shlex.quote(run.source)} --seeds 3", "mean and spread over seeds"))
    found.append((f"trainkit predict {folder.name} IMAGES OUT.parquet", "predict your own data"))
    return found


def _deciding(evaluation: str, best: str) -> str:
    """Return the title of the row with the best score; empty for another evaluation."""
    if not best.startswith(f"{evaluation}/"):
        return ""
    return "EMA best" if best.startswith(f"{evaluation}/ema/") else "best"


def _scores(history: journal.History, evaluation: str, best: str) -> dict[str, dict[str, float]]:
    """Return the scores of each network on an evaluation, by a title for the network: references first."""
    titles = {evaluation: "final", f"best/{evaluation}": "best"}
    titles |= {f"{evaluation}/ema": "EMA final", f"best/{evaluation}/ema": "EMA best"}
    if best.startswith(f"{evaluation}/ema/"):  # the EMA weights decide
        del titles[f"best/{evaluation}"]
    else:
        del titles[f"best/{evaluation}/ema"]
    rows: dict[str, dict[str, float]] = {}
    for name, points in journal.at_best(history.metrics).items():
        head, _, metric = name.rpartition("/")
        who, _, rest = head.partition("/")
        if title := titles.get(head) or (who if rest == evaluation and who not in _OTHERS else None):
            rows.setdefault(title, {})[metric] = points[-1].value
    order = list(titles.values())
    return dict(sorted(rows.items(), key=lambda row: order.index(row[0]) if row[0] in order else -1))


def _baselines(found: Comparison | None, evaluation: str) -> dict[str, dict[str, float]]:
    """Scores of the trivial baselines of an evaluation, by a name for each."""
    if found is None or found.evaluation != evaluation:
        return {}
    return {f"{_BASELINE}{one.title}": one.metrics for one in found.scored}


def _once(history: journal.History) -> list[str]:
    """Return the lines on the cost of a run and the time to its targets."""
    spent = [f"{v:.3g} {_COST.get(k, k.replace('_', ' '))}" for k, v in _last(history, cost.PREFIX).items()]
    first = [f"{name} after {value:.0f} s" for name, value in _last(history, TIME_TO).items()]
    return [_fact(word, ", ".join(said)) for word, said in (("Cost", spent), ("Reached", first)) if said]


def _last(history: journal.History, prefix: str) -> dict[str, float]:
    """Last values of the metrics whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): p[-1].value for k, p in history.metrics.items() if k.startswith(prefix)}


def _shares(outcome: Outcome) -> dict[str, float]:
    return {key[5:-6]: value for key, value in outcome.speed.items() if key.endswith("_share")}


def _numbers(rows: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[list[str]]:
    """The rows of a table, each column in as many digits as its values need."""
    columns = [numbers([row.get(name, math.nan) for row in rows.values()]) for name in names]
    return [[who, *cells] for who, *cells in zip(rows, *columns, strict=True)]

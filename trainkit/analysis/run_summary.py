"""Figures and models of a run, and its closing summary in the terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from pathlib import Path
from typing import Any

from trainkit import terminal
from trainkit.analysis import run_report, run_scores
from trainkit.analysis.baselines import Comparison
from trainkit.checkpoint import storage
from trainkit.inference import mlflow_model
from trainkit.tracking import journal, run_lifecycle
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights
from trainkit.training.outcome import Outcome
from trainkit.training.run_logger import RunLogger


def write(
    run: RunLogger,
    outcome: Outcome,
    hurried: bool = False,
    beside: Comparison | None = None,
) -> None:
    """Draw the figures of a run, keep the rows of its last evaluations, and log its models.

    `hurried`: draw none. A machine that is taken away leaves seconds, and the resumed run draws them.
    """
    tracker, journal_file = run.tracker, run.require_folder().journal
    if not hurried:
        run.draw(outcome.curves)
    for name, rows in outcome.rows.items() if run.recipe.log.rows else ():
        tracker.table(f"rows/{name}_final.parquet", rows)
    newest = run.newest_checkpoint()
    if newest is not None:
        with contextlib.suppress(OSError):  # the last scores may not be in the file yet
            tracker.commit()
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
    run_report.write(run, outcome, beside, page(run, outcome, beside))


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


def page(run: RunLogger, outcome: Outcome, beside: Comparison | None = None) -> terminal.Page:
    """Return how a run ended: its best score, tables of scores, throughput, time, cost and bottleneck.

    `beside`: scores of the trivial baselines.
    """
    parts: list[terminal.Part] = ["", *run_scores.of_folder(run.require_folder(), outcome, beside)]
    if beside is not None and beside.warning:
        parts += ["", terminal.Styled(f"Warning: {beside.warning}", "yellow")]
    parts += ["", *_verdict(outcome.verdict)] if outcome.verdict else []
    return [*parts, ""]


def _verdict(verdict: str) -> list[terminal.Part]:
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
    request = run_lifecycle.kept(folder)
    plugins = [word for plugin in request.plugins for word in ("--plugin", plugin)]
    if (before := folder.info().follows) is not None:
        found.append((f"trainkit compare {before} {folder.name}", "which scores differ significantly"))
    elif run.recipe.evaluations:
        words = ("trainkit", "repeat", run.source, *request.overrides, *plugins, "--seeds", "3")
        found.append((shlex.join(words), "mean and spread over seeds"))
    words = ("trainkit", "predict", folder.name, "IMAGES", "OUT.parquet", *plugins)
    found.append((shlex.join(words), "predict your own data"))
    return found

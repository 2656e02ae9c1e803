"""Figures, models and a table in the terminal at the end of a run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.analysis import run_report
from trainkit.analysis.baselines import Comparison
from trainkit.checkpoint import storage
from trainkit.config.targets import TIME_TO
from trainkit.inference import mlflow_model
from trainkit.speed import cost
from trainkit.text_table import aligned, numbers, split
from trainkit.tracking import journal
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights
from trainkit.training.outcome import Outcome
from trainkit.training.run_logger import RunLogger

_OTHERS = ("best", "final", "eval", "baseline", TIME_TO.strip("/"))
"""First words of metrics in which no network comes before the evaluation."""

_TRIVIAL = "trivial baseline"


def write(
    run: RunLogger,
    outcome: Outcome,
    hurried: bool = False,
    beside: Comparison | None = None,
    digests: Mapping[str, str] | None = None,
) -> None:
    """Draw the figures of a run, keep the rows of its last evaluations, and log its models.

    `hurried`: draw none. A machine that goes away gives seconds, and the run that goes on draws them.
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
            # Of this step alone: a run that was told to stop has its last scores from an earlier one.
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
    """Scores and speeds of a run, and how to open it; `beside`: scores of the trivial baselines."""
    history = journal.read(run.require_folder().journal)
    lines = [f"run {run.require_folder().name}: {outcome.status} at step {outcome.step}", ""]
    best = run.recipe.best.metric if run.recipe.best else ""
    for evaluation in run.recipe.evaluations:
        trivial, rows = _baselines(beside, evaluation), _scores(history, evaluation, best)
        # `pixels` is a reference that was scored at step 0, and a baseline.
        rows = trivial | {title: row for title, row in rows.items() if f"{_TRIVIAL} ({title})" not in trivial}
        known = dict.fromkeys(name for row in reversed(rows.values()) for name in row)
        names = [name for name in known if not name.startswith(("xnorm", "val_at"))]
        whole, kind, classes = split(names)
        if rows:
            lines += [*aligned([[evaluation, *whole[:6]], *_numbers(rows, whole[:6])]), ""]
        if classes and (not best or best.startswith(f"{evaluation}/")):  # of the set that counts
            head = [f"{evaluation}, {kind}", *(name.partition(".")[2] for name in classes)]
            lines += [*aligned([head, *_numbers(rows, classes)]), ""]
    speed = outcome.speed
    shares = "  ".join(f"{k[5:-6]} {100 * v:.0f} %" for k, v in speed.items() if k.endswith("_share") and v >= 0.005)
    why = outcome.verdict.splitlines()[1:]
    if beside is not None and beside.warning:
        why.insert(0, beside.warning)
    lines += [
        f"speed  {speed['speed/samples_per_s']:.1f} samples/s in training; {speed['time/wall_s']:.0f} s in all",
        f"time   {speed['time/total_s']:.0f} s of training: {shares}",
        *_once(history),
        *(f"{'why' if k == 0 else '':6} {line}" for k, line in enumerate(why)),
        "",
        f"open   trainkit ui        (or: mlflow ui --backend-store-uri {store.shown})",
    ]
    return "\n" + "\n".join(lines)


def _scores(history: journal.History, evaluation: str, best: str) -> dict[str, dict[str, float]]:
    """Last scores of every network on an evaluation, by a name for the network: references first."""
    titles = {f"best/{evaluation}": "this run, at its best", evaluation: "this run, at the end"}
    titles[f"{evaluation}/ema"] = "EMA weights, at the end"
    titles[f"best/{evaluation}/ema"] = "EMA weights, at their best"
    if best.startswith(f"{evaluation}/ema/"):  # what leads are the EMA weights
        del titles[f"best/{evaluation}"]
    else:
        del titles[f"best/{evaluation}/ema"]
    rows: dict[str, dict[str, float]] = {}
    for name, points in journal.at_best(history.metrics).items():
        head, _, metric = name.rpartition("/")
        who, _, rest = head.partition("/")
        if title := titles.get(head) or (who if rest == evaluation and who not in _OTHERS else None):
            rows.setdefault(title, {})[metric] = points[-1].value
    return rows


def _baselines(found: Comparison | None, evaluation: str) -> dict[str, dict[str, float]]:
    """Scores of the trivial baselines of an evaluation, by a name for each."""
    if found is None or found.evaluation != evaluation:
        return {}
    return {f"{_TRIVIAL} ({one.title})": one.metrics for one in found.scored}


def _once(history: journal.History) -> list[str]:
    """Return the lines on the cost of a run and the time to its targets."""
    spent = [f"{value:.3g} {name}".replace("_", " ") for name, value in _last(history, cost.PREFIX).items()]
    first = [f"{name} after {value:.0f} s" for name, value in _last(history, TIME_TO).items()]
    return [f"{word:6} {', '.join(said)}" for word, said in (("cost", spent), ("first", first)) if said]


def _last(history: journal.History, prefix: str) -> dict[str, float]:
    """Last values of the metrics whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): p[-1].value for k, p in history.metrics.items() if k.startswith(prefix)}


def _shares(outcome: Outcome) -> dict[str, float]:
    return {key[5:-6]: value for key, value in outcome.speed.items() if key.endswith("_share")}


def _numbers(rows: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[list[str]]:
    """The rows of a table, each column in as many digits as its values need."""
    columns = [numbers([row.get(name, math.nan) for row in rows.values()]) for name in names]
    return [[who, *cells] for who, *cells in zip(rows, *columns, strict=True)]

"""What is left behind at the end of a run: figures, models, and a table in the terminal."""

from __future__ import annotations

from typing import Any

from trainkit import journal
from trainkit.launch import best_weights
from trainkit.loop import Outcome
from trainkit.witness import Witness


def write(run: Witness, outcome: Outcome) -> None:
    """Draw the figures of a run from its journal and log its models."""
    from trainkit.report import figures

    tracker, history = run.tracker, journal.read(run.folder.journal)
    steps, loss = history.series("train/loss")
    if steps:
        evaluations = {m: history.series(m) for m in _primary(run, history)}
        tracker.figure("figures/loss.png", figures.loss_curve(steps, loss, history.series("train/lr")[1], evaluations))
        held = sorted({p.step for name, points in history.metrics.items() if name.startswith("eval/") for p in points})
        steps, rate = history.series("speed/samples_per_s")
        tracker.figure("figures/speed.png", figures.speed_curve(steps, rate, held))
    tracker.figure("figures/time.png", figures.time_shares(_shares(outcome)))
    for name, curves in outcome.curves.items():
        rocs = {who: (c["roc"]["far"], c["roc"]["tar"]) for who, c in curves.items() if "roc" in c}
        if rocs:
            tracker.figure(f"figures/roc_{name}.png", figures.roc(rocs))
    tracker.log(outcome.step, {f"final/{key}": value for key, value in outcome.speed.items()})
    newest = run.newest_checkpoint()
    if newest is not None:
        metrics = {key: value for key, value in outcome.final.items()}
        tracker.model("last", newest / "model.safetensors", outcome.step, metrics)
        if outcome.best:
            record = outcome.best[0]
            best = {run.recipe.best.metric: record["value"]}
            tracker.model("best", best_weights(run.folder.path), record["step"], best)


def table(run: Witness, outcome: Outcome, store: Any) -> str:
    """Scores and speeds of a run, and how to open it."""
    history = journal.read(run.folder.journal)
    lines = [f"run {run.folder.name}: {outcome.status} at step {outcome.step}", ""]
    for evaluation in run.recipe.evaluations:
        rows: dict[str, dict[str, float]] = {}
        for name, points in history.metrics.items():
            head, _, metric = name.rpartition("/")
            who = head.removesuffix(f"/{evaluation}") if head.endswith(f"/{evaluation}") else ""
            if head == evaluation:
                who = "this run, at the end"
            elif head == f"{evaluation}/ema":
                who = "this run, averaged weights"
            if who and who != "final":
                rows.setdefault("this run, at its best" if who == "best" else who, {})[metric] = points[-1].value
        shown = [m for m in next(iter(rows.values()), {}) if not m.startswith(("xnorm", "val_at"))][:6]
        if rows:
            lines += _aligned([[evaluation, *shown], *([who, *_numbers(r, shown)] for who, r in rows.items())]) + [""]
    speed = outcome.speed
    shares = "  ".join(f"{k[5:-6]} {100 * v:.0f} %" for k, v in speed.items() if k.endswith("_share") and v >= 0.005)
    lines += [
        f"speed  {speed['speed/samples_per_s']:.1f} samples/s in training; {speed['time/total_s']:.0f} s in all",
        f"time   {shares}",
        "",
        f"open   trainkit ui        (or: mlflow ui --backend-store-uri {store.shown})",
    ]
    return "\n" + "\n".join(lines)


def _primary(run: Witness, history: journal.History) -> list[str]:
    best = run.recipe.best
    return [best.metric] if best and best.metric in history.metrics else []


def _shares(outcome: Outcome) -> dict[str, float]:
    return {key[5:-6]: value for key, value in outcome.speed.items() if key.endswith("_share")}


def _numbers(row: dict[str, float], names: list[str]) -> list[str]:
    return [f"{row[name]:.4f}" if name in row else "-" for name in names]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in rows]  # fmt: skip

"""The figures of a run, drawn from its journal while it trains and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit import journal


def draw(tracker: Any, history: journal.History, best: str | None, curves: Mapping[str, Mapping[str, Any]]) -> None:
    """Loss, speed and ROC curves as artifacts; those of earlier steps are replaced.

    `best` is the metric shown beside the loss; `curves` are those of the last evaluations, by evaluation and network.
    """
    from trainkit.report import figures

    steps, loss = history.series("train/loss")
    if steps:
        evaluations = {best: history.series(best)} if best in history.metrics else {}
        tracker.figure("figures/loss.png", figures.loss_curve(steps, loss, history.series("train/lr")[1], evaluations))
        held = sorted({p.step for name, points in history.metrics.items() if name.startswith("eval/") for p in points})
        steps, rate = history.series("speed/samples_per_s")
        tracker.figure("figures/speed.png", figures.speed_curve(steps, rate, held))
    for name, networks in curves.items():
        own_first = sorted(networks, key=lambda who: who != "this run")
        rocs = {who: (c["roc"]["far"], c["roc"]["tar"]) for who in own_first if "roc" in (c := networks[who])}
        if rocs:
            tracker.figure(f"figures/roc_{name}.png", figures.roc(rocs, title=f"ROC on {name}"))

"""Measure the cost of logging 8 metrics per step, into MLflow on SQLite.

    python benchmarks/tracking_cost.py
    ... --rounds 7 --sides log_metrics trainkit

Each side makes the same matrix products for 200 steps and logs 8 numbers after each. The figure is the time that the
training thread spends in the call beyond that of an empty function at the same place, microseconds a step, the mean:
waiting for threads that hold the interpreter is in it, and that the products have emptied the caches. `cpu` is the
processor time of that thread alone; `slowed` what all steps take longer than the same ones without logging, timed
before in the same process, us a step: what other threads do at the training's cost is in that; `in a row` the time of
100 more calls with nothing between them, us each; `rest` the seconds until everything is in the store after the last.
All sides must have all points there, with equal sums.

- `log_metrics` is `mlflow.log_metrics(..., step=step)`; `async` the same with `synchronous=False`.
- `trainkit` is `Tracker.log`: a queue, a journal on disk, a thread that sends.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contest import Contest, Sample, Target

STEPS, TIGHT = 200, 100
NAMES = tuple(f"train/{name}" for name in ("loss", "grad_norm", "lr", "epoch", "margin", "scale", "cosine", "norm"))


def _work() -> Callable[[], None]:
    import torch

    torch.manual_seed(0)
    a, b, out = torch.randn(384, 384), torch.randn(384, 384), torch.empty(384, 384)

    def step() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)

    return step


def _points(step: int) -> dict[str, float]:
    return {name: 1.0 / (step + 1 + number) for number, name in enumerate(NAMES)}


def measured(log: Callable[[int, dict[str, float]], Any], rest: Callable[[], Any], read: Callable[[], Any]) -> Sample:
    """Steps without logging, steps with, and what is left to do then; `read` gives the client and the run's id."""
    work = _work()
    for _ in range(20):
        work()
    began = time.perf_counter()
    for step in range(STEPS):
        work()
        _points(step)
    bare = time.perf_counter() - began
    calls, empty, spent = [], [], 0
    began = time.perf_counter()
    for step in range(STEPS):
        work()
        points = _points(step)
        asked = time.perf_counter()
        _nothing(step, points)
        empty.append(time.perf_counter() - asked)
    bare += time.perf_counter() - began
    began = time.perf_counter()
    for step in range(STEPS):
        work()
        points = _points(step)
        used, asked = time.thread_time_ns(), time.perf_counter()
        log(step, points)
        calls.append(time.perf_counter() - asked)
        spent += time.thread_time_ns() - used
    took = time.perf_counter() - began
    began = time.perf_counter()
    for step in range(STEPS, STEPS + TIGHT):
        log(step, _points(step))
    tight = time.perf_counter() - began
    began = time.perf_counter()
    rest()
    left = time.perf_counter() - began
    client, run_id = read()
    proof = []
    for name in NAMES:
        found = client.get_metric_history(run_id, name)
        proof += [len(found), len({point.step for point in found}), sum(sorted(point.value for point in found))]
    more = {
        "cpu": spent / 1e3 / STEPS,
        "slowed": 1e6 * (took - bare / 2) / STEPS,
        "in a row": 1e6 * tight / TIGHT,
        "rest": left,
    }
    return Sample(1e6 * (statistics.mean(calls) - statistics.mean(empty)), proof, more)


def _nothing(step: int, points: dict[str, float]) -> None:
    pass


def _mlflow(synchronous: bool) -> Sample:
    import mlflow

    folder = Path(tempfile.mkdtemp())
    try:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.set_experiment("cost")
        run_id = mlflow.start_run().info.run_id

        def log(step: int, points: dict[str, float]) -> None:
            mlflow.log_metrics(points, step=step, synchronous=synchronous)

        def rest() -> None:
            if not synchronous:
                mlflow.flush_async_logging()
            mlflow.end_run()

        return measured(log, rest, lambda: (mlflow.MlflowClient(), run_id))
    finally:
        shutil.rmtree(folder)


def log_metrics(case: str) -> Sample:
    """The call that tutorials show."""
    return _mlflow(synchronous=True)


def asynchronous(case: str) -> Sample:
    """MLflow's own queue and threads."""
    return _mlflow(synchronous=False)


def trainkit(case: str) -> Sample:
    """As the loop does it."""
    from trainkit.tracking.store import Store
    from trainkit.tracking.tracker import Tracker

    folder = Path(tempfile.mkdtemp())
    try:
        os.environ["TRAINKIT_STORE"] = str(folder)
        store = Store.locate()
        store.prepare()
        run = store.new_run("cost", 0, "00")
        tracker = Tracker.start(run, store, experiment="cost", run_name="cost", params={}, system_metrics_every=0.0)
        return measured(tracker.log, lambda: tracker.finish("FINISHED"), lambda: (store.client(), tracker.run_id))
    finally:
        shutil.rmtree(folder)


CONTEST = Contest(
    title="Logging 8 metrics per step",
    unit="us per step",
    baseline="log_metrics",
    sides={"log_metrics": log_metrics, "async": asynchronous, "trainkit": trainkit},
    targets=(
        Target("", "trainkit", 10.0, "value", words="us per step in the training thread"),
        Target("", "trainkit", 10.0, "in a row", words="us per call, calls back to back"),
    ),
    bounds=(
        "In training, matrix products evict the interpreter's code and data from the caches between two calls, so "
        "that a call takes several times as long as back to back, with the upload thread or without."
    ),
    tolerance=1e-6,  # values are sent to MLflow with six digits
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

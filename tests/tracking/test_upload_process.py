"""A process hands metrics over where there are many: every value once, whatever becomes of it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import psutil
import pytest

from trainkit.tracking import upload_process
from trainkit.tracking.journal import Point
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker
from trainkit.tracking.upload_process import Courier


@pytest.fixture
def store(store):
    return Store.locate()


@pytest.fixture
def run_id(store):
    return store.client().create_run("0").info.run_id


def history(store, run_id, name):
    return [(p.step, p.value, p.timestamp) for p in store.client().get_metric_history(run_id, name)]


def gone(pid):
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_batch_is_taken_once_and_a_dead_courier_takes_none(store, run_id):
    one = Courier(store)
    try:
        batch = [("a", Point(step, step / 3, 1000 + step)) for step in range(5)]
        assert one.took(run_id, [*batch, ("b", Point(0, math.inf, 1)), ("c", Point(0, math.nan, 1))])
        assert one.took(run_id, batch), "again, as after an answer that was lost"
        assert history(store, run_id, "a") == [(step, step / 3, 1000 + step) for step in range(5)]
        assert math.isnan(history(store, run_id, "b")[0][1]) and math.isnan(history(store, run_id, "c")[0][1])
        assert not one.took("no such run", batch) and one.took(run_id, batch), "one that is refused is not its end"
        pid = one._process.pid
        os.kill(pid, 9)
        assert not one.took(run_id, batch) and not one.took(run_id, batch)
        assert gone(pid)
    finally:
        one.close()


def test_a_run_whose_thread_has_worked_enough_gets_a_courier_and_loses_nothing(store, monkeypatch):
    monkeypatch.setattr(upload_process, "WORTH_SECONDS", 0.0)
    run = store.new_run("many", 0, "00")
    tracker = Tracker.start(run, store, experiment="e", run_name="r", params={}, system_metrics_every=0.0)
    for step in range(5):
        tracker.log(step, {"train/loss": 1.0 / (step + 1)})
        assert tracker.flush()
        if step == 3:  # the rest is sent as ever
            pid = tracker._outbox.courier._process.pid
            os.kill(pid, 9)
    tracker.finish("FINISHED")
    assert [(s, v) for s, v, _ in history(store, tracker.run_id, "train/loss")] == [(s, 1 / (s + 1)) for s in range(5)]
    assert gone(pid) and tracker._outbox.courier._process is None


def test_it_ends_with_the_training_and_knows_no_torch():
    code = (
        "import os, sys, time\n"
        "from trainkit.tracking.upload_process import Courier\n"
        "from trainkit.tracking.store import Store\n"
        "assert not {'torch', 'mlflow', 'numpy'} & set(sys.modules)\n"
        "print(Courier(Store.locate())._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9 and gone(int(done.stdout)), done.stderr

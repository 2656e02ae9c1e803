"""Real runs that are slowed down on purpose: the verdict names what was done to them, and no bit of them changes."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo
from runs import PLUGIN, TOY, Ran, all_same, newest, run, spawn

from trainkit.checkpoint import storage
from trainkit.diagnostics import throughput_limits
from trainkit.speed.evidence import Drop
from trainkit.speed.slowdowns import SlowdownDetector
from trainkit.tracking.tracker import Tracker
from trainkit.training import throughput_monitor
from trainkit.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("store")
if str(PLUGIN) not in sys.path:
    sys.path.insert(0, str(PLUGIN))
import toy  # noqa: E402

PLAIN = ["evaluations={}", "best=null", "checkpoints={every: null, at_end: false}", "log.every=20 steps"]


def slowed(act, seconds, when=lambda: True):
    """A function that takes longer than it did."""

    def slow(*args, **kwargs):
        if when():
            time.sleep(seconds)
        return act(*args, **kwargs)

    return slow


def told(ran, tag="trainkit.verdict") -> str:
    """Cause and first sentence of a run's verdict, as its record has them; or another tag."""
    from mlflow.tracking import MlflowClient

    from trainkit.tracking.store import Store

    return MlflowClient(Store.locate().uri).get_run(ran.folder.info().run_id).data.tags[tag]


def verdict_file(ran) -> str:
    """All of a run's verdict."""
    return next(
        p for p in Path(os.environ["TRAINKIT_STORE"]).rglob("verdict.md") if ran.folder.info().run_id in str(p)
    ).read_text()


def test_a_slow_loader(monkeypatch):
    monkeypatch.setattr(toy.ToySplit, "fetch", slowed(toy.ToySplit.fetch, 0.03))
    ran = run("train.length=40 steps", *PLAIN)
    assert told(ran).startswith("data: ") and "% of wall-clock time)" in told(ran)
    assert ran.series("time/data_share")[-1] > 0.5


@pytest.mark.slow
def test_what_is_done_to_a_batch_on_the_device(monkeypatch):
    monkeypatch.setattr(toy.ToySplit, "on_device", slowed(toy.ToySplit.on_device, 0.03))
    assert told(run("train.length=40 steps", *PLAIN)).startswith("transfer: ")


def test_a_slow_evaluation():
    words = ["train.length=15 steps", "evaluations={val: {every: 5 steps, batch_size: 8}}", *PLAIN[1:]]
    said = verdict_file(run(*words, "task.slow_score=0.3")).lower()
    assert "evaluations (" in said and "% of wall-clock time; val 3 x 0." in said


@pytest.mark.slow
def test_a_slow_checkpoint(monkeypatch):
    monkeypatch.setattr(storage, "write", slowed(storage.write, 0.3))
    words = ["train.length=30 steps", "checkpoints={every: 5 steps, at_end: false}", *PLAIN[:2], PLAIN[3]]
    assert "checkpoints (" in verdict_file(run(*words)).lower()


@pytest.mark.slow
def test_a_slow_log(monkeypatch):
    monkeypatch.setattr(Tracker, "log", slowed(Tracker.log, 0.2))
    ran = run("train.length=30 steps", *PLAIN[:3], "log.every=3 steps")
    assert "log lines, tables and images (" in verdict_file(ran).lower()


@pytest.mark.slow
def test_a_network_that_is_compiled_again_in_each_step(monkeypatch):
    called = itertools.count()

    def forward(self, x, plain=toy.Net.forward):
        return plain(self, x) * (1 + 0 * self.turn)

    def loss(self, net, *rest, plain=toy.ToyTask.loss):
        net.turn = next(called)  # read by forward: compiled for this value alone
        return plain(self, net, *rest)

    monkeypatch.setattr(toy.Net, "forward", forward)
    monkeypatch.setattr(toy.ToyTask, "loss", loss)
    compiler = torch.nn.Module.compile  # traced, not translated into C++: that takes seconds each time
    monkeypatch.setattr(torch.nn.Module, "compile", lambda net, mode: compiler(net, backend="eager", dynamic=False))
    monkeypatch.setattr(throughput_monitor, "WARM", 5)
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(recompile_limit=1000):
            ran = run("train.length=30 steps", "train.micro_batch=16", "train.compile=default", *PLAIN)
    finally:
        torch._dynamo.reset()
    assert told(ran).startswith("recompile: Recompilation (") and "turn" in told(ran)
    assert ran.series("speed/recompiles")[-1] >= 20


@pytest.mark.slow
def test_a_process_that_the_other_waits_for(store):
    words = ["train.length=400 steps", "task.slow_rank=1", *PLAIN[:3], "log.every=100 steps"]
    done = spawn(2, str(TOY), "--plugin", "toy", *words)
    assert done.returncode == 0, done.stderr
    said = told(Ran(0, newest()))
    assert said.startswith("slow_rank: Slow rank (") and "they wait for it" in said


def test_a_change_of_pace_is_told_at_once_with_its_phase_and_what_was_seen(monkeypatch, capsys):
    looked = []

    def look(self, steps):
        looked.append(steps)
        at = int(steps.number[-1])
        return Drop(step=61, before_ms=2.0, after_ms=40.0, phase="data", share=0.96) if at == 75 else None

    monkeypatch.setattr(SlowdownDetector, "look", look)
    fetched = iter(range(10**9))
    slow = slowed(toy.ToySplit.fetch, 0.02, when=lambda: next(fetched) >= 2 * 60)  # two micro-batches a step
    monkeypatch.setattr(toy.ToySplit, "fetch", slow)
    ran = run("train.length=80 steps", *PLAIN[:3], "log.every=100 steps")
    assert [int(steps.number[-1]) for steps in looked] == [25, 50, 75] and all(len(steps) == 25 for steps in looked)
    (drop,) = ran.events("speed_drop")
    assert drop.step == 75 and (drop.data["step"], drop.data["phase"]) == (61, "data")
    assert "Sustained slowdown since step 61: step time 2 ms -> 40 ms; 96 % of the increase is data loading." in (
        capsys.readouterr().out
    )
    # What is said of that moment is of the slow steps alone.
    assert any(line.startswith("Data loading (") for line in drop.data["said"])


@pytest.mark.slow
def test_a_loader_that_becomes_slow_is_found(monkeypatch):
    fetched = iter(range(10**9))
    slow = slowed(toy.ToySplit.fetch, 0.1, when=lambda: next(fetched) >= 440)
    monkeypatch.setattr(toy.ToySplit, "fetch", slow)
    monkeypatch.setattr(toy.ToySplit, "on_device", slowed(toy.ToySplit.on_device, 0.005))
    ran = run("train.length=510 steps", "train.micro_batch=16", *PLAIN[:3], "log.every=100 steps", "log.ceilings=off")
    (drop,) = ran.events("speed_drop")
    assert drop.data["phase"] == "data" and abs(drop.data["step"] - 441) <= 3 and drop.step <= 510
    assert drop.data["after_ms"] > 90 and drop.data["share"] > 0.9


def test_watching_changes_no_bit_and_leaves_a_trace_and_a_verdict(store, monkeypatch):
    monkeypatch.setattr(throughput_limits, "SECONDS", 0.2)
    words = ["train.length=30 steps", "log.every=10 steps"]
    watched = run(*words, "log.profile={at: 8, steps: 2}", "log.ceilings=measure")
    plain = run(*words, "log.ceilings=off")
    assert all_same(watched, plain)
    names = {path.name for path in store.rglob("*") if watched.folder.info().run_id in str(path)}
    note = told(watched, "mlflow.note.content")
    assert note.endswith(verdict_file(watched)) and note.startswith("val/accuracy **")
    assert "    nothing to compare with: no run of experiment toy had" in note
    assert "Step time: p10 " in verdict_file(watched)
    assert "verdict.md" in names and any(name.endswith(".json.gz") for name in names)
    # Against the bounds that were logged: how fast the machine was meanwhile says nothing.
    bounds = [watched.series(f"speed/ceiling_{part}")[-1] for part in ("loader", "model")]
    shares = [rate / min(bounds) for rate in watched.series("speed/samples_per_s")]
    assert watched.series("speed/ceiling_share") == pytest.approx(shares) and not plain.series("speed/ceiling_share")
    for name in ("device/forward_ms", "device/backward_ms", "device/optimizer_ms"):
        assert len(watched.series(name)) == 3 and watched.series(name)[-1] > 0


def test_shares_add_up_to_the_wall_clock(monkeypatch):
    took = []
    fit = Trainer.fit

    def timed(self):
        outcome = fit(self)
        took.append((time.perf_counter() - self.logger.began, outcome))
        return outcome

    monkeypatch.setattr(Trainer, "fit", timed)
    run("train.length=20 steps", "task.slow_score=0.1")
    seconds, outcome = took[0]
    shares = [value for name, value in outcome.speed.items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1)
    assert outcome.speed["time/total_s"] == pytest.approx(seconds, rel=0.01, abs=0.02)

"""Traces of chosen updates: which they hold, what is in them, and what happens when there can be none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from trainkit.config.schema import Profile
from trainkit.speed import torch_profiler
from trainkit.speed.clock import STEP, Clock
from trainkit.speed.torch_profiler import NEVER, WARM, Trace


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def train(net, traced, clock, first, last, back=()):
    """Updates from the one after `first`; what called the trace. `back`: after update a the count goes back to b."""
    back, called, step = dict(back), [], first
    traced.step(first)
    while step < last:
        for phase in STEP[:3]:
            clock.to(phase)
        loss = net(torch.ones(4, 8)).square().sum()
        clock.to("backward")
        loss.backward()
        clock.to("optimizer")
        with torch.no_grad():
            for p in net.parameters():
                p -= 1e-3 * p.grad
        net.zero_grad()
        step += 1
        clock.step()
        if step >= traced.due:
            called.append(step)
            traced.step(step)
        step = back.pop(step, step)
    return called


def read(file: Path):
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    ours = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: (e["ts"], -e["dur"]))
    return ours, {e["name"] for e in events if e.get("cat") == "cpu_op"}


def trace(at: int, steps: int, clock: Clock, folder: Path | None) -> Trace:
    return Trace(Profile(at=at, steps=steps), torch.device("cpu"), clock, folder)


def test_the_updates_that_were_asked_for_are_traced_with_their_numbers(net, tmp_path):
    clock = Clock()
    traced = trace(7, 3, clock, tmp_path / "new")
    called = train(net, traced, clock, 0, 14)
    assert called == [3, 4, 5, 6, 7, 8, 9] and traced.due == NEVER and not traced.absent
    assert traced.file == tmp_path / "new" / "updates_7_9.json.gz" and traced.slowed == (4, 9)
    ranges, operations = read(traced.file)
    updates = [r["name"] for r in ranges if r["name"].startswith("ProfilerStep")]
    assert updates == [f"ProfilerStep#{k}" for k in (7, 8, 9)]
    assert {"aten::addmm", "aten::mm"} <= operations  # forward and backward
    clock.to("data")
    traced.close()
    assert traced.file.exists() and not traced.absent


@pytest.mark.parametrize(("at", "done", "expected"), [(1, 0, (1, 2)), (2, 0, (2, 3)), (5, 5, (6, 6)), (9, 7, (9, 10))])
def test_a_trace_at_the_very_start_or_after_a_resume_is_as_whole_as_it_can_be(net, tmp_path, at, done, expected):
    clock = Clock()
    traced = trace(at, 2, clock, tmp_path)
    train(net, traced, clock, done, done + 8)
    first, last = expected
    assert traced.file.name == f"updates_{first}_{last}.json.gz"
    names = [r["name"] for r in read(traced.file)[0] if r["name"].startswith("ProfilerStep")]
    assert names == [f"ProfilerStep#{k}" for k in range(first, last + 1)]


def test_a_run_resumed_behind_its_trace_makes_none(net, tmp_path):
    traced = trace(5, 2, Clock(), tmp_path)
    assert train(net, traced, Clock(), 6, 9) == [] and traced.due == NEVER
    assert traced.file is None and "after step 6" in traced.absent and not list(tmp_path.iterdir())


def test_a_training_that_ends_early_leaves_what_there_is_or_says_why_nothing(net, tmp_path):
    clock = Clock()
    short = trace(5, 10, clock, tmp_path)
    train(net, short, clock, 0, 6)
    short.close()
    assert short.file.name == "updates_5_6.json.gz" and short.due == NEVER
    assert "ProfilerStep#6" in {r["name"] for r in read(short.file)[0]}
    for last in (1, 3):  # before and while the tracer warms up
        none = trace(5, 2, clock, tmp_path)
        train(net, none, clock, 0, last)
        none.close()
        assert none.file is None and none.absent == "training ended before step 5"


def test_updates_that_are_made_again_do_not_make_a_trace_longer(net, tmp_path):
    clock = Clock()
    traced = trace(5, 4, clock, tmp_path)
    called = train(net, traced, clock, 0, 12, back={6: 2})
    assert len(called) == 1 + WARM + 4 and traced.slowed == (2, 6)
    assert traced.due == NEVER and traced.file is not None


@pytest.mark.parametrize("broken", ["start", "step", "export_chrome_trace"])
def test_what_a_tracer_stumbles_over_is_said_and_the_training_goes_on(net, tmp_path, monkeypatch, broken):
    def refuse(*args):
        Path(tmp_path / "half.json.gz").touch()
        raise RuntimeError("no permission for counters")

    monkeypatch.setattr(torch_profiler.profile, broken, refuse)
    clock = Clock()
    traced = trace(2, 2, clock, tmp_path)
    train(net, traced, clock, 0, 6)
    traced.close()
    assert traced.absent == "RuntimeError: no permission for counters" and traced.file is None
    assert traced.due == NEVER and clock.steps == 6
    assert not list(tmp_path.glob("updates*"))
    monkeypatch.undo()
    again = trace(2, 2, Clock(), tmp_path)  # nothing of the first one is in its way
    train(net, again, clock, 0, 6)
    assert again.file is not None


def test_tracing_changes_no_bit_and_a_folder_of_its_own_goes_with_it(net):
    import copy
    import gc

    plain = copy.deepcopy(net)
    clock = Clock()
    traced = trace(3, 2, clock, None)
    train(net, traced, clock, 0, 8)
    train(plain, trace(100, 10, Clock(), None), Clock(), 0, 8)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    folder = traced.file.parent
    assert folder.exists()
    del traced
    gc.collect()
    assert not folder.exists()


def test_starting_and_writing_count_as_log(net, tmp_path):
    clock = Clock()
    traced = trace(2, 2, clock, tmp_path)
    train(net, traced, clock, 0, 4)
    clock.to("data")
    steps = clock.recent()
    assert clock.seconds["log"] > 1e-3 and steps.between[3, 2] > 1e-3  # written before update 4

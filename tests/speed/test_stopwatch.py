"""The clock in somebody else's loop."""

from __future__ import annotations

import re
import time

import pytest
import torch

from trainkit.speed.evidence import Drop
from trainkit.speed.slowdowns import SlowdownDetector
from trainkit.speed.stopwatch import Stopwatch


def batches(many: int, seconds: float = 0.0):
    for k in range(many):
        time.sleep(seconds)
        yield torch.ones(8, 4), k


def test_three_lines_tell_waiting_from_work():
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = Stopwatch(batch_size=8)
    for x, _ in watch.batches(batches(40, 0.02)):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
    said = watch.verdict().splitlines()
    share = re.fullmatch(r"Bottleneck: data loading \((\d+) % of wall-clock time\)\.", said[1])
    assert share and float(share[1]) > 60
    assert (
        20 < float(said[0].removeprefix("Throughput: ").split(" ")[0]) < 400 and "trainkit bench" not in watch.verdict()
    )


def test_work_in_the_body_is_no_waiting_and_an_evaluation_is_no_step():
    watch, steps, began = Stopwatch(batch_size=8), [], time.perf_counter()
    for _, k in watch.batches(batches(20)):
        start = time.perf_counter()
        time.sleep(0.01)
        watch.to("backward")
        time.sleep(0.01)
        steps.append(time.perf_counter() - start)
        if k == 10:
            start = time.perf_counter()
            with watch.phase("eval"):
                time.sleep(0.3)
            evaluation = time.perf_counter() - start
    found, whole = watch.metrics(), time.perf_counter() - began
    waited = 1 - (sum(steps) + evaluation) / whole  # of which a busy machine makes more
    assert found["time/data_share"] <= waited + 0.05
    assert found["time/eval_share"] == pytest.approx(evaluation / whole, abs=0.05)
    assert found["speed/samples_per_s"] == pytest.approx(20 * 8 / sum(steps), rel=0.5) and min(steps) >= 0.02
    assert found["speed/step_ms_p50"] == pytest.approx(1e3 * sorted(steps)[10], rel=0.5)
    e = watch.evidence()
    assert e.trained == len(e.steps) == 20 and e.steps.phases[:, 3].min() >= 0.01
    assert watch.metrics() == {}


def test_a_loop_that_was_never_watched_is_told_how():
    assert "watch.batches(loader)" in Stopwatch(batch_size=8).verdict()
    assert list(Stopwatch(batch_size=8).batches([])) == []
    watch = Stopwatch(batch_size=8)
    for wrong in ("eval", "compute", "x"):
        with pytest.raises(ValueError, match="a step has the phases data, transfer, forward"):
            watch.to(wrong)
    with pytest.raises(ValueError, match="between steps the phases are"), watch.phase("forward"):
        pass


def test_a_change_in_a_body_of_which_nothing_is_known_is_no_forward_pass(monkeypatch):
    def look(self, steps):
        at = int(steps.number[-1])
        return Drop(step=41, before_ms=2.0, after_ms=50.0, phase="forward", share=1.0) if at == 50 else None

    monkeypatch.setattr(SlowdownDetector, "look", look)
    for divided, phase, named in ((False, "body", "the body of the loop"), (True, "forward", "the forward pass")):
        watch = Stopwatch(batch_size=8)
        for _ in watch.batches(batches(60)):
            if divided:
                watch.to("backward")
        (drop,) = watch.evidence().drops
        assert (drop.step, drop.phase) == (41, phase)
        said = f"Sustained slowdown since step 41: step time 2 ms -> 50 ms; 100 % of the increase is {named}."
        assert said in watch.verdict()

"""The verdict: what slows a run down is named, and nothing else is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import simulated_slowdowns

from trainkit.speed import bottleneck
from trainkit.speed.evidence import Drop
from trainkit.speed.limits import ThroughputLimits

NUMBER = 220


def test_of_220_runs_with_one_thing_wrong_at_least_98_in_100_are_told_what():
    wrong = Counter()
    for number in range(NUMBER):
        cause = simulated_slowdowns.CAUSES[number % len(simulated_slowdowns.CAUSES)]
        found = bottleneck.judge(simulated_slowdowns.inject(cause, np.random.default_rng([7, number])))
        if found[0].cause != cause:
            wrong[cause, found[0].cause] += 1
    assert wrong.total() <= 0.02 * NUMBER, wrong


def test_of_a_sound_run_the_work_itself_is_what_takes_the_time():
    for number in range(100):
        e = simulated_slowdowns.World.random(np.random.default_rng([8, number])).evidence()
        found = bottleneck.judge(e)
        assert found[0].cause == "compute" and found[0].costs > 0.8, (number, found)
        assert all(f.costs < bottleneck.NOTABLE for f in found[1:])


def test_a_verdict_says_what_was_measured_and_marks_what_was_not():
    e = simulated_slowdowns.inject("data", np.random.default_rng(3))
    e = replace(
        e,
        ceilings=ThroughputLimits(loader=310, model=1900, fetch={"decode": 0.81, "read": 0.19}),
        absent={"gpu": "no GPU"},
    )
    lines = bottleneck.words(e, bottleneck.judge(e), "recipes/x.yaml")
    text = "\n".join(lines)
    share = e.seconds["data"] / sum(e.seconds.values())
    assert f"{100 * share:.0f} % of the time the step waited for data" in text
    assert (
        "the loader alone gives 310 samples/s and the network alone 1,900; decoding is 81 % of reading a batch" in text
    )
    assert "untested: more workers than 2 (switch `workers`)" in text
    assert "trainkit bench recipes/x.yaml --only workers" in text
    assert bottleneck.unmeasured(e) == ["not measured: gpu: no GPU"] and "no GPU" not in text


def test_what_is_not_known_is_not_spoken_of():
    e = simulated_slowdowns.World.random(np.random.default_rng(5), cuda=False, processes=1).evidence()
    bare = replace(
        e, ceilings=None, load=(), compiled=None, waits=None, settings={}, held={}, steps=e.steps[:0], trained=0
    )
    text = "\n".join(bottleneck.words(bare, bottleneck.judge(bare)))
    for word in ("loader", "arithmetic", "memory", "clock", "compiled", "nan", "inf"):
        assert word not in text.lower(), text


@pytest.mark.parametrize(
    ("settings", "device", "said"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "cuda", "every kernel is waited for"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "cpu", None),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "cuda", None),
        ({"deterministic": True}, "cuda", "deterministic is on"),
        ({"cudnn_benchmark": False}, "cuda", "cudnn_benchmark is off"),
        ({"anomaly": True}, "cpu", "anomaly detection"),
        ({"cores": 8, "threads": 1, "processes": 1}, "cpu", "1 of 8 cores learn: 1 process, 1 thread."),
        (
            {"cores": 8, "threads": 8, "processes": 4},
            "cpu",
            "32 threads to run: 4 processes, 8 threads each.",
        ),
        ({"cores": 8, "threads": 8, "processes": 1}, "cpu", None),
    ],
)
def test_settings_that_cost_are_named(settings, device, said):
    e = simulated_slowdowns.World.random(np.random.default_rng(6), cuda=False, processes=1).evidence()
    found = [f.said for f in bottleneck.judge(replace(e, settings=settings, device=device)) if f.cause == "setting"]
    assert len(found) == (said is not None) and (said is None or said in found[0])


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (90, None),
        (240, "grew from 1.1 to 1.9 GB within 4 minutes; a step"),
        (3600, "grew from 1.1 to 1.9 GB within 60 minutes, 1 GB an hour; a step"),
    ],
)
def test_growing_memory_is_reported_after_minutes_and_its_rate_after_ten(seconds, said):
    e = simulated_slowdowns.World.random(np.random.default_rng(5)).evidence()
    load = tuple(replace(r, at=k * seconds / 23, rss_gb=1.0 + k / 23) for k, r in enumerate(e.load))
    found = [f.said for f in bottleneck.judge(replace(e, load=load)) if f.cause == "memory"]
    assert len(found) == (said is not None) and all(said in words for words in found), found


def test_a_change_of_pace_is_told_with_its_step_and_its_phase():
    drop = Drop(step=1050, before_ms=275.0, after_ms=1506.0, phase="data", share=0.97)
    said = "From step 1050 on a step took 1.51 s instead of 275 ms; 97 % of what was lost is in waiting for data."
    assert bottleneck.dropped(drop) == said


def test_every_cause_that_can_be_found_is_listed_and_every_phase_has_a_name():
    from trainkit.speed.clock import PHASES

    assert set(simulated_slowdowns.CAUSES) < set(bottleneck.CAUSES)
    assert set(PHASES) <= set(bottleneck.NAMES)

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


def test_in_98_percent_of_220_runs_with_one_cause_that_cause_comes_first():
    wrong = Counter()
    for number in range(NUMBER):
        cause = simulated_slowdowns.CAUSES[number % len(simulated_slowdowns.CAUSES)]
        found = bottleneck.judge(simulated_slowdowns.inject(cause, np.random.default_rng([7, number])))
        if found[0].cause != cause:
            wrong[cause, found[0].cause] += 1
    assert wrong.total() <= 0.02 * NUMBER, wrong


def test_a_sound_run_is_compute_bound():
    for number in range(100):
        e = simulated_slowdowns.World.random(np.random.default_rng([8, number])).evidence()
        found = bottleneck.judge(e)
        assert found[0].cause == "compute" and found[0].share > 0.8, (number, found)
        assert all(f.share < bottleneck.NOTABLE for f in found[1:])


def test_a_verdict_says_what_was_measured_and_marks_what_was_not():
    e = simulated_slowdowns.inject("data", np.random.default_rng(3))
    e = replace(
        e,
        limits=ThroughputLimits(loader=410, model=1900),
    )
    lines = bottleneck.describe(e, bottleneck.judge(e), "recipes/x.yaml")
    text = "\n".join(lines)
    share = e.seconds["data"] / sum(e.seconds.values())
    assert (
        lines[0].startswith("Throughput: ") and " % of the upper bound of the loader alone (410 samples/s)." in lines[0]
    )
    assert " Step time: p10 " in lines[0] and ", p50 " in lines[0] and ", p99 " in lines[0]
    assert lines[1].startswith(f"Bottleneck: data loading ({100 * share:.0f} % of wall-clock time).")
    assert "Upper bounds: loader alone 410 samples/s, model alone 1,900." in text
    workers = min(4, e.settings["cores"])
    assert workers == 2 or f"Try `loader.workers={workers}`, decoding the data once (not measured here; " in text
    assert "`trainkit bench recipes/x.yaml` measures" in text, "one of them has no argument: bench tries it by itself"


def test_the_override_that_is_suggested_fits_the_machine():
    def tried(**settings):
        e = replace(simulated_slowdowns.inject("data", np.random.default_rng(3)), settings=settings)
        (data,) = (f for f in bottleneck.judge(e) if f.cause == "data")
        return [option for option, argument in data.options if argument]

    assert tried(workers=2, cores=8) == ["`loader.workers=4`"] and tried(workers=6, cores=8) == ["`loader.workers=8`"]
    assert tried(workers=0, cores=2) == ["`loader.workers=2`"] and tried(workers=0) == ["`loader.workers=4`"]
    assert tried(workers=2, cores=2) == [] and tried(workers=8, cores=4) == []


def test_one_option_is_a_sentence_with_its_command():
    e = simulated_slowdowns.inject("log", np.random.default_rng(4))
    text = bottleneck.describe(e, bottleneck.judge(e), "a`b.yaml")[1]
    assert text.startswith("Bottleneck: log lines, tables and images (")
    assert text.endswith(" Try a longer `log.every`."), "nothing that bench can measure"
    few = replace(simulated_slowdowns.inject("data", np.random.default_rng(4)), settings={"workers": 1, "cores": 4})
    (data,) = (f for f in bottleneck.judge(few) if f.cause == "data")
    alone = replace(data, options=data.options[:1])
    assert bottleneck.describe(few, [alone], "a`b.yaml")[-1].endswith(
        " Try `loader.workers=2` (not measured here; ``trainkit bench a`b.yaml loader.workers=1,2`` measures it)."
    )


def test_what_is_not_known_is_not_spoken_of():
    e = simulated_slowdowns.World.random(np.random.default_rng(5), cuda=False, processes=1).evidence()
    bare = replace(
        e, limits=None, load=(), compiled=None, waits=None, settings={}, evaluation_s={}, steps=e.steps[:0], trained=0
    )
    text = "\n".join(bottleneck.describe(bare, bottleneck.judge(bare)))
    for word in ("loader", "flop", "step time", " clock", "compiled", "nan", "inf"):
        assert word not in text.lower(), text


@pytest.mark.parametrize(
    ("settings", "device", "said"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "cuda", "the host waits for every kernel"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "cpu", None),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "cuda", None),
        ({"deterministic": True}, "cuda", "Deterministic kernels (`device.deterministic`) are on"),
        ({"cudnn_benchmark": False}, "cuda", "`device.cudnn_benchmark`) is off"),
        ({"anomaly": True}, "cpu", "anomaly detection"),
        ({"cores": 8, "threads": 1, "processes": 1}, "cpu", "Few threads: 1 on 8 CPU cores (1 process, 1 thread)."),
        (
            {"cores": 8, "threads": 8, "processes": 4},
            "cpu",
            "Too many threads: 32 on 8 CPU cores (4 processes, 8 threads each).",
        ),
        ({"cores": 8, "threads": 8, "processes": 1}, "cpu", None),
    ],
)
def test_settings_that_cost_are_named(settings, device, said):
    e = simulated_slowdowns.World.random(np.random.default_rng(6), cuda=False, processes=1).evidence()
    found = [f.text for f in bottleneck.judge(replace(e, settings=settings, device=device)) if f.cause == "setting"]
    assert len(found) == (said is not None) and (said is None or said in found[0])


def test_a_slowdown_is_described_with_its_step_and_its_phase():
    drop = Drop(step=1050, before_ms=275.0, after_ms=1506.0, phase="data", share=0.97)
    said = "Sustained slowdown since step 1,050: step time 275 ms -> 1.51 s; 97 % of the increase is data loading."
    assert bottleneck.describe_slowdown(drop) == said


def test_every_cause_that_can_be_found_is_listed_and_every_phase_has_a_name():
    from trainkit.speed.clock import PHASES

    assert set(simulated_slowdowns.CAUSES) < set(bottleneck.CAUSES)
    assert set(PHASES) <= set(bottleneck.NAMES)

"""Slowdowns: no alarm on a thousand traces with bursts; what lasts is found in time, at its step and in its phase."""

import time

import numpy as np
import pytest
import step_time_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.speed.clock import BETWEEN, COMPUTE, PHASES, STEP
from trainkit.speed.slowdowns import SKIPPED, WINDOW, SlowdownDetector

MEAN = np.array([0.05, 0.005, 0.07, 0.14, 0.01, 0, 0, 0, 0])
"""Seconds by phase of a step of the first guide: 930 samples a second in batches of 256."""
GUIDE = 930 / 170


def plain(length: int, seed: int = 0, noise: float = 0.1) -> np.ndarray:
    """(length, 9) seconds by phase, with log-normal noise."""
    return MEAN * np.exp(np.random.default_rng(seed).normal(0, noise, (length, len(PHASES))))


def find(rows: np.ndarray, skip: int = SKIPPED) -> list:
    return SlowdownDetector(skip).feed(step_time_traces.as_steps(rows))


def watched(rows: np.ndarray, detector: SlowdownDetector | None = None) -> list:
    """Looks every 25 steps, each at the newest 40 records: (step of the look, drop)."""
    steps, detector = step_time_traces.as_steps(rows), detector or SlowdownDetector()
    looks = ((at, detector.look(steps[max(0, at - 40) : at])) for at in range(WINDOW, len(rows) + 1, WINDOW))
    return [(at, drop) for at, drop in looks if drop is not None]


def lose(rows: np.ndarray, at: int, factor: float, phase: str) -> np.ndarray:
    """From step `at` on, a step takes `factor` times as long, for this phase."""
    rows[at - 1 :, PHASES.index(phase)] += (factor - 1) * MEAN.sum()
    return rows


# ---- False alarms and misses


def test_there_is_no_false_alarm_on_hundreds_of_traces(trials):
    alarms = [seed for seed in trials(250, 850) if find(step_time_traces.steady(seed))]
    alarms += [f"recorded {seed}" for seed in trials(50, 150) if find(step_time_traces.recorded(seed))]
    assert not alarms


@pytest.mark.slow
def test_there_is_hardly_a_false_alarm_on_long_traces():
    assert sum(bool(find(step_time_traces.steady(10_000 + seed, 4000))) for seed in range(200)) <= 4


@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(1000, 2000), marks=pytest.mark.slow)], ids=["150", "1000"]
)
def test_the_drop_of_the_guide_is_found_within_75_steps(seeds):
    found = []
    for seed in seeds:
        rows, phase = step_time_traces.guide(seed)
        alarms = watched(rows)
        ok = len(alarms) == 1 and 1050 <= alarms[0][0] <= 1125
        found.append((ok, ok and abs(alarms[0][1].step - 1050) <= 5, ok and alarms[0][1].phase == phase))
    in_time, at_its_step, in_its_phase = np.mean(found, axis=0)
    assert in_time >= 0.98 and at_its_step >= 0.95 and in_its_phase >= 0.95


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_found_wherever_between_two_looks_it_becomes_slow(phase):
    for at in range(1026, 1051) if phase == "data" else (1026, 1038, 1050):
        ((look, drop),) = watched(lose(plain(1150, at), at, GUIDE, phase))
        assert look - at < 75 and abs(drop.step - at) <= 1 and drop.phase == phase and drop.share > 0.95
        assert drop.before_ms == pytest.approx(275, rel=0.1) and drop.after_ms == pytest.approx(1506, rel=0.1)


@pytest.mark.parametrize("name", ["toy", "toy_workers", "omniglot"])
def test_a_drop_is_found_in_a_recording_of_a_shared_machine(name):
    rows = step_time_traces.recordings()[name][:700].copy()
    rows[399:, STEP.index("data")] += np.median(rows.sum(1)) * (GUIDE - 1)
    (drop, *more) = find(rows)
    assert not more and drop.phase == "data" and abs(drop.step - 400) <= WINDOW


# ---- What is a burst, and what lasts


@pytest.mark.parametrize(("factor", "steps"), [(8.0, 20), (2.5, 20), (2.0, 300), (1.5, 400)])
def test_a_burst_is_none(factor, steps):
    for seed in range(10):
        rows = plain(1500, seed)
        rows[700 + seed : 700 + seed + steps] *= factor
        assert find(rows) == []


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_what_is_less_than_sharp_must_last_for_500_steps_and_a_minute(factor):
    rows = plain(1500)
    rows[600:] *= factor
    ((look, drop),) = watched(rows)
    assert 450 <= look - 600 <= 550 and abs(drop.step - 601) <= 3
    quick = plain(6000) / 10
    quick[600:] *= factor
    ((look, drop),) = watched(quick)
    assert 60 <= quick[600:look].sum() < 66 and abs(drop.step - 601) <= 3
    assert drop.phase == "compute" and drop.share == pytest.approx(0.8, abs=0.03)


def test_sharp_and_quick_steps_must_last_for_five_seconds():
    rows = plain(1500) / 100
    rows[800 : 800 + 300] *= 5  # 4.1 s
    assert find(rows) == []
    rows[800:] *= 5
    ((look, _),) = watched(rows[:1400])
    assert 5 <= rows[800:look].sum() < 6


@pytest.mark.parametrize("period", [2, 3, 4, 6, 8, 12, 16])
def test_long_waits_of_workers_that_run_in_step_are_found(period):
    for seed in range(3):
        rows = plain(2000, seed)
        rows[20::100, PHASES.index("eval")] += 3
        rows[800::period, 0] += (GUIDE - 1) * MEAN.sum() * period
        ((look, drop),) = watched(rows)
        assert drop.phase == "data" and drop.share > 0.9 and abs(drop.step - 801) <= 150 and look - 800 <= 600


@pytest.mark.parametrize("phase", BETWEEN[:3])
def test_what_comes_between_steps_counts_when_it_comes_every_step(phase):
    rows = plain(1200)
    rows[99::100, PHASES.index(phase)] += 20
    assert find(rows) == []
    rows[900:, PHASES.index(phase)] += 1.2
    ((look, drop),) = watched(rows)
    assert drop.phase == phase and abs(drop.step - 901) <= 1 and look <= 975


def test_what_comes_rarer_than_every_25th_step_is_none():
    rows = plain(3000)
    rows[1500::30, PHASES.index("eval")] += 5
    assert find(rows) == []


def test_slow_drift_within_20_percent_is_none():
    drift = 1 - np.exp(-np.arange(4000) / 800)
    assert find(plain(4000) * (1 + 0.2 * drift)[:, None]) == []


def test_a_full_queue_at_the_start_is_none():
    rows = plain(800)
    rows[:, 0] += 0.8
    rows[:128, 0] = 0.001
    assert find(rows, skip=128) == [] and find(plain(SKIPPED)) == []


# ---- Each change once


def test_a_drop_is_told_once_ends_and_may_come_again():
    rows = plain(3000)
    rows[600:1200, 0] += 1.2
    rows[1800:, PHASES.index("log")] += 1.2
    detector = SlowdownDetector()
    (_, first), (_, second) = watched(rows, detector)
    assert (first.step, first.phase, second.step, second.phase) == (601, "data", 1801, "log")
    assert detector.lasting == [second]
    ((ended, at),) = detector.ended
    assert ended == first and abs(at - 1201) <= WINDOW
    assert second.before_ms == pytest.approx(275, rel=0.1)


def test_a_second_drop_is_related_to_the_first():
    rows = plain(2000)
    rows[600:, 0] += 0.8
    rows[1200:, 0] += 3.0
    detector = SlowdownDetector()
    (_, first), (_, second) = watched(rows, detector)
    assert (first.step, second.step) == (601, 1201) and second.before_ms == pytest.approx(first.after_ms, rel=0.1)
    assert detector.lasting == [first, second]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(0, 50))
def test_it_does_not_matter_in_which_parts_the_records_come(sizes, seed):
    rows = lose(plain(1300, seed), 900, GUIDE, "data")
    rows[400:430] *= 2
    steps, detector, drops, at = step_time_traces.as_steps(rows), SlowdownDetector(), [], 0
    for size in [*sizes, len(rows)]:
        drops += detector.feed(steps[max(0, at - 30) : at + size])
        at = min(at + size, len(rows))
    assert drops == find(rows) and len(drops) == 1


# ---- Phases


@pytest.mark.parametrize("phase", COMPUTE)
def test_computing_is_one_phase_where_all_of_it_slowed_and_else_told_apart(phase):
    alike = plain(1000)
    alike[700:, [PHASES.index(part) for part in COMPUTE]] *= 5
    (drop,) = find(alike)
    assert drop.phase == "compute" and drop.share > 0.99
    (drop,) = find(lose(plain(1000), 701, 5, phase))
    assert drop.phase == phase and drop.share > 0.9


def test_a_share_is_that_of_what_was_lost():
    rows = plain(1000, noise=0.02)
    rows[700:, PHASES.index("data")] += 0.9
    rows[700:, PHASES.index("checkpoint")] += 0.6
    (drop,) = find(rows)
    assert drop.phase == "data" and drop.share == pytest.approx(0.6, abs=0.02)


def test_a_look_costs_little():
    steps, detector = step_time_traces.as_steps(step_time_traces.steady(3, 2500)), SlowdownDetector()
    began = time.process_time()
    for at in range(0, 2500, WINDOW):
        detector.look(steps[at : at + WINDOW])
    assert (time.process_time() - began) / 100 < 400e-6

"""The clock: every moment belongs to one phase, and the speed is counted over the phases of steps alone."""

import time

import numpy as np
import pytest

from trainkit.speed.clock import BETWEEN, COMPUTE, KEPT, PHASES, STEP, Clock, speed


class Hands:
    """A clock that moves when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_partition_the_time_and_evaluations_are_not_in_the_speed():
    hands = Hands()
    clock = Clock(now=hands)
    spent = dict.fromkeys(PHASES, 0.0)
    for step in range(10):
        for phase, seconds in (
            ("data", 0.01),
            ("transfer", 0.02),
            ("forward", 0.03),
            ("backward", 0.03),
            ("optimizer", 0.01),
        ):
            clock.to(phase)
            hands.now += seconds
            spent[phase] += seconds
        clock.step()
        if step % 5 == 4:
            for phase, seconds in (("eval", 3.0), ("log", 0.5), ("checkpoint", 0.5)):
                clock.to(phase)
                hands.now += seconds
                spent[phase] += seconds
    measured = clock.window(samples_per_step=32)
    assert measured["speed/samples_per_s"] == pytest.approx(320) and measured["speed/step_ms_p50"] == pytest.approx(100)
    for phase, seconds in spent.items():
        assert clock.seconds[phase] == pytest.approx(seconds)
    compute = sum(spent.pop(phase) for phase in COMPUTE)
    for phase, seconds in {**spent, "compute": compute}.items():
        assert measured[f"time/{phase}_share"] == pytest.approx(seconds / (hands.now - 100))
    assert sum(value for name, value in measured.items() if name.startswith("time/")) == pytest.approx(1)
    assert clock.total == pytest.approx(hands.now - 100) and clock.window(32) == {}


def test_what_came_before_the_training_is_start_up_and_belongs_to_no_step():
    hands = Hands()
    clock = Clock(now=hands, began=60.0)
    hands.now += 2
    assert clock.elapsed() == 2
    clock.to("forward")
    hands.now += 8
    clock.step()
    assert clock.seconds["setup"] == 42 and clock.training == 8 and clock.elapsed() == 10
    assert clock.whole(8, clock.training)["time/setup_share"] == 42 / 50
    assert clock.recent().phases.sum() == 8


def test_single_times_of_the_last_steps_are_kept_and_what_came_between_them():
    hands = Hands()
    clock = Clock(now=hands)
    for step in range(KEPT + 10):
        for number, phase in enumerate(STEP):
            clock.to(phase)
            hands.now += 0.001 * (number + 1) + 1e-6 * step
        clock.step()
        if step == KEPT + 5:
            clock.to("eval")
            hands.now += 3.0
    kept = clock.recent()
    assert len(kept) == KEPT and kept.number.tolist() == list(range(11, KEPT + 11))
    for number in range(len(STEP)):
        assert kept.phases[:, number] == pytest.approx(0.001 * (number + 1) + 1e-6 * (kept.number - 1))
    assert kept.between[kept.number == KEPT + 7, BETWEEN.index("eval")] == pytest.approx(3.0)
    assert kept.between.sum() == pytest.approx(3.0) and kept.seconds == pytest.approx(kept.phases.sum(1))
    assert clock.recent(3).number.tolist() == list(range(KEPT + 8, KEPT + 11)) and len(kept[-7:]) == 7
    assert len(Clock(now=hands).recent()) == 0


def test_no_step_is_lost_or_kept_twice_however_often_they_are_asked_for():
    hands = Hands()
    clock = Clock(now=hands)
    took = []
    for step in range(2 * KEPT + 500):
        clock.to("forward")
        took.append((step * 7919 % 101) / 1024)
        hands.now += took[-1]
        clock.step()
        if step % 997 == 0 or step in (KEPT, 2 * KEPT, 2 * KEPT + 2):
            for many in (0, 1, 25, 10**9):
                kept = clock.recent(many)
                assert len(kept) == min(many, step + 1, KEPT) and (len(kept) == 0 or kept.number[-1] == step + 1)
                assert kept.phases[:, STEP.index("forward")] == pytest.approx(took[len(took) - len(kept) :])
    before = clock.recent(3).seconds.copy()
    kept = clock.recent(3)
    hands.now += 5.0
    clock.step()
    assert kept.seconds == pytest.approx(before)  # what was handed out does not change


def test_a_clock_costs_little():
    clock = Clock()
    took = []
    for _ in range(20):
        began = time.thread_time()
        for _ in range(500):
            for phase in STEP:
                clock.to(phase)
            clock.step()
        took.append((time.thread_time() - began) / 500)
    assert min(took) < 10e-6  # 2.3 us where no one else is in the way


def test_the_device_is_told_each_phase_and_each_step():
    class Marks:
        def __init__(self):
            self.seen = []

        def mark(self, phase):
            self.seen.append(phase)

        def step(self):
            self.seen.append("|")

    marks = Marks()
    clock = Clock(marks)
    for phase in ("data", "forward", "backward"):
        clock.to(phase)
    clock.step()
    clock.to("log")
    assert marks.seen == ["data", "forward", "backward", "|", "log"]


@pytest.mark.parametrize("many", [1, 2, 3, 50, 101, 4096])
def test_percentiles_are_those_of_numpy(many):
    seconds = np.random.default_rng(many).lognormal(-4, 1, many)
    found = speed(seconds, 8, many, float(seconds.sum()))
    wanted = 1e3 * np.percentile(seconds, [50, 99])
    assert [found["speed/step_ms_p50"], found["speed/step_ms_p99"]] == pytest.approx(wanted.tolist(), rel=1e-12)


def test_what_was_noted_is_added_up_whoever_asks_first():
    """Phases, seconds and steps after each note, against sums made by hand; in any order of questions."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        hands = Hands()
        clock, spent, phase, steps = Clock(now=hands), dict.fromkeys(PHASES, 0.0), "setup", 0
        for _ in range(int(rng.integers(1, 400))):
            passed = float(rng.integers(1, 1000)) / 1024
            hands.now += passed
            spent[phase] += passed
            if rng.random() < 0.3:
                clock.step()
                steps += 1
            else:
                phase = PHASES[rng.integers(len(PHASES))]
                clock.to(phase)
            asked = rng.integers(6)
            if asked == 0:
                assert clock.seconds == spent
            elif asked == 1:
                assert clock.phase == phase
            elif asked == 2:
                assert clock.training == sum(spent[p] for p in STEP) and clock.steps == steps
            elif asked == 3:
                assert clock.total == clock.elapsed() == sum(spent.values())
            elif asked == 4:
                assert len(clock.recent(5)) == min(5, steps)
        kept = clock.recent()
        assert clock.seconds == spent and len(kept) == steps
        clock.to("log")
        clock.step()
        last = clock.recent()
        assert np.concatenate([last.phases, last.between], axis=1).sum() == pytest.approx(sum(spent.values()))

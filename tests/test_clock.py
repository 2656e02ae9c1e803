"""The clock: every moment belongs to one phase, and the speed is counted over the phases of steps alone."""

import pytest

from trainkit.speed.clock import PHASES, Clock


class Hands:
    """A clock that moves when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_partition_the_time_and_evaluations_are_not_in_the_speed():
    hands = Hands()
    clock = Clock(hands)
    spent = dict.fromkeys(PHASES, 0.0)
    for step in range(10):
        for phase, seconds in (("data", 0.01), ("transfer", 0.02), ("compute", 0.07)):
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
        assert measured[f"time/{phase}_share"] == pytest.approx(seconds / (hands.now - 100))
    assert clock.total == pytest.approx(hands.now - 100) and clock.window(32) == {}

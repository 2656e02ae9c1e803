"""What the contest of steadiness makes of the times of steps."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def steadiness():
    sys.path.insert(0, BENCHMARKS)
    try:
        import steadiness

        yield steadiness
    finally:
        for name in ("steadiness", "step", "contest"):
            sys.modules.pop(name, None)
        sys.path.remove(BENCHMARKS)


@pytest.mark.parametrize("drift, found", [(0.0, False), (2.0, True)])
def test_a_slope_is_that_of_the_differences_and_their_interval_that_of_scipy(steadiness, drift, found):
    from scipy.stats import linregress

    rng = np.random.default_rng(0)
    hand = 800 + rng.exponential(40, 20_000) + 300 * np.sin(np.arange(20_000) / 3000)  # a machine that is busy at times
    own = hand + rng.exponential(20, 20_000) + drift * np.arange(20_000) / 10_000
    y = [np.median(own[at : at + 100]) - np.median(hand[at : at + 100]) for at in range(1000, 20_000, 100)]
    line = linregress(np.arange(len(y)), y)
    assert steadiness.slope(own, hand) == pytest.approx(line.slope / (1.96 * line.stderr))
    assert (steadiness.slope(own, hand) > 1) == found


def test_a_spread_is_that_of_the_slowest_hundredth(steadiness):
    assert steadiness.spread(np.r_[np.ones(98), 3.0, 3.0, 3.0]) == 3


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="needs Linux")
def test_waiting_is_what_is_neither_work_nor_standing_in_line(steadiness):
    began = steadiness.waited()
    time.sleep(0.2)
    rested = steadiness.waited()
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    worked = steadiness.waited()
    assert rested - began == pytest.approx(0.2, abs=0.05)
    assert worked - rested < 0.05

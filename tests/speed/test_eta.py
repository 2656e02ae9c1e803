"""Forecasts: sums that can be done by hand, and intervals that hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.speed.eta import Forecast, mean_step


def test_a_forecast_is_the_sum_of_what_is_still_to_come():
    f = Forecast(steps=1000, step_s=0.1, step_error=0.01, evaluations={"val": (5, 3.0)}, checkpoints=(4, 0.5))
    assert f.total() == pytest.approx(100 + 15 + 2) and f.interval == pytest.approx((90 + 17, 110 + 17))
    assert "1 min 57 s left (1 min 47 s to 2 min 7 s if later steps take as long)" in f.describe()
    assert f.describe().endswith("1,000 steps of 100 ms, val 5 x 3 s, 4 checkpoints of 500 ms")


def test_an_evaluation_with_a_budget_takes_its_share_of_the_whole_and_no_more():
    f = Forecast(steps=900, step_s=0.1, step_error=0.0, evaluations={"val": (50, 3.0)}, budgets={"val": 0.1})
    assert f.total() == pytest.approx(100) and (f.total() - 90) / f.total() == pytest.approx(0.1)
    cheap = Forecast(steps=900, step_s=0.1, step_error=0.0, evaluations={"val": (2, 1.0)}, budgets={"val": 0.1})
    assert cheap.total() == pytest.approx(92)


@pytest.mark.parametrize("correlated", [False, True])
def test_the_interval_holds_the_true_mean_as_often_as_it_says(correlated):
    rng, held = np.random.default_rng(0), 0
    for _ in range(1000):
        noise = rng.normal(0, 0.1, 400)
        if correlated:  # a neighbour that comes and goes
            noise = np.convolve(noise, np.ones(8) / 8**0.5, "same")
        mean, error = mean_step(1 + noise)
        held += abs(mean - 1) <= error
    assert 0.92 <= held / 1000 <= 0.98


def test_of_a_few_steps_nothing_is_promised():
    mean, error = mean_step(np.array([0.1, 0.2]))
    assert mean == pytest.approx(0.15) and error == mean
    assert np.isnan(mean_step(np.array([]))[0])

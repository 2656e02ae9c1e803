"""Our own arithmetic against libraries: equal values where one stands for the other, and where both are kept."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage, stats
from sklearn import metrics as sk

from trainkit.metrics import significance, surface_distance
from trainkit.metrics.classification import chance_level, confusion, per_class
from trainkit.metrics.verification import operating_points


def drawn(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_guessing_is_the_quantile_of_the_binomial_as_a_sum(seed):
    draw = drawn(seed)
    for _ in range(200):
        trials = int(draw.integers(1, 3000))
        p = float(draw.choice([draw.uniform(1e-4, 0.999), 1 / draw.integers(2, 2000), 0.5]))
        hits = np.arange(1, trials + 1)
        ways = np.concatenate([[0.0], np.cumsum(np.log((trials + 1 - hits) / hits))])
        chance = ways + np.arange(trials + 1) * np.log(p) + np.arange(trials, -1, -1) * np.log1p(-p)
        enough = int(np.searchsorted(np.cumsum(np.exp(chance)), 0.999))
        assert chance_level("top1", trials, p) == ({"top1": enough / trials} if enough < trials else {})
    assert chance_level("top1", 0, 0.5) == chance_level("top1", 9, 1.0) == {}


@pytest.mark.parametrize("seed", range(3))
def test_confusion_and_its_scores_equal_scikit_learn(seed):
    draw = drawn(seed)
    truth, found = draw.integers(0, 7, (2, 500))
    counts = confusion(truth, found, 8)
    assert np.array_equal(counts, sk.confusion_matrix(truth, found, labels=np.arange(8)))
    expected = sk.precision_recall_fscore_support(truth, found, labels=np.arange(8), zero_division=np.nan)
    table = per_class(counts)
    for name, column in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose(table[name], column, rtol=1e-15)


def test_operating_points_are_the_roc_of_scikit_learn():
    genuine, impostor = drawn(0).normal(1, 1, 300).round(2), drawn(1).normal(0, 1, 4000).round(2)
    points = operating_points(genuine, impostor)
    truth, score = np.repeat([1, 0], [300, 4000]), np.concatenate([genuine, impostor])
    far, tar, threshold = sk.roc_curve(truth, score, drop_intermediate=False)
    for own, expected in ((points.far, far), (points.tar, tar), (points.threshold, threshold)):
        assert np.array_equal(own, expected)
    assert points.auc == pytest.approx(sk.roc_auc_score(truth, score), abs=1e-15)


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_of_two_means_is_scipys_of_welch(seed):
    draw = drawn(seed)
    one, other = draw.normal(0, 1, 2 + seed % 5), draw.normal(0.3, 2, 3 + seed % 3)
    found = significance.welch(one.tolist(), other.tolist())
    expected = stats.ttest_ind(other, one, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-14)


@pytest.mark.parametrize("shape", [(9, 1, 7), (20, 20, 20), (5, 40, 40)])
def test_a_surface_is_what_erosion_takes_away(shape):
    mask = ndimage.gaussian_filter(drawn(2).random(shape), 1.5) > 0.5
    assert np.array_equal(surface_distance.surface(mask), mask & ~ndimage.binary_erosion(mask))

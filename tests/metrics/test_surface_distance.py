"""Scores of a case against distances between all pairs of voxels, shapes whose scores are known, and MONAI (slow)."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.metrics import surface_distance
from trainkit.metrics.surface_distance import SCORES, case_scores, surface

spacings = st.tuples(*[st.sampled_from([0.3125, 0.7, 1.0, 3.85])] * 3)


def labels(seed: int, shape: tuple[int, ...], classes: int = 3, grain: int = 2) -> np.ndarray:
    """Random blocks of classes, so that some voxels are inside."""
    draw = np.random.default_rng(seed)
    coarse = draw.choice(classes, size=[-(-n // grain) for n in shape], p=[0.6, *[0.4 / (classes - 1)] * (classes - 1)])
    for axis, n in enumerate(shape):
        coarse = coarse.repeat(grain, axis).take(range(n), axis)
    return coarse.astype(np.uint8)


def edge_by_hand(mask: np.ndarray) -> list[tuple[int, ...]]:
    """Voxels with a neighbour outside, one by one."""
    found = []
    for at in np.argwhere(mask):
        for axis, step in itertools.product(range(mask.ndim), (-1, 1)):
            other = at.copy()
            other[axis] += step
            if not 0 <= other[axis] < mask.shape[axis] or not mask[tuple(other)]:
                found.append(tuple(at))
                break
    return found


def by_hand(prediction, truth, spacing, tolerance) -> dict[str, float]:
    """The scores of one organ that is in both, from the distances of all pairs."""
    a, b = (np.array(edge_by_hand(mask)) * spacing for mask in (prediction, truth))
    gap = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))
    there, back = np.sort(gap.min(1)), np.sort(gap.min(0))

    def percentile(x: np.ndarray) -> float:
        place = 0.95 * (len(x) - 1)
        low = math.floor(place)
        return x[low] + (place - low) * (x[min(low + 1, len(x) - 1)] - x[low])

    p, t = set(map(tuple, np.argwhere(prediction))), set(map(tuple, np.argwhere(truth)))
    near = sum(d <= tolerance + 1e-6 for d in [*there, *back])
    return {
        "dice": 2 * len(p & t) / (len(p) + len(t)),
        "iou": len(p & t) / len(p | t),
        "hd95": max(percentile(there), percentile(back)),
        "asd": (there.sum() + back.sum()) / (len(there) + len(back)),
        "nsd": near / (len(there) + len(back)),
        "volume_truth": len(t) * math.prod(spacing),
        "volume_prediction": len(p) * math.prod(spacing),
        "volume_error": (len(p) - len(t)) * math.prod(spacing),
    }


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(*[st.integers(1, 7)] * 3),
    spacing=spacings,
    tolerance=st.sampled_from([0.0, 0.7, 2.0]),
    grain=st.sampled_from([1, 2, 3]),
    query=st.sampled_from([0, 24, 10**9]),
)
def test_scores_are_those_of_all_pairs_of_voxels(seed, shape, spacing, tolerance, grain, query):
    truth, prediction = labels(seed, shape, grain=grain), labels(seed + 1, shape, grain=grain)
    draw = np.random.default_rng(seed)
    prediction = np.where(draw.random(shape) < 0.7, truth, prediction)
    usual, surface_distance._QUERY = surface_distance._QUERY, query  # a tree, either, or a distance transform
    try:
        found = case_scores(prediction, truth, spacing, 3, [tolerance, tolerance])
    finally:
        surface_distance._QUERY = usual
    assert tuple(sorted(found)) == tuple(sorted(SCORES))
    for organ in (1, 2):
        p, t = prediction == organ, truth == organ
        got = {name: values[organ - 1] for name, values in found.items()}
        if p.any() and t.any():
            assert got == pytest.approx(by_hand(p, t, spacing, tolerance), rel=1e-9, abs=1e-9)
        else:
            assert got["dice"] != got["dice"] or got["dice"] == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_the_surface_is_what_has_a_neighbour_outside(seed, shape):
    mask = np.random.default_rng(seed).random(shape) < 0.8
    before = mask.copy()
    assert set(map(tuple, np.argwhere(surface(mask)))) == set(edge_by_hand(mask))
    assert (mask == before).all()


def test_the_surface_is_scipys_erosion():
    from scipy.ndimage import binary_erosion

    mask = np.random.default_rng(0).random((12, 13, 14)) < 0.9
    assert (surface(mask) == mask & ~binary_erosion(mask)).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_box_that_is_moved_is_off_by_the_move_in_millimetres(axis):
    spacing, shape = (3.85, 0.5, 0.25), (12, 20, 24)
    truth = np.zeros(shape, np.uint8)
    truth[3:8, 5:12, 6:14] = 1
    moved = np.roll(truth, 2, axis)
    found = {k: v[0] for k, v in case_scores(moved, truth, spacing, 2, [0.0]).items()}
    step, side = 2 * spacing[axis], truth.any(tuple({0, 1, 2} - {axis})).sum()
    assert found["dice"] == pytest.approx((side - 2) / side) and found["iou"] == pytest.approx((side - 2) / (side + 2))
    assert found["hd95"] == pytest.approx(step)
    assert found["volume_error"] == 0 and found["volume_truth"] == pytest.approx(5 * 7 * 8 * math.prod(spacing))
    near = case_scores(moved, truth, spacing, 2, [step])["nsd"][0]
    assert near == 1 and found["nsd"] < 1


def test_a_ball_in_a_ball_is_off_by_the_difference_of_their_radii():
    spacing = np.array((1.0, 0.5, 0.5))
    at = np.stack(np.meshgrid(*(np.arange(n) - n // 2 for n in (41, 81, 81)), indexing="ij"), -1) * spacing
    radius = np.sqrt((at**2).sum(-1))
    found = case_scores((radius < 15).astype(np.uint8), (radius < 18).astype(np.uint8), spacing, 2, [4.0])
    assert found["asd"][0] == pytest.approx(3, abs=0.35) and found["hd95"][0] == pytest.approx(3, abs=0.7)
    assert found["nsd"][0] == 1 and found["volume_prediction"][0] == pytest.approx(4 / 3 * math.pi * 15**3, rel=0.02)
    assert found["dice"][0] == pytest.approx(2 * 15**3 / (15**3 + 18**3), rel=0.02)


def test_organs_that_are_empty_are_scored_as_stated():
    shape, spacing = (4, 5, 6), (2.0, 1.0, 0.5)
    truth, prediction = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    truth[1, 2, 3] = 2  # missed
    prediction[0, 0, :3] = 3  # invented
    truth[3, 4, 5] = prediction[3, 4, 5] = 4
    found = case_scores(prediction, truth, spacing, 5, [1.0] * 4)
    diagonal = math.sqrt(8**2 + 5**2 + 3**2)
    nan = float("nan")
    expected = {
        "dice": [nan, 0, 0, 1],
        "iou": [nan, 0, 0, 1],
        "hd95": [nan, diagonal, diagonal, 0],
        "asd": [nan, diagonal, diagonal, 0],
        "nsd": [nan, 0, 0, 1],
        "volume_truth": [0, 1, 0, 1],
        "volume_prediction": [0, 0, 3, 1],
        "volume_error": [nan, -1, 3, 0],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, err_msg=name)


def test_a_prediction_of_its_truth_is_perfect():
    truth = labels(0, (6, 7, 8), classes=4)
    found = case_scores(truth, truth, (1, 2, 3), 4, [0.0] * 3)
    for name, best in {"dice": 1, "iou": 1, "hd95": 0, "asd": 0, "nsd": 1, "volume_error": 0}.items():
        assert (found[name] == best).all(), name


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.permutations(range(3)), flip=st.integers(0, 2), pad=st.integers(0, 3))
def test_scores_do_not_depend_on_where_and_how_the_case_lies(seed, order, flip, pad):
    shape, spacing = (4, 6, 5), np.array((3.0, 0.5, 1.0))
    truth, prediction = labels(seed, shape), labels(seed + 1, shape)
    found = case_scores(prediction, truth, spacing, 3, [1.0, 1.0])
    turned = [np.pad(np.flip(x, flip).transpose(order), pad) for x in (prediction, truth)]
    again = case_scores(*turned, spacing[list(order)], 3, [1.0, 1.0])
    for name in SCORES:
        both = (found["volume_truth"] > 0) & (found["volume_prediction"] > 0)
        np.testing.assert_allclose(again[name][both], found[name][both], err_msg=name)


def test_prediction_and_truth_may_be_exchanged():
    truth, prediction = labels(1, (5, 6, 7)), labels(2, (5, 6, 7))
    one = case_scores(prediction, truth, (1, 2, 0.5), 3, [0.5, 0.5])
    other = case_scores(truth, prediction, (1, 2, 0.5), 3, [0.5, 0.5])
    for name in ("dice", "iou", "hd95", "asd", "nsd"):
        np.testing.assert_allclose(one[name], other[name])
    np.testing.assert_allclose(one["volume_error"], -other["volume_error"])


def test_a_tolerance_is_kept_whatever_floats_make_of_it():
    assert 3 * 0.1 > 0.3
    truth, prediction = np.zeros((2, 10), np.uint8), np.zeros((2, 10), np.uint8)
    truth[:, 2] = 1
    prediction[:, 5] = 1
    assert case_scores(prediction, truth, (1, 0.1), 2, [0.3])["nsd"][0] == 1
    assert case_scores(prediction, truth, (1, 0.1), 2, [0.299])["nsd"][0] == 0


def test_each_organ_has_its_own_tolerance():
    truth, prediction = np.zeros((2, 1, 12), np.uint8), np.zeros((2, 1, 12), np.uint8)
    truth[0, 0, 2], prediction[0, 0, 5] = 1, 1
    truth[1, 0, 2], prediction[1, 0, 5] = 2, 2
    assert case_scores(prediction, truth, (9, 1, 1), 3, [2.0, 3.0])["nsd"].tolist() == [0, 1]


def test_what_cannot_be_scored_is_refused():
    truth = labels(3, (4, 4, 4))
    good = (truth, truth, (1, 1, 1), 3, [1.0, 1.0])
    for place, bad in [(0, truth[1:]), (2, (1, 1)), (2, (1, 0, 1)), (3, 4), (4, [1.0, -1.0]), (4, [1.0, math.nan])]:
        with pytest.raises(ValueError):
            case_scores(*good[:place], bad, *good[place + 1 :])
    with pytest.raises(ValueError, match="truth: classes"):
        case_scores(truth % 2, truth + 1, (1, 1, 1), 2, [1.0])


def orbit(seed: int = 0) -> np.ndarray:
    """Nine organs of about TOM500's sizes in 20 slices of 512 x 512, uint8."""
    draw = np.random.default_rng(seed)
    at = np.stack(np.meshgrid(*(np.arange(n, dtype=np.float32) for n in (20, 512, 512)), indexing="ij"), -1)
    at *= (3.85, 0.3125, 0.3125)
    truth = np.zeros(at.shape[:3], np.uint8)
    for side in (45.0, 115.0):
        for organ, radius in enumerate((17, 4, 4, 4, 4, 4, 6, 3, 12), start=1):
            middle = np.array((38, 80, side)) + (draw.normal(size=3) * 8 if organ > 1 else 0)
            truth[((at - middle) ** 2).sum(-1) < radius**2] = organ
    return truth


# Speed, and MONAI


@pytest.mark.slow
def test_a_case_of_tom500s_size_takes_less_than_three_seconds():
    truth = orbit()
    prediction = np.roll(truth, 3, 1)
    prediction[0, :40, :40] = 9  # far away: the box around the organ is the volume
    start = time.process_time()
    found = case_scores(prediction, truth, (3.85, 0.3125, 0.3125), 10, [1.0] * 9)
    assert time.process_time() - start < 3
    assert (found["dice"] > 0.3).all()


@pytest.mark.parametrize("seed", range(2))
def test_scores_are_monais(seed):
    import torch
    from monai.metrics import (
        compute_average_surface_distance,
        compute_dice,
        compute_hausdorff_distance,
        compute_iou,
        compute_surface_dice,
    )

    draw = np.random.default_rng(seed)
    shape, spacing, tolerance = (9, 24, 20), tuple(draw.uniform(0.3, 4, 3)), [0.5, 1.0, 2.5]
    truth = labels(seed, shape, classes=4, grain=4)
    prediction = np.where(draw.random(shape) < 0.9, np.roll(truth, 1, 1), labels(seed + 9, shape, classes=4))
    one_hot = [torch.from_numpy(np.stack([x == c for c in range(4)]))[None].float() for x in (prediction, truth)]
    found = case_scores(prediction, truth, spacing, 4, tolerance)
    theirs = {
        "dice": compute_dice(*one_hot, include_background=False),
        "iou": compute_iou(*one_hot, include_background=False),
        "hd95": compute_hausdorff_distance(*one_hot, percentile=95, spacing=spacing),
        "asd": compute_average_surface_distance(*one_hot, symmetric=True, spacing=spacing),
        "nsd": compute_surface_dice(*one_hot, class_thresholds=tolerance, spacing=spacing),
    }
    for name, expected in theirs.items():
        np.testing.assert_allclose(found[name], expected[0].numpy(), rtol=2e-5, atol=1e-5, err_msg=name)

"""The boundary F-score against SciPy's distance transform and against images whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from trainkit.interfaces import IGNORED
from trainkit.metrics.boundary_f_score import COUNTS, boundary_counts, outline, spans, tolerance


def outline_by_hand(labels: np.ndarray) -> np.ndarray:
    height, width = labels.shape
    edge = np.full(labels.shape, IGNORED)
    for y in range(height):
        for x in range(width):
            beside = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
            others = {int(labels[v, u]) for v, u in beside if 0 <= v < height and 0 <= u < width} - {IGNORED}
            if labels[y, x] != IGNORED and others - {int(labels[y, x])}:
                edge[y, x] = labels[y, x]
    return edge


def by_hand(predicted: np.ndarray, mask: np.ndarray, classes: int, within: float) -> np.ndarray:
    """(4, C) in the order of COUNTS, from exact distance transforms of each class."""
    found = outline_by_hand(np.where(mask == IGNORED, IGNORED, predicted))
    true = outline_by_hand(mask)
    counts = np.zeros((4, classes), dtype=np.int64)
    for k in range(classes):
        near = []
        for own, other in ((found == k, true == k), (true == k, found == k)):
            # Without any boundary SciPy would measure to a place outside the image.
            near.append(own & (ndimage.distance_transform_edt(~other) <= within) if other.any() else own & False)
        counts[:, k] = near[0].sum(), (found == k).sum(), near[1].sum(), (true == k).sum()
    return counts


def blobs(draw: np.random.Generator, height: int, width: int, classes: int, smooth: float) -> np.ndarray:
    fields = [ndimage.gaussian_filter(draw.standard_normal((height, width)), smooth) for _ in range(classes)]
    return np.argmax(fields, axis=0).astype(np.uint8)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    height=st.integers(1, 24),
    width=st.integers(1, 24),
    classes=st.integers(2, 6),
    within=st.sampled_from([0.0, 0.5, 1.0, 1.42, 2.0, 3.7, 30.0]),
    unlabelled=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_counts_are_those_of_exact_distances(seed, height, width, classes, within, unlabelled):
    draw = np.random.default_rng(seed)
    mask, predicted = (
        np.stack([blobs(draw, height, width, classes, smooth) for smooth in (0.3, 1.5)]) for _ in range(2)
    )
    mask[draw.random(mask.shape) < unlabelled] = IGNORED
    got = boundary_counts(torch.tensor(predicted.astype(np.int64)), torch.tensor(mask), classes, within)
    assert tuple(got) == COUNTS
    for b in range(2):
        found = np.stack([got[name][b].numpy() for name in COUNTS])
        np.testing.assert_array_equal(found, by_hand(predicted[b], mask[b], classes, within))


def halves(at: int, size: int = 12) -> torch.Tensor:
    return (torch.arange(size) >= at).long().expand(1, size, size).contiguous()


@pytest.mark.parametrize(("shift", "within", "met"), [(0, 0, 12), (2, 1.9, 0), (2, 2, 12), (3, 2.5, 0), (3, 3, 12)])
def test_a_straight_border_is_met_within_the_tolerance_and_not_beyond(shift, within, met):
    rows = boundary_counts(halves(5 + shift), halves(5).byte(), 2, within)
    assert rows["edge_actual"].tolist() == rows["edge_predicted"].tolist() == [[12, 12]]
    assert rows["edge_found"].tolist() == rows["edge_met"].tolist() == [[met, met]]


def test_the_right_place_with_the_wrong_class_is_not_met():
    mask = halves(5)
    rows = boundary_counts(torch.where(mask == 1, 2, 0), mask.byte(), 3, 3.0)
    assert rows["edge_found"].tolist() == [[12, 0, 0]] and rows["edge_met"].tolist() == [[12, 0, 0]]
    assert rows["edge_predicted"].tolist() == [[12, 0, 12]] and rows["edge_actual"].tolist() == [[12, 12, 0]]


def test_neither_the_frame_nor_unlabelled_regions_are_boundaries():
    mask = torch.zeros(1, 8, 10, dtype=torch.uint8)
    mask[:, :, 4:6] = IGNORED
    mask[:, :, 6:] = 1
    assert (outline(mask) == IGNORED).all()
    # Whatever is predicted where nothing is labelled, and along its border, is not looked at.
    predicted = torch.where(mask == IGNORED, 2, mask).long()
    assert not any(counts.any() for counts in boundary_counts(predicted, mask, 3, 2.0).values())
    predicted[:, :, 4] = 1
    assert not any(counts.any() for counts in boundary_counts(predicted, mask, 3, 2.0).values())


def test_a_picture_does_not_look_into_the_next():
    first, second = halves(1, 6), torch.zeros(1, 6, 6, dtype=torch.long)
    predicted, mask = torch.cat([first, second]), torch.cat([second, first]).byte()
    rows = boundary_counts(predicted, mask, 2, 50.0)
    assert rows["edge_predicted"].tolist() == [[6, 6], [0, 0]] and rows["edge_actual"].tolist() == [[0, 0], [6, 6]]
    assert not rows["edge_found"].any() and not rows["edge_met"].any()


@pytest.mark.parametrize("within", [0.0, 0.99, 1.0, 1.5, 2.0, math.sqrt(5), 4.5, 17.17])
def test_the_rows_of_a_disc_are_its_pixels(within):
    found = {(down, x) for down, half in spans(within) for x in range(-half, half + 1)}
    around = range(-20, 21)
    assert found == {(y, x) for y in around for x in around if y * y + x * x <= within * within}
    assert spans(within)[0] == (0, int(within))


def test_the_tolerance_is_a_share_of_the_diagonal():
    assert tolerance(360, 480) == pytest.approx(4.5) and tolerance(30, 40, 0.1) == pytest.approx(5)

"""Windows over whole volumes: they cover them, and are averaged as by a loop over voxels, and as by MONAI."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.models.sliding_window import LEAST_WEIGHT, sliding_probabilities, window_starts, window_weights

torch.manual_seed(0)
MIX = torch.nn.Conv3d(1, 3, 3, padding=1).requires_grad_(False)
"""A network that sees its neighbours, so that the border of a window matters."""


def pointwise(image):
    """Class scores of each voxel from its value alone."""
    return torch.cat([image, image.square() - 1, -2 * image], 1)


def volume(*shape, seed=0):
    return torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 200), st.integers(1, 64), st.floats(0, 0.95))
@settings(deadline=None)
def test_windows_cover_an_axis_and_overlap_as_asked(length, window, overlap):
    found = window_starts(length, window, overlap)
    assert found[0] == 0 and found == sorted(set(found))
    assert found[-1] == max(0, length - window)
    gaps = np.diff(found)
    assert (gaps >= 1).all() and (gaps <= max(1, int(window * (1 - overlap)))).all()
    # No window more than needed: without the last one but one, some voxel would be further apart than asked.
    assert len(found) == 1 or found[-2] + max(1, int(window * (1 - overlap))) >= length - window


def test_a_gaussian_window_has_a_deviation_of_an_eighth_of_its_sides():
    weight = window_weights((8, 16, 9), "gaussian").numpy()
    for i, j, k in itertools.product(range(8), range(16), range(9)):
        z, y, x = (i - 3.5) / 1, (j - 7.5) / 2, (k - 4) / 1.125
        assert weight[i, j, k] == pytest.approx(max(LEAST_WEIGHT, np.exp(-(z * z + y * y + x * x) / 2)), rel=1e-5)
    assert (window_weights((2, 3, 4), "constant") == 1).all()


@pytest.mark.parametrize("kind", ["gaussian", "constant"])
@pytest.mark.parametrize(
    ("shape", "window", "overlap"),
    [
        ((13, 21, 17), (8, 8, 8), 0.5),
        ((5, 30, 9), (5, 16, 12), 0.25),
        ((3, 3, 3), (8, 4, 6), 0.5),
        ((9, 9, 9), (4, 4, 4), 0.0),
    ],
)
def test_a_network_that_sees_single_voxels_is_unchanged_by_windows(kind, shape, window, overlap):
    image = volume(*shape)
    seen = sliding_probabilities(pointwise, image, window, overlap=overlap, weight=kind, batch_size=3)
    assert seen.shape == (3, *shape) and seen.dtype == torch.float32
    torch.testing.assert_close(seen, pointwise(image)[0].softmax(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mirrors", [(True, False, False), (False, True, True), (True, True, True)])
def test_mirrors_average_over_all_combinations_of_their_axes(mirrors):
    image = volume(6, 8, 10)
    seen = sliding_probabilities(MIX, image, (6, 8, 10), mirrors=mirrors)
    axes = [2 + axis for axis in range(3) if mirrors[axis]]
    parts = []
    for n in range(len(axes) + 1):
        for flip in itertools.combinations(axes, n):
            out = torch.from_numpy(np.flip(image.numpy(), flip).copy()) if flip else image
            out = MIX(out).softmax(1).numpy()
            parts.append(np.flip(out, flip) if flip else out)
    assert len(parts) == 2 ** sum(mirrors)
    np.testing.assert_allclose(seen.numpy(), np.mean(parts, 0)[0], rtol=1e-5, atol=1e-6)


def test_where_a_network_sees_neighbours_windows_are_weighed_as_a_loop_over_voxels_weighs_them():
    image, window = volume(7, 6, 5), (4, 4, 5)
    seen = sliding_probabilities(MIX, image, window, overlap=0.5, batch_size=2).numpy()
    weight = window_weights(window, "gaussian").numpy()
    total, counted = np.zeros((3, 7, 6, 5)), np.zeros((7, 6, 5))
    for a, b in itertools.product((0, 2, 3), (0, 2)):
        part = MIX(image[:, :, a : a + 4, b : b + 4]).softmax(1)[0].numpy()
        for i, j, k in itertools.product(range(4), range(4), range(5)):
            total[:, a + i, b + j, k] += weight[i, j, k] * part[:, i, j, k]
            counted[a + i, b + j, k] += weight[i, j, k]
    np.testing.assert_allclose(seen, total / counted, rtol=1e-5, atol=1e-6)


def test_windows_at_once_change_speed_and_not_the_result():
    sizes, image = [], volume(11, 9, 10)

    def forward(x):
        sizes.append(len(x))
        return MIX(x)

    results = [sliding_probabilities(forward, image, (4, 4, 4), batch_size=size) for size in (1, 5, 1000)]
    assert max(sizes) == len(window_starts(11, 4, 0.5)) * len(window_starts(9, 4, 0.5)) * len(window_starts(10, 4, 0.5))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-6)


def test_a_volume_smaller_than_a_window_is_padded_on_both_sides_with_its_lowest_value():
    def forward(x):
        assert x.shape == (1, 1, 7, 6, 8)
        inside = x[:, :, 1:5, :, 1:6].clone()
        assert torch.equal(inside, image[..., :6, :])
        x = x.clone()
        x[:, :, 1:5, :, 1:6] = image.min()
        assert (x == image.min()).all()
        return pointwise(x)

    image = volume(4, 6, 5)
    sliding_probabilities(forward, image, (7, 6, 8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "constant"])
@pytest.mark.parametrize(
    ("shape", "window", "overlap"),
    [((13, 21, 17), (8, 8, 8), 0.5), ((20, 40, 41), (16, 32, 32), 0.25), ((5, 30, 9), (8, 16, 12), 0.6)],
)
def test_the_result_is_monais(kind, shape, window, overlap):
    from monai.inferers import sliding_window_inference

    image = volume(*shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = sliding_window_inference(
            image,
            window,
            4,
            lambda x: MIX(x).softmax(1),
            overlap=overlap,
            mode=kind,
            sigma_scale=0.125,
            padding_mode="constant",
            cval=float(image.min()),
        )
    ours = sliding_probabilities(MIX, image, window, overlap=overlap, weight=kind)
    torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-5)

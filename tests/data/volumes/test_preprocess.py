"""Orientation, resampling and normalisation of volumes against torch, scipy and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from organ_volumes import affine, put, read_volume, volume
from scipy import ndimage
from torch.nn import functional

from trainkit.data.volumes import preprocess
from trainkit.data.volumes.preprocess import Preparation
from trainkit.errors import UserError

CUBIC, LINEAR = ("cubic",) * 3, ("linear",) * 3


def test_an_image_is_turned_clipped_and_normalised_by_its_own_numbers(tmp_path):
    image, _ = volume(3, shape=(20, 18, 9))
    image[0, 0, 0], image[1, 1, 1] = 1e6, -1e6
    array, header = read_volume(put(tmp_path / "a.nii.gz", image))
    ready = preprocess.prepare(array, header, Preparation("zyx"))
    low, high = np.percentile(image.astype(np.float64), [0.5, 99.5])
    clipped = np.clip(image.astype(np.float64), low, high)
    expected = ((clipped - clipped.mean()) / clipped.std()).transpose(2, 1, 0)
    assert ready.image.dtype == np.float16 and ready.image.shape == (1, 9, 18, 20)
    assert ready.shape == ready.original_shape == (9, 18, 20)
    np.testing.assert_allclose(ready.image[0].astype(np.float64), expected, atol=2e-3)
    assert ready.spacing == ready.original_spacing == pytest.approx((4.0, 1.5, 1.0))
    assert ready.facts[0] == pytest.approx(
        {
            "lowest": -1e6,
            "highest": 1e6,
            "clip_low": low,
            "clip_high": high,
            "mean": clipped.mean(),
            "std": clipped.std(),
        },
        rel=1e-5,
    )
    assert ready.floors == (ready.image.min(),) and ready.image.min() < -1
    assert abs(float(ready.image.astype(np.float64).mean())) < 1e-3
    assert float(ready.image.astype(np.float64).std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("axes", preprocess.AXES)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("flip", [(False, False, False), (True, False, True), (True, True, True)])
def test_the_same_body_gives_the_same_bits_however_its_file_is_stored(tmp_path, axes, order, flip):
    image, labels = volume(1)
    plain = read_volume(put(tmp_path / "plain.nii.gz", image))
    # The same voxels in the same places of the world, in another order in the file.
    turned, places = image.transpose(order), labels.transpose(order)
    matrix = affine(tuple(np.array((1.0, 1.5, 4.0))[list(order)]), order)
    for axis in range(3):
        if flip[axis]:
            turned, places = np.flip(turned, axis), np.flip(places, axis)
            matrix[:3, 3] += matrix[:3, axis] * (turned.shape[axis] - 1)
            matrix[:3, axis] *= -1
    other = read_volume(put(tmp_path / "turned.nii.gz", np.ascontiguousarray(turned), matrix))
    for spacing in (None, (2.0, 1.1, 1.4)):
        how = Preparation(axes, spacing)
        a, b = preprocess.prepare(*plain, how), preprocess.prepare(*other, how)
        assert a.image.tobytes() == b.image.tobytes() and a.spacing == pytest.approx(b.spacing)
        label_a = preprocess.prepare_labels(labels, a)
        label_b = preprocess.prepare_labels(np.ascontiguousarray(places), b)
        assert (label_a == label_b).all() and label_a.shape == a.shape == a.image.shape[1:]
    assert (a.orientation.undo(a.orientation.apply(labels)) == labels).all()
    assert (b.orientation.undo(a.orientation.apply(labels)) == places).all()


def test_a_volume_without_contrast_becomes_zeros():
    image, facts = preprocess.normalise(np.full((3, 4, 5), 7, np.float32))
    assert not image.any() and facts == {"clip_low": 7, "clip_high": 7, "mean": 7, "std": 0}
    spike = np.zeros((10, 20, 30), np.float32)
    spike[5, 5, 5] = 1e30
    image, facts = preprocess.normalise(spike)
    assert not image.any() and facts["std"] == 0


# Not of width 1, where torch 2.11 does not resample the height at all.
@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.integers(2, 24)] * 4), st.integers(0, 9))
def test_cubic_resampling_is_that_of_torch_with_antialiasing(sizes, seed):
    height, width, new_height, new_width = sizes
    array = np.random.default_rng(seed).normal(size=(2, height, width)).astype(np.float32)
    own = preprocess.resample(array, (2, new_height, new_width), CUBIC)
    other = functional.interpolate(
        torch.from_numpy(array)[None], size=(new_height, new_width), mode="bicubic", antialias=True
    )[0].numpy()
    np.testing.assert_allclose(own, other, atol=2e-4)


def test_thick_slices_are_taken_whole_and_others_are_blended():
    kernels, deep, wide = preprocess.kernels, (20, 99, 99), (99, 99, 20)
    assert kernels(deep, (3.85, 0.3, 0.3), (30, 90, 90), "cubic") == ("nearest", "cubic", "cubic")
    assert kernels(wide, (0.3, 0.3, 3.85), (90, 90, 30), "linear") == ("linear", "linear", "nearest")
    assert kernels(deep, (3.0, 1.0, 1.0), (60, 99, 99), "cubic") == CUBIC
    # What becomes thick counts too: 1 mm to 4 mm slices.
    assert kernels((40, 20, 20), (1.0, 1.0, 1.0), (10, 20, 20), "cubic") == ("nearest", "cubic", "cubic")
    array = np.random.default_rng(0).normal(size=(4, 5, 5)).astype(np.float32)
    grown = preprocess.resample(array, (10, 5, 5), ("nearest", "cubic", "cubic"))
    assert (grown == array[[0, 0, 1, 1, 1, 2, 2, 3, 3, 3]]).all()


def _shares(labels, shape, along):
    return np.stack([preprocess.resample(labels == c, shape, along) for c in range(labels.max() + 1)])


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.integers(1, 14)] * 3), st.integers(0, 99), st.booleans())
def test_labels_take_the_class_with_the_largest_share(shape, seed, thick):
    rng = np.random.default_rng(seed)
    labels = ndimage.zoom(rng.integers(0, 5, (3, 4, 4)).astype(np.uint8), (3, 3, 3), order=0)
    along = ("nearest", "linear", "linear") if thick else LINEAR
    own = preprocess.resample_labels(labels, shape, along)
    shares = _shares(labels, shape, along)
    taken = np.take_along_axis(shares, own[None].astype(np.int64), 0)[0]
    assert own.shape == shape and own.dtype == np.uint8
    np.testing.assert_allclose(taken, shares.max(0), atol=3e-5)


def test_halving_and_doubling_keep_the_volume_of_an_organ():
    z, y, x = np.meshgrid(*[np.arange(40)] * 3, indexing="ij")
    ball = (((z - 19) ** 2 + (y - 20) ** 2 + (x - 21.3) ** 2) < 12**2).astype(np.uint8) * 3
    for shape in ((20, 20, 20), (13, 40, 27), (80, 80, 80), (61, 44, 40)):
        other = preprocess.resample_labels(ball, shape, LINEAR)
        assert set(np.unique(other)) == {0, 3}
        assert (other > 0).mean() == pytest.approx((ball > 0).mean(), rel=0.03)
    # A slab of two voxels whose borders fall on the middles of new ones: either side would lose or gain half.
    slab = np.zeros((16, 4, 4), np.uint8)
    slab[5:9] = 1
    assert (preprocess.resample_labels(slab, (8, 4, 4), LINEAR) > 0).sum() == 2 * 16


def test_spacing_is_reached_up_to_whole_voxels_and_the_extent_is_kept(tmp_path):
    image, labels = volume(0, shape=(21, 17, 9))
    array, header = read_volume(put(tmp_path / "a.nii.gz", image))
    how = Preparation("zyx", (3.0, 1.0, 1.3))
    ready = preprocess.prepare(array, header, how)
    assert ready.shape == (12, 26, 16) == preprocess.prepare_labels(labels, ready).shape
    extent = np.multiply(ready.original_shape, ready.original_spacing)
    assert np.multiply(ready.shape, ready.spacing) == pytest.approx(extent)
    assert ready.original_shape == (9, 17, 21)
    # An axis never vanishes.
    flat = preprocess.prepare(array, header, Preparation("zyx", (99.0, 1.0, 1.0)))
    assert flat.shape == (1, 26, 21)


def test_a_spacing_that_would_fill_the_memory_is_refused(tmp_path):
    array, header = read_volume(put(tmp_path / "a.nii.gz", volume()[0]))
    with pytest.raises(UserError, match=r"a\.nii\.gz: .*voxels at 0\.001 x 0\.001 x 0\.001 mm") as error:
        preprocess.prepare(array, header, Preparation("zyx", (0.001, 0.001, 0.001)))
    assert "larger spacing" in str(error.value)


@settings(max_examples=15, deadline=None)
@given(st.tuples(*[st.integers(1, 12)] * 6), st.integers(1, 5), st.integers(0, 99))
def test_scores_come_back_as_torch_would_bring_them(sizes, classes, seed):
    scores = torch.randn(classes, *sizes[:3], generator=torch.Generator().manual_seed(seed))
    own = preprocess.to_original(scores, sizes[3:])
    resized = functional.interpolate(scores[None], size=sizes[3:], mode="trilinear", align_corners=False)[0]
    taken = resized.gather(0, own[None].long())[0]
    assert own.dtype == torch.uint8 and own.shape == sizes[3:]
    torch.testing.assert_close(taken, resized.amax(0), atol=1e-5, rtol=0)


def test_scores_on_the_original_grid_are_their_largest_and_slices_do_not_matter(monkeypatch):
    scores = torch.randn(3, 7, 8, 9)
    assert (preprocess.to_original(scores, (7, 8, 9)) == scores.argmax(0)).all()
    assert (preprocess.to_original(scores.bfloat16(), (7, 8, 9)) == scores.bfloat16().argmax(0)).all()
    assert not preprocess.to_original(torch.zeros(3, 2, 2, 2), (5, 5, 5)).any()
    whole = preprocess.to_original(scores, (11, 16, 5))
    monkeypatch.setattr(preprocess, "_AT_ONCE", 1)
    assert (preprocess.to_original(scores, (11, 16, 5)) == whole).all()

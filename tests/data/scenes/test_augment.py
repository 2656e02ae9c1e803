"""Random crops of images and masks: where they lie, what they show, and that both show the same."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainkit.config.validation import validate
from trainkit.data.augment import Distort
from trainkit.data.scenes import augment
from trainkit.data.scenes.augment import Cuts, SceneAugment, cut_map, cut_picture, nearest, place

FILL = torch.tensor([1, 2, 3], dtype=torch.uint8)


def picture(height, width, seed=0):
    """An image, uint8 (3, H, W), and a map of the same shape whose values say where each pixel lies."""
    values = np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8)
    return values, np.arange(height * width, dtype=np.int32).reshape(height, width)


def crop_of(pixels, cuts, i, crop):
    out = torch.full((3, *crop), 77, dtype=torch.uint8)
    cut_picture(pixels, cuts, i, out, FILL)
    return out.numpy()


def map_of(values, cuts, i, crop, fill=-1):
    out = np.full(crop, 77, values.dtype)
    cut_map(values, cuts, i, out, fill)
    return out


def one(start, region, size, corner=(0, 0), flip=False):
    return Cuts(*(np.asarray([each], np.int64) for each in (start, region, size, corner)), np.asarray([flip]))


shapes = st.tuples(st.integers(1, 60), st.integers(1, 60))


@given(shapes, shapes, st.floats(0.02, 20), st.floats(0, 0.999999), st.floats(0, 0.999999))
def test_a_cut_lies_in_its_picture_and_in_its_crop(shape, crop, factor, down, right):
    cuts = place(np.asarray([factor]), np.asarray([[down, right]]), np.zeros(1, bool), np.asarray([shape]), crop)
    start, region, size, corner = (each[0] for each in (cuts.start, cuts.region, cuts.size, cuts.corner))
    assert (start >= 0).all() and (region >= 1).all() and (start + region <= shape).all()
    assert (corner >= 0).all() and (size >= 1).all() and (corner + size <= crop).all()
    for axis in range(2):
        # Either the crop is full along an axis, or all of the image is in it.
        assert size[axis] == crop[axis] or (region[axis], start[axis]) == (shape[axis], 0)
        # The factor is the one that was asked for, within half a pixel of the region or of the crop.
        asked = region[axis] * factor
        assert abs(size[axis] - asked) <= 0.5 * max(1, factor) + 1e-6 or region[axis] == 1 or size[axis] == 1


def test_every_place_is_as_likely_and_none_is_left_out():
    rows = np.arange(6000)
    cuts = SceneAugment().cuts(3, 0, rows, np.full((6000, 2), (9, 4)), 1.0, (6, 6))
    assert (cuts.region == (6, 4)).all() and (cuts.size == (6, 4)).all() and not cuts.flip.any()
    down, right = np.bincount(cuts.start[:, 0], minlength=4), np.bincount(cuts.corner[:, 1], minlength=3)
    assert np.abs(down / 1500 - 1).max() < 0.1 and len(down) == 4
    assert np.abs(right / 2000 - 1).max() < 0.1 and len(right) == 3
    assert abs(np.corrcoef(cuts.start[:, 0], cuts.corner[:, 1])[0, 1]) < 0.05


def test_scales_are_drawn_evenly_and_flips_in_their_share():
    rows, big = np.arange(8000), np.full((8000, 2), 4000)
    block = SceneAugment(scales=(0.5, 2.0), flip=0.3)
    cuts = block.cuts(1, 2, rows, big, 1.0, (400, 400))
    histogram = np.histogram(cuts.factor, np.linspace(0.5, 2, 7))[0] / len(rows)
    assert np.abs(histogram - 1 / 6).max() < 0.02
    assert abs(cuts.flip.mean() - 0.3) < 0.02
    # A base factor multiplies the drawn one.
    halved = block.cuts(1, 2, rows, big, 0.5, (400, 400))
    np.testing.assert_allclose(halved.factor, cuts.factor / 2, rtol=0.01)
    assert (halved.flip == cuts.flip).all()


def test_what_is_drawn_is_a_function_of_seed_epoch_and_row():
    block, shape = SceneAugment(scales=(0.5, 2.0), flip=0.5), np.asarray([[90, 120]])

    def drawn(seed, epoch, rows):
        cuts = block.cuts(seed, epoch, np.asarray(rows), np.repeat(shape, len(rows), 0), 1.0, (32, 48))
        return np.concatenate([cuts.start, cuts.region, cuts.flip[:, None]], 1).tolist()

    every = drawn(5, 1, range(20))
    assert [every[7], every[3]] == drawn(5, 1, [7, 3])
    assert every != drawn(5, 2, range(20)) and every != drawn(6, 1, range(20))
    # Where a crop lies is not what decides whether it is mirrored.
    assert drawn(5, 1, [4])[0][:4] == [*unmirrored(5, 1, 4)]


def unmirrored(seed, epoch, row):
    cuts = SceneAugment(scales=(0.5, 2.0)).cuts(seed, epoch, np.asarray([row]), np.asarray([[90, 120]]), 1.0, (32, 48))
    return *cuts.start[0].tolist(), *cuts.region[0].tolist()


@given(st.integers(1, 300), st.integers(1, 300))
def test_nearest_is_the_pixel_in_which_a_centre_lies(length, size):
    exact = [int(np.floor((k + 0.5) * length / size + 1e-12)) for k in range(size)]
    assert nearest(length, size).tolist() == exact


@pytest.mark.parametrize("flip", [False, True])
def test_padding_is_where_the_picture_is_not(flip):
    pixels, where = picture(5, 6)
    cuts = one((0, 0), (5, 6), (5, 6), corner=(2, 3), flip=flip)
    crop, places = crop_of(pixels, cuts, 0, (9, 12)), map_of(where, cuts, 0, (9, 12))
    inside = np.zeros((9, 12), bool)
    inside[2:7, 3:9] = True
    assert (places[~inside] == -1).all() and (crop[:, ~inside] == FILL.numpy()[:, None]).all()
    turn = slice(None, None, -1 if flip else 1)
    assert (places[2:7, 3:9] == where[:, turn]).all() and (crop[:, 2:7, 3:9] == pixels[:, :, turn]).all()


@settings(max_examples=40)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(2, 40), st.integers(2, 40), st.booleans())
def test_a_resampled_crop_is_what_pil_makes_of_the_region(height, width, down, right, flip):
    pixels, where = picture(height + 5, width + 4)
    cuts = one((3, 1), (height, width), (down, right), flip=flip)
    region = Image.fromarray(np.ascontiguousarray(pixels[:, 3 : 3 + height, 1 : 1 + width].transpose(1, 2, 0)))
    expected = np.asarray(region.resize((right, down), Image.Resampling.BILINEAR)).transpose(2, 0, 1).astype(int)
    found = crop_of(pixels, cuts, 0, (down, right))
    found = found[:, :, ::-1] if flip else found
    # Both round after either axis, and need not do so alike.
    assert np.abs(found - expected).max() <= 2
    # Memory order changes nothing.
    apart = np.ascontiguousarray(pixels.transpose(1, 2, 0)).transpose(2, 0, 1)
    other = crop_of(apart, cuts, 0, (down, right))
    assert np.abs((other[:, :, ::-1] if flip else other).astype(int) - found).max() <= 1
    places = map_of(where, cuts, 0, (down, right))
    places = places[:, ::-1] if flip else places
    for y in range(down):
        for x in range(right):
            at = 3 + (2 * y + 1) * height // (2 * down), 1 + (2 * x + 1) * width // (2 * right)
            assert places[y, x] == where[at]


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_picture_and_mask_show_the_same(flip):
    # An image whose colour is its class, in patches large enough for most pixels to be in one of them alone.
    classes = np.kron(np.random.default_rng(2).integers(0, 12, (6, 8)), np.ones((20, 20), int)).astype(np.uint8)
    pixels = np.stack([classes * 20, 255 - classes * 20, classes * 7])
    block = SceneAugment(scales=(0.4, 2.5), flip=flip)
    for row in range(12):
        cuts = block.cuts(0, row, np.asarray([row]), np.asarray([classes.shape]), 1.0, (96, 112))
        crop, mask = crop_of(pixels, cuts, 0, (96, 112)), map_of(classes, cuts, 0, (96, 112), fill=255)
        valid = mask != 255
        agree = (crop[0] == mask * 20) & (crop[2] == mask * 7)
        assert agree[valid].mean() > 0.6
        # Disagreement is only where patches meet: never in the middle of one.
        same = np.ones_like(valid)
        for dy in (-3, 0, 3):
            for dx in (-3, 0, 3):
                same &= np.roll(mask, (dy, dx), (0, 1)) == mask
        same[:3] = same[-3:] = same[:, :3] = same[:, -3:] = False
        assert agree[same & valid].all() and (crop[:, ~valid] == FILL.numpy()[:, None]).all()


def test_mistakes_in_the_block_are_said():
    for wrong, words in (
        ({"scales": [2.0, 1.0]}, "smaller first"),
        ({"scales": [0.0, 1.0]}, "scales"),
        ({"flip": 1.5}, "flip"),
    ):
        with pytest.raises(ValueError, match=words):
            validate(SceneAugment, wrong, {})
    assert SceneAugment().colours is None
    assert SceneAugment(distort=Distort()).colours.flip == 0 and augment.DRAWS[0] == "scale"

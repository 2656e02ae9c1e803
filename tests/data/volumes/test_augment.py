"""Augmentation of volumes: each operation against another computation of it, and randomness by where it stands."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage, stats
from scipy.interpolate import BSpline
from scipy.spatial.transform import Rotation

from trainkit.config import validation
from trainkit.config.schema import TABLES
from trainkit.data.volumes import augment_spatial
from trainkit.data.volumes.augment import (
    BiasField,
    Blur,
    Brightness,
    Contrast,
    Gamma,
    LowResolution,
    Noise,
    Rotate,
    Scale,
    VolumeAugment,
)
from trainkit.data.volumes.dataset import Volumes
from trainkit.errors import UserError

PATCH = (11, 14, 17)  # all different, odd and even
THICK, THIN = (4.0, 0.8, 1.1), (1.3, 0.8, 1.1)  # mm; thick slices are not mixed
NAMES = ("background", "left eye", "right eye", "nerve")

NNUNET = {
    "rotate": {"p": 0.2, "in_plane": 30.0, "out_of_plane": 30.0},
    "scale": {"p": 0.2, "factor": [0.7, 1.4]},
    "flips": ["left_right", "back_front", "down_up"],
    "noise": {"p": 0.1, "deviation": [0.0, 0.316]},
    "blur": {"p": 0.2, "sigma": [0.5, 1.0]},
    "contrast": {"p": 0.15, "factor": [0.75, 1.25]},
    "low_resolution": {"p": 0.25, "zoom": [0.5, 1.0]},
    "gamma": {"p": 0.3, "exponent": [0.7, 1.5]},
}
"""nnU-Net v2's augmentation (Isensee et al. 2021) in these words, for voxels of 1 mm."""


def everything(p: float = 0.6) -> VolumeAugment:
    return VolumeAugment(
        rotate=Rotate(p=p, in_plane=25, out_of_plane=15),
        scale=Scale(p=p, factor=(0.7, 1.4)),
        flips=["left_right", "down_up"],
        swap=[("left eye", "right eye")],
        bias_field=BiasField(p=p, every=10.0),
        blur=Blur(p=p, sigma=(0.5, 1.0)),
        low_resolution=LowResolution(p=p),
        noise=Noise(p=p),
        gamma=Gamma(p=p),
        contrast=Contrast(p=p),
        brightness=Brightness(p=p),
        reach=2.0,
    )


def drawn(augment: VolumeAugment, rows: int = 8, spacing=THIN, patch=PATCH, seed=0, epoch=0) -> dict[str, np.ndarray]:
    return augment.numbers(seed, epoch, np.arange(rows), patch, spacing, "zyx", NAMES)


def batch(size, count: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth volumes as float16 with masks of boxes."""
    random = np.random.default_rng(seed)
    image = ndimage.gaussian_filter(random.normal(size=(count, *size)), (0, 1, 1, 1)).astype(np.float16)
    mask = np.kron(random.integers(0, 4, (count, *[-(-s // 3) for s in size])), np.ones((1, 3, 3, 3)))
    return torch.from_numpy(image)[:, None], torch.from_numpy(mask[:, : size[0], : size[1], : size[2]]).byte()


def read(augment: VolumeAugment, spacing, patch=PATCH) -> list[int]:
    return [size + 2 * more for size, more in zip(patch, augment.margin(patch, spacing), strict=True)]


def tensors(numbers: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(each) for name, each in numbers.items()}


def applied(augment: VolumeAugment, spacing=THIN, count: int = 8, **more):
    """Arrays: image and mask that were read, numbers, and what was made of them."""
    image, mask = batch(read(augment, spacing), count)
    numbers = drawn(augment, count, spacing, **more)
    out, labels = augment.apply(image, mask, tensors(numbers), PATCH)
    assert out.dtype == torch.float32 and out.shape == (count, 1, *PATCH) and out.is_contiguous()
    assert labels.dtype == torch.uint8 and labels.shape == (count, *PATCH)
    numbers = {name.removeprefix("augment_"): each for name, each in numbers.items()}
    return image[:, 0].float().numpy(), mask.numpy(), numbers, out[:, 0].numpy(), labels.numpy()


def middle(array: np.ndarray) -> np.ndarray:
    starts = [(have - want) // 2 for have, want in zip(array.shape, PATCH, strict=True)]
    return array[tuple(slice(at, at + size) for at, size in zip(starts, PATCH, strict=True))]


@pytest.fixture(params=["each", "all"])
def way(request, monkeypatch):
    """As on a CPU, sample by sample, and as on a GPU, the whole batch at once."""
    if request.param == "all":
        monkeypatch.setattr(augment_spatial, "by_sample", lambda image: False)
    return request.param


# ---- shape -----------------------------------------------------------------------------------------------------------


def spline(points: np.ndarray, cell: np.ndarray, size) -> np.ndarray:
    """The tensor product of scipy's B-splines: points (*n) at voxels (*size)."""
    for axis, count in enumerate(points.shape):
        knots = np.arange(count + 4) - 3.0
        at = (np.arange(size[axis]) + 0.5) / cell[axis]
        points = np.moveaxis(BSpline(knots, np.moveaxis(points, axis, 0), 3)(at), 0, axis)
    return points


@pytest.mark.parametrize("spacing", [THIN, THICK])
def test_rotation_and_scale_are_one_interpolation_in_mm(spacing, way):
    augment = VolumeAugment(
        rotate=Rotate(p=0.7, in_plane=25, out_of_plane=15),
        scale=Scale(p=0.7, factor=(0.7, 1.4)),
        reach=0.5,
    )
    image, mask, _, out, labels = applied(augment, spacing)
    thick = spacing == THICK
    draw = augment_spatial.Draws(0, 0, np.arange(8), PATCH, THIN).values
    mm = np.array(spacing)[:, None]
    turned = 0
    for i in range(8):
        angles = np.zeros(3)
        if draw["rotate"][i] < 0.7:
            largest = [25, 0, 0] if thick else [25, 15, 15]
            angles = np.array([(2 * draw[f"turn_{k}"][i] - 1) * largest[k] for k in range(3)])
        factor = 0.7 * 2 ** draw["factor"][i] if draw["scale"][i] < 0.7 else 1.0
        # Intrinsic turns about depth, height and width, which scipy names by the axes of (first, second, third); a
        # positive angle turns the second of (depth, height, width) towards the third, or the first towards it.
        turn = Rotation.from_euler("XYZ", [angles[0], -angles[1], angles[2]], degrees=True).as_matrix()
        places = np.indices(PATCH).reshape(3, -1).astype(float)
        offsets = (places - (np.array(PATCH)[:, None] - 1) / 2) * mm
        source = turn.T @ offsets / (np.array([1 if thick else factor, factor, factor])[:, None])
        source = source / mm + (np.array(image[i].shape)[:, None] - 1) / 2
        if draw["rotate"][i] >= 0.7 and draw["scale"][i] >= 0.7:
            assert np.array_equal(out[i], middle(image[i])) and np.array_equal(labels[i], middle(mask[i]))
            continue
        turned += 1
        source = np.stack([s.clip(0, size - 1) for s, size in zip(source, image[i].shape, strict=True)])
        expected = ndimage.map_coordinates(image[i], source, order=1, mode="nearest").reshape(PATCH)
        assert np.abs(out[i] - expected).max() < 1e-4
        clear = (np.abs(source - np.floor(source) - 0.5).min(0) > 1e-3).reshape(PATCH)  # no tie between two voxels
        expected = ndimage.map_coordinates(mask[i], source, order=0, mode="nearest").reshape(PATCH)
        assert clear.mean() > 0.9 and np.array_equal(labels[i][clear], expected[clear])
    assert turned >= 5


@settings(max_examples=40, deadline=None)
@given(
    degrees=st.tuples(st.floats(0, 180), st.floats(0, 180)),
    smallest=st.floats(0.5, 1.5),
    patch=st.tuples(*[st.integers(1, 40)] * 3),
    spacing=st.tuples(*[st.floats(0.3, 5)] * 3),
)
def test_what_is_read_holds_all_that_is_moved_into_the_patch(degrees, smallest, patch, spacing):
    augment = VolumeAugment(
        rotate=Rotate(p=1, in_plane=degrees[0], out_of_plane=degrees[1]),
        scale=Scale(p=1, factor=(smallest, 1.5)),
        reach=2.0,
    )
    margin = augment.margin(patch, spacing)
    assert all(0 <= more <= 2 * size for more, size in zip(margin, patch, strict=True))
    numbers = augment.numbers(0, 0, np.arange(30), patch, spacing, "zyx")
    axes = numbers["augment_matrix"].shape[1]
    half = (np.array(patch[-axes:]) - 1) / 2
    corners = half[:, None] * np.array(list(np.ndindex(*[2] * axes))).T * 2 - half[:, None]
    far = np.abs(numbers["augment_matrix"] @ corners).max(2)
    capped = np.array(margin[-axes:]) == 2 * np.array(patch[-axes:])
    # 13 angles are tried along each axis: between two of them a corner may reach a little farther.
    spare = 0.01 * np.linalg.norm(half * spacing[-axes:]) / np.array(spacing[-axes:]) / smallest + 1e-3
    assert (capped | (far <= half + np.array(margin[-axes:]) + spare)).all()
    if axes == 2:
        assert margin[0] == 0


def test_the_margin_is_bounded_and_none_where_nothing_moves():
    assert VolumeAugment(flips=["left_right"], noise=Noise(), gamma=Gamma()).margin((96, 96, 96), (1, 1, 1)) == (0,) * 3
    assert VolumeAugment(rotate=Rotate(in_plane=30, p=0)).margin((96, 96, 96), (1, 1, 1)) == (0,) * 3
    wide = VolumeAugment(rotate=Rotate(in_plane=45), scale=Scale(factor=(0.5, 1)), reach=0.25)
    assert wide.margin((96, 80, 64), (1, 1, 1)) == (24, 20, 16)
    assert wide.margin((16, 80, 80), (4, 1, 1)) == (0, 20, 20)
    turned = VolumeAugment(rotate=Rotate(in_plane=45), reach=1.0).margin((16, 101, 101), (4, 1, 1))
    assert turned == (0, 21, 21)  # 50 sqrt(2) = 70.7


# ---- flips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axes", "left_right", "down_up"), [("zyx", 2, 0), ("yzx", 2, 1), ("xzy", 0, 1)])
def test_flips_go_along_anatomical_axes_and_exchange_the_labels_of_the_sides(axes, left_right, down_up, way):
    augment = VolumeAugment(flips=["down_up", "left_right"], swap=[("right eye", "left eye")])
    image, mask = batch(PATCH, 40)
    numbers = augment.numbers(1, 2, np.arange(40), PATCH, (1, 1, 1), axes, NAMES)
    before = image.clone(), mask.clone()
    out, labels = augment.apply(image, mask, tensors(numbers), PATCH)
    assert torch.equal(image, before[0]) and torch.equal(mask, before[1])
    draw = augment_spatial.Draws(1, 2, np.arange(40), PATCH, THIN).values
    seen = set()
    for i in range(40):
        sides, heights = draw["flip_0"][i] < 0.5, draw["flip_2"][i] < 0.5
        seen.add((sides, heights))
        expected, of_mask = image[i, 0].float().numpy(), mask[i].numpy()
        if sides:
            expected, of_mask = np.flip(expected, left_right), np.array([0, 2, 1, 3])[np.flip(of_mask, left_right)]
        if heights:
            expected, of_mask = np.flip(expected, down_up), np.flip(of_mask, down_up)
        assert np.array_equal(out[i, 0], expected) and np.array_equal(labels[i], of_mask)
    assert len(seen) == 4


def test_labels_of_sides_must_be_exchanged_where_sides_are():
    paired = ("background", "Left kidney", "right kidney", "LR", "SR", "hippocampus_l", "hippocampus_r", "liver")
    flips = VolumeAugment(flips=["left_right"])
    with pytest.raises(UserError, match=r"leave 'Left kidney' and 'right kidney'.*add \[Left kidney, right kidney\]"):
        flips.check_labels(paired)
    swap = [("right kidney", "Left kidney"), ("hippocampus_l", "hippocampus_r")]
    VolumeAugment(flips=["left_right"], swap=swap).check_labels(paired)
    VolumeAugment(flips=["down_up"]).check_labels(paired)
    flips.check_labels(("background", "SR", "LR", "MR", "IR", "ON", "FAT", "LG", "SO", "EB"))
    flips.check_labels(("background", "Anterior", "Posterior", "left ventricle"))
    with pytest.raises(UserError, match="hippocampus_l"):
        VolumeAugment(flips=["left_right"], swap=swap[:1]).check_labels(paired)
    with pytest.raises(UserError, match=r"unknown label 'kidney'.*SR"):
        VolumeAugment(flips=["left_right"], swap=[("kidney", "SR")]).check_labels(paired)
    with pytest.raises(UserError, match="unknown label 'background'"):
        VolumeAugment(flips=["left_right"], swap=[("background", "SR")]).check_labels(paired)
    with pytest.raises(UserError, match="'SR' is in it twice"):
        VolumeAugment(flips=["left_right"], swap=[("LR", "SR"), ("SR", "liver")]).check_labels(paired)
    with pytest.raises(UserError, match="add left_right"):
        VolumeAugment(swap=swap).check_labels(paired)


# ---- intensities -----------------------------------------------------------------------------------------------------


def test_blur_is_that_of_scipy_with_a_width_in_mm(way):
    augment = VolumeAugment(blur=Blur(p=0.7, sigma=(0.4, 1.2)))
    image, _, _, out, _ = applied(augment, THICK)
    draw = augment_spatial.Draws(0, 0, np.arange(8), PATCH, THIN).values
    for i in range(8):
        if draw["blur"][i] >= 0.7:
            assert np.array_equal(out[i], image[i])
            continue
        sigma = (0.4 + 0.8 * draw["sigma"][i]) / np.array(THICK)
        radius = [math.ceil(3 * 1.2 / mm) for mm in THICK]
        expected = ndimage.gaussian_filter(image[i], sigma, mode="nearest", radius=radius)
        assert np.abs(out[i] - expected).max() < 1e-5
    whole = ndimage.gaussian_filter(image[0], 1.2 / np.array(THICK), mode="nearest", truncate=8)
    cut = ndimage.gaussian_filter(image[0], 1.2 / np.array(THICK), mode="nearest", radius=radius)
    assert np.abs(whole - cut).max() < 0.01


@pytest.mark.parametrize("spacing", [THIN, THICK])
def test_low_resolution_is_picked_voxels_and_lines_between_them(spacing, way):
    augment = VolumeAugment(low_resolution=LowResolution(p=0.7, zoom=(0.3, 1.0)))
    image, _, numbers, out, _ = applied(augment, spacing)
    for i in range(8):
        coarse = [round(n) for n in numbers["coarse"][i].tolist()]
        if spacing == THICK:
            assert coarse[0] == PATCH[0]
        picked = image[i]
        for axis, (few, size) in enumerate(zip(coarse, PATCH, strict=True)):
            picked = picked.take([math.floor((k + 0.5) * size / few) for k in range(few)], axis)
        expected = torch.nn.functional.interpolate(torch.from_numpy(picked)[None, None], PATCH, mode="trilinear")
        assert np.abs(out[i] - expected[0, 0].numpy()).max() < 1e-5
    assert 0 < numbers["coarser"].sum() < 8


def test_noise_is_normal_and_of_the_drawn_deviation(way):
    patch = (16, 32, 33)
    augment = VolumeAugment(noise=Noise(p=0.7, deviation=(0.1, 0.5)))
    numbers = augment.numbers(3, 1, np.arange(12), patch, THIN, "zyx")
    zero = torch.zeros(12, 1, *patch), torch.zeros(12, *patch, dtype=torch.uint8)
    out = augment.apply(*zero, tensors(numbers), patch)[0].flatten(1).numpy()
    chosen = numbers["augment_noise"] > 0
    assert 5 <= chosen.sum() < 12 and not out[~chosen].any()
    unit = out[chosen] / numbers["augment_noise"][chosen][:, None]
    assert (np.abs(unit.std(1) - 1) < 0.025).all() and (np.abs(unit.mean(1)) < 0.03).all()
    assert stats.kstest(unit.ravel(), "norm").pvalue > 1e-3
    related = np.corrcoef(unit) - np.eye(len(unit))
    assert np.abs(related).max() < 0.04
    for step in (1, 33, 32 * 33, unit.shape[1] // 2):  # neighbours along each axis, and the two of one pair
        assert abs(np.mean(unit[:, step:] * unit[:, :-step])) < 0.02


def test_gamma_is_a_power_between_the_ends_that_keeps_mean_and_deviation(way):
    augment = VolumeAugment(gamma=Gamma(p=0.8, exponent=(0.5, 2.0), invert=0.5))
    image, _, numbers, out, _ = applied(augment, count=16)
    assert {True, False} <= set(numbers["invert"][numbers["gamma"] != 1].tolist())
    for i in range(16):
        x = image[i].astype(float)
        if numbers["gamma"][i] == 1:
            assert np.array_equal(out[i], image[i])
            continue
        unit = (x - x.min()) / (x.max() - x.min())
        unit = 1 - (1 - unit) ** numbers["gamma"][i] if numbers["invert"][i] else unit ** numbers["gamma"][i]
        expected = (unit - unit.mean()) / unit.std() * x.std() + x.mean()
        assert np.abs(out[i] - expected).max() < 1e-4
    flat = torch.full((16, 1, *PATCH), 1.5)
    same, _ = augment.apply(flat, torch.zeros(16, *PATCH, dtype=torch.uint8), tensors(drawn(augment, 16)), PATCH)
    assert torch.allclose(same, flat)


def test_the_bias_field_is_a_smooth_factor_on_what_is_above_air(way):
    augment = VolumeAugment(bias_field=BiasField(p=0.7, every=9.0, log=0.8))
    image, _, numbers, out, _ = applied(augment, THICK)
    draw = augment_spatial.Draws(0, 0, np.arange(8), PATCH, THIN).values
    for i in range(8):
        if draw["bias_field"][i] >= 0.7:
            assert np.array_equal(out[i], image[i])
            continue
        factor = np.exp(spline(numbers["bias"][i, 0].astype(float), 9.0 / np.array(THICK), PATCH))
        assert 0.05 < np.abs(np.log(factor)).max() < 0.8
        assert np.abs(out[i] - ((image[i] - image[i].min()) * factor + image[i].min())).max() < 1e-4


def test_contrast_is_a_factor_and_brightness_a_sum(way):
    augment = VolumeAugment(contrast=Contrast(p=0.5, factor=(0.6, 1.4)), brightness=Brightness(p=0.5, shift=0.3))
    image, _, _, out, _ = applied(augment, count=40)
    draw = augment_spatial.Draws(0, 0, np.arange(40), PATCH, THIN).values
    gain = np.where(draw["contrast"] < 0.5, 0.6 + 0.8 * draw["gain"], 1)
    shift = np.where(draw["brightness"] < 0.5, 0.6 * draw["shift"] - 0.3, 0)
    assert np.abs(out - (image * gain[:, None, None, None] + shift[:, None, None, None])).max() < 1e-5
    assert 0.2 < np.mean(gain == 1) < 0.8 and 0.2 < np.mean(shift == 0) < 0.8


# ---- randomness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spacing", [THIN, THICK])
def test_a_patch_has_the_same_bits_in_every_batch(spacing, way):
    augment = everything()
    image, mask = batch(read(augment, spacing), 10)

    def augmented(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = tensors(augment.numbers(5, 6, rows, PATCH, spacing, "zyx", NAMES))
        return augment.apply(image[rows], mask[rows], numbers, PATCH)

    whole, labels = augmented(np.arange(10))
    shuffled = np.random.default_rng(0).permutation(10)
    for size in (1, 4):
        parts = [augmented(shuffled[i : i + size]) for i in range(0, 10, size)]
        assert torch.equal(torch.cat([each for each, _ in parts]), whole[shuffled]), size
        assert torch.equal(torch.cat([each for _, each in parts]), labels[shuffled]), size
    assert whole.isfinite().all() and whole.std() > 0.1


@pytest.mark.parametrize("spacing", [THIN, THICK])
def test_what_a_gpu_computes_for_all_is_what_a_cpu_computes_for_the_chosen(spacing, monkeypatch):
    augment = everything()
    _, _, _, each, labels = applied(augment, spacing, count=12)
    monkeypatch.setattr(augment_spatial, "by_sample", lambda image: False)
    _, _, _, together, of_all = applied(augment, spacing, count=12)
    assert np.abs(each - together).max() < 2e-3 and (labels != of_all).mean() < 1e-3


def test_numbers_depend_on_seed_epoch_and_row_and_on_no_other_setting():
    one, again = drawn(everything(), 50), drawn(everything(), 50)
    assert all(name.startswith("augment_") and np.array_equal(one[name], again[name]) for name in one)
    for other in (drawn(everything(), 50, seed=1), drawn(everything(), 50, epoch=1)):
        for name in ("matrix", "bias", "noise_key"):
            assert not np.isclose(one[f"augment_{name}"], other[f"augment_{name}"]).all(), name
    some = everything().numbers(0, 0, np.array([7, 3]), PATCH, THIN, "zyx", NAMES)
    assert all(np.array_equal(some[name], one[name][[7, 3]]) for name in one)
    alone = drawn(VolumeAugment(noise=Noise(p=0.6), gamma=Gamma(p=0.6)), 50)
    assert set(alone) < set(one) and all(np.array_equal(alone[name], one[name]) for name in alone)
    assert drawn(VolumeAugment()) == {}


# ---- what it is given ------------------------------------------------------------------------------------------------


def test_nothing_happens_by_default_and_what_lies_around_is_cut_off(way):
    image, mask = batch((15, 16, 23), 3)
    out, labels = VolumeAugment().apply(image, mask, {"image": image}, PATCH)
    assert torch.equal(out, image[:, :, 2:13, 1:15, 3:20].float()) and torch.equal(labels, mask[:, 2:13, 1:15, 3:20])
    kept = image.float()
    numbers = tensors(drawn(everything(1.0), 3))
    before = kept.clone()
    VolumeAugment().apply(kept, mask, numbers, PATCH)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("patch", [(1, 9, 7), (5, 1, 1), (1, 1, 1)])
def test_patches_of_one_voxel_along_an_axis(patch, way):
    augment = everything(1.0)
    image, mask = batch(patch, 3)
    numbers = tensors(augment.numbers(0, 0, np.arange(3), patch, THIN, "zyx", NAMES))
    out, labels = augment.apply(image, mask, numbers, patch)
    assert out.isfinite().all() and out.shape == (3, 1, *patch) and labels.shape == (3, *patch)


def test_large_volumes_have_places_beyond_what_float32_counts():
    """Of the flat places from 2^24 on float32 has none that is odd."""
    image = torch.zeros(1, 1, 2, 4097, 4097, dtype=torch.float16)
    mask = torch.zeros(1, 2, 4097, 4097, dtype=torch.uint8)
    image[0, 0, 1, 4096, 4094], mask[0, 1, 4096, 4094] = 2.0, 3
    numbers = {"augment_warp": torch.tensor([True])}
    numbers["augment_matrix"] = torch.diag(torch.tensor([1.0, 2048.0, 2046.0]))[None]
    out, labels = VolumeAugment().apply(image, mask, numbers, (2, 3, 3))
    expected = torch.zeros(2, 3, 3)
    expected[1, 2, 2] = 1
    assert torch.equal(labels[0], 3 * expected.byte()) and torch.equal(out[0, 0], 2 * expected)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"rotate": {"p": 1.5}}, "p"),
        ({"rotate": {"in_plane": 200.0}}, "in_plane"),
        ({"scale": {"factor": [1.2, 0.8]}}, r"factor is \[1.2, 0.8\]"),
        ({"flips": ["left_right", "left_right"]}, "each axis once"),
        ({"flips": ["sideways"]}, "left_right"),
        ({"bias_field": {"log": -1.0}}, "log"),
        ({"blur": {"sigma": [-1.0, 1.0]}}, "sigma"),
        ({"low_resolution": {"zoom": [0.5, 1.5]}}, "zoom"),
        ({"noise": {"deviation": [0.3, 0.1]}}, "deviation is"),
        ({"gamma": {"exponent": [0.0, 1.0]}}, "exponent"),
        ({"gamma": {"invert": 2.0}}, "invert"),
        ({"brightness": {"shift": -0.1}}, "shift"),
        ({"reach": -0.1}, "reach"),
        ({"rotation": {}}, "rotation"),
    ],
)
def test_impossible_settings_are_refused_when_the_recipe_is_read(block, said):
    with pytest.raises(ValueError, match=said):
        validation.validate(Volumes, {"name": "volumes", "train": "x", "patch": [9, 9, 9], "augment": block}, TABLES)


# ---- speed -----------------------------------------------------------------------------------------------------------

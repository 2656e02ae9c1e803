"""Augmentation: each operation against another computation of it, and randomness that depends on where it stands."""

import hashlib
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import map_coordinates
from torchvision.transforms.v2 import functional as tv

from trainkit.config import validation
from trainkit.config.schema import TABLES, Loader
from trainkit.data import augment, clahe
from trainkit.data.augment import NUMBERS, Affine, Distort, Light, Timm
from trainkit.data.images.dataset import Images
from trainkit.data.loader import stream
from trainkit.errors import UserError
from trainkit.training.plan import Plan

MEAN = (0.4, 0.5, 0.6)
HEIGHT, WIDTH = 13, 19  # odd, so that vectorised loops have a rest to do


def pictures(count: int, seed: int = 0, side: tuple[int, int] = (HEIGHT, WIDTH)) -> torch.Tensor:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, *side), dtype=np.uint8)
    return torch.from_numpy(pixels)


def given(**values: float) -> torch.Tensor:
    """One row of numbers that leaves an image alone but for `values`."""
    neutral = {"xx": 1.0, "yy": 1.0, "brightness": 1.0, "contrast": 1.0, "saturation": 1.0} | values
    return torch.tensor([[neutral.get(name, 0.0) for name in NUMBERS]])


def drawn(light: Light, rows: int = 400, epoch: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    numbers = light.numbers(seed, epoch, np.arange(rows), (HEIGHT, WIDTH))
    return dict(zip(NUMBERS, numbers.T, strict=True))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))


# ---- light -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", ["edge", "reflect", "zero"])
def test_mirror_and_move_pick_the_pixels_that_a_loop_picks(fill):
    images = pictures(40)
    light = Light(name="light", flip=0.5, shift=6, fill=fill)
    numbers = light.numbers(3, 1, np.arange(40), (HEIGHT, WIDTH))
    out = (light.apply(images, torch.from_numpy(numbers), MEAN) * 255).round().to(torch.uint8).numpy()
    columns = dict(zip(NUMBERS, numbers.T.astype(int), strict=True))
    assert set(columns["flip"]) == {0, 1} and {-6, 0, 6} <= set(columns["down"].tolist()) <= set(range(-6, 7))

    def at(place: int, size: int) -> int | None:
        if 0 <= place < size:
            return place
        if fill == "zero":
            return None
        if fill == "edge":
            return 0 if place < 0 else size - 1
        return -1 - place if place < 0 else 2 * size - 1 - place

    for i in range(40):
        picture = images[i].numpy()[:, :, ::-1] if columns["flip"][i] else images[i].numpy()
        for y in range(HEIGHT):
            for x in range(WIDTH):
                from_y, from_x = at(y - columns["down"][i], HEIGHT), at(x - columns["right"][i], WIDTH)
                expected = 0 if from_y is None or from_x is None else picture[:, from_y, from_x]
                assert (out[i, :, y, x] == expected).all()


def test_a_move_farther_than_the_picture_is_wide_stays_within_it():
    light = Light(name="light", flip=0, shift=3 * WIDTH, fill="reflect")
    numbers = torch.from_numpy(light.numbers(0, 0, np.arange(50), (HEIGHT, WIDTH)))
    out = light.apply(torch.full((50, 3, HEIGHT, WIDTH), 200, dtype=torch.uint8), numbers, MEAN)
    assert torch.allclose(out, torch.tensor(200 / 255))


@pytest.mark.parametrize(("fill", "mode"), [("edge", "nearest"), ("reflect", "reflect"), ("zero", "grid-constant")])
def test_turn_shear_scale_and_move_are_the_matrix_of_the_definition(fill, mode):
    block = Affine(degrees=40, scale=(0.7, 1.4), translate=0.2, shear=15)
    light = Light(name="light", flip=0, affine=block, fill=fill)
    rows, seed, epoch = np.arange(12), 4, 2
    images = pictures(12)
    out = light.apply(images, torch.from_numpy(light.numbers(seed, epoch, rows, (HEIGHT, WIDTH))), MEAN).numpy()
    draw = augment._draws(seed, epoch, rows)
    for i in range(12):
        turn, shear = np.radians(80 * draw["turn"][i] - 40), np.tan(np.radians(30 * draw["shear"][i] - 15))
        size = 0.7 * 2 ** draw["size"][i]
        forward = (  # columns are x, y
            np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
            @ np.array([[1, shear], [0, 1]])
            * size
        )
        move = np.array(
            [(2 * draw["affine_right"][i] - 1) * 0.2 * WIDTH, (2 * draw["affine_down"][i] - 1) * 0.2 * HEIGHT]
        )
        y, x = np.mgrid[:HEIGHT, :WIDTH]
        middle = np.array([(WIDTH - 1) / 2, (HEIGHT - 1) / 2])
        places = np.linalg.solve(forward, np.stack([x.ravel(), y.ravel()]) - (middle + move)[:, None]) + middle[:, None]
        for channel in range(3):
            source = images[i, channel].numpy() / 255.0
            if fill == "edge":  # where both sides are beyond a border scipy and torch agree only if clipped first
                places = np.stack([places[0].clip(0, WIDTH - 1), places[1].clip(0, HEIGHT - 1)])
            expected = map_coordinates(source, places[::-1], order=1, mode=mode).reshape(HEIGHT, WIDTH)
            assert np.abs(out[i, channel] - expected).max() < 2e-5


@pytest.mark.parametrize("first", [0, 1])
def test_distortion_is_that_of_torchvision(first):
    images = pictures(6, seed=1)
    images[0] = images[0, :1]  # grey: no hue
    images[1, 0] = images[1, 1]  # ties of the largest channel
    light = Light(name="light", flip=0, distort=Distort())
    for i, (brightness, contrast, saturation, hue, order) in enumerate(
        [(1.1, 0.6, 1.4, 0.03, 0), (0.9, 1.5, 0.5, -0.05, 1), (1, 1.2, 1.5, 0.5, 2), (0.875, 1, 1, -0.3, 3)]
    ):
        picture = images[i].float() / 255
        expected = tv.adjust_brightness(picture, brightness)
        expected = tv.adjust_contrast(expected, contrast) if first else expected
        expected = tv.adjust_hue(tv.adjust_saturation(expected, saturation), hue)
        expected = expected if first else tv.adjust_contrast(expected, contrast)
        expected = expected[list(augment._ORDERS[order])]
        row = given(
            brightness=brightness, contrast=contrast, first=first, saturation=saturation, hue=hue, order=float(order)
        )
        out = light.apply(images[i : i + 1], row, MEAN)[0]
        assert (out - expected).abs().max() < 5e-4, i  # torchvision's grey has 0.2989, 0.587, 0.114


def test_erased_boxes_are_mean_inside_and_untouched_outside():
    light = Light(name="light", flip=0, erase=0.4, erase_area=(0.1, 0.5), erase_ratio=(0.5, 2))
    images = pictures(300)
    numbers = light.numbers(0, 0, np.arange(300), (HEIGHT, WIDTH))
    out = light.apply(images, torch.from_numpy(numbers), MEAN)
    whole = images.float() / 255
    erased = 0
    for i, row in enumerate(numbers):
        top, bottom, left, right = (int(row[NUMBERS.index(n)]) for n in ("top", "bottom", "left", "right_edge"))
        assert 0 <= top <= bottom <= HEIGHT and 0 <= left <= right <= WIDTH
        expected = whole[i].clone()
        expected[:, top:bottom, left:right] = torch.tensor(MEAN).view(3, 1, 1)
        assert torch.equal(out[i], expected)
        if bottom > top:
            erased += 1
            assert 0.05 < (bottom - top) * (right - left) / (HEIGHT * WIDTH) < 0.6
    assert abs(erased / 300 - 0.4) < 0.08


def everything() -> Light:
    affine = Affine(p=0.7, degrees=20, scale=(0.8, 1.2), translate=0.1, shear=10)
    return Light(name="light", shift=3, affine=affine, distort=Distort(), erase=0.5, clahe=0.5, clahe_tiles=3)


def test_a_picture_has_the_same_bits_in_every_batch():
    light, images, rows = everything(), pictures(70), np.arange(70)
    norms = (MEAN, (0.2, 0.3, 0.4))

    def augmented(chosen: np.ndarray) -> torch.Tensor:
        pixels = images[chosen].numpy()
        light.equalise(pixels, 5, 6, rows[chosen])
        numbers = torch.from_numpy(light.numbers(5, 6, rows[chosen], (HEIGHT, WIDTH)))
        return augment.normalise(light.apply(torch.from_numpy(pixels), numbers, MEAN), *norms)

    whole = augmented(rows)
    shuffled = np.random.default_rng(0).permutation(70)
    assert torch.equal(augmented(shuffled), whole[shuffled])
    for size in (1, 7, 33):
        parts = torch.cat([augmented(rows[i : i + size]) for i in range(0, 70, size)])
        assert torch.equal(parts, whole), size
    assert whole.std() > 0.1


def test_what_a_gpu_computes_for_all_is_what_a_cpu_computes_for_the_chosen(monkeypatch):
    light, images = everything(), pictures(50)
    numbers = torch.from_numpy(light.numbers(0, 0, np.arange(50), (HEIGHT, WIDTH)))
    expected = light.apply(images, numbers, MEAN)
    for_all = lambda images, chosen, numbers, change: torch.where(chosen, change(images, numbers), images)  # noqa: E731
    monkeypatch.setattr(augment, "_some", for_all)
    assert torch.equal(light.apply(images, numbers, MEAN), expected)


def test_what_happens_to_a_row_depends_on_seed_and_epoch_and_on_no_other_setting():
    light = Light(name="light", shift=4)
    base = drawn(light)
    assert all((drawn(light)[name] == base[name]).all() for name in NUMBERS)
    for other in (drawn(light, epoch=1), drawn(light, seed=1)):
        assert 0.3 < (other["flip"] == base["flip"]).mean() < 0.7
    assert (drawn(everything())["flip"] == base["flip"]).all()
    assert abs(np.corrcoef(base["down"], base["right"])[0, 1]) < 0.15
    assert abs(base["flip"].mean() - 0.5) < 0.08


def test_pixels_are_normalised_by_mean_and_std():
    images = pictures(2)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(augment.normalise(images, mean, std).double(), expected, atol=1e-5)
    assert torch.allclose(augment.normalise(images.float() / 255, mean, std).double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"flip": 1.5}, "flip"),
        ({"shift": -1}, "shift"),
        ({"affine": {"scale": [1.2, 0.8]}}, "scale is"),
        ({"affine": {"degrees": 200}}, "degrees"),
        ({"distort": {"hue": [-0.7, 0.1]}}, "hue"),
        ({"erase_area": [0.1, 1.5]}, "erase_area"),
        ({"clahe_tiles": 0}, "clahe_tiles"),
        ({"name": "timm", "crop_pct": 0.0}, "crop_pct"),
        ({"name": "timm", "re_mode": "dots"}, "re_mode"),
    ],
)
def test_impossible_settings_are_refused_when_the_recipe_is_read(block, said):
    with pytest.raises(ValueError, match=said):
        validation.validate(Images, {"name": "images", "train": "x", "augment": {"name": "light"} | block}, TABLES)


# ---- CLAHE -----------------------------------------------------------------------------------------------------------


def shaded(height: int, width: int) -> np.ndarray:
    """A grey image, brighter to the right and below, with a texture; of whole numbers alone."""
    y, x = np.mgrid[:height, :width]
    return (60 + 40 * x // width + 30 * y // height + (7 * x * x + 5 * x * y + 11 * y * y) % 13).astype(np.uint8)


@pytest.mark.parametrize(
    ("shape", "clip", "tiles", "digest"),
    [
        ((32, 64), 2.0, 8, "d4c84a0e5fb1e582"),
        ((112, 112), 4.0, 8, "030d3fff19ec1e6c"),
        # Sides that the tiles do not divide: both, one, smaller than the number of tiles.
        ((17, 23), 3.0, 4, "05da4cccb720cf15"),
        ((40, 36), 2.0, 8, "ea791878c2a633c0"),
        ((5, 30), 1.0, 8, "1e2b7f64070edb1a"),
        ((3, 2), 2.0, 8, "ce8bee525d6736e9"),
    ],
)
def test_clahe_is_that_of_opencv(shape, clip, tiles, digest):
    """The digests are of `cv2.createCLAHE(clip, (tiles, tiles)).apply(shaded(*shape))`, OpenCV 5.0.0."""
    found = clahe.equalise_plane(shaded(*shape), clip, tiles)
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == digest


def test_clahe_of_a_picture_changes_luminance_and_keeps_colour_differences():
    ramp = np.linspace(90, 130, 32, dtype=np.float32)[None, :].repeat(32, 0)
    image = np.stack([ramp + 10, ramp, ramp - 10]).astype(np.uint8)
    out = clahe.equalise(image, clip=4.0, tiles=1).astype(int)
    assert (out[0] - out[1] == image[0].astype(int) - image[1]).all()
    assert (out[1] - out[2] == image[1].astype(int) - image[2]).all()
    assert out[1].std() > 1.3 * image[1].std()


def test_clahe_is_for_its_share_of_pictures_and_leaves_the_others_alone():
    images = pictures(200).numpy()
    before = images.copy()
    Light(name="light", clahe=0.25).equalise(images, 0, 0, np.arange(200))
    changed = (images != before).any((1, 2, 3))
    assert abs(changed.mean() - 0.25) < 0.08
    row = int(np.flatnonzero(changed)[0])
    assert (images[row] == clahe.equalise(before[row])).all()


# ---- timm ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("timm")
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (root / kind).mkdir()
        for k in range(6):
            shape = (40 + 7 * k, 60 - 5 * k, 3)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(root / kind / f"{k}.png")
    return root


def opened(folder: Path, **settings) -> Images:
    return Images(**({"train": str(folder), "image_size": 24, "fit": "keep"} | settings))


@pytest.mark.parametrize("fit", ["keep", "crop"])
def test_timm_augments_a_picture_alike_in_any_batch_and_worker(folder, fit):
    split = opened(folder, fit=fit, augment=Timm(name="timm")).open(7).train
    assert split.views == 0
    whole = split.fetch(np.arange(12), epoch=3)["image"]
    assert whole.shape == (12, 3, 24, 24) and whole.dtype == torch.float32
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    alone = torch.cat([split.fetch(np.array([i]), 3)["image"] for i in reversed(range(12))]).flip(0)
    assert torch.equal(whole, alone)
    assert not torch.equal(split.fetch(np.arange(12), 4)["image"], whole)
    plan = Plan(steps=4, steps_per_epoch=2, batch_size=6, micro_batch=3, accumulation=2, world=1, rank=0)
    runs = [
        [
            (b["index"], b["image"])
            for b in stream.training(split, partial(plan.keys, split, 0), Loader(workers=workers), pin=False)
        ]
        for workers in (0, 2)
    ]
    assert len(runs[0]) == len(runs[1]) == 8
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(*runs, strict=True))
    resumed = next(stream.training(split, partial(plan.keys, split, 3), Loader(), pin=False))
    assert torch.equal(resumed["image"], runs[1][6][1])


def test_global_generators_are_left_as_they_were(folder):
    split = opened(folder, augment=Timm(name="timm")).open(0).train
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    split.fetch(np.arange(4), 0)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_pictures_are_normalised_once(folder):
    bare = Timm(name="timm", scale=(1.0, 1.0), hflip=0, auto_augment=None, re_prob=0)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    data = opened(folder, fit="crop", augment=bare, mean=mean, std=std).open(0)
    trained = data.train.on_device(data.train.fetch(np.arange(12), 0))["image"]
    scored = data.evaluations["train"].on_device(data.evaluations["train"].fetch(np.arange(12), 0))["image"]
    assert torch.allclose(trained, scored, atol=1e-5)


def test_what_is_scored_is_cut_from_the_middle_by_timm(folder):
    from timm.data import create_transform

    data = opened(folder, augment=Timm(name="timm", crop_pct=0.8)).open(0)
    split = data.evaluations["train"]
    batch = split.fetch(np.arange(12), 0)
    assert batch["image"].dtype == torch.uint8
    transform = create_transform((3, 24, 24), interpolation="bicubic", crop_pct=0.8)
    for i, row in enumerate(split.rows):
        picture = Image.open(folder / split.packed.ids()[row])
        assert torch.allclose(split.on_device(batch)["image"][i], transform(picture), atol=1e-5)


def test_of_a_thin_image_the_middle_alone_is_resized(monkeypatch):
    """An image of 1 x 5000 would become 224 x 1,120,000 on its way."""
    timm, sizes = augment._timm_transform((24, 24), crop_pct=0.8, normalize=False), []
    seen = lambda image: sizes.append(image.size) or timm(image)  # noqa: E731
    monkeypatch.setattr(augment, "_timm_transform", lambda *_, **__: seen)
    line = np.repeat(np.arange(5000) % 251, 3).astype(np.uint8).reshape(1, 5000, 3).repeat(4, 0)
    cut = Timm(name="timm", crop_pct=0.8).scoring((24, 24))
    assert torch.equal(cut(line), timm(Image.fromarray(line))), "what is cut from the middle is the same"
    for shape in ((5000, 4), (4, 64), (40, 63)):
        cut(np.zeros((*shape, 3), np.uint8))
    assert sizes == [(64, 4), (4, 64), (64, 4), (63, 40)]


def test_zero_bits_of_posterize_are_black_and_no_exception():
    picture = Image.fromarray(pictures(1)[0].permute(1, 2, 0).numpy())
    assert not np.asarray(augment._posterize(picture, 0)).any()
    assert (np.asarray(augment._posterize(picture, 3)) == np.asarray(picture) & 0b11100000).all()
    assert augment._posterize(picture, 8) is picture
    cut = Timm(name="timm", auto_augment="rand-m10-n12-p1.0-mstd0-inc1").training((8, 8), MEAN, MEAN)
    for seed in range(4):  # timm's own operation would raise within these
        random.seed(seed), np.random.seed(seed)
        cut(np.asarray(picture))


def test_a_policy_that_timm_does_not_have_is_named(folder):
    with pytest.raises(UserError, match=r"data\.augment: timm does not take auto_augment 'loud'"):
        opened(folder, augment=Timm(name="timm", auto_augment="loud")).open(0)


def test_keep_without_timm_is_refused():
    with pytest.raises(ValueError, match="fit: keep"):
        Images(train="x", fit="keep")

"""The drawn streets: what they are, that they are the same everywhere, and how images and masks belong together."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import scenes, street

DIGEST = (4, "34d67546b2683eaa431ab75175f6d72885fc935aacb21760a4d35d4198cab1ed")
"""Of a few images and masks. If it changes on purpose, raise `VERSION` with it."""


@pytest.fixture(scope="module")
def drawn():
    """Every tenth image and its mask, by number."""
    return {number: scenes.draw(number) for number in range(0, 300, 10)}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set of few images, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(scenes, "PICTURES", {"train": 4, "val": 2})
    return tmp_path / "cache"


def test_pictures_and_masks_are_the_same_everywhere_and_belong_to_the_version(drawn):
    seen = hashlib.sha256()
    for picture, mask in drawn.values():
        seen.update(picture.tobytes() + mask.tobytes())
    assert (scenes.VERSION, seen.hexdigest()) == DIGEST


def test_a_picture_depends_on_its_number_alone(drawn):
    picture, mask = scenes.draw(20)
    assert picture.shape == (96, 128, 3) and mask.shape == (96, 128)
    assert picture.dtype == mask.dtype == np.uint8
    assert np.array_equal(picture, drawn[20][0]) and np.array_equal(mask, drawn[20][1])
    assert not np.array_equal(picture, drawn[30][0]) and not np.array_equal(mask, drawn[30][1])


def test_masks_hold_all_classes_and_a_little_that_nobody_labelled(drawn):
    counts = sum(np.bincount(mask.ravel(), minlength=256) for _, mask in drawn.values())
    assert len(scenes.NAMES) == len(scenes.COLOURS) == len(set(scenes.COLOURS)) == 9
    assert counts[9:255].sum() == 0
    share = counts / counts.sum()
    assert (share[:9] > 0.004).all() and share[:9].max() < 0.4
    assert 0.01 < share[street.IGNORED] < 0.08
    for number, (_, mask) in drawn.items():
        assert len(np.unique(mask)) > 4, number


def test_every_picture_has_contrast_and_is_not_mostly_clipped(drawn):
    for number, (picture, _) in drawn.items():
        assert picture.std() > 8, number
        assert ((picture == 0) | (picture == 255)).mean() < 0.5, number


def test_where_a_pixel_is_does_not_give_its_class_away(drawn):
    """The commonest class of each place, counted on these very images, finds three classes at best."""
    masks = np.stack([mask for _, mask in drawn.values()])
    prior = np.stack([(masks == k).sum(0) for k in range(9)]).argmax(0)
    iou = []
    for k in range(9):
        found, there = (prior == k) & (masks != street.IGNORED), masks == k
        iou.append((found & there).sum() / (found | there).sum())
    assert 0.1 < np.mean(iou) < 0.3


def test_picture_and_mask_show_the_same_street(drawn):
    """Pixels on either side of a border between sky and houses differ more than within the houses."""
    steps = {True: [], False: []}
    for picture, mask in drawn.values():
        grey = picture.astype(np.float64).mean(2)
        above, below = mask[:-3], mask[3:]  # three rows apart: borders wander
        change = np.abs(grey[3:] - grey[:-3])
        steps[True].append(change[(above == street.SKY) & (below == street.BUILDING)])
        steps[False].append(change[(above == street.SKY) & (below == street.SKY)])
    assert np.median(np.concatenate(steps[True])) > 3 * np.median(np.concatenate(steps[False]))


def test_far_things_are_small_and_what_is_behind_the_camera_is_not_drawn():
    scene = scenes._Scene(np.random.default_rng(0))
    near, far = scene.height_px(0.0, 10.0, 1.7), scene.height_px(0.0, 40.0, 1.7)
    assert near > 3 * far > 0 and scene.height_px(0.0, -10.0, 1.7) == 0
    square = [(-1.0, -3.0, 0.0), (1.0, -3.0, 0.0), (1.0, -3.0, 2.0), (-1.0, -3.0, 2.0)]
    assert scene.outline(square) == ([], 0.0)
    carpet = [(-1.0, -3.0, 0.0), (1.0, -3.0, 0.0), (1.0, 9.0, 0.0), (-1.0, 9.0, 0.0)]
    corners, depth = scene.outline(carpet)
    assert len(corners) >= 4 and street.NEAR < depth < 10
    before = np.asarray(scene.labels).copy()
    scene.lay(carpet, (200, 0, 0), None)
    assert np.array_equal(np.asarray(scene.labels), before)
    picture = np.asarray(scene.image).copy()
    scene.only_labels(carpet, street.FENCE)
    assert (np.asarray(scene.labels) == street.FENCE).any()
    assert np.array_equal(np.asarray(scene.image), picture)


def test_a_point_of_the_ground_is_drawn_where_the_ground_has_it():
    """Rays to the ground and points of the street to pixels are inverse: the kerbs meet the pavement's border."""
    for seed in range(5):
        scene = scenes._Scene(np.random.default_rng(seed))
        scene.junction, scene.bend = None, 0.004
        scene.ground()
        labels = np.asarray(scene.labels)
        for s in (6.0, 9.0, 14.0, 20.0):
            for u, label in ((scene.half - 0.3, street.ROAD), (0.3 - scene.half, street.ROAD)):
                x, y = scene.pixel(*scene.at(u, s, 0.0))
                if 0 <= x < labels.shape[1] and 0 <= y < labels.shape[0]:
                    assert labels[int(y), int(x)] == label, (seed, u, s)
            for u in (scene.half + 0.1, -scene.half - 0.1):
                x, y = scene.pixel(*scene.at(u, s, 0.0))
                if 0 <= x < labels.shape[1] and 0 <= y < labels.shape[0]:
                    assert labels[int(y), int(x)] == street.PAVEMENT, (seed, u, s)


def test_borders_wander_and_only_borders():
    scene = scenes._Scene(np.random.default_rng(3))
    scene.own = np.zeros((96, 128), bool)
    half = np.zeros((288, 384), np.uint8)
    half[:, 192:] = street.CAR
    scene.labels = Image.fromarray(half)
    mask = scenes._annotate(np.random.default_rng(4), scene)
    straight = np.where(np.arange(128) < 64, 0, street.CAR)[None]
    wrong = (mask != straight) & (mask != street.IGNORED)
    assert wrong.any() and not wrong[:, :60].any() and not wrong[:, 68:].any()


def test_the_folder_holds_what_it_says(small):
    home = scenes.folder()
    assert home == small / f"scenes-v{scenes.VERSION}"
    about = json.loads((home / "sample.json").read_text())
    assert about["names"] == list(scenes.NAMES) and about["ignored"] == 255
    for split, numbers in (("train", range(4)), ("val", range(4, 6))):
        assert scenes.numbers(split) == numbers
        for folder in (split, f"{split}annot"):
            assert sorted(p.name for p in (home / folder).iterdir()) == [f"{i:04d}.png" for i in numbers]
    picture, mask = scenes.draw(4)
    with Image.open(home / "val" / "0004.png") as image:
        assert image.mode == "RGB" and np.array_equal(np.asarray(image), picture)
    with Image.open(home / "valannot" / "0004.png") as image:
        assert image.mode == "P" and np.array_equal(np.asarray(image), mask)
        colours = np.asarray(image.convert("RGB"))
    palette = np.full((256, 3), 255)
    palette[:9] = scenes.COLOURS
    assert np.array_equal(colours, palette[mask])

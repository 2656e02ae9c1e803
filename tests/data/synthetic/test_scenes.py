"""The drawn streets: what they are, that they are the same everywhere, and how images and masks belong together."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import scenes

DIGEST = (5, "aa8c02adfcc46c25050149c35b89e50f09fc3a2d1a9ae850f42c39c9d0ca2a48")
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
    assert 0.01 < share[scenes.IGNORED] < 0.08
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
        found, there = (prior == k) & (masks != scenes.IGNORED), masks == k
        iou.append((found & there).sum() / (found | there).sum())
    assert 0.1 < np.mean(iou) < 0.3


def test_picture_and_mask_show_the_same_street(drawn):
    """Pixels on either side of a border between sky and houses differ more than within the houses."""
    steps = {True: [], False: []}
    for picture, mask in drawn.values():
        grey = picture.astype(np.float64).mean(2)
        above, below = mask[:-3], mask[3:]  # three rows apart: borders wander
        change = np.abs(grey[3:] - grey[:-3])
        steps[True].append(change[(above == scenes.SKY) & (below == scenes.BUILDING)])
        steps[False].append(change[(above == scenes.SKY) & (below == scenes.SKY)])
    assert np.median(np.concatenate(steps[True])) > 3 * np.median(np.concatenate(steps[False]))


def test_far_things_are_small_and_what_is_behind_the_camera_is_not_drawn():
    street = scenes.Street(np.random.default_rng(0))

    def height(s):
        return street.pixel(0.0, s, 0.0)[1] - street.pixel(0.0, s, 1.7)[1]

    assert height(10.0) > 3 * height(40.0) > 0
    before = np.asarray(street.labels).copy(), np.asarray(street.image).copy()
    street.lay([(-1, -3, 0), (1, -3, 0), (1, -3, 2), (-1, -3, 2)], np.full(3, 200), scenes.CAR)
    assert np.array_equal(np.asarray(street.labels), before[0])
    carpet = [(-1, -3, 0), (1, -3, 0), (1, 9, 0), (-1, 9, 0)]
    street.lay(carpet, np.array((200, 0, 0)), None)
    assert np.array_equal(np.asarray(street.labels), before[0])
    picture = np.asarray(street.image).copy()
    assert not np.array_equal(picture, before[1])
    street.lay(carpet, None, scenes.FENCE)
    assert (np.asarray(street.labels) == scenes.FENCE).any()
    assert np.array_equal(np.asarray(street.image), picture)


def test_a_point_of_the_ground_is_drawn_where_the_ground_has_it():
    """The kerbs meet the pavement's border, also where the street bends."""
    for seed in range(5):
        street = scenes.Street(np.random.default_rng(seed))
        street.bend = 0.004
        street.ground()
        labels = np.asarray(street.labels)
        for s in (6.0, 9.0, 14.0, 20.0):
            for u, label in ((street.half - 0.3, scenes.ROAD), (street.half + 0.3, scenes.PAVEMENT)):
                for side in (-1, 1):
                    x, y = street.pixel(side * u, s, 0.0)
                    if 0 <= x < labels.shape[1] and 0 <= y < labels.shape[0]:
                        assert labels[int(y), int(x)] == label, (seed, u, s)


def test_borders_wander_and_only_borders():
    half = np.zeros((288, 384), np.uint8)
    half[:, 192:] = scenes.CAR
    mask = scenes._annotate(np.random.default_rng(4), Image.fromarray(half))
    straight = np.where(np.arange(128) < 64, 0, scenes.CAR)[None]
    wrong = (mask != straight) & (mask != scenes.IGNORED)
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

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

"""The drawn objects: what they are, that they are the same everywhere, and that the folder is whole."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import objects

DIGEST = (1, "24896d7caf51df2621b40d023b9b3a5a720db3a0b7c4ba845f045a0570767c2e")
"""Of a few images of each class. If it changes on purpose, raise `VERSION` with it."""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set of few images, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "TRAIN", 3)
    monkeypatch.setattr(objects, "VAL", 2)
    return tmp_path / "cache"


def test_pixels_are_the_same_everywhere_and_belong_to_the_version():
    seen = hashlib.sha256()
    for kind in objects.CLASSES:
        for number in range(4):
            seen.update(objects.draw(kind, number, "train").tobytes())
            seen.update(objects.draw(kind, number, "val").tobytes())
    assert (objects.VERSION, seen.hexdigest()) == DIGEST


def test_a_picture_depends_on_class_number_split_and_size_alone():
    first = objects.draw("car", 5, "train", 48)
    objects.draw("truck", 0)
    assert first.shape == (48, 48, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, objects.draw("car", 5, "train", 48))
    for other in (("car", 6, "train"), ("car", 5, "val"), ("boat", 5, "train")):
        assert not np.array_equal(first, objects.draw(*other, 48))


def test_every_picture_has_contrast_and_is_not_mostly_clipped():
    for kind in objects.CLASSES:
        for number in range(6):
            picture = objects.draw(kind, number)
            assert picture.std() > 8, (kind, number)
            assert ((picture == 0) | (picture == 255)).mean() < 0.6, (kind, number)


def test_colour_says_little_about_the_class():
    """The nearest class mean of the mean colour must be near chance, 0.1."""

    def colours(split, pictures):
        return np.stack(
            [[objects.draw(k, i, split).reshape(-1, 3).mean(0) for i in range(pictures)] for k in objects.CLASSES]
        )

    means = colours("train", 30).mean(1)
    val = colours("val", 15)
    nearest = ((val[:, :, None] - means) ** 2).sum(-1).argmin(-1)
    assert (nearest == np.arange(10)[:, None]).mean() < 0.25


def test_the_folder_holds_what_it_says_and_is_made_once(small):
    home = objects.folder()
    assert home == small / f"objects-v{objects.VERSION}-32"
    assert sorted(p.name for p in home.iterdir()) == ["sample.json", "train", "val"]
    assert sorted(p.name for p in (home / "train").iterdir()) == sorted(objects.CLASSES)
    assert len(list(home.glob("train/*/*.png"))) == 30
    assert len(list(home.glob("val/*/*.png"))) == 20
    with Image.open(home / "val" / "fish" / "001.png") as image:
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), objects.draw("fish", 1, "val"))
    about = json.loads((home / "sample.json").read_text())
    assert (about["train"], about["val"]) == (30, 20)
    stamp = (home / "sample.json").stat().st_mtime_ns
    assert objects.folder() == home
    assert (home / "sample.json").stat().st_mtime_ns == stamp


def test_what_an_interrupted_process_left_is_drawn_anew(small, monkeypatch):
    write = objects._write

    def half(to, size):
        (to / "train" / "rest").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(objects, "_write", half)
    with pytest.raises(KeyboardInterrupt):
        objects.folder()
    assert not list(small.glob("*/sample.json"))
    monkeypatch.setattr(objects, "_write", write)
    assert sorted(p.name for p in (objects.folder() / "train").iterdir()) == sorted(objects.CLASSES)


def test_a_size_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="image_size must be"):
        objects.folder(8)

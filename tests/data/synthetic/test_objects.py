"""The drawn objects: what they are, that they are the same everywhere, and that the folder is whole."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import objects

DIGEST = (2, "b4d99e57a413ad5750e9269aef7a93f82330f5d0b46465b354c05ac7ab90f46e")
"""Of a few images of each class. If it changes on purpose, raise `VERSION` with it."""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set of few images, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "PICTURES", {"train": 3, "val": 2})
    return tmp_path / "cache"


def test_pixels_are_the_same_everywhere_and_belong_to_the_version():
    seen = hashlib.sha256()
    for kind in objects.CLASSES:
        for number in range(4):
            seen.update(objects.draw(kind, number, "train").tobytes())
            seen.update(objects.draw(kind, number, "val").tobytes())
    assert (objects.VERSION, seen.hexdigest()) == DIGEST


def test_the_folder_holds_what_it_says(small):
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

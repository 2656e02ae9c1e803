"""The drawn eyes: what they are, that they are the same everywhere, and what is known about their labels."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import eyes

DIGEST = (4, "86452d378aa4842b83e38db0d35a042d0ad4e0e6baae313bf7bb3d550d9b69b3")
"""Of a few images and all labels. If it changes on purpose, raise `VERSION` with it."""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set of few people, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(eyes, "PEOPLE", {"train": 6, "val": 4})
    monkeypatch.setattr(eyes, "PICTURES", 10)
    monkeypatch.setattr(eyes, "WRONG", 0.1)
    return tmp_path / "cache"


def test_pixels_and_labels_are_the_same_everywhere_and_belong_to_the_version():
    seen = hashlib.sha256(repr([eyes.rows("train"), eyes.rows("val")]).encode())
    for person in range(0, 220, 5):
        seen.update(eyes.draw(person, person % 20).tobytes())
    assert (eyes.VERSION, seen.hexdigest()) == DIGEST


@pytest.mark.parametrize(("split", "wrong"), [("train", 72), ("val", 16)])
def test_two_of_a_hundred_labels_are_wrong_and_the_others_follow_from_how_far_the_eye_is_open(split, wrong):
    rows = eyes.rows(split)
    assert sum(row[3] for row in rows) == wrong
    for person, number, label, is_wrong in rows:
        truth = "open" if eyes.openness(person, number) >= eyes.OPEN_FROM else "closed"
        assert (label != truth) == is_wrong


def test_the_folder_holds_what_it_says(small):
    home = eyes.folder()
    assert home == small / f"eyes-v{eyes.VERSION}"
    assert sorted(p.relative_to(home).as_posix() for p in home.glob("*/*")) == [
        "train/closed",
        "train/open",
        "val/closed",
        "val/open",
    ]
    wrong = set(json.loads((home / "sample.json").read_text())["wrong_labels"])
    assert len(wrong) == 6 + 4
    for split, people in (("train", range(6)), ("val", range(6, 10))):
        files = list(home.glob(f"{split}/*/*.png"))
        assert len(files) == len(people) * 10
        for file in files:
            person, number = int(file.stem[1:5]), int(file.stem[6:])
            assert person in people
            truth = "open" if eyes.openness(person, number) >= eyes.OPEN_FROM else "closed"
            assert (file.parent.name != truth) == (file.relative_to(home).as_posix() in wrong)
    file = next(home.glob("val/open/*.png"))
    with Image.open(file) as image:
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), eyes.draw(int(file.stem[1:5]), int(file.stem[6:])))

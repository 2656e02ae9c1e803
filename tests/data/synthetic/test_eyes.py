"""The drawn eyes: what they are, that they are the same everywhere, and what is known about their labels."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import drawing, eyes

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


def test_a_picture_depends_on_person_and_number_alone():
    first = eyes.draw(3, 5)
    eyes.draw(4, 0)
    assert first.shape == (32, 64, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, eyes.draw(3, 5))
    assert not np.array_equal(first, eyes.draw(3, 6))
    assert not np.array_equal(first, eyes.draw(4, 5))


def test_every_picture_has_contrast_and_is_not_mostly_clipped():
    for person in range(40):
        picture = eyes.draw(person, person % 20)
        assert picture.std() > 3, person
        assert ((picture == 0) | (picture == 255)).mean() < 0.6, person


def test_splits_have_their_sizes_and_nobody_in_common():
    train, val = eyes.rows("train"), eyes.rows("val")
    assert (len(train), len(val)) == (3600, 800)
    assert {row[0] for row in train} == set(range(180))
    assert {row[0] for row in val} == set(range(180, 220))
    for rows in (train, val):
        assert abs(np.mean([row[2] == "open" for row in rows]) - 0.5) < 0.02


@pytest.mark.parametrize(("split", "wrong"), [("train", 72), ("val", 16)])
def test_two_of_a_hundred_labels_are_wrong_and_the_others_follow_from_how_far_the_eye_is_open(split, wrong):
    rows = eyes.rows(split)
    assert sum(row[3] for row in rows) == wrong
    for person, number, label, is_wrong in rows:
        truth = "open" if eyes.openness(person, number) >= eyes.OPEN_FROM else "closed"
        assert (label != truth) == is_wrong


def test_every_person_has_as_many_closed_as_open_and_some_are_nearly_ambiguous():
    every = np.array([[eyes.openness(p, i) for i in range(eyes.PICTURES)] for p in range(220)])
    assert every.min() >= 0
    assert every.max() <= 1
    assert ((every >= eyes.OPEN_FROM).sum(1) == eyes.PICTURES // 2).all()
    near = np.abs(every - eyes.OPEN_FROM) < 0.1
    assert 0.05 < near.mean() < 0.35


def test_an_eye_that_opens_changes_its_middle_and_not_its_corners():
    """Drawn with the same seeds but for openness: what differs is between the lids and at the lashes."""
    differs = np.zeros((eyes.HEIGHT, eyes.WIDTH))
    for person in range(30):
        who = drawing.draw_numbers(np.random.default_rng(person), eyes._PERSON)
        pair = []
        for opened in (0.6, 1.0):  # both above what turns the gaze down
            eye = eyes._Eye(who, np.random.default_rng(1), opened)
            image = eye.draw()
            pair.append(np.asarray(image.reduce(drawing.SUPERSAMPLING), dtype=np.float64))
        differs += np.abs(pair[0] - pair[1]).mean(-1)
    assert differs[8:24, 20:44].mean() > 10 * (differs[26:, :8].mean() + differs[26:, -8:].mean())


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

"""The drawn people: what they are, that they are the same everywhere, and what is known of how hard they are."""

import csv
import hashlib
import json

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import people
from trainkit.interfaces import CP, MODALITIES, NIR, RGB, SK, TEXT

DIGEST = (4, "c7ad5e5f83ea54e842eeb522636dc2bdb8fa668329a7dbb8d38cbf726ec851b6")
"""Of a few images and all rows. If it changes on purpose, raise `VERSION` with it."""

DRAWN = (RGB, NIR, CP, SK)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set of few people, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(people, "PEOPLE", {"train": 6, "val": 3})
    monkeypatch.setattr(people, "LACKS", {NIR: (7, 2), TEXT: (7, 4)})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def rows():
    return {split: people.rows(split) for split in people.PEOPLE}


def test_pixels_and_rows_are_the_same_everywhere_and_belong_to_the_version(rows):
    seen = hashlib.sha256(repr([[tuple(row) for row in rows[split]] for split in ("train", "val")]).encode())
    for person in range(0, 360, 15):
        for modality in DRAWN:
            seen.update(people.draw(person, modality, person % 2).tobytes())
    assert (people.VERSION, seen.hexdigest()) == DIGEST


def test_splits_have_their_sizes_and_nobody_and_no_group_in_common(rows):
    for split, size in (("train", 300), ("val", 60)):
        assert {row.person for row in rows[split]} == {f"p{i:04d}" for i in people.people(split)}
        assert len(people.people(split)) == size
    groups = [{person // people.GROUP for person in people.people(split)} for split in ("train", "val")]
    assert not groups[0] & groups[1]


def test_a_caption_names_a_colour_picture_of_its_person_and_drawings_have_no_camera(rows):
    for some in rows.values():
        rgb = {row.path: row for row in some if row.modality == "rgb"}
        assert len({row.path for row in some if row.path}) == sum(bool(row.path) for row in some)
        seen = set()
        for row in some:
            if row.modality == "text":
                assert row.path == ""
                assert (rgb[row.of].person, rgb[row.of].camera) == (row.person, row.camera)
                assert row.text.endswith(".")
                assert 3 <= len(row.text.split()) <= 60
                assert " a a" not in row.text
                assert " a o" not in row.text
                seen.add(row.of)
            else:
                assert row.of == row.text == ""
                wanted = {"rgb": ("c1", "c2", "c3", "c4"), "nir": ("c5", "c6")}.get(row.modality, ("",))
                assert row.camera in wanted
        assert len(seen) == sum(row.modality == "text" for row in some)
    cameras = [{people.camera(person, RGB, i) for i in range(4)} for person in range(20)]
    assert all(len(four) == 4 for four in cameras)


def test_the_folder_holds_what_it_says(small):
    home = people.folder()
    assert home == small / f"people-v{people.VERSION}"
    assert sorted(p.name for p in home.iterdir()) == ["sample.json", "train", "val"]
    about = json.loads((home / "sample.json").read_text())
    for split in ("train", "val"):
        with open(home / split / "index.csv", newline="", encoding="utf-8") as file:
            table = [people.Row(**row) for row in csv.DictReader(file)]
        assert table == people.rows(split)
        assert len(table) == about["records"][split]
        files = {p.relative_to(home / split).as_posix() for p in (home / split).glob("*/*/*.png")}
        assert files == {row.path for row in table if row.path}
    assert not (home / "train" / "nir" / "p0002").exists()
    for modality in DRAWN:
        with Image.open(home / "val" / MODALITIES[modality] / "p0007" / "1.png") as image:
            assert image.mode == ("RGB" if modality in (RGB, CP) else "L")
            assert np.array_equal(np.asarray(image), people.draw(7, modality, 1))
    stamp = (home / "sample.json").stat().st_mtime_ns
    assert people.folder() == home
    assert (home / "sample.json").stat().st_mtime_ns == stamp

"""The drawn people: what they are, that they are the same everywhere, and what is known of how hard they are."""

import csv
import hashlib
import json
from collections import Counter

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


def test_a_record_depends_on_person_modality_and_number_alone():
    for modality in DRAWN:
        first = people.draw(3, modality, 1)
        people.draw(4, modality, 0)
        assert first.shape == ((64, 32, 3) if modality in (RGB, CP) else (64, 32))
        assert first.dtype == np.uint8
        assert np.array_equal(first, people.draw(3, modality, 1))
        assert not np.array_equal(first, people.draw(3, modality, 0))
        assert not np.array_equal(first, people.draw(4, modality, 1))
    assert people.caption(3, 1) == people.caption(3, 1)


def test_every_picture_has_contrast_and_is_not_mostly_clipped():
    for person in range(0, 360, 20):
        for modality in DRAWN:
            picture = people.draw(person, modality, person % 2)
            assert picture.std() > 4, (person, modality)
            assert ((picture == 0) | (picture == 255)).mean() < 0.5, (person, modality)


def test_splits_have_their_sizes_and_nobody_and_no_group_in_common(rows):
    for split, size in (("train", 300), ("val", 60)):
        assert {row.person for row in rows[split]} == {f"p{i:04d}" for i in people.people(split)}
        assert len(people.people(split)) == size
    groups = [{person // people.GROUP for person in people.people(split)} for split in ("train", "val")]
    assert not groups[0] & groups[1]


def test_people_have_the_records_they_should_and_a_few_lack_a_modality(rows):
    for split, some in rows.items():
        counts = Counter((row.person, row.modality) for row in some)
        lacking = Counter()
        for person in people.people(split):
            name = f"p{person:04d}"
            n = {m: counts[name, MODALITIES[m]] for m in range(5)}
            assert n == people.pictures(person)
            assert 4 <= n[RGB] <= 6
            assert n[TEXT] in (0, n[RGB])
            for m, each in people.PICTURES.items():
                assert n[m] in (0, each)
            lacking.update(m for m in n if n[m] == 0)
        assert set(lacking) == {NIR, CP, SK, TEXT}
        assert sum(lacking.values()) < 0.2 * len(people.people(split))


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


def test_every_person_is_seen_from_the_front_the_side_and_behind():
    for person in range(30):
        assert {people.view(person, RGB, i) for i in range(4)} == {"front", "side", "back"}
        assert people.view(person, SK, 0) != people.view(person, SK, 1)


def test_of_six_people_two_are_alike_but_for_two_facets_two_wear_the_same_and_two_are_alone():
    clothes = {name for facet in ("upper", "lower", "shoes", "bag") for name in people.FACETS[facet]}
    every = []
    for group in range(0, 60, 4):
        six = [people.attributes(people.GROUP * group + i) for i in range(people.GROUP)]
        assert all(set(who) == {name for some in people.FACETS.values() for name in some} for who in six)

        def differing(a, b):
            return {facet for facet, some in people.FACETS.items() if any(a[name] != b[name] for name in some)}

        assert len(differing(six[0], six[1])) <= 2
        assert {name for name in clothes if six[2][name] != six[3][name]} == set()
        assert differing(six[2], six[3]) <= {"build", "hair", "hat"}
        every += [len(differing(six[a], six[b])) for a, b in ((0, 2), (0, 4), (2, 4), (4, 5))]
    assert min(every) > 2 and np.mean(every) > 5.5


def _drawn(who, modality, **changed):
    """An image of nearly the same person from the front, by the same hand."""
    rng, by = np.random.default_rng(7), {RGB: "c1", NIR: "c5"}.get(modality, "")
    return people.picture({**who, **changed}, modality, "front", by, rng).astype(float)


def test_a_garment_of_another_colour_changes_its_own_place_alone():
    who = {**people.attributes(5), "upper": "t-shirt", "lower": "trousers", "bag": "none", "lower_colour": "white"}
    for modality in DRAWN:
        differs = np.abs(_drawn(who, modality) - _drawn(who, modality, lower_colour="navy"))
        differs = differs.reshape(64, 32, -1).mean(-1)
        assert differs[38:56, 12:20].mean() > 8, modality
        assert differs[:22].max() < 2, modality


def test_infrared_is_not_the_brightness_of_a_colour():
    bright = [0.3 * r + 0.6 * g + 0.1 * b for r, g, b, _, _ in people.COLOURS.values()]
    reflected = [colour[3] for colour in people.COLOURS.values()]
    assert abs(np.corrcoef(bright, reflected)[0, 1]) < 0.5


def test_patterns_show_in_every_kind_of_picture():
    who = {**people.attributes(5), "upper": "t-shirt", "bag": "none", "hair": "short"}
    who.update(upper_colour="navy", second_colour="white", lower="trousers")
    for modality in DRAWN:
        plain = _drawn(who, modality, pattern="plain")
        for pattern in set(people.FACETS["upper"]["pattern"]):
            if pattern != "plain":
                other = _drawn(who, modality, pattern=pattern)
                assert np.abs(plain - other)[14:34].mean() > 1, (modality, pattern)


def test_captions_name_colours_that_are_there_more_often_than_others():
    """A colour of the upper clothes is in most captions, as a word for it; with the colours of another person it is in
    few. Neither share is 1 or 0: people leave out, err, and happen to wear the same."""
    right, wrong = [], []
    for person in range(0, 300, 3):
        text = people.caption(person, 0)
        own = people.attributes(person)["upper_colour"]
        other = people.attributes((person + 150) % 300)["upper_colour"]
        right.append(any(word in text for word in people._WORDS.get(own, (own,))))
        wrong.append(any(word in text for word in people._WORDS.get(other, (other,))))
    assert 0.65 < np.mean(right) < 0.97
    assert 0.05 < np.mean(wrong) < 0.5


def _mean_ap(query, gallery, same):
    order = np.argsort(-(query @ gallery.T), axis=1)
    hits = np.take_along_axis(same, order, 1)
    precision = np.cumsum(hits, 1) / np.arange(1, hits.shape[1] + 1)
    return ((precision * hits).sum(1) / hits.sum(1)).mean()


def test_small_pictures_find_people_of_their_own_kind_better_than_of_others_and_solve_neither():
    """Mean average precision by small grey images; of 40 people, where chance is about 0.07."""
    some = range(40)

    def small_pictures(modality, number):
        pictures = [people.draw(p, modality, number).reshape(64, 32, -1).astype(float).mean(-1) for p in some]
        flat = np.stack(pictures).reshape(len(some), 16, 4, 8, 4).mean((2, 4)).reshape(len(some), -1)
        flat -= flat.mean(1, keepdims=True)
        return flat / np.sqrt((flat**2).sum(1, keepdims=True))

    gallery = np.concatenate([small_pictures(RGB, i) for i in range(3)])
    same = np.tile(np.eye(len(some), dtype=bool), 3)
    own = _mean_ap(small_pictures(RGB, 3), gallery, same)
    assert 0.1 < own < 0.3
    for modality in (NIR, CP, SK):
        assert _mean_ap(small_pictures(modality, 0), gallery, same) < min(own, 0.16)


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

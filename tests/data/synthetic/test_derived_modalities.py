"""Modalities derived from photographs: who keeps what, what each image is made of, and what captions say."""

import csv
import hashlib
import json
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trainkit.data.synthetic import derived_modalities
from trainkit.errors import UserError
from trainkit.interfaces import CP, MODALITIES, NIR, RGB, SK


def photograph(seed, height=40, width=32):
    """Something smooth with edges."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(30, 230, (5, 4, 3), dtype=np.uint8))
    picture = np.array(small.resize((width, height), Image.Resampling.BICUBIC))
    picture[height // 3 : height // 2, width // 4 : width // 2] //= 3
    return picture


def people(root, counts, **size):
    """A folder of people with so many photographs each."""
    for number, (person, count) in enumerate(counts.items()):
        (root / person).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(photograph(100 * number + i, **size)).save(root / person / f"{i}.png")
    return root


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def index(home):
    with open(home / "index.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


# ---- who keeps what


@given(st.text(max_size=8), st.integers(1, 60))
def test_half_stay_rgb_and_of_four_or_more_no_modality_is_left_out(person, count):
    codes = derived_modalities.divided(person, count)
    kept = Counter(codes)
    assert len(codes) == count and kept[RGB] >= 1
    others = [kept[code] for code in (NIR, CP, SK)]
    assert sum(others) + kept[RGB] == count and max(others) - min(others) <= 1
    if count >= 4:
        assert min(others) >= 1
    if count >= 6:
        assert kept[RGB] == (count + 1) // 2
    assert codes == derived_modalities.divided(person, count)


def test_the_folder_holds_every_photograph_once_in_one_modality(cache, tmp_path):
    counts = {"ann": 7, "bob": 4, "cleo": 3, "dan": 1}
    source = people(tmp_path / "photographs", counts)
    home = derived_modalities.folder(source)
    rows = index(home)
    assert home.parent == cache and list(rows[0]) == ["path", "person", "camera", "modality", "text"]
    assert Counter(row["person"] for row in rows) == counts
    for person, count in counts.items():
        own = [row for row in rows if row["person"] == person]
        assert [row["modality"] for row in own] == [
            MODALITIES[code] for code in derived_modalities.divided(person, count)
        ]
        assert [int(row["path"].split("/")[-1].split(".")[0]) for row in own] == list(range(count))
    for row in rows:
        modality, person, name = row["path"].split("/")
        assert (modality, person) == (row["modality"], row["person"]) and row["camera"] == ""
        number = int(name.split(".")[0])
        original = pixels(source / person / f"{number}.png")
        if modality == "rgb":
            assert (home / row["path"]).read_bytes() == (source / person / f"{number}.png").read_bytes()
        else:
            code = MODALITIES.index(modality)
            again = derived_modalities.DERIVE[code](original, derived_modalities._rng(person, number))
            assert np.array_equal(pixels(home / row["path"]), again)
            assert row["text"] == ""
        assert bool(row["text"]) == (modality == "rgb" and person != "dan")
    on_disk = {p.relative_to(home).as_posix() for p in home.rglob("*.png")}
    assert on_disk == {row["path"] for row in rows}
    assert json.loads((home / "derived.json").read_text())["people"] == 4
    assert sum(bool(row["text"]) for row in rows) == 4 + 1 + 1


def test_it_is_made_once_and_anew_when_a_photograph_changes(cache, tmp_path):
    source = people(tmp_path / "photographs", {"ann": 4, "bob": 4})
    first = derived_modalities.folder(source)
    stamp = (first / "derived.json").stat().st_mtime_ns
    assert derived_modalities.folder(source) == first and (first / "derived.json").stat().st_mtime_ns == stamp
    Image.fromarray(photograph(77)).save(source / "ann" / "0.png")
    second = derived_modalities.folder(source)
    assert second != first
    of_bob = [[row for row in index(home) if row["person"] == "bob"] for home in (first, second)]
    assert of_bob[0] == of_bob[1]  # one person's records hang on nobody else
    Image.fromarray(photograph(78)).save(source / "ann" / "9.png")
    assert derived_modalities.folder(source) not in (first, second)


def test_a_caption_is_of_photographs_that_are_not_in_the_gallery(cache, tmp_path):
    source = people(tmp_path / "photographs", {"ann": 6})
    before = index(derived_modalities.folder(source))
    for i, code in enumerate(derived_modalities.divided("ann", 6)):
        if code == RGB:
            Image.fromarray(255 - photograph(1000 + i)).save(source / "ann" / f"{i}.png")
    after = index(derived_modalities.folder(source))
    assert [row["text"] for row in before] == [row["text"] for row in after]
    other = derived_modalities.divided("ann", 6).index(NIR)
    Image.fromarray(255 - photograph(2000)).save(source / "ann" / f"{other}.png")
    assert [row["text"] for row in after] != [row["text"] for row in index(derived_modalities.folder(source))]


# ---- mistakes


def test_mistakes_name_the_file(cache, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        derived_modalities.folder(tmp_path / "nowhere")
    (tmp_path / "empty" / "ann").mkdir(parents=True)
    with pytest.raises(UserError, match="no images"):
        derived_modalities.folder(tmp_path / "empty")
    source = people(tmp_path / "photographs", {"ann": 4})
    (source / "ann" / "2.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(UserError, match=r"ann/2\.png.*cannot be decoded"):
        derived_modalities.folder(source)
    Image.fromarray(photograph(1, 12, 40)).save(source / "ann" / "2.png")
    (source / "ann" / "3.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 unusable images:\n.*ann/2\.png.*40 x 12 pixels.*\n.*ann/3\.png: 0 bytes"):
        derived_modalities.folder(source)
    assert not [p for p in cache.iterdir() if p.is_dir()]  # nothing is left of what failed


# ---- images


def test_kuwahara_is_the_mean_of_the_square_that_varies_least():
    picture, radius = photograph(3, 14, 17), 2
    padded = np.pad(picture.astype(int), ((radius, radius), (radius, radius), (0, 0)), "edge")
    expected = np.zeros_like(picture)
    for y in range(14):
        for x in range(17):
            squares = []
            for dy in (0, radius):
                for dx in (0, radius):
                    square = padded[y + dy : y + dy + radius + 1, x + dx : x + dx + radius + 1]
                    squares.append((square.sum(-1).var(), square.reshape(-1, 3).mean(0)))
            least = min(squares, key=lambda s: round(s[0], 6))[1]
            expected[y, x] = np.floor(least + 0.5)
    assert np.array_equal(derived_modalities.kuwahara(picture, radius), expected)


@pytest.mark.parametrize(("code", "channels"), [(NIR, ()), (CP, (3,)), (SK, ())])
@pytest.mark.parametrize("size", [(112, 112), (40, 32), (16, 90)])
def test_derived_pictures_have_the_size_of_the_photograph_and_depend_on_the_generator_alone(code, channels, size):
    picture = photograph(5, *size)
    before = picture.copy()
    one, same, other = (derived_modalities.DERIVE[code](picture, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one.shape == (*size, *channels) and one.dtype == np.uint8
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    assert one.std() > 3 and np.array_equal(picture, before)


def test_images_and_captions_are_the_same_everywhere_and_belong_to_the_version(cache, tmp_path):
    """If they change on purpose, raise `VERSION` with them, and measure again what `reid_faces` publishes."""
    home = derived_modalities.folder(people(tmp_path / "photographs", {"ann": 7, "bob": 4}, height=112, width=112))
    seen = hashlib.sha256((home / "index.csv").read_bytes())
    for row in index(home):
        seen.update(pixels(home / row["path"]).tobytes())
    assert (derived_modalities.VERSION, seen.hexdigest()) == (
        1,
        "6ee7b3c0ef77f00fa4978d802251bd508d9bbc79c642516d36e49ec5929f86c0",
    )


# ---- on photographs of faces


@pytest.fixture(scope="module")
def faces(shared, tmp_path_factory):
    """Derived from fifteen people of LFW: folder, and rows of the index."""
    source = tmp_path_factory.mktemp("faces") / "people"
    source.mkdir()
    chosen = sorted((shared / "faces_lfw112" / "train").iterdir())[::20]
    for person in chosen:
        (source / person.name).symlink_to(person)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        home = derived_modalities.folder(source)
    return home, index(home)


def test_captions_tell_people_apart_better_than_chance(faces):
    """A bag of words of a caption finds the person's other captions: it describes somebody, not anybody."""
    _, rows = faces
    captions = [(row["person"], set(re.findall(r"[a-z]+", row["text"]))) for row in rows if row["text"]]
    hits, chance = [], []
    for i, (person, words) in enumerate(captions):
        others = [c for j, c in enumerate(captions) if j != i]
        near = max(others, key=lambda other: len(words & other[1]) / len(words | other[1]))
        hits.append(near[0] == person)
        chance.append(sum(other[0] == person for other in others) / len(others))
    assert np.mean(hits) > 4 * np.mean(chance)

"""People held out by a file of pairs: none of their images is trained on, whatever the file says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainkit.data.faces.dataset import Faces
from trainkit.data.leakage import leaks
from trainkit.errors import UserError

SIZE = 8
COUNTS = {"anna": 3, "ben": 4, "cleo": 5, "dora": 2, "0007": 3}


def picture(seed: int, size: tuple[int, int] = (SIZE, SIZE)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def people(tmp_path, monkeypatch, cache) -> Path:
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)
    for i, (person, count) in enumerate(COUNTS.items()):
        (tmp_path / "people" / person).mkdir(parents=True)
        for k in range(count):
            Image.fromarray(picture(100 * i + k)).save(tmp_path / "people" / person / f"{k}.png")
    return tmp_path / "people"


def pairs(people: Path, *lines: str) -> str:
    file = people.parent / "mine_pairs.csv"
    file.write_text("\n".join(["path_a,path_b,same", *lines]) + "\n")
    return str(file)


GOOD = ("ben/0.png,ben/2.png,1", "ben/0.png,0007/1.png,0", "0007/1.png,0007/2.png,1")


def test_everybody_whom_the_pairs_name_is_kept_from_training_with_all_images(people):
    opened = Faces(train=str(people), image_size=SIZE, hold_out=pairs(people, *GOOD), flip=False).open(0)
    assert opened.meta.classes == 3 and opened.meta.class_names == ("anna", "cleo", "dora")
    batch = opened.train.fetch(np.arange(opened.train.size), 0)
    seeds = {"anna": range(3), "cleo": range(200, 205), "dora": range(300, 302)}
    expected = [(label, picture(seed)) for label, name in enumerate(seeds) for seed in seeds[name]]
    assert batch["label"].tolist() == [label for label, _ in expected]
    for image, (_, pixels) in zip(batch["image"], expected, strict=True):
        assert (image.permute(1, 2, 0).numpy() == pixels).all()
    scored = opened.evaluations["held_out"]
    found = scored.fetch(np.arange(scored.size), 0)
    assert found["label"].tolist() == [-1] * 4 and scored.protocol.same.tolist() == [True, False, True]
    for image, seed in zip(found["image"], (100, 102, 401, 402), strict=True):
        assert (image.permute(1, 2, 0).numpy() == picture(seed)).all()
    assert scored.protocol.first.tolist() == [0, 0, 2] and scored.protocol.second.tolist() == [1, 2, 3]


def test_no_file_of_pairs_leaves_a_person_on_both_sides(people):
    """Drawn files of any pairs of the set: what is scored was never trained on, and nothing is lost but them."""
    draw = np.random.default_rng(0)
    ids = [f"{person}/{k}.png" for person, count in COUNTS.items() for k in range(count)]
    opened_some = 0
    for _ in range(30):
        chosen = draw.choice(len(ids), (draw.integers(1, 4), 2), replace=False)
        lines = [f"{ids[a]},{ids[b]},{int(ids[a].split('/')[0] == ids[b].split('/')[0])}" for a, b in chosen]
        faces = Faces(train=str(people), image_size=SIZE, hold_out=pairs(people, *lines))
        held = {ids[place].split("/")[0] for place in chosen.ravel()}
        if len(held) > len(COUNTS) - 2:
            with pytest.raises(UserError, match="for training"):
                faces.open(0)
            continue
        opened, opened_some = faces.open(0), opened_some + 1
        assert set(opened.meta.class_names) == set(COUNTS) - held
        train, scored = opened.train.held(), opened.evaluations["held_out"].held()
        assert not set(train.prints.tolist()) & set(scored.prints.tolist()) and not leaks(train, scored)
        assert opened.train.size == sum(count for person, count in COUNTS.items() if person not in held)
    assert opened_some > 5


def test_a_picture_of_two_people_is_found_by_the_check_of_a_set(people, tmp_path):
    """A file of pairs cannot help there: one image lies in two folders."""
    (people / "anna" / "9.png").write_bytes((people / "ben" / "2.png").read_bytes())
    faces = Faces(train=str(people), image_size=SIZE, hold_out=pairs(people, *GOOD))
    opened = faces.open(0)
    (leak,) = leaks(opened.train.held(), opened.evaluations["held_out"].held())
    assert leak.what == "copies" and leak.examples == ["ben/2.png = anna/9.png"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["ben/0.png,nobody/1.png,0"], r"1 image that the training set does not have: nobody/1\.png"),
        (["ben/0.png,ben/1.png,0"], r"1 pair in conflict with the folders:\n  line 2: ben/0\.png and ben/1\.png, 0"),
        (["ben/0.png,cleo/1.png,1"], "in conflict with the folders"),
        (["ben/0.png,cleo/1.png,0", "anna/0.png,dora/1.png,0"], "names 4 of 5 people, leaving 1 for training"),
        (["ben/0.png,ben/0.png,1"], "with itself"),
        ([], "no pairs"),
    ],
)
def test_pairs_that_do_not_fit_the_set_are_refused(people, lines, words):
    with pytest.raises(UserError, match=words):
        Faces(train=str(people), image_size=SIZE, hold_out=pairs(people, *lines)).open(0)


def test_the_words_of_a_recipe_have_to_fit_each_other(people):
    with pytest.raises(ValueError, match="hold_out is not set; set it to the people"):
        Faces(train="x", evaluate={"val": "held_out"})
    with pytest.raises(ValueError, match=r"evaluate\.held_out is not the"):
        Faces(train="x", evaluate={"held_out": "pairs.csv"}, hold_out="mine.csv")
    opened = Faces(
        train=str(people), image_size=SIZE, hold_out=pairs(people, *GOOD), evaluate={"val": "held_out"}
    ).open(0)
    assert list(opened.evaluations) == ["val"]


def test_digests_tell_who_is_trained_on_and_what_is_scored(people):
    def opened(*lines: str):
        found = Faces(train=str(people), image_size=SIZE, hold_out=pairs(people, *lines)).open(0)
        return found.meta.digest, found.evaluations["held_out"].digest

    first = opened(*GOOD)
    assert opened(*GOOD) == first
    shorter = opened(*GOOD[:2])
    assert shorter[0] == first[0] and shorter[1] != first[1], "the same people, other pairs"
    other = opened(*GOOD[:2], "ben/0.png,dora/1.png,0")
    assert other[0] != first[0] and other[1] != first[1]
    assert Faces(train=str(people), image_size=SIZE).open(0).meta.digest not in (first[0], other[0])
    Image.fromarray(picture(999)).save(people / "cleo" / "5.png")
    more = opened(*GOOD)
    assert more[0] != first[0] and more[1] == first[1], "what is scored is the same when more is trained on"


# How images become squares


def test_the_middle_square_is_cut_and_made_larger_or_smaller(tmp_path):
    for i, person in enumerate(("anna", "ben")):
        (tmp_path / "raw" / person).mkdir(parents=True)
        Image.fromarray(picture(i, (4, 6) if i else (20, 10))).save(tmp_path / "raw" / person / "0.png")
    opened = Faces(train=str(tmp_path / "raw"), image_size=SIZE, fit="crop", flip=False).open(0)
    images = opened.train.fetch(np.arange(2), 0)["image"].permute(0, 2, 3, 1).numpy()
    for image, pixels, box in zip(
        images, (picture(0, (20, 10)), picture(1, (4, 6))), ((0, 5, 10, 15), (1, 0, 5, 4)), strict=True
    ):
        expected = Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box)
        assert (image == np.asarray(expected)).all()

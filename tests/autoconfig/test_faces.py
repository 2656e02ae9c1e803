"""Recipes for people without a division, for faces that are not aligned, and for folders with a level too many."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import people_sets
import pytest
from click.testing import CliRunner
from runs import stripes

from trainkit.autoconfig import new_recipe
from trainkit.cli import main
from trainkit.config import loader
from trainkit.data import image_folder, pairs_csv, sources
from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("here")
RECIPES = Path(__file__).parents[2] / "recipes"


def fitted(recipe: str, data: str, new: str = "mine.yaml"):
    """The copy of a shipped recipe for other data, its text, and what was said of the data."""
    copied = new_recipe.copy(RECIPES / f"{recipe}.yaml", Path(new), data=data)
    return loader.load(new), Path(new).read_text(), copied.seen


def crowd(root: Path, counts: list[int], size: tuple[int, int] = (24, 24)) -> Path:
    for person, count in enumerate(counts):
        for n in range(count):
            people_sets.picture(root / f"p{person:02d}" / f"{n}.png", 100 * person + n, size)
    return root


def named(file: str) -> set[str]:
    with open(file, newline="") as text:
        return {name.split("/")[0] for line in list(csv.reader(text))[1:] for name in line[:2]}


def test_people_without_a_division_are_held_out_with_pairs_in_a_file_beside_the_recipe(here):
    crowd(here / "people", [4] * 12)
    recipe, text, said = fitted("face_teacher_lfw", "people")
    assert recipe.data.train == "people" and recipe.data.evaluate == {"val": "held_out"}
    assert recipe.data.hold_out == "people_pairs.csv" and recipe.best.metric == "val/accuracy"
    assert said[0] == (
        "people: 4 people of 12 are held out of training; people_pairs.csv has 48 pairs of them, "
        "half of the same person"
    )
    assert "# <- 4 people of 12, chosen at random; 48 pairs distinguish little; no person may be in two folders" in text
    opened = recipe.data.open(recipe.seed)
    held = named("people_pairs.csv")
    assert len(held) == 4 and opened.meta.classes == 8 and not held & set(opened.meta.class_names)
    assert opened.train.size == 32 and opened.evaluations["val"].size == 16
    protocol = opened.evaluations["val"].protocol
    assert len(protocol) == 48 and int(protocol.same.sum()) == 24
    assert recipe.data.missing() == []
    Path("people_pairs.csv").unlink()
    assert recipe.data.missing() == [f"data.hold_out: {here}/people_pairs.csv does not exist"]


def test_the_draw_repeats_and_a_file_that_is_there_is_kept(here):
    crowd(here / "people", [4] * 12)
    fitted("face_teacher_lfw", "people", "a.yaml")
    drawn = Path("people_pairs.csv").read_text()
    Path("people_pairs.csv").unlink()
    fitted("face_teacher_lfw", "people", "b.yaml")
    assert Path("people_pairs.csv").read_text() == drawn
    shorter = "".join(drawn.splitlines(keepends=True)[:41])
    Path("people_pairs.csv").write_text(shorter)
    recipe, text, said = fitted("face_teacher_lfw", "people", "c.yaml")
    assert Path("people_pairs.csv").read_text() == shorter and "as listed in an existing file" in text
    assert len(recipe.data.open(0).evaluations["val"].protocol) == 40 and "the pairs in people_pairs.csv" in said[0]
    Path("people_pairs.csv").write_text("path_a,path_b,same\nzoe/1.png,zoe/2.png,1\n")
    with pytest.raises(UserError, match=r"people_pairs\.csv: pairs of other images than those of people; .*move it"):
        fitted("face_teacher_lfw", "people", "d.yaml")
    assert not Path("d.yaml").exists()


def test_a_student_and_its_teacher_leave_out_the_same_people(here):
    crowd(here / "people", [4] * 12)
    recipe, _, _ = fitted("adadistill_lfw", "people")
    teacher = loader.load("mine_teacher.yaml")
    assert teacher.data == recipe.data and [file.name for file in here.glob("*pairs*")] == ["people_pairs.csv"]
    assert teacher.data.open(teacher.seed).meta.digest == recipe.data.open(recipe.seed).meta.digest


def test_people_with_one_image_are_in_pairs_of_two_people_alone(here):
    crowd(here / "people", [1, 6] * 10)
    fitted("face_teacher_lfw", "people")
    same, different = set(), set()
    with open("people_pairs.csv", newline="") as text:
        for one, other, label in list(csv.reader(text))[1:]:
            (same if label == "1" else different).update({one.split("/")[0], other.split("/")[0]})
    lonely = {f"p{person:02d}" for person in range(0, 20, 2)}
    assert not same & lonely and different & lonely


def test_more_people_are_held_out_where_a_fifth_gives_too_few_pairs(here):
    crowd(here / "people", [2] * 30)
    recipe, _, said = fitted("face_teacher_lfw", "people")
    assert said[0].startswith("people: 10 people of 30 are held out"), "ten pairs of one person"
    assert recipe.data.open(0).meta.classes == 20


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            [5, 5, 5],
            r"people: 3 people and no evaluation pairs; expected 4 or more: two for training, two for evaluation",
        ),
        ([1, 1, 1, 1, 1, 1], r"people: 4 people, 0 pairs of one of them; expected 10 pairs or more"),
    ],
)
def test_too_few_people_or_images_are_refused(here, counts, words):
    crowd(here / "people", counts)
    with pytest.raises(UserError, match=words):
        fitted("face_teacher_lfw", "people")
    assert not list(here.glob("*.yaml")) and not list(here.glob("*.csv"))


def test_four_people_are_enough(here):
    crowd(here / "people", [5] * 4)
    recipe, _, _ = fitted("face_teacher_lfw", "people")
    assert recipe.data.open(0).meta.classes == 2 and len(named("people_pairs.csv")) == 2


def test_files_about_a_split_are_called_by_the_set(here):
    crowd(here / "set" / "train", [4] * 8)
    recipe, _, _ = fitted("face_teacher_lfw", "set")
    assert recipe.data.train == "set#train" and Path(recipe.data.hold_out).name == "set_train_pairs.csv"


# Faces that are not aligned


def test_images_that_are_not_square_are_cut_and_that_is_said_and_marked(here):
    crowd(here / "people", [4] * 8, (60, 50))
    recipe, text, said = fitted("face_teacher_lfw", "people")
    assert recipe.data.fit == "crop" and recipe.data.image_size == 48
    assert "people: 32 of 32 images are not square; the largest centre square of each is used" in said
    assert "  fit: crop  # <- 32 of 32 images are not square: check that faces are centred" in text
    assert recipe.data.open(0).train.fetch(np.arange(2), 0)["image"].shape == (2, 3, 48, 48)
    recipe.data.fit = "square"
    with pytest.raises(UserError, match="50 x 60 pixels; expected 48 x 48; crop or align"):
        recipe.data.open(0)


# Folders with a level too many


def test_a_folder_around_the_folders_of_people_is_passed(here):
    crowd(here / "set" / "images", [4] * 8)
    (here / "set" / "README.txt").write_text("faces")
    (here / "set" / "lists").mkdir()
    recipe, _, said = fitted("face_teacher_lfw", "set")
    assert recipe.data.train == "set/images"
    assert said[0] == "set holds a single folder with the others: using set/images"
    with pytest.raises(UserError, match=f"{here}/set: no images; .*did you mean {here}/set/images\\?"):
        image_folder.open_folder(here / "set", nested=False)


def test_a_folder_around_the_folders_of_classes_or_of_splits_is_passed(here):
    stripes(here / "a" / "b" / "patterns", 6, 1)
    recipe, _, said = fitted("convnext", "a")
    assert recipe.data.train == "a/b/patterns" and said[0].endswith("using a/b/patterns")
    for seed, split in enumerate(("train", "val")):
        stripes(here / "set" / "images" / split, 6, seed)
    recipe, _, _ = fitted("convnext", "set", "other.yaml")
    assert recipe.data.train == "set/images#train" and recipe.data.evaluate == {"val": "set/images#val"}


def test_folders_of_one_class_of_tables_and_of_classes_are_left(here):
    stripes(here / "one", 3, 1)
    assert sources.only_way(here / "one") is None, "it holds the classes"
    people_sets.picture(here / "two" / "cat" / "a.png")
    assert sources.only_way(here / "two") is None, "one class"
    stripes(here / "three" / "images", 3, 1)
    assert sources.only_way(here / "three") == here / "three" / "images"
    (here / "three" / "metadata.csv").write_text("file_name,label\nimages/down/000.png,down\n")
    assert sources.only_way(here / "three") is None, "a table names the images"


# Real faces


@pytest.mark.slow
def test_real_faces_without_a_division_train_and_are_scored(here, shared, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(shared))
    recipe, _, _ = fitted("face_teacher_lfw", "faces_lfw112/train")
    assert recipe.data.fit == "square"
    opened = recipe.data.open(recipe.seed)
    held = named("faces_lfw112_train_pairs.csv")
    assert held and not held & set(opened.meta.class_names)
    words = ["train.length=8 steps", "evaluations={val: {at_end: true}}", "train.schedule.warmup.over=2 steps"]
    said = CliRunner().invoke(main.main, ["run", "mine.yaml", *words, "checkpoints.every=null"])
    assert said.exit_code == 0, said.output
    assert "Finished in " in said.output and "\nfinal " in said.output


@pytest.mark.slow
def test_real_faces_that_are_not_square_are_cut(here, shared):
    from PIL import Image

    for file in sorted((shared / "faces_lfw112" / "unaligned250").glob("*/*.jpg")):
        (here / "people" / file.parent.name).mkdir(parents=True, exist_ok=True)
        Image.open(file).crop((40, 10, 210, 240)).save(here / "people" / file.parent.name / file.name)
    recipe, _, _ = fitted("face_teacher_lfw", "people")
    words = ["train.length=8 steps", "evaluations={val: {at_end: true}}", "train.schedule.warmup.over=2 steps"]
    said = CliRunner().invoke(main.main, ["run", "mine.yaml", *words, "checkpoints.every=null"])
    assert recipe.data.fit == "crop" and said.exit_code == 0, said.output


def test_drawn_pairs_are_read_back_as_they_were_written(here):
    people = {f"p,{n}": [f"p,{n}/{k}.png" for k in range(4)] for n in range(5)}
    drawn = pairs_csv.draw(people, "here")
    Path("pairs.csv").write_text(pairs_csv.written(drawn))
    names, pairs = pairs_csv.read_names(Path("pairs.csv"), lambda name, where: None)
    read = [(names[a], names[b], int(s)) for a, b, s in zip(pairs.first, pairs.second, pairs.same, strict=True)]
    assert read == drawn

"""A table beside a folder of images: found, its columns guessed and printed, or refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import people_sets
import pytest
from click.testing import CliRunner

from trainkit.autoconfig import fit, new_recipe
from trainkit.cli import main
from trainkit.config import loader
from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("here")
CONVNEXT = Path(__file__).parents[2] / "recipes" / "convnext.yaml"


def images(root: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        people_sets.picture(root / name, seed, (40, 40))
    return root


def lines(file: Path, *rows: str) -> Path:
    file.write_text("\n".join(rows) + "\n")
    return file


def kaggle(root: Path) -> Path:
    """Images without classes in two folders, a table of the classes of one, and one to be filled in."""
    images(root, *(f"train/{k:03x}.png" for k in range(20)), *(f"test/{k:03x}t.png" for k in range(4)))
    lines(root / "labels.csv", "id,breed", *(f"{k:03x},{('pug', 'collie')[k % 2]}" for k in range(20)))
    lines(root / "sample_submission.csv", "id,pug,collie", *(f"{k:03x}t,0.5,0.5" for k in range(4)))
    return root


def fitted(data: str, new: str = "mine.yaml", **columns: str):
    copied = new_recipe.copy(CONVNEXT, Path(new), data=data, asked=fit.Asked(columns=columns))
    return loader.load(new), copied.seen


def test_a_table_beside_images_is_found_and_its_columns_are_printed_and_written(here):
    kaggle(here / "dogs")
    recipe, said = fitted("dogs")
    assert said[0] == (
        "dogs/labels.csv: images from the column id, classes from breed; --columns image=NAME,label=NAME changes that"
    )
    assert recipe.data.train == "dogs/labels.csv" and recipe.data.columns == {"image": "id", "label": "breed"}
    opened = recipe.data.open(0)
    assert opened.meta.class_names == ("collie", "pug")
    assert opened.train.size + opened.evaluations["val"].size == 20


def test_columns_of_the_command_come_before_guesses(here):
    root = images(here / "set", *(f"{k}.png" for k in range(12)))
    rows = [f"{k}.png,{('a', 'b')[k % 2]},{('x', 'y', 'z')[k % 3]}" for k in range(12)]
    lines(root / "all.csv", "file,colour,shape", *rows)
    with pytest.raises(
        UserError, match=r"several columns that may be the class: colour, shape; .*--columns label=colour"
    ):
        fitted("set")
    assert fitted("set", label="shape")[0].data.open(0).meta.class_names == ("x", "y", "z")
    said = CliRunner().invoke(main.main, ["cp", "convnext", "b.yaml", "--data", "set", "--columns", "label=colour"])
    assert said.exit_code == 0 and "classes from colour" in said.output
    assert loader.load("b.yaml").data.columns == {"image": "file", "label": "colour"}
    for given, text in (("label", "--columns label: what it is, and a column"),
                        ("label=colors", "no column 'colors'; expected one of its columns: file, col")):  # fmt: skip
        done = CliRunner().invoke(main.main, ["cp", "convnext", "c.yaml", "--data", "set/all.csv", "--columns", given])
        assert done.exit_code == 2 and text in done.output.replace("\n", " "), done.output
    assert not Path("c.yaml").exists()
    assert CliRunner().invoke(main.main, ["cp", "convnext", "c.yaml", "--columns", "label=a"]).exit_code == 2


def test_a_table_for_evaluation_beside_that_for_training_is_used(here):
    root = images(here / "set", *(f"images/{k}.png" for k in range(16)))
    rows = [json.dumps({"file": f"images/{k}.png", "species": ("a", "b")[k % 2]}) for k in range(16)]
    lines(root / "train.jsonl", *rows[:12])
    lines(root / "val.jsonl", *rows[12:])
    recipe, _ = fitted("set")
    assert (recipe.data.train, recipe.data.evaluate) == ("set/train.jsonl", {"val": "set/val.jsonl"})
    assert recipe.data.open(0).evaluations["val"].size == 4


def test_folders_of_classes_come_before_a_table_beside_them(here):
    root = images(here / "set", *(f"{name}/{k}.png" for name in ("cat", "dog") for k in range(6)))
    lines(
        root / "who.csv",
        "file,photographer",
        *(f"{name}/{k}.png,p{k % 2}" for name in ("cat", "dog") for k in range(6)),
    )
    recipe, _ = fitted("set")
    assert recipe.data.train == "set" and not recipe.data.columns


def test_several_tables_of_the_same_images_are_refused(here):
    root = images(here / "set", *(f"{k}.png" for k in range(8)))
    for name in ("one.csv", "two.csv"):
        lines(root / name, "file,kind", *(f"{k}.png,{'ab'[k % 2]}" for k in range(8)))
    with pytest.raises(UserError, match=r"several tables name its images: one\.csv, two\.csv; .*--data .*/one\.csv"):
        fitted("set")


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        (
            "name,tags",
            lambda k: ("insect ant", "insect bee", "bird")[k % 3],
            "tags: 'insect ant'; expected one class an",
        ),
        ("name,kind", lambda k: ("ant", "bee", "ant|bee")[k % 3], r"kind: 'ant\|bee'; expected one class an image"),
    ],
)
def test_several_classes_an_image_are_refused_and_that_is_said(here, header, row, said):
    root = images(here / "set", *(f"{k}.png" for k in range(12)))
    lines(root / "train.csv", header, *(f"{k}.png,{row(k)}" for k in range(12)))
    with pytest.raises(UserError, match=rf"{said}.*\(multi-label\) are not supported"):
        fitted("set")
    assert not Path("mine.yaml").exists()


def test_names_that_are_no_columns_of_images_leave_a_folder_as_it_was(here):
    root = images(here / "set", *(f"{k}.png" for k in range(8)))
    lines(root / "notes.csv", "who,when", "a,b")
    with pytest.raises(UserError, match="8 images, in no folder of a class"):
        fitted("set")

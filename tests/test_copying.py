"""A copied recipe: valid, without the old figures, and marked where the data is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit import config, copying
from trainkit.errors import UserError

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_copy_means_what_the_recipe_means_and_every_place_of_the_data_is_marked(recipe, tmp_path):
    for other in RECIPES:  # those that a recipe names are looked up beside it
        (tmp_path / other.name).write_bytes(other.read_bytes())
    marked = copying.copy(recipe, tmp_path / "mine.yaml")
    text = (tmp_path / "mine.yaml").read_text()
    assert config.dump(config.load(tmp_path / "mine.yaml")) == config.dump(config.load(recipe))
    lines = [line for line in text.splitlines() if line.endswith(copying.MARK)]
    assert len(lines) == marked == text.count(copying.MARK)
    keys = {line.split(":")[0].strip() for line in lines}
    assert {"name", "train"} <= keys and keys & {"image_size", "patch", "crop"}
    assert ("class_weights" in keys) == ("class_weights:" in recipe.read_text()), "of the classes, so of the data"
    assert ("best" in keys) == ("best:" in recipe.read_text())
    assert not keys & {"optim", "length", "batch_size", "schedule", "net", "student", "margin"}
    assert text.startswith(f"# Copied from {recipe.name}.\n")
    assert "# paper" not in text and "arXiv" not in text, "its figures were measured on other data"


def test_the_line_marked_in_data_is_not_the_name_of_its_kind(tmp_path):
    copying.copy(RECIPES[0], tmp_path / "mine.yaml")
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    assert "  name: faces" in lines and "  train: sample  # <- change" in lines
    assert "    recipe: face_teacher.yaml  # <- change" in lines, "a teacher of the old people"


def test_nothing_is_written_over_and_no_folder_is_made(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    with pytest.raises(UserError, match="already exists; name another file"):
        copying.copy(RECIPES[0], tmp_path / "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    with pytest.raises(UserError, match="no such folder"):
        copying.copy(RECIPES[0], tmp_path / "deep" / "mine.yaml")
    (tmp_path / "broken.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match=r"broken\.yaml"):
        copying.copy(tmp_path / "broken.yaml", tmp_path / "new.yaml")
    assert not (tmp_path / "new.yaml").exists() and not (tmp_path / "deep").exists()


def test_the_headline_and_the_header_of_a_recipe(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("# A recipe.\n#\n# paper   none\nname: r\n# not of the header\n")
    assert copying.headline(file) == "A recipe"
    assert copying.header(file) == "# A recipe.\n#\n# paper   none\n"
    file.write_text("name: r\n")
    assert copying.header(file) == ""
    for recipe in RECIPES:
        assert len(copying.headline(recipe)) > 20

"""The shipped recipes: each loads, says what it is for, and resolves to what tests/golden/ holds."""

import re
from pathlib import Path

import pytest

from trainkit.config.loader import RECIPES, brief, digest, dump, flat, load

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(RECIPES.glob("*.yaml"))
each_recipe = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_all_recipes_were_seen_and_each_has_a_golden_file_and_no_other():
    assert len(FILES) >= 2
    assert sorted(file.name for file in GOLDEN.glob("*.yaml")) == [file.name for file in FILES]
    others = [file for file in RECIPES.rglob("*") if file.is_file() and file not in FILES]
    assert others == [RECIPES / "README.md"], "a recipe in a subfolder"


@each_recipe
def test_a_recipe_resolves_to_its_golden_file(path, request):
    """A change of a default shows here, in every recipe that it reaches; `pytest --update-golden` accepts it."""
    resolved, golden = dump(load(path)), GOLDEN / path.name
    if request.config.getoption("--update-golden", default=False):
        golden.write_text(resolved, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == resolved


@each_recipe
def test_a_resolved_recipe_loads_back_to_the_same(path, tmp_path):
    recipe = load(path)
    for text in (brief(recipe), dump(recipe)):
        (tmp_path / path.name).write_text(text, encoding="utf-8")
        again = load(tmp_path / path.name)
        assert again == recipe
    assert (digest(again), flat(again)) == (digest(recipe), flat(recipe))


@each_recipe
def test_a_recipe_bears_the_name_of_its_file(path):
    assert load(path).name == path.stem


@each_recipe
def test_the_header_of_a_recipe_tells_paper_and_command(path):
    text = path.read_text(encoding="utf-8")
    header = text.split("\nname:")[0]
    assert all(line.startswith("#") for line in header.split("\n")), "the header is comments, down to `name:`"
    assert re.search(r"^# paper +\S.*(arXiv|doi|http|CVPR|ICCV|ECCV)", header, re.MULTILINE)
    for word in ("figure", "cost", "result"):
        assert re.search(rf"^# {word} +\S", header, re.MULTILINE), f"the header does not say {word}"
    (command,) = re.findall(r"^# (?:command|run) +(\S.*)", header, re.MULTILINE)
    assert command.startswith("accelerate launch ") and command.endswith(f"recipes/{path.name}")


@each_recipe
def test_a_recipe_states_only_what_differs_from_the_defaults_or_must_be_said(path):
    """Recipes stay short enough to be read at a glance; the resolved one shows all."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip() and not line.startswith("#")]
    assert len(lines) <= 60 and max(map(len, lines)) <= 120
    assert len(lines) < len(dump(load(path)).split("\n")) / 2

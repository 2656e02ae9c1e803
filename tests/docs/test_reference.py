"""The generated pages of the reference are what the code says, and leave nothing out."""

from __future__ import annotations

import re

import click
import pytest
from runs import ROOT

from docs import generate_reference
from docs.generators import commands, keys, message_sites
from docs.generators.markdown import REFERENCE, prose
from trainkit.cli.main import main
from trainkit.config import loader
from trainkit.errors import UserError

TEXT = {name: (REFERENCE / f"{name}.md").read_text(encoding="utf-8") for name in generate_reference.PAGES}


@pytest.mark.parametrize("name", generate_reference.PAGES)
def test_the_page_is_what_the_code_says(name):
    assert TEXT[name] == generate_reference.PAGES[name](), f"docs/reference/{name}.md is out of date: run make docs"


# Commands


def test_every_command_and_option_is_on_the_page_with_an_example():
    found = dict(commands.commands())
    assert len(found) > 20 and set(commands.EXAMPLES) == set(found) and set(commands.CODES) <= set(found)
    sections = dict(re.findall(r"^## trainkit ([a-z ]+)\n(.*?)(?=^## |\Z)", TEXT["cli"], re.MULTILINE | re.DOTALL))
    for name, command in found.items():
        options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
        words = [word for option in options for word in option.opts if word.startswith("--")]
        assert not [word for word in words if word not in sections[name]], name


def test_the_groups_have_no_commands_that_the_page_lacks():
    visible = [name for name, command in main.commands.items() if not command.hidden]
    assert {name.split()[0] for name, _ in commands.commands()} == set(visible)


# Keys


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_key_of_a_shipped_recipe_is_on_the_page(recipe):
    flat = loader.flat(loader.load(recipe))
    named = set(re.findall(r'<a id="[^"]+" name="([^" ]+)', TEXT["keys"]))
    named |= {block.path for block in keys.blocks()}
    sections = ("evaluations", "time_to", "downloads", "optim.groups")
    free = ("data.evaluate", "task.class_weights", "task.net.args", "data.columns")
    missing = [
        key
        for key in flat
        if not key.startswith((*sections, *free))
        and not key.endswith((".name", ".kind"))
        and re.sub(r"\.\d+(?=\.|$)", "", key) not in named
        and not any(key.startswith(f"{one}.") and one in named for one in (key.rpartition(".")[0],))
    ]
    assert not missing


def test_anchors_are_unique_and_defaults_are_those_of_the_schema():
    anchors = re.findall(r'<a id="([^"]+)"', TEXT["keys"])
    assert len(anchors) > 400 and len(anchors) == len(set(anchors))
    (row,) = re.findall(r'<a id="loader-prefetch".*', TEXT["keys"])
    assert row.split(" | ")[1:4] == ["whole number, 1 to 1,024", "`2`", "no"]
    (row,) = re.findall(r'<a id="train-length".*', TEXT["keys"])
    assert row.split(" | ")[1:4] == ["length", "required", "yes"]


def test_the_keys_are_described():
    rows = [line.split(" | ") for line in TEXT["keys"].splitlines() if line.startswith("| ") and "<a id" in line]
    bare = [cells[0] for cells in rows if len(cells) == 5 and not cells[4].strip("| ")]
    assert len(rows) > 400 and not bare


# Messages


def shown(text: str) -> bool:
    """Return whether a message is on the page, whatever stands where it has `…`."""
    plain = re.sub(r"[\\|]", "", TEXT["messages"])
    return text in plain


@pytest.mark.parametrize(
    "words, part",
    [
        (["nowhere.yaml"], "no such file"),
        (["recipes/convnext.yaml", "optim.lr"], "write it like optim.lr=0.05"),
        (["recipes/convnext.yaml", "optim.nesterov=true", "optim.name=sgd", "optim.momentum=0"], "nesterov is true"),
    ],
)
def test_a_message_that_is_printed_is_on_the_page(words, part):
    with pytest.raises(UserError, match=re.escape(part)):
        loader.load(ROOT / words[0], words[1:])
    assert shown(part)


def test_texts_are_read_from_all_forms_of_an_expression(tmp_path):
    source = """
WORDS = "fixed"


def check(value, many):
    found = f"{value} is no word" if many else "nothing"
    raise UserError(f"key {value}", found, expected=WORDS, remedy="write " + "one")


def __post_init__(self):
    raise ValueError(f"x is {self.x!r}; a y is needed")


def other(log):
    log.warning("%s of %d lost", 1, 2)
"""
    folder = tmp_path / "trainkit"
    folder.mkdir()
    (folder / "some.py").write_text(source)
    file = folder / "some.py"
    root, message_sites.ROOT = message_sites.ROOT, tmp_path
    try:
        found = {(m.where, m.found, m.expected, m.remedy) for m in message_sites.in_file(file)}
    finally:
        message_sites.ROOT = root
    assert found == {
        ("key …", "… is no word", "fixed", "write one"),
        ("key …", "nothing", "fixed", "write one"),
        ("", "x is …; a y is needed", "", ""),
        ("", "… of … lost", "", ""),
    }


def test_the_page_has_most_places_of_the_source():
    found = list(message_sites.messages())
    assert len({(m.module, m.found, m.expected) for m in found}) > 900


def test_only_code_is_markup():
    assert prose("a*b_c `d*e` <x> [y]") == "a\\*b_c `d*e` &lt;x> \\[y\\]"

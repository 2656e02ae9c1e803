"""The generated pages of the reference are what the code says, and leave nothing out."""

from __future__ import annotations

import re

import click
import pytest
from runs import ROOT

from docs import generate_reference
from docs.generators import commands, keys
from docs.generators.markdown import REFERENCE, prose
from trainkit.config import loader

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


# Keys


def test_every_key_of_a_shipped_recipe_is_on_the_page():
    flat = {key for file in (ROOT / "recipes").glob("*.yaml") for key in loader.flat(loader.load(file))}
    named = set(re.findall(r'<a id="[^"]+" name="([^" ]+)', TEXT["keys"]))
    named |= {block.path for block in keys.blocks()}
    sections = ("evaluations", "downloads", "optim.groups")
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


def test_only_code_is_markup():
    assert prose("a*b_c `d*e` <x> [y]") == "a\\*b_c `d*e` &lt;x> \\[y\\]"

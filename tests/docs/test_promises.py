"""What the pages on faults promise in numbers, keys, tags and exit codes is what the code has."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from runs import ROOT

from trainkit.config import loader

FILES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "README_zh", "SECURITY"))]
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in FILES}
ALL = re.sub(r"(?<!\n)\n *(?=[^\s|#-])", " ", "\n".join(PAGES.values()))
"""All pages, each paragraph on a line of its own."""
GENERATED = ("docs/reference/keys.md",)
RECIPE = ROOT / "recipes" / "adadistill.yaml"
KEY = r"(?:train|loader|device|limits|checkpoints|log|integrity)\.[a-z_0-9.]*[a-z_0-9]"


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """Every key of a shipped recipe; those of blocks that it leaves out are set here."""
    found = loader.flat(loader.load(RECIPE, ["log.profile={at: 200}"]))
    return found | dict.fromkeys(("train.schedule", "train.schedule.warmup", "log.profile"))


@pytest.fixture(scope="module")
def source() -> set[str]:
    """Every string of the source."""
    files = sorted((ROOT / "trainkit").rglob("*.py"))
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_key_that_is_named_is_one_and_takes_what_it_is_shown_with(defaults):
    files = ("train.rec", "train.idx", "train.py", "train.csv", "train.parquet", "integrity.json")
    shown = set()
    for page, text in PAGES.items():
        named = re.findall(rf"`({KEY})(?:(?:=|: )([^`]+))?`", text)
        assert not [key for key, _ in named if key not in defaults and key not in files], page
        shown |= {(key, value.strip('"')) for key, value in named if value}
    for key, value in sorted(shown):
        loader.load(RECIPE, [f"{key}={value}"])


def test_every_default_that_is_named_is_the_default(defaults):
    """`limits.stop` (25 s), and the table of keys."""
    for page, text in PAGES.items():
        for key, value in re.findall(rf"`({KEY})`,? \(?(\d+ (?:s|min)|\d+%)", text):
            assert defaults[key] == value, (page, key)


def test_tables_of_keys_have_their_defaults(defaults):
    words = {"none": "None", "what the launcher set": "None", "true": "True", "false": "False"}
    seen = 0
    for line in "\n".join(text for page, text in PAGES.items() if page not in GENERATED).splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) < 3 or not re.match(rf"`{KEY}`", cells[0]):
            continue
        keys = re.findall(r"`([a-z_0-9.]+)`", cells[0])
        keys = [key if "." in key else f"{keys[0].partition('.')[0]}.{key}" for key in keys]
        said = cells[1].replace("`", "").split(", ")
        for key, value in zip(keys, said * (len(keys) if len(said) == 1 else 1), strict=True):
            assert str(defaults[key]) == words.get(value, value), key
            seen += 1
    assert seen >= 14


def test_what_a_resumed_run_may_have_otherwise_is_what_makes_no_other_experiment():
    def free(block: Any, above: str = "") -> set[str]:
        found = set()
        for f in fields(block):
            if f.metadata.get("hash") is False:
                found.add(above + f.name)
            elif is_dataclass(value := getattr(block, f.name)):
                found |= free(value, f"{above}{f.name}.")
        return found

    (said,) = re.findall(r"^These keys may differ: (.*?)\.$", ALL, re.MULTILINE)
    listed = re.findall(r"`([^`]+)`", said)
    assert len(listed) == len(set(listed)) and set(listed) == free(loader.load(RECIPE))


def test_every_tag_and_event_that_is_named_is_set_somewhere(source):
    modules = {"trainkit.rng", "trainkit.train"}
    named = {name for pair in re.findall(r"`(trainkit\.[a-z_]+)`|\bevent `([a-z_]+)`", ALL) for name in pair if name}
    assert not named - modules - source

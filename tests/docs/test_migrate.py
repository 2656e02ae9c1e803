"""Pages for those who come from other trainers: every override that they name is one that a recipe takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from runs import ROOT

from trainkit.config import loader
from trainkit.errors import UserError

FOLDER = ROOT / "docs" / "how-to" / "migrate"
RECIPES = (
    "convnext",
    "convnext_imagenet",
    "face_teacher_ms1mv2",
    "adadistill_adaface_ms1mv2",
    "tom500_full",
    "segment",
)
RECIPES += ("reid", "eye_state")
KEY = r"(?:name|seed|task|data|optim|train|evaluations|best|stop_when|checkpoints|log|loader|device)"
VALUES = {
    "train.rec",
    "train.idx",
    "KEY=VALUE",
    "data.train=DatasetXXX_NAME",
    "data.train=DIR",
    "task.net.weights=FILE",
    "data.train=flowers/train",
}


def named(page: Path) -> list[str]:
    """Keys and overrides in the cells for trainkit, and in the text, of a page."""
    lines = [line.split("|")[2] if line.startswith("|") else line for line in page.read_text("utf-8").splitlines()]
    prose = re.sub(r"^```.*?^```$", "", "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
    return [word for word in re.findall(r"`([^`\n]+)`", prose) if re.fullmatch(rf"{KEY}(\.\w+)*(=.+)?", word)]


def takes(override: str) -> bool:
    """True where a recipe has the key, with the value where there is one."""
    key, equals, value = (
        "".join(shlex.split(override)).partition("=") if '"' not in override else override.partition("=")
    )
    value = value.strip('"')
    for name in RECIPES:
        file = ROOT / "recipes" / f"{name}.yaml"
        try:
            settings = loader.flat(loader.load(file))
            if not equals:
                if any(known == key or known.startswith(f"{key}.") for known in settings):
                    return True
                continue
            loader.load(file, [f"{key}={value}"])
        except UserError:
            continue
        return True
    return False


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_every_key_and_override_is_one_that_a_recipe_takes(page):
    words = [word for word in named(page) if word not in VALUES]
    assert words or page.stem == "index"
    assert not [word for word in dict.fromkeys(words) if not takes(word)]


def test_a_key_that_no_recipe_has_is_found():
    assert takes("train.precision=bf16") and not takes("train.precision=bf17") and not takes("train.amp")

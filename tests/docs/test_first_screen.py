"""The first screen: length of the README, the citation file, the changelog."""

from __future__ import annotations

import re

import yaml
from runs import ROOT

from trainkit.environment.version import __version__

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short_and_shows_an_image_first():
    assert len(README.splitlines()) <= 150 and max(map(len, README.splitlines())) < 260
    assert README.index("![") < README.index("\n## ")


def test_the_readme_names_the_number_of_recipes():
    (number,) = re.findall(r"All (\d+) recipes", README)
    assert int(number) == len(list((ROOT / "recipes").glob("*.yaml")))


def test_the_version_is_in_the_changelog_and_in_the_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__ and citation["cff-version"] == "1.2.0" and citation["authors"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)[0] == __version__

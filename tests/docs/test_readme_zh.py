"""The Chinese README says what the English one says: sections, commands, tables, figures and links."""

import re

from tests.docs.test_readme import README, ROOT

ENGLISH, CHINESE = (path.read_text(encoding="utf-8") for path in (README, ROOT / "README_zh.md"))
FENCED = r"^```\w*\n.*?^```$\n"


def fenced(text: str) -> list[str]:
    return re.findall(FENCED, text, re.MULTILINE | re.DOTALL)


def sections(text: str) -> list[str]:
    """Prose and tables of each section, the first above any heading, without blocks."""
    return re.split(r"^## .*$", re.sub(FENCED, "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE)


FIGURE = r"\d+(?:[.,]\d+)+|\d{2,}"
"""Of two digits and more; smaller ones may be words."""


def tables(text: str) -> list[list[str]]:
    """What every cell of a table holds that is in no language: code, where links lead, figures."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[" ".join(sorted(re.findall(rf"`[^`]+`|\]\([^)]+\)|{FIGURE}", cell))) for cell in row] for row in rows]


def test_its_blocks_are_those_of_the_english_one_in_order():
    assert len(fenced(ENGLISH)) >= 6 and fenced(CHINESE) == fenced(ENGLISH)


def links(text: str) -> set[str]:
    return {link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("README")}


def test_its_sections_hold_the_same_tables_links_and_figures():
    for ours, theirs in zip(sections(CHINESE), sections(ENGLISH), strict=True):
        assert tables(ours) == tables(theirs) and links(ours) == links(theirs)
        assert set(re.findall(FIGURE, ours)) == set(re.findall(FIGURE, theirs))

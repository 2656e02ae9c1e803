"""The Chinese README shows the commands, recipes and links of the English one."""

import re

from test_readme import README, ROOT

CHINESE = ROOT / "README_zh.md"


def fenced(text: str) -> list[str]:
    return re.findall(r"^```\w*\n.*?^```$", text, re.MULTILINE | re.DOTALL)


def test_its_blocks_are_those_of_the_english_one_in_order():
    english, chinese = (fenced(page.read_text(encoding="utf-8")) for page in (README, CHINESE))
    at = [english.index(block) for block in chinese]
    assert at == sorted(at) and len(at) >= len(english) - 1, "all but the tree of files"


def test_it_names_the_same_recipes_and_its_links_lead_somewhere():
    english, chinese = (page.read_text(encoding="utf-8") for page in (README, CHINESE))
    assert set(re.findall(r"\(recipes/\w+\.yaml\)", chinese)) == set(re.findall(r"\(recipes/\w+\.yaml\)", english))
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", chinese) if "://" not in link]
    assert links and not [link for link in links if not (ROOT / link).exists()]

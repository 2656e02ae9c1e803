"""The documentation site: it builds without a warning, works offline, its links lead somewhere, its search works."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from runs import ROOT

DOCS = ROOT / "docs"
LOADED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "use": "href",
}
"""Elements by which a page loads something, and the attribute that says from where."""


def configuration() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_configuration", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONF = pytest.importorskip("docutils") and configuration()


class Page(HTMLParser):
    """What a page loads, links to, and what can be linked to in it."""

    def __init__(self, file: Path):
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.append(given["id"])
        if given.get(LOADED.get(tag, "")):
            self.loaded.append(given[LOADED[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html")}


def test_every_page_of_the_layout_is_there_and_in_the_contents_of_one_index():
    assert not sorted(CONF.planned() - CONF.pages())
    listed = [name for index in CONF.ORDER for name in CONF.contents(index)]
    assert len(listed) == len(set(listed))
    assert set(listed) | {"index"} == CONF.pages()


def test_the_pages_are_plain_markdown():
    """No page has a directive or role of Sphinx: GitHub shows them too."""
    texts = {page: page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert len(texts) > 20
    assert not [
        page
        for page, text in texts.items()
        if re.search(r"^(```|:::)\{|(?<![`\w])\{[a-z]+\}`\w|^\([\w-]+\)=", text, re.M)
    ]


def test_links_are_made_to_work_on_the_site():
    page = DOCS / "how-to" / "compare.md"
    written = "[a](../../CONTRIBUTING.md#style) [b](run.md#x) [c](../../recipes/reid.yaml) [d](../../recipes)"
    shown = CONF.rewritten(written + "\n```\n[f](../../CONTRIBUTING.md)\n```\n", page.parent, page)
    assert "[a](../project/contributing.md#style) [b](run.md#x) [c](../../recipes/reid.yaml)" in shown
    assert shown.endswith(" d\n```\n[f](../../CONTRIBUTING.md)\n```\n")


def test_a_notebook_becomes_a_page_without_being_run():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [{"text": ["1\n"]}]},
    ]
    shown = CONF.notebook(json.dumps({"cells": cells}))
    assert shown == "# Title\ntext\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"


@pytest.mark.slow
def test_every_link_within_the_site_leads_to_a_page_and_a_place_in_it(site, pages):
    broken = []
    for file, page in pages.items():
        for link in (*page.links, *page.loaded):
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (file.parent / unquote(to.path)).resolve() if to.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (to.fragment and target in pages and to.fragment not in pages[target].ids):
                broken.append((file.relative_to(site).as_posix(), link))
    assert len(pages) > 25 and not broken

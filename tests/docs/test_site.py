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
from browser import browser, installed
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
def test_nothing_is_loaded_from_elsewhere(site, pages):
    outside = [
        (file.name, what) for file, page in pages.items() for what in page.loaded if re.match(r"(\w+:)?//", what)
    ]
    assert not outside
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert not re.findall(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^"')]+""", styles)


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


@pytest.mark.slow
def test_no_id_is_twice_on_a_page(site, pages):
    twice = {file.name: {i for i in page.ids if page.ids.count(i) > 1} for file, page in pages.items()}
    assert not {name: ids for name, ids in twice.items() if ids}


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="no Chromium")
def test_the_search_page_leads_to_a_key_and_the_page_has_it(address):
    with browser() as page:
        page.open(f"{address}/search.html?q=loader.workers")
        page.until("document.querySelectorAll('#search-results li').length > 2")
        first = page.evaluate("document.querySelector('#search-results li a').href")
        assert first.endswith("reference/keys.html#loader-workers")
        page.open(first)
        page.until("!!document.querySelector('tr:has(:target)')")
        assert "workers" in page.evaluate("document.querySelector('tr:has(:target)').innerText")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

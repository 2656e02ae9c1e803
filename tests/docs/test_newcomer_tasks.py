"""Ten tasks of a newcomer: each is answered within two links of the first page, and by one search of the site."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import browser, installed
from runs import ROOT

DOCS = ROOT / "docs"
FIRST = 5
"""Results of a search that a reader looks at."""


@dataclass(frozen=True)
class Task:
    """What a newcomer wants, and where it is answered."""

    want: str
    path: tuple[str, ...]
    """Pages from the first one to the answer; one link leads from each to the next."""
    answer: str
    """Pattern of the text that answers it."""
    search: str
    part: str = ""
    """Anchor of the answer, where a link leads to a place in the page."""


TASKS = (
    Task(
        "train on my own images and compare two runs",
        ("tutorials/images.md",),
        r"trainkit cp [\s\S]*trainkit run [\s\S]*trainkit compare ",
        "own images",
    ),
    Task("resume after a kill", ("how-to/resume.md",), r"trainkit run .*--resume", "resume run"),
    Task("find out why it is slow", ("how-to/tune-speed.md",), r"(?i)bottleneck", "slow training"),
    Task("train on two GPUs", ("how-to/multi-gpu.md",), r"accelerate launch .*trainkit/run\.py", "several GPUs"),
    Task("run a sweep", ("how-to/sweep.md",), r"trainkit sweep \w+ \S+=\S+,\S+", "sweep"),
    Task("serve a model", ("how-to/serve.md",), r"mlflow models serve", "serve model"),
    Task("add a metric", ("how-to/extend.md",), r"(?i)metric", "add metric"),
    Task("find an error", ("how-to/troubleshoot.md",), r"unknown key", "fix error"),
    Task("look up a key", ("reference/keys.md",), r'id="loader-workers"', "loader.workers", "loader-workers"),
    Task(
        "migrate a command of timm",
        ("how-to/migrate/index.md", "how-to/migrate/timm.md"),
        r"--(?:batch-size|epochs|lr|amp)",
        "timm train migrate",
    ),
)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.want)


def linked(page: Path) -> set[str]:
    """Pages of the documentation that a page links to."""
    links = re.findall(r"\]\(([^)\s#:]+)", page.read_text(encoding="utf-8"))
    return {os.path.relpath(os.path.normpath(page.parent / link), DOCS) for link in links}


def test_there_are_ten():
    assert len(TASKS) == len({task.want for task in TASKS}) == 10


@each_task
def test_two_links_lead_from_the_first_page_to_the_answer(task):
    assert len(task.path) <= 2
    at = DOCS / "index.md"
    for step in task.path:
        assert step in linked(at)
        at = DOCS / step
    assert at.is_file(), f"{step} is not written yet"
    assert re.search(task.answer, at.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="no Chromium")
def test_one_search_leads_to_each_answer(address):
    missing = {}
    with browser() as page:
        for task in TASKS:
            wanted = task.path[-1].replace(".md", ".html") + (f"#{task.part}" if task.part else "")
            page.open(f"{address}/search.html?q={quote(task.search)}")
            page.until("/found|did not match/.test(document.querySelector('.search-summary')?.innerText)")
            page.settle()
            links = page.evaluate("[...document.querySelectorAll('#search-results li > a')].map(a => a.href)")
            found = [link.removeprefix(f"{address}/").split("?")[0] for link in links[:FIRST]]
            exact = [link if task.part else link.partition("#")[0] for link in found]
            if wanted not in exact:
                missing[task.want] = (task.search, found)
    assert not missing

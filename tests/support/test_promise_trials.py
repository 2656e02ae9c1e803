"""Trials of promises are counted, those that fail fail their test, and a soak says what came of all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import soak
from promise_trials import recorded
from runs import ROOT

TESTS = """
import pytest

def test_odd(promise):
    for seed in promise.trials("A10", "seeds are even", few=3, many=6):
        with promise.trial(seed):
            assert seed % 2 == 0, "odd"

def test_good(promise):
    for case in promise.trials("A2", "cases are short", of=["a", "bc"]):
        with promise.trial(case):
            assert len(case) < 3

@pytest.mark.slow
def test_few(promise):
    for seed in promise.trials("A2", "seeds are few", few=2, many=4):
        with promise.trial(seed):
            assert seed < 10

def test_without(promise):
    pass

def test_forgotten(promise):
    for seed in promise.trials("A3", "forgotten", few=1, many=1):
        pass

def test_other():
    raise AssertionError("is not of a soak")
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    return tmp_path


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "promise_trials", "-q", *words]
    environment = {"PYTHONPATH": str(ROOT / "tests" / "support"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_soak_counts_trials_in_parts_and_names_the_seeds_that_fail(tests):
    kept = tests / "kept.jsonl"
    done = pytest_in(tests, "--soak", "--promises", "kept.jsonl", "-n", "2")
    assert done.returncode == 1
    assert "A10 (seeds are even): 3 of 6 trials failed" in done.stdout and "  5: odd" in done.stdout
    assert "no trial was made" in done.stdout and "A3: no trial was made of 0" in done.stdout
    assert "is not of a soak" not in done.stdout and "2 passed" in done.stdout
    found = recorded(kept)
    odd, good, few = (found[f"test_it.py::test_{name}"] for name in ("odd", "good", "few"))
    assert odd["promises"][0]["trials"] == 6 and list(odd["promises"][0]["failed"]) == ["1", "3", "5"]
    assert not odd["passed"] and good["passed"] and few["promises"][0]["seeds"] == [0, 3]

    with kept.open("a") as file:
        file.write('{"test": "cut sho')
    again = pytest_in(tests, "--soak", "--promises", "kept.jsonl", "--draw", "2", "-p", "no:xdist")
    assert "2 deselected" not in again.stdout and "test_good" not in again.stdout, "what passed is not run again"
    assert recorded(kept)["test_it.py::test_odd"]["promises"][0]["seeds"] == [0, 5, 2_000_003, 2_000_005]

    page = tests / "page.md"
    page.write_text(f"above\n{soak.BEGIN}\nold\n{soak.END}\nbelow\n")
    soak.write(page, soak.summary(recorded(kept)))
    rows = [line for line in page.read_text().splitlines() if line.startswith("| A")]
    assert rows == [
        "| A2 | cases are short | 2 | 0 | every case |",
        "| A2 | seeds are few | 4 | 0 | 0 to 3 |",
        "| A3 | forgotten | 0 | 0 | none |",
        "| A10 | seeds are even | 9 | **5**: 1, 3, 5, 2000003, 2000005 | 0 to 5, 2000003 to 2000005 |",
    ]
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "15 trials in 5 tests, 5 failures" in text and "Failed: `test_it.py::test_odd`." in text


def test_the_page_has_a_place_for_the_table():
    text = (ROOT / "docs" / "project" / "reliability.md").read_text()
    assert text.count(soak.BEGIN) == text.count(soak.END) == 1

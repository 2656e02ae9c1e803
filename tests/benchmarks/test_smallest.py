"""Every benchmark runs as its documentation says, once, at its smallest size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTEST = ["--rounds", "1"]
CONTESTS = {
    "margin_head": ["--cases", "frozen 85742"],
    "step": [],
    "samplers": [],
    "inputs": [],
    "volume_reading": ["--cases", "tom500"],
    "teacher": [],
    "checkpoints": [],
    "tracking_cost": [],
    "startup": ["--cases", "help", "recipe error"],
}
SCRIPTS = {
    "pair_intervals": ["--sets", "4", "--draws", "20", "--people", "20", "--person", "0"],
    "photographs": ["--sets", "cats", "--seeds", "0", "--side", "32", "--rows"],
}
SHARED = {"contest", "suite", "results"}
"""What contests and measurements import, and `suite`, which runs contests."""


def test_every_script_is_listed():
    listed = {*CONTESTS, *SCRIPTS}
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - SHARED == listed


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*CONTESTS, *SCRIPTS])
def test_a_benchmark_runs(name, tmp_path):
    options = CONTEST + CONTESTS[name] if name in CONTESTS else SCRIPTS[name]
    if name == "photographs":
        options = [*options, str(tmp_path / "rows.jsonl")]
        if not (ROOT.parent / "shared" / "data").is_dir():
            pytest.skip("no ../shared/data")
    store = {"TRAINKIT_STORE": str(tmp_path / "store"), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options],
        env={**os.environ, **store},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = [line for line in ran.stdout.splitlines() if line.startswith("|")]
    assert len(table) > 2, ran.stdout
    missing = [line for line in ran.stdout.splitlines() if " was not measured: " in line]
    assert all("No module named" in line for line in missing), missing

"""Each rehearsal runs at a hundredth of its size, agrees with its peer where both compute one thing, and is resumed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("faces", "images", "people_and_scenes", "volumes")


def test_every_rehearsal_is_listed_here_and_in_the_makefile():
    files = {file.stem for file in (ROOT / "benchmarks" / "rehearsals").glob("*.py")}
    assert files == {*NAMES, "measuring", "sharded_heads"}
    (line,) = re.findall(r"^REHEARSALS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert sorted(line.split()) == sorted(NAMES)


def rehearse(name: str, home: Path) -> tuple[dict[str, list[str]], str]:
    """Return the rows of the table by the name of their side, and what was said on the way."""
    command = [sys.executable, "-m", f"benchmarks.rehearsals.{name}", "--scale", "0.01", "--home", str(home)]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines() if line[:1] == "|"]
    return {row[0]: row for row in cells[2:]}, ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", NAMES)
def test_a_hundredth_is_rehearsed_and_not_measured_twice(name, tmp_path):
    rows, _ = rehearse(name, tmp_path)
    assert [*rows] == [*import_module(f"benchmarks.rehearsals.{name}").SIDES]
    again, said = rehearse(name, tmp_path)
    assert again == rows and "load" not in said
    sizes = {side: row[1] for side, row in rows.items()}
    if name == "faces":
        assert "the bits of the whole run" in sizes["killed by SIGKILL, resumed"], sizes
    if name == "images":
        assert len({sizes[f"evaluated by {many} processes"].partition(" in ")[0] for many in (1, 2, 4)}) == 1, sizes
    if name == "people_and_scenes":
        ours, theirs = (sizes[side].partition("mAP ")[2] for side in ("15 subsets, scored", "numpy, 15 subsets"))
        assert float(ours) == pytest.approx(float(theirs), abs=2e-4), sizes
    if name == "volumes":
        ours, theirs = (
            sizes[side].partition("HD95 of the first ")[2].split()[0] for side in ("scored", "MONAI, scored")
        )
        assert float(ours) == pytest.approx(float(theirs), abs=0.02), sizes

"""Trainings without what only Linux has, and in other surroundings: each ends with the bits of one that had it.

Parts of the system are hidden from a new process (`support/hidden`), which trains, is told to stop, and goes on. No
test ran on macOS.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from runs import PLUGIN, ROOT, TOY, Ran, all_same, newest, own_store, run, spawn

SUPPORT = ROOT / "tests" / "support"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database) -> Ran:
    """The run that nobody interrupts, with everything that Linux has."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        return run()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_without_what_macos_lacks_a_training_is_stopped_and_goes_on(store, whole, workers):
    path = os.pathsep.join(map(str, (SUPPORT / "hidden", SUPPORT, PLUGIN, ROOT)))
    command = [sys.executable, str(SUPPORT / "stop_and_resume.py"), "5", str(TOY), "--plugin", "toy"]
    env = {**os.environ, "PYTHONPATH": path, "HIDDEN": "macos", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*command, f"loader.workers={workers}"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    said, ran = done.stdout + done.stderr, Ran(0, newest())
    assert "not on Linux: if the launcher is killed, stop this process yourself" in said and "Traceback" not in said
    assert ran.folder.info().status == "FINISHED" and ran.history.series("train/loss")[0][-1] == 12
    assert all_same(ran, whole) and ran.repeatable == whole.repeatable


def test_what_is_said_to_be_hidden_is():
    code = (
        "import os; from pathlib import Path; print(hasattr(os, 'memfd_create')); Path('/proc/self/stat').read_text()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT / "hidden"), str(ROOT)]), "HIDDEN": "macos"}
    # As a module of trainkit: from others nothing is hidden.
    words = [sys.executable, "-c", f"exec({code!r}, {{'__name__': 'trainkit.test'}})"]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "False" and "FileNotFoundError" in done.stderr


@pytest.mark.slow
def test_a_run_is_the_same_in_another_locale_encoding_and_time_zone(store, tmp_path):
    """Texts of a recipe that no ASCII holds, where the system's encoding is ASCII, and a day that is another."""
    recipe = tmp_path / "é中.yaml"
    recipe.write_text("# Kreuzentropie für é中\n" + TOY.read_text(), encoding="utf-8")
    surroundings = {
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii",
        "TZ": "Pacific/Kiritimati",
    }
    done = spawn(1, str(recipe), "--plugin", "toy", "train.length=4 steps", TRAINKIT_STORE=str(store), **surroundings)
    assert done.returncode == 0, done.stderr
    first = Ran(0, newest())
    done = spawn(1, str(TOY), "--plugin", "toy", "train.length=4 steps", TRAINKIT_STORE=str(store))
    assert done.returncode == 0, done.stderr
    second = Ran(0, newest())
    assert first.folder.name != second.folder.name and all_same(first, second)
    assert first.repeatable == second.repeatable

"""Trainings without what only Linux has: each ends with the bits of one that had it.

Parts of the system are hidden from a new process (`support/hidden`), which trains, is told to stop, and goes on. No
test ran on macOS or on Windows.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
from runs import PLUGIN, ROOT, TOY, Ran, _port, all_same, newest, own_store, run, spawn

SUPPORT = ROOT / "tests" / "support"
NO_LAUNCHER = "not on Linux: if the launcher is killed, stop this process yourself"
PARTS = {
    "resource,fcntl,os.register_at_fork,groups,flags,users,clocks,/proc": [],
    "os.fork,spawn": [],
    "spawn": [],
    "signals": [],
    "calls": [],
    "maps,os.memfd_create": [],
    "ctypes.CDLL": [NO_LAUNCHER],
    "macos": [NO_LAUNCHER],
    "windows": [NO_LAUNCHER],
}
"""What is hidden, and what is said then."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database) -> Ran:
    """The run that nobody interrupts, with everything that Linux has."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        return run()


def stopped_and_resumed(hidden: str, *words: str) -> tuple[Ran, str]:
    """The run of a process from which something is hidden, and what was said."""
    path = os.pathsep.join(map(str, (SUPPORT / "hidden", SUPPORT, PLUGIN, ROOT)))
    command = [sys.executable, str(SUPPORT / "stop_and_resume.py"), "5", str(TOY), "--plugin", "toy", *words]
    env = {**os.environ, "PYTHONPATH": path, "HIDDEN": hidden, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return Ran(0, newest()), done.stdout + done.stderr


def assert_same(ran: Ran, whole: Ran) -> None:
    assert ran.folder.info().status == "FINISHED" and ran.history.series("train/loss")[0][-1] == 12
    assert all_same(ran, whole) and ran.repeatable == whole.repeatable


@pytest.mark.slow
def test_without_anything_that_windows_lacks_a_training_is_stopped_and_goes_on(store, whole):
    ran, said = stopped_and_resumed("windows")
    assert_same(ran, whole)
    assert NO_LAUNCHER in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("hidden", PARTS)
def test_without_a_part_of_linux_a_training_with_workers_is_stopped_and_goes_on(store, whole, hidden):
    ran, said = stopped_and_resumed(hidden, "loader.workers=1")
    assert_same(ran, whole)
    assert all(line in said for line in PARTS[hidden]) and "Traceback" not in said


def hides(hidden: str, code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT / "hidden"), str(ROOT)]), "HIDDEN": hidden}
    # As a module of trainkit: from others nothing is hidden.
    words = [sys.executable, "-c", f"exec({code!r}, {{'__name__': 'trainkit.test'}})"]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("hidden", "code", "said"),
    [
        ("windows", "import fcntl", "ModuleNotFoundError: No module named 'fcntl'"),
        ("windows", "from pathlib import Path; Path('/proc/self/stat').read_text()", "FileNotFoundError"),
        (
            "windows",
            "import os, signal, multiprocessing as m; print(hasattr(os, 'fork'), hasattr(signal, 'SIGKILL'),"
            " hasattr(signal, 'SIGTERM'), m.get_all_start_methods())",
            "False False True ['spawn']",
        ),
    ],
)
def test_what_is_said_to_be_hidden_is(hidden, code, said):
    assert hides(hidden, code).startswith(said)


EVERY_MODULE = f"""
import importlib, pkgutil, trainkit
for found in pkgutil.walk_packages([{str(ROOT / "trainkit")!r}], "trainkit."):
    importlib.import_module(found.name)
print("all")
"""


@pytest.mark.slow
def test_every_module_can_be_imported_on_windows():
    assert hides("windows", EVERY_MODULE).splitlines()[-1] == "all"


COMMANDS = """
import sys
from trainkit.cli.main import main
codes = []
def command(*words):
    try:
        main(list(words))
    except SystemExit as leaving:
        codes.append((words[0], leaving.code))
toy = [sys.argv[1], "--plugin", "toy"]
for verb in ("check", "preflight", "syncs"):
    command(verb, *toy)
command("run", *toy, "train.length=4 steps", "log.ceilings=measure")
command("evaluate", "toy", "--plugin", "toy")
for verb in ("show", "sync"):
    command(verb, *([] if verb == "sync" else ["toy"]))
command("ls")
command("bench", *toy)
print(codes, flush=True)
import os
os._exit(0)
"""


@pytest.mark.slow
def test_commands_start_and_end_on_windows(store):
    """All but those that take other data: what they import is imported by the test above."""
    path = os.pathsep.join(map(str, (SUPPORT / "hidden", PLUGIN, ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "HIDDEN": "windows", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([sys.executable, "-c", COMMANDS, str(TOY)], capture_output=True, text=True, env=env)
    codes = dict(ast.literal_eval(done.stdout.strip().splitlines()[-1]))
    assert codes.pop("bench") == 2 and "this system cannot freeze processes" in done.stderr
    assert set(codes.values()) == {0}, f"{codes}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_the_page_is_served_and_its_server_ended_with_its_children_on_windows(store):
    code = (
        "import psutil\nfrom trainkit.tracking import ui\nfrom trainkit.tracking.store import Store\n"
        "with ui.running(Store.locate(), PORT) as (server, page):\n"
        "    found = psutil.Process(server.pid).children(recursive=True) + [psutil.Process(server.pid)]\n"
        "print(len(found) > 1, any(one.is_running() and one.status() != 'zombie' for one in found))"
    )
    assert hides("windows", code.replace("PORT", str(_port()))).splitlines()[-1] == "True False"


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

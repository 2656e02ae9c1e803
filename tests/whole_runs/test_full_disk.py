"""A disk that is full: the training goes on where it can, ends in a sentence where not, and nothing written is lost."""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ROOT, TOY, Ran, all_same, left_alone, spawn
from small_disk import Disk, mounted

from trainkit.checkpoint import verification
from trainkit.tracking.run_folder import RunFolder

WORDS = ("checkpoints={every: 2 steps, keep_last: 3}", "log={every: 1 steps, figures: 4 steps, system_every: null}")
RUN = (str(TOY), "--plugin", "toy", *WORDS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database) -> Iterator[Ran]:
    """The same run where there is room."""
    with left_alone(tmp_path_factory.mktemp("whole"), database, *WORDS) as ran:
        yield ran


@pytest.fixture
def disk(tmp_path, database, monkeypatch) -> Iterator[Disk]:
    """One of 8 MB that holds an empty store."""
    with mounted(tmp_path / "disk", 8) as disk:
        (disk.seen / "store").mkdir()
        shutil.copy(database, disk.seen / "store" / "mlflow.db")
        monkeypatch.setenv("TRAINKIT_STORE", str(disk.place / "store"))
        yield disk


def seen(disk: Disk, out: Path) -> list[Ran]:
    """The runs on a disk, each in a copy that can be read at leisure; what is there must be readable."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(disk.seen / "store", out)
    with sqlite3.connect(out / "mlflow.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    found = [Ran(0, RunFolder(path)) for path in sorted(out.glob("runs/*")) if (path / "run.json").is_file()]
    for ran in found:
        ran.folder.info()
        if ran.folder.journal.exists():
            assert ran.history
        for path in ran.folder.checkpoints.glob("step-*"):
            assert verification.verify(path) == []
    return found


def rows(home: Path, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """What the store has of a run."""
    with sqlite3.connect(home / "mlflow.db") as database:
        found = database.execute(
            "SELECT key, step, value FROM metrics WHERE run_uuid = ? ORDER BY key, step", [run_id]
        ).fetchall()
    return {key: [(step, value) for name, step, value in found if name == key] for key, _, _ in found}


@pytest.mark.slow  # the end of a run waits 30 s for a store that takes nothing
def test_on_a_disk_with_little_room_a_run_ends_in_a_sentence_or_goes_on_and_is_resumed_to_the_same_bits(
    trials, disk, whole, tmp_path, database
):
    for seed in trials(4, 21):
        disk.empty()
        shutil.rmtree(disk.seen / "store")
        (disk.seen / "store").mkdir()
        shutil.copy(database, disk.seen / "store" / "mlflow.db")
        rooms = [120_000, 0, 40_000, 400_000, 5_000, 200_000, 800_000]
        room = rooms[seed % len(rooms)] + random.Random(seed).randrange(60_000)
        disk.fill(leave=room)
        first = spawn(1, *RUN, **disk.environment)
        print(f"{room:,} bytes: exit code {first.returncode}\n{first.stdout}{first.stderr}")
        assert first.returncode in (0, 2) and "Traceback" not in first.stderr
        if first.returncode:
            assert re.search(r"error: .*(No space left|MB free|is full).*; (free|make room)", first.stderr), (
                first.stderr
            )
        before = seen(disk, tmp_path / "before")
        disk.empty()
        if first.returncode:
            again = spawn(1, *RUN, "--resume-or-start", **disk.environment)
            print(again.stdout + again.stderr)
            assert again.returncode == 0
        elif "trainkit sync" in first.stdout:  # it finished, and there was no room for all of it in the store
            done = subprocess.run([*disk.within, sys.executable, "-m", "trainkit.cli.main", "sync"], cwd=ROOT)
            assert done.returncode == 0
        ran = max(seen(disk, tmp_path / "after"), key=lambda ran: ran.folder.info().started)
        assert ran.folder.info().status == "FINISHED" and len(before) <= 1
        assert all_same(ran, whole) and ran.repeatable == whole.repeatable
        stored = rows(tmp_path / "after", ran.folder.info().run_id)
        sent = {name: points for name, points in ran.in_mlflow.items() if name in ran.repeatable}
        assert sent and {name: stored.get(name) for name in sent} == sent

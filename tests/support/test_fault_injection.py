"""Faults strike where a plan says, in this process, in forks and in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fault_injection
import pytest
from fault_injection import environment, installed, struck
from runs import PLUGIN, ROOT, TOY, newest, start

import trainkit.checkpoint.storage
from trainkit.tracking.journal import Journal

SHORT = (str(TOY), "--plugin", "toy", "train.length=2 steps", "evaluations={}", "best=null")


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(fault_injection.NOTES, str(tmp_path / "notes"))
    return tmp_path / "notes"


def test_errors_are_raised_at_the_call_that_is_named_and_taken_back(tmp_path, notes):
    plain = trainkit.checkpoint.storage.newest_valid, os.mkdir, Journal.commit
    mkdir = {"at": ["os.mkdir", "os.rmdir"], "call": 2, "until": 3, "to": "made"}
    with installed(
        [
            {**mkdir, "do": "OSError 28"},
            {"at": "trainkit.checkpoint.storage.newest_valid", "do": "RuntimeError too bad"},
            {"at": "trainkit.tracking.journal.Journal.commit", "call": 1, "do": "MemoryError", "after": True},
        ]
    ):
        os.mkdir(tmp_path / "other")
        os.mkdir(tmp_path / "made")
        with pytest.raises(OSError, match="No space left"):
            os.rmdir(tmp_path / "made")
        with pytest.raises(OSError, match="No space left"):
            os.mkdir(tmp_path / "made2")
        os.rmdir(tmp_path / "made")
        with pytest.raises(RuntimeError, match="too bad"):
            trainkit.checkpoint.storage.newest_valid(tmp_path)
        journal = Journal(tmp_path / "journal.jsonl")
        journal.append(1, {"a": 1.0})
        with pytest.raises(MemoryError):
            journal.commit()
        assert b'"a":1.0' in journal.path.read_bytes(), "after the call"
        journal.close()
    assert (trainkit.checkpoint.storage.newest_valid, os.mkdir, Journal.commit) == plain
    assert [(fault["do"], fault["call"]) for fault in struck(notes)] == [
        ("OSError 28", 2), ("OSError 28", 3), ("RuntimeError too bad", 1), ("MemoryError", 1),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="cannot do 'dance'"), installed([{"at": "os.mkdir", "do": "dance"}]):
        os.mkdir(tmp_path / "x")


def test_a_hang_that_holds_the_interpreter_stops_every_thread_and_another_does_not():
    ticks: list[float] = []
    over = threading.Event()

    def tick():
        while not over.wait(0.01):
            ticks.append(time.monotonic())

    threading.Thread(target=tick, daemon=True).start()
    with installed(
        [{"at": "os.getpgrp", "call": 1, "do": "sleep 1.5"}, {"at": "os.ctermid", "call": 1, "do": "spin 1.5"}]
    ):
        gaps = []
        for function in (os.getpgrp, os.ctermid):
            ticks.clear()
            began = time.monotonic()
            function()
            while not ticks:
                time.sleep(0.001)
            gaps.append(ticks[0] - began)
    over.set()
    assert gaps[0] < 1.2 <= gaps[1]


def test_a_fork_is_killed_signalled_and_stopped_where_the_plan_says(store, tmp_path):
    notes = tmp_path / "notes"
    with start(
        1, *SHORT, plan=[{"at": "trainkit.checkpoint.storage.write", "call": 1, "do": "kill"}], notes=notes
    ) as run:
        assert run.wait() == [-signal.SIGKILL]
    assert [fault["at"] for fault in struck(notes)] == ["trainkit.checkpoint.storage.write"]
    assert newest().info().status == "RUNNING" and not list(newest().checkpoints.glob("step-*"))
    counted = tmp_path / "counted"
    with start(1, *SHORT, plan=[{"at": "toy.ToyTask.loss", "do": "note"}], notes=counted) as run:
        assert run.wait() == [0]
    assert [fault["call"] for fault in struck(counted)] == [4], "two updates of two micro-batches"
    with start(1, *SHORT, plan=[{"at": "trainkit.training.trainer.Trainer.fit", "do": "stop"}]) as run:
        state = Path(f"/proc/{run.pids[0]}/stat")
        end = time.monotonic() + 120
        while state.read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < end:
            time.sleep(0.02)
        run.kill(signal.SIGTERM)
        run.kill(signal.SIGCONT)
        assert run.wait() == [143]


def test_a_process_of_its_own_is_killed_at_an_import_and_in_a_module_that_it_imports_later(store, tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "support" / "fault_injection.py"), *SHORT]
    for at, call in (("import", 700), ("trainkit.distributed.runtime.Runtime.configure", 1)):
        notes = tmp_path / at
        plan = environment([{"at": at, "call": call, "do": "kill"}], notes)
        given = {**os.environ, "PYTHONPATH": str(PLUGIN), "ACCELERATE_USE_CPU": "true", **plan}
        done = subprocess.run(command, env=given, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert [(fault["at"], fault["call"]) for fault in struck(notes)] == [(at, call)]

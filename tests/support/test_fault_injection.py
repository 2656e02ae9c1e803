"""Faults strike where a plan says, in this process, in forks and in processes of their own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import fault_injection
import pytest
from fault_injection import installed, struck

import trainkit.checkpoint.storage
from trainkit.tracking.journal import Journal


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


@pytest.mark.slow
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

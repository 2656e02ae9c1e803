"""A run whose process was killed says so when it is started again, with what is known of its memory."""

from __future__ import annotations

import json
import signal

import pytest
from runs import TOY, newest, run, spawn, stop_after

from trainkit.experiments import post_mortem
from trainkit.tracking.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """A run that is RUNNING and logged step 7 last."""

    def make(status: str = "RUNNING") -> RunFolder:
        info = {"name": "a", "recipe": "a", "recipe_hash": "", "seed": 0, "started": 1e9, "status": status}
        (tmp_path / "run.json").write_text(json.dumps({**info, "pid": 4711, "host": "here"}))
        memory = {"system/rss_gb": 3.25, "system/system_memory_usage_percentage": 97.0}
        lines = [
            {"t": 10**12, "step": 90, "m": {"system/rss_gb": 1.5}},
            {"t": 10**12, "step": 7, "m": {"train/loss": 0.5}},
            {"t": 10**12, "step": 91, "m": memory},
        ]
        (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t": 1, "st')
        return RunFolder(tmp_path)

    return make


def test_it_says_how_far_it_came_and_what_memory_it_held(folder):
    said = post_mortem.cause_of_death(folder())
    assert "process 4711 on here ended without a message, at step 7 or later, last seen at 2001-09-" in said
    assert "killed (signal 9), perhaps out of memory, or the machine was restarted" in said
    assert "(it used up to 3.25 GB, up to 97 % of the machine's memory was in use)" in said


@pytest.mark.parametrize("status", ["KILLED", "FAILED", "FINISHED"])
def test_a_run_that_said_how_it_ended_is_not_spoken_of(folder, status):
    assert post_mortem.cause_of_death(folder(status=status)) == ""


@pytest.mark.usefixtures("store")
def test_a_resumed_run_says_it_and_notes_it(capsys):
    cut = run(stopping=stop_after(7))
    assert not cut.events("died")
    cut.folder.update(status="RUNNING")
    resumed = run(resume="")
    said = capsys.readouterr().out
    assert "ended without a message, at step 6 or later" in said and resumed.code == 0
    assert [e.data["said"] in said for e in resumed.events("died")] == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_process_that_is_really_killed():
    words = [str(TOY), "--plugin", "toy", "--plugin", "poison", "checkpoints.every=1 steps"]
    task = "task={{name: poisoned, killed: {}, steps: [7]}}"
    first = spawn(1, *words, task.format("true"))
    assert first.returncode == -signal.SIGKILL and newest().info().status == "RUNNING"
    again = spawn(1, *words, task.format("true"), "--resume")
    assert "ended without a message, at step" in again.stdout, again.stdout

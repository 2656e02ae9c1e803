"""A run whose process was killed says so when it is started again, with what is known of its memory."""

from __future__ import annotations

import json
import signal
import socket

import pytest
from runs import TOY, newest, run, spawn, stop_after

from trainkit.experiments import post_mortem
from trainkit.tracking.run_folder import RunFolder

NONE = "/nonexistent"


@pytest.fixture
def folder(tmp_path):
    """A run that is RUNNING on this machine and logged step 7 an hour before this machine was started, or after."""

    def make(after: float = 60.0, status: str = "RUNNING", rss: float = 3.25, full: float = 97.0) -> RunFolder:
        import psutil

        then = psutil.boot_time() + after
        info = {"name": "a", "recipe": "a", "recipe_hash": "", "seed": 0, "started": then - 100, "status": status}
        (tmp_path / "run.json").write_text(json.dumps({**info, "pid": 4711, "host": socket.gethostname()}))
        lines = [
            {"t": int(1000 * then) - 50, "step": 90, "m": {"system/rss_gb": 1.5}},
            {"t": int(1000 * then) - 9, "step": 7, "m": {"train/loss": 0.5}},
            {
                "t": int(1000 * then),
                "step": 91,
                "m": {"system/rss_gb": rss, "system/system_memory_usage_percentage": full},
            },
        ]
        (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t": 1, "st')
        return RunFolder(tmp_path)

    return make


def test_it_says_how_far_it_came_and_what_memory_it_held(folder, tmp_path):
    said = post_mortem.cause_of_death(folder(), tmp_path / "no.events")
    assert "process 4711 on " in said and "ended without a message, at step 7 or later" in said
    assert "signal 9), likely out of memory (it used up to 3.25 GB, 97 % of the machine's memory" in said
    assert "perhaps out of memory" in post_mortem.cause_of_death(folder(full=40.0), tmp_path / "no.events")
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 2\n")
    said = post_mortem.cause_of_death(folder(full=40.0), tmp_path / "memory.events")
    assert "likely" in said and "the kernel has killed 2 processes of this container" in said


def test_a_machine_that_was_started_anew_is_not_called_a_want_of_memory(folder, tmp_path):
    said = post_mortem.cause_of_death(folder(after=-3600.0), tmp_path / "no.events")
    assert said.endswith("the machine was restarted since") and "memory" not in said


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

"""Where runs are kept: odd paths, a folder that goes away, two jobs on one run, a disk that refuses for a while."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fault_injection
import pytest
from runs import ROOT, TOY, Ran, all_same, left_alone, newest, run, spawn, start, stop_after
from small_disk import mounted

from trainkit.checkpoint import verification
from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError
from trainkit.experiments.launch import launch
from trainkit.tracking import run_folder, run_lifecycle, uploader
from trainkit.tracking import store as store_module
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

WORDS = (
    "checkpoints={every: 3 steps, keep_last: 50, lose_at_most: null}",
    "log={every: 2 steps, figures: 4 steps, system_every: null}",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database) -> Iterator[Ran]:
    """The toy recipe, run to its end with nothing in its way."""
    with left_alone(tmp_path_factory.mktemp("whole"), database, *WORDS) as ran:
        yield ran


def kept(ran: Ran):
    """The run as MLflow has it."""
    return Store.locate().client().get_run(ran.folder.info().run_id)


def after(steps: int, act):
    """Asked whether to stop: never, and something is done the n-th time."""
    asked = iter(range(10**9))

    def stopping() -> bool:
        if next(asked) == steps:
            act()
        return False

    return stopping


# ------------------------------------------------------------------------------------------------ disks (K2, D1)

SAVING = {"thread": "trainkit-checkpoint"}
FAULTS = {
    "figures, tables and tags": {"at": "os.mkdir", "to": "/files/", "do": "OSError 28", "call": 7, "until": 33},
    "a checkpoint": {"at": "os.write", **SAVING, "do": "OSError 28", "call": 7},
    "a checkpoint over the quota": {"at": "os.write", **SAVING, "do": "OSError 122", "call": 8},
    "a checkpoint, by PyTorch": {"at": "torch.Tensor.contiguous", **SAVING, "do": "RuntimeError memory", "call": 20},
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] if "over" in what or "by" in what else []) for what in FAULTS]
)
def test_a_disk_that_refuses_for_a_while_costs_nothing(store, whole, what):
    event = "checkpoint_failed" if what.startswith("a checkpoint") else None
    with fault_injection.installed([FAULTS[what]]):
        ran = run(*WORDS)
    assert ran.code == 0 and all_same(ran, whole) and ran.repeatable == whole.repeatable
    in_store = kept(ran)
    assert in_store.info.status == "FINISHED" == ran.folder.info().status
    assert ("trainkit.checkpoint_failed" in in_store.data.tags) == bool(event)
    if event:
        assert len(ran.events(event)) == 1 and len(ran.steps) == len(whole.steps) - 1
    client = Store.locate().client()

    def files(run_id: str, folder: str | None = None) -> set[str]:
        found = client.list_artifacts(run_id, folder)
        return {f.path for f in found} | {g for f in found if f.is_dir for g in files(run_id, f.path)}

    names = {name for name in files(in_store.info.run_id) if "images" not in name}
    assert {"figures", "rows", "tables", "recipe"} & {name.partition("/")[0] for name in names}
    assert not [*ran.folder.path.glob("files/*")], "all has been sent"


def test_a_run_whose_folder_is_deleted_has_failed_and_says_why(store):
    gone = []

    def delete() -> None:
        gone.append(newest().path)
        gone.append(newest().info().run_id)
        os.rename(gone[0], gone[0].with_name("away"))  # at once, whatever is being written there
        shutil.rmtree(gone[0].with_name("away"), ignore_errors=True)

    began = time.monotonic()
    with pytest.raises(UserError, match="the run's folder was deleted or moved while it ran"):
        run(*WORDS, "train.length=400 steps", stopping=after(5, delete))
    assert not gone[0].exists(), "nothing is made in its place"
    in_store = Store.locate().client().get_run(gone[1])
    assert in_store.info.status == "FAILED" and "was deleted" in in_store.data.tags["trainkit.error"]
    assert time.monotonic() - began < 60


# ---------------------------------------------------------------------------------------------------- places (D2)

ODD = ["größe-数据-🙂", "it's; [x] & y=1, #1, 100%", "x" * 250]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != ODD[0] else []) for n in ODD])
def test_a_store_may_have_any_name(tmp_path, database, monkeypatch, whole, name):
    home = tmp_path / name
    home.mkdir()
    shutil.copy(database, home / "mlflow.db")
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    ran = run(*WORDS)
    assert ran.code == 0 and all_same(ran, whole) and kept(ran).info.status == "FINISHED"
    assert ran.folder.path.is_relative_to(home) and sorted(os.listdir(tmp_path)) == [name]


@pytest.mark.parametrize("name", ["100%25", "what?"])
def test_a_name_that_no_database_can_have_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TRAINKIT_STORE", str(tmp_path / name))
    with pytest.raises(UserError, match=r"in its name, which the address of a database cannot hold"):
        Store.locate().prepare()
    assert not os.listdir(tmp_path)


def test_a_store_named_from_the_folder_of_the_start_stays_where_it_is(tmp_path, database, monkeypatch, whole):
    home, other = tmp_path / "here" / "store", tmp_path / "elsewhere"
    home.mkdir(parents=True)
    other.mkdir()
    shutil.copy(database, home / "mlflow.db")
    monkeypatch.chdir(home.parent)
    monkeypatch.setenv("TRAINKIT_STORE", "store")
    with contextlib.suppress(IndexError):  # the test itself looks for the run from there
        run(*WORDS, stopping=after(4, lambda: os.chdir(other)))
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    ran = Ran(0, newest())
    assert ran.folder.info().status == "FINISHED" and all_same(ran, whole) and not os.listdir(other)


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path):
    with mounted(tmp_path / "disk", 1, "ro") as disk:
        home = {"TRAINKIT_STORE": str(disk.place / "store")}
        refused = spawn(1, str(TOY), "--plugin", "toy", **disk.environment, **home)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr and "step " not in refused.stdout
    assert f"{disk.place}/store: cannot be made: Read-only file system" in refused.stderr


def test_a_store_on_a_network_file_system_is_warned_of(tmp_path, monkeypatch, caplog):
    mounts = f"server:/x {tmp_path} nfs4 rw 0 0\ntmpfs / tmpfs rw 0 0\n"
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a: mounts if str(self) == "/proc/mounts" else real(self, *a))
    with caplog.at_level(logging.WARNING):
        store_module._warn_of_network(tmp_path)
    assert "is on a network file system (nfs4), where SQLite is not safe" in caplog.text


# ---------------------------------------------------------------------------------------------- two jobs, one run (K6)


def test_a_second_job_on_a_run_is_refused_and_the_first_is_unharmed(store, whole):
    command = (str(TOY), "--plugin", "toy", *WORDS)
    slow = [{"at": "trainkit.training.run_logger.RunLogger.progress", "call": 4, "do": "sleep 60"}]
    with start(1, *command, plan=slow) as first:
        end = time.monotonic() + 120
        while not [*Store.locate().home.glob("runs/*/checkpoints/step-000000003")]:
            assert time.monotonic() < end
            time.sleep(0.05)
        folder = newest()
        with pytest.raises(UserError, match=f"run {folder.name}: in use by process {first.pids[0]}"):
            began = time.monotonic()
            RunFolder(folder.path).claim()
        assert time.monotonic() - began < 20
        second = spawn(1, *command, "--resume", folder.name)
        assert second.returncode == 2 and f"in use by process {first.pids[0]}" in second.stderr
        first.kill()  # its lock goes with it
        first.wait()
    before = {path.name: verification.verify(path) for path in folder.checkpoints.iterdir()}
    assert before == {"step-000000003": []}, "what the first had written is as it was"
    ran = run(*WORDS, resume=folder.name)
    assert ran.folder == folder and all_same(ran, whole) and ran.repeatable == whole.repeatable


class Sending:
    """Another job sends what a run has left; here, or in a process of its own, it takes as long as is wanted."""

    def __init__(self, folder: RunFolder):
        self.began, self.goes_on, self.folder = threading.Event(), threading.Event(), folder
        self.times = 0

    def __call__(self, *_: object) -> None:
        self.times += 1
        self.began.set()
        assert self.goes_on.wait(60)

    def complete(self) -> threading.Thread:
        job = SimpleNamespace(_store=None, _client=object())
        thread = threading.Thread(target=uploader.Uploader._complete, args=(job, self.folder))
        thread.start()
        return thread


def interrupted() -> RunFolder:
    """The toy recipe, whose process died without a word at step 7."""
    folder = run(*WORDS, stopping=stop_after(7)).folder
    folder.update(status="RUNNING", pid=2**22 + 1)  # a number that no process has
    return folder


@pytest.mark.slow
def test_a_run_is_continued_while_another_job_sends_what_it_had_left(store, whole):
    folder = interrupted()
    code = (
        "import sys; from types import SimpleNamespace; from trainkit.tracking import uploader\n"
        "from trainkit.tracking.store import Store\n"
        "uploader.send_left = lambda *_: print('sending', flush=True) or sys.stdin.readline()\n"
        "job = SimpleNamespace(_store=None, _client=object())\n"
        f"uploader.Uploader._complete(job, Store.locate().find({folder.name!r}))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "sending\n" and folder.alive()
        threading.Timer(1.0, lambda: (other.stdin.write("\n"), other.stdin.flush())).start()
        ran = run(*WORDS, resume="")
    assert ran.folder == folder and all_same(ran, whole) and ran.repeatable == whole.repeatable


@pytest.mark.slow
def test_a_thread_that_sends_what_a_run_had_left_takes_no_claim_from_it_and_gives_none_away(store, whole, monkeypatch):
    folder = interrupted()
    sending = Sending(folder)
    monkeypatch.setattr(uploader, "send_left", sending)
    thread = sending.complete()
    assert sending.began.wait(60)
    threading.Timer(1.0, sending.goes_on.set).start()

    def while_it_trains() -> None:
        thread.join()
        sending.complete().join()
        assert folder.claimed and sending.times == 1, "it is for the training to send now"

    ran = run(*WORDS, resume="", stopping=after(3, while_it_trains))
    assert ran.folder == folder and all_same(ran, whole) and ran.repeatable == whole.repeatable


def test_a_run_that_another_process_goes_on_sending_is_refused_in_the_end(store, monkeypatch):
    folder = interrupted()
    sending = Sending(folder)
    monkeypatch.setattr(uploader, "send_left", sending)
    monkeypatch.setattr(run_lifecycle, "PATIENCE", 0.5)
    thread = sending.complete()
    assert sending.began.wait(60)
    with pytest.raises(UserError, match="in use by a process that ends, or sends what it had left"):
        run(*WORDS, resume="")
    sending.goes_on.set()
    thread.join()


def test_a_run_that_is_being_promoted_is_not_continued_by_another_job(store, monkeypatch):
    code = "from trainkit.tracking.store import Store; print(Store.locate().newest_unfinished('toy'))"
    found = []

    def at_end(*_: object) -> str:
        assert newest().leaving.exists()
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        found.append(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout)
        return "promoted"

    monkeypatch.setattr("trainkit.analysis.promote.at_end", at_end)
    ran = run(*WORDS, "promote={}")
    assert found == ["None\n"] and not ran.folder.leaving.exists() and not ran.folder.claimed


def test_a_run_whose_machine_was_replaced_is_continued_where_its_lock_tells(store, whole):
    folder = interrupted()
    folder.update(host="a-machine-that-is-gone")
    ran = run(*WORDS, resume="")
    assert ran.folder == folder and all_same(ran, whole) and ran.repeatable == whole.repeatable


@pytest.mark.slow
def test_a_run_of_another_machine_on_a_disk_that_both_may_have_is_named_and_not_taken(store, monkeypatch, capsys):
    folder = interrupted()
    folder.update(host="another-machine")
    monkeypatch.setattr(run_folder, "file_system", lambda folder: "nfs4")
    said = f"{folder.name} is recorded as running on another-machine; if that machine is gone, --resume {folder.name}"
    with pytest.raises(UserError, match=f"no unfinished run of toy with these settings; {said}"):
        run(*WORDS, resume="")
    assert launch(RunRequest(TOY, (*WORDS, "train.length=1 steps"), ("toy",), "", or_start=True), lambda: False) == 0
    assert newest() != folder and said not in capsys.readouterr().out, "a run of another recipe is no reason"
    assert launch(RunRequest(TOY, WORDS, ("toy",), "", or_start=True), stop_after(1)) == 143
    assert newest() != folder and said in capsys.readouterr().out and folder.info().status == "RUNNING"
    ran = run(*WORDS, resume=folder.name)
    assert folder.info().status == "FINISHED" and ran.code == 0

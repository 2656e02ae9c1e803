"""What MLflow did not get while it was away arrives later: all of it, once, with the end of the run."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3

import click_commands
import pytest
from trackers import ask, begin, crash

from trainkit.errors import UserError
from trainkit.tracking import journal
from trainkit.tracking import tracker as tracking
from trainkit.tracking.relocate import relocate
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.sync import Synced, sync
from trainkit.tracking.upload import left, rounded

LONG_AGO = 1_700_000_000


class Away:
    """A client of a server that is down."""

    def __getattr__(self, name):
        raise ConnectionError("Connection refused")


@pytest.fixture
def here(store) -> Store:
    return Store.locate()


def recorded(here: Store, status: str, steps: int) -> RunFolder:
    """A run that MLflow knows of and has nothing of: it was away from then on."""
    tracker = begin(here)
    tracker._uploader._client = Away()
    for step in range(steps):
        tracker.log(step, {"train/loss": 1 / (step + 1), "speed/steps_per_s": 3.0 + step})
    tracker.artifact_text("notes/why.txt", "because")
    tracker.tags({"trainkit.colour": "red"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "_FINISH_SECONDS", 0.1)
        tracker.finish(status)
    return tracker.folder


def killed(here: Store) -> RunFolder:
    """A run whose process was gone without a word long ago."""
    tracker = begin(here)
    tracker._uploader._client = Away()
    tracker.log(0, {"train/loss": 0.5})
    tracker.commit()
    crash(tracker)
    for file in (tracker.folder.journal, tracker.folder.path / "run.json"):
        os.utime(file, (LONG_AGO, LONG_AGO))
    return tracker.folder


def rows(here: Store, run_id: str) -> list[tuple[str, int, float]]:
    return ask(here, "SELECT key, step, value FROM metrics WHERE run_uuid = ? ORDER BY key, step", run_id)


def in_journal(folder: RunFolder) -> list[tuple[str, int, float]]:
    metrics = journal.read(folder.journal).metrics
    return sorted((name, point.step, rounded(point.value)) for name, points in metrics.items() for point in points)


def of(here: Store, folder: RunFolder):
    return here.client().get_run(folder.info().run_id)


def test_all_that_was_left_arrives_once_and_the_run_ends_as_it_did(here):
    complete = begin(here)
    complete.log(0, {"train/loss": 1.0})
    assert complete.flush(30)
    complete.finish("FINISHED")
    first, second = recorded(here, "FINISHED", 1200), recorded(here, "FAILED", 3)
    assert rows(here, first.info().run_id) == [] and of(here, first).info.status == "RUNNING"
    assert left(first) == (2400, 3) and left(complete.folder) == (0, 0)

    assert {run.run: run for run in sync(here)} == {
        first.name: Synced(first.name, "FINISHED", 2400, 3),
        second.name: Synced(second.name, "FAILED", 6, 3),
    }
    for folder, status in ((first, "FINISHED"), (second, "FAILED")):
        run = of(here, folder)
        assert run.info.status == status and run.data.tags["trainkit.colour"] == "red"
        assert rows(here, run.info.run_id) == in_journal(folder)
        assert [file.path for file in here.client().list_artifacts(run.info.run_id, "notes")] == ["notes/why.txt"]
        assert left(folder) == (0, 0)
    assert not list(sync(here)), "nothing is left"
    before = rows(here, first.info().run_id)
    assert [run.values for run in sync(here, [first], whole=True)] == [2400]
    assert rows(here, first.info().run_id) == before, "and what goes again is not doubled"


def test_a_copy_of_the_database_that_is_older_is_filled_up_again(here, tmp_path):
    tracker = begin(here)
    tracker.log(0, {"train/loss": 1.0})
    assert tracker.flush(30)
    with sqlite3.connect(here.database) as source, sqlite3.connect(tmp_path / "older.db") as target:
        source.backup(target)
    for step in range(1, 5):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
    assert tracker.flush(30)
    tracker.finish("FINISHED")
    assert left(tracker.folder) == (0, 0)
    shutil.copy(tmp_path / "older.db", here.database)
    assert [row[1] for row in rows(here, tracker.run_id)] == [0]
    assert not list(sync(here)), "of a journal that was sent nothing is left"
    (done,) = sync(here, whole=True)
    assert done.values == 5 and [row[1] for row in rows(here, tracker.run_id)] == [0, 1, 2, 3, 4]
    assert of(here, tracker.folder).info.status == done.status == "FINISHED", "its end was lost with the rest"


def test_a_run_whose_process_is_gone_was_killed_when_it_was_last_heard_of(here):
    folder = killed(here)
    (done,) = sync(here)
    assert (done.run, done.status, done.values) == (folder.name, "KILLED", 1)
    info = of(here, folder).info
    assert (info.status, info.end_time) == ("KILLED", 1000 * LONG_AGO)
    assert folder.info().status == "KILLED" and rows(here, info.run_id) == in_journal(folder)


def test_a_run_that_goes_on_is_left_alone(here):
    tracker = begin(here)
    try:
        assert not list(sync(here))
        (done,) = sync(here, [tracker.folder])
        assert done.note == "is running, and uploads on its own" and tracker.folder.info().status == "RUNNING"
    finally:
        crash(tracker)


def test_a_run_of_another_machine_is_over_when_somebody_says_so(here, monkeypatch):
    monkeypatch.setattr("trainkit.tracking.run_folder.file_system", lambda folder: "nfs4")
    folder = killed(here)
    folder.update(host="a-machine-that-was-given-back")
    (done,) = sync(here)
    assert "a-machine-that-was-given-back" in done.note and "--over" in done.note
    assert folder.info().status == "RUNNING" and rows(here, folder.info().run_id) == []
    (done,) = sync(here, over=True)
    assert done.status == of(here, folder).info.status == "KILLED" and done.values == 1


def test_runs_that_cannot_be_completed_are_named_and_hold_up_no_other(here):
    gone, deleted, damaged, sound = (recorded(here, "FINISHED", 2) for _ in range(4))
    gone.update(run_id="0" * 32)
    here.client().delete_run(deleted.info().run_id)
    damaged.journal.write_bytes(b"{broken\n" + damaged.journal.read_bytes())
    done = {run.run: run for run in sync(here)}
    assert "is not in sqlite" in done[gone.name].problem and "MLFLOW_TRACKING_URI" in done[gone.name].problem
    assert "was deleted in MLflow" in done[deleted.name].problem
    assert "damaged" in done[damaged.name].problem and str(damaged.journal) in done[damaged.name].problem
    assert done[sound.name] == Synced(sound.name, "FINISHED", 4, 3)
    for folder in (gone, deleted, damaged, sound):
        folder.claim()  # none is held any more
        folder.release()


def test_a_run_that_ended_before_mlflow_knew_of_it_is_closed(here):
    folder = here.new_run("faces", 0, "a1b2")
    folder.release()
    (done,) = sync(here)
    assert done.status == folder.info().status == "KILLED" and done.note == "ended before MLflow knew of it"


def test_while_the_server_is_away_nothing_is_lost_and_one_sentence_says_so(here, monkeypatch):
    folder = recorded(here, "FINISHED", 2)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")
    with pytest.raises(UserError, match="does not answer") as caught:
        list(sync(Store.locate()))
    assert "hunter2" not in str(caught.value)
    assert left(folder) == (4, 3)


def test_the_command_says_what_went_and_what_could_not(here):
    assert re.fullmatch(r"sqlite:.* has all of 0 runs\nNext: trainkit ui  # see the runs\n", click_commands.ask("sync"))
    first, gone = recorded(here, "FINISHED", 1), recorded(here, "FINISHED", 1)
    gone.update(run_id="0" * 32)
    said = click_commands.ask("sync", code=2)
    assert f"{first.name}: 2 values and 3 files, tags or models sent; FINISHED\n" in said
    assert f"not sent: run {gone.name}: MLflow run {'0' * 32} is not in" in said
    assert click_commands.ask("sync", first.name).startswith(f"{first.name}: nothing was left to send\n")
    assert "nearest are" in click_commands.ask("sync", "nothing-of-that-name", code=2)


def test_files_of_a_store_that_was_moved_wait_until_they_have_their_place(here, tmp_path, monkeypatch):
    folder = recorded(here, "FINISHED", 2)
    here.home.rename(tmp_path / "moved")
    monkeypatch.setenv("TRAINKIT_STORE", str(tmp_path / "moved"))
    there = Store.locate()
    moved = there.find(folder.name)
    (done,) = sync(there)
    assert "trainkit relocate" in done.problem and left(moved) == (4, 3) and not here.home.exists()
    relocate(there)
    (done,) = sync(there)
    assert done == Synced(folder.name, "FINISHED", 4, 3) and not here.home.exists()
    (file,) = (there.artifacts / "faces").rglob("why.txt")
    assert file.read_text() == "because" and moved.info().run_id in file.parts

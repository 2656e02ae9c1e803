"""What waits to be sent, and what came to it: cut short, replaced, refused, or never to be sent at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time

import pytest
from click.testing import CliRunner
from trackers import ask, begin, crash, warned

from tests.whole_runs.test_outages import until
from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.tracking import desired_state, journal, upload, uploader
from trainkit.tracking import tracker as tracking
from trainkit.tracking.journal import Journal
from trainkit.tracking.mlflow_client import passes, unreachable
from trainkit.tracking.store import Store
from trainkit.tracking.sync import sync
from trainkit.tracking.upload import left


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.3)


@pytest.fixture
def here(store) -> Store:
    return Store.locate()


def ended(here: Store, steps: int = 5):
    """A run that has ended and sent nothing: its process was slower with that than its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploader.Uploader, "_try", lambda self: None)
        tracker = begin(here)
        for step in range(steps):
            tracker.log(step, {"train/loss": 1 / (step + 1)})
        for number in range(4):
            tracker.artifact_text(f"notes/{number}.txt", str(number))
        tracker.finish("FINISHED")
    assert left(tracker.folder) == (steps, 5) and tracker.folder.info().unsent
    return tracker.folder


def status(here: Store, folder) -> str:
    return here.client().get_run(folder.info().run_id).info.status


def files(here: Store) -> list[str]:
    return sorted(path.name for path in here.artifacts.rglob("*.txt"))


def crc_of_another_file(lines: list[dict]) -> None:
    lines[1]["value"]["crc"] += 1


def no_words(lines: list[dict]) -> None:
    lines[1] = {"kind": "fi\0\0"}


@pytest.mark.parametrize("damage", [crc_of_another_file, no_words])
def test_a_thing_that_a_power_cut_has_damaged_holds_up_no_other(here, caplog, damage):
    folder = ended(here)
    file = folder.path / desired_state.FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    damage(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tag", "cut')
    (done,) = sync(here)
    assert done.status == status(here, folder) == "FINISHED" and not done.problem
    assert files(here) == ["0.txt", "2.txt", "3.txt"] and left(folder) == (0, 0) and not folder.info().unsent
    assert not list((folder.path / "files").iterdir())
    assert "as after a power cut; all else is sent" in warned(caplog)[-1]


def test_what_is_set_is_on_the_disk_for_good_before_a_checkpoint_says_so(here, monkeypatch):
    tracker = begin(here)
    tracker._uploader.released.clear()
    tracker.artifact_text("notes/a.txt", "a")
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or real(file))
    tracker.commit()
    (waiting,) = (tracker.folder.path / "files").iterdir()
    lines = [str(tracker.folder.path / desired_state.FILE), str(tracker.folder.journal)]
    assert synced == [str(waiting / "a.txt"), str(waiting), str(waiting.parent), *lines]
    synced.clear()
    tracker.commit()
    assert synced == lines, "the file once"
    crash(tracker)


@pytest.mark.parametrize("kind", ["file", "dataset", "model", "tag"])
def test_one_thing_that_can_never_be_sent_holds_up_neither_others_nor_the_end(here, monkeypatch, kind):
    folder = ended(here)
    real = upload.Upload._upload

    def poisoned(self, client, entries):
        if entries[0].key == "bad":
            raise ValueError("nobody knows why")
        return real(self, client, entries)

    monkeypatch.setattr(upload.Upload, "_upload", poisoned)
    with open(folder.path / desired_state.FILE, "a") as file:
        file.write(json.dumps({"kind": kind, "key": "bad", "value": "x"}) + "\n")
    with pytest.raises(ValueError, match="nobody knows why"):
        list(sync(here))
    assert status(here, folder) == "FINISHED" and files(here) == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert left(folder) == (0, 1) and folder.info().unsent


def test_of_what_is_set_several_times_the_last_counts_though_an_earlier_one_failed(here, monkeypatch):
    tracker, real, failing = begin(here), upload.Upload._upload, [True]

    def failed(self, client, entries):
        if failing[0] and entries[0].kind != "status":
            raise ValueError("not now")
        return real(self, client, entries)

    monkeypatch.setattr(upload.Upload, "_upload", failed)
    for word in ("first", "second"):
        tracker.artifact_text("notes/a.txt", word)
        tracker.tags({"trainkit.word": word})
        tracker._uploader.wake.set()
        time.sleep(0.1)
    tracker.finish("FINISHED")
    assert left(tracker.folder) == (0, 2)
    failing[0] = False
    (done,) = sync(here)
    assert (done.status, done.others) == ("FINISHED", 2)
    (file,) = here.artifacts.rglob("a.txt")
    run = here.client().get_run(tracker.folder.info().run_id)
    assert file.read_text() == run.data.tags["trainkit.word"] == "second"


@pytest.mark.parametrize(
    "noted", ["{", '{"position": 10000000}', '{"position": 7}', '{"position": 60, "run": "other"}']
)
def test_a_position_that_cannot_be_right_is_taken_for_none(here, noted):
    folder = ended(here)
    (folder.path / "sent.json").write_text(noted)
    list(sync(here, whole="1000" in noted))
    rows = ask(here, "SELECT step FROM metrics WHERE key = 'train/loss' ORDER BY step")
    assert rows == [(step,) for step in range(5)] and status(here, folder) == "FINISHED"


def test_a_damaged_line_is_named_by_all_who_read_it_and_may_be_blanked_out(here):
    folder = ended(here)
    lines = folder.journal.read_bytes().splitlines(keepends=True)
    folder.journal.write_bytes(b"".join([*lines[:2], b"\xff" + lines[2][1:], *lines[3:]]))
    run = CliRunner()
    for words in (["sync"], ["sync", folder.name]):
        done = run.invoke(main.main, words)
        assert done.exit_code == 2 and "line 3" in done.output and "overwrite that line with spaces" in done.output
    for read in (journal.read, Journal):  # comparing, cards and pages; resuming and sending
        with pytest.raises(UserError, match=r"line 3.*damaged"):
            read(folder.journal)
    with pytest.raises(UserError, match=r"line 3.*damaged"):
        begin(here, folder, resume=True)
    assert not folder.claimed and folder.info().status == "FINISHED", "nothing was begun"
    assert status(here, folder) == "RUNNING" and len(list((folder.path / "files").iterdir())) == 4, (
        "nothing is lost meanwhile"
    )
    folder.journal.write_bytes(b"".join([*lines[:2], b" " * (len(lines[2]) - 1) + b"\n", *lines[3:]]))
    list(sync(here))
    assert ask(here, "SELECT step FROM metrics ORDER BY step") == [(0,), (1,), (3,), (4,)]
    assert not folder.info().unsent and status(here, folder) == "FINISHED"


def test_a_line_of_ten_megabytes_is_a_line(here):
    tracker = begin(here)
    tracker.log(0, {"train/loss": 1.0})
    tracker.event(0, "chance", {"x": "a" * 10_000_000})
    tracker.log(1, {"train/loss": 0.5})
    assert tracker.flush(60)
    tracker.finish("FINISHED")
    assert [row[0] for row in ask(here, "SELECT step FROM metrics ORDER BY step")] == [0, 1]
    assert len(journal.read(tracker.folder.journal).events[0].data["x"]) == 10_000_000


def test_a_run_that_died_between_its_status_and_its_last_word_gets_its_end(here, monkeypatch):
    tracker = begin(here)
    assert tracker.flush(60)
    tracker.folder.update(status="FINISHED", unsent=True)  # as `finish` does first of all
    crash(tracker)
    assert status(here, tracker.folder) == "RUNNING"
    (done,) = sync(here)
    assert done.status == status(here, tracker.folder) == "FINISHED"
    assert not list(sync(here))


@pytest.mark.parametrize("how", ["deleted", "overwritten", "restored", "beheaded"])
def test_a_database_that_is_lost_in_the_middle(here, tmp_path, monkeypatch, caplog, how):
    """A training goes on; all that the journal has is in the database that comes after it, and so is its end."""
    tracker = begin(here)
    older = tmp_path / "older.db"
    tracker.log(0, {"train/loss": 1.0})
    assert tracker.flush(60)
    with (
        contextlib.closing(sqlite3.connect(here.database)) as one,
        contextlib.closing(sqlite3.connect(older)) as two,
    ):
        one.backup(two)
    for step in range(1, 5):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
    assert tracker.flush(60)
    if how == "deleted":
        here.database.unlink()
    elif how == "overwritten":
        here.database.write_bytes(b"this is no database " * 4000)
    elif how == "beheaded":
        with open(here.database, "r+b") as file:
            file.write(bytes(100))
    else:
        shutil.copy(older, tmp_path / "copy.db")
        os.replace(tmp_path / "copy.db", here.database)
    for step in range(5, 300):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
    tracker.artifact_text("notes/late.txt", "late")
    if how in ("overwritten", "beheaded"):
        until(lambda: any("training continues" in said for said in warned(caplog)))
        with pytest.raises(UserError, match=r"damaged|not an MLflow database"):
            here.prepare()
        shutil.copy(older, here.database)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 60.0)
    tracker.finish("FINISHED")
    list(sync(here, [tracker.folder], whole=True))
    rows = ask(here, "SELECT step, value FROM metrics WHERE key = 'train/loss' ORDER BY step")
    assert rows == [(step, upload.rounded(1 / (step + 1))) for step in range(300)]
    assert status(here, tracker.folder) == "FINISHED" and files(here)[-1:] == ["late.txt"]
    params = here.client().get_run(tracker.folder.info().run_id).data.params
    assert params == {"lr": "0.1"}, "the run that was made again has them too"


def test_a_run_that_is_deleted_in_the_middle_keeps_what_it_has(here, caplog):
    tracker = begin(here)
    tracker.log(0, {"train/loss": 1.0})
    assert tracker.flush(60)
    here.client().delete_run(tracker.run_id)
    tracker.log(1, {"train/loss": 0.5})
    until(lambda: warned(caplog))
    tracker.finish("FINISHED")
    assert left(tracker.folder)[1] == 1 and "Traceback" not in caplog.text
    here.client().restore_run(tracker.run_id)
    list(sync(here))
    assert [row[0] for row in ask(here, "SELECT step FROM metrics ORDER BY step")] == [0, 1]
    assert status(here, tracker.folder) == "FINISHED"


def test_what_a_broken_database_says_of_values_is_no_answer_about_them(here):
    """MLflow calls an error of a page of a table BAD_REQUEST, as it does a value that it will never take."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import BAD_REQUEST, INVALID_PARAMETER_VALUE

    tracker = begin(here)
    malformed = MlflowException("(sqlite3.DatabaseError) database disk image is malformed", BAD_REQUEST)
    of_a_proxy = MlflowException(
        "API request to endpoint /x failed with error code 400 != 200", INVALID_PARAMETER_VALUE
    )
    refused = MlflowException("Invalid value", INVALID_PARAMETER_VALUE)
    client = here.client()
    assert [tracker._upload._refused(client, e) for e in (malformed, of_a_proxy, refused)] == [False, False, True]
    tracker.finish("FINISHED")


def test_a_folder_whose_name_is_no_text_is_told_all_the_same(database, tmp_path, monkeypatch):
    home = os.fsencode(tmp_path) + b"/na\xefve"
    os.mkdir(home)
    shutil.copy(database, os.fsdecode(home) + "/mlflow.db")
    monkeypatch.setenv("TRAINKIT_STORE", os.fsdecode(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    there = Store.locate()
    tracker = begin(there, params={"root": os.fsdecode(home)}, tags={"trainkit.zero": "a\0b"})
    tracker.log(0, {"train/loss": 1.0})
    assert tracker.flush(60)
    tracker.finish("FINISHED")
    tags = there.client().get_run(tracker.run_id).data.tags
    assert "\\udcef" in tags["trainkit.folder"] and tags["trainkit.zero"] == "a\\0b"


def test_a_run_that_is_told_to_stop_waits_less_for_its_store(here, monkeypatch):
    waited = []
    monkeypatch.setattr(tracking.Tracker, "flush", lambda self, timeout: waited.append(timeout) or True)
    for how in ("FINISHED", "FAILED", "KILLED"):
        begin(here).finish(how)
    assert waited == [tracking._FINISH_SECONDS, tracking._FINISH_SECONDS, tracking._STOP_SECONDS]


def test_runs_of_one_store_are_told_by_two_processes_threads_and_silent_ones_at_once(here):
    first, second, silent = begin(here), begin(here), tracking.Silent()
    for step in range(1500):
        for tracker in (first, second, silent):
            tracker.log(step, {"train/loss": 1 / (step + 1), "train/lr": 0.1})
    for tracker in (first, second):
        assert tracker.flush(120)
        tracker.finish("FINISHED")
        rows = ask(here, "SELECT count(*), count(DISTINCT step) FROM metrics WHERE run_uuid = ? AND key = ?",
                   tracker.run_id, "train/loss")  # fmt: skip
        assert rows == [(1500, 1500)]


def test_what_passes_is_told_from_what_does_not():
    from mlflow.exceptions import MlflowException, RestException

    away = [
        ConnectionError("Connection refused"),
        TimeoutError("Read timed out"),
        MlflowException("(sqlite3.OperationalError) database is locked"),
        MlflowException("(sqlite3.OperationalError) database or disk is full"),
    ]
    busy = [
        MlflowException("failed with error code 503 != 200"),
        MlflowException("too many 429 error responses"),
        RestException({"error_code": "INTERNAL_ERROR", "message": "x"}),
    ]
    mistakes = [
        MlflowException("failed with error code 401 != 200"),
        MlflowException("Failed to resolve 'h' ([Errno -2] Name or service not known)"),
        MlflowException("was successful but the response body was not in a valid JSON format"),
        ValueError("Connection refused"),
        UserError("x", "y"),
    ]
    assert all(passes(error) and unreachable(error) for error in away)
    assert all(passes(error) and not unreachable(error) for error in busy)
    assert not any(passes(error) for error in mistakes)

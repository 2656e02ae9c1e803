"""The store is away, locked, broken or wrong, at any moment: nothing is lost, nothing is there twice, nobody waits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from run_invariants import account, unlike, unsound
from runs import own_store, run, stop_after
from safetensors.numpy import save_file
from trackers import ask, begin, warned
from training_processes import job

from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.tracking import journal, uploader
from trainkit.tracking import tracker as tracking
from trainkit.tracking.mlflow_client import Away
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.sync import sync
from trainkit.tracking.tracker import Tracker
from trainkit.tracking.upload import left, rounded

WORDS = ("train.length=2 epochs",)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Senders try again soon, and wait for a locked database as little."""
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr("trainkit.tracking.mlflow_client._LOCK_SECONDS", 0.05)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture
def here(store) -> Store:
    return Store.locate()


def until(met, seconds: float = 480.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def locked(here: Store):
    """Another program writes to the database, for as long as it likes."""
    other = sqlite3.connect(here.database, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        with contextlib.suppress(sqlite3.Error):
            other.execute("ROLLBACK")
        other.close()


# ---- All that a run may tell, through any weather


class Weather:
    """Clients of the store whose calls fail by a draw: before they are made, or after, when the answer is lost."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, chance: float):
        self.draw, self.chance, self.down = random.Random(seed), chance, False
        self.failed: list[str] = []
        real = Store.client
        patch.setattr(Store, "client", lambda store: _Client(self, self.meet("client", lambda: real(store))))

    def meet(self, name, call):
        from mlflow.exceptions import MlflowException, RestException

        if self.down:
            raise Away("http://server", "does not answer")
        if self.draw.random() >= self.chance:
            return call()
        kind = self.draw.choice(["before", "after", "after", "500", "429", "reset"])
        self.failed.append(f"{name} {kind}")
        if name == "client":
            raise Away("http://server", "does not answer")
        if kind == "after":
            call()
        if kind == "500":
            raise RestException({"error_code": "INTERNAL_ERROR", "message": "boom"})
        if kind == "429":
            raise MlflowException("API request to endpoint /x failed with error code 429 != 200", 8)
        raise ConnectionError("Connection refused" if kind == "before" else "Connection aborted")


class _Client:
    def __init__(self, weather, client):
        self._weather, self._client = weather, client

    def __getattr__(self, name):
        call = getattr(self._client, name)
        return lambda *args, **more: self._weather.meet(name, lambda: call(*args, **more))


def tell(here: Store, files: Path, weather: Weather | None = None) -> RunFolder:
    """A run that tells all there is, some of it in one go and some with pauses, and is completed by sync."""
    tracker = begin(here, tags={"trainkit.colour": "red"}, note="What it is.", primary_metric="val/accuracy")
    weights = files / "model.safetensors"
    save_file({"w": np.arange(3.0)}, weights)
    for step in range(60):
        tracker.log(step, {"train/loss": 1 / (step + 1), "train/lr": 0.1})
        if step % 20 == 5:
            tracker.artifact_text(f"notes/{step}.txt", str(step))
            tracker.table(f"rows/{step}.parquet", {"x": [step]})
            tracker.tags({f"trainkit.at{step}": step})
            tracker.log(step, {"val/accuracy": step / 60})
            tracker.model("best", weights, step, {"val/accuracy": step / 60})
            if weather:
                before = len(weather.failed)
                until(lambda before=before: len(weather.failed) > before or left(tracker.folder) == (0, 0))
    tracker.dataset("val", "test", "ab" * 32, "/data/val", 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "_FINISH_SECONDS", 0.5)
        tracker.finish("FINISHED")
    tracker._uploader.join(120)  # its process would be gone
    for _ in range(400):
        if not tracker.folder.info().unsent:
            break
        with contextlib.suppress(UserError):
            list(sync(here, [tracker.folder]))
    return tracker.folder


def told(here: Store, folder: RunFolder) -> dict:
    """All of it as the store has it, each once, with the journal's times; times of the clock are left out."""
    (found,) = ask(here, "SELECT run_uuid, status, start_time, end_time IS NULL, lifecycle_stage FROM runs "
                   "WHERE lifecycle_stage = 'active'")  # fmt: skip
    run_id, started = found[0], found[2]
    assert run_id == folder.info().run_id and started == int(1000 * folder.info().started)
    rows = ask(here, "SELECT key, step, value, timestamp FROM metrics WHERE run_uuid = ?", run_id)
    metrics = journal.read(folder.journal).metrics
    kept = [(name, p.step, rounded(p.value), p.t) for name, points in metrics.items() for p in points]
    assert sorted(rows) == sorted(kept), "each (metric, step) of the journal once, with its time"
    run, client = here.client().get_run(run_id), here.client()
    models = client.search_logged_models([run.info.experiment_id])
    varies = ("trainkit.run", "trainkit.folder", "mlflow.runName", "mlflow.source.git.dirty")
    return {
        "about": (found[1], found[3], found[4]),
        "values": sorted(row[:3] for row in rows),
        "params": run.data.params,
        "tags": {name: value for name, value in run.data.tags.items() if name not in varies},
        "data": [(d.dataset.name, d.dataset.digest, len(d.tags)) for d in run.inputs.dataset_inputs],
        "models": sorted(
            (m.name, m.status.value, m.tags["trainkit.step"], [(s.key, s.value) for s in m.metrics or []])
            for m in models
        ),
        "outputs": sorted(output.step for output in run.outputs.model_outputs),
        "files": sorted(path.name for path in here.artifacts.rglob("*") if path.is_file()),
        "left": [left(folder), sorted(path.name for path in folder.path.glob("files/*"))],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, database) -> dict:
    home = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(database, home / "mlflow.db")
    there = Store(home, f"sqlite:///{home}/mlflow.db")
    return told(there, tell(there, home))


def trial(undisturbed: dict, database: Path, home: Path, seed: int, patch: pytest.MonkeyPatch) -> list[str]:
    home.mkdir()
    shutil.copy(database, home / "mlflow.db")
    there = Store(home, f"sqlite:///{home}/mlflow.db")
    with patch.context() as own:
        weather = Weather(own, seed, 0.3)
        folder = tell(there, home, weather)
    assert len(weather.failed) > 5, "the weather was fine"
    found = told(there, folder)
    return [name for name in undisturbed if undisturbed[name] != found[name]]


def test_through_calls_that_fail_before_and_after_they_are_made(trials, undisturbed, database, tmp_path, monkeypatch):
    for seed in trials(2, 100):
        assert trial(undisturbed, database, tmp_path / str(seed), seed, monkeypatch) == []


# ---- A training whose store is locked when it begins


@pytest.fixture(scope="module")
def reference(tmp_path_factory, database) -> dict:
    home = tmp_path_factory.mktemp("reference")
    shutil.copy(database, home / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_STORE", str(home))
        return account(run(*WORDS).folder)


@pytest.mark.slow
def test_a_training_that_begins_while_its_store_is_locked(reference, database, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.3)
    for back in ["in the middle", "sync", "the next run"]:
        with contextlib.ExitStack() as held:
            caplog.clear()
            home = tmp_path / back.replace(" ", "-")  # a run says what was changed since the last one of its store
            home.mkdir()
            shutil.copy(database, home / "mlflow.db")
            monkeypatch.setenv("TRAINKIT_STORE", str(home))
            here = Store.locate()
            held.enter_context(locked(here))
            asked = stop_after(10**6)

            def meanwhile(here=here, back=back, held=held, asked=asked):
                if back == "in the middle" and any(run.journal.is_file() for run in here.runs()):
                    held.close()
                return asked()

            with monkeypatch.context() as patch:
                if back == "in the middle":
                    patch.setattr(tracking, "_FINISH_SECONDS", 120.0)
                ran = run(*WORDS, stopping=meanwhile)
            assert ran.code == 0 and ran.folder.info().status == "FINISHED"
            assert "the run begins all the same" in warned(caplog)[0]
            unsent = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Not sent yet: ")]
            if back != "in the middle":
                assert ran.folder.info().run_id is None and ran.folder.info().unsent
                assert unsent[0].startswith("Not sent yet: sqlite:")
                assert unsent[0].endswith(f"trainkit sync {ran.folder.name}")
                refused = CliRunner().invoke(main.main, ["sync"])
                assert refused.exit_code == 2 and "locked by another program" in refused.output
            else:
                assert not unsent
            held.close()
            if back == "sync":
                done = CliRunner().invoke(main.main, ["sync", ran.folder.name])
                assert done.exit_code == 0 and "FINISHED" in done.output, done.output
            elif back == "the next run":
                other = begin(here)
                other.log(0, {"train/loss": 1.0})
                until(lambda ran=ran: not ran.folder.info().unsent)
                other.finish("FINISHED")
                assert unsound(other.folder) == []
            assert unlike(reference, account(ran.folder)) == [] and unsound(ran.folder) == []
            (kept,) = ask(here, "SELECT start_time FROM runs WHERE run_uuid = ?", ran.folder.info().run_id)
            assert kept[0] == int(1000 * ran.folder.info().started)


@pytest.mark.slow
def test_a_run_that_was_never_enrolled_is_resumed(database, tmp_path, monkeypatch):
    accounts = []
    for away in (False, True):
        home = tmp_path / str(away)
        home.mkdir()
        shutil.copy(database, home / "mlflow.db")
        monkeypatch.setenv("TRAINKIT_STORE", str(home))
        here = Store.locate()
        with locked(here) if away else contextlib.nullcontext(), monkeypatch.context() as patch:
            patch.setattr(tracking, "_STOP_SECONDS", 0.1 if away else 120.0)
            first = run(*WORDS, stopping=stop_after(5))
            assert first.folder.info().status == "KILLED"
            assert (first.folder.info().run_id is None) == away
        again = run(*WORDS, resume="")
        assert again.folder == first.folder and unsound(again.folder) == []
        accounts.append(account(again.folder))
        tags = here.client().get_run(again.folder.info().run_id).data.tags
        assert tags["trainkit.resumed"] == "1"
    assert unlike(*accounts) == []


def test_children_of_a_run_that_is_not_enrolled_yet_stand_beneath_it(here, monkeypatch):
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.1)
    with locked(here):
        parent = begin(here)
        child = begin(here, parent=parent.folder.name)
        child.finish("FINISHED")
        adopted = begin(here)
        adopted.finish("FINISHED")
        parent.adopt(adopted.folder.name, {"trainkit.best_of": parent.folder.name})
    until(lambda: parent.run_id and left(parent.folder) == (0, 0))
    parent.finish("FINISHED")
    assert {done.status for done in sync(here)} <= {"FINISHED"}, "what the parent has not completed meanwhile"
    client = here.client()
    for folder in (child.folder, adopted.folder):
        run = client.get_run(folder.info().run_id)
        assert run.data.tags["mlflow.parentRunId"] == parent.run_id and run.info.status == "FINISHED"
    assert run.data.tags["trainkit.best_of"] == parent.folder.name
    assert len(ask(here, "SELECT * FROM runs")) == 3


# ---- What waits for nobody


def stuck(monkeypatch, where: str) -> tuple[threading.Event, threading.Event]:
    """The sender comes to a call and does not come back from it until it is let: who came, and let."""
    came, let = threading.Event(), threading.Event()

    def hold(real):
        def held(*args, **more):
            if threading.current_thread().name == "trainkit-uploader":
                came.set()
                let.wait()
            return real(*args, **more)

        return held

    if where == "a call":
        from mlflow.tracking import MlflowClient

        monkeypatch.setattr(MlflowClient, "log_batch", hold(MlflowClient.log_batch))
    else:
        monkeypatch.setattr(os, where, hold(getattr(os, where)))
    return came, let


def works(tracker: Tracker, files: Path) -> threading.Thread:
    """A training that does everything which a training does with its tracker."""
    save_file({"w": np.arange(3.0)}, files / "model.safetensors")

    def train():
        for step in range(1, 3000):
            tracker.log(step, {"train/loss": 1 / step})
        tracker.table("rows/val.parquet", {"x": [1]})
        tracker.artifact_text("notes/a.txt", "a")
        tracker.tags({"trainkit.note": "x"})
        tracker.dataset("val", "test", "ab" * 32, "/data/val", 10)
        tracker.model("best", files / "model.safetensors", 5, {"train/loss": 0.2})
        tracker.event(5, "gate", {"name": "val"})
        tracker.position()

    thread = threading.Thread(target=train, name="training", daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("where", ["a call", "fsync", "replace"])
def test_the_training_passes_a_sender_that_is_stuck(where, here, tmp_path, monkeypatch):
    tracker = begin(here)
    came, let = stuck(monkeypatch, where)
    try:
        tracker.log(0, {"train/loss": 1.0})
        assert came.wait(60)
        training = works(tracker, tmp_path)
        training.join(120)
        assert not training.is_alive() and not let.is_set(), "the training waits for the sender"
    finally:
        let.set()
    tracker.finish("FINISHED")
    assert unsound(tracker.folder) == []


def test_no_call_to_the_store_is_made_by_the_training(here, tmp_path, monkeypatch):
    """But for those with which a run is enrolled."""
    from mlflow.tracking import MlflowClient

    tracker, by = begin(here), set()
    for name in [name for name in dir(MlflowClient) if not name.startswith("_")]:
        real = getattr(MlflowClient, name)

        def noted(*args, _real=real, **more):
            by.add(threading.current_thread().name)
            return _real(*args, **more)

        monkeypatch.setattr(MlflowClient, name, noted)
    works(tracker, tmp_path).join(120)
    tracker.finish("FINISHED")
    assert by == {"trainkit-uploader"}


# ---- Several at once, at the end, and families of runs


@pytest.mark.slow
def test_two_runs_of_two_processes_each_write_into_one_store_at_once(trials, database, tmp_path):
    """A line at every step of 40 epochs, from two that begin together."""
    words = ("train.length=40 epochs", "log={every: 1 steps, system_every: null, figures: null}")
    for seed in trials(1, 10):
        home = tmp_path / str(seed)
        home.mkdir()
        with own_store(home, database), contextlib.ExitStack() as both:
            jobs = [
                both.enter_context(job(home / str(k), *words, f"seed={10 * seed + k}", processes=2)) for k in range(2)
            ]
            for one in jobs:
                assert one.end() == [0, 0], one.said
                assert "locked" not in one.said and "does not take" not in one.said, one.said
            runs = Store.locate().runs()
            assert sorted(run.info().seed for run in runs) == [10 * seed, 10 * seed + 1]
            for each in runs:
                assert each.info().status == "FINISHED" and unsound(each) == []
                steps, losses = journal.read(each.journal).series("train/loss")
                assert steps == list(range(1, 161)) and len(losses) == 160
            assert len(ask(Store.locate(), "SELECT * FROM runs")) == 2, "of ranks there is one that writes"


@pytest.mark.slow
def test_told_to_stop_while_it_waits_for_the_store_at_its_end(reference, database, tmp_path):
    """The store is locked from the middle of the run on; the run has 30 s to send the rest, and 4 s once it is told."""
    with own_store(tmp_path, database):
        here = Store.locate()
        with job(tmp_path / "job", *WORDS) as one:
            one.until(lambda: here.runs() and here.runs()[0].info().run_id)
            with locked(here):
                one.until(lambda: here.runs()[0].info().status == "FINISHED")
                began = time.monotonic()
                one.signal(signal.SIGTERM)
                assert one.end() == [0], one.said
                assert time.monotonic() - began < 20, "nobody waits for it any longer"
            assert "trainkit sync" in one.said
            (folder,) = here.runs()
            assert folder.info().status == "FINISHED" and folder.info().unsent
            assert [done.status for done in sync(here)] == ["FINISHED"]
            assert unlike(reference, account(folder)) == [] and unsound(folder) == []


@pytest.mark.slow
def test_a_cross_validation_that_begins_while_its_store_is_locked(database, tmp_path, monkeypatch):
    words = ("data.name=folded", "data.folds=2", "evaluations={held_out: {batch_size: 8}}")
    words += ("best.metric=held_out/accuracy",)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.3)
    with own_store(tmp_path, database):
        here = Store.locate()
        with locked(here):
            assert run(*words, *WORDS, folds=True).code == 0
        assert all(folder.info().status == "FINISHED" for folder in here.runs())
        assert {done.status for done in sync(here)} == {"FINISHED"}
        client = here.client()
        family = {folder.info().recipe: folder for folder in here.runs()}
        parent = family["toy-folds"].info().run_id
        folds = [folder for folder in here.runs() if folder.info().recipe == "toy"]
        assert len(folds) == 2 and len(ask(here, "SELECT * FROM runs")) == 3
        for folder in folds:
            assert client.get_run(folder.info().run_id).data.tags["mlflow.parentRunId"] == parent
            assert unsound(folder) == []
        kept = client.get_run(parent)
        assert [kept.data.tags[f"trainkit.fold.{k}"] for k in range(2)] == [folder.name for folder in folds]
        known = {
            name: rounded(points[-1].value)
            for name, points in journal.read(family["toy-folds"].journal).metrics.items()
        }
        assert kept.info.status == "FINISHED" and kept.data.metrics == known

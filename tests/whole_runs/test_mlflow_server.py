"""A real MLflow server, which keeps the files too: a run does with it all that it does with a store of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from proxy_server import ProxyServer, proxy
from runs import ROOT, Ran, _port, run, stop_after
from safetensors.numpy import save_file

from trainkit.cli import main
from trainkit.environment.process import die_with_parent
from trainkit.errors import UserError
from trainkit.tracking import journal, ui, uploader
from trainkit.tracking import tracker as tracking
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker
from trainkit.tracking.upload import left, rounded

pytestmark = pytest.mark.slow  # the server answers after 5 s


@dataclass
class Served:
    """A server, with its database and its files in a folder of its own."""

    home: Path
    port: int
    process: subprocess.Popen

    def signal(self, number: int) -> None:
        """To it and to the workers that it has begun."""
        os.killpg(self.process.pid, number)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def served(
    home: Path, database: str, port: int | None = None, words: Sequence[str] = (), **environment: str
) -> Iterator[Served]:
    """A server of this database, with a folder for its log and the files of runs; it is gone when the block ends."""
    port = port or _port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", database, "--artifacts-destination", str(home / "files"), *words]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}
    process = ui._begun(command, env, home / "log", home)
    try:
        ui._wait_until_ready(process, f"http://127.0.0.1:{port}", home / "log")
        yield Served(home, port, process)
    finally:
        ui._end(process)


@pytest.fixture(scope="module")
def server(tmp_path_factory, database) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("server")
    shutil.copy(database, home / "mlflow.db")
    with served(home, f"sqlite:///{home}/mlflow.db") as server:
        yield server


@pytest.fixture
def postgres() -> Iterator[str]:
    """Address of an empty PostgreSQL database, of a server of its own."""
    pytest.importorskip("psycopg", reason="psycopg[binary] is not installed")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        pytest.skip("PostgreSQL is not installed")
    # It refuses to be run by root, and pytest's folders are closed to others.
    who = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    home, port, bin_ = Path(tempfile.mkdtemp(prefix="postgres-")), _port(), programs[-1].parent
    try:
        if who:
            shutil.chown(home, "postgres", "postgres")
        quiet = {"cwd": home, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **who}
        made = [bin_ / "initdb", "-D", home / "data", "-U", "me", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(made, check=True, **quiet)
        words = [bin_ / "postgres", "-D", home / "data", "-p", str(port), "-k", home, "-h", "127.0.0.1", "-F"]
        process = subprocess.Popen(words, preexec_fn=die_with_parent, **quiet)
        try:
            ready = [bin_ / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
            while subprocess.run(ready, **quiet).returncode != 0:
                assert process.poll() is None, "PostgreSQL has ended"
                time.sleep(0.1)
            yield f"postgresql+psycopg://me@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # without waiting for its clients
            process.wait(timeout=60)
    finally:
        shutil.rmtree(home)


@pytest.fixture
def remote(server, monkeypatch) -> Store:
    """The server as the store of this test; the folders of its runs are the test's own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    return Store.locate()


@pytest.fixture
def door(server, monkeypatch) -> Iterator[ProxyServer]:
    """The server by way of somebody who can hold it up."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with proxy(server.port) as door:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", door.address)
        yield door


def begin(store: Store, experiment: str) -> Tracker:
    folder = store.new_run("faces", 0, "a1b2c3d4")
    given = {"experiment": experiment, "run_name": folder.name, "params": {"lr": 0.1}, "system_metrics_every": 0}
    return Tracker.start(folder, store, **given)


def files(client, run_id: str, folder: str | None = None) -> dict[str, int]:
    """Path and size of all files of a run."""
    found = {}
    for file in client.list_artifacts(run_id, folder):
        found |= files(client, run_id, file.path) if file.is_dir else {file.path: file.file_size}
    return found


def history(client, run_id: str, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


def warnings(caplog) -> list[str]:
    return [e.getMessage() for e in caplog.records if e.levelno >= logging.WARNING and e.name == "trainkit"]


def record(store: Store, ran: Ran) -> dict:
    """All that a store has of a run, but for what is never the same twice."""
    client, run_id = store.client(), ran.folder.info().run_id
    found = client.get_run(run_id)
    experiment = client.get_experiment(found.info.experiment_id)
    models = client.search_logged_models([experiment.experiment_id])
    models = [model for model in models if model.source_run_id == run_id]
    return {
        "status": found.info.status,
        "experiment": (experiment.name, sorted(experiment.tags)),
        "params": found.data.params,
        "tags": sorted(found.data.tags),
        "metrics": sorted(found.data.metrics),
        "values": {name: history(client, run_id, name) for name in ran.repeatable},
        "data": sorted(
            (one.dataset.name, one.dataset.digest, one.dataset.profile, one.tags[0].value)
            for one in found.inputs.dataset_inputs
        ),
        "files": sorted(path.partition("+timestamp")[0] for path in files(client, run_id)),
        "recipe": Path(client.download_artifacts(run_id, "recipe/resolved.yaml")).read_text(),
        "models": sorted(
            (m.name, m.status.value, m.model_type, sorted((s.key, s.value, s.step, s.dataset_name) for s in m.metrics))
            for m in models
        ),
        "weights": {m.name: store.model_file(f"models:/{m.model_id}").read_bytes() for m in models},
        "outputs": sorted(output.step for output in found.outputs.model_outputs),
    }


def test_a_run_leaves_in_a_server_all_that_it_leaves_in_a_store_of_its_own(store, server, monkeypatch, tmp_path):
    own = record(Store.locate(), run())
    monkeypatch.setenv("TRAINKIT_STORE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    there = record(Store.locate(), run())
    for part, value in own.items():
        assert there[part] == value, part
    assert own["status"] == "FINISHED" and own["weights"].keys() >= {"best"} and len(own["values"]) > 5
    assert not (tmp_path / "elsewhere" / "mlflow.db").exists()
    assert not (tmp_path / "elsewhere" / "artifacts").exists() and list((server.home / "files").iterdir())


def test_a_server_of_a_postgresql_database_keeps_the_same(postgres, store, monkeypatch, tmp_path):
    own = record(Store.locate(), run())
    monkeypatch.setenv("TRAINKIT_STORE", str(tmp_path / "elsewhere"))
    with served(tmp_path, postgres) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        there = record(Store.locate(), run())
    for part, value in own.items():
        assert there[part] == value, part
    assert not (tmp_path / "elsewhere" / "mlflow.db").exists() and (tmp_path / "files").is_dir()


def test_an_interrupted_run_goes_on_in_the_same_run_of_the_server(remote):
    first = run(stopping=stop_after(6))
    client, run_id = remote.client(), first.folder.info().run_id
    assert client.get_run(run_id).info.status == "KILLED"
    again = run(resume="")
    assert again.folder == first.folder and again.folder.info().run_id == run_id
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED" and found.data.tags["trainkit.resumed"] == "1"
    sent = again.in_mlflow
    assert "train/loss" in sent and {name: history(client, run_id, name) for name in sent} == sent
    assert left(again.folder) == (0, 0)


def test_runs_are_sent_to_a_server_by_two_processes_at_once(remote):
    code = (
        "from trainkit.tracking.store import Store; from trainkit.tracking.tracker import Tracker\n"
        "store = Store.locate(); folder = store.new_run('twins', 0, 'aa')\n"
        "tracker = Tracker.start(folder, store, experiment='twins', run_name=folder.name, params={'lr': 0.1},\n"
        "    system_metrics_every=0)\n"
        "for step in range(500): tracker.log(step, {'train/loss': step / 7})\n"
        "tracker.finish('FINISHED'); print(tracker.run_id)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True, env=env) for _ in range(2)]
    ids = [process.communicate()[0].strip() for process in both]
    client = remote.client()
    for run_id in ids:
        assert client.get_run(run_id).info.status == "FINISHED"
        assert history(client, run_id, "train/loss") == [(step, rounded(step / 7)) for step in range(500)]
    assert len({client.get_run(run_id).info.experiment_id for run_id in ids}) == 1


def test_a_server_that_wants_a_password_gets_it_and_nobody_else_does(door, server, monkeypatch, tmp_path):
    door.password = "me:hunter2canary"
    with pytest.raises(UserError, match="wants a password"):
        run()
    assert not any(folder.info().status == "RUNNING" for folder in Store.locate().runs())
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2canary")
    ran = run()
    store = Store.locate()
    found = record(store, ran)
    assert found["status"] == "FINISHED" and found["weights"]
    for home in (store.home, server.home):
        told = [file for file in home.rglob("*") if file.is_file() and b"hunter2canary" in file.read_bytes()]
        assert not told


def test_a_server_that_goes_away_in_the_middle_gets_the_rest_from_sync(door, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.05)
    store = Store.locate()
    tracker = begin(store, "away")
    for step in range(20):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
    assert tracker.flush()
    door.down = True
    for step in range(20, 700):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
    tracker.artifact_text("notes/why.txt", "because")
    tracker.dataset("val", "test", "ab" * 32, "/data/val", 10)
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    tracker.model("best", tmp_path / "model.safetensors", 5, {"train/loss": 1 / 6})
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 1.0)
    tracker.finish("FINISHED")
    said = warnings(caplog)
    assert len(said) == 2 and "training continues" in said[0] and "broke the connection" in said[0]
    assert said[1].endswith(f"sent by: trainkit sync {tracker.folder.name}")
    assert left(tracker.folder) == (680, 4)

    refused = CliRunner().invoke(main.main, ["sync"])
    assert refused.exit_code == 2 and "broke the connection" in refused.output
    door.down = False
    for expected in ("680 values and 4 files, tags or models sent; FINISHED", "has all of 1 run"):
        done = CliRunner().invoke(main.main, ["sync"])
        assert done.exit_code == 0 and expected in done.output
    client = store.client()
    found = client.get_run(tracker.run_id)
    assert found.info.status == "FINISHED" and files(client, tracker.run_id) == {"notes/why.txt": 7}
    assert history(client, tracker.run_id, "train/loss") == [(step, rounded(1 / (step + 1))) for step in range(700)]
    (model,) = client.search_logged_models([found.info.experiment_id])
    assert store.model_file(f"models:/{model.model_id}").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    made = json.loads((tracker.folder.path / "models.json").read_text())
    assert made == {"best@5": model.model_id}, "it was made once, though its sending was tried in vain"


def test_a_training_does_not_wait_for_a_server_that_is_slow(door, caplog):
    tracker = begin(Store.locate(), "slow")
    door.holds.set()
    for step in range(300):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
        if step == 0:
            door.wait_for_somebody()
    tracker.artifact_text("notes/why.txt", "because")
    tracker.commit()
    assert left(tracker.folder) == (300, 1), "all of that while the server held the first of it"
    door.holds.clear()
    tracker.finish("FINISHED")
    assert not warnings(caplog)
    assert left(tracker.folder) == (0, 0)


def test_a_server_that_never_answers_lets_the_training_end(door, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 3.0)
    tracker = begin(Store.locate(), "slow")
    door.holds.set()
    for step in range(10):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
    door.wait_for_somebody()
    tracker.finish("FINISHED")
    assert left(tracker.folder) == (10, 1), "the server was still holding all of it"
    door.holds.clear()
    said = warnings(caplog)
    assert len(said) == 2 and "does not answer" in said[0] and "trainkit sync" in said[1]


# ---- A server that is killed, frozen, slow, wrong or full in the middle of a run


def log_until(tracker: Tracker, steps: range, tmp_path: Path) -> float:
    """Tell all kinds of things in these steps; returns the processor time that it took this thread for a step."""
    began = time.thread_time()
    for step in steps:
        tracker.log(step, {"train/loss": 1 / (step + 1), "train/lr": 0.1})
    took = time.thread_time() - began
    first = steps[0]
    tracker.log(first, {"val/accuracy": first / 1000})
    tracker.artifact_text(f"notes/{first}.txt", str(first))
    tracker.tags({f"trainkit.at{first}": first})
    tracker.dataset(f"val{first}", "test", f"{first:064d}", "/data/val", 10)
    tracker.model("best", tmp_path / "model.safetensors", first, {"val/accuracy": first / 1000})
    return took / len(steps)


def complete(store: Store, tracker: Tracker, steps: int, firsts: list[int]) -> None:
    """All of it is there once, whatever was in between."""
    client, run_id = store.client(), tracker.folder.info().run_id
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED" and found.data.params == {"lr": "0.1"}
    assert found.info.start_time == int(1000 * tracker.folder.info().started)
    for name, points in journal.read(tracker.folder.journal).metrics.items():
        kept = client.get_metric_history(run_id, name)
        assert sorted((p.step, p.value, p.timestamp) for p in kept) == sorted(
            (p.step, rounded(p.value), p.t) for p in points
        ), name
    assert history(client, run_id, "train/loss") == [(step, rounded(1 / (step + 1))) for step in range(steps)]
    assert files(client, run_id).keys() == {f"notes/{first}.txt" for first in firsts}
    assert {f"trainkit.at{first}" for first in firsts} <= found.data.tags.keys()
    assert sorted(one.dataset.name for one in found.inputs.dataset_inputs) == sorted(f"val{first}" for first in firsts)
    models = client.search_logged_models([found.info.experiment_id], f"source_run_id = '{run_id}'")
    assert sorted((m.name, m.tags["trainkit.step"], m.status.value, len(m.metrics or [])) for m in models) == sorted(
        ("best", str(first), "READY", 1) for first in firsts
    )
    assert sorted(output.step for output in found.outputs.model_outputs) == firsts
    named = f"tags.`trainkit.run` = '{tracker.folder.name}'"
    assert len(client.search_runs([found.info.experiment_id], named)) == 1, "made once"
    assert left(tracker.folder) == (0, 0) and not tracker.folder.info().unsent


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_server_that_is_killed_or_frozen_and_comes_back(how, database, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.2)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 300.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    home = tmp_path / "server"
    home.mkdir()
    shutil.copy(database, home / "mlflow.db")
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    with served(home, f"sqlite:///{home}/mlflow.db") as first:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", first.address)
        store = Store.locate()
        tracker = begin(store, how)
        there = log_until(tracker, range(2000), tmp_path)
        first.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        away = log_until(tracker, range(2000, 4000), tmp_path)
        while not warnings(caplog):
            time.sleep(0.1)
        again = log_until(tracker, range(4000, 6000), tmp_path)
        assert left(tracker.folder)[0] > 2000, "of what came after it has nothing"
        # A percent of a step of 50 ms; a call that waits for a server takes 2 s.
        assert max(away, again) - there < 0.0005
        if how == "frozen":
            first.signal(signal.SIGCONT)
        with served(home, f"sqlite:///{home}/mlflow.db", first.port) if how == "killed" else nullcontext():
            assert tracker.flush(300)
            log_until(tracker, range(6000, 6010), tmp_path)
            tracker.finish("FINISHED")
            complete(store, tracker, 6010, [0, 2000, 4000, 6000])
    assert "takes metrics again; nothing was lost" in warnings(caplog)[-1]


@pytest.mark.parametrize("wrong", ["drop", "half", "garbage", "500", "429", "401", "2 s"])
def test_a_server_whose_answers_are_wrong(wrong, door, tmp_path, monkeypatch):
    """The first answer to each kind of request is wrong, from the beginning of the run on; then every fourth."""
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.2)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 300.0)
    # MLflow's client tries once more by itself: what is done twice must be there once all the same.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    seen: dict[str, int] = {}
    # At the beginning of a run two of them are mistakes.
    begun = [True] if wrong not in ("garbage", "401") else []

    def answer(path, seen=seen, begun=begun):
        kind = path.partition("?")[0]
        kind = "/artifacts" if "mlflow-artifacts" in kind else kind
        seen[kind] = seen.get(kind, -1) + 1
        return wrong if begun and seen[kind] % 4 == 0 else ""

    door.wrong = answer
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    store = Store.locate()
    tracker = begin(store, f"wrong {wrong}")
    begun.append(True)
    for first in (0, 50, 100):
        log_until(tracker, range(first, first + 50), tmp_path)
        time.sleep(0.5)
    assert tracker.flush(300)
    tracker.finish("FINISHED")
    assert sum(seen.values()) > 10
    door.wrong = lambda path: ""
    complete(store, tracker, 150, [0, 50, 100])


def test_a_server_whose_disk_is_full_for_a_while(database, tmp_path, monkeypatch, caplog):
    """Its processes may write no file further than it is long."""
    import psutil

    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.2)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 300.0)
    home = tmp_path / "server"
    home.mkdir()
    shutil.copy(database, home / "mlflow.db")
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    with served(home, f"sqlite:///{home}/mlflow.db") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        store = Store.locate()
        tracker = begin(store, "full")
        log_until(tracker, range(100), tmp_path)
        assert tracker.flush(120)

        def limit(most: int, server=server) -> None:
            whole = psutil.Process(server.process.pid)
            for process in (whole, *whole.children(recursive=True)):
                process.rlimit(psutil.RLIMIT_FSIZE, (most, -1))

        limit((home / "mlflow.db").stat().st_size)
        log_until(tracker, range(100, 3000), tmp_path)
        while not warnings(caplog):
            time.sleep(0.1)
        assert not tracker.flush(1) and "Traceback" not in caplog.text
        limit(-1)
        assert tracker.flush(300)
        tracker.finish("FINISHED")
        complete(store, tracker, 3000, [0, 100])


def test_a_run_that_begins_and_ends_before_its_server_does(database, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    home, port = tmp_path / "server", _port()
    home.mkdir()
    shutil.copy(database, home / "mlflow.db")
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    store = Store.locate()
    tracker = begin(store, "later")
    log_until(tracker, range(1500), tmp_path)
    tracker.finish("FINISHED")
    said = warnings(caplog)
    assert len(said) == 2 and "the run begins all the same" in said[0] and "trainkit sync" in said[1]
    assert CliRunner().invoke(main.main, ["sync"]).exit_code == 2
    with served(home, f"sqlite:///{home}/mlflow.db", port):
        done = CliRunner().invoke(main.main, ["sync"])
        assert done.exit_code == 0 and "FINISHED" in done.output, done.output
        complete(store, tracker, 1500, [0])

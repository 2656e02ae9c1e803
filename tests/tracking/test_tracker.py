import io
import json
import logging
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trackers
from safetensors.torch import save_file

from trainkit.errors import UserError
from trainkit.tracking import journal, mlflow_experiment, run_folder, upload, uploader
from trainkit.tracking import store as store_module
from trainkit.tracking import tracker as tracking
from trainkit.tracking.run_folder import RunFolder, run_key
from trainkit.tracking.store import Store
from trainkit.tracking.sync import send_rest
from trainkit.tracking.tracker import Silent, Tracker, flatten

pytestmark = pytest.mark.usefixtures("painted")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(store) -> Path:
    return store.home


@pytest.fixture(name="store")
def _store(store) -> Store:
    return Store.locate()


@pytest.fixture
def begin(store):
    """Start trackers that are ended, whatever the test did to them."""
    begun = []

    def start(folder=None, **more):
        begun.append(trackers.begin(store, folder, **{"params": {}, **more}))
        return begun[-1]

    yield start
    for tracker in begun:
        trackers.crash(tracker)


def rows(home, name=None):
    with sqlite3.connect(home / "mlflow.db") as connection:
        found = connection.execute("SELECT key, step, value, is_nan FROM metrics ORDER BY key, step").fetchall()
    return [row for row in found if name in (None, row[0])]


def test_every_kind_of_number_reaches_the_store_with_six_digits(home, begin):
    tracker = begin()
    values = {
        "int": (3, 3.0),
        "float": (0.1, 0.1),
        "bool": (True, 1.0),
        "float32": (np.float32(0.1), 0.1),
        "int64": (np.int64(-7), -7.0),
        "array0": (np.array(2.5), 2.5),
        "array1": (np.array([2.5]), 2.5),
        "tensor": (torch.tensor(1 / 3, dtype=torch.float64), 0.333333),
        "bfloat16": (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        "needs_grad": (torch.tensor(4.0, requires_grad=True), 4.0),
    }
    tracker.log(1, {key: value for key, (value, _) in values.items()})
    assert tracker.flush()
    assert {key: value for key, _, value, _ in rows(home)} == {key: stored for key, (_, stored) in values.items()}


@pytest.mark.parametrize("bad", ["one", None, 1j, np.zeros(2), torch.zeros(2, 2), [1.0]])
def test_what_is_no_number_is_refused_by_name(begin, bad):
    tracker = begin()
    with pytest.raises(ValueError, match="train/loss"):
        tracker.log(1, {"train/loss": bad})


@pytest.mark.parametrize("bad", ["acc@1", "TPR", "/a", "a//b", "a/", "x[0]", "a b", "", "a=1", "../a", "ä", "a" * 251])
def test_a_name_that_mlflow_or_the_vocabulary_refuses_is_a_value_error(begin, bad):
    tracker = begin()
    with pytest.raises(ValueError, match="metric name"):
        tracker.log(1, {"train/loss": 1.0, bad: 1.0})


def test_values_that_are_not_finite_are_an_event_and_never_a_huge_number(home, begin):
    tracker = begin()
    tracker.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 0.1})
    tracker.finish("FAILED")
    assert [(key, is_nan) for key, _, _, is_nan in rows(home)] == [
        ("train/grad_norm", 1),
        ("train/loss", 1),
        ("train/lr", 0),
    ]
    history = journal.read(tracker.folder.journal)
    assert history.metrics["train/grad_norm"][0].value == math.inf
    assert [(e.name, e.data) for e in history.events] == [("nonfinite", {"names": ["train/grad_norm", "train/loss"]})]


def test_a_resumed_run_has_one_row_for_each_step_of_each_metric(home, store, begin):
    def train(tracker, start, end):
        for step in range(start, end):
            tracker.log(step, {"train/loss": 1 / (step + 1), "speed/steps_per_s": time.perf_counter()})

    first = begin(params={"lr": 0.1})
    train(first, 0, 10)
    position = first.commit()
    train(first, 10, 15)
    assert first.flush()
    train(first, 15, 18)  # in the journal, not sent
    first._journal._take_in()
    first._journal._lines.pass_on()
    trackers.crash(first)
    sent = rows(home)

    second = begin(store.find(first.folder.name), params={"lr": 0.1}, resume=True)
    assert second.run_id == first.run_id
    time.sleep(0.1)
    second.cut_back(position)
    train(second, 10, 25)
    second.finish("FINISHED")
    stored = rows(home)
    assert [row[1] for row in stored if row[0] == "train/loss"] == list(range(25))
    assert [row[1] for row in stored if row[0] == "speed/steps_per_s"] == list(range(25))
    assert set(sent) <= set(stored)
    lines = journal.read(second.folder.journal)
    for name in ("train/loss", "speed/steps_per_s"):
        assert [(name, p.step, upload.rounded(p.value), 0) for p in lines.metrics[name]] == rows(home, name)
    assert store.client().get_run(first.run_id).info.status == "FINISHED"


def test_changed_parameters_become_a_tag_on_resuming(store, begin):
    first = begin(params={"optim": {"lr": 0.1, "clip": 1.0}})
    first.finish("KILLED")
    second = begin(store.find(first.folder.name), params={"optim": {"lr": 0.2, "clip": 1.0, "new": 3}}, resume=True)
    run = store.client().get_run(first.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"optim.lr": "0.1", "optim.clip": "1.0", "optim.new": "3"}
    assert json.loads(run.data.tags["trainkit.changed_params"]) == {"optim.lr": ["0.1", "0.2"]}
    second.finish("FINISHED")
    assert store.client().get_run(first.run_id).info.status == "FINISHED"


def test_a_run_whose_store_was_lost_sends_its_whole_journal_to_a_new_one(home, store, begin, database):
    first = begin()
    for step in range(5):
        first.log(step, {"train/loss": float(step)})
    first.finish("KILLED")
    shutil.copy(database, home / "mlflow.db")
    second = begin(first.folder, resume=True)
    assert second.run_id != first.run_id and first.folder.info().run_id == second.run_id
    assert second.flush()
    assert [row[1] for row in rows(home)] == list(range(5))


def test_a_run_that_cannot_begin_is_failed_and_free_again(store, begin, home, monkeypatch):
    folder = store.new_run("faces", 0, "aaaa")
    monkeypatch.setattr(mlflow_experiment, "prepared", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        begin(folder)
    assert folder.info().status == "FAILED" and not folder.alive()


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_the_status_is_what_it_was(store, begin, status):
    tracker = begin()
    tracker.log(12, {"train/loss": 1.0})
    tracker.finish(status)
    assert store.client().get_run(tracker.run_id).info.status == status
    assert (tracker.folder.info().status, tracker.folder.info().last_step) == (status, 12)


def test_the_error_is_kept_without_the_secrets_in_it(store, begin):
    tracker = begin()
    try:
        raise RuntimeError("cannot open postgresql://me:hunter2@db/x with password=hunter2")
    except RuntimeError as error:
        tracker.finish("FAILED", error)
    client = store.client()
    run = client.get_run(tracker.run_id)
    assert run.data.tags["trainkit.error"] == "RuntimeError: cannot open postgresql://db/x with password=[hidden]"
    text = Path(client.download_artifacts(tracker.run_id, "error.txt")).read_text()
    assert "Traceback" in text and "test_tracker.py" in text and "hunter2" not in text


CRASHING = """
import os, sys, signal
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker
store = Store.locate()
folder = store.new_run("faces", 0, "beef")
tracker = Tracker.start(folder, store, experiment="faces", run_name=folder.name, params={}, system_metrics_every=0)
tracker.log(7, {"train/loss": 0.25})
print(folder.name, tracker.run_id, flush=True)
"""


def run_python(code):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


@pytest.mark.slow
def test_leaving_without_a_word_is_failed(home, store):
    done = run_python(CRASHING + "sys.exit(0)")
    name, run_id = done.stdout.split()
    run = store.client().get_run(run_id)
    assert run.info.status == "FAILED", done.stderr
    assert run.data.metrics == {"train/loss": 0.25}
    assert store.find(name).info().status == "FAILED"


def test_parameters_are_flat_and_hold_no_secret(store, begin):
    tracker = begin(
        params={
            "optim": {"lr": 1e-3, "groups": [{"match": "head.*", "lr": 10}], "betas": [0.9, 0.999]},
            "hub": {"api_key": "k1", "HF_TOKEN": "k2", "max_tokens": 5},
            "data": {"root": "https://me:k3@host/data", "keep": None, "flip": True, "none": {}},
        },
        tags={"trainkit.weird": "see sqlite://u:k4@x", "secret": "k5"},
    )
    run = store.client().get_run(tracker.run_id)
    assert run.data.params == {
        "optim.lr": "0.001",
        "optim.groups.0.match": "head.*",
        "optim.groups.0.lr": "10",
        "optim.betas": "[0.9, 0.999]",
        "hub.api_key": "[hidden]",
        "hub.HF_TOKEN": "[hidden]",
        "hub.max_tokens": "5",
        "data.root": "https://host/data",
        "data.keep": "null",
        "data.flip": "true",
        "data.none": "{}",
    }
    assert run.data.tags["trainkit.weird"] == "see sqlite://x" and run.data.tags["secret"] == "[hidden]"


def test_files_tables_figures_data_and_models_arrive(store, begin, tmp_path):
    from matplotlib.figure import Figure
    from pyarrow import parquet

    tracker = begin()
    tracker.log(30, {"lfw/accuracy": 0.9})
    tracker.log(40, {"lfw/accuracy": 0.8})
    fig = Figure()
    fig.subplots().plot([0, 1], [0, 1])
    tracker.figure("figures/roc.png", fig)
    tracker.table("rows/lfw.parquet", {"id": [4, 5], "group": ["a", "b"], "x": torch.ones(2, 3)})
    tracker.artifact_text("recipe.yaml", "lr: 0.1\n")
    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(3.0)}, weights)
    tracker.artifact_file(weights, "weights/last.safetensors")
    tracker.dataset("lfw", "test", "ab" * 32, "/data/lfw", 6000)
    tracker.model("best", weights, 30, {"lfw/accuracy": 0.9}, {"why": "highest"})
    weights.unlink()  # pruned before it was sent
    tracker.tags({"trainkit.note": "x"})
    tracker.finish("FINISHED")

    client = store.client()
    run = client.get_run(tracker.run_id)
    here = Path(client.download_artifacts(tracker.run_id, ""))
    assert (here / "figures/roc.png").read_bytes().startswith(b"\x89PNG")
    assert parquet.read_table(here / "rows/lfw.parquet").to_pydict() == {
        "id": [4, 5],
        "group": ["a", "b"],
        "x": [[1.0] * 3] * 2,
    }
    assert (here / "recipe.yaml").read_text() == "lr: 0.1\n"
    assert (here / "weights/last.safetensors").stat().st_size > 0
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("lfw", "ab" * 6, "test")
    assert json.loads(data.dataset.profile) == {"num_rows": 6000, "digest": "ab" * 32}
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert (model.name, model.status.value, model.tags["why"]) == ("best", "READY", "highest")
    (score,) = model.metrics
    assert (score.key, score.value, score.step, score.dataset_name) == ("lfw/accuracy", 0.9, 30, "lfw")
    assert model.tags["mlflow.source.name"] == run.data.tags["mlflow.source.name"]
    assert model.model_id in model.tags["mlflow.note.content"]
    assert run.outputs.model_outputs[0].model_id == model.model_id
    history = client.get_metric_history(tracker.run_id, "lfw/accuracy")
    assert sorted((m.step, m.value) for m in history) == [(30, 0.9), (40, 0.8)]
    assert run.data.tags["trainkit.note"] == "x"
    assert not list((tracker.folder.path / "files").iterdir())


@pytest.mark.parametrize("bad", ["/etc/x", "../x", "a/../../x", ""])
def test_an_artifact_stays_inside_its_run(begin, bad):
    with pytest.raises(ValueError, match="artifact path"):
        begin().artifact_text(bad, "x")


def test_who_what_and_where_is_noted(store, begin):
    tags = store.client().get_run(begin(parent="abc").run_id).data.tags
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if commit:
        assert len(tags["mlflow.source.git.commit"]) == 40
        assert tags["mlflow.source.git.dirty"] in ("true", "false")
    assert (
        f", torch {torch.__version__.split('+')[0]}, " in tags["trainkit.versions"]
        and tags["trainkit.world_size"] == "1"
    )
    assert float(tags["trainkit.ram_gb"]) > 0 and int(tags["trainkit.cores"]) >= 1
    assert tags["mlflow.parentRunId"] == "abc"
    assert not [value for value in tags.values() if "://" in value]


def test_git_that_is_missing_is_tolerated(begin, store, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "mlflow.source.git.commit" not in store.client().get_run(begin().run_id).data.tags


def test_the_experiment_is_described(store, begin):
    begin(note="What it is.", primary_metric="lfw/accuracy", higher_is_better=True)
    found = store.client().get_experiment_by_name("faces")
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
    assert found.tags["mlflow.note.content"] == "What it is."
    assert found.tags["mlflow.experiment.primaryMetric.name"] == "lfw/accuracy"
    assert found.artifact_location == (store.artifacts / "faces").as_uri()


def test_a_tag_that_another_run_sets_at_the_same_moment_is_set_again():
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import BAD_REQUEST, INTERNAL_ERROR

    asked = []

    def fails_with(code):
        def set_experiment_tag(*given):
            asked.append(given)
            if len(asked) == 1:
                raise MlflowException("UNIQUE constraint failed: experiment_tags.key", code)

        return SimpleNamespace(set_experiment_tag=set_experiment_tag)

    mlflow_experiment.set_tag(fails_with(BAD_REQUEST), "7", "a", "b")
    assert asked == [("7", "a", "b")] * 2
    asked.clear()
    with pytest.raises(MlflowException):
        mlflow_experiment.set_tag(fails_with(INTERNAL_ERROR), "7", "a", "b")
    assert len(asked) == 1


def test_a_server_that_keeps_no_files_itself_is_refused_where_its_folder_is_not(home, tmp_path):
    def begin_at(uri, place):
        found = SimpleNamespace(experiment_id="3", artifact_location=place, lifecycle_stage="active", tags={})
        client = SimpleNamespace(get_experiment_by_name=lambda name: found, set_experiment_tag=lambda *_: None)
        return mlflow_experiment.prepared(client, Store(home, uri), "faces", "", None, True)

    with pytest.raises(UserError, match="--artifacts-destination") as caught:
        begin_at("http://me:hunter2@far:5000", "file:///srv/nowhere/mlruns/3")
    assert "/srv/nowhere/mlruns/3" in str(caught.value) and "hunter2" not in str(caught.value)
    for uri, place in (
        ("http://far:5000", f"{tmp_path}/3"),  # a folder that both machines see
        ("http://far:5000", "mlflow-artifacts:/3"),
        ("http://far:5000", "s3://bucket/3"),
        ("http://localhost:5000", "/srv/nowhere/mlruns/3"),
        (f"sqlite:///{home}/mlflow.db", "/srv/nowhere/mlruns/3"),
    ):
        assert begin_at(uri, place) == "3"


def test_files_of_a_database_elsewhere_are_kept_beside_the_runs(tmp_path):
    assert Store(tmp_path, f"sqlite:///{tmp_path}/x/mlflow.db").artifacts == tmp_path / "x" / "artifacts"
    assert Store(tmp_path, "https://host:5000").artifacts is None


def test_a_data_set_that_is_only_called_train_is_named_by_its_source(store, begin):
    tracker = begin()
    tracker.dataset("train", "train", "ab" * 32, "/data/faces_lfw112/train", 10)
    tracker.dataset("val", "val", "cd" * 32, "", 10)
    tracker.finish("FINISHED")
    inputs = store.client().get_run(tracker.run_id).inputs.dataset_inputs
    assert {entry.dataset.name for entry in inputs} == {"faces_lfw112/train", "val"}


def test_a_logged_model_of_a_server_is_downloaded_once_and_whole(store, begin, tmp_path, monkeypatch):
    tracker = begin()
    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(3.0)}, weights)
    tracker.model("best", weights, 30)
    tracker.finish("FINISHED")
    (model_id,) = json.loads((tracker.folder.path / "models.json").read_text()).values()

    class Elsewhere:
        """This store's client, whose artifacts seem to be kept by a server."""

        def __init__(self, client):
            self.client = client

        def __getattr__(self, name):
            return getattr(self.client, name)

        def get_logged_model(self, model_id):
            model = self.client.get_logged_model(model_id)
            model._artifact_location = f"mlflow-artifacts:/1/models/{model_id}/artifacts"
            return model

    real = Store.client
    monkeypatch.setattr(Store, "client", lambda self: Elsewhere(real(self)))
    fetched = []

    def arrive(tracking_uri, artifact_uri, folder):
        fetched.append((tracking_uri, artifact_uri))
        (Path(folder) / "model.safetensors").write_bytes(arriving)
        return str(Path(folder) / "model.safetensors")

    monkeypatch.setattr(store_module, "_download", arrive)
    arriving = b"x"
    with pytest.raises(UserError, match="1 bytes of model"):
        store.model_file(f"models:/{model_id}")
    assert not [path for path in (store.home / "downloads").rglob("*") if path.is_file()]
    arriving = weights.read_bytes()
    file = store.model_file(f"models:/{model_id}")
    assert file == store.home / "downloads" / model_id / "model.safetensors" and file.parent.is_dir()
    assert file.read_bytes() == weights.read_bytes()
    assert store.model_file(f"models:/{model_id}") == file
    assert fetched == [(store.uri, f"mlflow-artifacts:/1/models/{model_id}/artifacts/model.safetensors")] * 2


def test_a_logged_model_is_found_by_its_id(store, begin, tmp_path):
    tracker = begin()
    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(3.0)}, weights)
    tracker.model("best", weights, 30)
    tracker.finish("FINISHED")
    (model_id,) = json.loads((tracker.folder.path / "models.json").read_text()).values()
    file = store.model_file(f"models:/{model_id}")
    assert file.read_bytes() == weights.read_bytes() and store.artifacts in file.parents
    with pytest.raises(UserError, match=r"not in .*; expected models:/<model id> or models:/NAME@ALIAS"):
        store.model_file(f"models:/{model_id[:-1]}")
    file.unlink()
    with pytest.raises(UserError, match="holds 0 safetensors files"):
        store.model_file(f"models:/{model_id}")


def test_the_load_of_the_machine_is_recorded_and_stops_with_the_run(home, begin):
    tracker = begin(system_metrics_every=0.05)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    tracker.finish("FINISHED")
    steps = [row[1] for row in rows(home, "system/cpu_utilization_percentage")]
    assert steps == list(range(len(steps))) and len(steps) >= 2
    assert all(row[2] > 0 for row in rows(home, "system/cpu_utilization_percentage")[:1])
    assert not tracker._sampler.is_alive()
    kept = tracker.readings()
    assert len(kept) == len(steps) and tracker.readings(kept[0].at) == kept[1:]
    assert kept[0].own_cores > 0


class Away:
    """A store that does not answer until it is let."""

    def __init__(self, client):
        self.client, self.down, self.calls = client, True, 0

    def __getattr__(self, name):
        self.calls += 1
        if self.down:
            raise ConnectionError("Connection refused by http://me:hunter2@host")
        return getattr(self.client, name)


def test_an_outage_is_reported_once_and_loses_nothing(home, begin, caplog, monkeypatch):
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.01)
    tracker = begin()
    away = tracker._uploader._client = Away(tracker._uploader._client)
    for step in range(20):
        tracker.log(step, {"train/loss": float(step)})
        tracker.artifact_text(f"notes/{step}.txt", str(step))
    assert not tracker.flush(1.0) and away.calls > 1
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "trainkit"]
    assert len(warnings) == 1 and "training continues" in warnings[0] and "hunter2" not in warnings[0]
    away.down = False
    assert tracker.flush()
    assert [row[1] for row in rows(home)] == list(range(20))
    assert len(list(home.glob("artifacts/faces/*/artifacts/notes/*.txt"))) == 20


def test_what_could_not_be_sent_by_the_end_is_sent_later(home, store, begin, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.3)
    tracker = begin()
    tracker._uploader._client = Away(tracker._uploader._client)
    tracker.log(1, {"train/loss": 0.5})
    tracker.finish("FINISHED")
    assert "the rest is kept in" in caplog.text
    assert rows(home) == [] and store.client().get_run(tracker.run_id).info.status == "RUNNING"
    send_rest(tracker.folder, store)
    assert rows(home) == [("train/loss", 1, 0.5, 0)]
    assert store.client().get_run(tracker.run_id).info.status == "FINISHED"


def test_a_sender_that_dies_takes_no_line_with_it(home, begin, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    tracker = begin()

    class Deadly:
        def __getattr__(self, name):
            raise SystemExit

    tracker._uploader._client = Deadly()
    tracker.log(1, {"train/loss": 0.5})
    assert not tracker.flush(5.0) and not tracker._uploader.is_alive()
    tracker.log(2, {"train/loss": 0.25})
    tracker.commit()
    assert journal.read(tracker.folder.journal).series("train/loss") == ([1, 2], [0.5, 0.25])


@pytest.mark.parametrize("many", [2, 1200])
def test_one_value_the_store_refuses_does_not_hold_up_the_others(home, begin, monkeypatch, many):
    tracker = begin()
    real = upload.entity
    monkeypatch.setattr(upload, "entity", lambda name, *rest, **more: real(name.replace("bad", "b@d"), *rest, **more))
    tracker.tags({"trainkit.a": 1, "b@d " * 100: 2, "trainkit.c": 3})
    for step in range(many // 2):
        tracker.log(step, {"a": 1.0, "bad" if step == 0 else "b": 2.0})
    assert tracker.flush()
    assert {row[0]: row[1] for row in rows(home)} == {"a": many // 2 - 1} | ({"b": many // 2 - 1} if many > 2 else {})
    tags = Store.locate().client().get_run(tracker.run_id).data.tags
    assert tags["trainkit.a"] == "1" and tags["trainkit.c"] == "3"


def test_a_silent_tracker_does_nothing():
    silent = Silent()
    silent.log(1, {"Bad Name": object()})
    silent.tags({"a": 1})
    silent.table("rows/x.parquet", {"x": [1]})
    silent.figure("x.png", None)
    silent.model("best", "nowhere.safetensors", 1, {"val/x": 1.0})
    silent.dataset("val", "test", "ab", "/data", 1)
    assert silent.commit() == 0 and silent.cut_back(5).events(0) == [] and silent.flush() and silent.run_id is None
    own = {name for name in vars(Silent) if not name.startswith("__")}
    through = {"tags", "adopt", "artifact_text", "artifact_file", "figure", "table", "dataset", "model"}
    assert {name for name in vars(Tracker) if not name.startswith("_") and name != "start"} == own - {
        "_nothing",
        "_set",
        "_set_file",
    } | through, "all others go through _set"


def test_flat_names_that_collide_are_kept_apart():
    assert flatten({"a@b": 1, "a=b": 2}) == {"a_b": "1", "a_b_": "2"}


# The store


@pytest.mark.slow
def test_two_processes_that_create_the_store_at_once_both_succeed(tmp_path):
    code = "from trainkit.tracking.store import Store; print(len(Store.locate().client().search_experiments()))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRAINKIT_STORE": str(tmp_path / "new")}
    env.pop("MLFLOW_TRACKING_URI", None)
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outs = [process.communicate() for process in both]
    assert [out for out, _ in outs] == ["1\n", "1\n"], outs
    with sqlite3.connect(tmp_path / "new" / "mlflow.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_store_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("TRAINKIT_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert Store.locate() == Store(ROOT / "mlruns", f"sqlite:///{ROOT / 'mlruns' / 'mlflow.db'}")
    monkeypatch.setenv("TRAINKIT_STORE", "other")
    assert Store.locate().home == tmp_path / "other"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x/y.db")
    assert Store.locate().database == tmp_path / "x" / "y.db" and Store.locate().home == tmp_path / "other"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pw@host:5000")
    assert Store.locate().database is None and Store.locate().shown == "http://host:5000"
    package = tmp_path / "site" / "trainkit"
    package.mkdir(parents=True)
    monkeypatch.setattr("trainkit.tracking.store.__file__", str(package / "tracking" / "store.py"))
    monkeypatch.delenv("TRAINKIT_STORE")
    assert Store.locate().home == tmp_path / "mlruns"


def test_a_damaged_database_is_a_user_error(store, home):
    content = bytearray((home / "mlflow.db").read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    (home / "mlflow.db").write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        store.prepare()
    (home / "mlflow.db").write_bytes(b"this is no database " * 300)
    with pytest.raises(UserError, match="damaged"):
        store.prepare()


def test_a_database_of_another_program_or_a_newer_mlflow_is_a_user_error(store, home):
    with sqlite3.connect(home / "mlflow.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'fedcba987654'")
    with pytest.raises(UserError, match="newer MLflow"):
        store.prepare()
    (home / "mlflow.db").unlink()
    with sqlite3.connect(home / "mlflow.db") as connection:
        connection.execute("CREATE TABLE things (a)")
    with pytest.raises(UserError, match="not an MLflow database"):
        store.prepare()


def test_places_that_cannot_hold_a_store_are_user_errors(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        Store(tmp_path / "file", f"sqlite:///{tmp_path}/file/mlflow.db").prepare()
    with pytest.raises(UserError, match="is not a server"):
        Store(tmp_path / "home", str(tmp_path / "mlruns")).prepare()


def test_a_run_that_ended_before_its_first_step_makes_no_name_ambiguous(store):
    whole, failed, killed = (store.new_run("faces", 0, "aaaa11") for _ in range(3))
    whole.update(status="KILLED", last_step=9)
    whole.release()
    failed.update(status="FAILED")
    failed.release()
    with pytest.raises(UserError, match="2 runs begin so"):
        store.find("faces")  # the third is going on
    killed.release()  # as of a process that is gone
    assert store.find("faces") == whole and store.find(failed.name) == failed and store.find(killed.name) == killed
    (killed.checkpoints / "step-000000004").mkdir()
    with pytest.raises(UserError, match="2 runs begin so"):
        store.find("faces")
    (killed.checkpoints / "step-000000004").rmdir()
    (killed.path / "members.json").write_text("{}")
    with pytest.raises(UserError, match="2 runs begin so"):
        store.find("faces")
    for other in (store.new_run("eyes", 0, "bbbb22") for _ in range(2)):
        other.release()
    with pytest.raises(UserError, match="2 runs begin so"):
        store.find("eyes")


def test_the_newest_unfinished_run_is_found_and_finished_ones_are_reused(store):
    runs = [store.new_run("faces", seed, "aaaa") for seed in range(4)]
    key = run_key("aaaa", "digest")
    runs[0].update(status="FINISHED", key=key)
    runs[1].update(status="KILLED", key="other")
    runs[2].update(status="FINISHED", key=key)
    for run in runs:
        run.update(run_id=f"id of {run.name}")
    assert store.newest_unfinished("faces") is None, "all are claimed by this process"
    store.new_run("faces", 9, "aaaa").release()  # never began
    for run in runs:
        run.release()
    assert store.newest_unfinished("faces") == runs[3]
    runs[3].update(status="FINISHED")
    assert store.newest_unfinished("faces") == store.newest_unfinished("faces", "aaaa") == runs[1]
    assert store.newest_unfinished("faces", "bbbb") is None and store.newest_unfinished("other") is None
    assert store.finished_with(key) == runs[2] and store.finished_with("none") is None


def test_a_run_is_found_by_its_name_without_reading_others_and_runs_are_read_once(store, monkeypatch, caplog):
    runs = [store.new_run("faces", seed, f"{seed}{seed}aa") for seed in range(6)]
    for number, run in enumerate(runs):
        run.update(run_id=f"id{number}", status=["RUNNING", "KILLED", "FINISHED"][number % 3], key=f"key{number}")
        run.release()
    parsed = []
    read = run_folder.parse_info
    for module in (run_folder, store_module):
        monkeypatch.setattr(module, "parse_info", lambda text: parsed.append(read(text)) or parsed[-1])

    def read_by(look):
        parsed.clear()
        found = look()
        return found, sorted(info.name for info in parsed)

    names = [run.name for run in runs]
    assert read_by(lambda: store.find(runs[4].name)) == (runs[4], [names[4]])
    assert read_by(lambda: store.find("id3")) == (runs[3], names)
    assert read_by(store.runs) == (runs, names)
    assert read_by(lambda: store.finished_with("key5")) == (runs[5], [names[5]])
    assert read_by(lambda: store.newest_unfinished("faces", "11aa"))[0] == runs[1]
    found, known = read_by(store.abandoned)
    assert found == [runs[0], runs[3]] and set(known) == {names[0], names[3]}
    assert not caplog.messages
    (runs[4].path / "run.json").write_text("{")
    (store.home / "runs" / "stray").mkdir()
    (store.home / "runs" / "note.txt").write_text("mine")
    assert store.runs() == runs[:4] + runs[5:]
    assert len(caplog.messages) == 1 and str(runs[4].path / "run.json") in caplog.messages[0]
    with pytest.raises(UserError, match="not in"):
        store.find(runs[4].name)


def test_run_json_survives_a_crash_in_the_middle_of_writing(store, monkeypatch):
    folder = store.new_run("faces", 0, "aaaa")
    before = folder.info()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainkit.tracking.store.os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        folder.update(status="FINISHED")
    assert RunFolder(folder.path).info() == before
    with pytest.raises(ValueError, match="colour"):
        folder.update(colour="red")


def plain_figure(colour):
    from matplotlib.figure import Figure

    return Figure(figsize=(7.5, 3), dpi=120, facecolor=colour)


def test_the_small_copy_of_a_picture_is_as_wide_as_that_of_any_other_unless_it_is_very_tall(tmp_path):
    from PIL import Image

    for tall, expected in ((360, (600, 240)), (1500, (600, 1000)), (9000, (180, 1800))):
        png = io.BytesIO()
        Image.new("RGB", (900, tall)).save(png, format="png")
        tracking._write_small(tmp_path / "small.webp", png)
        assert Image.open(tmp_path / "small.webp").size == expected


def test_names_of_pictures_are_those_that_mlflow_itself_would_give(store, begin):
    """One of ours and one of MLflow's client, but for the random part."""
    from PIL import Image

    tracker = begin()
    tracker.image("a/b", 3, plain_figure("red"))
    assert tracker.flush()
    client = store.client()
    ours = {entry.path for entry in client.list_artifacts(tracker.run_id, "images")}
    assert client.get_run(tracker.run_id).data.tags["mlflow.loggedImages"] == "True"
    client.log_image(tracker.run_id, Image.new("RGB", (9, 9)), key="a/b", step=3, synchronous=True)
    theirs = {entry.path for entry in client.list_artifacts(tracker.run_id, "images")} - ours

    def form(path):
        return re.sub(r"timestamp\+\d+\+[0-9a-f-]{36}", "timestamp+T+U", path)

    assert sorted(map(form, ours)) == sorted(map(form, theirs)) and len(ours) == 2


def test_a_picture_that_is_drawn_again_after_a_resume_replaces_the_first(store, begin):
    from PIL import Image

    first = begin()
    position = first.commit()
    first.image("val/tsne", 10, plain_figure("red"))
    first.image("val/tsne", 20, plain_figure("red"))
    assert first.flush()
    trackers.crash(first)
    second = begin(store.find(first.folder.name), resume=True)
    second.cut_back(position)
    second.image("val/tsne", 10, plain_figure("blue"))
    second.finish("FINISHED")
    here = Path(store.client().download_artifacts(first.run_id, "images"))
    colours = {name.name.split("+")[2]: Image.open(name).getpixel((5, 5)) for name in here.glob("*.png")}
    assert len(list(here.iterdir())) == 4
    assert {step: colour[:3] for step, colour in colours.items()} == {"10": (0, 0, 255), "20": (255, 0, 0)}


@pytest.mark.parametrize("bad", ["a+b", "ä", "", "a#b"])
def test_a_key_that_mlflow_would_not_read_back_is_refused(begin, bad):
    with pytest.raises(ValueError, match="image key"):
        begin().image(bad, 1, None)


def test_a_table_may_be_one_that_the_page_shows(store, begin):
    tracker = begin()
    tracker.table(
        "tables/val_per_class_last.csv", {"class": ['a "b", c', "d"], "f1": np.array([2 / 3, 1]), "n": [1, None]}
    )
    assert tracker.flush()
    file = Path(store.client().download_artifacts(tracker.run_id, "tables/val_per_class_last.csv"))
    assert file.read_text() == '"class","f1","n"\n"a ""b"", c",0.666667,1\n"d",1,\n'


class Kept:
    """A tracker that notes what it is given."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, kind):
        return lambda *given: self.calls.append((kind, *given))


def witness_of(tracker, main=True):
    from types import SimpleNamespace

    from trainkit.training.run_logger import RunLogger

    train = SimpleNamespace(ema=None)
    recipe = SimpleNamespace(log=SimpleNamespace(rows=True), best=None, train=train)
    return RunLogger(recipe, None, tracker, main)


@pytest.mark.parametrize(
    ("decides", "columns", "values"),
    [
        ("val/dice_mean", ["val/dice_mean"], ["0.8123"]),
        ("val/ema/dice_mean", ["val/dice_mean", "val/ema/dice_mean"], ["0.8123", "0.9000"]),
        ("val/m8", ["val/m8"], ["8"]),
    ],
)
def test_the_metric_that_decides_is_the_last_column_and_marked_and_is_alone_under_best(
    capsys, decides, columns, values
):
    from types import SimpleNamespace

    from trainkit.interfaces import Scores

    own = {"dice_mean": 0.81234567, **{f"m{k}": float(k) for k in range(9)}}
    scored = {"val": Scores(own, {}), "val/ema": Scores({"dice_mean": 0.9}, {})}
    metrics = {f"{title}/{key}": value for title, scores in scored.items() for key, value in scores.metrics.items()}
    for leads in (True, False):
        witness = witness_of(tracker := Kept())
        witness.recipe.best = SimpleNamespace(metric=decides)
        witness.scored(30, "val", scored, metrics, 1.0, leads)
        head, row = capsys.readouterr().out.splitlines()
        assert head.split()[6:] == columns and row.split() == ["30", *values, *["*best"] * leads]
        (logged,) = [given[2] for given in tracker.calls if given[0] == "log"]
        best = {name: value for name, value in logged.items() if name.startswith("best/")}
        at_best = {name: value for name, value in logged.items() if name.startswith("at_best/")}
        assert best == ({f"best/{decides}": metrics[decides]} if leads else {})
        assert at_best == {f"at_best/{k}": v for k, v in metrics.items() if leads and k != decides}


def pictures():
    maps = {"points": np.eye(2), "label": np.array([0, 1]), "wrong": np.array([False, True]), "names": ("a", "b")}
    sheet = {
        "images": np.zeros((1, 4, 8, 3), np.uint8),
        "id": ["x"],
        "label": ["a"],
        "prediction": ["b"],
        "probability": [0.9],
        "distance": [4.0],
        "found": 1,
        "total": 2,
    }
    return {
        "pca": {**maps, "total": 2, "share": [0.5, 0.25]},
        "tsne": {**maps, "total": 9},
        "hard": sheet,
        "mislabelled": sheet,
        "outliers": sheet,
    }


def test_an_evaluation_leaves_its_tables_and_the_pictures_of_its_step():
    from trainkit.interfaces import Scores

    tracker = Kept()
    given = {"eyes": Scores({}, tables={"per_class": {"f1": [1.0]}}, pictures=pictures())}
    given["eyes/ema"] = Scores({}, tables={"per_class": {"f1": [0.5]}})
    witness_of(tracker).scored(30, "eyes", given, {}, 1.0, leads=False)
    tables = {call[1]: call[2] for call in tracker.calls if call[0] == "table"}
    assert tables == {
        "tables/eyes_per_class_last.csv": {"f1": [1.0]},
        "tables/eyes_ema_per_class_last.csv": {"f1": [0.5]},
    }
    shown = {call[1:3] for call in tracker.calls if call[0] == "image"}
    assert shown == {(f"eyes/{kind}", 30) for kind in pictures()}
    figures = {call[1][5:]: call[3] for call in tracker.calls if call[0] == "image"}
    assert figures["tsne"].texts[0].get_text() == "t-SNE of embeddings, eyes, step 30 (2 of 9 samples)"
    assert "25.0 % of variance" in figures["pca"].axes[0].get_ylabel()
    assert figures["hard"].texts[2].get_text() == "x\na\n→ b 0.90"
    assert figures["outliers"].texts[2].get_text() == "x\na, 4.0 sd\n→ b 0.90"
    tracker.calls.clear()
    witness_of(tracker).scored(40, "eyes", given, {}, 1.0, leads=True)
    assert {call[1] for call in tracker.calls if call[0] == "table"} == {
        "rows/eyes_best.parquet",
        *(f"tables/eyes{average}_per_class_{when}.csv" for average in ("", "_ema") for when in ("last", "best")),
    }


def test_roc_and_confusion_are_drawn_of_the_networks_of_this_run_alone():
    from trainkit.plots.run_figures import draw

    curves = {
        "confusion": {"counts": np.eye(2, dtype=int), "names": ("closed", "open")},
        "roc": {"far": [0, 1], "tar": [0.5, 1]},
    }
    tracker = Kept()
    networks = {"this run": curves, "EMA weights": curves, "pixels": curves}
    draw(tracker, {"val": networks, "lfw": {"this run": {"roc": curves["roc"]}}})
    drawn = {call[1].removeprefix("figures/"): call[2] for call in tracker.calls}
    assert set(drawn) == {
        "roc_val.png",
        "roc_lfw.png",
        "confusion_val.png",
        "confusion_val_ema.png",
    }
    assert "Confusion matrix on val, EMA weights" in drawn["confusion_val_ema.png"].texts[0].get_text()
    assert "predicted as open" in drawn["roc_val.png"].axes[0].get_xlabel()
    assert "false accept" in drawn["roc_lfw.png"].axes[0].get_xlabel()
    assert drawn["roc_val.png"].axes[0].get_legend().get_texts()[0].get_text() == "model"


def test_other_threads_get_the_interpreter_back_sooner_beside_a_sender():
    before, store = sys.getswitchinterval(), SimpleNamespace(shown="store", abandoned=list, unsent=list)
    sys.setswitchinterval(0.005)
    try:
        sent = threading.Event()
        one = uploader.Uploader(store, SimpleNamespace(send=lambda client: sent.set()), waits=False)
        one.begin(object())
        one.wake.set()
        assert sent.wait(10)
        one.stop()
        assert sys.getswitchinterval() == pytest.approx(uploader.SWITCH_SECONDS)
    finally:
        sys.setswitchinterval(before)


def test_runs_that_were_left_are_looked_for_at_the_first_line_and_once():
    done, sent = [], threading.Semaphore(0)
    store = SimpleNamespace(shown="store", abandoned=lambda: done.append("looked") or [], unsent=list)
    box = SimpleNamespace(send=lambda client: done.append("sent") or sent.release())
    one = uploader.Uploader(store, box, waits=False)
    one.begin(object())
    try:
        time.sleep(0.1)
        assert not done, "while a training starts it has the interpreter for itself"
        for _ in range(2):
            one.wake.set()
            assert sent.acquire(timeout=10)
        assert done == ["looked", "sent", "sent"]
    finally:
        one.stop()

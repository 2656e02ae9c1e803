import contextlib
import json
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from trainkit import sender, tracking, ui
from trainkit.errors import UserError
from trainkit.store import Store
from trainkit.tracking import Tracker
from trainkit.ui import running, serve


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRAINKIT_STORE", str(tmp_path / "mlruns"))
    return Store.locate()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url, data=None, **headers):
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return answer.read()


@pytest.mark.slow
def test_the_page_shows_a_run_with_its_metrics_and_files(store, tmp_path):
    folder = store.new_run("faces", 0, "aaaa")
    tracker = Tracker.start(
        folder, store, experiment="faces", run_name=folder.name, params={"lr": 0.1}, system_metrics_every=0
    )
    tracker.log(5, {"val/accuracy": 0.75})
    tracker.artifact_text("recipe.yaml", "lr: 0.1\n")
    tracker.finish("FINISHED")
    port = free_port()
    with running(store, port) as server:
        at = f"http://127.0.0.1:{port}"
        assert b"<title>MLflow</title>" in get(f"{at}/")
        body = json.dumps({"experiment_ids": ["1"], "filter": "metrics.`val/accuracy` > 0.7"}).encode()
        (run,) = json.loads(get(f"{at}/api/2.0/mlflow/runs/search", body))["runs"]
        assert run["info"]["run_name"] == folder.name and run["info"]["status"] == "FINISHED"
        assert run["data"]["metrics"][0]["value"] == 0.75
        assert get(f"{at}/get-artifact?path=recipe.yaml&run_uuid={tracker.run_id}") == b"lr: 0.1\n"
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{at}/api/2.0/mlflow/experiments/search", b"{}", Host="evil.example")
        assert refused.value.code == 403
        with pytest.raises(UserError, match=rf"port {port}: in use; take --port \d+"):
            serve(store, port)
    assert server.returncode is not None
    with pytest.raises(urllib.error.URLError):
        get(f"{at}/health")


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_loses_nothing_and_doubles_nothing(store, monkeypatch):
    monkeypatch.setattr(sender, "EVERY_SECONDS", 0.05)
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    remote = Store.locate()
    given = {"experiment": "faces", "params": {"lr": 0.1}, "system_metrics_every": 0}
    with running(store, port):
        folder = remote.new_run("faces", 0, "aaaa")
        tracker = Tracker.start(folder, remote, run_name=folder.name, **given)
        for step in range(20):
            tracker.log(step, {"train/loss": 1 / (step + 1)})
        position = tracker.commit()
        assert tracker.flush()
    for step in range(20, 40):
        tracker.log(step, {"train/loss": 1 / (step + 1)})
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 1.0)
    tracker.finish("KILLED")
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 60.0)
    with running(store, port):
        tracker = Tracker.start(remote.find(folder.name), remote, run_name=folder.name, resume=True, **given)
        tracker.cut_back(position - 1 - len(folder.journal.read_bytes()[: position - 1].splitlines()[-1]))
        for step in range(19, 60):
            tracker.log(step, {"train/loss": 1 / (step + 1)})
        tracker.artifact_text("recipe.yaml", "lr: 0.1\n")
        tracker.finish("FINISHED")
        client = remote.client()
        assert client.get_run(tracker.run_id).info.status == "FINISHED"
        history = client.get_metric_history(tracker.run_id, "train/loss")
        assert sorted((m.step, m.value) for m in history) == [(step, 1 / (step + 1)) for step in range(60)]
        assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["recipe.yaml"]


def test_a_port_in_use_is_a_user_error_that_names_a_free_one(store):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(UserError, match="in use") as caught:
            serve(store, holder.getsockname()[1])
    named = int(caught.value.remedy.split()[-1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", named))


def test_an_empty_store_and_one_that_was_moved_are_said_to_be(store, monkeypatch, tmp_path):
    @contextlib.contextmanager
    def ended_at_once(store, port):
        def wait():
            raise KeyboardInterrupt

        yield SimpleNamespace(wait=wait)

    def said_of(*places):
        found = [{"experiment_id": "0", "name": "Default", "artifact_location": f"{store.home}/artifacts/0"}]
        found += [{"experiment_id": "1", "name": "faces", "artifact_location": place} for place in places]
        monkeypatch.setattr(ui, "_experiments", lambda port: found)
        said = []
        serve(store, say=said.append)
        return "\n".join(said[1:])

    monkeypatch.setattr(ui, "running", ended_at_once)
    assert said_of() == "  There are no runs yet."
    assert "relocate" not in said_of(f"{store.home}/artifacts/faces")
    assert f"looked for in {tmp_path}/gone" in said_of(f"file://{tmp_path}/gone/artifacts/faces")


def test_a_server_elsewhere_is_named_without_its_password(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@tracking.example:8080/ml")
    said = []
    serve(Store.locate(), say=said.append)
    assert len(said) == 1 and "https://tracking.example:8080/ml" in said[0] and "hunter2" not in said[0]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_a_user_error(store, port):
    with pytest.raises(UserError, match="1 to 65535"):
        serve(store, port)

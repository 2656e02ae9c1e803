import contextlib
import json
import os
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_payloads import lay_modules, ran

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


def get(url, data=None, method=None, **headers):
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
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


def listening(session: int) -> dict[int, set[str]]:
    """Ports on which processes of a session listen, and at which addresses, as the kernel has it."""
    sockets: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                address, _, port = local.partition(":")
                sockets[inode] = (address, int(port, 16))
    found: dict[int, set[str]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == session:
                for link in Path(f"/proc/{process.pid}/fd").iterdir():
                    inode = os.readlink(link).removeprefix("socket:[").removesuffix("]")
                    if inode in sockets:
                        found.setdefault(sockets[inode][1], set()).add(sockets[inode][0])
    return found


@pytest.mark.slow
def test_the_page_is_for_this_machine_alone_and_does_nothing_but_show(store, tmp_path, monkeypatch):
    """By the real server: where it listens, to whom it answers, what it refuses, and what it is not led to import."""
    for name, value in {
        "DISABLE_SECURITY_MIDDLEWARE": "true", "ALLOWED_HOSTS": "*", "CORS_ALLOWED_ORIGINS": "*",
        "ENABLE_JOB_EXECUTION": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MLFLOW_SERVER_{name}", value)  # of another server
    lay_modules(store.home, tmp_path)
    folder = store.new_run("faces", 0, "aaaa")
    tracker = Tracker.start(
        folder, store, experiment="faces", run_name=folder.name, params={"lr": 0.1}, system_metrics_every=0
    )
    tracker.artifact_text("recipe.yaml", "lr: 0.1\n")
    tracker.finish("FINISHED")
    port = free_port()
    at = f"http://127.0.0.1:{port}"
    search = f"{at}/api/2.0/mlflow/experiments/search"

    def refused(url: str, data: bytes | None = None, method: str | None = None, **headers: str) -> int:
        with pytest.raises(urllib.error.HTTPError) as answer:
            get(url, data, method, **headers)
        return answer.value.code

    with running(store, port) as server:
        assert listening(server.pid) == {port: {"0100007F"}}, "127.0.0.1 as the kernel writes it, and nothing else"
        for host in ("evil.com", f"evil.com:{port}", "127.0.0.1.evil.com", f"{socket.gethostname()}.evil.com"):
            assert refused(search, b'{"max_results": 1}', Host=host) == 403, host
            assert refused(f"{at}/", Host=host) == 403, host
        for origin in ("https://evil.com", "http://127.0.0.1.evil.com", "null"):
            assert refused(f"{at}/api/2.0/mlflow/experiments/create", b'{"name": "evil"}', Origin=origin) == 403, origin
        assert get(search, b'{"max_results": 9}', Host=f"localhost:{port}"), "by its own names it answers"
        # Files of the machine: what the store says of none, and what a proxy of artifacts would take and give.
        proxy = f"{at}/api/2.0/mlflow-artifacts/artifacts"
        assert refused(f"{proxy}/recipe.yaml") >= 400
        assert refused(f"{proxy}/evil.txt", b"evil", "PUT") >= 400
        for path in ("../../../run.json", "/etc/passwd", "..%2f..%2frun.json", "file:///etc/passwd"):
            quoted = urllib.parse.quote(path, safe="%")
            assert refused(f"{at}/get-artifact?path={quoted}&run_uuid={tracker.run_id}") in (400, 404), path
        # Work: MLflow would run evaluations and more in processes of its own.
        for route in ("jobs", "jobs/search", "scorers/list", "gateway/endpoints"):
            for api in ("/api/3.0", "/ajax-api/3.0", "/api/2.0/mlflow", "/ajax-api/3.0/mlflow"):
                with contextlib.suppress(urllib.error.HTTPError):
                    assert b"job_id" not in get(f"{at}{api}/{route}")
        words = [" ".join(process.cmdline()) for process in psutil.Process(server.pid).children(recursive=True)]
        assert not [word for word in words if "huey" in word or "job" in word], words
    assert listening(server.pid) == {}
    assert ran(tmp_path) == [], "modules that lie in the store are not imported"
    log = (store.home / "ui.log").read_bytes()
    assert b"mlflow" in log.lower() or log == b""


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

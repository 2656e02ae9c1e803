import contextlib
import json
import os
import re
import secrets
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import trackers

from tests.security.test_malicious_files import lay_modules, ran
from trainkit.errors import UserError
from trainkit.tracking import tracker as tracking
from trainkit.tracking import ui, uploader
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker
from trainkit.tracking.ui import running, serve
from trainkit.tracking.upload import rounded


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
    with running(store, port) as (server, at):
        assert b"<title>MLflow</title>" in get(f"{at}/")
        body = json.dumps({"experiment_ids": ["1"], "filter": "metrics.`val/accuracy` > 0.7"}).encode()
        (run,) = json.loads(get(f"{at}/api/2.0/mlflow/runs/search", body))["runs"]
        assert run["info"]["run_name"] == folder.name and run["info"]["status"] == "FINISHED"
        assert run["data"]["metrics"][0]["value"] == 0.75
        assert get(f"{at}/get-artifact?path=recipe.yaml&run_uuid={tracker.run_id}") == b"lr: 0.1\n"
        # What the page writes: a name, a note, the state of its charts; deleting and bringing back.
        runs = f"{at}/ajax-api/2.0/mlflow/runs"
        get(f"{runs}/update", json.dumps({"run_id": tracker.run_id, "run_name": "renamed"}).encode())
        note = {"run_id": tracker.run_id, "key": "mlflow.note.content", "value": "Kept."}
        get(f"{runs}/set-tag", json.dumps(note).encode())
        state = {"experiment_id": "1", "key": "mlflow.sharedViewState.mine", "value": "{}"}
        get(f"{at}/ajax-api/2.0/mlflow/experiments/set-experiment-tag", json.dumps(state).encode())
        for change in ("delete", "restore"):
            get(f"{runs}/{change}", json.dumps({"run_id": tracker.run_id}).encode())
        kept = store.client().get_run(tracker.run_id)
        assert (kept.info.run_name, kept.info.lifecycle_stage) == ("renamed", "active")
        assert kept.data.tags["mlflow.note.content"] == "Kept."
        assert "mlflow.sharedViewState.mine" in store.client().get_experiment("1").tags
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{at}/api/2.0/mlflow/experiments/search", b"{}", Host="evil.example")
        assert refused.value.code == 403
        with pytest.raises(UserError, match=rf"port {port}: in use; use --port \d+"):
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

    def refused(url: str, data: bytes | None = None, method: str | None = None, **headers: str) -> int:
        with pytest.raises(urllib.error.HTTPError) as answer:
            get(url, data, method, **headers)
        return answer.value.code

    with running(store, port) as (server, at):
        search = f"{at}/api/2.0/mlflow/experiments/search"
        assert listening(server.pid) == {port: {"0100007F"}}, "127.0.0.1 as the kernel writes it, and nothing else"
        for host in ("evil.com", f"evil.com:{port}", "127.0.0.1.evil.com", f"127.0.0.1:{port}@evil.com", "127.0.0.1:1"):
            assert refused(search, b'{"max_results": 1}', Host=host) == 403, host
            assert refused(f"{at}/", Host=host) == 403, host
        for origin in ("https://evil.com", "http://127.0.0.1.evil.com", "null"):
            assert refused(f"{at}/api/2.0/mlflow/experiments/create", b'{"name": "evil"}', Origin=origin) == 403, origin
        assert get(search, b'{"max_results": 9}', Host=f"localhost:{port}"), "by its own names it answers"
        assert refused(search, b'{"max_results": ' + b"[" * 5000) in (400, 500)
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


def attack(at: str, open_to_all: Path, home: Path) -> dict[str, bytes]:
    """Ways of a stranger to the files in `home`, of the server's user, by the server at an address; what each returned.

    `open_to_all` is a folder in which strangers write: under the names that MLflow gives to the files of runs, models
    and traces they lay links to `home`.
    """

    def ask(path: str, data: dict[str, object] | bytes | None = None, method: str | None = None) -> bytes:
        body = json.dumps(data).encode() if isinstance(data, dict) else data
        try:
            return get(f"{at}{path}", body, method)
        except urllib.error.HTTPError as error:
            return error.read()

    def made(path: str, data: dict[str, object], *keys: str) -> str:
        found = ask(path, data)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(found)
            for key in keys:
                found = found[key]
            return str(found)
        return "1"

    def linked(*parts: str) -> str:
        place = open_to_all.joinpath(*parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(home)
        return place.as_uri()

    got = {}
    for api in ("api", "ajax-api"):
        name, root = f"evil-{api}", f"/{api}/2.0/mlflow"
        location = {"name": name, "artifact_location": open_to_all.as_uri()}
        experiment = made(f"{root}/experiments/create", location, "experiment_id")
        run = made(f"{root}/runs/create", {"experiment_id": experiment, "start_time": 1}, "run", "info", "run_id")
        source = linked(run, "artifacts")
        got[f"{api}: a file of a run"] = ask(f"/get-artifact?path=secret.txt&run_uuid={run}")
        got[f"{api}: an upload"] = ask(f"/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path={name}", b"x", "POST")
        got[f"{api}: the list"] = ask(f"{root}/artifacts/list?run_id={run}")
        query = f'{{ mlflowListArtifacts(input: {{runId: "{run}"}}) {{ files {{ path }} }} }}'
        got[f"{api}: the list by GraphQL"] = ask("/graphql", {"query": query})
        location = {"experiment_id": experiment, "name": "evil"}
        model = made(f"{root}/logged-models", location, "model", "info", "model_id")
        linked("models", model, "artifacts")
        got[f"{api}: a file of a model"] = ask(
            f"/ajax-api/2.0/mlflow/logged-models/{model}/artifacts/files?artifact_file_path=secret.txt"
        )
        ask(f"{root}/registered-models/create", {"name": name})
        location = {"name": name, "source": source, "run_id": run}
        version = made(f"{root}/model-versions/create", location, "model_version", "version")
        got[f"{api}: a file of a version of a model"] = ask(
            f"/model-versions/get-artifact?name={name}&version={version}&path=secret.txt"
        )
        location = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}}
        trace = {"trace_id": f"tr-{api}", "trace_location": location, "request_time": "2020-01-01T00:00:00Z"}
        ask(f"/{api}/3.0/mlflow/traces", {"trace": {"trace_info": trace | {"state": "OK"}}})
        linked("traces", f"tr-{api}", "artifacts")
        got[f"{api}: the file of a trace"] = ask(f"/ajax-api/3.0/mlflow/get-trace-artifact?request_id=tr-{api}")
        # The proxy of artifacts is off.
        for path in ("secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", quoted(f"{home}/secret.txt")):
            ask(f"/{api}/2.0/mlflow-artifacts/artifacts/{path}")
            ask(f"/{api}/2.0/mlflow-artifacts/artifacts/{path}.evil", b"x", "PUT")
    return got


def quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")


@pytest.mark.slow
def test_nobody_without_the_address_gets_files_by_way_of_the_page(store, tmp_path):
    """Every user of the machine reaches the port. The same attack succeeds for whoever has the address."""
    home, open_to_all = tmp_path / "home", tmp_path / "open"
    home.mkdir()
    open_to_all.mkdir()
    (home / "secret.txt").write_text("hunter2")
    (home / "traces.json").write_text('{"spans": ["hunter2"]}')
    folder = store.new_run("faces", 0, "aaaa")
    tracker = Tracker.start(
        folder, store, experiment="faces", run_name=folder.name, params={"lr": 0.1}, system_metrics_every=0
    )
    tracker.artifact_text("recipe.yaml", "lr: 0.1\n")
    tracker.finish("FINISHED")
    files = Path(urllib.parse.urlsplit(store.client().get_run(tracker.run_id).info.artifact_uri).path)
    (files / "link.txt").symlink_to(home / "secret.txt")
    before = sorted(home.iterdir())
    port = free_port()
    bare = f"http://127.0.0.1:{port}"
    with running(store, port) as (server, at):
        token = at.removeprefix(f"{bare}/")
        wrong = ("", f"/{token[:-1]}", f"/{token}x", f"/{token.swapcase()}", f"/x/../{token[:-1]}", "//", "/%2f")
        for guess in (*wrong, "/static-files/..", "/build/.."):
            got = attack(f"{bare}{guess}", open_to_all, home)
            assert not {way for way, answer in got.items() if b"hunter2" in answer or b"secret.txt" in answer}, guess
        assert sorted(home.iterdir()) == before, "and nothing was written"
        assert not [e.name for e in store.client().search_experiments() if "evil" in e.name]
        for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)):
            assert token not in " ".join(process.cmdline()), "every user of the machine can read that"
        with pytest.raises(urllib.error.HTTPError, match="400"):  # by MLflow itself
            get(f"{at}/get-artifact?path=link.txt&run_uuid={tracker.run_id}")
        got = attack(at, open_to_all, home)
        missed = {way for way, answer in got.items() if b"hunter2" not in answer and b"secret.txt" not in answer}
        assert missed == {"api: an upload", "ajax-api: an upload"}, "control: the attack works"
        assert {file.name for file in home.iterdir()} >= {"evil-api", "evil-ajax-api"}
    assert token not in (store.home / "ui.log").read_text(), "in a shared store that may be another user's file"
    with running(store, port) as (_, again):
        assert again != at


def routes() -> list[tuple[str, str]]:
    """Methods and paths to which a server of MLflow answers, with 1 in the place of what varies."""
    from mlflow.server import app as flask
    from mlflow.server.fastapi_app import app

    found = {(method, rule.rule) for rule in flask.url_map.iter_rules() for method in rule.methods}
    found |= {(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()}
    found = {(method, path) for method, path in found if not path.startswith("/build/")}  # files of MLflow's own page
    return sorted((method, re.sub("<[^>]*>|{[^}]*}", "1", path)) for method, path in found)


@pytest.mark.slow
def test_no_path_of_the_server_answers_without_the_token(store):
    known = routes()
    assert len(known) > 300
    port, answered = free_port(), []
    with running(store, port):
        for method, path in known:
            try:
                get(f"http://127.0.0.1:{port}{path}", b"{}" if method in ("POST", "PUT", "PATCH") else None, method)
                answered.append((method, path, 200))
            except urllib.error.HTTPError as error:
                # 503: the proxy of artifacts, which is not prefixed, is off. 405: it has paths of these methods.
                if error.code not in (404, 405, 503) or (error.code != 404 and "/mlflow-artifacts/" not in path):
                    answered.append((method, path, error.code))
    assert not answered


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_loses_nothing_and_doubles_nothing(store, monkeypatch):
    monkeypatch.setattr(uploader, "EVERY_SECONDS", 0.05)
    port = free_port()
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: "always-the-same")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}/always-the-same")
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
        assert sorted((m.step, m.value) for m in history) == [(step, rounded(1 / (step + 1))) for step in range(60)]
        assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["recipe.yaml"]


def test_an_experiment_or_a_run_is_named_by_the_address_to_open(store):
    tracker = trackers.begin(store, experiment="faces", primary_metric="lfw/eer")
    tracker.finish("FINISHED")
    number = store.client().get_experiment_by_name("faces").experiment_id
    table = f"#/experiments/{number}/runs?workflowType=machine_learning&viewStateShareKey=trainkit"
    assert ui.fragment_of(store, "faces") == table
    assert ui.fragment_of(store, tracker.folder.name).startswith(f"#/experiments/{number}/runs/{tracker.run_id}?")
    with pytest.raises(UserError, match="neither an experiment nor a run; name a run, or an experiment: faces"):
        ui.fragment_of(store, "fases")


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

        yield SimpleNamespace(wait=wait), f"http://127.0.0.1:{port}/token"

    def said_of(*places):
        found = [SimpleNamespace(experiment_id="1", name="faces", tags={}, artifact_location=place) for place in places]
        monkeypatch.setattr(ui, "_experiments", lambda store: found)
        said = []
        serve(store, say=said.append)
        return "\n".join(said[2:])

    monkeypatch.setattr(ui, "running", ended_at_once)
    assert said_of() == "  There are no runs yet."
    assert "relocate" not in said_of(f"{store.home}/artifacts/faces")
    assert f"expected in {tmp_path}/gone" in said_of(f"file://{tmp_path}/gone/artifacts/faces")


def test_a_server_elsewhere_is_named_without_its_password(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@tracking.example:8080/ml")
    said = []
    serve(Store.locate(), say=said.append)
    assert len(said) == 1 and "https://tracking.example:8080/ml" in said[0] and "hunter2" not in said[0]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_a_user_error(store, port):
    with pytest.raises(UserError, match="1 to 65535"):
        serve(store, port)

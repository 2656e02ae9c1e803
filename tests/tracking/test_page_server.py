"""The start page that `trainkit ui` serves in place of MLflow's."""

from __future__ import annotations

import asyncio
import json

import pytest
import trackers

from trainkit.errors import UserError
from trainkit.tracking import page_server, ui
from trainkit.tracking.store import Store

pytestmark = pytest.mark.usefixtures("store")


def begun(experiment="faces", metric="lfw/eer"):
    tracker = trackers.begin(Store.locate(), experiment=experiment, primary_metric=metric)
    tracker.finish("FINISHED")
    return tracker


def test_an_experiment_or_a_run_is_named_by_the_address_to_open():
    store, tracker = Store.locate(), begun()
    number = store.client().get_experiment_by_name("faces").experiment_id
    table = f"#/experiments/{number}/runs?workflowType=machine_learning&viewStateShareKey=trainkit"
    assert ui.fragment_of(store, "faces") == table
    assert ui.fragment_of(store, tracker.folder.name).startswith(f"#/experiments/{number}/runs/{tracker.run_id}?")
    with pytest.raises(UserError, match="neither an experiment nor a run; name a run, or an experiment: faces"):
        ui.fragment_of(store, "fases")


@pytest.fixture
def served(monkeypatch):
    """Get a path from the app around a server that answers with a page."""
    fastapi = pytest.importorskip("mlflow.server.fastapi_app")
    page = b"<!doctype html><html><head><title>MLflow</title></head></html>"

    async def answer(scope, receive, send):
        headers = [(b"content-length", str(len(page)).encode()), (b"etag", b"x"), (b"content-type", b"text/html")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page[:20], "more_body": True})
        await send({"type": "http.response.body", "body": page[20:]})

    monkeypatch.setattr(fastapi, "app", answer)
    monkeypatch.setattr(page_server, "script", lambda: "opened()")
    monkeypatch.setenv("MLFLOW_STATIC_PREFIX", "/token")

    def get(path, *headers, body=b"", port=5000, kind="http"):
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": body}

        given = [(name.encode(), value.encode()) for name, value in headers or [OWN]]
        scope = {"type": kind, "method": "GET", "path": path, "headers": given, "server": ("127.0.0.1", port)}
        asyncio.run(page_server.app(scope, receive, send))
        answer = b"".join(message.get("body", b"") for message in sent)
        return sent[0].get("status"), dict(sent[0].get("headers", [])), answer

    return get


OWN = ("host", "127.0.0.1:5000")


def test_the_start_page_alone_has_the_script(served):
    _, headers, body = served("/token/")
    assert b"<head><script>opened()</script><title>" in body
    assert headers[b"content-length"] == str(len(body)).encode() and headers[b"cache-control"] == b"no-store"
    assert b"etag" not in headers
    for other in ("/", "/token", "/token/static-files/x.html", "/other/"):
        assert b"script" not in served(other)[2]


def test_hosts_and_origins_are_its_own_to_the_letter(served):
    hosts = ["127.0.0.1:5000@evil.com", "evil.com@127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1", "127.0.0.1:5000.",
             "127.0.0.1.:5000", "LOCALHOST:5000", "[::1]:5000", "0.0.0.0:5000", "127.1:5000", "2130706433:5000",
             "127.0.0.2:5000", "10.0.0.1:5000", "evil.com:5000", "127.0.0.1.evil.com:5000", "localhost.evil.com:5000",
             "127.0.0.1:05000", "127.0.0.1:5000 ", "127.0.0.1:5000,evil.com", "me:x@localhost:5000", ""]  # fmt: skip
    origins = ["http://127.0.0.1:9999", "http://127.0.0.1", "https://127.0.0.1:5000", "http://localhost:5000", "null",
               "http://127.0.0.1:5000@evil.com", "http://127.0.0.1:5000.evil.com", "http://127.0.0.1:5000/", "",
               "HTTP://127.0.0.1:5000", "http://[::1]:5000", "file://", "http://evil.com"]  # fmt: skip
    refused = [[("host", host)] for host in hosts] + [[OWN, ("origin", origin)] for origin in origins]
    refused += [[OWN, OWN], [OWN, ("Host", "evil.com")], [("accept", "*/*")]]
    refused += [[OWN, ("origin", "http://127.0.0.1:5000"), ("Origin", "http://evil.com")]]
    for headers in refused:
        for path in ("/token/", "/token/api/2.0/mlflow/experiments/search", "/health"):
            assert served(path, *headers)[0] == 403, headers
    for headers in ([OWN], [("Host", "localhost:5000")], [OWN, ("origin", "http://127.0.0.1:5000")]):
        assert served("/token/", *headers)[0] == 200, headers
    assert served("/token/", ("host", "127.0.0.1"), port=80)[0] == 200, "where clients leave the port out"
    assert served("/token/", OWN, kind="websocket")[0] is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 100_000, 400),
        (b'{"a":' * 65 + b"1" + b"}" * 65, 400),
        (b'{"a": [' * 32 + b"1" + b"]}" * 32, 200),
        (b'{"a": "' + b"[" * 1000 + rb"\"[[[" + b'"}', 200),
        (b"[[]," * 40 + b"[]" + b"]" * 40, 200),
        (b"\n\x08\x12" + b"[" * 1000, 200),
    ],
)
def test_deep_json_is_a_bad_request(served, body, status):
    assert served("/token/api/2.0/mlflow/runs/search", OWN, body=body)[0] == status


def test_the_script_opens_the_newest_experiment_and_knows_each_ones_score(monkeypatch):
    begun("older", "val/miou")
    begun("</script>faces", "lfw/eer")
    store = Store.locate()
    from mlflow.server import handlers

    from mlflow.tracking._tracking_service.utils import _get_store  # isort: skip

    monkeypatch.setattr(handlers, "_get_tracking_store", lambda: _get_store(store.uri))
    monkeypatch.delenv(page_server.START, raising=False)
    found = page_server.script()
    assert "</script>" not in found
    given = json.loads(found.partition("const given = ")[2].partition(";\n")[0])
    numbers = {one.name: one.experiment_id for one in store.client().search_experiments()}
    assert given["start"].startswith(f"#/experiments/{numbers['</script>faces']}/runs?")
    charts = {
        name: given["charts"][number]["compareRunCharts"] for name, number in numbers.items() if name != "Default"
    }
    assert [chart["metricKey"] for chart in charts["older"]] == ["train/loss", "val/miou", "speed/samples_per_s"]
    monkeypatch.setenv(page_server.START, "#/named")
    assert '"#/named"' in page_server.script()

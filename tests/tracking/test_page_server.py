"""The start page that `trainkit ui` serves in place of MLflow's."""

from __future__ import annotations

import asyncio
import json

import pytest

from trainkit.errors import UserError
from trainkit.tracking import page_server, ui
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("store")


def begun(experiment="faces", metric="lfw/eer"):
    store = Store.locate()
    folder = store.new_run(experiment, 0, "a1b2c3d4")
    given = {"experiment": experiment, "run_name": folder.name, "params": {}, "system_metrics_every": 0}
    tracker = Tracker.start(folder, store, primary_metric=metric, **given)
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

    def get(path):
        sent = []

        async def send(message):
            sent.append(message)

        asyncio.run(page_server.app({"type": "http", "method": "GET", "path": path, "headers": []}, None, send))
        body = b"".join(message.get("body", b"") for message in sent)
        return dict(sent[0]["headers"]), body

    return get


def test_the_start_page_alone_has_the_script(served):
    headers, body = served("/token/")
    assert b"<head><script>opened()</script><title>" in body
    assert headers[b"content-length"] == str(len(body)).encode() and headers[b"cache-control"] == b"no-store"
    assert b"etag" not in headers
    for other in ("/", "/token", "/token/static-files/x.html", "/other/"):
        assert b"script" not in served(other)[1]


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

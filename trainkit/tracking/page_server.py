"""Run MLflow's server with a start page: `python -m trainkit.tracking.page_server server ...`, as `mlflow server ...`.

MLflow 3.17 opens its own start page, and orders the charts of a single run by name. It keeps another order in the
browser's localStorage alone, where no tag reaches it. Its image tiles begin with all parameters of the run, which leave
no room for the image, unless the reader switches `showRunParams` off. A script in `index.html` therefore opens a run
table where the address names no page, and gives MLflow another default wherever the reader has made no choice.

MLflow compares hosts and origins by patterns, which take `127.0.0.1:5000@evil.com` and every port of this machine. Here
both must be the server's own, to the letter.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trainkit.tracking.mlflow_view import VIEW, charts_of_run

START = "TRAINKIT_UI_START"
"""Variable with the fragment of the page to open; by default the run table of the newest experiment."""
_APP, _OWN = "mlflow.server.fastapi_app:app", "trainkit.tracking.page_server:app"
_MOST = 200
"""Experiments whose primary metric the page is given."""
_PRIMARY = "mlflow.experiment.primaryMetric.name"
JSON_DEPTH = 64
"""Most lists and objects within one another that a request may hold; MLflow's own have fewer than ten."""
_NESTING = re.compile(rb'"[^"\\\\]*(?:\\\\.[^"\\\\]*)*"?|[\[{]|[\]}]', re.DOTALL)

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_Receive = Callable[[], Awaitable[_Message]]

_SCRIPT = """(() => {
  const given = %s;
  const read = Storage.prototype.getItem;
  const defaults = [
    [/^mlflow\\.assistant\\.fab\\.autoOpenedOnFirstLoad_v1$/, () => "true"],
    [/^MLflowLocalStorage-[\\d.]+-RunPage-\\w+-model-chartUIState$/, () => {
      const experiment = (location.hash.match(/experiments\\/(\\d+)/) || [])[1];
      return JSON.stringify(given.charts[experiment] || given.charts[""]);
    }],
  ];
  Storage.prototype.getItem = function (key) {
    const kept = read.call(this, key);
    const found = kept === null && this === localStorage && defaults.find(([name]) => name.test(key));
    return found ? found[1]() : kept;
  };
  Object.defineProperty(Object.prototype, "showRunParams", {get: () => false, set() {}, configurable: true});
  if (/^#?\\/?$/.test(location.hash) && given.start) location.replace(given.start);
})();"""


def run_table(experiment_id: str, has_view: bool = True) -> str:
    """Return the fragment of the address of an experiment's run table, in the view that every experiment has."""
    # Without the type of work the page opens with menus for language models.
    view = f"&viewStateShareKey={VIEW}" if has_view else ""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning{view}"


def script() -> str:
    """Return the script for `index.html`, with what the store has now."""
    from mlflow.server.handlers import _get_tracking_store

    found = _get_tracking_store().search_experiments(max_results=_MOST, order_by=["last_update_time DESC"])
    ours = [one for one in found or () if one.name != "Default"]
    start = os.environ.get(START) or next(
        (run_table(one.experiment_id, f"mlflow.sharedViewState.{VIEW}" in one.tags) for one in ours), ""
    )
    charts = {one.experiment_id: charts_of_run(one.tags.get(_PRIMARY)) for one in ours} | {"": charts_of_run(None)}
    # Names in it come from runs: none of them may end the script.
    return _SCRIPT % json.dumps({"start": start, "charts": charts}).replace("<", "\\u003c")


async def app(scope: _Message, receive: _Receive, send: _Send) -> None:
    """Answer as MLflow does, to its own hosts and origins alone; the start page has the script."""
    from mlflow.server.fastapi_app import app as mlflow_app

    if scope["type"] == "lifespan":
        await mlflow_app(scope, receive, send)
        return
    if scope["type"] != "http" or (refusal := _refusal(scope)):
        await _refuse(send, scope["type"], 403, refusal if scope["type"] == "http" else "")
        return
    if "artifact" not in scope["path"]:  # MLflow takes all other bodies for JSON, whatever type they state
        receive, body = await _whole(receive)
        if body.lstrip()[:1] in (b"[", b"{") and _depth(body) > JSON_DEPTH:
            await _refuse(send, "http", 400, f"JSON of more than {JSON_DEPTH} lists and objects within one another")
            return
    start = f"{os.environ.get('MLFLOW_STATIC_PREFIX', '')}/"
    if scope["method"] != "GET" or scope["path"] != start:
        await mlflow_app(scope, receive, send)
        return
    # Whole and uncached: what it opens depends on the store.
    scope["headers"] = [pair for pair in scope["headers"] if not pair[0].lower().startswith((b"if-", b"range"))]
    await mlflow_app(scope, receive, _with_script(send))


def _refusal(scope: _Message) -> str:
    """Return why a request is refused, or nothing: another host, or an origin that is not the page itself."""
    port = b"" if scope["server"][1] == 80 else b":%d" % scope["server"][1]
    hosts = [value for name, value in scope["headers"] if name.lower() == b"host"]
    origins = [value for name, value in scope["headers"] if name.lower() == b"origin"]
    if len(hosts) != 1 or hosts[0] not in (b"127.0.0.1" + port, b"localhost" + port):
        return "another host than that of this page"
    return "another origin than this page" if origins not in ([], [b"http://" + hosts[0]]) else ""


async def _refuse(send: _Send, kind: str, status: int, text: str) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


async def _whole(receive: _Receive) -> tuple[_Receive, bytes]:
    """Receive a request's body; return what gives its messages again, and the body."""
    messages, body = [await receive()], bytearray()
    while messages[-1].get("more_body"):
        messages.append(await receive())
    for message in messages:
        body += message.get("body", b"")
    left = iter(messages)

    async def again() -> _Message:
        return next(left, None) or await receive()

    return again, bytes(body)


def _depth(text: bytes) -> int:
    """Return how many lists and objects of JSON are within one another at most."""
    depth = most = 0
    for found in _NESTING.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        most = max(most, depth)
    return most


def _with_script(send: _Send) -> _Send:
    """Return a `send` that adds the script to a page, once it has all of it."""
    head: list[_Message] = []
    body = b""

    async def sent(message: _Message) -> None:
        nonlocal body
        if message["type"] == "http.response.start":
            head.append(message)
            return
        body += message.get("body", b"")
        if message.get("more_body"):
            return
        page = body
        if head[0]["status"] == 200 and b"<head>" in body:
            code = await asyncio.to_thread(script)
            page = body.replace(b"<head>", b"<head><script>" + code.encode() + b"</script>", 1)
        replaced = (b"content-length", b"etag", b"last-modified", b"cache-control")
        kept = [pair for pair in head[0]["headers"] if pair[0].lower() not in replaced]
        kept += [(b"content-length", str(len(page)).encode()), (b"cache-control", b"no-store")]
        await send({**head[0], "headers": kept})
        await send({"type": "http.response.body", "body": page})

    return sent


def main() -> None:
    """Run MLflow's command with this app in the place of its own."""
    from mlflow import server
    from mlflow.cli import cli

    build: Callable[..., list[str]] | None = getattr(server, "_build_uvicorn_command", None)
    if build is None:
        sys.exit("this version of MLflow starts its server in another way; install the one in constraints.txt")

    def build_with_script(*given: Any, **more: Any) -> list[str]:
        return [_OWN if word == _APP else word for word in build(*given, **more)]

    server._build_uvicorn_command = build_with_script  # type: ignore[attr-defined]
    cli(prog_name="mlflow")


if __name__ == "__main__":
    main()

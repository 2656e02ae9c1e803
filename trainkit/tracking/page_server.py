"""Run MLflow's server with a start page: `python -m trainkit.tracking.page_server server ...`, as `mlflow server ...`.

MLflow 3.17 opens its own start page, and orders the charts of a single run by name. It keeps another order in the
browser's localStorage alone, where no tag reaches it. Its image tiles begin with all parameters of the run, which leave
no room for the image, unless the reader switches `showRunParams` off. A script in `index.html` therefore opens a run
table where the address names no page, and gives MLflow another default wherever the reader has made no choice.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trainkit.tracking.mlflow_view import VIEW, charts_of_run

START = "TRAINKIT_UI_START"
"""Variable with the fragment of the page to open; by default the run table of the newest experiment."""
_APP, _OWN = "mlflow.server.fastapi_app:app", "trainkit.tracking.page_server:app"
_MOST = 200
"""Experiments whose primary metric the page is given."""
_PRIMARY = "mlflow.experiment.primaryMetric.name"

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]

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


async def app(scope: _Message, receive: Callable[[], Awaitable[_Message]], send: _Send) -> None:
    """Answer as MLflow does; the start page has the script."""
    from mlflow.server.fastapi_app import app as mlflow_app

    start = f"{os.environ.get('MLFLOW_STATIC_PREFIX', '')}/"
    if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != start:
        await mlflow_app(scope, receive, send)
        return
    # Whole and uncached: what it opens depends on the store.
    scope["headers"] = [pair for pair in scope["headers"] if not pair[0].lower().startswith((b"if-", b"range"))]
    await mlflow_app(scope, receive, _with_script(send))


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
    if build is not None:  # an MLflow that starts otherwise shows its own start page

        def build_with_script(*given: Any, **more: Any) -> list[str]:
            return [_OWN if word == _APP else word for word in build(*given, **more)]

        server._build_uvicorn_command = build_with_script  # type: ignore[attr-defined]
    cli(prog_name="mlflow")


if __name__ == "__main__":
    main()

"""Serve the MLflow page for the runs of this store, on this machine only, to those who have its address.

Every path of the page begins with a random token, a new one at each start. Any user of a machine can reach 127.0.0.1,
and MLflow serves all files that its user can read, since an experiment names the folder of its files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from trainkit.environment.process import die_with_parent, interrupted_by_signals
from trainkit.errors import UserError, few, visible
from trainkit.redact import without_secrets
from trainkit.tracking.mlflow_client import settle_mlflow
from trainkit.tracking.mlflow_experiment import VIEW
from trainkit.tracking.relocate import strayed
from trainkit.tracking.store import Store

HOST = "127.0.0.1"
_READY_SECONDS = 120.0
"""The first start on a busy machine took 30 s."""


def _print(text: str) -> None:
    # At once, also into a file: the command goes on until it is interrupted.
    print(visible(text), flush=True)


def serve(store: Store, port: int = 5000, say: Callable[[str], object] = _print, named: str = "") -> None:
    """Show the store's runs at 127.0.0.1:`port` until interrupted; for a store that is a server, print its address.

    The page opens the run table of the experiment `named`, or the run, by default the newest experiment. Raises
    UserError when there is none of that name, the port or the store cannot be used, or the page does not start.
    """
    start = fragment_of(store, named) if named else ""
    if store.database is None:
        say(f"The runs are on a server. Open {store.shown}{start and f'/{start}'}")
        return
    try:
        with interrupted_by_signals(), running(store, port) as (server, page):
            experiments = _experiments(store)
            tables = {found.name: _run_table(found.experiment_id, found.tags) for found in experiments}
            newest = next(iter(tables.values()), "")
            say(f"The runs of {store.shown} are at {page}/{start or newest} (Ctrl-C stops the server)")
            say("  Anyone with this address can read your files and change the runs. Each start makes a new one.")
            for name, fragment in tables.items():
                say(f"  {name}: {page}/{fragment}")
            if not tables:
                say("  There are no runs yet.")
            for home in {strayed(store, found.artifact_location) for found in experiments} - {None}:
                say(f"  Artifacts are expected in {home}, where the store was before. To correct: trainkit relocate")
            code = server.wait()
    except KeyboardInterrupt:
        return
    raise UserError("mlflow server", f"ended with code {code}: {_last_line(_log_of(store))}")


def fragment_of(store: Store, named: str) -> str:
    """Return the fragment of the page's address for an experiment or a run of this name. Raises UserError."""
    client = store.client()
    with store.asking():
        experiment = client.get_experiment_by_name(named)
        if experiment is not None:
            return _run_table(experiment.experiment_id, experiment.tags)
        try:
            run_id = store.find(named).info().run_id
        except UserError as error:
            experiments = [found.name for found in client.search_experiments() if found.name != "Default"]
            remedy = f"name a run, or an experiment: {few(experiments)}" if experiments else "train a run first"
            raise UserError(f"{named!r}", "neither an experiment nor a run", remedy=remedy) from error
        if run_id is None:
            raise UserError(f"run {named!r}", "not in MLflow yet", remedy=f"trainkit sync {named}")
        number = client.get_run(run_id).info.experiment_id
    return f"#/experiments/{number}/runs/{run_id}?workflowType=machine_learning"


@contextlib.contextmanager
def running(store: Store, port: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server of this store at 127.0.0.1:`port` within; yield it and its address, which is secret."""
    if not 0 < port < 65536:
        raise UserError("port", str(port), "1 to 65535")
    if not _is_free(port):
        free = next((other for other in range(port + 1, min(port + 1000, 65536)) if _is_free(other)), None)
        raise UserError(f"port {port}", "in use", remedy=f"use --port {free}" if free else "use another port")
    store.prepare()
    settle_mlflow()
    token = secrets.token_urlsafe(24)
    page = f"http://{HOST}:{port}/{token}"
    words = [sys.executable, "-P", "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    # By default MLflow answers to every port and private network, and to names that only begin like them.
    words += ["--allowed-hosts", f"{HOST}:{port},localhost:{port}"]
    # The log of requests would hold the token; in a store that a group shares the log may be another member's file.
    words += ["--uvicorn-opts=--no-access-log"]
    environment = {
        # Without what is set for another server: it could open this one to every name and origin.
        **{name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_SERVER_", "_MLFLOW_"))},
        # Not among the words of the command, which every user of the machine can read.
        "MLFLOW_STATIC_PREFIX": f"/{token}",
        # Its job runners are ten processes of 2.4 GB together, for features that nothing here uses.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # A tracking address in the environment would not reach the server, but would confuse its workers.
        "MLFLOW_TRACKING_URI": "",
    }
    words += ["--no-serve-artifacts", "--default-artifact-root", store.artifacts.as_uri()]  # type: ignore[union-attr]
    words += ["--backend-store-uri", store.uri]
    # In an empty folder: uvicorn imports what lies where it starts, and somebody else may have laid it into the store.
    with tempfile.TemporaryDirectory(prefix="trainkit-ui-") as aside:
        server = _begun(words, environment, _log_of(store), Path(aside))
        try:
            _wait_until_ready(server, page, _log_of(store))
            yield server, page
        finally:
            _end(server)


def _begun(words: list[str], environment: dict[str, str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    try:
        # Addresses and paths stand in it. A link that lies there instead of it is not followed.
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(str(log), f"cannot be written ({error.strerror or error})", remedy="remove it") from None
    with open(number, "wb") as out:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            cwd=folder,
            start_new_session=True,
            # Otherwise it would go on, unseen, when this process is killed.
            preexec_fn=die_with_parent if sys.platform.startswith("linux") else None,
        )


def _experiments(store: Store) -> list[Any]:
    """Return the newest experiments of a store, but for MLflow's own."""
    client = store.client()
    found = client.search_experiments(max_results=6, order_by=["last_update_time DESC"])
    return [experiment for experiment in found if experiment.name != "Default"]


def _run_table(experiment_id: str, tags: Container[str]) -> str:
    """Return the fragment of the address of an experiment's run table, in the view that `offer_view` keeps for it."""
    # Without the type of work the page opens with menus for language models.
    view = f"&viewStateShareKey={VIEW}" if f"mlflow.sharedViewState.{VIEW}" in tags else ""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning{view}"


def _wait_until_ready(server: subprocess.Popen[bytes], page: str, log: Path) -> None:
    end = time.monotonic() + _READY_SECONDS
    # A proxy that is set for the outside must not be asked for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end:
        if server.poll() is not None:
            raise UserError("mlflow server", f"ended with code {server.returncode}: {_last_line(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            if opener.open(f"{page}/health", timeout=2).status == 200:
                return
        time.sleep(0.2)
    raise UserError("mlflow server", f"did not answer within {_READY_SECONDS:.0f} s", remedy=f"see {log}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server, and the workers that its command has started."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(processes, timeout=5)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    server.wait(timeout=5)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: a port whose last connections are only closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _log_of(store: Store) -> Path:
    return store.home / "ui.log"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return without_secrets(lines[-1])[:300] if lines else "no output"

"""Upload later what runs could not: `trainkit sync`.

A run uploads by itself while it goes on, and for 30 s after its end. The rest, as after an outage of a server, lies in
its folder: a journal whose rows have their times already, so that MLflow keeps each once however often it is sent.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.distributed import rank_failures
from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.tracking import mlflow_run
from trainkit.tracking.journal import Journal
from trainkit.tracking.mlflow_client import Away
from trainkit.tracking.relocate import strayed
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.upload import SENT, Upload, left, waits

PATIENCE = 30.0
"""Seconds for which `send_rest` waits for a process that is ending, or uploads what the run has left."""


@dataclass(frozen=True)
class Synced:
    """Result for one run."""

    run: str
    status: str
    """Of the run, as in MLflow now, or as in its folder where nothing was sent."""
    values: int = 0
    """Metric values that were sent; MLflow may have had some of them."""
    others: int = 0
    """Files, tags, data sets and models that were sent."""
    note: str = ""
    """Why nothing was sent, where that is no problem."""
    problem: str = ""
    """Why nothing was sent, where it is one."""


def sync(store: Store, runs: Sequence[RunFolder] = (), *, whole: bool = False, over: bool = False) -> Iterator[Synced]:
    """Upload what finished runs have left: the given ones, else all of the store that have something.

    With `whole` everything in their journals goes again, as after MLflow's database was restored from an older copy.
    With `over` a run of another machine that is marked as running counts as killed. Yields each run as it is done;
    raises UserError when the store does not answer.
    """
    client = None
    for folder in runs or store.runs():
        try:
            info = folder.info()
            if folder.alive() and not (over and info.host != socket.gethostname()):
                if info.host != socket.gethostname():
                    note = f"is recorded as running on {info.host}; if that machine is gone, add --over"
                    yield Synced(folder.name, info.status, note=note)
                elif runs:
                    yield Synced(folder.name, info.status, note="is running, and uploads on its own")
                continue
            has_left = info.status == "RUNNING" or whole or waits(folder)
        except UserError as error:
            yield Synced(folder.name, "", problem=str(error))
            continue
        if not has_left:
            if runs:
                yield Synced(folder.name, info.status, note="nothing was left to send")
            continue
        client = client or store.client()
        try:
            yield _send(folder, store, client, whole)
        except UserError as error:
            if isinstance(error, Away) and not error.where.startswith("run "):
                raise
            yield Synced(folder.name, info.status, problem=str(error))


def _send(folder: RunFolder, store: Store, client: Any, whole: bool) -> Synced:
    with folder.sending():
        run_id = folder.info().run_id
        if run_id is None and not mlflow_run.pending(folder):
            send_left(folder, store, client)
            return Synced(folder.name, folder.info().status, note="ended before MLflow knew of it")
        with store.asking():
            if run_id is not None:
                _check(folder, store, client, run_id)
                if whole:
                    (folder.path / SENT).unlink(missing_ok=True)
            values, others = left(folder)
            send_left(folder, store, client)
        return Synced(folder.name, folder.info().status, values, others)


def _check(folder: RunFolder, store: Store, client: Any, run_id: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        remedy = "name the store it was recorded in (MLFLOW_TRACKING_URI, TRAINKIT_STORE)"
        raise UserError(f"run {folder.name}", f"MLflow run {run_id} is not in {store.shown}", remedy=remedy) from None
    if run.info.lifecycle_stage != "active":
        raise UserError(f"run {folder.name}", "was deleted in MLflow", remedy="restore it in the MLflow page")
    experiment = client.get_experiment(run.info.experiment_id)
    if (old := strayed(store, experiment.artifact_location)) is not None:
        found = f"its files would go to {old}, where the store was"
        raise UserError(f"run {folder.name}", found, remedy="run first: trainkit relocate")


def send_rest(folder: RunFolder, store: Store) -> None:
    """Upload the rest of a finished run. Raises UserError when it is in use or the store does not answer."""
    with folder.sending(PATIENCE):
        client = store.client()
        with store.asking():
            send_left(folder, store, client)


def send_left(folder: RunFolder, store: Store, client: Any) -> None:
    """Upload what a claimed run that is over has left; one still RUNNING was killed, or failed by `rank_failures`."""
    info = folder.info()
    if info.run_id is None and not mlflow_run.pending(folder):
        ended = "FAILED" if rank_failures.left(folder.path) else "KILLED"
        folder.update(status=ended if info.status == "RUNNING" else info.status)
        return
    seen = last_sign(folder)
    journal, upload = Journal(folder.journal), None
    try:
        upload = Upload(folder, store, journal)
        if info.status == "RUNNING":
            # Its process is gone, or this could not have been claimed.
            why = rank_failures.left(folder.path)
            status = "FAILED" if why else "KILLED"
            step = max(journal.last_step, folder.saved_step())
            folder.update(status=status, last_step=step, unsent=True)
            if why:
                upload.desired.set("tag", "trainkit.error", without_secrets(why)[:5000])
            upload.desired.set("status", "", {"status": status, "time": int(1000 * seen)})
        upload.send(client)
        # Its end may have been lost between run.json and the desired state, or with an older copy of the database.
        if upload.run_id is not None and client.get_run(upload.run_id).info.status == "RUNNING":
            client.set_terminated(upload.run_id, status=folder.info().status, end_time=int(1000 * seen))
        if folder.info().unsent:
            folder.update(unsent=False)
    finally:
        journal.close()
        if upload is not None:
            upload.desired.close()


def last_sign(folder: RunFolder) -> float:
    """Return the time of the last file written by a run, in seconds since 1970."""
    return max(path.stat().st_mtime for path in (folder.journal, folder.path / "run.json") if path.exists())

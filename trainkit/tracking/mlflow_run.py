"""What MLflow is to know of a run from its beginning, and the MLflow run that is made of it, once.

It lies in `<run>/enrolment.json` before the store is asked for anything. Where the store is away, the run begins all
the same; its sender, the next run of the store or `trainkit sync` enrols it later, with the time at which it began.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.tracking import mlflow_experiment
from trainkit.tracking.mlflow_errors import Away
from trainkit.tracking.run_folder import ENROLMENT, RunFolder
from trainkit.tracking.store import Store

_one = threading.RLock()
"""Runs that belong together enrol one another: each is made by one thread."""

_log = logging.getLogger("trainkit")


@dataclass(frozen=True)
class Enrolment:
    """What `Tracker.start` was told, as MLflow is to have it: flat, and without secrets."""

    experiment: str
    run_name: str
    params: dict[str, str]
    tags: dict[str, str]
    note: str = ""
    primary_metric: str | None = None
    higher_is_better: bool = True
    parent: str | None = None
    """Name of the run that this one stands beneath, or its MLflow id."""
    resumed: int = 0
    """How often the run was continued."""
    pending: bool = True
    """Whether MLflow has yet to be told."""

    def write(self, folder: RunFolder) -> None:
        """Put it into the run's folder."""
        write_aside(folder.path / ENROLMENT, json.dumps(asdict(self), indent=1) + "\n")


def read(folder: RunFolder) -> Enrolment | None:
    """That of a run; None where it has none. Raises UserError for one that is damaged."""
    file = folder.path / ENROLMENT
    try:
        return Enrolment(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="restore the file, or start a new run") from None


def pending(folder: RunFolder) -> bool:
    """Whether MLflow has yet to be told of a run's beginning, or of its continuation."""
    enrolment = read(folder)
    return enrolment is not None and enrolment.pending


def ensure(folder: RunFolder, store: Store, client: Any, *, look: bool = False) -> str | None:
    """The id of the MLflow run of a run, which is made, or told that it goes on, where that is still to be done.

    With `look` also where it was made already and the store has it no longer: the database was replaced. None for a run
    that ended before it was to have one. Raises `Away` when another process has yet to enrol it, UserError for one that
    was deleted in MLflow, and what the client raises.
    """
    with _one:
        info, enrolment = folder.info(), read(folder)
        if enrolment is None or not (enrolment.pending or look):
            return info.run_id
        with _held(folder):
            return _enrolled(folder, store, client, enrolment)


@contextlib.contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """The run's folder, claimed: as by now, or until the block ends."""
    with contextlib.ExitStack() as stack:
        if not folder.claimed:
            try:
                stack.enter_context(folder.sending())
            except UserError as error:
                raise Away(f"run {folder.name}", f"is not in MLflow yet, and {error.found}") from None
        yield


def _enrolled(folder: RunFolder, store: Store, client: Any, enrolment: Enrolment) -> str:
    known = _known(folder, client)
    if known is not None and not enrolment.pending:
        return known.info.run_id
    tags = dict(enrolment.tags)
    if enrolment.parent and (above := _above(enrolment.parent, store, client)):
        tags["mlflow.parentRunId"] = above
    best, higher = enrolment.primary_metric, enrolment.higher_is_better
    experiment_id = mlflow_experiment.prepared(client, store, enrolment.experiment, enrolment.note, best, higher)
    nested = not mlflow_experiment.ABOVE.isdisjoint(tags)
    mlflow_experiment.offer_view(client, experiment_id, best, higher, enrolment.params, nested)
    params = enrolment.params
    if known is None:
        run_id = _made(folder, client, experiment_id, enrolment, tags)
        tags = {}
    else:
        run_id = known.info.run_id
        client.update_run(run_id, status="RUNNING")
        old = known.data.params
        changed = {key: [old[key], value] for key, value in params.items() if old.get(key, value) != value}
        params = {key: value for key, value in params.items() if key not in old}
        if changed:
            # A parameter cannot be changed in MLflow, and one changed value would lose the whole batch.
            tags["trainkit.changed_params"] = json.dumps(changed)[:8000]
    if enrolment.resumed:
        tags["trainkit.resumed"] = str(enrolment.resumed)
    _send(client, run_id, params, tags)
    replace(enrolment, pending=False).write(folder)
    return run_id


def _known(folder: RunFolder, client: Any) -> Any:
    """The MLflow run to go on with, or None when this store has not got it: then a new one gets the whole journal."""
    from mlflow.exceptions import MlflowException

    run_id = folder.info().run_id
    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        _log.warning("MLflow run %s is not in this store; a new one is made and gets the whole journal", run_id)
        return None
    if run.info.lifecycle_stage != "active":
        raise UserError(
            f"MLflow run {run_id}", "was deleted", remedy="restore it in the MLflow page, or start a new run"
        )
    return run


def _above(word: str, store: Store, client: Any) -> str | None:
    folder = named(word, store)
    return ensure(folder, store, client) if folder is not None else word


def named(word: str, store: Store) -> RunFolder | None:
    """The run of this name in the store, where there is one; a word that would lead out of the store is no name."""
    folder = RunFolder(store.home / "runs" / word)
    return folder if Path(word).name == word and (folder.path / "run.json").is_file() else None


def _made(folder: RunFolder, client: Any, experiment_id: str, enrolment: Enrolment, tags: dict[str, str]) -> str:
    """Make the MLflow run, and note it in run.json before anything else can fail."""
    started = int(1000 * folder.info().started)

    def found() -> list[str]:
        asked = f"tags.`trainkit.run` = '{folder.name}' and attributes.start_time = {started}"
        runs, place = client.search_runs([experiment_id], asked), enrolment.tags["trainkit.folder"]
        return sorted(run.info.run_id for run in runs if run.data.tags.get("trainkit.folder") == place)

    runs = found()
    if not runs:
        client.create_run(experiment_id, start_time=started, run_name=enrolment.run_name, tags=tags)
        # MLflow's client asks again by itself when an answer is lost on its way: then there are two.
        runs = found()
    if not runs:
        raise ConnectionError("Connection aborted: the store has not got the run that was made")
    for second in runs[1:]:
        client.delete_run(second)
    for of_another in ("sent.json", "models.json"):
        (folder.path / of_another).unlink(missing_ok=True)
    folder.update(run_id=runs[0])
    return runs[0]


def _send(client: Any, run_id: str, params: dict[str, str], tags: dict[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    pairs = list(params.items())
    for start in range(0, len(pairs), 100):
        client.log_batch(run_id, params=[Param(key, value) for key, value in pairs[start : start + 100]])
    if tags:
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

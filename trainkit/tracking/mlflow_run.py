"""Create the MLflow run of a run, once.

Parameters and tags lie in `<run>/enrolment.json` before the store is asked for anything. Where the store is
unavailable, the run begins all the same; its uploader, the next run of the store or `trainkit sync` creates the MLflow
run later, with the time at which the run began.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.tracking import mlflow_experiment
from trainkit.tracking.mlflow_client import Away
from trainkit.tracking.run_folder import CREATION, RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_lock = threading.RLock()
"""Parent and child create each other's MLflow runs: each is made by one thread."""

_log = logging.getLogger("trainkit")


@dataclass(frozen=True)
class RunCreation:
    """Content of the MLflow run at its beginning: flat, and without secrets."""

    experiment: str
    run_name: str
    params: dict[str, str]
    tags: dict[str, str]
    note: str = ""
    primary_metric: str | None = None
    higher_is_better: bool = True
    parent: str | None = None
    """Name of the parent run, or its MLflow id."""
    metrics: Sequence[str] | None = None
    """Patterns of the metrics that it gets, by `upload.matcher`; None: all."""
    changed: Sequence[str] = ()
    """Keys of the recipe that the command has set."""
    resumed: int = 0
    """How often the run was continued."""
    pending: bool = True
    """True until it is in MLflow."""
    rounds: bool = False
    """True where MLflow gets metrics with six digits. Runs of earlier versions keep all, or values would be doubled."""

    def write(self, folder: RunFolder) -> None:
        """Write it to the run's folder."""
        write_aside(folder.path / CREATION, json.dumps(asdict(self), indent=1) + "\n")


def read(folder: RunFolder) -> RunCreation | None:
    """Read that of a run; None where it has none. Raises UserError for one that is damaged."""
    file = folder.path / CREATION
    try:
        return RunCreation(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="restore the file, or start a new run") from None


def pending(folder: RunFolder) -> bool:
    """Return True where a run's beginning, or its continuation, is not in MLflow yet."""
    creation = read(folder)
    return creation is not None and creation.pending


def ensure(folder: RunFolder, store: Store, client: MlflowClient, *, look: bool = False) -> str | None:
    """Return the id of the MLflow run of a run, which is created, or set to running again, where that is pending.

    With `look` also where it was created already and the store has it no longer: the database was replaced. None for a
    run that ended before it was to have one. Raises `Away` when another process has yet to create it, UserError for one
    that was deleted in MLflow, and the client's errors.
    """
    with _lock:
        info, creation = folder.info(), read(folder)
        if creation is None or not (creation.pending or look):
            return info.run_id
        with _claimed(folder):
            return _ensured(folder, store, client, creation)


@contextlib.contextmanager
def _claimed(folder: RunFolder) -> Iterator[None]:
    """Claim the run's folder within, unless this process has it already."""
    with contextlib.ExitStack() as stack:
        if not folder.claimed:
            try:
                stack.enter_context(folder.sending())
            except UserError as error:
                raise Away(f"run {folder.name}", f"is not in MLflow yet, and {error.found}") from None
        yield


def _ensured(folder: RunFolder, store: Store, client: MlflowClient, creation: RunCreation) -> str:
    known = _known(folder, client)
    if known is not None and not creation.pending:
        return known.info.run_id
    tags = dict(creation.tags)
    if creation.parent and (above := _above(creation.parent, store, client)):
        tags["mlflow.parentRunId"] = above
    best, higher = creation.primary_metric, creation.higher_is_better
    experiment_id = mlflow_experiment.prepared(client, store, creation.experiment, creation.note, best, higher)
    nested = not mlflow_experiment.ABOVE.isdisjoint(tags)
    mlflow_experiment.offer_view(client, experiment_id, best, higher, creation.params, creation.changed, nested)
    params = creation.params
    if known is None:
        run_id = _made(folder, client, experiment_id, creation, tags)
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
    if creation.resumed:
        tags["trainkit.resumed"] = str(creation.resumed)
    _send(client, run_id, params, tags)
    replace(creation, pending=False).write(folder)
    return run_id


def _known(folder: RunFolder, client: MlflowClient) -> Run | None:
    """Return the MLflow run to go on with; None when this store has not got it: a new one gets the whole journal."""
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


def _above(word: str, store: Store, client: MlflowClient) -> str | None:
    folder = named(word, store)
    return ensure(folder, store, client) if folder is not None else word


def named(word: str, store: Store) -> RunFolder | None:
    """Return the run of this name, where the store has it; a path is no name."""
    folder = RunFolder(store.home / "runs" / word)
    return folder if Path(word).name == word and (folder.path / "run.json").is_file() else None


def _made(
    folder: RunFolder, client: MlflowClient, experiment_id: str, creation: RunCreation, tags: dict[str, str]
) -> str:
    """Create the MLflow run, and write its id to run.json before anything else can fail."""
    started = int(1000 * folder.info().started)

    def found() -> list[str]:
        asked = f"tags.`trainkit.run` = '{folder.name}' and attributes.start_time = {started}"
        runs, place = client.search_runs([experiment_id], asked), creation.tags["trainkit.folder"]
        return sorted(run.info.run_id for run in runs if run.data.tags.get("trainkit.folder") == place)

    runs = found()
    if not runs:
        client.create_run(experiment_id, start_time=started, run_name=creation.run_name, tags=tags)
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


def _send(client: MlflowClient, run_id: str, params: dict[str, str], tags: dict[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    pairs = list(params.items())
    for start in range(0, len(pairs), 100):
        client.log_batch(run_id, params=[Param(key, value) for key, value in pairs[start : start + 100]])
    if tags:
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

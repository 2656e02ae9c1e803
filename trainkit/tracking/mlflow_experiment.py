"""Prepare the MLflow experiment of a run: its place, its note and its primary metric."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.tracking.relocate import folder_of, strayed
from trainkit.tracking.store import Store

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def prepared(
    client: Any, store: Store, name: str, note: str, primary_metric: str | None, higher_is_better: bool
) -> str:
    """Return the id of the experiment of this name, made where it is missing, with its tags set.

    Raises UserError for one that was deleted, and for one whose files would be lost.
    """
    from mlflow.exceptions import MlflowException

    tags = {"mlflow.experimentKind": "custom_model_development"}
    if note:
        tags["mlflow.note.content"] = without_secrets(note)[:5000]
    if primary_metric:
        tags["mlflow.experiment.primaryMetric.name"] = primary_metric
        tags["mlflow.experiment.primaryMetric.greaterIsBetter"] = str(higher_is_better)
    found = client.get_experiment_by_name(name)
    if found is None:
        # MLflow's default would be relative to the folder the run was started in.
        folder = store.artifacts / re.sub(r"^\.+|[^\w.-]", "-", name) if store.artifacts else None
        try:
            client.create_experiment(name, artifact_location=folder.as_uri() if folder else None, tags=tags)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(name)
    if found.lifecycle_stage != "active":
        remedy = "restore it in the MLflow page, or name another experiment"
        raise UserError(f"experiment {name!r}", f"was deleted in {store.shown}", remedy=remedy)
    if (old := strayed(store, found.artifact_location)) is not None:
        # It would make that folder again, and nobody would look for them there.
        where = f"was in {old}, where MLflow would keep the files of experiment {name!r}"
        raise UserError(str(store.home), where, remedy="as the store was moved, run: trainkit relocate")
    folder, host = folder_of(found.artifact_location), urlsplit(store.uri).hostname
    if store.artifacts is None and folder is not None and host not in _LOOPBACK and not folder.parent.is_dir():
        where = f"has experiment {name!r} keep its files in {folder}, which is not a folder of this machine"
        remedy = "start it with --artifacts-destination FOLDER, and give log.experiment another name"
        raise UserError(store.shown, where, remedy=remedy)
    if "mlflow.note.content" not in found.tags:
        # Not when a person has written one in the page.
        tags.setdefault("mlflow.note.content", _guide(primary_metric))
    for key, value in tags.items():
        if found.tags.get(key) != value:
            set_tag(client, found.experiment_id, key, value)
    return found.experiment_id


def set_tag(client: Any, experiment_id: str, key: str, value: str) -> None:
    """Set a tag of an experiment, also while another run sets it for the first time."""
    from mlflow.exceptions import MlflowException

    try:
        client.set_experiment_tag(experiment_id, key, value)
    except MlflowException as error:
        if error.error_code != "BAD_REQUEST":
            raise
        # MLflow has looked for it and then added it; now it is there, and is changed.
        client.set_experiment_tag(experiment_id, key, value)


def _guide(primary_metric: str | None) -> str:
    """Return the note of an experiment without one: the meaning of the names of metrics."""
    best = f"Compare runs by `best/{primary_metric}`.\n\n" if primary_metric else ""
    return best + (
        "`train/...` while training, `<evaluation>/<score>` at each evaluation, `best/...` the score that decides at "
        "the best of them; `time/..._share` says where the time went. All other metrics, those of single classes and "
        "those at the best step too, are tables among the artifacts of a run (`tables/metrics.csv`), as are figures, "
        "recipe and rows; the recipe's `log.metrics` brings them here. Weights are its models. The x axis is the "
        "optimizer step."
    )

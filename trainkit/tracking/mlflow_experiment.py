"""Prepare the MLflow experiment of a run: its place, its note, its primary metric, and the view of its runs.

The only place that knows how MLflow's page (3.17) keeps a view, which is columns and order of the run table, and the
charts above all others: as JSON in a tag of the experiment, for addresses with `viewStateShareKey`. The page ignores
keys that it does not know, and without the tag shows its own view.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.tracking.relocate import folder_of, strayed
from trainkit.tracking.store import Store

VIEW = "trainkit"
"""Name in the address (`viewStateShareKey`) of the view of the run table that every experiment has."""
ABOVE = frozenset(["trainkit.folds", "trainkit.seeds", "trainkit.sweep"])
"""Tags of parent runs."""
_TELLING = ("task.method", "task.margin.name", "seed")
"""Parameters with a column in the run table, beside those that commands have set."""
_UNTELLING = ("log.", "downloads", "loader.", "checkpoints.", "promote")
_TELLING_CHARS, _MOST_TELLING = 40, 8
"""Longest value, and most columns."""
_RATE = "speed/samples_per_s"
_MEAN_RATE = f"final/{_RATE}"
"""Throughput of a whole run, where the last value of `_RATE` is that of its last log line."""
_NAME, _NAME_WIDTH = "attributes.`Run Name`", 260

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


def offer_view(
    client: Any,
    experiment_id: str,
    primary_metric: str | None,
    higher_is_better: bool,
    params: Mapping[str, str],
    changed: Sequence[str] = (),
    nested: bool = False,
) -> None:
    """Store a view of the run table with scores and the parameters that were set; MLflow's own shows no score.

    Runs are ranked by their best primary score, child runs among them: MLflow shows them below their parent only where
    runs are sorted by time. `changed`: keys that the command of the run has set, a block's for all of its parameters.
    `nested`: the run will have children.
    """
    tag = f"mlflow.sharedViewState.{VIEW}"
    kept = client.get_experiment(experiment_id).tags.get(tag)
    if kept and '"updatedAt": 0,' not in kept:
        return  # a person has changed it in the page
    before = json.loads(json.loads(kept)["state"]) if kept else {}
    shown_before = before.get("selectedColumns", [])
    scores = [f"metrics.`{name}`" for name in (f"best/{primary_metric}", primary_metric)] if primary_metric else []
    mean = f"metrics.`final/{primary_metric}`"  # of a parent the mean over its children
    if primary_metric and (nested or mean in shown_before):
        scores.append(mean)
    beside = [f"metrics.`baseline/{primary_metric}`"] if primary_metric else []
    probe = f"metrics.`probe/{primary_metric}`"
    if primary_metric and (params.get("task.net.probe") == "true" or probe in shown_before):
        beside.append(probe)
    told = _parameters(params, changed, shown_before)
    columns = [
        *scores[:1],
        *beside,
        f"metrics.`{_MEAN_RATE}`",
        *(f"params.`{name}`" for name in told),
        *scores[1:],
        "metrics.`train/loss`",  # the duration is always there
    ]
    state = {
        "orderByKey": scores[0] if scores else "attributes.start_time",
        "orderByAsc": bool(scores) and not higher_is_better,
        "selectedColumns": columns,
        "columnOrder": [_NAME, *columns],
        # Wide enough for the heading, and for a fraction of six digits.
        "columnWidths": {
            _NAME: _NAME_WIDTH, **{column: max(8 * len(column.split("`")[1]) + 32, 90) for column in columns}
        },
        **_charts(primary_metric),
    }  # fmt: skip
    view = json.dumps({"name": "Scores", "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)})
    if view != kept:
        set_tag(client, experiment_id, tag, view)


def _parameters(params: Mapping[str, str], changed: Sequence[str], shown_before: Sequence[str]) -> list[str]:
    """Return names of parameters with a column: those of earlier runs, those that the command has set, the telling."""
    before = [column[8:-1] for column in shown_before if column.startswith("params.")]
    telling = [name for name in _TELLING if name in params or name in before]
    own = [
        name
        for name, value in params.items()
        if any(name == key or name.startswith(f"{key}.") for key in changed)
        and not name.startswith(_UNTELLING)
        and len(value) <= _TELLING_CHARS
    ]
    return list(dict.fromkeys([*(name for name in before if name not in telling), *own, *telling]))[:_MOST_TELLING]


def _charts(primary_metric: str | None) -> dict[str, Any]:
    """Return the charts of the view, above those that MLflow makes of all metrics: curves, best score and time."""
    line = {"type": "LINE", "useGlobalLineSmoothing": False, "lineSmoothness": 0}
    curves = [name for name in ("train/loss", primary_metric, _RATE) if name]
    bars = [f"best/{primary_metric}"] if primary_metric else []
    bars += [f"time/{part}_share" for part in ("compute", "data", "eval")]
    about = [{**line, "metricKey": name, "selectedMetricKeys": [name]} for name in curves]
    return _sections([*about, *({"type": "BAR", "metricKey": name} for name in bars)])


def _sections(about: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return charts as a section "At a glance", and the two behind which MLflow puts those that it adds."""
    section = {"display": True, "isReordered": False, "deleted": False}
    return {
        "compareRunCharts": [
            {"uuid": f"{VIEW}-{number}", "metricSectionId": VIEW, "deleted": False, "isGenerated": False, **chart}
            for number, chart in enumerate(about)
        ],
        "compareRunSections": [
            {"uuid": VIEW, "name": "At a glance", "isGenerated": False, **section},
            {"uuid": f"{VIEW}-model", "name": "Model metrics", "isGenerated": True, **section},
            {"uuid": f"{VIEW}-system", "name": "System metrics", "isGenerated": True, **section},
        ],
        "isAccordionReordered": False,
    }

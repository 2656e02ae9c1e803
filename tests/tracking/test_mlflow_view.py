"""The view of an experiment's runs: its columns and charts, and that the page of the installed MLflow reads it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import trackers

from trainkit.tracking.store import Store

pytestmark = pytest.mark.usefixtures("store")


def begin(**more):
    """The beginning and end of a run of the experiment `faces`; returns its id in MLflow."""
    tracker = trackers.begin(Store.locate(), **{"params": {}, **more})
    tracker.finish("FINISHED")
    return tracker.run_id


def tags():
    return Store.locate().client().get_experiment_by_name("faces").tags


def state():
    return json.loads(json.loads(tags()["mlflow.sharedViewState.trainkit"])["state"])


def columns(kind):
    return [column.split("`")[1] for column in state()["selectedColumns"] if column.startswith(kind)]


def test_keys_that_the_command_has_set_are_columns_from_the_first_run_on():
    params = {"seed": 0, "optim": {"lr": 0.1, "eps": 1e-8}, "log": {"rows": True}, "train": {"ema": {"decay": 0.9}}}
    begin(params=params, changed=["train.ema", "optim.lr", "log.rows"])
    assert columns("params") == ["optim.lr", "train.ema.decay", "seed"]


def test_the_charts_begin_with_the_loss_the_primary_score_and_the_throughput():
    begin(primary_metric="lfw/eer", higher_is_better=False)
    found = state()
    assert [chart.get("metricKey") for chart in found["compareRunCharts"]][:3] == [
        "train/loss", "lfw/eer", "speed/samples_per_s",
    ]  # fmt: skip
    first = found["compareRunSections"][0]
    assert {chart["metricSectionId"] for chart in found["compareRunCharts"]} == {first["uuid"]}
    mean = "final/speed/samples_per_s"
    assert columns("metrics") == ["best/lfw/eer", "baseline/lfw/eer", mean, "lfw/eer", "train/loss"]
    begin(params={"task": {"net": {"probe": True}}}, primary_metric="lfw/eer", higher_is_better=False)
    assert columns("metrics")[1:4] == ["baseline/lfw/eer", "probe/lfw/eer", mean]


def test_the_experiment_explains_its_metrics_and_offers_a_view_until_a_person_changes_them():
    begin(params={"seed": 3, "task": {"method": "x"}}, primary_metric="lfw/eer", higher_is_better=False)
    begin(params={"seed": 4}, primary_metric="lfw/eer", higher_is_better=False)
    assert "`best/lfw/eer`" in tags()["mlflow.note.content"]
    view, before = json.loads(tags()["mlflow.sharedViewState.trainkit"]), state()
    assert before["selectedColumns"][:4] == [
        "metrics.`best/lfw/eer`", "metrics.`baseline/lfw/eer`", "metrics.`final/speed/samples_per_s`",
        "params.`task.method`",
    ]  # fmt: skip
    assert before["orderByKey"] == "metrics.`best/lfw/eer`" and before["orderByAsc"] is True
    parent = begin(tags={"trainkit.folds": 2}, primary_metric="lfw/eer", higher_is_better=False)
    begin(parent=parent, primary_metric="lfw/eer", higher_is_better=False)
    nested = state()
    assert nested["orderByKey"] == "metrics.`best/lfw/eer`", "child runs are ranked among all others"
    assert set(nested["selectedColumns"]) - set(before["selectedColumns"]) == {"metrics.`final/lfw/eer`"}
    client = Store.locate().client()
    found = client.get_experiment_by_name("faces").experiment_id
    edited = {"mlflow.note.content": "mine", "mlflow.sharedViewState.trainkit": json.dumps({**view, "updatedAt": 7})}
    for key, value in edited.items():
        client.set_experiment_tag(found, key, value)
    begin(primary_metric="lfw/accuracy")
    assert {key: tags()[key] for key in edited} == edited


def test_the_page_of_the_installed_mlflow_knows_every_word_of_the_view():
    """Of a page that is built otherwise nothing here holds, and it shows its own view."""
    begin(params={"seed": 3}, primary_metric="lfw/eer")
    begin(params={"seed": 4}, primary_metric="lfw/eer", changed=["seed"])
    found = state()
    spec = find_spec("mlflow")
    assert spec is not None and spec.origin is not None
    scripts = list((Path(spec.origin).parent / "server/js/build/static/js").glob("*.js"))
    page = "\n".join(script.read_text("utf-8") for script in scripts)
    words = {*found, *(key for chart in found["compareRunCharts"] for key in chart)}
    words |= {key for section in found["compareRunSections"] for key in section}
    assert {"compareRunSections", "selectedMetricKeys", "lineSmoothness"} <= words
    assert not [word for word in words if word not in page]
    types = {chart["type"] for chart in found["compareRunCharts"]}
    assert types == {"LINE", "BAR"} and all(f'"{kind}"' in page for kind in types)
    assert '"mlflow.sharedViewState."' in page and '"viewStateShareKey"' in page
    assert all(f'"{one["name"]}"' in page for one in found["compareRunSections"][1:]), "those it would make itself"

"""A training whose best metric is one of which lower is better; and such a run of a version that took the highest."""

from __future__ import annotations

import pytest
from runs import ROOT, Ran, newest, overrides, run, stop_after, stripes

from trainkit.analysis import promote
from trainkit.config import metric_table
from trainkit.experiments.launch import launch
from trainkit.tracking import run_lifecycle
from trainkit.tracking.store import Store
from trainkit.training import best


def words(folder, **changes):
    if not (folder / "train").exists():
        stripes(folder / "train", 10, 0)
        stripes(folder / "val", 9, 1)
    settings = {
        "data.train": f"{folder}/train",
        "data.evaluate": f"{{val: {folder}/val}}",
        "task.net": "{model: test_convnext3, args: {patch_size: 2}}",
        "optim.lr": "0.01",
        "train": "{length: 8 steps, batch_size: 6}",
        "evaluations": "{val: {every: 1 steps}}",
        "best": "{metric: val/nll}",
        "log.ceilings": "off",
    }
    return overrides(settings, changes)


RECIPE = ROOT / "recipes" / "convnext.yaml"


def lowest(ran: Ran, since: int = 0) -> tuple[int, float]:
    steps, values = ran.history.series("val/nll")
    return min(((step, value) for step, value in zip(steps, values, strict=True) if step > since), key=lambda p: p[1])


@pytest.mark.slow
def test_a_training_keeps_the_lowest_loss_and_mlflow_is_told(store, tmp_path):
    ran = run(*words(tmp_path), recipe=RECIPE)
    step, value = lowest(ran)
    (record,) = ran.last.state["best"]
    assert (record["step"], record["value"]) == (step, value) and len(set(ran.series("val/nll"))) == 8
    assert ran.history.metrics["best/val/nll"][-1].value == value
    assert best.best_weights(ran.folder.path).parent.name == f"step-{step:09d}"
    experiment = Store.locate().client().get_experiment_by_name("convnext")
    assert experiment.tags["mlflow.experiment.primaryMetric.greaterIsBetter"] == "False"
    candidate = promote._candidate(Store.locate(), ran.folder)
    assert (candidate.value, candidate.lower) == (value, True)
    other = run(*words(tmp_path, optim__lr="1e-6"), recipe=RECIPE)
    better = min((ran, other), key=lambda each: lowest(each)[1]).folder
    assert lowest(other)[1] != value and Store.locate().find("best") == better
    Store.locate().client().set_experiment_tag(
        experiment.experiment_id, "mlflow.experiment.primaryMetric.greaterIsBetter", "True"
    )
    assert Store.locate().find("best") == better, "whatever an older version said"


@pytest.fixture
def older(store, tmp_path, monkeypatch):
    """An interrupted run of a version that took `max` for every metric."""
    with monkeypatch.context() as patch:
        patch.setattr(metric_table, "_score", lambda name: None)
        ran = run(*words(tmp_path, best="{metric: val/nll, mode: max}"), recipe=RECIPE, stopping=stop_after(4))
    assert ran.code == 143 and "mode: max" in ran.folder.recipe.read_text()
    return ran


@pytest.mark.slow
def test_an_older_run_is_resumed_in_the_right_direction(older):
    highest = max(older.series("val/nll"))
    assert older.last.state["best"][0]["value"] == highest
    done, digest = older.last.state["step"], older.folder.info().recipe_hash
    assert launch(run_lifecycle.request_of(older.folder, plugins=("toy",)), lambda: False) == 0
    ran = Ran(0, newest())
    assert ran.folder == older.folder and ran.folder.info().recipe_hash == digest
    step, value = lowest(ran, since=done)
    assert value < highest and ran.last.state["best"][0] == {"value": value, "step": step, "weights": "model"}

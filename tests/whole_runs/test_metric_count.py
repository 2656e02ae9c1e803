"""The shipped recipes, cut short: how many metrics MLflow has of a run, as its client counts them."""

from __future__ import annotations

import pytest
from runs import ROOT, run

from trainkit.config.loader import load
from trainkit.tracking.metric_selection import MOST
from trainkit.tracking.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("store")]
SHORT = ["train.length=4 steps", "train.schedule.warmup=null", "log.every=2 steps", "log.system_every=0.1 s"]
SHORT += ["log.ceilings=off", "checkpoints.every=4 steps"]


def counted(name, *words):
    """Names of the metrics of a short run: those in MLflow, and those in its journal."""
    recipe = load(ROOT / "recipes" / f"{name}.yaml")
    at_end = [f"evaluations.{one}.every=4 steps" for one in recipe.evaluations]
    budgets = [f"evaluations.{one}.budget=null" for one, e in recipe.evaluations.items() if e.budget is not None]
    ran = run(*SHORT, *at_end, *budgets, *words, recipe=ROOT / "recipes" / f"{name}.yaml")
    assert ran.code == 0
    metrics = set(Store.locate().client().get_run(ran.folder.info().run_id).data.metrics)
    primary = recipe.best.metric if recipe.best else "train/loss"
    assert {"train/loss", "train/lr", "speed/samples_per_s", "system/rss_gb", primary} <= metrics
    assert len(metrics) <= MOST, sorted(metrics)
    assert len(ran.history.metrics) > 1.5 * len(metrics), "the journal has all"
    train = [metric for metric in ran.history.metrics if metric.startswith("train/")]
    assert set(train) <= metrics and len(train) <= 12, "as many as are counted on"
    return metrics


@pytest.mark.parametrize("name", ["convnext", "eye_state", "segment", "tom500", "reid", "face_teacher"])
def test_a_default_run_of_a_recipe_with_drawn_data_has_at_most_40_metrics(name):
    assert not [metric for metric in counted(name) if metric.startswith(("final/", "at_best/", "cost/"))]


def test_a_default_distillation_has_at_most_40_metrics():
    teacher = ["train.length=60 steps", "train.schedule.warmup=null", "evaluations.sample.every=60 steps"]
    taught = run(*teacher, recipe=ROOT / "recipes/face_teacher.yaml")
    words = f"task.teacher={{net: {{name: iresnet18, embedding: 128, width: 0.25}}, weights: run:{taught.folder.name}}}"
    assert "train/cosine_to_teacher" in counted("adadistill", words)

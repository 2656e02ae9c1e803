"""The MLflow page of a store, looked at in a browser: what a person is to find there can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow_pages
import numpy as np
import pytest
from browser import Page, browser, installed
from runs import _port, own_store
from safetensors.numpy import save_file

from trainkit.plots import style
from trainkit.tracking import ui
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker

pytestmark = [pytest.mark.slow, pytest.mark.skipif(installed() is None, reason="there is no Chromium")]

SCORES = {"worst": 0.625, "best": 0.9375, "middle": 0.75}


@dataclass
class Site:
    """A store's page in a browser."""

    page: Page
    at: str
    experiment: str
    runs: dict[str, str]
    """MLflow id by the name of the run."""
    model: str


@pytest.fixture(scope="module")
def site(tmp_path_factory, database) -> Iterator[Site]:
    home, runs = tmp_path_factory.mktemp("pages"), {}
    with own_store(home, database):
        store = Store.locate()
        for seed, (name, score) in enumerate(SCORES.items()):
            runs[name] = train(store, name, seed, score, home)
        client = store.client()
        found = client.get_run(runs["best"])
        (model,) = [
            m for m in client.search_logged_models([found.info.experiment_id]) if m.source_run_id == runs["best"]
        ]
        client.create_registered_model("faces-net")
        client.create_model_version("faces-net", model.artifact_location, runs["best"], model_id=model.model_id)
        client.set_registered_model_alias("faces-net", "champion", "1")
        with ui.running(store, _port()) as (_, at), browser() as page:
            yield Site(page, at, found.info.experiment_id, runs, model.model_id)


def train(store: Store, name: str, seed: int, score: float, home: Path) -> str:
    """A run with curves, images of three steps, and weights."""
    folder = store.new_run(name, seed, "a1b2")
    tracker = Tracker.start(
        folder,
        store,
        experiment="faces",
        run_name=name,
        params={"task": {"method": "adadistill"}, "seed": seed, "optim": {"lr": 0.1 / (seed + 1)}},
        primary_metric="val/accuracy",
        note="What faces are for.",
        system_metrics_every=0,
    )
    for step in range(30):
        tracker.log(step, {"train/loss": 2.0 / (step + 1 + seed)})
        if step % 10 == 0:
            tracker.log(step, {"val/accuracy": score * (step + 10) / 30})
            tracker.image("val.inspection/hard", step, style.blank(1.0)[0])
    tracker.log(30, {"best/val/accuracy": score, "final/val/accuracy": score, "final/time/total_s": 12.0 + seed})
    save_file({"w": np.arange(3.0)}, home / "model.safetensors")
    tracker.model("best", home / "model.safetensors", 20, {"val/accuracy": score})
    tracker.finish("FINISHED")
    return tracker.run_id


def test_the_run_table_shows_parameters_and_scores_with_the_best_run_first(site):
    mlflow_pages.run_table(
        site.page, site.at, site.experiment, *SCORES, "best/val/accuracy", "seed", "optim.lr", "0.9375"
    )
    site.page.settle()
    rows = site.page.evaluate(
        "[...document.querySelectorAll('[role=row]')].map(r => [r.getBoundingClientRect().top, r.innerText])"
    )
    order = [name for _, text in sorted(rows) for name in SCORES if name in text.split("\n")]
    assert list(dict.fromkeys(order)) == ["best", "middle", "worst"], rows


def test_the_addresses_that_the_command_prints_lead_to_that_table(site):
    (found,) = ui._experiments(Store.locate())
    assert found.name == "faces"
    site.page.open(f"{site.at}/{ui._run_table(found.experiment_id, found.tags)}")
    site.page.until_shown(*SCORES, "best/val/accuracy")


def test_the_charts_of_a_run_begin_with_loss_and_score(site):
    mlflow_pages.run_charts(site.page, site.at, site.experiment, site.runs["best"], "At a glance")
    text = site.page.text()
    assert text.index("At a glance") < text.index("train/loss") < text.index("val/accuracy")


def test_which_run_is_better_and_what_differs_is_drawn_above_all_other_charts(site):
    mlflow_pages.charts(site.page, site.at, site.experiment, "best/val/accuracy", "val/accuracy")
    site.page.until_shown("0.94", "0.63", "Parallel Coordinates", "optim.lr")


def test_the_weights_of_a_run_say_how_to_use_them_in_a_recipe(site):
    mlflow_pages.logged_model(
        site.page, site.at, site.experiment, site.model, f"weights: models:/{site.model}", "0.9375"
    )

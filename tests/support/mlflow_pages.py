"""Open parts of the MLflow page, and wait until their content is shown."""

from __future__ import annotations

import json
from urllib.parse import quote

from browser import Page

from trainkit.tracking.mlflow_experiment import VIEW

_TRAINING = "workflowType=machine_learning"
"""Without it the page has menus for language models."""

CHART = ".js-plotly-plot"
SLIDER = "[role=slider]"


def start(page: Page, at: str, *texts: str) -> None:
    """What the address of `trainkit ui` opens."""
    page.open(f"{at}/")
    page.until_shown("Run Name", *texts)


def run(page: Page, at: str, experiment: str, run: str, *texts: str) -> None:
    """The page of a run: its description, metrics and tags."""
    page.open(f"{at}/#/experiments/{experiment}/runs/{run}?{_TRAINING}")
    page.until_shown("Description", "samples/s", *texts)


def run_charts(page: Page, at: str, experiment: str, run: str, *texts: str) -> None:
    """The charts of a single run."""
    page.open(f"{at}/#/experiments/{experiment}/runs/{run}/model-metrics?{_TRAINING}")
    page.until_shown(*texts)
    _drawn(page, 2)


def report(page: Page, at: str, experiment: str, run: str) -> None:
    """The report among the artifacts of a run."""
    page.open(f"{at}/#/experiments/{experiment}/runs/{run}/artifacts/report.html?{_TRAINING}")
    page.until("!!document.querySelector('iframe')")
    page.settle(2.0)


def run_table(page: Page, at: str, experiment: str, *texts: str) -> None:
    """The runs of an experiment, in the view that every experiment has."""
    page.open(f"{at}/#/experiments/{experiment}/runs?{_TRAINING}&viewStateShareKey={VIEW}")
    page.until_shown(*texts)


def charts(page: Page, at: str, experiment: str, *texts: str) -> None:
    """The runs of an experiment as curves and bars, in that view."""
    page.open(f"{at}/#/experiments/{experiment}/runs?{_TRAINING}&viewStateShareKey={VIEW}&compareRunsMode=CHART")
    page.until_shown("At a glance", *texts)
    _drawn(page, 2)


def pictures(page: Page, at: str, experiment: str, run: str) -> None:
    """Images of a run with the slider over its steps, beneath its curves."""
    page.open(f"{at}/#/experiments/{experiment}/runs/{run}/model-metrics?{_TRAINING}")
    page.until(f"{_SCROLLED}.length > 0")
    # A chart is made when it comes into sight, and there may be a hundred above.
    for _ in range(100):
        page.settle(0.5, 5)
        if page.evaluate(f"!!document.querySelector({json.dumps(SLIDER)})"):
            break
        page.evaluate(f"{_SCROLLED}.forEach(e => e.scrollTop += 500)")
    page.until(f"!!document.querySelector({json.dumps(SLIDER)})")
    page.evaluate(f"document.querySelector({json.dumps(SLIDER)}).scrollIntoView({{block: 'center'}})")
    page.until(f"{PICTURES}.length > 0")


def logged_model(page: Page, at: str, experiment: str, model: str, *texts: str) -> None:
    """Weights that a run has kept."""
    page.open(f"{at}/#/experiments/{experiment}/models/{model}?{_TRAINING}")
    page.until_shown(*texts)


def registered(page: Page, at: str, name: str, *texts: str) -> None:
    """The versions of a registered model."""
    page.open(f"{at}/#/models/{quote(name)}?{_TRAINING}")
    page.until_shown(name, *texts)


_SCROLLED = (
    "[...document.querySelectorAll('*')]"
    ".filter(e => e.scrollHeight > e.clientHeight + 50 && getComputedStyle(e).overflowY !== 'visible')"
)
PICTURES = "[...document.images].filter(i => i.src.includes('images') && i.naturalWidth > 0)"


def _drawn(page: Page, least: int) -> None:
    page.until(f"document.querySelectorAll({json.dumps(CHART + ' svg')}).length >= {least}")
    page.settle()

"""Take the screenshots of the MLflow page for the README and the docs: `make screenshots`.

    python tests/support/screenshots.py [--experiment NAME] [--out docs/images]

They show the newest experiment of the store, or the one named, that has several finished runs. The store is that of
the environment (TRAINKIT_STORE); nothing is written to it. It needs Chromium.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mlflow_pages  # noqa: E402
from browser import browser, installed  # noqa: E402

from trainkit.errors import UserError  # noqa: E402
from trainkit.tracking import ui  # noqa: E402
from trainkit.tracking.store import Store  # noqa: E402


def shots(store: Store, name: str | None, at: str, out: Path) -> list[tuple[Path, str]]:
    """Take all that the experiment has something for; return the files, and what each of them shows."""
    client = store.client()
    newest = client.search_experiments(order_by=["last_update_time DESC"])
    for experiment in newest:
        finished = client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'")
        if name in (None, experiment.name) and len(finished) > 1:
            break
    else:
        found = f"{store.shown} has no experiment {name or ''} with several finished runs".replace("  ", " ")
        raise UserError(
            "screenshots", found, remedy="train some: accelerate launch trainkit/run.py recipes/convnext.yaml"
        )
    number = experiment.experiment_id
    trained = [run for run in finished if "trainkit.verdict" in run.data.tags]
    compared = next((run for run in trained if "trainkit.parent" in run.data.tags), trained[0]).info.run_id
    pictured = next((run.info.run_id for run in finished if "mlflow.loggedImages" in run.data.tags), None)
    models = client.search_logged_models([number], max_results=1)
    versions = client.search_registered_models(max_results=1)
    taken = []

    with browser(1300, 900) as page:  # without the margin: legible in the README, which shows it 860 pixels wide
        mlflow_pages.run_table(page, at, number, "matching runs")
        page.settle()
        page.screenshot(out / "runs.png", (200, 0, 1100, 560))
        taken.append((out / "runs.png", f"run table of experiment `{experiment.name}`"))

    with browser(1440, 900) as page:

        def take(file: str, what: str, visit: Callable[..., None], *given: object) -> None:
            visit(page, at, *given)
            page.settle()
            page.screenshot(out / file)
            taken.append((out / file, what))

        take("charts.png", f"chart view of `{experiment.name}`", mlflow_pages.charts, number)
        take("run.png", f"page of run {compared}", mlflow_pages.run, number, compared)
        take("report.png", f"`report.html` of run {compared}", mlflow_pages.report, number, compared)
        if pictured:
            take("slider.png", f"images of run {pictured}", mlflow_pages.pictures, number, pictured)
        if models:
            about = models[0].model_id, models[0].name
            take("model.png", f"model {models[0].model_id}", mlflow_pages.logged_model, number, *about)
        if versions:
            take("registered.png", f"registered model `{versions[0].name}`", mlflow_pages.registered, versions[0].name)
    return taken


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--experiment")
    words.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    given = words.parse_args()
    store = Store.locate()
    try:
        if installed() is None:
            raise UserError("screenshots", "there is no Chromium", remedy="apt-get install chromium")
        port = next(port for port in range(5100, 6000) if ui._is_free(port))
        given.out.mkdir(parents=True, exist_ok=True)
        with ui.running(store, port) as (_, at):
            for file, what in shots(store, given.experiment, at, given.out):
                print(f"{file}: {what}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

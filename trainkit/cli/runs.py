"""Compare runs, and promote one to the model registry."""

from __future__ import annotations

import shlex

import click

from trainkit.cli.options import echo, next_step


@click.command()
@click.argument("run", nargs=2, metavar="RUN RUN")
def compare(run: tuple[str, str]) -> None:
    """Compare two runs: what changed, and what differs significantly.

    The second run is compared with the first one. RUN is a run's name, a recipe's name (its last finished run), an
    MLflow run id, `last` (the newest run), `last-finished`, `best` (of the other run's experiment) or `best:RECIPE`.
    For a parent run its child runs are compared.

    Example: trainkit compare best:convnext last
    """
    from trainkit.analysis import compare, compare_report
    from trainkit.tracking.store import Store

    store = Store.locate()
    found = compare.compare(store, compare.resolve(store, run))
    echo(compare_report.text(found))
    next_step("promote", run[-1], why="register it, if it is significantly better")


@click.command()
@click.argument("run")
@click.option("--as", "alias", metavar="ALIAS", help="Alias to set.  [default: the recipe's, or champion]")
@click.option(
    "--name", metavar="MODEL", help="Name of the registered model.  [default: the recipe's, or the recipe's name]"
)
def promote(run: str, **words: str | None) -> int:
    """Register the best weights of RUN, if they are better.

    Sets an alias in MLflow's model registry. Compared with the model that has the alias, the weights must be
    significantly better on the same data. The decision is logged with its evidence. Exit code 1: refused.

    Example: trainkit promote last --as champion
    """
    from trainkit.analysis import promote
    from trainkit.tracking.store import Store

    store = Store.locate()
    folder = store.find(run)
    decision = promote.promote(store, folder, promote.asked(folder, words))
    echo("\n".join(decision.lines()))
    if decision.refused:
        next_step("compare", "best", folder.name, why="where it differs from the best run")
        return 1
    served = f"mlflow models serve -m models:/{decision.model}@{decision.alias} --env-manager local --port 5001"
    echo(f"Serve: MLFLOW_TRACKING_URI={shlex.quote(store.shown)} {served}")
    next_step("export", folder.name, "OUT", why="files for use elsewhere")
    return 0

"""Serve, synchronise and relocate the store of runs."""

from __future__ import annotations

from pathlib import Path

import click

from trainkit.cli.options import echo, next_step
from trainkit.errors import EXIT_CODE


@click.command()
@click.argument("name", required=False, metavar="[EXPERIMENT|RUN]")
@click.option("--port", default=5000, show_default=True, help="Port of the page.")
def ui(name: str | None, port: int) -> None:
    """Serve the MLflow page of this store on this machine.

    It opens the run table of EXPERIMENT, or RUN.  [default: the newest experiment]

    Example: trainkit ui convnext --port 5001
    """
    from trainkit.tracking.store import Store
    from trainkit.tracking.ui import serve

    serve(Store.locate(), port, named=name or "")


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--whole", is_flag=True, help="Send everything again: MLflow's database is an older copy.")
@click.option("--over", is_flag=True, help="Mark runs that another machine left as running as killed.")
def sync(runs: tuple[str, ...], whole: bool, over: bool) -> int:
    """Send to MLflow what was recorded while it was unavailable.

    Without RUNS: of all runs of the store. Each value arrives once.

    Example: trainkit sync
    """
    from trainkit.errors import number_of
    from trainkit.tracking import sync
    from trainkit.tracking.store import Store

    store = Store.locate()
    done = problems = 0
    for run in sync.sync(store, [store.find(word) for word in runs], whole=whole, over=over):
        if run.problem:
            problems += 1
            echo(f"not sent: {run.problem}", err=True)
        elif run.note:
            echo(f"{run.run}: {run.note}")
        else:
            done += 1
            others = number_of(run.others, "files, tags or models", "file, tag or model")
            echo(f"{run.run}: {number_of(run.values, 'values')} and {others} sent; {run.status}")
    if not done and not problems and not runs:
        echo(f"{store.shown} has all of {number_of(len(store.runs()), 'runs')}")
    next_step("sync", *runs, why="try again") if problems else next_step("ui", why="see the runs")
    return EXIT_CODE if problems else 0


@click.command()
@click.option("--from", "home", type=click.Path(path_type=Path), metavar="FOLDER", help="The old folder of the store.")
def relocate(home: Path | None) -> None:
    """Update artifact paths after you moved the store's folder.

    A copy of the database is kept. Files that are still only in the old folder keep their paths.

    Example: trainkit relocate --from /old/mlruns
    """
    from trainkit.tracking import relocate
    from trainkit.tracking.store import Store

    relocate.described(relocate.relocate(Store.locate(), home), echo)
    next_step("ui", why="see the runs")

"""The store of runs: its page, what MLflow has yet to get of it, and where it is."""

from __future__ import annotations

from pathlib import Path

import click

from trainkit.cli.options import echo
from trainkit.errors import EXIT_CODE


@click.command()
@click.argument("name", required=False, metavar="[EXPERIMENT|RUN]")
@click.option("--port", default=5000, show_default=True)
def ui(name: str | None, port: int) -> None:
    """Serve the MLflow page of this store on this machine alone.

    The page opens the run table of EXPERIMENT, or RUN.  [default: the newest experiment]
    """
    from trainkit.tracking.store import Store
    from trainkit.tracking.ui import serve

    serve(Store.locate(), port, named=name or "")


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--whole", is_flag=True, help="Send all that was recorded again: MLflow's database is an older copy.")
@click.option("--over", is_flag=True, help="Runs that another machine left as going on are over: they were killed.")
def sync(runs: tuple[str, ...], whole: bool, over: bool) -> int:
    """Send what RUNS recorded while MLflow was away; each value arrives once.  [default: all runs of the store]"""
    from trainkit.errors import number_of
    from trainkit.tracking import sync
    from trainkit.tracking.store import Store

    store = Store.locate()
    done = problems = 0
    for run in sync.sync(store, [store.find(word) for word in runs], whole=whole, over=over):
        if run.problem:
            problems += 1
            echo(f"left: {run.problem}", err=True)
        elif run.note:
            echo(f"{run.run}: {run.note}")
        else:
            done += 1
            others = number_of(run.others, "files, tags or models", "file, tag or model")
            echo(f"{run.run}: {number_of(run.values, 'values')} and {others} sent; {run.status}")
    if not done and not problems and not runs:
        echo(f"{store.shown} has all of {number_of(len(store.runs()), 'runs')}")
    return EXIT_CODE if problems else 0


@click.command()
@click.option("--from", "home", type=click.Path(path_type=Path), metavar="FOLDER", help="The store's folder before.")
def relocate(home: Path | None) -> None:
    """Find artifacts again after the store's folder was moved: the database takes them to be where it is now.

    A copy of the database is kept. What still lies in the older folder and not here stays as it is.
    """
    from trainkit.tracking import relocate
    from trainkit.tracking.store import Store

    relocate.described(relocate.relocate(Store.locate(), home), echo)

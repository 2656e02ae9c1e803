"""The store of runs: its page."""

from __future__ import annotations

import click


@click.command()
@click.option("--port", default=5000, show_default=True)
def ui(port: int) -> None:
    """Serve the MLflow page of this store on this machine alone."""
    from trainkit.store import Store
    from trainkit.ui import serve

    serve(Store.locate(), port)

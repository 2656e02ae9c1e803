"""The `trainkit` command."""

from __future__ import annotations

import click

from trainkit.cli import data, models, recipes, runs, speed, stores, train
from trainkit.cli.options import Commands
from trainkit.environment.version import __version__


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Training for computer vision with reproducible, fully tracked runs."""


for verb in (
    *(train.run, train.repeat, train.sweep, runs.compare),
    *(recipes.ls, recipes.show, recipes.check, recipes.cp, recipes.download),
    *(speed.preflight, speed.limits, speed.syncs, speed.bench),
    *(models.evaluate, models.predict, models.export_, models.projector, runs.promote),
    *(stores.ui, stores.sync, stores.relocate, data.data),
):
    main.add_command(verb)


if __name__ == "__main__":
    main()

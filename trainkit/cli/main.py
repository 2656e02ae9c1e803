"""The `trainkit` command."""

from __future__ import annotations

import click

from trainkit.cli import data, demo, models, recipes, runs, speed, stores, train
from trainkit.cli.options import Commands, echo
from trainkit.environment.version import __version__

FIRST_STEPS = (
    ("A first run, without data", "trainkit demo"),
    ("Copy one for your own images", "trainkit cp convnext mine.yaml --data FOLDER"),
    ("See runs, curves and images", "trainkit ui"),
    ("Compare your last two runs", "trainkit compare OTHER_RUN last"),
    ("Export a model to serve it", "trainkit export last OUT"),
)
"""Tasks of a newcomer, and the command for each."""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    no_args_is_help=False,
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train computer-vision models from YAML recipes, with reproducible, fully tracked runs.

    Help for one command: trainkit COMMAND --help
    """
    if ctx.invoked_subcommand is None:
        for task, command in FIRST_STEPS:
            echo(f"{task:30}{command}")
        echo(f"{'List all commands':30}trainkit --help")


GROUPS = {
    "Train": (
        *(demo.demo, recipes.ls, recipes.show, recipes.cp, recipes.check),
        *(speed.preflight, train.run, train.repeat, train.sweep),
    ),
    "Data": (data.data, recipes.download),
    "Compare and choose": (runs.compare, runs.promote, models.evaluate),
    "Speed": (speed.bench, speed.syncs),
    "Use the model": (models.predict, models.export_),
    "Store": (stores.ui, stores.sync, stores.relocate),
}
"""Headings of `trainkit --help`, and the commands below each."""

for heading, commands in GROUPS.items():
    for command in commands:
        main.add_command(command)
        main.headings.setdefault(heading, []).append(command.name or "")


if __name__ == "__main__":
    main()

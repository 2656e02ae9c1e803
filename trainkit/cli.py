"""The `trainkit` command, and the command behind `accelerate launch trainkit/run.py`. Heavy imports wait for a verb."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainkit import __version__
from trainkit.errors import EXIT_CODE, UserError

NEWEST = ""


class Commands(click.Group):
    """A group whose mistakes are one message and exit code 2, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb."""
        return _answered(lambda: super(Commands, self).invoke(ctx))


def _answered(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        click.echo(f"{'' if rank == '0' else f'[process {rank}] '}error: {error}", err=True)
        sys.exit(EXIT_CODE)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Training for computer vision in which every run proves what it did."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--check", is_flag=True, help="Validate, print the resolved recipe, name what is missing, and end.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value=NEWEST,
    default=None,
    metavar="[RUN]",
    help="Continue a run; without a name the newest unfinished one of this recipe.",
)
@click.option("--plugin", "plugins", multiple=True, metavar="PACKAGE", help="Import a package that adds words.")
def run(recipe: str, overrides: tuple[str, ...], check: bool, resume: str | None, plugins: tuple[str, ...]) -> None:
    """Train RECIPE, with KEY=VALUE words changing it.

    accelerate launch trainkit/run.py recipes/adadistill.yaml optim.lr=0.05
    """
    from trainkit import launcher

    note = launcher.die_with_parent()
    stopping = launcher.stop_flag()
    if note:
        click.echo(note, err=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

    def act() -> int:
        from trainkit import launch

        order = launch.Order(_recipe(recipe), overrides, plugins, resume)
        if check:
            click.echo(launch.check(order), nl=False)
            return 0
        return launch.launch(order, stopping)

    sys.exit(_answered(act))


def _recipe(word: str) -> Path:
    """The recipe's file: as given, or one of the shipped recipes by name."""
    path = Path(word)
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return path
    shipped = shipped_recipes() / f"{word}.yaml"
    return shipped if shipped.is_file() else path


def shipped_recipes() -> Path:
    """The folder of the recipes that come with trainkit."""
    return Path(__file__).resolve().parent.parent / "recipes"


main.add_command(run)


if __name__ == "__main__":
    main()

"""Runs, once they are there: compared, and taken into the registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainkit.cli.options import echo
from trainkit.errors import UserError


def _file(ending: str, what: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{ending}", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=f"Write {what} to FILE."
    )


@click.command()
@click.argument("run", nargs=-1, required=True, metavar="RUN RUN ...")
@_file("html", "a page that needs nothing else")
@_file("png", "an image of the intervals")
@_file("json", "all values")
@click.option("--no-log", is_flag=True, help="Keep nothing in MLflow.")
def compare(run: tuple[str, ...], html: Path | None, png: Path | None, json: Path | None, no_log: bool) -> None:
    """Compare runs with the first: what was changed, and which score differs by more than chance.

    A RUN is a name, a short one (`convnext`: its last finished run), an MLflow id, `last` (the newest training),
    `last-finished`, `best` (of the experiment of the other run named) or `best:RECIPE`; of a run with repeats beneath
    it, those are compared.
    """
    files = {ending: file for ending, file in (("html", html), ("png", png), ("json", json)) if file is not None}
    for ending, file in files.items():
        if file.suffix != f".{ending}":
            raise UserError(f"--{ending}", f"{file}", f"a file that ends in .{ending}")
        if not file.absolute().parent.is_dir():
            raise UserError(f"--{ending}", f"the folder of {file} is not there", remedy="make it first")
    from trainkit.analysis import compare, compare_report
    from trainkit.tracking.store import Store

    store = Store.locate()
    found = compare.compare(store, compare.resolve(store, run))
    echo(compare_report.text(found))
    for file in files.values():
        try:
            compare_report.write(found, file)
        except OSError as error:
            raise UserError(str(file), f"cannot be written: {error.strerror or error}") from None
        echo(f"{file}: written")
    if not no_log:
        compare_report.log(store, found)


@click.command()
@click.argument("run")
@click.option("--as", "alias", metavar="ALIAS", help="Which alias moves.  [default: the recipe's, or champion]")
@click.option("--name", metavar="MODEL", help="Of the registered model.  [default: the recipe's, or the recipe's name]")
@click.option("--metric", help="The score that decides.  [default: the recipe's, or its best.metric]")
@click.option(
    "--max-slower",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share by which it may be slower.  [default: the recipe's, or 0.1]",
)
def promote(run: str, **words: str | float | None) -> int:
    """Give the best weights of RUN an alias in MLflow's model registry, if they beat what has it.

    They must be better beyond chance on the same data, and RUN not slower on the same hardware. The decision is written
    down with its evidence. Exit code 1: refused.
    """
    from trainkit.analysis import promote
    from trainkit.tracking.store import Store

    store = Store.locate()
    folder = store.find(run)
    decision = promote.promote(store, folder, promote.asked(folder, words))
    echo("\n".join(decision.lines()))
    return 1 if decision.refused else 0

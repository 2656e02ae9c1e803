"""Runs: held against each other, and taken into the registry."""

from __future__ import annotations

import click


@click.command()
@click.argument("run")
@click.option("--as", "alias", metavar="ALIAS", help="Which alias moves.  [default: the recipe's, or champion]")
@click.option("--name", metavar="MODEL", help="Of the registered model.  [default: the recipe's, or the recipe's name]")
@click.option("--metric", help="The score that decides.  [default: the recipe's, or its best.metric]")
@click.option("--max-slower", type=float, help="Share by which it may be slower.  [default: the recipe's, or 0.1]")
def promote(run: str, **words: str | float | None) -> int:
    """Give the best weights of RUN an alias in MLflow's model registry, if they beat what has it.

    They must be better beyond chance on the same data, and RUN not slower on the same hardware. The decision is written
    down with its evidence. Exit code 1: refused.
    """
    from trainkit import registry
    from trainkit.store import Store

    store = Store.locate()
    folder = store.find(run)
    decision = registry.promote(store, folder, registry.asked(folder, words))
    click.echo("\n".join(decision.lines()))
    return 1 if decision.refused else 0

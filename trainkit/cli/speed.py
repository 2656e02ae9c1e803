"""Commands that measure the speed of a recipe on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from trainkit.cli.options import announce, echo, plugins_option, recipe_file, words_argument


@click.command()
@click.argument("recipe")
@words_argument
@plugins_option
def limits(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Time the loader, the network and the evaluations of RECIPE, each alone, on this machine, and keep the figures."""
    announce(recipe)
    from trainkit.config.run_request import Order
    from trainkit.diagnostics import throughput_limits

    for line in throughput_limits.command(Order(recipe_file(recipe), overrides, plugins)):
        echo(line)


@click.command()
@click.argument("recipe")
@words_argument
@click.option("--steps", default=10, show_default=True, help="How many updates are watched.")
@plugins_option
def syncs(recipe: str, overrides: tuple[str, ...], steps: int, plugins: tuple[str, ...]) -> None:
    """Name the source lines of RECIPE's training that make the processor wait for the device, and what they cost."""
    announce(recipe)
    from trainkit.config.run_request import Order
    from trainkit.diagnostics import sync_audit

    for line in sync_audit.command(Order(recipe_file(recipe), overrides, plugins), steps):
        echo(line)


@click.command()
@click.argument("recipe")
@words_argument
@click.option("--only", multiple=True, metavar="SWITCH", help="Measure this switch; may be repeated.  [default: all]")
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats of each switch.")
@click.option("--steps", type=int, help="Updates of a repeat.  [default: about two seconds of them]")
@click.option(
    "--write", type=click.Path(path_type=Path), metavar="NEW", help="Write the recipe with what helps to NEW."
)
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished benchmark of RECIPE.")
@plugins_option
def bench(
    recipe: str,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    repeats: int,
    steps: int | None,
    write: Path | None,
    resume: bool,
    plugins: tuple[str, ...],
) -> int:
    """Measure the switches of RECIPE one by one and together on this machine: speed, memory and numeric drift."""
    announce(recipe)
    from trainkit.config.run_request import Order
    from trainkit.diagnostics import benchmark

    order = Order(recipe_file(recipe), overrides, plugins)
    return benchmark.command(order, only=only, repeats=repeats, steps=steps, write=write, resume=resume, say=echo)


@click.command()
@click.argument("recipe")
@words_argument
@plugins_option
def preflight(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> int:
    """Try RECIPE for a minute: updates, evaluation, checkpoint and restoring it, and forecast the whole training."""
    announce(recipe)
    from trainkit.config.run_request import Order
    from trainkit.diagnostics import preflight

    return preflight.command(Order(recipe_file(recipe), overrides, plugins), say=echo)

"""Commands that measure the speed of a recipe on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainkit.cli.options import announced_order, echo, recipe_command


@recipe_command()
def limits(**asked: Any) -> None:
    """Time the loader, the network and the evaluations of RECIPE, each alone, on this machine, and keep the figures."""
    order = announced_order(**asked)
    from trainkit.diagnostics import throughput_limits

    for line in throughput_limits.command(order):
        echo(line)


@recipe_command(click.option("--steps", default=10, show_default=True, help="How many updates are watched."))
def syncs(steps: int, **asked: Any) -> None:
    """Name the source lines of RECIPE's training that make the processor wait for the device, and what they cost."""
    order = announced_order(**asked)
    from trainkit.diagnostics import sync_audit

    for line in sync_audit.command(order, steps):
        echo(line)


@recipe_command(
    click.option(
        "--only", multiple=True, metavar="SWITCH", help="Measure this switch; may be repeated.  [default: all]"
    ),
    click.option("--repeats", default=5, show_default=True, help="Interleaved repeats of each switch."),
    click.option("--steps", type=int, help="Updates of a repeat.  [default: about two seconds of them]"),
    click.option(
        "--write", type=click.Path(path_type=Path), metavar="NEW", help="Write the recipe with what helps to NEW."
    ),
    click.option("--resume", is_flag=True, help="Go on with the newest unfinished benchmark of RECIPE."),
)
def bench(
    only: tuple[str, ...], repeats: int, steps: int | None, write: Path | None, resume: bool, **asked: Any
) -> int:
    """Measure the switches of RECIPE one by one and together on this machine: speed, memory and numeric drift."""
    order = announced_order(**asked)
    from trainkit.diagnostics import benchmark

    return benchmark.command(order, only=only, repeats=repeats, steps=steps, write=write, resume=resume, say=echo)


@recipe_command()
def preflight(**asked: Any) -> int:
    """Try RECIPE for a minute: updates, evaluation, checkpoint and restoring it, and forecast the whole training."""
    order = announced_order(**asked)
    from trainkit.diagnostics import preflight

    return preflight.command(order, say=echo)

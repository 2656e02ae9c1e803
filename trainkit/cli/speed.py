"""Commands that measure the speed of a recipe on this machine."""

from __future__ import annotations

from typing import Any

import click

from trainkit.cli.options import (
    announced_order,
    echo,
    next_step,
    recipe_command,
    recipe_words,
    refuse_errors,
    run_words,
)


@recipe_command(click.option("--steps", default=10, show_default=True, help="Number of optimizer steps to watch."))
def syncs(steps: int, **asked: Any) -> None:
    """List the source lines that make the CPU wait for the GPU.

    Trains RECIPE for some steps on a GPU and counts the waits of each line.

    Example: trainkit syncs convnext --steps 20
    """
    order = announced_order(**asked)
    refuse_errors(order)
    from trainkit.diagnostics import sync_audit

    for line in sync_audit.command(order, steps):
        echo(line)
    next_step("bench", *recipe_words(order), why="which settings make it faster")


@recipe_command(
    click.option("--repeats", default=5, show_default=True, help="Number of pairs of blocks of each setting."),
    click.option("--steps", type=int, help="Optimizer steps per block.  [default: about two seconds of them]"),
)
def bench(repeats: int, steps: int | None, **asked: Any) -> None:
    """Compare settings of RECIPE by speed on this machine.

    KEY=A,B compares B with A in alternating blocks: speed, memory and losses. Without such a key the settings worth
    trying on this machine are compared with RECIPE as it is. What helps is then measured together.

    Example: trainkit bench convnext loader.workers=0,2
    """
    order = announced_order(**asked)
    from trainkit.diagnostics import benchmark_command

    kept = benchmark_command.command(order, repeats=repeats, steps=steps, say=echo)
    if kept is not None:
        next_step(*run_words(kept), why="train with these settings")
    else:
        next_step("preflight", *recipe_words(order), why="what bounds the speed")


@recipe_command()
def preflight(**asked: Any) -> int:
    """Test RECIPE for a minute and forecast the whole training.

    Runs some steps, an evaluation, a checkpoint and restoring it, times data loading and the model alone, and says what
    bounds the speed. The upper bounds are kept for this machine and shown as shares in later runs.

    Example: trainkit preflight convnext
    """
    order = announced_order(**asked)
    refuse_errors(order)
    from trainkit.diagnostics import preflight
    from trainkit.experiments import recipe_check

    recipe_check.open_all(order, large=True)
    code = preflight.command(order, say=echo)
    if not code:
        next_step(*run_words(order), why="train it")
    return code

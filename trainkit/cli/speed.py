"""Commands that measure the speed of a recipe on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainkit.cli.options import announced_order, echo, next_step, plugin_words, recipe_command, recipe_words, run_words


@recipe_command()
def limits(**asked: Any) -> None:
    """Measure the upper bounds of RECIPE's throughput.

    Data loading, the model and each evaluation are measured alone. The results are kept for this machine and shown as
    shares in later runs.

    Example: trainkit limits convnext
    """
    order = announced_order(**asked)
    from trainkit.diagnostics import throughput_limits

    for line in throughput_limits.command(order):
        echo(line)
    next_step("bench", *recipe_words(order), why="which settings make it faster")


@recipe_command(click.option("--steps", default=10, show_default=True, help="Number of optimizer steps to watch."))
def syncs(steps: int, **asked: Any) -> None:
    """List the source lines that make the CPU wait for the GPU.

    Trains RECIPE for some steps and reports the cost of each line.

    Example: trainkit syncs convnext --steps 20
    """
    order = announced_order(**asked)
    from trainkit.diagnostics import sync_audit

    for line in sync_audit.command(order, steps):
        echo(line)
    next_step("bench", *recipe_words(order), why="which settings make it faster")


@recipe_command(
    click.option(
        "--only", multiple=True, metavar="SWITCH", help="Measure only this switch; may be repeated.  [default: all]"
    ),
    click.option("--repeats", default=5, show_default=True, help="Number of interleaved repeats of each switch."),
    click.option("--steps", type=int, help="Optimizer steps per repeat.  [default: about two seconds of them]"),
    click.option(
        "--write",
        type=click.Path(path_type=Path),
        metavar="NEW",
        help="Write the recipe with the settings that help to the file NEW.",
    ),
    click.option("--resume", is_flag=True, help="Continue the newest unfinished benchmark of RECIPE."),
)
def bench(
    only: tuple[str, ...], repeats: int, steps: int | None, write: Path | None, resume: bool, **asked: Any
) -> int:
    """Measure which settings make RECIPE faster on this machine.

    Each switch is measured alone, then all that help together: speed, memory and numeric drift.

    Example: trainkit bench convnext --only workers --write faster.yaml
    """
    order = announced_order(**asked)
    from trainkit.diagnostics import benchmark_command

    code = benchmark_command.command(
        order, only=only, repeats=repeats, steps=steps, write=write, resume=resume, say=echo
    )
    if write is not None:
        next_step("run", write, *plugin_words(order.plugins), why="train with these settings")
    elif not code:
        switches = [word for name in only for word in ("--only", name)]
        next_step(
            "bench", *recipe_words(order), *switches, "--write", "faster.yaml", why="write the overrides that help"
        )
    return code


@recipe_command()
def preflight(**asked: Any) -> int:
    """Test RECIPE for a minute and forecast the whole training.

    Runs some steps, an evaluation, a checkpoint and restoring it.

    Example: trainkit preflight convnext
    """
    order = announced_order(**asked)
    from trainkit.diagnostics import preflight
    from trainkit.experiments import recipe_check

    recipe_check.open_all(order, large=True)
    code = preflight.command(order, say=echo)
    if not code:
        next_step(*run_words(order), why="train it")
    return code

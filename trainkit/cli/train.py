"""`run`, which is also the command behind `accelerate launch trainkit/run.py`, and runs that belong together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.options import (
    Plain,
    announce,
    announce_start,
    echo,
    recipe_command,
    recipe_file,
    refuse_errors,
    say_valid,
)

if TYPE_CHECKING:
    from trainkit.distributed.stop_signal import Stop

NEWEST = ""

_checked_and_resumed = (
    click.option(
        "--check", is_flag=True, help="Validate only: open data and weights, print what is to decide, then exit."
    ),
    click.option(
        "--resume",
        is_flag=False,
        flag_value=NEWEST,
        default=None,
        metavar="[RUN]",
        help="Continue RUN (no RECIPE needed). Without RUN: the newest unfinished run of RECIPE.",
    ),
    click.option("--elastic", is_flag=True, help="With --resume: allow another number of processes."),
)


class Training(Plain):
    """A command with `--resume`, which may be followed by the name of a run or by an override."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but take a word with `=` after --resume for an override: no run name has one."""
        nameless = {n for n, word in enumerate(args[1:]) if args[n] == "--resume" and "=" in word}
        return super().parse_args(ctx, [f"{w}={NEWEST}" if n in nameless else w for n, w in enumerate(args)])


@recipe_command(
    *_checked_and_resumed,
    click.option(
        "--resume-or-start",
        "or_start",
        is_flag=True,
        help="Like --resume, but start a new run if there is none to continue.",
    ),
    click.option("--folds", is_flag=True, help="Cross-validation: train once per fold, with that fold held out."),
    click.option("--seeds", type=int, metavar="N", help="Train with N seeds, like `trainkit repeat`."),
    click.option("--sweep", is_flag=True, help="Train with several settings, like `trainkit sweep`."),
    click.option(
        "--score", metavar="RUN", help="Evaluate the best weights of RUN on the recipe's evaluations, then exit."
    ),
    cls=Training,
    required=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def run(
    recipe: str | None,
    overrides: tuple[str, ...],
    check: bool,
    resume: str | None,
    or_start: bool,
    elastic: bool,
    folds: bool,
    seeds: int | None,
    sweep: bool,
    score: str | None,
    plugins: tuple[str, ...],
) -> int:
    """Train RECIPE, with KEY=VALUE overrides.

    RECIPE is a file or the name of a shipped recipe. `trainkit train` is the same command. To train with several
    processes: accelerate launch trainkit/run.py RECIPE

    `--resume RUN` continues a run with its own recipe and options.

    Example: trainkit run convnext optim.lr=0.006
    """
    if recipe is None or ("=" in recipe and not Path(recipe).exists()):
        words = overrides if recipe is None else (recipe, *overrides)
        other = folds or sweep or or_start or seeds is not None or score is not None
        return _go_on(resume, words, plugins, elastic, check, other)
    stopping = prepare_process(None if check else recipe)
    from trainkit.config.run_request import RunRequest

    several = [word for word, on in (("--folds", folds), ("--seeds", seeds is not None), ("--sweep", sweep)) if on]
    if len(several) > 1:
        raise click.UsageError(f"{' and '.join(several)} at once; give one of them")
    if several and score is not None:
        raise click.UsageError(f"--score evaluates one run; leave out {several[0]}")
    if or_start and resume:
        raise click.UsageError(f"--resume {resume} and --resume-or-start at once; give one of them")
    resume = NEWEST if or_start else resume
    request = RunRequest(recipe_file(recipe), overrides, plugins, resume, elastic, folds, or_start, seeds, sweep)
    if check:
        return say_valid(request)
    refuse_errors(request)
    if score is not None:
        from trainkit.inference import evaluate_run

        with stopping.at_once():
            evaluate_run.evaluate(request, score)
        return 0
    from trainkit.experiments import launch

    return launch.launch(request, stopping, began())


def _go_on(
    run: str | None, words: tuple[str, ...], plugins: tuple[str, ...], elastic: bool, check: bool, other: bool
) -> int:
    """Continue a run by its name alone. Raises UsageError where none is named, or `other` options are given."""
    if not run:
        raise click.UsageError("Missing argument 'RECIPE'" + ("" if run is None else ", or a run: --resume last"))
    if (file := recipe_file(run)).is_file() and file.suffix in (".yaml", ".yml"):
        raise click.UsageError(f"--resume {run} names a recipe; put it before --resume")
    if other:
        raise click.UsageError("--resume RUN without RECIPE repeats the options of the run; leave out all others")
    stopping = prepare_process(None)
    if not check:
        announce_start(run)
    from trainkit.experiments import launch
    from trainkit.tracking import run_lifecycle
    from trainkit.tracking.store import Store

    request = run_lifecycle.request_of(Store.locate().find(run, unfinished=True), words, plugins, elastic)
    return say_valid(request) if check else launch.launch(request, stopping, began())


@recipe_command(
    click.option(
        "--seeds", default=5, show_default=True, metavar="N", help="Number of seeds, from the recipe's seed upwards."
    ),
    *_checked_and_resumed,
    cls=Training,
)
def repeat(**asked: Any) -> int:
    """Train RECIPE with several seeds and report mean and spread.

    Reports mean, standard deviation and 95 % interval of the mean of each metric. Finished runs with the same recipe,
    seed and data are reused. With several processes: accelerate launch trainkit/run.py RECIPE --seeds 5

    Example: trainkit repeat convnext --seeds 5
    """
    return _launch(**asked)


@recipe_command(*_checked_and_resumed, cls=Training)
def sweep(**asked: Any) -> int:
    """Train RECIPE with several settings and rank the runs.

    Every combination of overrides with several values is trained: optim.lr=0.1,0.05 train.ema=null,0.99. Finished runs
    with the same setting and data are reused. With several processes: accelerate launch trainkit/run.py RECIPE KEY=A,B
    --sweep

    Example: trainkit sweep convnext optim.lr=1e-3,3e-3,1e-2
    """
    return _launch(**asked, sweep=True)


def _launch(recipe: str, check: bool, **asked: Any) -> int:
    """Run a request, of which `asked` are fields of `RunRequest`; with `check` validate it."""
    stopping = prepare_process(None if check else recipe)
    from trainkit.config.run_request import RunRequest

    request = RunRequest(recipe_file(recipe), **asked)
    if check:
        return say_valid(request)
    refuse_errors(request)
    from trainkit.experiments import launch

    return launch.launch(request, stopping, began())


def prepare_process(recipe: str | None) -> Stop:
    """Set up a process that trains a recipe, and announce it where one is given; return the flag that stops it."""
    from trainkit.cli import console
    from trainkit.distributed import stop_signal
    from trainkit.environment import process

    console.outlive_readers()
    process.check_variables()
    if recipe is not None:
        announce(recipe)
    note = process.die_with_parent()
    stopping = stop_signal.stop_flag()
    if note:
        echo(note, err=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    return stopping


def began() -> float:
    """Return when this process began, as `time.perf_counter` counts."""
    from trainkit.environment import process

    return time.perf_counter() - process.age()

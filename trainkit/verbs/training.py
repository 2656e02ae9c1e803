"""`run`, which is also the command behind `accelerate launch trainkit/run.py`."""

from __future__ import annotations

import os

import click

from trainkit.command import Plain, plugins_option, recipe_file

NEWEST = ""


@click.command(cls=Plain, context_settings={"help_option_names": ["-h", "--help"]})
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
@click.option("--elastic", is_flag=True, help="With --resume: the number of processes may have changed.")
@click.option("--folds", is_flag=True, help="Cross-validation: train once for each fold of the data, it held out.")
@click.option("--score", metavar="RUN", help="Score the best weights of RUN on the recipe's evaluations, and end.")
@plugins_option
def run(
    recipe: str,
    overrides: tuple[str, ...],
    check: bool,
    resume: str | None,
    elastic: bool,
    folds: bool,
    score: str | None,
    plugins: tuple[str, ...],
) -> int:
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

    from trainkit import order as orders

    order = orders.Order(recipe_file(recipe), overrides, plugins, resume, elastic, folds)
    if folds and score is not None:
        raise click.UsageError("--score is of one run, not with --folds")
    if check:
        click.echo(orders.check(order), nl=False)
        return 0
    if score is not None:
        from trainkit import evaluating

        evaluating.evaluate(order, score)
        return 0
    from trainkit import launch

    return launch.launch(order, stopping)

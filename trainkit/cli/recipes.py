"""List, show, check and copy recipes, and download what they need."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit import terminal
from trainkit.cli.options import (
    columns_option,
    echo,
    next_step,
    plugin_words,
    plugins_option,
    read_columns,
    recipe_command,
    say_valid,
)
from trainkit.errors import UserError
from trainkit.paths import recipe_file, recipe_word, shipped

if TYPE_CHECKING:
    from trainkit.autoconfig.fit import Start
    from trainkit.tracking.run_folder import RunFolder


_YAML = (".yaml", ".yml")


@click.command()
@click.option("--launch-configs", is_flag=True, help="List the files for `accelerate launch --config_file` instead.")
def ls(launch_configs: bool) -> None:
    """List the shipped recipes.

    Example: trainkit ls
    """
    from trainkit.config import loader

    folder = shipped("accelerate_configs" if launch_configs else "recipes")
    found = sorted(folder.glob("*.yaml"))
    if not found:
        raise UserError(str(folder), "holds no YAML files", remedy="they are part of the repository and of the wheel")
    for path in found:
        echo(f"{str(path) if launch_configs else path.stem:24} {loader.headline(path)}")
    if launch_configs:
        return
    next_step("cp", "RECIPE", "mine.yaml", "--data", "FOLDER", why="copy one for your own data", err=True)


@click.command()
@click.argument("what")
@plugins_option
def show(what: str, plugins: tuple[str, ...]) -> None:
    """Show a recipe with all defaults, a run, or a checkpoint.

    WHAT is a recipe, the name of a run, `last`, `best`, or the folder of a checkpoint.

    Example: trainkit show last
    """
    path = recipe_file(what)
    if path.suffix in _YAML:
        from trainkit.config import loader

        resolved = loader.dump(loader.load(path, (), plugins))
        echo(loader.header(path) + resolved, nl=False)
        next_step("run", recipe_word(path), *plugin_words(plugins), why="train it", err=True)
        return
    from trainkit.checkpoint import verification
    from trainkit.tracking.store import Store

    named = Store.locate().find_or_path(what)
    if not isinstance(named, Path):
        _show_run(named)
        return
    if not (named / verification.MANIFEST).exists():
        raise UserError(what, "a path without a checkpoint", "a recipe, a run, or the folder of a checkpoint")
    echo(verification.describe(named))
    next_step("evaluate", os.path.relpath(named), why="evaluate these weights", err=True)


def _show_run(folder: RunFolder) -> None:
    """Print scores and speed of a run, then its record, differences and checkpoints."""
    from trainkit.analysis import run_scores
    from trainkit.checkpoint import verification
    from trainkit.tracking import lineage, run_folder

    try:
        echo(terminal.shown(run_scores.of_folder(folder), sys.stdout))
    except (
        UserError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # somebody else may have written the folder
        echo(f"The scores cannot be read: {error}")
    echo()
    for key, value in vars(folder.info()).items():
        if value not in (None, "", [], {}):
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if key == "started" else value
            if isinstance(text, dict):
                text = [f"{name} {word}" for name, word in text.items()]
            echo(f"{key:14} {', '.join(text) if isinstance(text, list) else text}")
    for text in (lineage.read(folder), run_folder.summary(folder)):
        if text:
            echo(f"\n{text}", nl=False)
    for step in sorted(folder.checkpoints.glob("step-*")):
        echo()
        echo(verification.describe(step))
    _next_of_run(folder)


def _next_of_run(folder: RunFolder) -> None:
    """Print what may follow a run, by how it ended."""
    from trainkit.tracking import run_lifecycle

    info = folder.info()
    if info.status in ("KILLED", "FAILED"):
        plugins = plugin_words(run_lifecycle.kept(folder).plugins)
        next_step("run", "--resume", folder.name, *plugins, why="continue it", err=True)
    elif info.follows:
        next_step("compare", info.follows, folder.name, why="which scores differ significantly", err=True)
    else:
        next_step("ui", why="curves, images and speed", err=True)


@recipe_command(
    click.option("--all", "whole", is_flag=True, help="Also print the recipe with all defaults: a valid recipe itself.")
)
def check(recipe: str, overrides: tuple[str, ...], whole: bool, plugins: tuple[str, ...]) -> None:
    """Validate RECIPE, open its data, and explain what to decide.

    Also opens its weights. Reports all errors at once.

    Example: trainkit check mine.yaml optim.lr=0.01
    """
    from trainkit.config.run_request import RunRequest

    say_valid(RunRequest(recipe_file(recipe), overrides, plugins), whole)


@click.command()
@click.argument("recipe", metavar="RECIPE|RUN")
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--data", metavar="FOLDER|hf://NAME", help="Inspect this data, and fill in the values that follow from it."
)
@click.option(
    "--start",
    type=click.Choice(["fine-tune", "probe", "scratch"]),
    help="How training starts: fine-tune pretrained weights, fit their last layer alone, or from scratch.",
)
@click.option("--weights", metavar="FILE|timm:NAME.TAG", help="Start from these pretrained weights.")
@click.option("--test", metavar="PERCENT", help="Hold out this part of the images as a test set: 15%.")
@columns_option("Tables: name of a column, such as image=file,label=species. Others are guessed, and printed.")
@plugins_option
def cp(
    recipe: str,
    new: Path,
    data: str | None,
    start: Start | None,
    weights: str | None,
    test: str | None,
    columns: tuple[str, ...],
    plugins: tuple[str, ...],
) -> None:
    """Copy RECIPE, or the recipe of RUN, to NEW for your own data.

    Lines that you have to decide are marked.

    Example: trainkit cp convnext mine.yaml --data photos
    """
    from trainkit.autoconfig import fit, new_recipe

    if data is None and (start or weights or columns or test):
        options = "--columns" if columns else "--test" if test else "--start, --weights"
        raise UserError(options, "given without --data", "--data FOLDER with your images")

    path, run = recipe_file(recipe), ""
    if path.suffix not in _YAML:
        folder = _run(recipe)
        path, run = folder.recipe, folder.name
    copied = new_recipe.copy(
        path, new, plugins, data=data, run=run, asked=fit.Asked(start, weights, test, read_columns(columns))
    )
    if data is not None:
        from trainkit.experiments import recipe_check

        recipe_check.open_copied(copied.files, plugins)
    for sentence in copied.seen:
        echo(sentence)
    lines = f"the {copied.marked} lines" if copied.marked != 1 else "the line"
    files = ", ".join(map(str, copied.files))
    if not copied.marked:
        echo(f"{files}: written")
    elif data is None:
        echo(f"{files}: change {lines} marked with {new_recipe.MARK!r}")
    else:
        echo(f"{files}: decide {lines} marked with {new_recipe.SIGN.strip()!r}")
    for sentence in copied.decide:
        echo(f"  {sentence}")
    next_step("check", new, *plugin_words(plugins), why="validate it")


def _run(word: str) -> RunFolder:
    """Find a run. Raises UserError for a word that is no run either."""
    from trainkit.tracking.store import Store

    try:
        return Store.locate().find(word)
    except UserError as error:
        remedy = f"trainkit ls lists recipes; for runs: {error.remedy}"
        raise UserError(repr(word), "neither a recipe nor a run", remedy=remedy) from None


@click.command()
@click.argument("recipe", metavar="RECIPE|timm:NAME.TAG")
@plugins_option
def download(recipe: str, plugins: tuple[str, ...]) -> None:
    """Download the files that RECIPE names, and verify them.

    Each file is checked by its SHA-256. timm:NAME.TAG downloads weights of timm. Training itself never uses the
    network.

    Example: trainkit download timm:convnext_atto.d2_in1k
    """
    from trainkit.autoconfig import download as downloads
    from trainkit.checkpoint.timm_weights import PREFIX

    if recipe.startswith(PREFIX):
        echo(downloads.weights(recipe))
        next_step("cp", "RECIPE", "mine.yaml", "--data", "FOLDER", "--weights", recipe, why="fine-tune them")
        return
    for line in downloads.download(recipe_file(recipe), plugins):
        echo(line)
    next_step("check", recipe, *plugin_words(plugins), why="validate the recipe and open its files")

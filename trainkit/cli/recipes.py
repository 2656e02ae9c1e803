"""Recipes: found, shown, checked, copied, and what they need fetched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli.options import echo, plugins_option, recipe_command, say_valid
from trainkit.errors import UserError
from trainkit.paths import recipe_file, shipped

if TYPE_CHECKING:
    from trainkit.autoconfig.fit import Start
    from trainkit.tracking.run_folder import RunFolder


@click.command()
@click.option("--launch-configs", is_flag=True, help="List the files for accelerate launch --config_file instead.")
def ls(launch_configs: bool) -> None:
    """List the recipes that come with trainkit."""
    from trainkit.config import loader

    folder = shipped("accelerate_configs" if launch_configs else "recipes")
    found = sorted(folder.glob("*.yaml"))
    if not found:
        raise UserError(str(folder), "holds no YAML files", remedy="they are part of the repository and of the wheel")
    for path in found:
        echo(f"{str(path) if launch_configs else path.stem:24} {loader.headline(path)}")


@click.command()
@click.argument("what")
@plugins_option
def show(what: str, plugins: tuple[str, ...]) -> None:
    """Show a recipe with its defaults, a run (a name, a short one, `last`, `best`), or a checkpoint folder."""
    path = recipe_file(what)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        from trainkit.config import loader

        resolved = loader.dump(loader.load(path, (), plugins))
        echo(loader.header(path) + resolved, nl=False)
        return
    from trainkit.checkpoint import verification

    if path.is_dir() and (path / verification.MANIFEST).exists():
        echo(verification.describe(path))
        return
    from trainkit.tracking import lineage, run_folder
    from trainkit.tracking.store import Store

    folder = Store.locate().find(what)
    for key, text in _outcome(folder):
        echo(f"{key:14} {text}")
    echo()
    for key, value in vars(folder.info()).items():
        if value not in (None, "", []) and key not in ("status", "last_step"):
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


def _outcome(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Status, primary score, speed and time of a run, as far as they are known, each with its name."""
    from trainkit.config import diff
    from trainkit.tracking import journal, run_folder

    info = folder.info()
    yield "status", f"{info.status} at step {info.last_step}"
    try:
        metrics = journal.read(folder.journal).metrics if folder.journal.is_file() else {}
        primary = ((diff.read(folder.recipe) if folder.recipe.is_file() else {}).get("best") or {}).get("metric")
    except (UserError, OSError, ValueError, AttributeError) as error:  # somebody else may have laid the folder here
        yield "score", f"cannot be read: {error}"
        return

    def last(name: str, unit: str = "") -> str:
        if name not in metrics:
            return ""
        point = metrics[name][-1]
        return f"{point.value:.1f} {unit}" if unit else f"{point.value:.4g} at step {point.step}"

    ends = {"best": last(f"best/{primary}"), "last": last(str(primary)) or last(f"final/{primary}")}
    if primary and any(ends.values()) and not run_folder.members(folder):  # of those beneath it more is said below
        yield "score", f"{primary}: {', '.join(f'{when} {value}' for when, value in ends.items() if value)}"
    logged = last("speed/samples_per_s", "samples/s at its last log line")
    if speed := last("final/speed/samples_per_s", "samples/s in training") or logged:
        yield "speed", speed
    times = (last("final/time/wall_s", "s in all"), last("final/time/total_s", "s of training"))
    if any(times):
        yield "time", ", ".join(filter(None, times))


@recipe_command()
def check(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Validate RECIPE, print it resolved, and open the data, weights and networks that a run of it opens."""
    from trainkit.config.run_request import RunRequest

    say_valid(RunRequest(recipe_file(recipe), overrides, plugins))


@click.command()
@click.argument("recipe", metavar="RECIPE|RUN")
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--data", metavar="FOLDER|hf://NAME", help="Look at this data, and fill in what follows from it.")
@click.option(
    "--start",
    type=click.Choice(["fine-tune", "probe", "scratch"]),
    help="How training on --data starts: all pretrained weights trained on, a linear probe, or random weights.",
)
@click.option("--weights", metavar="FILE|timm:NAME.TAG|run:NAME", help="Pretrained weights to start from.")
@plugins_option
def cp(
    recipe: str,
    new: Path,
    data: str | None,
    start: Start | None,
    weights: str | None,
    plugins: tuple[str, ...],
) -> None:
    """Copy RECIPE, or the recipe of RUN, to NEW for another data set; the lines to decide are marked."""
    from trainkit.autoconfig import fit, new_recipe

    if data is None and (start or weights):
        raise UserError("--start, --weights", "without --data", "--data FOLDER, whose images are looked at")

    path, run = recipe_file(recipe), ""
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        folder = _run(recipe)
        path, run = folder.recipe, folder.name
    copied = new_recipe.copy(path, new, plugins, data=data, run=run, asked=fit.Asked(start, weights))
    for sentence in copied.seen:
        echo(sentence)
    lines = f"the {copied.marked} lines" if copied.marked != 1 else "the line"
    files, then = ", ".join(map(str, copied.files)), f"then: trainkit check {new}"
    if not copied.marked:
        echo(f"{files}: {then}")
    elif data is None:
        echo(f"{files}: change {lines} marked with {new_recipe.MARK!r}, {then}")
    else:
        echo(f"{files}: decide {lines} marked with {new_recipe.SIGN.strip()!r}, {then}")


def _run(word: str) -> RunFolder:
    """The run that a word stands for. Raises UserError that thinks of recipes too."""
    from trainkit.config.validation import nearest
    from trainkit.tracking.store import Store

    try:
        return Store.locate().find(word)
    except UserError as error:
        near = nearest(word, [file.stem for file in shipped("recipes").glob("*.yaml")])
        remedy = f"did you mean the recipe {near}?" if near else f"trainkit ls lists recipes; of runs {error.remedy}"
        raise UserError(repr(word), "neither a recipe nor a run", remedy=remedy) from None


@click.command()
@click.argument("recipe", metavar="RECIPE|timm:NAME.TAG")
@plugins_option
def download(recipe: str, plugins: tuple[str, ...]) -> None:
    """Download what RECIPE names, each file checked by its SHA-256, or weights of timm. Training never uses the
    network."""
    from trainkit.autoconfig import download as downloads
    from trainkit.checkpoint.timm_weights import PREFIX

    if recipe.startswith(PREFIX):
        echo(downloads.weights(recipe))
        return
    for line in downloads.download(recipe_file(recipe), plugins):
        echo(line)

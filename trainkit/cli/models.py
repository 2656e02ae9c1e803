"""Commands that use trained models: predictions, evaluations, exported files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli.options import echo, next_step, plugin_words, plugins_option, recipe_file
from trainkit.errors import EXIT_CODE
from trainkit.terminal import bar

if TYPE_CHECKING:
    from trainkit.export.files import Format


@click.command()
@click.argument("run")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--mirror",
    is_flag=True,
    help="Average over mirrored inputs: takes 2 times as long for images, 8 times for volumes.",
)
@plugins_option
def predict(run: str, source: str, out: Path, mirror: bool, plugins: tuple[str, ...]) -> int:
    """Predict images or volumes with the best weights of RUN.

    Classification and embeddings: OUT is a table (.parquet, for classes also .csv) with a row per image. SOURCE is an
    image, a folder of images, or a data set in any form that can be trained on.

    Segmentation of images: OUT/NAME.png with the colours of the classes, and OUT/classes.json. SOURCE may name a split
    of a data set with masks: cityscapes#val.

    Segmentation of volumes: OUT/NAME.nii.gz. SOURCE is a NIfTI file, a folder of them, or a data set: tom500#val.

    Files that cannot be read are listed and left out; the exit code is then 2.

    Example: trainkit predict last photos predictions.csv
    """
    from trainkit.errors import few
    from trainkit.inference import predict

    with bar("predicting", "file") as on_progress:
        done = predict.predict(run, source, out, mirror=mirror, plugins=plugins, on_progress=on_progress)
    for line in done.notes:
        echo(f"note: {line}")
    for line in done.damaged:
        echo(f"left out: {line}", err=True)
    if done.columns:
        echo(f"{out}: {done.rows} rows of {few(done.columns, 20)}, by {done.weights}")
    else:
        labels = few((f"{label} {name}" for label, name in enumerate(done.names)), 20)
        echo(f"{out}: {len(done.written)} label maps of {labels}, by {done.weights}")
    next_step("export", run, "OUT", *plugin_words(plugins), why="use the model elsewhere")
    return EXIT_CODE if done.damaged else 0


@click.command()
@click.argument("what", metavar="RUN|CHECKPOINT")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--log/--no-log", default=True, help="Log the scores as a child run of RUN.  [default: log]")
@plugins_option
def evaluate(what: str, words: tuple[str, ...], log: bool, plugins: tuple[str, ...]) -> None:
    """Evaluate the weights of a run, a checkpoint or a file.

    Runs every evaluation of RECIPE, by default the run's own; of a run the best weights are evaluated. KEY=VALUE
    overrides change it: `data.evaluate={lfw: lfw/pairs.csv}` `evaluations={lfw: {}}`. With several processes:
    accelerate launch trainkit/run.py RECIPE --score RUN

    Example: trainkit evaluate last evaluations.val.batch_size=64
    """
    from trainkit.inference import evaluate_run

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    recipe = recipe_file(words[0]) if words and "=" not in words[0] else None
    order = evaluate_run.request_for(what, recipe, words if recipe is None else words[1:], plugins)
    evaluate_run.evaluate(order, what, log)
    if evaluate_run.names_run(what):
        next_step("predict", what, "IMAGES", "OUT.parquet", *plugin_words(plugins), why="predict your own data")
    else:
        next_step("ui", why="see the scores")


@click.command("export")
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["safetensors", "onnx"]),
    help="Format to write; may be repeated.  [default: safetensors and onnx]",
)
@click.option(
    "--images",
    "pictures",
    default=8,
    show_default=True,
    help="Number of real images on which the files are compared with the trained model.",
)
@plugins_option
def export_(run: str, out: Path, formats: tuple[Format, ...], pictures: int, plugins: tuple[str, ...]) -> None:
    """Export the model of RUN as safetensors and ONNX files.

    The best weights are written to the folder OUT. OUT/model.safetensors and OUT/model.onnx take RGB pixels, or
    prepared patches of volumes, and return logits or embeddings. OUT/model.json describes them for programs,
    OUT/README.md for people. Tensors of a network of timm have timm's names.

    The files are compared with the trained model on real samples; files that differ are not kept.

    Example: trainkit export last exported --to onnx
    """
    from trainkit.export import export

    def say(line: str) -> None:
        echo(f"{line} ...", err=True)

    done = export.export(run, out, formats or export.FORMATS, say=say, pictures=pictures, plugins=plugins)
    for line in done.notes:
        echo(f"note: {line}")
    for file in done.written:
        agreed = done.agreements.get(file.name)
        echo(f"{file}: {agreed or 'what the files are, and how they were checked'}")
    echo(f"Load: {out / 'README.md'} has the code for Python")
    next_step("predict", run, "IMAGES", "OUT.parquet", *plugin_words(plugins), why="predict your own data")

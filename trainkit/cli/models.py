"""Commands that use trained networks: predictions, evaluations, exported files, embeddings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli.options import bar, echo, plugins_option, recipe_file
from trainkit.errors import EXIT_CODE

if TYPE_CHECKING:
    from trainkit.export.files import Format


@click.command()
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path), required=False)
def projector(run: str, out: Path | None) -> None:
    """Write the inspected embeddings of RUN to the folder OUT (projector/RUN) for TensorBoard's projector."""
    from trainkit.analysis import projector
    from trainkit.tracking.store import Store

    store = Store.locate()
    out = out or Path("projector") / store.find(run).name
    for done in projector.export(store, run, out):
        echo(f"{done.folder}: {done.samples} embeddings of {done.dimensions} dimensions")
    echo(f"open it: tensorboard --logdir {out}")


@click.command()
@click.argument("run")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--mirror", is_flag=True, help="Average over mirror images: of images 2, of volumes 8 times the time.")
@plugins_option
def predict(run: str, source: str, out: Path, mirror: bool, plugins: tuple[str, ...]) -> int:
    """Write what RUN says of the images, people or volumes at SOURCE to OUT, by its best weights.

    Classes with their probabilities, and embeddings, are rows of the table OUT, .parquet or (classes) .csv; SOURCE is
    an image, a folder of images, or a set of them in any form that is trained on. Label maps of images are
    OUT/NAME.png, with a palette of the classes' colours and OUT/classes.json; SOURCE may name a split of a set with
    masks: cityscapes#val. Of volumes they are OUT/NAME.nii.gz; SOURCE is a folder of NIfTI files, one file, or a data
    set: tom500#val.

    What cannot be read is named and left out; the exit code is then 2. What was interrupted goes on when it is begun
    again.
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
    return EXIT_CODE if done.damaged else 0


@click.command()
@click.argument("what", metavar="RUN|CHECKPOINT")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--log/--no-log", default=True, help="Keep the scores as a run beneath RUN.  [default: log]")
@plugins_option
def evaluate(what: str, words: tuple[str, ...], log: bool, plugins: tuple[str, ...]) -> None:
    """Score the best weights of a run, those of a checkpoint's folder, or a file, on every evaluation of RECIPE.

    Without RECIPE the run's own is taken; KEY=VALUE words change it: `data.evaluate={lfw: lfw/pairs.csv}`
    `evaluations={lfw: {}}`. On several processes: accelerate launch trainkit/run.py RECIPE --score RUN
    """
    from trainkit.inference import evaluate_run

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    recipe = recipe_file(words[0]) if words and "=" not in words[0] else None
    order = evaluate_run.request_for(what, recipe, words if recipe is None else words[1:], plugins)
    evaluate_run.evaluate(order, what, log)


@click.command("export")
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["safetensors", "onnx", "hub-folder"]),
    help="What to write; may be repeated.  [default: safetensors and onnx]",
)
@click.option(
    "--images",
    "--pictures",
    "pictures",
    default=8,
    show_default=True,
    help="How many real images the files are compared on.",
)
@click.option("--latency", is_flag=True, help="Time one image: float32 and bfloat16, eager, compiled, ONNX Runtime.")
@click.option("--seconds", default=30.0, show_default=True, help="With --latency: how long, without compilation.")
@plugins_option
def export_(
    run: str,
    out: Path,
    formats: tuple[Format, ...],
    pictures: int,
    latency: bool,
    seconds: float,
    plugins: tuple[str, ...],
) -> None:
    """Write the network of the best weights of RUN to the folder OUT, for use elsewhere.

    OUT/model.safetensors and OUT/model.onnx take RGB pixels, or prepared patches of volumes, and give logits or
    embeddings. OUT/model.json describes them to programs, OUT/README.md to people. Of a network of timm, --to
    hub-folder is a folder that timm loads alone: timm.create_model('local-dir:OUT', pretrained=True).

    Files that find something else on real samples than the trained network are not kept.
    """
    from trainkit.export import export

    def say(line: str) -> None:
        echo(f"{line} ...", err=True)

    how = {"pictures": pictures, "latency": latency, "seconds": seconds, "plugins": plugins}
    done = export.export(run, out, formats or export.FORMATS, say=say, **how)
    for line in done.notes:
        echo(f"note: {line}")
    for file in done.written:
        agreed = done.agreements.get(file.name)
        echo(f"{file}: {agreed or 'what the files are, and how they were checked'}")
    for line in done.latency.lines() if done.latency else ():
        echo(line)

"""A first run from nothing: train a small network on handwritten digits that scikit-learn ships."""

from __future__ import annotations

from pathlib import Path

import click

from trainkit.cli.options import echo
from trainkit.cli.train import began, prepare_process

SIDE, DIGIT = 32, 16
"""Sides in pixels of an image, and of the digit in it."""
RECIPE = """\
# Handwritten digits at random places of an image; written by `trainkit demo`.
name: digits
task:
  name: classify
  net: {{model: resnet10t}}
data:
  name: images
  train: {data}
  group: each
  hold_out: 20%
  stratify: true
  evaluate: {{val: held_out}}
  image_size: 32
  mean: [0.92, 0.92, 0.92]
  std: [0.22, 0.22, 0.22]
  augment: {{name: light, flip: 0, shift: 4, fill: reflect}}
optim: {{name: adamw, lr: 2e-3, weight_decay: 0.05}}
train:
  length: 4 epochs
  batch_size: 64
  schedule: {{name: cosine, warmup: {{over: 10 steps}}}}
evaluations:
  val: {{every: 1 epoch}}
best: {{metric: val/top1}}
log: {{every: 10 steps, ceilings: "off"}}
"""
OWN = (
    ("trainkit cp convnext mine.yaml --data FOLDER", "a recipe for your images, FOLDER/<class>/<image>"),
    ("trainkit check mine.yaml", "validate it, and see what is to decide"),
    ("trainkit run mine.yaml", "train it"),
)
"""Commands for own data, and what each does."""


@click.command()
@click.argument("folder", default="trainkit-demo", type=click.Path(path_type=Path, file_okay=False))
def demo(folder: Path) -> int:
    """Train on handwritten digits in FOLDER: a first run without data.

    1,797 digits of scikit-learn, each at a random place of an image. The commands for your own data are printed.

    Example: trainkit demo
    """
    stopping = prepare_process("demo")
    from trainkit.config import yaml_reader
    from trainkit.config.run_request import RunRequest
    from trainkit.experiments import launch

    images, recipe = folder.absolute() / "digits", folder / "digits.yaml"
    if not images.is_dir():
        _write_digits(images)
    recipe.write_text(RECIPE.format(data=yaml_reader.flow(str(images))), encoding="utf-8")
    echo(f"{recipe}: the recipe of this run; its data is {images}\n")
    if code := launch.launch(RunRequest(recipe), stopping, began()):
        return code
    from trainkit.tracking.store import Store

    store = Store.locate()
    for report in store.home.glob(f"artifacts/*/{store.find('last').info().run_id}/artifacts/report.html"):
        echo(f"\nReport:    {report}")
    echo("\nWith your own images:")
    for command, what in OWN:
        echo(f"  {command.ljust(max(len(words) for words, _ in OWN))}  # {what}")
    return 0


def _write_digits(folder: Path) -> None:
    """Write the digits as PNG in a folder for each class, aside first: a killed command leaves no half of them."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    rows, labels = load_digits(return_X_y=True)
    rng, aside = np.random.default_rng(0), folder.with_name("digits.part")
    for number, (row, label) in enumerate(zip(np.asarray(rows), np.asarray(labels).tolist(), strict=True)):
        pixels = row.reshape(8, 8)
        ink = Image.fromarray((255 - 15.9 * pixels).astype(np.uint8)).resize((DIGIT, DIGIT), Image.Resampling.BICUBIC)
        image = Image.new("L", (SIDE, SIDE), 255)
        image.paste(ink, tuple(rng.integers(0, SIDE - DIGIT + 1, 2).tolist()))
        file = aside / str(label) / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    aside.rename(folder)

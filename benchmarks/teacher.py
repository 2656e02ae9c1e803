"""AdaDistill with the teacher in every step, and with its outputs from the store.

    python benchmarks/teacher.py

Both sides train a MobileFaceNet from an iResNet-50, both at full width, on 112 px images (drawn noise, mirrored at
random), by the loop, with random weights for a teacher. Equal work is proved by the losses of all steps, which may
differ by 1e-3 of themselves. Stored outputs are of half precision, and then two trainings drift apart: by 2e-5 in the
first step and 3e-4 in the fifth. An output of another view is off by its length, and refused by the store itself.

Milliseconds a step of the processor, since nothing else is waited for: median of single steps, the first left out; the
teacher's outputs were computed before.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from contest import Contest, Sample

SAMPLES, BATCH, STEPS, CLASSES = 12, 4, 5, 4
RECIPE = """
name: teacher
task:
  name: adadistill
  student: {{name: mobilefacenet, embedding: 512}}
  teacher: {{net: {{name: iresnet50, embedding: 512}}, weights: {home}/teacher.safetensors}}
  margin: {{name: arcface, m: 0.45, scale: 64}}
  cache_teacher: {word}
data: {{name: faces, train: {home}/faces, image_size: 112, flip: true}}
optim: {{name: sgd, lr: 1e-3, momentum: 0.9, weight_decay: 5e-4, clip_norm: 5}}
train: {{length: {steps} steps, batch_size: {batch}, precision: "no"}}
checkpoints: {{every: null, at_end: false}}
log: {{every: 1 steps, system_every: null, ceilings: off}}
"""


def _prepare(home: Path, word: str) -> Path:
    """A packed set of images, weights of a teacher, and the recipe."""
    import safetensors.torch
    import torch

    from trainkit.config import loader
    from trainkit.data.storage.image_store import Packed, Writer

    rng = np.random.default_rng(0)
    with Writer(home / "faces", size=(112, 112), store="decoded") as out:
        for i in range(SAMPLES):
            out.add_image(str(i), np.kron(rng.integers(0, 256, (3, 14, 14), np.uint8), np.ones((1, 8, 8), np.uint8)))
        names = [f"p{i}" for i in range(CLASSES)]
        labels = np.arange(SAMPLES) % CLASSES
        out.finish(labels=labels, class_names=names)
    path = home / "teacher.yaml"
    path.write_text(RECIPE.format(home=home, word=word, steps=STEPS, batch=BATCH), encoding="utf-8")
    torch.manual_seed(0)
    from trainkit.models import face_backbones

    net = face_backbones.build(loader.load(path).task.teacher.net, (3, 112, 112))
    for module in net.modules():  # without statistics of its own, 50 layers of random weights leave all bounds
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = None
    with torch.no_grad():
        net.to(memory_format=torch.channels_last)(
            torch.from_numpy(Packed(home / "faces").fetch(np.arange(SAMPLES))) / 127.5 - 1
        )
    net.to(memory_format=torch.contiguous_format)
    safetensors.torch.save_file(net.state_dict(), home / "teacher.safetensors")
    return path


def side(word: str) -> Sample:
    """One training."""
    import os

    from trainkit.config import run_request
    from trainkit.distributed.runtime import Runtime
    from trainkit.speed.clock import Clock
    from trainkit.tracking.run_folder import RunFolder
    from trainkit.tracking.tracker import Silent
    from trainkit.training import trainer
    from trainkit.training.run_logger import RunLogger

    said: list[dict[str, float]] = []

    class Kept(Silent):
        """Keeps each line; there is no store, whose libraries would take longer than the training."""

        def log(self, step: int, metrics: dict) -> None:
            if "train/loss" in metrics:
                said.append(dict(metrics))

    trainer.Clock = functools.partial(Clock, now=time.process_time)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["ACCELERATE_USE_CPU"] = "true"
        recipe = run_request.load(run_request.RunRequest(_prepare(home, word)))
        logger = RunLogger(recipe, RunFolder(home), Kept(), main=True)
        weights = {"teacher": home / "teacher.safetensors"}
        runtime = Runtime(recipe)
        runtime.configure(recipe)
        data = recipe.data.open(recipe.seed)
        with trainer.Trainer(recipe, data, runtime, logger, weights=weights, cache=home / "outputs") as training:
            training.fit()
        losses = [line["train/loss"] for line in said]
        if len(losses) != STEPS:
            raise RuntimeError("the training did not finish")
        step = float(np.median([line["speed/step_ms_p50"] for line in said[1:]]))
    return Sample(step, losses)


CONTEST = Contest(
    title="Cached teacher outputs",
    unit="CPU ms per step",
    baseline="stored",
    sides={"stored": lambda case: side("disk"), "online": lambda case: side("false")},
    tolerance=1e-3,
    timeout=900.0,
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

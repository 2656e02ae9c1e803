"""AdaDistill with the teacher in every step, and with its outputs from the store.

    python benchmarks/teacher.py

Both sides train a MobileFaceNet from an iResNet-50, both at full width, on 112 px images (drawn noise, mirrored at
random), by the loop, with random weights for a teacher. Equal work is proved by the losses of all steps, which may
differ by 1e-3 of themselves. Stored outputs are of half precision, and then two trainings drift apart: by 2e-5 in the
first step and 3e-4 in the fifth. An output of another view is off by its length, and refused by the store itself.

    ms a step     of the processor, since nothing else is waited for: median of single steps, the first left out; the
                  teacher's outputs were computed before
    parts         a step over its parts, each timed alone in the same process: the student's share (loss, backward
                  pass, optimizer step) and, on the side `online`, the teacher's forward. 1.1: at most 10 % is overhead
    ratio         what the side `online` should take, teacher and student over student
    flops         the same ratio of operations (`trainkit.speed.flops`: in torch's own counter the gradient of a
                  depthwise convolution has as many times too many as it has channels)
    gather_share  looking up a batch, over the step
    build         seconds of the processor before the first step, for the table above all
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from contest import Contest, Sample, Target

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


def _timed(act: Callable[[], object], times: int) -> float:
    """Median seconds of the processor for an act, after one that does not count."""
    act()
    spent = []
    for _ in range(times):
        began = time.process_time()
        act()
        spent.append(time.process_time() - began)
    return float(np.median(spent))


def side(word: str) -> Sample:
    """One training, and its parts by themselves."""
    import os

    import torch

    from trainkit.config import run_request
    from trainkit.distributed.runtime import Runtime
    from trainkit.interfaces import StepContext
    from trainkit.speed.clock import Clock
    from trainkit.speed.flops import Counter
    from trainkit.tracking.run_folder import RunFolder
    from trainkit.tracking.tracker import Silent
    from trainkit.training import teacher_cache, trainer
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
        began = time.process_time()
        data = recipe.data.open(recipe.seed)
        with trainer.Trainer(recipe, data, runtime, logger, weights=weights, cache=home / "outputs") as training:
            training.fit()
        whole = time.process_time() - began
        losses = [line["train/loss"] for line in said]
        if len(losses) != STEPS:
            raise RuntimeError("the training did not finish")
        step = float(np.median([line["speed/step_ms_p50"] for line in said[1:]]))

        data = recipe.data.open(0)
        networks = recipe.task.build(data.meta, {"teacher": home / "teacher.safetensors"}, 0)
        net, teacher = (m.to(memory_format=torch.channels_last) for m in (networks.model, networks.frozen["teacher"]))
        teacher.eval().requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, 0.9, weight_decay=5e-4, fused=True)
        batch = data.train.on_device(data.train.fetch(np.arange(BATCH), 0))

        def asked() -> None:
            with torch.no_grad():
                batch["teacher"] = teacher(batch["image"])

        at = StepContext(0, 0, 0.0, lambda x: x, torch.no_grad)
        recipe.task.cache_teacher = True  # what the batch holds is taken

        def learns() -> None:
            recipe.task.loss(net, networks, batch, at).sum.backward()
            optimizer.step()
            optimizer.zero_grad()

        asked()
        teaching, learning = 1e3 * _timed(asked, 3), 1e3 * _timed(learns, 3)
        counted = []
        for act in (asked, learns):
            with Counter() as counter:
                act()
            counted.append(counter.total)
        more = {
            "parts": step / (learning + (teaching if word == "false" else 0.0)),
            "ratio": (teaching + learning) / learning,
            "flops": sum(counted) / counted[1],
        }
        if word == "disk":
            more["build"] = whole - 1e-3 * step * STEPS
            (table,) = (home / "outputs").glob("[!.]*/rows.arrow")
            stored, index, view = teacher_cache.StoredOutputs(table.parent), batch["index"], batch["view"]
            more["gather_share"] = 1e3 * _timed(lambda: stored.rows(index, view), 100) / step
    return Sample(step, losses, more)


CONTEST = Contest(
    title="Cached teacher outputs",
    unit="CPU ms per step",
    baseline="stored",
    sides={"stored": lambda case: side("disk"), "online": lambda case: side("false")},
    tolerance=1e-3,
    timeout=900.0,
    targets=(
        Target("", "stored", 8, "flops", least=True, words="operations, teacher and student / student"),
        Target("", "stored", 1.1, "parts", words="step with cached outputs / student alone"),
        Target("", "online", 1.1, "parts", words="step with the teacher / teacher and student"),
        Target("", "stored", 0.01, "gather_share", words="row lookup, share of the step"),
    ),
    share=0.67,
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

"""The six tasks as short trainings on data that trainkit draws, each in this process and on the device asked for."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from benchmarks.gpu.scale import Scale
from benchmarks.results import require
from trainkit.config import loader
from trainkit.config.schema import Recipe
from trainkit.diagnostics.preflight import _Scratch
from trainkit.distributed.runtime import Runtime
from trainkit.interfaces import Dataset
from trainkit.paths import recipe_file
from trainkit.training.checkpointer import Resume
from trainkit.training.run_logger import RunLogger
from trainkit.training.trainer import Trainer

TASKS = {
    "classify": ("convnext", ()),
    "embed": ("face_teacher", ()),
    "adadistill": ("adadistill", ()),
    "reid": ("reid", ()),
    "segment2d": ("segment", ("task.net.width=0.125",)),
    "segment3d": ("tom500", ("task.net.filters=[4,8,8,8]", "data.patch=[8,32,32]")),
}
"""Recipe of each task, and what a tiny one has otherwise."""
PLAIN = (
    "log={every: 1000000 steps, system_every: null}",
    "checkpoints={every: null, at_end: false, lose_at_most: null}",
    "evaluations={}",
    "best=null",
    "train.compile=off",
)
"""Changes that leave nothing of a training but its steps. Compiled are those that say so: waits of what is compiled
cannot be named, and a compiler's bits are its own."""


def needs(task: str) -> None:
    """Raise `Skipped` where a package is missing that the task's recipe needs."""
    if task == "segment3d":
        require("monai")
        require("nibabel")


def recipe(task: str, scale: Scale, words: Sequence[str] = ()) -> Recipe:
    """Load the recipe of a task. `words` are changes, as commands take them."""
    name, tiny = TASKS[task]
    changes = {word.partition("=")[0]: word for word in (*PLAIN, *(tiny if scale.tiny else ()), *words)}
    return loader.load(recipe_file(name), tuple(changes.values()))


@functools.cache
def opened(task: str, tiny: bool) -> Dataset:
    made = recipe(task, Scale(device=torch.device("cpu"), tiny=tiny))
    return made.data.open(made.seed)


def teacher(home: str) -> Path:
    """Weights that a distillation takes for its teacher's: of its model, by chance."""
    torch.manual_seed(0)
    made = loader.load(recipe_file("face_teacher"))
    net = made.task.build(opened("embed", False).meta, {}, made.seed).model
    safetensors.torch.save_file(net.state_dict(), file := Path(home) / "teacher.safetensors")
    return file


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Have what Accelerate starts run on a device: it keeps the first that it saw for the whole process."""
    before = os.environ.get("ACCELERATE_USE_CPU")
    os.environ["ACCELERATE_USE_CPU"] = "true" if device.type == "cpu" else "false"
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        if before is None:
            del os.environ["ACCELERATE_USE_CPU"]
        else:
            os.environ["ACCELERATE_USE_CPU"] = before


@contextlib.contextmanager
def training(
    task: str,
    scale: Scale,
    *words: str,
    folder: Path | None = None,
    resume: Path | None = None,
) -> Iterator[Trainer]:
    """Make a training whose batches are ready. With a `folder` it can save; `resume` is a checkpoint to go on from."""
    made = recipe(task, scale, words)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with on(scale.device), tempfile.TemporaryDirectory() as home:
        runtime = Runtime(made)
        runtime.configure(made)
        weights = {"teacher": teacher(home)} if task == "adadistill" else {}
        logger = RunLogger(made, _Scratch(folder) if folder else None)
        data = opened(task, scale.tiny)
        with Trainer(made, data, runtime, logger, weights=weights, resume=Resume(resume)) as trainer:
            trainer.open()
            yield trainer


def advance(trainer: Trainer, steps: int) -> list[Tensor]:
    """Make so many steps; returns the loss of each, a mean over samples, on the device."""
    losses = []
    for _ in range(steps):
        update = trainer.step()
        if update is not None:
            losses.append(torch.stack([loss.sum / loss.weight for loss in update.losses]).mean())
        trainer.after_step()
    return losses


def tensors(trainer: Trainer) -> list[Tensor]:
    """Return what a training has learned: weights, statistics, what the optimizer and the task remember."""
    held = (dict(sorted(state.items())) for state in trainer.model.optimizer.state.values())  # loaded, in another order
    state = [t for named in held for t in named.values() if isinstance(t, Tensor)]
    return [*trainer.model.bare.state_dict().values(), *trainer.model.buffers(), *state]

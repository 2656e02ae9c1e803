"""Memory: running out of it on purpose, and growth over many steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import psutil
import torch
from torch import nn

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.trainings import TASKS, advance, needs, training
from benchmarks.results import Check
from trainkit.training.trainer import Trainer

TITLE = "Memory: smaller micro-batches when out of memory, no growth"
SPARED = (0.6, 0.4, 0.2)
"""Shares of what a step takes beside weights that are left to a training, until it runs out of memory: cuDNN does with
less than it takes."""
LARGER = {
    "classify": ("train.batch_size=512",),
    "embed": ("train.batch_size=256",),
    "adadistill": ("train.batch_size=256",),
    "segment2d": ("train.batch_size=32",),
    "segment3d": ("train.batch_size=8",),
}
"""Changes with which the activations of a step are far more than the allocator's smallest block, 2 MiB."""
GROWTH = 2 << 20
"""Bytes on the device by which a training may be larger after many steps: a block of the allocator."""
HOST_GROWTH = 64 << 20
"""The same of the process: NumPy's and Python's allocators keep what they once had."""


def checks(scale: Scale) -> Iterator[Check]:
    """Yield the measurements."""
    for task in TASKS:
        what = f"{task}: out of memory, train.on_oom: halve"
        yield what, "continues with half the micro-batch, finite losses", functools.partial(_runs_out, scale, task)
    for task in ("classify", "adadistill", "segment2d"):
        what = f"{task}: memory after {_many(scale):,} steps and after a tenth of them"
        yield what, "no growth", functools.partial(_grows, scale, task)


# ---- Running out


def _runs_out(scale: Scale, task: str) -> tuple[bool, str]:
    needs(task)
    words = ("train.on_oom=halve", "train.precision=no", "device.cudnn_benchmark=false")
    words += () if scale.tiny else LARGER.get(task, ())
    with training(task, scale, *words) as trainer, _measured(scale, trainer) as took:
        advance(trainer, 2)
    before, portion, losses = trainer.plan.micro_batch, None, []
    del trainer  # its models take memory
    for share in SPARED:
        with training(task, scale, *words) as trainer, _limited(scale, trainer, share * took()):
            losses = advance(trainer, 3)
            portion = trainer.state.micro_batch
        if portion is not None:
            break
    finite = all(bool(loss.isfinite()) for loss in losses) and len(losses) == 3
    if portion is None:
        return False, f"not out of memory with {before}"
    return finite and portion <= before // 2, f"{before} became {portion}, losses {'' if finite else 'not '}finite"


@contextlib.contextmanager
def _measured(scale: Scale, trainer: Trainer) -> Iterator[Callable[[], int]]:
    """Within it, what a step takes: bytes beside weights on a GPU, rows of the first convolution on a CPU."""
    if scale.device.type == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: peak - held
        peak = torch.cuda.max_memory_allocated()
        return
    rows: list[int] = []
    hook = _first(trainer).register_forward_pre_hook(lambda net, given: rows.append(len(given[0])))
    yield lambda: max(rows)
    hook.remove()


@contextlib.contextmanager
def _limited(scale: Scale, trainer: Trainer, left: float) -> Iterator[None]:
    """Leave a training too little memory for a step; on a CPU its first convolution says so of too many rows."""
    if scale.device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(scale.device).total_memory
        # The optimizer's state comes with the first step: twice the weights at most.
        weights = sum(p.numel() * p.element_size() for p in trainer.model.bare.parameters())
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved() + 2 * weights + left) / total)
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return

    def refuse(net: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if len(given[0]) > left:
            raise torch.OutOfMemoryError(f"{len(given[0])} rows, on purpose")

    hook = _first(trainer).register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _first(trainer: Trainer) -> nn.Module:
    return next(m for m in trainer.model.bare.modules() if isinstance(m, nn.Conv2d | nn.Conv3d))


# ---- Growth


def _many(scale: Scale) -> int:
    return 30 if scale.tiny else 2000


def _grows(scale: Scale, task: str) -> tuple[bool | None, str]:
    needs(task)
    process, many = psutil.Process(), _many(scale)
    with training(task, scale, "train.length=100000 steps") as trainer:
        advance(trainer, many // 10)
        before = _held(scale), process.memory_info().rss
        advance(trainer, many - many // 10)
        device, host = _held(scale) - before[0], process.memory_info().rss - before[1]
    said = f"device {device / 2**20:+.1f} MiB, process {host / 2**20:+.1f} MiB"
    return device <= GROWTH and host <= HOST_GROWTH, said


def _held(scale: Scale) -> int:
    if scale.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()

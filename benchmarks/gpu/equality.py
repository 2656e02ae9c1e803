"""Compare a GPU with a CPU: losses, metrics, precisions, bitwise equality; steps that never wait.

Trainings are those of the built-in recipes on data that trainkit draws, as shipped and with other losses and models. On
a CPU, in tests, the same rows compare the CPU with itself.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.trainings import TASKS, advance, needs, tensors, training
from benchmarks.results import ROOT, Check, Skipped, require
from trainkit.checkpoint import storage
from trainkit.distributed.runtime import checksum
from trainkit.speed.clock import STEP
from trainkit.speed.sync_points import Log, cuda_waits
from trainkit.training.evaluator import evaluate
from trainkit.training.trainer import Trainer

TITLE = "Equality: same results as on a CPU, bitwise reproducible, no waits"
CPU = torch.device("cpu")
CLOSE, FIRST = 1e-2, 3
"""Largest difference of each of the first losses in float32 from those on the CPU, as a share of it."""
OTHERS = {
    "embed": (
        "task.margin={name: arcface, m: 0.3, scale: 24}",
        "task.margin={name: adaface, scale: 24}",
        "task.margin={name: none, loss: bce}",
        "task.net={name: mobilefacenet, embedding: 64, width: 0.25}",
        "task.net={name: ir18, embedding: 64, width: 0.125}",
        "task.net={name: timm, model: test_resnet, embedding: 64}",
    ),
    "adadistill": ("task.method=aml", "task.method=mse"),
    "reid": ("task.triplet={}", "task.net.fusion={name: transformer, heads: 2}"),
    "segment2d": (
        "task.objective={ohem: {}}",
        "task.objective={ce: 0, dice: 1}",
        "task.objective={ce: 0, lovasz: 1}",
        "task.net={name: bisenetv1, encoder: test_resnet, width: 0.125}",
    ),
    "segment3d": (
        "task.objective={whole_batch: true}",
        "task.net={name: dynunet, filters: [4, 8, 8, 8]}",
        "task.net={name: emcad, encoder: test_convnext}",
    ),
}
"""Words that each make another loss or model of a task's recipe."""
DRIFT = 0.05
"""Largest difference of the mean loss of the last fifth of a short training from that in float32, as a share of it."""
SCORES = 0.01
"""Largest difference of a score: one of some hundred decisions may fall to the other side."""
WARM_UP, WATCHED = 5, 10
"""Steps before those that are watched, and steps that are."""
_PLAIN = ("train.precision=no", "device.tf32=false")
_REPEATS = ("device.deterministic=true", "device.tf32=false")


def checks(scale: Scale) -> Iterator[Check]:
    """Yield the measurements."""
    yield "tests marked gpu", "all pass", lambda: _tests(scale)
    for task in TASKS:
        for words in ((), *((word,) for word in OTHERS.get(task, ()))):
            what = f"{task}: first losses, {words[0] if words else 'as shipped'}"
            yield what, f"within {CLOSE:g}", functools.partial(_losses, scale, task, *words)
    for task in TASKS:
        yield f"{task}: waits for the device per step", "0", functools.partial(_waits, scale, task)
    for task in TASKS:
        what = f"{task}: bitwise equality of a repeated, and of a killed and resumed training"
        yield what, "equal", functools.partial(_bits, scale, task)
    what = "classify, fp16: bitwise equality and loss scale of a killed and resumed training"
    yield what, "equal", functools.partial(_bits, scale, "classify", "train.precision=fp16")
    for task in TASKS:
        yield f"{task}: metrics of the same weights", f"within {SCORES:g}", functools.partial(_scores, scale, task)
    for half in ("bf16", "fp16"):
        for task in TASKS:
            what = f"{task}: loss in {half} and in float32"
            yield what, f"within {DRIFT:.0%}", functools.partial(_drift, scale, task, half)


def _tests(scale: Scale) -> tuple[bool, str]:
    """Run the tests with the marker `gpu` by plain pytest: settings of other plug-ins and of the checkout stay out."""
    scale.require_cuda("the tests run there")
    require("pytest")
    words = ["-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "--import-mode=importlib", "--noconftest"]
    done = subprocess.run(
        [sys.executable, *words, "-p", "no:cacheprovider", "tests/gpu"], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode == 0, (done.stdout.strip().splitlines() or [done.stderr])[-1]


def _losses(scale: Scale, task: str, *words: str) -> tuple[bool, str]:
    """Compare the first losses in float32, updates between them, with those on the CPU."""
    needs(task)
    found = []
    for device in (scale.device, CPU):
        with training(task, Scale(device=device, tiny=scale.tiny), *_PLAIN, *words) as trainer:
            found.append(torch.stack(advance(trainer, FIRST)).to(CPU, torch.float64))
    apart = float((found[0] / found[1] - 1).abs().max())
    return apart <= CLOSE, f"{len(found[0])} losses within {apart:.1e}, the last {found[0][-1]:.4g}"


def _waits(scale: Scale, task: str) -> tuple[bool, str]:
    needs(task)
    scale.require_cuda("a CPU waits for nothing")
    log = Log()
    with training(task, scale, "loader.workers=0") as trainer:
        advance(trainer, WARM_UP)
        with cuda_waits(log.seen):
            log.phase = lambda: trainer.clock.phase
            advance(trainer, WATCHED)
    found = {place: count for place, count in log.counts.items() if place.phase in STEP}
    if not found:
        return True, "0"
    places = "; ".join(f"{place.code} at {place.where}" for place in found)
    return False, f"{sum(found.values()) / WATCHED:g} a step: {places}"


def _bits(scale: Scale, task: str, *words: str) -> tuple[bool, str]:
    """Compare a training with its repeat, and with one that saves half-way, continues, stops, and resumes there."""
    needs(task)
    if words:
        scale.require_cuda("fp16 is refused on a CPU")
    elif scale.device.type == "cpu":
        words = ("train.precision=no",)
    half = 3 if scale.tiny else 10
    with tempfile.TemporaryDirectory() as home:
        with training(task, scale, *_REPEATS, *words, folder=Path(home) / "whole") as trainer:
            advance(trainer, 2 * half)
            true, scaling = checksum(tensors(trainer)), _scale_of_loss(trainer)
        with training(task, scale, *_REPEATS, *words, folder=Path(home) / "killed") as trainer:
            advance(trainer, half)
            trainer.checkpoints.save(required=True)
            trainer.checkpoints.wait()
            path, problems = storage.newest_valid(Path(home) / "killed" / "checkpoints")
            if path is None:
                raise RuntimeError("; ".join(problems))
            advance(trainer, half)
            again = checksum(tensors(trainer))
        with training(task, scale, *_REPEATS, *words, folder=Path(home) / "killed", resume=path) as trainer:
            advance(trainer, half)
            resumed, scaled = checksum(tensors(trainer)), _scale_of_loss(trainer)
    found = {"repeated": again == true, "resumed": resumed == true, "scale of the loss": scaling == scaled}
    differ = [name for name, same in found.items() if not same]
    said = f"equal after {2 * half} steps" + (f", scale of the loss {scaling}" if scaling else "")
    return not differ, f"not equal: {', '.join(differ)}" if differ else said


def _scale_of_loss(trainer: Trainer) -> object:
    scaler = trainer.runtime.accelerator.scaler
    return None if scaler is None else (scaler.get_scale(), scaler.state_dict()["_growth_tracker"])


def _scores(scale: Scale, task: str) -> tuple[bool, str]:
    """Train a little on the device, and score these weights on it and on the CPU."""
    needs(task)
    found: list[dict[str, float]] = []
    weights: dict[str, Tensor] = {}
    for device in (scale.device, CPU):
        with training(task, Scale(device=device, tiny=scale.tiny), *_PLAIN) as trainer:
            if weights:
                trainer.model.bare.load_state_dict(weights)
            else:
                advance(trainer, 5 if scale.tiny else 50)
                weights = {name: t.to(CPU, copy=True) for name, t in trainer.model.bare.state_dict().items()}
            # Not views of a split, nor the training set: it takes a CPU minutes and goes the same way.
            splits = {n: split for n, split in trainer.data.evaluations.items() if "." not in n and n != "train"}
            scores = [
                (name, evaluate(trainer.recipe.task, trainer.model.bare, split, 32, trainer.runtime).metrics)
                for name, split in splits.items()
            ]
            found.append({f"{name}/{metric}": v for name, metrics in scores for metric, v in metrics.items()})
    one, other = found
    if not one or one.keys() != other.keys():
        return False, f"metrics differ: {sorted(one.keys() ^ other.keys())}"
    off = {
        name: 0.0
        if math.isnan(one[name]) and math.isnan(other[name])
        else abs(one[name] - other[name]) / max(1.0, abs(other[name]))
        for name in one
    }
    worst = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
    return off[
        worst
    ] <= SCORES, f"{len(off)} metrics; largest difference {worst}: {one[worst]:.6g} and {other[worst]:.6g}"


@functools.cache
def _curve(scale: Scale, task: str, precision: str) -> list[float]:
    with training(task, scale, f"train.precision={precision}", "device.tf32=false") as trainer:
        return torch.stack(advance(trainer, 10 if scale.tiny else 50)).float().tolist()


def _drift(scale: Scale, task: str, half: str) -> tuple[bool, str]:
    needs(task)
    if half == "fp16":
        scale.require_cuda("fp16 is refused on a CPU")
    elif scale.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skipped("this GPU has no bf16")
    true, found = _curve(scale, task, "no"), _curve(scale, task, half)
    last = max(1, len(true) // 5)
    a, b = (sum(curve[-last:]) / last for curve in (found, true))
    drift = abs(a - b) / abs(b)
    most = max(abs(x - y) for x, y in zip(found, true, strict=True))
    return drift <= DRIFT, f"{drift:.2%} ({a:.4g} and {b:.4g} after {len(true)} steps); of one step at most {most:.2g}"

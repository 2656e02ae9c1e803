"""Compare a GPU with a CPU: losses, models, metrics, precisions, bitwise equality; steps that never wait.

Inputs are random, small and the same everywhere; trainings are those of the built-in recipes on data that trainkit
draws. On a CPU, in tests, the same rows compare the CPU with itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.gpu import parts
from benchmarks.gpu.report import ROOT, Check, Row, Scale, Skipped, require, require_cuda, run
from benchmarks.gpu.trainings import TASKS, advance, needs, tensors, training
from trainkit.diagnostics.preflight import _saved
from trainkit.diagnostics.sync_emulation import Following
from trainkit.distributed.runtime import checksum
from trainkit.speed.clock import STEP
from trainkit.speed.recompiles import Recompiles
from trainkit.speed.sync_points import Log, cuda_waits
from trainkit.training.evaluator import evaluate
from trainkit.training.trainer import Trainer

TITLE = "Equality: same results as on a CPU, bitwise reproducible, no waits"
CPU = torch.device("cpu")
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference from float64 on the CPU, as a share of the length of all values. Parts of losses and models are
computed in float32 whatever their input, and few values near 0 make what batch norm divides by."""
DRIFT = 0.05
"""Largest difference of the mean loss of the last fifth of a short training from that in float32, as a share of it."""
SCORES = 0.01
"""Largest difference of a score: one of some hundred decisions may fall to the other side."""
WARM_UP, WATCHED = 5, 10
"""Steps before those that are watched, and steps that are."""
_PLAIN = ("train.precision=no", "device.tf32=false")
_REPEATS = ("device.deterministic=true", "device.tf32=false")


def rows(scale: Scale, done: Collection[str]) -> Iterator[Row]:
    """Yield a row for each comparison that is not `done`."""
    return run(_checks(scale), done)


def _checks(scale: Scale) -> Iterator[Check]:
    yield "tests marked gpu", "all pass", lambda: _tests(scale)
    close = ", ".join(f"{str(dtype).removeprefix('torch.')} {most:g}" for dtype, most in CLOSE.items())
    for name, loss in parts.LOSSES.items():
        yield f"loss, {name}: value and gradients", close, functools.partial(_loss, scale, loss)
    for name, made in parts.NETWORKS.items():
        expected = "float32 0.001" if name in parts.FLOAT32 else close
        yield f"model, {name}: outputs and gradients", expected, functools.partial(_network, scale, name, made)
    for name, measure in parts.MEASURES.items():
        yield f"of predictions, {name}", close, functools.partial(_measure, scale, measure)
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
    for mode in ("default", "reduce-overhead", "max-autotune"):
        for task in TASKS if mode == "default" else ("classify",):
            what = f"{task}, compile {mode}: recompilations after {WARM_UP} steps"
            yield what, "0", functools.partial(_recompiles, scale, task, mode)


# ---- Single parts


def _tests(scale: Scale) -> tuple[bool, str]:
    """Run the tests with the marker `gpu` by plain pytest: settings of other plug-ins and of the checkout stay out."""
    require_cuda(scale, "the tests run there")
    require("pytest")
    words = ["-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "--import-mode=importlib", "--noconftest"]
    done = subprocess.run(
        [sys.executable, *words, "-p", "no:cacheprovider", "tests/gpu"], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode == 0, (done.stdout.strip().splitlines() or [done.stderr])[-1]


def _far(found: list[Tensor], true: list[Tensor]) -> float:
    """The greatest difference of a tensor, as a share of the length of all values of the true one."""
    off = 0.0
    for a, b in zip(found, true, strict=True):
        a, b = a.detach().to(CPU, torch.float64), b.detach().to(CPU, torch.float64)
        gap = float((a - b).norm() / b.norm().clamp(min=1e-12))
        off = max(off, math.inf if math.isnan(gap) else gap)
    return off


def _compared(
    scale: Scale,
    compute: Callable[[torch.device, torch.dtype], list[Tensor]],
    dtypes: Sequence[torch.dtype] = tuple(CLOSE),
) -> tuple[bool, str]:
    """Compare what is computed on the device in each precision with the CPU's in the first of them; TF32 is off."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        true = compute(CPU, dtypes[0])
        far = {dtype: _far(compute(scale.device, dtype), true) for dtype in dtypes}
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    said = ", ".join(f"{str(dtype).removeprefix('torch.')} {off:.1e}" for dtype, off in far.items())
    return all(off <= CLOSE[dtype] for dtype, off in far.items()), said


def _loss(scale: Scale, loss: Callable[[parts.Drawn], Tensor]) -> tuple[bool, str]:
    def compute(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        drawn = parts.Drawn.on(device, dtype)
        value = loss(drawn)
        value.backward()
        return [value, *(t.grad for t in vars(drawn).values() if t.grad is not None)]

    return _compared(scale, compute)


def _network(scale: Scale, name: str, made: Callable[[], parts.Made]) -> tuple[bool, str]:
    def compute(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        net, given = made()
        net = net.to(device, dtype)
        given = pytree.tree_map_only(Tensor, lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), given)
        out = [t for t in pytree.tree_leaves(net(*given)) if isinstance(t, Tensor) and t.is_floating_point()]
        if not net.training:
            return out
        # Weighed unevenly: the squares of what a batch norm gives have a gradient of nearly nothing.
        weighed = [(t.double() * torch.arange(t.numel()).cos().to(t.device).view_as(t)).mean() for t in out]
        torch.stack(weighed).sum().backward()
        grads = [p.grad.double().flatten() for p in net.parameters() if p.grad is not None]
        return [*out, torch.cat(grads)]

    return _compared(scale, compute, (torch.float32,) if name in parts.FLOAT32 else tuple(CLOSE))


def _measure(scale: Scale, measure: Callable[[parts.Drawn], object]) -> tuple[bool, str]:
    def compute(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        found = pytree.tree_leaves(measure(parts.Drawn.on(device, dtype)))
        return [t for t in found if isinstance(t, Tensor)]

    return _compared(scale, compute)


# ---- Whole trainings


def _waits(scale: Scale, task: str) -> tuple[bool, str]:
    needs(task)
    log = Log()
    cuda = scale.device.type == "cuda"
    words = () if cuda else ("train.precision=no",)
    watching = cuda_waits(log.seen, names=True) if cuda else Following(log.seen, log.asks)
    with contextlib.ExitStack() as stack:
        if not cuda:
            stack.enter_context(watching)  # it knows the tensors that are made under it
        trainer = stack.enter_context(training(task, scale, "loader.workers=0", *words, emulate=not cuda))
        advance(trainer, WARM_UP)
        if cuda:
            stack.enter_context(watching)
        log.phase = lambda: trainer.clock.phase
        log.tallies.clear()
        advance(trainer, WATCHED)
        found = {place: tally.count for place, tally in log.tallies.items() if place.phase in STEP}
    if not found:
        return True, "0"
    places = "; ".join(f"{place.what} at {place.where}" for place in found)
    return False, f"{sum(found.values()) / WATCHED:g} a step: {places}"


def _bits(scale: Scale, task: str, *words: str) -> tuple[bool, str]:
    """Compare a training with its repeat, and with one that saves half-way, continues, stops, and resumes there."""
    needs(task)
    if words:
        require_cuda(scale, "fp16 is refused on a CPU")
    elif scale.device.type == "cpu":
        words = ("train.precision=no",)
    half = 3 if scale.tiny else 10
    with tempfile.TemporaryDirectory() as home:
        with training(task, scale, *_REPEATS, *words, folder=Path(home) / "whole") as trainer:
            advance(trainer, 2 * half)
            true, scaling = checksum(tensors(trainer)), _scale_of_loss(trainer)
        with training(task, scale, *_REPEATS, *words, folder=Path(home) / "killed") as trainer:
            advance(trainer, half)
            path, _ = _saved(trainer)
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
        require_cuda(scale, "fp16 is refused on a CPU")
    elif scale.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skipped("this GPU has no bf16")
    true, found = _curve(scale, task, "no"), _curve(scale, task, half)
    last = max(1, len(true) // 5)
    a, b = (sum(curve[-last:]) / last for curve in (found, true))
    drift = abs(a - b) / abs(b)
    most = max(abs(x - y) for x, y in zip(found, true, strict=True))
    return drift <= DRIFT, f"{drift:.2%} ({a:.4g} and {b:.4g} after {len(true)} steps); of one step at most {most:.2g}"


def _recompiles(scale: Scale, task: str, mode: str) -> tuple[bool, str]:
    needs(task)
    if scale.device.type == "cpu" and (task, mode) != ("classify", "default"):
        raise Skipped("needs a GPU: on a CPU one model is compiled, in the default mode")
    words = () if scale.device.type == "cuda" else ("train.precision=no",)
    torch._dynamo.reset()
    with training(task, scale, f"train.compile={mode}", *words) as trainer:
        compiled = Recompiles()
        advance(trainer, WARM_UP)
        compiled.mark()
        advance(trainer, WATCHED)
        found = compiled.since()
    if found is None:
        return False, "nothing was compiled"
    reasons = f": {'; '.join(found.reasons)}" if found.reasons else ""
    return found.recompiles == 0, f"{found.recompiles}, graph breaks {found.graph_breaks}{reasons}"

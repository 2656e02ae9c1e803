"""Speed side by side: loops of others, the margin head, the distillation of a small model from cached outputs."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from benchmarks.gpu import loops
from benchmarks.gpu.scale import Scale
from benchmarks.results import Check, Skipped
from trainkit.config.run_request import RunRequest
from trainkit.diagnostics.stepped_process import SteppedProcess, in_turns, ratio
from trainkit.models import face_backbones
from trainkit.models.network_specs import IResNetSpec

TITLE = "Speed, side by side"
AS_FAST = 0.99
"""Of the rate of a loop that does the same work."""
GOALS = {"iresnet50": 9000, "convnext_tiny": 4500, "adadistill": 30_000}
"""Samples a second on an H200."""


def checks(scale: Scale) -> Iterator[Check]:
    """Yield the measurements."""
    what = "margin softmax, 512 x 85,742 frozen centres"
    yield what, "within 1e-3 of torch's chain", functools.partial(head, scale)
    for name, subject in loops.SUBJECTS.items():
        for peer in ("by hand", "accelerate"):
            what = f"{name} bf16 {subject.side[0]} px, batch {subject.batch[0]}, step: trainkit / {peer}"
            goal = f"; {GOALS[name]:,} samples/s on an H200" if name in GOALS else ""
            yield what, f">= {AS_FAST} times as fast{goal}", functools.partial(loop, scale, name, peer)
    what = "AdaDistill: MobileFaceNet 112 px, cached iResNet-50, batch 1024, bf16: CUDA graphs / eager"
    yield what, f">= {GOALS['adadistill']:,} samples/s on an H200", functools.partial(adadistill, scale)


def on_h200(scale: Scale, held: bool) -> bool | None:
    """A goal that was set for an H200; None on any other device."""
    known = scale.device.type == "cuda" and "H200" in torch.cuda.get_device_name(scale.device)
    return held if known else None


# ---- Loops of others


def loop(scale: Scale, name: str, peer: str) -> tuple[bool | None, str]:
    """Trainkit against a peer, by blocks next to each other."""
    found = _contest(scale, name)
    if found["unequal"]:
        raise RuntimeError(f"not the same work: {'; '.join(found['unequal'])}")
    if peer in found["absent"]:
        raise Skipped(found["absent"][peer])
    (figures,) = found["cases"].values()
    (own,), (other,) = figures["trainkit"], figures[peer]
    rate, memory = own["more"]["per_s"], own["more"]["memory_gb"]
    times = ratio(other["blocks"], own["blocks"])  # of seconds: more of them is slower
    text = f"{times}; {rate:,.0f} and {other['more']['per_s']:,.0f} samples/s, {own['value']:.3g} and "
    text += f"{other['value']:.3g} ms, {memory:.2f} and {other['more']['memory_gb']:.2f} GB; first losses alike"
    if scale.tiny:
        return None, text
    return times.high >= AS_FAST and on_h200(scale, rate >= GOALS.get(name, 0)) is not False, text


@functools.cache
def _contest(scale: Scale, name: str) -> dict[str, Any]:
    case = f"{name} {scale.device.type} {'tiny' if scale.tiny else 'full'}"
    contest = replace(loops.CONTEST, tolerance=1e-4, threads=1) if scale.tiny else loops.CONTEST
    with tempfile.TemporaryDirectory() as folder:
        loops.write(name, scale.tiny, Path(folder), "bf16" if scale.device.type == "cuda" else "no")
        os.environ[loops.FOLDER] = folder
        return contest.run(Path(loops.__file__), list(contest.sides), [case], 1)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of a call: by events on a GPU, which is waited for at the end."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize(device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after)


# ---- The margin head


def head(scale: Scale) -> tuple[bool | None, str]:
    """Loss and gradient over frozen centres, in turns with the chain that keeps the matrix of all cosines."""
    from trainkit.losses.distillation import Centres
    from trainkit.losses.margin import margin_loss
    from trainkit.losses.margin_specs import ArcFace

    batch, classes, width = (64, 32_768, 64) if scale.tiny else (512, 85_742, 512)
    device, draw = scale.device, torch.Generator().manual_seed(0)
    x_BD = torch.randn(batch, width, generator=draw).to(device)
    label_B = torch.randint(classes, (batch,), generator=draw).to(device)
    centres = Centres(classes, width).to(device)
    centres.weight.copy_(torch.randn(classes, width, generator=draw))
    unit_CD, margin = F.normalize(centres.weight), ArcFace(m=0.45)

    def gradient(loss: Tensor, leaf_BD: Tensor) -> tuple[Tensor, Tensor]:
        loss.backward()
        if leaf_BD.grad is None:
            raise RuntimeError("no gradient")
        return loss.detach(), leaf_BD.grad

    def chain() -> tuple[Tensor, Tensor]:
        leaf_BD = x_BD.clone().requires_grad_()
        cosine_BC = F.normalize(leaf_BD) @ unit_CD.T
        own_B1 = cosine_BC.gather(1, label_B[:, None]).clamp(-1, 1)
        logit_BC = cosine_BC.scatter(1, label_B[:, None], (own_B1.acos() + margin.m).cos())
        return gradient(F.cross_entropy(margin.scale * logit_BC, label_B), leaf_BD)

    def one_pass() -> tuple[Tensor, Tensor]:
        leaf_BD = x_BD.clone().requires_grad_()
        scores = centres.scores(leaf_BD, label_B, margin.scale)
        return gradient(margin_loss(scores, label_B, margin)[0] / len(leaf_BD), leaf_BD)

    exact, gradient_BD = chain()
    loss, found_BD = one_pass()
    off = float((found_BD - gradient_BD).norm() / gradient_BD.norm()), abs(float(loss / exact - 1))
    memory = [_extra_mb(call, device) for call in (one_pass, chain)]
    pairs = [[milliseconds(call, device) for call in (one_pass, chain)] for _ in range(4 if scale.tiny else 60)]
    own, other = zip(*pairs, strict=True)
    text = f"{np.median(own):.3f} ms, {ratio(other, own)} of torch's chain ({np.median(other):.3f} ms); "
    text += f"{memory[0]:.0f} and {memory[1]:.0f} MB more; loss off by {off[1]:.1e}, gradient by {off[0]:.1e}"
    return off[0] < 1e-3 and off[1] < 1e-3, text


def _extra_mb(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return math.nan
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


# ---- Distillation


def adadistill(scale: Scale) -> tuple[bool | None, str]:
    """MobileFaceNet and the outputs of an iResNet-50 that are computed once: CUDA graphs against eager steps."""
    batch, student, teacher = (
        8 if scale.tiny else 1024,
        loops.SUBJECTS["mobilefacenet"].net[scale.tiny],
        loops.SUBJECTS["iresnet50"].net[scale.tiny],
    )
    with tempfile.TemporaryDirectory() as home:
        path, weights = loops.write("mobilefacenet", scale.tiny, Path(home), "auto"), Path(home) / "teacher.safetensors"
        side = loops.SUBJECTS["mobilefacenet"].side[scale.tiny]
        net = teacher_of(IResNetSpec(**yaml.safe_load(teacher)), side, scale)
        safetensors.torch.save_file(net.state_dict(), weights)
        margin = "margin: {name: arcface, m: 0.45, scale: 64}"
        task = f"{{name: adadistill, student: {student}, teacher: {{net: {teacher}, weights: {weights}}}, {margin}}}"
        words = (f"task={task}", f"train.batch_size={batch}", "train.precision=bf16")
        eager = RunRequest(path, (*words, "train.compile=off"))
        graphs = eager if scale.tiny else RunRequest(path, (*words, "train.compile=reduce-overhead"))
        with SteppedProcess(eager, patience=240.0) as one, SteppedProcess(graphs, patience=600.0) as other:
            many = 1 if scale.tiny else max(1, round(0.6 / (one.go(10).seconds / 10)))
            other.go(1 if scale.tiny else 10)
            slow, fast = zip(*in_turns(one, other, (many, many), 2 if scale.tiny else 5), strict=True)
    rates = [[block.rate for block in some] for some in (slow, fast)]
    best = max(float(np.median(some)) for some in rates)
    text = f"{ratio(rates[1], rates[0])}; {np.median(rates[0]):,.0f} samples/s eager, {np.median(rates[1]):,.0f} with "
    text += f"graphs, {max(b.memory_gb for b in slow):.2f} and {max(b.memory_gb for b in fast):.2f} GB"
    return on_h200(scale, best >= GOALS["adadistill"]), text


def teacher_of(spec: IResNetSpec, side: int, scale: Scale) -> torch.nn.Module:
    """Random weights, and batch norm with statistics of noise: without, 50 layers leave all bounds."""
    torch.manual_seed(0)
    net = face_backbones.build(spec, (3, side, side))
    for module in net.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = None  # of all that it has seen, which is one batch
    with torch.no_grad():
        net.to(scale.device)(torch.rand(16, 3, side, side).to(scale.device) * 2 - 1)
    return net.cpu()

"""Speed side by side: loops of others, tasks in each precision, the margin head, volumes, JPEG."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from benchmarks.gpu import loops
from benchmarks.gpu.report import Row, Scale
from trainkit.config.run_request import RunRequest
from trainkit.diagnostics.stepped_process import Block, Ratio, SteppedProcess, SteppedProcessError, ratio
from trainkit.models import face_backbones
from trainkit.models.face_backbones import IResNetSpec
from trainkit.paths import recipe_file

TITLE = "Speed, side by side"
SECONDS = 440.0
"""After so many no further row is begun: the next call continues."""
Result = Literal["ok", "fails", "skipped", "no goal"]
Measured = Iterator[tuple[str, Result]]
NETWORKS = {"mobilefacenet": (0.221e9, 9.17e6), "iresnet50": (6.31e9, 18.1e6), "convnext_tiny": (4.45e9, 48.9e6)}
"""Multiply-adds and activations of a sample, as counted for the limits that are written down: a training step takes 6
operations for each multiply-add, and run eagerly moves each activation, of 2 bytes, 5 times."""
AS_FAST = 0.99
"""Of the rate of a loop that does the same work."""
APART = 0.05
"""By which share the first loss may differ between precisions."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Rows that are measured together: what is expected of each by its name, and what measures them in order."""

    expected: Mapping[str, str]
    measure: Callable[[Scale], Measured]


def rows(scale: Scale, done: Collection[str]) -> Iterator[Row]:
    """Measure what is not done, until time is up; a study that fails says so in its rows, and the next begins."""
    ends = time.monotonic() + SECONDS
    for study in studies():
        if set(study.expected) <= set(done):
            continue
        if time.monotonic() > ends:
            print("time limit: run the same command again to continue", file=sys.stderr)
            return
        for row in measured(study, scale):
            if row.what not in done:
                yield row


def measured(study: Study, scale: Scale) -> Iterator[Row]:
    """Return the rows of a study."""
    left = list(study.expected)
    try:
        for text, result in study.measure(scale):
            what = left.pop(0)
            yield Row(what=what, expected=study.expected[what], measured=text, result=result)
        text, result = "the study ended before this row", "fails"
    except ModuleNotFoundError as error:
        text, result = f"{error.name} is not installed", "skipped"
    except (Exception, SystemExit) as error:  # one of many: the others are measured all the same
        lines = str(error).strip().splitlines() or [""]
        text, result = f"{type(error).__name__}: {' '.join(lines)[-600:]}", "fails"
    for what in left:
        yield Row(what=what, expected=study.expected[what], measured=text, result=result)


def studies() -> Iterator[Study]:
    """All of them, those with goals first."""
    yield Study(
        expected={"margin softmax, 512 x 85,742 frozen centres": "within 1e-3 of torch's chain"},
        measure=head,
    )
    yield _loop("mobilefacenet", ("by hand", "accelerate", "lightning"))
    yield _loop("iresnet50", ("by hand", "as published"), 9000)
    yield _loop("convnext_tiny", ("by hand",), 4500)
    yield Study(
        expected={"AdaDistill: MobileFaceNet 112 px, cached iResNet-50, batch 1024": ">= 30,000 samples/s on an H200"},
        measure=adadistill,
    )
    for task, words in TASKS.items():
        name = f"{task}: precision and compiling, {', '.join(words.full)}"
        yield Study(expected={name: "first losses alike; no goal"}, measure=lambda scale, w=words: _task(scale, w))
    yield Study(expected={"JPEG 500 x 375: nvJPEG / the CPU cores": "faster; pixels alike"}, measure=jpeg)
    yield Study(
        expected={
            f"3-D patches 16 x 224 x 224: store / MONAI's {peer}": "faster, on the CPU"
            for peer in ("CacheDataset", "CacheDataset without copies")
        },
        measure=volumes,
    )


def in_turns(calls: Sequence[Callable[[], float]], repeats: int) -> list[list[float]]:
    """Call all in turns, A B B A A B ...; returns what each gave, by repeat."""
    out: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats):
        for at in list(range(len(calls)))[:: 1 if repeat % 2 == 0 else -1]:
            out[at].append(calls[at]())
    return out


def verdict(*held: bool | None) -> Result:
    """ok where all hold that could be judged."""
    known = [one for one in held if one is not None]
    return "no goal" if not known else "ok" if all(known) else "fails"


def on_h200(scale: Scale, held: bool) -> bool | None:
    """A goal that was set for an H200; None on any other device."""
    known = scale.device.type == "cuda" and "H200" in torch.cuda.get_device_name(scale.device)
    return held if known else None


# ---- Loops of others


def _loop(name: str, peers: Sequence[str], goal: int | None = None) -> Study:
    subject = loops.SUBJECTS[name]
    words = f"{name} bf16 {subject.side[0]} px, batch {subject.batch[0]}, step: trainkit /"
    more = f"; {goal:,} samples/s on an H200" if goal else ""
    return Study(
        expected={f"{words} {peer}": f">= {AS_FAST} times as fast{more}" for peer in peers},
        measure=lambda scale: loop_rows(scale, name, peers, goal),
    )


def loop_rows(scale: Scale, name: str, peers: Sequence[str], goal: int | None) -> Measured:
    """The contest of `loops` on a subject: trainkit against each peer, by blocks next to each other."""
    case = f"{name} {scale.device.type} {'tiny' if scale.tiny else 'full'}"
    contest = replace(loops.CONTEST, tolerance=1e-4, threads=1) if scale.tiny else loops.CONTEST
    with tempfile.TemporaryDirectory() as folder:
        loops.write(name, scale.tiny, Path(folder), "bf16" if scale.device.type == "cuda" else "no")
        os.environ[loops.FOLDER] = folder
        sides = list(dict.fromkeys(("by hand", "trainkit", *peers)))
        found = contest.run(Path(loops.__file__), sides, [case], 1)
    if found["unequal"]:
        raise RuntimeError(f"not the same work: {'; '.join(found['unequal'])}")
    figures = found["cases"][case]
    (own,) = figures["trainkit"]
    rate, memory = own["more"]["per_s"], own["more"]["memory_gb"]
    reached = None if goal is None else on_h200(scale, rate >= goal)
    for peer in peers:
        if peer in found["absent"]:
            yield found["absent"][peer], "skipped"
            continue
        (other,) = figures[peer]
        times = ratio(other["blocks"], own["blocks"])  # of seconds: more of them is slower
        text = f"{times}; {rate:,.0f} and {other['more']['per_s']:,.0f} samples/s, {own['value']:.3g} and "
        text += f"{other['value']:.3g} ms, {memory:.2f} and {other['more']['memory_gb']:.2f} GB; first losses alike"
        judged = None if scale.tiny else times.high >= AS_FAST
        yield f"{text}{of_limits(scale, name, rate)}", verdict(judged, reached)


def of_limits(scale: Scale, name: str, rate: float) -> str:
    """Say the shares of what products and memory of this device allow an eager step; nothing on a CPU."""
    if scale.device.type != "cuda":
        return ""
    from trainkit.speed import flops

    work, activations = NETWORKS[name]
    peak, _ = flops.timed(scale.device, torch.bfloat16)
    by_work, by_memory = peak / (6 * work), bandwidth(scale.device) / (10 * activations)
    return f"; {rate / by_work:.0%} of what the products allow, {rate / by_memory:.0%} of what the memory does"


def bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second of a copy on the device, read and written, at its fastest."""
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / (1e-3 * min(milliseconds(lambda: b.copy_(a), device) for _ in range(5)))


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


def head(scale: Scale) -> Measured:
    """Loss and gradient over frozen centres, in turns with the chain that keeps the matrix of all cosines."""
    from trainkit.losses.distillation import Centres
    from trainkit.losses.margin import ArcFace, margin_loss

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
    repeats = 4 if scale.tiny else 60
    own, other = in_turns([lambda: milliseconds(one_pass, device), lambda: milliseconds(chain, device)], repeats)
    text = f"{np.median(own):.3f} ms, {ratio(other, own)} of torch's chain ({np.median(other):.3f} ms); "
    text += f"{memory[0]:.0f} and {memory[1]:.0f} MB more; loss off by {off[1]:.1e}, gradient by {off[0]:.1e}"
    yield text, verdict(off[0] < 1e-3 and off[1] < 1e-3)


def _extra_mb(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return math.nan
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


# ---- Tasks in each precision, eager and compiled


@dataclass(frozen=True, kw_only=True)
class Task:
    """A shipped recipe and its changes, in full and as a test has it, or the recipe of a subject of `loops`."""

    recipe: str
    full: tuple[str, ...]
    tiny: tuple[str, ...] = ()


TASKS = {
    "embed": Task(recipe="iresnet50", full=("iresnet50", "112 px", "batch 256")),
    "classify": Task(recipe="convnext_tiny", full=("convnext_tiny", "224 px", "batch 256")),
    "reid": Task(
        recipe="reid",
        full=("task.net.model=resnet50", "task.net.args={}", "data.image_size=[256,128]"),
    ),
    "segment2d": Task(
        recipe="segment",
        full=("task.net.width=1.0", "train.batch_size=32"),
        tiny=("task.net.width=0.125", "data.crop=[32,64]", "train.batch_size=2"),
    ),
    "segment3d": Task(
        recipe="tom500",
        full=("task.net.filters=[32,64,128,256]", "data.patch=[16,160,160]", "train.batch_size=4"),
        tiny=("task.net.filters=[4,8,8,8]", "data.patch=[8,32,32]"),
    ),
}
_EAGER = {"fp32": ("train.precision=no",), "bf16": ("train.precision=bf16",)}


def variants(scale: Scale) -> dict[str, tuple[str, ...]]:
    """Words of each precision, eager and compiled; a CPU in a test compiles nothing."""
    if scale.tiny:
        return _EAGER
    found = _EAGER | {f"{name} compiled": (*words, "train.compile=default") for name, words in _EAGER.items()}
    if importlib.util.find_spec("torchao"):
        found["fp8"] = ("train.precision=fp8",)
    return found


def _task(scale: Scale, task: Task) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        if task.recipe in loops.SUBJECTS:
            request = RunRequest(loops.write(task.recipe, scale.tiny, Path(folder), "auto"))
        else:
            request = RunRequest(recipe_file(task.recipe), task.tiny if scale.tiny else task.full)
        blocks, failed = beside(scale, request, variants(scale))
    yield told(scale, blocks, failed)


def adadistill(scale: Scale) -> Measured:
    """MobileFaceNet and the outputs of an iResNet-50 that are computed once: precision, compiling, CUDA graphs."""
    import safetensors.torch

    batch = 8 if scale.tiny else 1024
    student = loops.SUBJECTS["mobilefacenet"].net[scale.tiny]
    teacher = loops.SUBJECTS["iresnet50"].net[scale.tiny]
    with tempfile.TemporaryDirectory() as home:
        path, weights = loops.write("mobilefacenet", scale.tiny, Path(home), "auto"), Path(home) / "teacher.safetensors"
        margin = "margin: {name: arcface, m: 0.45, scale: 64}"
        teach = f"{{net: {teacher}, weights: {weights}}}"
        request = RunRequest(
            path,
            (f"task={{name: adadistill, student: {student}, teacher: {teach}, {margin}}}", f"train.batch_size={batch}"),
        )
        side = loops.SUBJECTS["mobilefacenet"].side[scale.tiny]
        net = teacher_of(IResNetSpec(**yaml.safe_load(teacher)), side, scale)
        safetensors.torch.save_file(net.state_dict(), weights)
        words = variants(scale)
        if not scale.tiny:
            words["bf16 CUDA graphs"] = ("train.precision=bf16", "train.compile=reduce-overhead")
        blocks, failed = beside(scale, request, words)
    text, result = told(scale, blocks, failed)
    best = max((float(np.median([b.rate for b in some[1:]])) for some in blocks.values()), default=0.0)
    reached = on_h200(scale, best >= 30_000)
    alike = None if result == "no goal" else result == "ok"
    yield f"{text}{of_limits(scale, 'mobilefacenet', best)} (the fastest)", verdict(alike, reached)


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


def beside(
    scale: Scale, request: RunRequest, words: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, list[Block]], dict[str, str]]:
    """Train each variant in a process of its own, blocks in turns; returns blocks, the first step first, and failures.

    All start at once, for most of a start is waiting for imports and compilers; none is measured meanwhile.
    """

    def start(own: tuple[str, ...]) -> SteppedProcess | str:
        try:
            return SteppedProcess(replace(request, overrides=(*request.overrides, *own)), patience=240.0)
        except SteppedProcessError as error:
            return error.reason

    failed: dict[str, str] = {}
    with ExitStack() as open_, ThreadPoolExecutor(1 if scale.tiny else 8) as pool:
        children: dict[str, SteppedProcess] = {}
        for name, child in zip(words, pool.map(start, words.values()), strict=True):
            if isinstance(child, str):
                failed[name] = child
            else:
                children[name] = open_.enter_context(child)
        blocks = {name: [child.first] for name, child in children.items()}
        many = {
            name: max(1, round((0.01 if scale.tiny else 0.6) / _pace(child, scale))) for name, child in children.items()
        }
        calls = [lambda n=name: _block(children[n], many[n], blocks[n]) for name in children]
        in_turns(calls, 2 if scale.tiny else 5)
    return blocks, failed


def _pace(child: SteppedProcess, scale: Scale) -> float:
    """Seconds of a step, after some that a GPU needs to choose its kernels."""
    if not scale.tiny:
        child.go(10)
    steps = 1 if scale.tiny else 3
    return max(child.go(steps).seconds / steps, 1e-6)


def _block(child: SteppedProcess, many: int, blocks: list[Block]) -> float:
    blocks.append(child.go(many))
    return blocks[-1].rate


def told(scale: Scale, blocks: Mapping[str, Sequence[Block]], failed: Mapping[str, str]) -> tuple[str, Result]:
    """Say the rate of the first variant, the ratio of each other one to it, and whether first losses are alike."""
    first, *others = blocks or [""]
    if not first:
        raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    rates = {name: [block.rate for block in some[1:]] for name, some in blocks.items()}
    memory = {name: max(block.memory_gb for block in some) for name, some in blocks.items()}
    texts = [f"{first} {np.median(rates[first]):,.0f} samples/s, {memory[first]:.2f} GB"]
    alike = True
    for name in others:
        times: Ratio = ratio(rates[name], rates[first])
        texts.append(f"{name} {times}, {memory[name]:.2f} GB")
        apart = abs(blocks[name][0].losses[0] / blocks[first][0].losses[0] - 1)
        if not apart <= APART:
            alike = False
            texts.append(f"its first loss differs by {apart:.1%}")
    texts += [f"{name} failed: {why}" for name, why in failed.items()]
    if not (scale.tiny or "fp8" in blocks or "fp8" in failed):
        texts.append("fp8 skipped: torchao is not installed")
    return "; ".join(texts), verdict(alike and not failed)


# ---- JPEG and volumes


def jpeg(scale: Scale) -> Measured:
    """The same made files decoded by nvJPEG and by all cores of the processor."""
    from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

    from trainkit.data.formats import image_decode

    many, size = (4, (48, 64)) if scale.tiny else (256, (375, 500))
    draw = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 256, (many, 3, 12, 16), generator=draw).float()
    pictures = F.interpolate(coarse, size, mode="bicubic").clamp(0, 255).to(torch.uint8)
    files: Any = [encode_jpeg(picture, quality=90) for picture in pictures]
    decoder, cores = image_decode.plain_decoder(), os.cpu_count() or 1
    if decoder is None:
        raise RuntimeError("no JPEG decoder for the CPU")

    def by_gpu() -> list[Tensor]:
        return [*decode_jpeg(files, mode=ImageReadMode.RGB, device=scale.device)]

    with ThreadPoolExecutor(cores) as pool:

        def by_cores() -> list[np.ndarray]:
            return list(pool.map(lambda file: decoder(file.numpy(), None), files))

        ours, theirs = by_cores(), by_gpu()
        apart = max(
            float((torch.from_numpy(a.copy()).permute(2, 0, 1).float() - b.cpu().float()).abs().mean())
            for a, b in zip(ours, theirs, strict=True)
        )
        calls = [lambda: milliseconds(by_gpu, scale.device), lambda: _seconds_ms(by_cores)]
        gpu, cpu = in_turns(calls, 3 if scale.tiny else 10)
    times = ratio(cpu, gpu)
    text = f"{times}; {1e3 * many / np.median(gpu):,.0f} and {1e3 * many / np.median(cpu):,.0f} images/s "
    text += f"({cores} cores); pixels differ by {apart:.2g} of 255 in the mean"
    yield text, verdict(apart < 2, None if scale.tiny else times.low > 1)


def _seconds_ms(call: Callable[[], object]) -> float:
    return milliseconds(call, torch.device("cpu"))


def volumes(scale: Scale) -> Measured:
    """The contest of `volume_reading`, which draws its volumes: patches of the store against MONAI's cached sets."""
    importlib.import_module("nibabel")
    if not importlib.util.find_spec("monai"):
        raise ModuleNotFoundError("monai", name="monai")
    script = Path(__file__).parents[1] / "volume_reading.py"
    sys.path.append(str(script.parent))  # where it finds `contest`
    try:
        contest = importlib.import_module("volume_reading").CONTEST
    finally:
        sys.path.remove(str(script.parent))
    peers = ("monai_cached", "monai_shared")
    found = contest.run(script, ["prepared", *peers], ["tom500"], 2 if scale.tiny else 4)
    if found["unequal"]:
        raise RuntimeError(f"not the same work: {'; '.join(found['unequal'])}")
    figures = {side: [sample["value"] for sample in some] for side, some in found["cases"]["tom500"].items()}
    for peer in peers:
        if peer in found["absent"]:
            yield found["absent"][peer], "skipped"
            continue
        times = ratio(figures[peer], figures["prepared"])
        text = f"{times}; {np.median(figures['prepared']):.2f} and {np.median(figures[peer]):.2f} CPU ms a patch"
        yield f"{text}; voxels equal", verdict(times.value > 1)

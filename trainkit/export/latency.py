"""How long one picture takes, alone, in the ways in which a network can be run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from trainkit.markdown import plain
from trainkit.paths import keep_compiled_private

Forward = Callable[[Tensor], Tensor]
"""Pixels (B, 3, H, W) to logits (B, classes, H, W)."""


@dataclass(frozen=True)
class Timing:
    """What one picture takes, alone, in one way of running the network."""

    how: Literal["eager", "compiled", "onnxruntime"]
    precision: Literal["fp32", "bf16"]
    ms: float | None
    """Median of `calls`; None: not measured."""
    least: float | None = None
    calls: int = 0
    same: float | None = None
    """Share of the pixels of the class that float32 in eager mode gives."""
    why: str = ""
    """Why it was not measured."""


@dataclass(frozen=True)
class Latency:
    """Timings of one picture at a time."""

    size: tuple[int, int]
    device: str
    threads: int
    timings: tuple[Timing, ...]

    def lines(self) -> Iterator[str]:
        """The table, as Markdown."""
        yield f"one picture of {self.size[0]} x {self.size[1]} pixels, {self.device}, {self.threads} threads"
        yield ""
        yield "| | precision | median, ms | least, ms | calls | same class |"
        yield "|---|---|---|---|---|---|"
        for one in self.timings:
            if one.ms is None:
                yield f"| {one.how} | {one.precision} | {plain(one.why)} | | | |"
            else:
                same = f"{100 * one.same:.4g} %"
                yield f"| {one.how} | {one.precision} | {one.ms:.2f} | {one.least:.2f} | {one.calls} | {same} |"


def session(file: Path | str, device: str = "cpu") -> Forward:
    """An ONNX file as a function of tensors, run by ONNX Runtime with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    if device == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        providers.insert(0, "CUDAExecutionProvider")
    opened = onnxruntime.InferenceSession(str(file), options, providers=providers)
    return lambda pixels: torch.from_numpy(opened.run(None, {"pixels": pixels.cpu().numpy()})[0])


@torch.no_grad()
def time_network(
    deployed: nn.Module,
    pixels: Tensor,
    onnx: Path | None,
    *,
    seconds: float = 30.0,
    last: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Latency:
    """Time one picture, float (1, 3, H, W), alone: float32 and bfloat16 (autocast), eager, compiled, ONNX Runtime.

    On the GPU if there is one. The ways take turns, so that whatever else the machine does falls on all; `seconds` is
    for all of them, without compilation. `last`: channels last in memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    order = torch.channels_last if last else torch.contiguous_format
    # Left on the device: its own network is what `deployed` holds.
    moved = deployed.to(device, memory_format=order)
    seen = pixels.to(device, memory_format=order)
    try:
        ways = list(_ways(moved, seen, onnx, device, say))
        say(f"timing {sum(not isinstance(run, str) for *_, run in ways)} ways")
        timings = _timed(ways, seen, device, seconds)
    finally:
        deployed.to("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Latency(tuple(pixels.shape[2:]), name, torch.get_num_threads(), tuple(timings))


Way = tuple[str, str, Forward | str]
"""How, with what precision, and the function; or why there is none."""


def _ways(
    net: nn.Module, seen: Tensor, onnx: Path | None, device: torch.device, say: Callable[[str], None]
) -> Iterator[Way]:
    def halved(forward: Forward) -> Forward:
        def run(pixels: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return forward(pixels)

        return run

    keep_compiled_private()
    yield "eager", "fp32", net
    yield "eager", "bf16", halved(net)
    for precision, wrap in (("fp32", lambda forward: forward), ("bf16", halved)):
        say(f"compiling for {precision}, which takes minutes on a CPU")
        # One for each precision: a graph is of one.
        compiled = wrap(torch.compile(net, dynamic=False))
        try:
            compiled(seen)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:100]
            yield "compiled", precision, f"cannot be compiled here: {reason}"
        else:
            yield "compiled", precision, compiled
    if onnx is None:
        yield "onnxruntime", "fp32", "model.onnx was not asked for"
        return
    yield "onnxruntime", "fp32", session(onnx, device.type)
    yield "onnxruntime", "bf16", "the file is float32"


def _timed(ways: Sequence[Way], seen: Tensor, device: torch.device, seconds: float) -> Iterator[Timing]:
    runs = {(how, precision): run for how, precision, run in ways if not isinstance(run, str)}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    expected = runs["eager", "fp32"](seen).argmax(1)
    same = {key: (run(seen).to(device).argmax(1) == expected).float().mean().item() for key, run in runs.items()}

    def once(key: tuple[str, str]) -> float:
        begin = time.perf_counter()
        runs[key](seen)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    one = sum(once(key) for key in runs)
    rounds = int(min(200, max(5, seconds / one)))
    keys = list(runs)
    for turn in range(rounds):
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
            taken[key].append(once(key))
    for how, precision, run in ways:
        if isinstance(run, str):
            yield Timing(how, precision, None, why=run)
        else:
            key, ms = (how, precision), [1000 * value for value in taken[how, precision]]
            yield Timing(how, precision, median(ms), min(ms), rounds, same[key])

"""Time a forward pass of one image in several ways of running a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils import benchmark

from trainkit.export.files import session
from trainkit.paths import keep_compiled_private
from trainkit.tracking.markdown import plain

_ROUNDS = 5
"""Rounds of measurements."""
How = Literal["eager", "compiled", "onnxruntime"]
Precision = Literal["fp32", "bf16"]
Forward = Callable[[Tensor], Tensor]
"""Pixels (B, 3, H, W) to logits (B, classes, H, W)."""


@dataclass(frozen=True)
class Timing:
    """Latency of one image in one way of running the network."""

    how: How
    precision: Precision
    ms: float | None
    """Median of `calls`; None: not measured."""
    least: float | None = None
    calls: int = 0
    same: float | None = None
    """Share of pixels with the same class as in float32 eager mode."""
    why: str = ""
    """Why it was not measured."""


@dataclass(frozen=True)
class Latency:
    """Timings of one image at a time."""

    size: tuple[int, int]
    device: str
    threads: int
    timings: tuple[Timing, ...]

    def lines(self) -> Iterator[str]:
        """Write the table as Markdown."""
        yield f"Latency, batch of 1, {self.size[0]} x {self.size[1]} pixels, {self.device}, {self.threads} threads:"
        yield ""
        yield "| mode | precision | median ms | fastest ms | calls | same class |"
        yield "|---|---|---|---|---|---|"
        for one in self.timings:
            if one.ms is None or one.least is None or one.same is None:
                yield f"| {one.how} | {one.precision} | {plain(one.why)} | | | |"
            else:
                same = f"{100 * one.same:.4g} %"
                yield f"| {one.how} | {one.precision} | {one.ms:.2f} | {one.least:.2f} | {one.calls} | {same} |"


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
    """Time one image, float (1, 3, H, W): float32 and bfloat16 (autocast), eager, compiled, ONNX Runtime.

    On the GPU if there is one. The modes take turns, so that other processes affect all of them equally; `seconds` is
    the time for all, without compilation. `last`: channels last in memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    order = torch.channels_last if last else torch.contiguous_format
    # In place: `deployed` shares the network.
    moved: nn.Module = deployed.to(device=device, memory_format=order)  # pyright: ignore[reportCallIssue]  of torch 2.11
    seen = pixels.to(device, memory_format=order)
    try:
        ways = list(_ways(moved, seen, onnx, device, say))
        say(f"timing {sum(not isinstance(run, str) for *_, run in ways)} modes")
        timings = tuple(_timed(ways, seen, seconds))
    finally:
        deployed.to("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    height, width = pixels.shape[2:]
    return Latency((height, width), name, torch.get_num_threads(), timings)


Way = tuple[How, Precision, Forward | str]
"""Mode, precision, and the function or the reason why there is none."""


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
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        say(f"compiling for {precision}; this takes minutes on a CPU")
        # One graph per precision.
        compiled = torch.compile(net, dynamic=False)
        compiled = halved(compiled) if precision == "bf16" else compiled
        try:
            compiled(seen)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:100]
            yield "compiled", precision, f"compilation failed: {reason}"
        else:
            yield "compiled", precision, compiled
    if onnx is None:
        yield "onnxruntime", "fp32", "not exported"
        return
    run = session(onnx, device.type)
    yield "onnxruntime", "fp32", lambda pixels: run(pixels)["logits"]
    yield "onnxruntime", "bf16", "not available: the file is float32"


def _timed(ways: Sequence[Way], seen: Tensor, seconds: float) -> Iterator[Timing]:
    runs = {(how, precision): run for how, precision, run in ways if not isinstance(run, str)}
    expected = runs["eager", "fp32"](seen).argmax(1)
    same = {key: (run(seen).to(seen.device).argmax(1) == expected).float().mean().item() for key, run in runs.items()}
    threads, each = torch.get_num_threads(), seconds / (_ROUNDS * len(runs))
    timers = {
        key: benchmark.Timer("run(seen)", globals={"run": run, "seen": seen}, num_threads=threads)
        for key, run in runs.items()
    }
    keys = list(runs)
    taken: dict[tuple[str, str], list[benchmark.Measurement]] = {key: [] for key in runs}
    for turn in range(_ROUNDS):
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
            taken[key].append(timers[key].blocked_autorange(min_run_time=each))
    for how, precision, run in ways:
        if isinstance(run, str):
            yield Timing(how, precision, None, why=run)
        else:
            found = benchmark.Measurement.merge(taken[how, precision])[0]
            calls = sum(len(one.raw_times) * one.number_per_run for one in taken[how, precision])
            yield Timing(how, precision, 1e3 * found.median, 1e3 * min(found.times), calls, same[how, precision])

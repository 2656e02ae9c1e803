"""Several GPUs of one machine against one: equal losses with DDP and FSDP2, synchronised batch norm, scaling.

Each row's trainings are launched by torchrun of the same Python, in processes that run this file:

    python -m torch.distributed.run --nproc-per-node 8 -m benchmarks.gpu.several MODE DEVICE tiny|full FOLDER
"""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import loops
from benchmarks.gpu.scale import Scale
from benchmarks.results import Check, Skipped

TITLE = "Several GPUs"
SUBJECT = "convnext_tiny"
"""Its norms are of one sample, so a batch may be cut over processes and the losses stay."""
EQUAL = 2e-3
"""By which share losses of the same batches may differ, in float32 without TF32; that of Adam's rounding is in it."""
SYNCED = 1e-4
_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def checks(scale: Scale) -> Iterator[Check]:
    """Yield the measurements; with one GPU each says that it takes two."""
    for kind in ("DDP", "FSDP2"):
        what = f"{SUBJECT}, float32: {kind} on all GPUs and one GPU, the same batches"
        yield what, f"losses within {EQUAL:g}", functools.partial(equality, scale, kind)
    what = "synchronised batch norm on all GPUs and batch norm on one"
    yield what, f"outputs and gradients within {SYNCED:g}", functools.partial(synced, scale)
    for kind in ("DDP", "FSDP2"):
        what = f"{SUBJECT}, bf16, the same batch on each GPU: {kind}"
        yield what, "no goal; 84 % on 8 A100 (ResNet-50, NVIDIA)", functools.partial(scaling, scale, kind)


def processes(scale: Scale) -> int:
    """As many as there are GPUs; on a CPU two, which a test uses."""
    return torch.cuda.device_count() if scale.device.type == "cuda" else 2


def equality(scale: Scale, kind: str) -> tuple[bool | None, str]:
    """Compare the first losses of one process with those of all."""
    one, found = launched(scale, "equal", 1), launched(scale, "equal", processes(scale), kind)
    apart = max(abs(a / b - 1) for a, b in zip(found["losses"], one["losses"], strict=True))
    said = f"{len(found['losses'])} losses within {apart:.1e}; {found['world']} processes, {found['parallelism']}"
    return apart <= EQUAL, said


def synced(scale: Scale) -> tuple[bool | None, str]:
    """Compare a model with synchronised batch norm with one whose batch norm sees the whole batch."""
    apart = launched(scale, "equal", processes(scale), "DDP")["synced"]
    return apart <= SYNCED, f"within {apart:.1e}"


def scaling(scale: Scale, kind: str) -> tuple[bool | None, str]:
    """Samples a second of all processes over those of one, times their number."""
    many = processes(scale)
    one, found = launched(scale, "pace", 1), launched(scale, "pace", many, kind)
    share = found["rate"] / (many * one["rate"])
    text = f"{share:.0%} of {many} times one: {found['rate']:,.0f} samples/s and {one['rate']:,.0f}; "
    return None, f"{text}{found['memory_gb']:.2f} GB each and {one['memory_gb']:.2f}"


@functools.cache
def launched(scale: Scale, mode: str, many: int, kind: str = "DDP") -> dict[str, Any]:
    """Run `mode` in so many processes; returns what the first wrote. Raises RuntimeError with the last error."""
    if processes(scale) < 2:
        raise Skipped("needs two GPUs")
    with tempfile.TemporaryDirectory() as folder:
        return _launched(scale, mode, Path(folder), many, kind)


def _launched(scale: Scale, mode: str, folder: Path, many: int, kind: str) -> dict[str, Any]:
    loops.write(SUBJECT, scale.tiny, folder, "no" if mode == "equal" or scale.device.type == "cpu" else "bf16")
    words = ["-m", "benchmarks.gpu.several", mode, scale.device.type, "tiny" if scale.tiny else "full", str(folder)]
    if many > 1:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={many}", *words]
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {loops.FOLDER: str(folder), "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    env["ACCELERATE_USE_CPU"] = "true" if scale.device.type == "cpu" else "false"
    if many > 1 and kind == "FSDP2":
        env |= {**_FSDP, "FSDP_MIN_NUM_PARAMS": "500" if scale.tiny else "1000000"}
    ended = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if "Error: " in line and "ChildFailed" not in line]
        why = errors[-1] if errors else ended.stderr[-300:]  # torchrun's own report comes after it
        raise RuntimeError(f"{mode} {kind} on {many} processes ended with {ended.returncode}: {why}")
    return json.loads((folder / f"{mode}.json").read_text())


# ---- What each process does


def main(mode: str, device: str, size: str, folder: str) -> None:
    """Train, and let the first process write what was seen."""
    from trainkit.config import loader
    from trainkit.distributed.runtime import Runtime
    from trainkit.training.trainer import Trainer

    world, tiny = int(os.environ.get("WORLD_SIZE", "1")), size == "tiny"
    batch = loops.SUBJECTS[SUBJECT].batch[tiny] * (world if mode == "pace" else 1)
    words = [f"train.batch_size={batch}", *(["device.tf32=false"] if mode == "equal" else [])]
    recipe = loader.load(Path(folder) / f"{SUBJECT}.yaml", words)
    runtime = Runtime(recipe)
    with Trainer(recipe, recipe.data.open(recipe.seed), runtime) as trainer:
        trainer.start()
        losses = [_step(trainer, runtime.sum) for _ in range(loops.PROVED)]
        found: dict[str, Any] = {"losses": losses, "world": runtime.world, "parallelism": runtime.kind}
        if mode == "pace":
            found |= _pace(trainer, 3 if tiny else 60, 1 if tiny else 20)
            found["rate"] = batch / found.pop("seconds")
        elif not runtime.sharded:
            found["synced"] = _synced(runtime.device, runtime.world, runtime.rank, runtime.sum)
        found["memory_gb"] = runtime.memory().get("speed/peak_memory_gb", 0.0)
    if runtime.main:
        (Path(folder) / f"{mode}.json").write_text(json.dumps(found))
    runtime.close()


def _step(trainer: Any, total: Callable[[Tensor], Tensor]) -> float:
    """Make a step; returns the mean loss over all processes."""
    (loss,) = trainer.step().losses
    trainer.after_step()
    weight = torch.as_tensor(loss.weight, dtype=loss.sum.dtype, device=loss.sum.device)
    both = total(torch.stack([loss.sum.detach(), weight]))
    return float(both[0] / both[1])


def _pace(trainer: Any, steps: int, before: int) -> Mapping[str, float]:
    """Seconds of a step, the device waited for at both ends."""
    for step in range(before + steps):
        if step == before:
            trainer.runtime.synchronize()
            began = time.perf_counter()
        trainer.step()
        trainer.after_step()
    trainer.runtime.synchronize()
    return {"seconds": (time.perf_counter() - began) / steps}


def _synced(device: torch.device, world: int, rank: int, total: Callable[[Tensor], Tensor]) -> float:
    """Largest normwise difference of output, gradients and statistics to those of batch norm over the whole batch."""
    from trainkit.models.norms import convert

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    plain, x = plain.to(device), torch.randn(4 * world, 3, 16, 16).to(device) * 3 + 1
    synced = convert(copy.deepcopy(plain), "sync")
    whole, own = plain(x), synced(x.chunk(world)[rank])
    whole.square().mul(torch.arange(len(x), device=device).view(-1, 1, 1, 1)).sum().backward()
    weight = torch.arange(len(x), device=device).chunk(world)[rank].view(-1, 1, 1, 1)
    own.square().mul(weight).sum().backward()
    apart = [_off(own, whole.chunk(world)[rank])]
    for mine, theirs in zip(synced.parameters(), plain.parameters(), strict=True):
        if mine.grad is None or theirs.grad is None:
            raise RuntimeError("no gradient")
        apart.append(_off(total(mine.grad), theirs.grad))
    apart += [_off(a, b) for a, b in zip(synced.buffers(), plain.buffers(), strict=True)]
    return float(total(torch.stack(apart).max()))  # of all processes together, so that none is left out


def _off(a: Tensor, b: Tensor) -> Tensor:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)).detach()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Settle settings that the launcher and the recipe can both make, and refuse those that contradict each other.

`accelerate launch` hands its settings to the training as environment variables. The recipe decides the arithmetic, so a
precision of the launcher that it does not share is refused: Accelerate would apply it in silence.
docs/reference/launch-configs.md has all of them in a table.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trainkit.config.schema import Recipe
from trainkit.environment.process import asked_processes
from trainkit.errors import UserError
from trainkit.interfaces import DividesClasses

_WAIT_SECONDS = 20.0
"""Time in which process 0 has come to the same check, and says what is wrong; the launcher then ends the others."""

COMPILE_SECONDS = 60
"""Time that torch.compile takes for a model and its backward pass on a GPU: an estimate, not measured."""
_STEP_SECONDS, _SAVED = 0.1, 0.1
"""Time of a step, and the share of it that compiling saves: estimates (published are gains of 10 to 20 %)."""
LEAST_UPDATES = round(COMPILE_SECONDS / (_STEP_SECONDS * _SAVED))
"""A training of fewer steps saves less time than compiling takes."""
LEAST_FORWARDS = 3 * LEAST_UPDATES
"""The same for forward passes alone, about a third of a step."""


@dataclass(frozen=True)
class Setting:
    """A value that a run has, and where it came from."""

    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


def check(recipe: Recipe) -> None:
    """Compare the launcher's settings with a recipe. Raises UserError for the first that contradicts it."""
    try:
        for refuse in _CHECKS:
            refuse(recipe)
    except UserError as error:
        error.told = os.environ.get("RANK", "0") != "0"
        if error.told and "TORCHELASTIC_RUN_ID" in os.environ:
            # The launcher ends all processes as soon as one ends: the first must not be one that says nothing.
            time.sleep(_WAIT_SECONDS)
        raise


def check_processes(world: int) -> None:
    """Compare the processes that came up with those that were asked for. Raises UserError where they differ."""
    asked = asked_processes()
    if world != asked:
        raise UserError(
            "launch",
            f"{world} process started" if world == 1 else f"{world} processes started",
            f"{asked}, as set in the launcher",
            "on CPUs use accelerate_configs/cpu_2proc.yaml: MULTI_CPU starts one process without a message",
        )


def refuse_other_precision(recipe: Recipe, launched: str) -> None:
    """Raise UserError for a recipe whose precision is not that of its launch."""
    if recipe.train.precision not in ("auto", launched):
        raise UserError(
            f"recipe {recipe.name}: train.precision",
            f"{recipe.train.precision}, in a launch with {launched}",
            remedy="give this recipe and its dependency the same precision, or train the dependency first",
        )


def precision(recipe: Recipe) -> Setting:
    """Return the precision of a run: the recipe's, or where that is `auto` the launcher's, or the device's default."""
    word = recipe.train.precision
    if word != "auto":
        return Setting(word, "train.precision")
    if launched := _launched_precision():
        return Setting(launched, "launcher, since train.precision is auto")
    return Setting(_device_precision(), "train.precision auto, for this device")


def compile_mode(recipe: Recipe, device: str, updates: int | None = None, recorded: str | None = None) -> Setting:
    """Return the compile mode of a run: the recipe's, or where that is `auto` the one that pays off.

    `device` is the type of the device, `updates` how many the training has (None: many), `recorded` the mode in the
    checkpoint that it continues from, which is kept where this machine can compile.
    """
    if recipe.train.compile != "auto":
        return Setting(recipe.train.compile, "train.compile")
    found = _best_mode(device, updates)
    if recorded in (None, found.value):
        return found
    if recorded != "off" and (lacks := cannot_compile(device)):
        return Setting("off", f"{lacks}; the checkpoint was trained with {recorded}")
    return Setting(recorded, f"from the checkpoint; here it would be {found.value}: {found.source}")


def _best_mode(device: str, updates: int | None) -> Setting:
    auto = "train.compile auto: "
    if device != "cuda":
        return Setting("off", auto + {"cpu": "a CPU", "mps": "MPS"}.get(device, device))
    if lacks := cannot_compile(device):
        return Setting("off", auto + lacks)
    if updates is not None and updates < LEAST_UPDATES:
        few = f"{updates:,} steps; compiling takes about a minute and pays off from {LEAST_UPDATES:,} steps"
        return Setting("off", auto + few)
    many = "" if updates is None else f", {updates:,} steps"
    return Setting("default", f"{auto}CUDA{many}; compiling takes about a minute")


def cannot_compile(device: str) -> str:
    """Return why torch.compile does not run on this machine for a type of device; empty where nothing is missing."""
    if device != "cuda":
        compilers = (os.environ.get("CXX", ""), "g++", "clang++")
        return "" if any(shutil.which(name) for name in compilers if name) else "torch.compile needs a C++ compiler"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile for GPUs needs triton"
    if torch.cuda.get_device_capability() < (7, 0):
        return "torch.compile for GPUs needs compute capability 7.0"
    compilers = (os.environ.get("CC", ""), "gcc", "cc", "clang")  # for what launches triton's kernels
    return "" if any(shutil.which(name) for name in compilers if name) else "torch.compile needs a C compiler"


def with_compile_mode(recipe: Recipe, device: str, updates: int) -> Recipe:
    """Return a recipe with the compile mode of its run: for measurements, which are shorter or longer."""
    mode = compile_mode(recipe, device, updates).value
    return replace(recipe, train=replace(recipe.train, compile=mode))


def on_cpu() -> bool:
    """Return True where a run is on the CPU: the launcher says so, or there is no GPU."""
    return _flag("USE_CPU") or not (torch.cuda.is_available() or torch.backends.mps.is_available())


def device(found: torch.device) -> Setting:
    """Return the device of a run."""
    if found.type == "cpu":
        return Setting("cpu", "launcher: use_cpu" if _flag("USE_CPU") else "no GPU found")
    return Setting(str(found), "found")


def processes(world: int) -> Setting:
    """Return the number of processes of a run."""
    launched = any(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"))
    return Setting(str(world), "launcher" if launched else "no launcher")


def _launched_precision() -> str | None:
    # `no` is what `accelerate launch` always sets, so it cannot be told from nothing.
    word = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return word if word in ("bf16", "fp16", "fp8") else None


def _device_precision() -> str:
    if torch.cuda.is_available() and not _flag("USE_CPU"):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "no"


def _flag(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_{name}", "").lower() in ("1", "true", "yes")


def _refuse_other_engines(recipe: Recipe) -> None:
    for name, engine in _ENGINES.items():
        if _flag(name):
            raise UserError(
                "launch",
                f"{engine}, which partitions the training state: a run could not be resumed",
                "an accelerate config whose checkpoints contain the whole state",
                "accelerate_configs/fsdp2.yaml shards the same state and can be resumed on any number of processes",
            )


def _check_precision(recipe: Recipe) -> None:
    launched, word = _launched_precision(), recipe.train.precision
    if launched and word not in ("auto", launched):
        raise UserError(
            "launch",
            f"mixed_precision {launched}, but recipe {recipe.name} has train.precision={word}",
            "the same value in both",
            f"remove mixed_precision from the launch, or add train.precision={launched} (or auto)",
        )


def _check_precision_of_device(recipe: Recipe) -> None:
    if precision(recipe).value == "fp16" and on_cpu():
        raise UserError("train.precision", "fp16 on a CPU", "no or bf16", "a CPU has no loss scaler for fp16")
    if precision(recipe).value == "fp8" and not torch.cuda.is_available():
        # Accelerate would refuse it too, and leave its state half set up for the next run of the process.
        raise UserError("train.precision", "fp8 without a GPU", "a GPU of the Hopper generation or later")


def _refuse_first_fsdp(recipe: Recipe) -> None:
    if _flag("USE_FSDP") and (found := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UserError("launch", f"FSDP{found:.80}", "fsdp_version: 2", "see accelerate_configs/fsdp2.yaml")


def _refuse_halving_of_several(recipe: Recipe) -> None:
    if recipe.train.on_oom == "halve" and (processes := asked_processes()) > 1:
        raise UserError(
            "train.on_oom",
            f"halve, on {processes} processes",
            "stop",
            "lower train.micro_batch: one process that is out of memory cannot begin a step again alone",
        )


def _refuse_sharded_head(recipe: Recipe) -> None:
    """Refuse what a head that processes divide among them does not combine with."""
    if not (isinstance(recipe.task, DividesClasses) and recipe.task.head.sharded) or asked_processes() == 1:
        return
    rest = "bf16 or float32 (train.precision)", "overflows must be seen on all processes, and a scaler sees its own"
    if precision(recipe).value == "fp16":
        raise UserError("task.head.sharded", "precision fp16", *rest)
    if _flag("USE_FSDP"):
        instead = "use accelerate_configs/all_gpus.yaml; the head is divided without FSDP"
        raise UserError("task.head.sharded", "FSDP, which would divide the head again", "data parallelism", instead)


_ENGINES = {
    "USE_DEEPSPEED": "DeepSpeed",
    "USE_MEGATRON_LM": "Megatron-LM",
    "USE_PARALLELISM_CONFIG": "a parallelism_config (tensor, context or sequence parallelism)",
}

_CHECKS: tuple[Callable[[Recipe], None], ...] = (
    _check_precision,
    _check_precision_of_device,
    _refuse_halving_of_several,
    _refuse_first_fsdp,
    _refuse_sharded_head,
    _refuse_other_engines,
)
"""Each contradiction is one sentence before anything starts."""

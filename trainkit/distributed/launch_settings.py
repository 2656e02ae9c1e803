"""Settle settings that the launcher and the recipe can both make, and refuse those that contradict each other.

`accelerate launch` hands its settings to the training as environment variables. The recipe decides the arithmetic, so a
setting of the launcher that the recipe does not share is refused: Accelerate would apply it, or drop it, in silence.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from trainkit.config.schema import Recipe
from trainkit.errors import UserError


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
        _refuse_deepspeed()
        _check_precision(recipe)
        _check_compile(recipe)
    except UserError as error:
        error.told = os.environ.get("RANK", "0") != "0"
        raise


def precision(recipe: Recipe) -> Setting:
    """Return the precision of a run: the recipe's, or where that is `auto` the launcher's, or the device's default."""
    word = recipe.train.precision
    if word != "auto":
        return Setting(word, "train.precision")
    if launched := _launched_precision():
        return Setting(launched, "launcher, since train.precision is auto")
    return Setting(_device_precision(), "train.precision auto, for this device")


def compile_mode(recipe: Recipe) -> Setting:
    """Return the compile mode of a run, which is the recipe's."""
    return Setting(recipe.train.compile, "train.compile")


def on_cpu() -> bool:
    """Return True where a run is on the CPU: the launcher says so, or there is no GPU."""
    return _use_cpu() or not (torch.cuda.is_available() or torch.backends.mps.is_available())


def device(found: torch.device) -> Setting:
    """Return the device of a run."""
    if found.type == "cpu":
        return Setting("cpu", "launcher: use_cpu" if _use_cpu() else "no GPU found")
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
    if torch.cuda.is_available() and not _use_cpu():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "no"


def _use_cpu() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def _refuse_deepspeed() -> None:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        raise UserError(
            "launch",
            "DeepSpeed, which keeps optimizer state in flattened partitions of its own: a run could not be resumed",
            "an accelerate config whose checkpoints hold the whole state",
            "accelerate_configs/fsdp2.yaml shards the same state and can be resumed on any number of processes",
        )


def _check_precision(recipe: Recipe) -> None:
    launched, word = _launched_precision(), recipe.train.precision
    if launched and word not in ("auto", launched):
        raise UserError(
            "launch",
            f"mixed_precision {launched}, where recipe {recipe.name} has train.precision={word}",
            "the same in both",
            f"leave mixed_precision out of the launch, or add train.precision={launched} (or auto)",
        )
    if precision(recipe).value == "fp16" and on_cpu():
        raise UserError("train.precision", "fp16 on a CPU", "no or bf16", "a CPU has no loss scaler for fp16")
    if precision(recipe).value == "fp8":
        if not torch.cuda.is_available():
            raise UserError("train.precision", "fp8 without a GPU", "a GPU of the Hopper generation or later")
        if not any(importlib.util.find_spec(name) for name in ("torchao", "transformer_engine", "msamp")):
            raise UserError("train.precision", "fp8 without a backend", "torchao", "pip install torchao")


def _check_compile(recipe: Recipe) -> None:
    """Refuse what `--dynamo_backend` asks for, unless `train.compile` says the same.

    Accelerate 1.15 would compile in a wrapper, whose parameters have other names than those in checkpoints.
    """
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend == "no":
        return
    mode = os.environ.get("ACCELERATE_DYNAMO_MODE", "default").lower()
    options = [
        f"dynamo_{word}"
        for word in ("use_fullgraph", "use_dynamic", "use_regional_compilation")
        if os.environ.get(f"ACCELERATE_DYNAMO_{word.upper()}", "").lower() in ("1", "true", "yes")
    ]
    known = backend == "inductor" and mode in ("default", "reduce-overhead", "max-autotune") and not options
    if known and mode == recipe.train.compile:
        return
    asked = ", ".join((f"dynamo_backend {backend}", f"dynamo_mode {mode}", *options))
    why = "" if known else ", since trainkit compiles with inductor and no other options"
    raise UserError(
        "launch",
        f"{asked}, where recipe {recipe.name} has train.compile={recipe.train.compile}",
        "train.compile alone to say what is compiled",
        f"leave dynamo out of the launch{why}; to compile, add train.compile={mode if known else 'default'}",
    )

"""The settings that `trainkit bench` compares: those that are asked for, or those worth trying on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainkit.config.run_request import RunRequest, load, values_of
from trainkit.config.schema import Recipe
from trainkit.diagnostics.stepped_process import Ready
from trainkit.errors import UserError
from trainkit.interfaces import CachesTeacher

_SPEED = (
    "device.", "loader.", "optim.fused", "train.precision", "train.compile", "train.micro_batch",
    "task.cache_teacher",
)  # fmt: skip
"""Keys that change the speed, and results by rounding alone."""


@dataclass(frozen=True)
class Axis:
    """A key, and the values that are compared with the recipe as it is."""

    key: str
    values: tuple[str, ...]
    rising: bool = False
    """Numbers of which the fastest is looked for: one that is slower than the best so far ends the search."""

    @property
    def words(self) -> list[str]:
        """The overrides, one for each value."""
        return [f"{self.key}={value}" for value in self.values]


def read(request: RunRequest) -> tuple[RunRequest, list[Axis]]:
    """Return the request with the first value of each key, and the other values.

    Raises UserError for a value that is missing, given twice or wrong.
    """
    words, axes = [], []
    for word in request.overrides:
        key, _, text = (part.strip() for part in word.partition("="))
        first, *others = values_of(text)
        if not others:
            words.append(word)
            continue
        if "" in (first, *others) or len({first, *others}) <= len(others):
            raise UserError(word, "a value is missing or given twice", remedy=f"write it like {key}=0,2")
        words.append(f"{key}={first}")
        axes.append(Axis(key, tuple(others)))
    base = replace(request, overrides=tuple(words))
    for word in (word for axis in axes for word in axis.words):
        load(replace(base, overrides=merge(base.overrides, [word])))
    return base, axes


def suggested(recipe: Recipe, ready: Ready) -> list[Axis]:
    """Return what is worth trying for a recipe on the machine of `ready`; nothing that changes the training."""
    machine, device = ready.machine, recipe.device
    gpu, cores = machine["device"] == "cuda", max(1, int(machine["cores"]))
    counts = sorted({*(2**k for k in range(cores.bit_length()) if 2**k <= cores), cores})
    modes = ["off", "default", *(["reduce-overhead", "max-autotune"] if gpu else [])]
    if machine["compile"] == "off" and machine["compiles"]:  # there is no compiler
        modes = []
    precisions = ["no", *(["bf16"] if machine["bf16"] else []), *(["fp16"] if gpu else [])]
    choices: list[tuple[str, Sequence[object], object]] = [
        ("train.precision", precisions, machine["precision"]),
        ("train.compile", modes, machine["compile"]),
        ("device.channels_last", (True, False), device.channels_last),
        ("loader.workers", (0, *counts), recipe.loader.workers),
    ]
    if gpu:
        choices.append(("device.tf32", (True, False) if machine["tf32"] else (), device.tf32))
        choices.append(
            ("device.cudnn_benchmark", () if device.deterministic else (True, False), device.cudnn_benchmark)
        )
    else:
        choices.append(("device.threads", counts, machine["threads"]))
    if isinstance(recipe.task, CachesTeacher) and (ready.views or recipe.task.cache_teacher):
        choices.append(("task.cache_teacher", (True, False), bool(recipe.task.cache_teacher)))
    axes = [
        Axis(key, tuple(_text(value) for value in values if value != now), key in ("loader.workers", "device.threads"))
        for key, values, now in choices
    ]
    return [axis for axis in axes if axis.values]


def changes_training(key: str, ready: Ready) -> str:
    """Return how a key changes the results of a training; empty where it changes the speed alone, up to rounding."""
    if key == "device.deterministic":
        return "results on a GPU are no longer bitwise reproducible"
    if key == "train.micro_batch" and ready.batch_norm:
        return "changes the statistics of batch norm"
    return "" if key.startswith(_SPEED) else "changes the training"


def compares_losses(key: str) -> bool:
    """Return True where the losses of the first steps must be those of the recipe as it is, up to rounding.

    One cached output of a teacher may stand for many views.
    """
    return key.startswith(_SPEED) and key != "task.cache_teacher"


def merge(words: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Return overrides with more overrides in place of those of the same key, or after them."""
    new = {word.partition("=")[0].strip(): word for word in more}
    kept = [word for word in words if word.partition("=")[0].strip() not in new]
    return (*kept, *new.values())


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

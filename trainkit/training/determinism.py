"""Compute a step twice, at intervals, to detect hardware that does not repeat its results.

A failing processor, memory module or link gives wrong numbers and no error: of the 419 unexpected interruptions of
Llama 3's training, 6 were silent corruptions, and Gemini's report describes finding them by deterministic replay.

Here the samples of a step are read again, and its loss, gradients and statistics are computed again from the same
weights and random numbers. All must have the same bits. Weights, optimizer state and EMA weights, which no forward or
backward pass changes, must be equal before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.interfaces import Loss
from trainkit.tensors import full_tensor
from trainkit.training.guards import Update
from trainkit.training.model import Model
from trainkit.training.plan import Plan
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 6


def prints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of the bits of each tensor, as integers of its width; any one flipped bit changes it."""
    sums = [full_tensor(t.detach()).view(_WORDS[t.element_size()]).sum(dtype=torch.int64) for t in tensors.values()]
    devices = {s.device for s in sums}  # the step counters of an optimizer stay on the CPU
    told = {d: iter(torch.stack([s for s in sums if s.device == d]).tolist()) for d in devices}
    return {name: next(told[s.device]) for name, s in zip(tensors, sums, strict=True)}


def refuse_replay(recipe: Recipe, on_cpu: bool) -> None:
    """Raise UserError for `train.replay` on a GPU without deterministic kernels."""
    if recipe.train.replay is not None and not on_cpu and not recipe.device.deterministic:
        raise UserError(
            "train.replay",
            "kernels that need not repeat their bits",
            "device.deterministic: true",
            "without it a step computed twice also differs on a sound GPU",
        )


class DeterminismCheck:
    """Compute a step twice at the interval of `train.replay`."""

    def __init__(
        self, recipe: Recipe, plan: Plan, model: Model, state: TrainState, runtime: Runtime, logger: RunLogger
    ):
        self._settings, self._runtime, self._logger = recipe.train.replay, runtime, logger
        self._model, self._state = model, state
        self._every = 0
        if self._settings is None:
            return
        self._every = self._settings.every.steps(plan.steps_per_epoch, plan.batch_size)
        refuse_replay(recipe, runtime.at_once)

    def due(self) -> bool:
        """Return whether the update at hand is computed twice."""
        return bool(self._every) and (self._state.step + 1) % self._every == 0

    def begin(self) -> None:
        """Note, before the first of the two, what neither may change."""
        self._still = prints(self._kept())

    def check(self, update: Update, again: Callable[[], list[Loss]]) -> None:
        """Compute the update once more by `again`, and compare.

        What was computed last is gone on with. Raises UserError, by the recipe, for what differs.
        """
        first = prints(self._computed(update.losses))
        self._model.restore_buffers(update.buffers)
        self._model.zero_grad()
        second = prints(self._computed(again()))
        still = prints(self._kept())
        differ = [name for name in first if first[name] != second.get(name)]
        differ += [name for name in still if still[name] != self._still.get(name)]
        told = self._runtime.all_gather(differ)
        if any(told):
            self._report(update.step, told)

    def _computed(self, losses: list[Loss]) -> dict[str, Tensor]:
        """Return what a forward and a backward make: losses, gradients, buffers, what the task remembers."""
        model = self._model
        found = {f"loss {n}": loss.sum for n, loss in enumerate(losses)}
        found |= {f"gradient of {name}": p.grad for name, p in model.params.items() if p.grad is not None}
        found |= {f"buffer {name}": b for name, b in model.bare.named_buffers()}
        if model.networks.memory is not None:
            found |= {f"memory {name}": t for name, t in model.networks.memory.state_dict().items()}
        return found

    def _kept(self) -> dict[str, Tensor]:
        """Return what neither changes: weights, the optimizer's state, the average."""
        model = self._model
        found: dict[str, Tensor] = dict(model.params)
        for name, p in model.params.items():
            entries = model.optimizer.state.get(p) or {}
            found |= {f"{key} of {name}": t for key, t in entries.items() if isinstance(t, Tensor)}
        if model.ema is not None:
            found |= {f"average of {name}": t for name, t in model.ema.tensors.items()}
        return found

    def _report(self, step: int, told: list[list[str]]) -> None:
        found = []
        for rank, names in enumerate(told):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                whose = f" on process {rank}" if self._runtime.world > 1 else ""
                found.append(f"{', '.join(names[:_SHOWN])}{more}{whose}")
        said = f"computed twice, the step gave different results: {'; '.join(found)}"
        data: dict[str, Json] = {"by": "replay", "names": sorted({name for names in told for name in names})[:50]}
        self._logger.tracker.event(step, "nondeterminism", data)
        self._logger.tracker.tags({"trainkit.nondeterminism": f"step {step}: {said}"})
        if self._settings is not None and self._settings.policy == "stop":
            raise UserError(
                f"step {step}",
                said,
                remedy="a part of this machine may be failing: --resume continues from the last checkpoint, best on "
                "another machine. If it happens there too, the task depends on more than its batch and its seed",
            )
        self._logger.say(f"step {step}: {said}")

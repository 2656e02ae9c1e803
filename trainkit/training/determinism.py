"""An update computed twice, now and then: whether the machine computes the same from the same.

A processor, a memory module or a wire that is failing gives wrong numbers and no error: of the 419 unexpected
interruptions of Llama 3's training 6 were silent corruptions, and Gemini's report finds them by deterministic replay.
Here an update's samples are read again and its loss, gradients and statistics computed again from the same weights and
random numbers; all of it must have the same bits. What no forward and backward changes (weights, the optimizer's state,
the average) must be at the end what it was at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Machine
from trainkit.errors import UserError
from trainkit.interfaces import Loss, Parts
from trainkit.training import nonfinite, optimizer
from trainkit.training.plan import Plan
from trainkit.training.run_logger import Witness
from trainkit.training.state import State

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 6


def prints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A number for the bits of each tensor: their sum as integers of its width, which any one flipped bit changes."""
    sums = [nonfinite.local(t.detach()).view(_WORDS[t.element_size()]).sum(dtype=torch.int64) for t in tensors.values()]
    devices = {s.device for s in sums}  # the step counters of an optimizer stay on the CPU
    told = {d: iter(torch.stack([s for s in sums if s.device == d]).tolist()) for d in devices}
    return {name: next(told[s.device]) for name, s in zip(tensors, sums, strict=True)}


class Replay:
    """The updates that are computed twice: every so many, where the recipe says so."""

    def __init__(self, recipe: Recipe, plan: Plan, machine: Machine, run: Witness):
        self._settings, self._machine, self._run = recipe.train.replay, machine, run
        self._every = 0
        if self._settings is None:
            return
        self._every = self._settings.every.steps(plan.steps_per_epoch, plan.batch_size)
        if not machine.at_once and not recipe.device.deterministic:
            raise UserError(
                "train.replay",
                "kernels that need not repeat their bits",
                "device.deterministic: true",
                "without it an update computed twice differs on a sound GPU too",
            )

    def due(self, state: State) -> bool:
        """Whether the update at hand is computed twice."""
        return bool(self._every) and (state.step + 1) % self._every == 0 and not state.leaves_out(state.step)

    def begin(self, state: State, params: Mapping[str, nn.Parameter]) -> None:
        """Before the first of the two: notes what neither may change."""
        self._still = prints(_still(state, params))

    def check(
        self,
        state: State,
        params: Mapping[str, nn.Parameter],
        parts: Parts,
        before: list[Tensor],
        losses: list[Loss],
        again: Callable[[], list[Loss]],
    ) -> None:
        """Compute the update once more by `again`, and compare.

        `before` is what a forward changes, as it was. What was computed last is gone on with. Raises UserError, by the
        recipe, for what differs.
        """
        first = prints(_moved(state, params, parts, losses))
        nonfinite.put_back(state.net, parts, before)
        optimizer.forget(params)
        second = prints(_moved(state, params, parts, again()))
        still = prints(_still(state, params))
        differ = [name for name in first if first[name] != second.get(name)]
        differ += [name for name in still if still[name] != self._still.get(name)]
        told = self._machine.each(differ)
        if any(told):
            self._tell(state.step, told)

    def _tell(self, step: int, told: list[list[str]]) -> None:
        found = []
        for rank, names in enumerate(told):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                whose = f" on process {rank}" if self._machine.world > 1 else ""
                found.append(f"{', '.join(names[:_SHOWN])}{more}{whose}")
        said = f"computed twice, it came out differently: {'; '.join(found)}"
        data: dict[str, Any] = {"by": "replay", "names": sorted({name for names in told for name in names})[:50]}
        self._run.tracker.event(step, "nondeterminism", data)
        self._run.tracker.tags({"trainkit.nondeterminism": f"step {step}: {said}"})
        if self._settings.policy == "stop":
            raise UserError(
                f"step {step}",
                said,
                remedy="a part of this machine may be failing: --resume goes on from the last checkpoint, best on "
                "another one. If it comes there too, the task is not a function of its batch and its seed",
            )
        self._run.say(f"step {step}: {said}")


def _moved(state: State, params: Mapping[str, nn.Parameter], parts: Parts, losses: list[Loss]) -> dict[str, Tensor]:
    """What a forward and a backward make: losses, gradients, buffers, what the task remembers."""
    found = {f"loss {n}": loss.sum for n, loss in enumerate(losses)}
    found |= {f"gradient of {name}": p.grad for name, p in params.items() if p.grad is not None}
    found |= {f"buffer {name}": b for name, b in state.net.named_buffers()}
    if parts.remembers is not None:
        found |= {f"memory {name}": t for name, t in parts.remembers.state_dict().items()}
    return found


def _still(state: State, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What neither changes: weights, the optimizer's state, the average."""
    found: dict[str, Tensor] = dict(params)
    for name, p in params.items():
        entries = state.optimizer.state.get(p) or {}
        found |= {f"{key} of {name}": t for key, t in entries.items() if isinstance(t, Tensor)}
    if state.average is not None:
        found |= {f"average of {name}": t for name, t in state.average.tensors.items()}
    return found

"""Losses and gradients that are not finite: noticed without waiting for the device, and what is done about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Machine
from trainkit.errors import UserError
from trainkit.interfaces import Loss, Parts
from trainkit.training.async_scalar import Late
from trainkit.training.rollback import Trouble

if TYPE_CHECKING:
    from trainkit.training.run_logger import Witness
    from trainkit.training.state import State


class Watch:
    """Whether an update was finite, read one step late so that nobody waits for the device."""

    def __init__(self) -> None:
        self._late = Late()

    def turn(self, finite: Tensor | bool, step: int) -> int | None:
        """Hand in the flag of `step`; returns the step before it if that one was not finite."""
        return _bad(self._late.turn(finite, step))

    def look(self) -> int | None:
        """The step of the flag handed in last, if that update was not finite. Waits for the flag alone."""
        return _bad(self._late.look())

    def clear(self) -> None:
        """Forget the flag."""
        self._late.clear()


def _bad(told: tuple[int, bool | float] | None) -> int | None:
    return None if told is None or told[1] else told[0]


def finite(norm: Tensor, losses: list[Loss], machine: Machine) -> Tensor | bool:
    """Whether the loss and the gradients of an update are finite, alike on all ranks: a flag on the device, or known.

    The norm of averaged gradients is the same everywhere; losses are not. Under fp16 the loss scaler meets infinite
    gradients on purpose and deals with them, so there losses and their weights decide alone. An infinite weight leaves
    gradients of zero, and the scaler has looked at them before they are divided: so weights are looked at themselves.
    """
    scaled = machine.accelerator.scaler is not None
    weights = [loss.weight for loss in losses if isinstance(loss.weight, Tensor)]
    if machine.at_once and machine.world == 1:
        whole = all(math.isfinite(loss.sum) for loss in losses) and (not weights or _divides(float(sum(weights))))
        return whole and (scaled or math.isfinite(norm))
    bad = ~torch.isfinite(torch.stack([loss.sum for loss in losses])).all()
    told = machine.sum(torch.stack([bad.float(), *([sum(weights).float()] if weights else ())]))
    fine = told[0] == 0
    if weights:
        fine = fine & torch.isfinite(told[1]) & (told[1] != 0)
    return fine if scaled else fine & torch.isfinite(local(norm))


def _divides(weight: float) -> bool:
    return math.isfinite(weight) and weight != 0


def local(x: Tensor) -> Tensor:
    """A norm over sharded gradients as a plain tensor."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def replicated(net: nn.Module, parts: Parts) -> list[Tensor]:
    """State that moves outside the optimizer and is equal on all ranks: buffers, and what the task remembers."""
    memory = [] if parts.remembers is None else list(parts.remembers.state_dict().values())
    return [*net.buffers(), *memory]


def snapshot(net: nn.Module, parts: Parts) -> list[Tensor]:
    """Copies of what a forward changes: it cannot be undone by leaving the optimizer's step out."""
    return [t.clone() for t in replicated(net, parts)]


@torch.no_grad()
def put_back(net: nn.Module, parts: Parts, kept: list[Tensor]) -> None:
    """Undo what a forward changed."""
    for t, before in zip(replicated(net, parts), kept, strict=True):
        t.copy_(before)


def leave_out(state: State, net: nn.Module, parts: Parts, before: list[Tensor], run: Witness, most: int = 10) -> None:
    """Undo the forward of an update whose step is not taken. Ends a run in which every update is left out."""
    put_back(net, parts, before)
    if state.scaler is not None:
        state.scaler.update()  # it has looked at these gradients, and would not look at the next
    state.left_out.append(state.step)
    run.tracker.event(state.step, "left_out", {"reason": "loss or gradient not finite"})
    if state.left_out[-most:] == list(range(state.step - most + 1, state.step + 1)):
        raise UserError(f"step {state.step}", f"{most} updates in a row were not finite", remedy="lower optim.lr")


def trouble(bad: int | None, recipe: Recipe) -> Trouble | None:
    """What an update that was not finite asks for: the end of the run, as a UserError, or to go back."""
    if bad is None:
        return None
    why = "the loss or a gradient is not finite"
    if recipe.train.nonfinite == "stop":
        raise UserError(
            f"step {bad}",
            why,
            remedy="lower optim.lr or look at the data; no checkpoint holds this state. "
            "--resume train.nonfinite=skip, or rollback, goes on without such updates",
        )
    return Trouble(bad, why, range(bad, bad + 1))


def named(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Which tensors hold something that is not finite: `<file>/<name>` of each, by file and name."""
    found = [
        (f"{file}/{name}", _extremes(t))
        for file, members in tensors.items()
        for name, t in members.items()
        if isinstance(t, Tensor) and t.numel() and (t.is_floating_point() or t.is_complex())
    ]
    # One question for all of them: each would wait for the device.
    fine = torch.stack([torch.isfinite(ends).all() for _, ends in found]).tolist() if found else []
    return [name for (name, _), good in zip(found, fine, strict=True) if not good]


def _extremes(t: Tensor) -> Tensor:
    """Least and greatest entry, NaN where there is one: unlike `isfinite` it makes no tensor of the same size."""
    t = torch.view_as_real(t) if t.is_complex() else t
    return torch.stack(torch.aminmax(local(t.detach()).float() if t.element_size() == 1 else local(t.detach())))


def refuse(tensors: Mapping[str, Mapping[str, Tensor]], born: frozenset[str], step: int) -> None:
    """Raise UserError where a tensor of a checkpoint, by file and name, is not finite and was when it was built.

    Loss and gradients do not tell: a step that is too large makes weights infinite out of finite gradients, and batch
    norm divides by a variance that has overflown and gives zeros. `born` are constants, such as a mask of -inf.
    """
    bad = [name for name in named(tensors) if name not in born]
    if bad:
        raise UserError(
            f"step {step}",
            f"{', '.join(bad[:4])}{f' and {len(bad) - 4} more' if len(bad) > 4 else ''}: not finite, and not committed",
            remedy="lower optim.lr or clip the gradient (optim.clip_norm); the checkpoints before are intact",
        )

"""Memory that runs out: the same update, or evaluation, in smaller portions, or one sentence that says what would help.

An update that runs out of memory is begun anew with micro-batches of half the size, on all processes: from the weights
and statistics that it began with, over the same samples, augmented as they were. There are as many samples as before,
so the learning rate and all that follows stays what it was (Composer halves so too; Accelerate's finder lowers the
batch). From there on the training is the one that a recipe with this `train.micro_batch` has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Machine
from trainkit.errors import UserError
from trainkit.interfaces import Opened, Parts
from trainkit.training.plan import Plan, halved, refuse_few

if TYPE_CHECKING:
    from trainkit.training.run_logger import Witness
    from trainkit.training.state import State

T = TypeVar("T")
_MICRO, _EVAL = "train.micro_batch", "evaluations.{}.batch_size"
_SAID = ("can't allocate memory", "out of memory", "Unable to allocate", "bad allocation")


def is_one(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: torch's of a GPU and of a CPU, Python's, NumPy's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def caught(act: Callable[..., T], *of: Any) -> tuple[T | None, str]:
    """What `act` returns; or None and what was said, where memory ran out. The frames that held it are gone then."""
    try:
        return act(*of), ""
    except (RuntimeError, MemoryError) as error:
        if not is_one(error):
            raise
        said = (str(error) if isinstance(error, Short) else f"{type(error).__name__}: {error}").splitlines()[0][:200]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, said


class Portions:
    """In how large portions a run computes, where its recipe lets it take smaller ones: `train.on_oom: halve`."""

    def __init__(self, recipe: Recipe, data: Opened, parts: Parts, machine: Machine, state: State, run: Witness):
        self.halving = recipe.train.on_oom == "halve"
        self._recipe, self._machine, self._state, self._run = recipe, machine, state, run
        self._again: dict[tuple[int, str], list[str]] = {}
        for event in run.replayed if self.halving else ():
            if event.name == "memory":
                self._again.setdefault((event.step, event.data["key"]), []).append(event.data["said"])
        self._fixed = f"its {data.block} samples belong together" if data.block > 1 else parts.together
        if not self._fixed and parts.remembers is not None:
            self._fixed = "what the task remembers follows micro-batches"
        self.apart = self.halving and machine.world > 1 and not self._fixed
        """Whether gradients are averaged over processes behind the backward pass, not beside it: a process whose memory
        runs out in it could not take part, and the others would wait for it."""
        if self.apart and (machine.sharded or getattr(recipe.task, "batch_norm", None) == "sync"):
            raise UserError(
                "train.on_oom",
                f"halve, with {'sharded parameters' if machine.sharded else 'norm: sync'} on {machine.world} processes",
                "stop",
                "processes compute together there, and one whose memory runs out cannot begin anew alone",
            )

    def plan(self, plan: Plan) -> Plan:
        """The plan with the micro-batches that the run has come to."""
        micro = self._state.micro_batch
        if micro is None or plan.batch_size // plan.world % micro:  # on another number of processes: --elastic
            return plan
        return replace(plan, micro_batch=micro, accumulation=plan.batch_size // plan.world // micro)

    def tried(self, gradients: Callable[..., T], *of: Any) -> T | None:
        """What `gradients` returns; None where memory ran out, on any process, and the update is to be begun anew."""
        done, self._said = self._before(_MICRO) or caught(gradients, *of)
        if not self.apart:
            return None if self._said else done
        # Also from a process that has enough: all change together.
        said = [words for words in self._machine.each(self._said) if words]
        self._said = said[0] if said else ""
        return None if said else done

    def smaller(self, plan: Plan) -> Plan:
        """The plan of micro-batches half the size, written down; raises UserError where there can be none."""
        where, lower = f"step {self._state.step}", "take a smaller train.micro_batch, which keeps batch_size as it is"
        if not self.halving:
            lower += "; --resume train.on_oom=halve goes on from the last checkpoint with smaller ones"
        elif self._fixed:
            raise UserError(where, f"memory ran out ({self._said}), and {self._fixed}", remedy=lower)
        if not self.halving or plan.micro_batch == 1:
            one = ", in a micro-batch of one sample" if plan.micro_batch == 1 else ""
            raise UserError(where, f"memory ran out{one} ({self._said})", remedy=lower)
        plan = halved(plan)
        refuse_few(self._recipe, plan.micro_batch, plan.batch_size, plan.world)
        self._state.micro_batch = plan.micro_batch
        norm = getattr(self._recipe.task, "batch_norm", None)
        seen = "" if norm is None else f"; batch norm sees {plan.micro_batch} samples from here on"
        self._told("micro-batches", _MICRO, plan.micro_batch, seen)
        return plan

    def evaluated(self, name: str, net: torch.nn.Module, score: Callable[[int], T]) -> T:
        """`score` with the batch size of an evaluation, or with the first half of it that memory suffices for.

        On several processes `score` raises `Short` on all where memory runs out on one.
        """
        size, key = self._state.eval_batches.get(name, self._recipe.evaluations[name].batch_size), _EVAL.format(name)
        training = net.training
        while True:
            done, self._said = self._before(key) or caught(score, size)
            if not self._said:
                return done
            net.train(training)
            if not self.halving or size == 1:
                instead = "train.on_oom=halve would go on with half of it"
                found = f"memory ran out with {size} ({self._said})"
                raise UserError(key, found, remedy="lower it" + ("" if self.halving else f"; {instead}"))
            size = self._state.eval_batches[name] = size // 2
            self._told(f"evaluation {name}: batches", key, size, "")

    def _before(self, key: str) -> tuple[None, str] | None:
        """What was said when memory ran out here behind the checkpoint that is resumed from: the bits hang on it."""
        said = self._again.get((self._state.step, key))
        return (None, said.pop(0)) if said else None

    def _told(self, what: str, key: str, size: int, more: str) -> None:
        self._run.say(f"step {self._state.step}: memory ran out; {what} of {size} from here on{more}")
        self._run.tracker.event(self._state.step, "memory", {"key": key, "size": size, "said": self._said})
        self._run.tracker.tags({f"trainkit.{key}": str(size)})


class Short(MemoryError):
    """Memory ran out on another process."""


def agreed(done: T | None, said: str, machine: Machine) -> T:
    """What was `caught`, unless memory ran out on any process: then all raise."""
    if any(machine.each(bool(said))):
        raise Short(said or "on another process")
    return done

"""Handle out of memory: repeat the step or evaluation in smaller parts, or report what would help.

A step that runs out of memory is repeated with micro-batches of half the size, on all processes: from the same weights
and statistics, over the same samples with the same augmentation. The number of samples per step stays, and so does the
learning rate (Composer halves too; Accelerate's finder lowers the batch size). From then on the training equals that of
a recipe with this `train.micro_batch`. If a loss compares the samples of a micro-batch, the micro-batch stays whole,
and the part of it that the network sees at once is halved (`gradient_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.interfaces import Dataset, Loss, Networks, StepContext
from trainkit.models.gradient_cache import forward_in_parts
from trainkit.tracking.journal import Event
from trainkit.training.plan import Plan, batch_norm, halved, refuse_few
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState

T = TypeVar("T")
_MICRO, _PART, _EVAL = "train.micro_batch", "train.micro_batch.part", "evaluations.{}.batch_size"
_SAID = ("can't allocate memory", "out of memory", "Unable to allocate", "bad allocation")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means out of memory: torch's on a GPU or CPU, Python's, NumPy's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def one_line(error: BaseException) -> str:
    """Return the message of an out-of-memory error in one line."""
    text = str(error) if isinstance(error, OtherRankOutOfMemory) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200]


def caught(act: Callable[..., T], *of: Any) -> tuple[T | None, str]:
    """Return the result of `act`, or None and the message if it ran out of memory; its frames are released."""
    try:
        return act(*of), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        oom_reason = one_line(error)
    _free()
    return None, oom_reason


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


class Attempt:
    """Hold the forward and backward passes of a step, and keep the reason where memory runs out in them."""

    oom_reason = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.oom_reason = one_line(error)
        return True


class MicroBatching:
    """Choose smaller micro-batches when memory runs out, if the recipe allows it: `train.on_oom: halve`."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        networks: Networks,
        runtime: Runtime,
        state: TrainState,
        logger: RunLogger,
        events: Iterable[Event] = (),
    ):
        self.halving = recipe.train.on_oom == "halve"
        self._recipe, self._runtime, self._state, self._logger = recipe, runtime, state, logger
        self._recorded: dict[tuple[int, str], list[str]] = {}
        for event in events if self.halving else ():
            if event.name == "memory":
                self._recorded.setdefault((event.step, event.data["key"]), []).append(event.data["said"])
        self._fixed = f"its {data.block} samples belong together" if data.block > 1 else networks.indivisible
        if not self._fixed and networks.memory is not None:
            self._fixed = "what the task remembers follows micro-batches"
        self._net, self._block = networks.model, data.block
        self._whole = bool(self._fixed) and networks.in_parts
        """Whether micro-batches stay whole, and the network sees a part of them at once."""
        self._part: int | None = None
        self._key = _PART if self._whole else _MICRO
        self._awaited: int | None = None
        """Exchanges of the loss at hand that other processes still wait for; None: none has begun."""
        self._known = ""
        """Reason on any process, where all know it already."""
        self.averages_gradients = self.halving and runtime.world > 1 and (self._whole or not self._fixed)
        """Whether gradients are averaged over processes behind the backward pass, not beside it: a process whose memory
        runs out in it could not take part, and the others would wait for it."""
        # With sharded parameters the launch was refused (`launch_settings`).
        if self.averages_gradients and batch_norm(recipe) == "sync":
            raise UserError(
                "train.on_oom",
                f"halve, with norm: sync on {runtime.world} processes",
                "stop",
                "processes compute together there, and one whose memory runs out cannot begin anew alone",
            )

    def apply(self, plan: Plan) -> Plan:
        """Return the plan with the micro-batches, or the parts of them, that the run has come to."""
        size = self._state.micro_batch
        if size is None or (plan.micro_batch if self._whole else plan.share) % size:  # other processes: --elastic
            return plan
        if self._whole:
            self._part = size
            return plan
        return replace(plan, micro_batch=size, accumulation=plan.share // size)

    def context(self, at: StepContext) -> StepContext:
        """Return what a loss is told, with how it goes in parts and agrees with others, where it does."""
        if self._part is not None:
            at = replace(at, in_parts=self._in_parts)
        return replace(at, gather=partial(self._gather, at.gather)) if self.averages_gradients else at

    def _in_parts(self, compute: Callable[[slice], T], count: int) -> T:
        return forward_in_parts(compute, count, self._part or count, self._net, self._runtime.device)

    def attempts(self, begin_again: Callable[[str], None]) -> Iterator[Attempt]:
        """Yield attempts at a step until memory suffices for one on all processes.

        `begin_again` gets the reason after each for which it did not. Where a resumed run repeats a step, the attempts
        that the run before made in vain are not made again.
        """
        while True:
            if not (oom_reason := self.recorded()):
                attempt = Attempt()
                yield attempt
                oom_reason = attempt.oom_reason
            if not (oom_reason := self.agree(oom_reason)):
                return
            begin_again(oom_reason)

    def recorded(self) -> str:
        """Return the reason where memory ran out at this step, behind the checkpoint that is resumed from.

        The bits depend on it, so the step is made in the same micro-batches again.
        """
        return self._recorded_at(self._key)

    def agree(self, oom_reason: str) -> str:
        """Return the reason of any process, where each averages its own gradients: all begin again, or none."""
        if not self.averages_gradients:
            return oom_reason
        known, self._known = self._known, ""
        return known or next((found for found in self._runtime.all_gather(oom_reason) if found), "")

    # A process whose memory runs out can say so where the others ask next. They ask behind the last micro-batch of an
    # update, and where the loss has exchanges, in which they would wait for it, before the first and behind the last.

    def _gather(self, gather: Callable[..., Tensor], x: Tensor, grad: bool = False) -> Tensor:
        if self._awaited is None:
            self._ask()
            self._awaited = 1  # the loss itself, until it is made
        gathered = gather(x, grad=grad)
        if grad and gathered.grad_fn is not None:  # its gradient is exchanged too
            self._awaited += 1
            gathered.grad_fn.register_hook(lambda *_: self._exchanged())
        return gathered

    def _exchanged(self) -> None:
        if self._awaited is not None:
            self._awaited -= 1

    def made(self, loss: Loss) -> Loss:
        """Return a loss as it is; from here on its gradients alone are exchanged."""
        self._exchanged()
        return loss

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Hold the forward and the backward pass of a micro-batch; raises on all processes if memory ran out on one.

        Raises UserError where it did between exchanges of a loss: the others wait there, and cannot be told.
        """
        self._awaited = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self._awaited and is_out_of_memory(error):
                found = f"memory ran out ({one_line(error)}) in the loss, in which processes wait for one another"
                raise UserError(f"step {self._state.step}", found, remedy=self._smaller()) from error
            raise
        if self._awaited is not None:
            self._ask()

    def _ask(self) -> None:
        if oom_reason := self.agree(""):
            self._known = oom_reason
            raise OtherRankOutOfMemory(oom_reason)

    def halve(self, plan: Plan, oom_reason: str) -> Plan:
        """Return the plan of micro-batches half the size, written down; raises UserError where there can be none.

        Where a loss compares them they stay as they are, and the network sees half as many samples at once.
        """
        where, size = f"step {self._state.step}", self._part or plan.micro_batch
        if self.halving and self._fixed and not self._whole:
            raise UserError(where, f"memory ran out ({oom_reason}), and {self._fixed}", remedy=self._smaller(plan))
        if not self.halving or size == 1:
            one = f", in a {'part' if self._part else 'micro-batch'} of one sample" if size == 1 else ""
            raise UserError(where, f"memory ran out{one} ({oom_reason})", remedy=self._smaller(plan))
        _free()
        smaller = halved(
            replace(plan, micro_batch=size, accumulation=plan.micro_batch // size) if self._whole else plan
        )
        size = self._state.micro_batch = smaller.micro_batch
        refuse_few(self._recipe, size, plan.batch_size, plan.active)
        seen = "" if batch_norm(self._recipe) is None else f"; batch norm sees {size} samples from here on"
        if self._whole:
            self._part = size
            what = f"micro-batches of {plan.micro_batch} go through the network in parts"
        else:
            plan, what = smaller, "micro-batches"
        self._log(what, self._key, size, oom_reason, seen)
        return plan

    def _smaller(self, plan: Plan | None = None) -> str:
        """Name what to change in the recipe, and to what."""
        to = "a smaller train.micro_batch"
        if plan is not None and plan.micro_batch > 1:
            to = f"train.micro_batch={halved(plan).micro_batch}"
        lower = f"take {to}, which keeps batch_size as it is"
        if self._block > 1:
            lower = "take fewer people, or records of each, in data.sampler, whose blocks are the micro-batches"
        if not self.halving:
            lower += "; --resume train.on_oom=halve continues from the last checkpoint with smaller micro-batches"
        return lower

    def evaluate(self, name: str, net: torch.nn.Module, score: Callable[[int], T]) -> T:
        """Call `score` with the batch size of an evaluation, or with the first half of it that memory suffices for.

        On several processes `score` raises `OtherRankOutOfMemory` on all where memory runs out on one.
        """
        size, key = self._state.eval_batches.get(name, self._recipe.evaluations[name].batch_size), _EVAL.format(name)
        training = net.training
        while True:
            oom_reason = self._recorded_at(key)
            if not oom_reason:
                done, oom_reason = caught(score, size)
                if not oom_reason:
                    return cast("T", done)  # None where `score` returns that
            net.train(training)
            if not self.halving or size == 1:
                instead = "train.on_oom=halve would continue with half of it"
                found = f"out of memory with {size} ({oom_reason})"
                raise UserError(key, found, remedy="lower it" + ("" if self.halving else f"; {instead}"))
            size = self._state.eval_batches[name] = size // 2
            self._log(f"evaluation {name}: batches", key, size, oom_reason)

    def _recorded_at(self, key: str) -> str:
        reasons = self._recorded.get((self._state.step, key))
        return reasons.pop(0) if reasons else ""

    def _log(self, what: str, key: str, size: int, oom_reason: str, more: str = "") -> None:
        self._logger.say(f"step {self._state.step}: memory ran out; {what} of {size} from here on{more}")
        self._logger.tracker.event(self._state.step, "memory", {"key": key, "size": size, "said": oom_reason})
        self._logger.tracker.tags({f"trainkit.{key}": str(size)})


class OtherRankOutOfMemory(MemoryError):
    """Another process ran out of memory."""


def agreed(done: T | None, oom_reason: str, runtime: Runtime) -> T:
    """Return the result of `caught`, unless any process ran out of memory: then all raise."""
    if any(runtime.all_gather(bool(oom_reason))):
        raise OtherRankOutOfMemory(oom_reason or "on another process")
    return cast("T", done)

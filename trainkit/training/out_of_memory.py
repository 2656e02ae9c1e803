"""Handle out of memory: repeat the step or evaluation in smaller parts, or report what would help.

A step that runs out of memory is repeated with micro-batches of half the size: from the same weights and statistics,
over the same samples with the same augmentation. The number of samples per step stays, and so does the learning rate
(Composer halves too; Accelerate's finder lowers the batch size). From then on the training equals that of a recipe with
this `train.micro_batch`. If a loss compares the samples of a micro-batch, the micro-batch stays whole, and the part of
it that the network sees at once is halved (`recomputation`). On one process only (`launch_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

import torch

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.interfaces import Dataset, Networks, StepContext
from trainkit.models.recomputation import forward_in_parts
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


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


class Attempt:
    """Hold the work of a step or an evaluation, and keep the reason where memory runs out in it."""

    oom_reason = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.oom_reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
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
        self._net, self._block = networks.model, data.block
        self._recorded: dict[tuple[int, str], list[str]] = {}
        """Reasons by step and key where memory ran out behind the checkpoint that is resumed from. The bits depend on
        it, so the step is made in the same micro-batches again."""
        for event in events if self.halving else ():
            if event.name == "memory":
                self._recorded.setdefault((event.step, event.data["key"]), []).append(event.data["said"])
        self._fixed = f"its {data.block} samples belong together" if data.block > 1 else networks.indivisible
        """Why micro-batches cannot be halved; empty where they can."""
        if not self._fixed and networks.memory is not None:
            self._fixed = "what the task remembers follows micro-batches"
        self._whole = bool(self._fixed) and networks.in_parts
        """Whether micro-batches stay whole, and the network sees a part of them at once."""
        self._part: int | None = None
        self._key = _PART if self._whole else _MICRO

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
        """Return what a loss is told, with how it is computed in parts, if it is."""
        return at if self._part is None else replace(at, in_parts=self._in_parts)

    def _in_parts(self, compute: Callable[[slice], T], count: int) -> T:
        return forward_in_parts(compute, count, self._part or count, self._net, self._runtime.device)

    def attempts(self, begin_again: Callable[[str], None]) -> Iterator[Attempt]:
        """Yield attempts at a step until memory suffices for one; `begin_again` gets the reason after each other.

        Where a resumed run repeats a step, the attempts that the run before made in vain are not made again.
        """
        while True:
            oom_reason = self._recorded_at(self._key)
            if not oom_reason:
                attempt = Attempt()
                yield attempt
                oom_reason = attempt.oom_reason
            if not oom_reason:
                return
            begin_again(oom_reason)

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
        parts = replace(plan, micro_batch=size, accumulation=plan.micro_batch // size)
        smaller = halved(parts if self._whole else plan)
        size = self._state.micro_batch = smaller.micro_batch
        refuse_few(self._recipe, size, plan.batch_size, plan.active)
        seen = "" if batch_norm(self._recipe) is None else f"; batch norm sees {size} samples from here on"
        if not self._whole:
            self._log("micro-batches", self._key, size, oom_reason, seen)
            return smaller
        self._part = size
        what = f"micro-batches of {plan.micro_batch} go through the network in parts"
        self._log(what, self._key, size, oom_reason, seen)
        return plan

    def _smaller(self, plan: Plan) -> str:
        """Name what to change in the recipe, and to what."""
        to = f"train.micro_batch={halved(plan).micro_batch}" if plan.micro_batch > 1 else "a smaller train.micro_batch"
        lower = f"take {to}, which keeps batch_size as it is"
        if self._block > 1:
            lower = "take fewer people, or records of each, in data.sampler, whose blocks are the micro-batches"
        if not self.halving and self._runtime.world == 1:
            lower += "; --resume train.on_oom=halve continues from the last checkpoint with smaller micro-batches"
        return lower

    def evaluate(self, name: str, net: torch.nn.Module, score: Callable[[int], T]) -> T:
        """Call `score` with the batch size of an evaluation, or with the first half of it that memory suffices for."""
        size, key = self._state.eval_batches.get(name, self._recipe.evaluations[name].batch_size), _EVAL.format(name)
        training = net.training
        while True:
            oom_reason = self._recorded_at(key)
            if not oom_reason:
                attempt = Attempt()
                with attempt:
                    return score(size)
                oom_reason = attempt.oom_reason
            _free()
            net.train(training)
            if not self.halving or size == 1:
                instead = "" if self.halving else "; train.on_oom=halve would continue with half of it"
                raise UserError(key, f"out of memory with {size} ({oom_reason})", remedy=f"lower it{instead}")
            size = self._state.eval_batches[name] = size // 2
            self._log(f"evaluation {name}: batches", key, size, oom_reason)

    def _recorded_at(self, key: str) -> str:
        reasons = self._recorded.get((self._state.step, key))
        return reasons.pop(0) if reasons else ""

    def _log(self, what: str, key: str, size: int, oom_reason: str, more: str = "") -> None:
        self._logger.say(f"step {self._state.step}: memory ran out; {what} of {size} from here on{more}")
        self._logger.tracker.event(self._state.step, "memory", {"key": key, "size": size, "said": oom_reason})
        self._logger.tracker.tags({f"trainkit.{key}": str(size)})

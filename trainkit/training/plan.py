"""Divide a training into steps and micro-batches, schedule its events, and estimate their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from trainkit.config.gates import Gate, Safeguard
from trainkit.config.schema import Checkpoints, Evaluation, Recipe
from trainkit.config.units import samples_per_update
from trainkit.errors import UserError, number_of
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import (
    ComparesSamples,
    Dataset,
    DividesBlocks,
    FitsBeforeTraining,
    Loss,
    NormalisesBatch,
    RowOrder,
    Split,
)
from trainkit.training import optimizer


@dataclass(frozen=True)
class Plan:
    """Division of a training into epochs, steps, micro-batches and parts of processes."""

    steps: int
    """Updates in all."""
    steps_per_epoch: int
    batch_size: int
    micro_batch: int
    accumulation: int
    world: int
    rank: int
    idle: int = 0
    """Processes for which an update has no samples: they read and compute those of others, which count nothing. So
    every collective has all processes, and the training is that of the others alone; but what batch norms see of a
    process, and logged means beside the loss, count some samples again in their averages over processes."""
    parts: int = 1
    """Processes that share a block of samples that belong together."""

    @staticmethod
    def make(recipe: Recipe, data: Dataset, world: int, rank: int) -> Plan:
        """The plan of a recipe, whose task has built its network, on `world` processes.

        Raises UserError when the numbers do not divide, leave batch norm too few samples, or are those of `updates`.
        """
        batch = samples_per_update(recipe.train.batch_size, world)
        active, parts = divided(recipe, data, world)
        share = batch // active
        micro = min(recipe.train.micro_batch or share, share)
        if data.block > 1:
            micro = data.block // parts
        elif share % micro:
            fits = max(m for m in range(1, micro + 1) if share % m == 0)
            raise UserError(
                "train.micro_batch",
                f"{micro}, which does not divide the {share} samples of a process",
                f"for example {fits}",
            )
        refuse_few(recipe, micro, batch, active)
        per_epoch, steps = updates(recipe, data, world)
        return Plan(steps, per_epoch, batch, micro, share // micro, world, rank, world - active, parts)

    @property
    def active(self) -> int:
        """Processes whose samples count."""
        return self.world - self.idle

    @property
    def place(self) -> int:
        """Number of this process's samples in what is gathered; of an idle process, of those that it repeats."""
        return self.rank % self.active

    @property
    def share(self) -> int:
        """Samples of an update on one process."""
        return self.micro_batch * self.accumulation

    def counted(self, loss: Loss) -> Loss:
        """Return the loss of a micro-batch with what it counts on this process: nothing on an idle one."""
        return loss if self.rank < self.active else Loss(loss.sum * 0, loss.weight * 0, loss.logs)

    def gathered(self, gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `gather` without the rows of idle processes."""
        if not self.idle:
            return gather
        return lambda x, grad=False: gather(x, grad)[: self.active * len(x)]

    def where(self, step: int) -> tuple[int, int]:
        """Epoch and update within it that follow `step` finished updates."""
        return divmod(step, self.steps_per_epoch)

    def lr(self, recipe: Recipe, step: int, reduced: int = 0) -> float:
        """Learning rate of the update that follows `step` finished ones, when a plateau has reduced it so often."""
        full = optimizer.rate(recipe.optim, self.batch_size)
        return full * recipe.train.schedule.factor(step, self.steps, self.steps_per_epoch, self.batch_size, reduced)

    def keys(self, split: Split, step: int) -> Iterator[tuple[int, np.ndarray]]:
        """(epoch, rows) of every micro-batch of this rank from `step` to the end.

        Micro-batch m takes the next `active * micro_batch` rows of the update and each rank its run of them, so that
        gathering in rank order restores the order of the update; of a block that processes share, its part.
        """
        known, _ = self.where(step)
        order = split.order(known, self.batch_size) if step < self.steps else np.empty((0, 0), np.int64)
        for done in range(step, self.steps):
            epoch, update = self.where(done)
            if epoch != known:
                order, known = split.order(epoch, self.batch_size), epoch
            for m in range(self.accumulation):
                yield epoch, self.rows(split, order, update, m)

    def rows(self, split: Split, order: RowOrder, update: int, micro: int) -> np.ndarray:
        """Return the indices with which this rank reads micro-batch `micro` of an update, as `order` draws it."""
        many = self.micro_batch
        if self.parts == 1:
            first = (micro * self.active + self.place) * many
            return order[update, first : first + many]
        if not isinstance(split, DividesBlocks):
            raise TypeError(f"{split.name} has blocks that processes cannot share")
        block = many * self.parts
        return split.divide(order[update, micro * block : (micro + 1) * block], self.place, self.parts)


def divided(recipe: Recipe, data: Dataset, world: int) -> tuple[int, int]:
    """Return how many of `world` processes have samples of a step, and how many share a block of it.

    All have samples, unless there are more processes than samples, or than people of a block. Raises UserError that
    says what to write if samples are left over.
    """
    batch = samples_per_update(recipe.train.batch_size, world)
    if data.block > 1:
        return _shared_blocks(recipe, data, batch, world)
    if batch > world:
        share, rest = divmod(batch, world)
        if rest:
            each = f"{share} or {share + 1}"
            ways = f'{share * world} or {(share + 1) * world}, or "{share} per process"'
            raise UserError(
                "train.batch_size",
                f"{batch} over {world} processes",
                f"equally many samples on each, {each}",
                f"try train.batch_size={ways}",
            )
        return world, 1
    for active in range(min(batch, world), 1, -1):
        # What processes normalise together must have each sample equally often.
        whole = batch % active == 0 and (batch_norm(recipe) != "sync" or world % active == 0)
        if whole and _lacking(recipe, batch // active, active) is None:
            return active, 1
    return 1, 1


def _shared_blocks(recipe: Recipe, data: Dataset, batch: int, world: int) -> tuple[int, int]:
    """Return `divided` of P x K blocks: each process has whole ones, or all share each block, in parts of whole people.

    Then no more processes than people have samples.
    """
    blocks, rest = divmod(batch, data.block)
    asked = recipe.train.micro_batch or data.block
    if not rest and blocks % world == 0 and asked == data.block:
        return world, 1
    whole = f"train.batch_size={data.block * world} gives each process a whole block"
    if rest or asked != data.block:
        found = f"a batch of {batch} samples in micro-batches of {asked}"
        expected = f"whole blocks of {data.block}, P x K of data.sampler"
        raise UserError("train", found, expected, f"take micro_batch {data.block}; {whole}")
    found = f"{number_of(blocks, 'blocks')} of {data.block}, P x K of data.sampler, over {world} processes"
    if not data.part or not isinstance(recipe.task, ComparesSamples) or recipe.task.gather != "all":
        raise UserError(
            "train.batch_size",
            found,
            "whole blocks on each, for samples are compared on their own process",
            whole if not data.part else f"{whole}, and with task.gather=all processes share one",
        )
    people = data.block // data.part
    if people > world and people % world:
        expected = f"equally many of its {people} people on each"
        raise UserError("data.sampler", found, expected, f"take a multiple of {world} people; or {whole}")
    active = min(people, world)
    return active, active


def updates(recipe: Recipe, data: Dataset, world: int) -> tuple[int, int]:
    """Return the steps of an epoch and of the whole training.

    Raises UserError if a batch is larger than the data, or the warm-up longer than the training.
    """
    train, size = recipe.train, data.train.size
    batch = samples_per_update(train.batch_size, world)
    per_epoch = size // batch
    if per_epoch == 0:
        raise UserError("train.batch_size", f"{batch}, but the data has {size} samples", f"at most {size}")
    try:
        train.schedule.refuse_short(train.length, per_epoch, batch)
    except ValueError as error:
        raise UserError("train", f"with {number_of(per_epoch, 'steps')} per epoch, {error}") from None
    return per_epoch, train.length.steps(per_epoch, batch)


def batch_norm(recipe: Recipe) -> Literal["batch", "sync"] | None:
    """Return the samples that batch norms normalise over, in words; None without batch norm, or if unknown."""
    return recipe.task.batch_norm if isinstance(recipe.task, NormalisesBatch) else None


def _normalised(recipe: Recipe, micro: int, world: int) -> int | None:
    """Return over how many samples batch norms normalise; None without batch norm, or if unknown."""
    norm = batch_norm(recipe)
    return None if norm is None else micro * (world if norm == "sync" else 1)


def _lacking(recipe: Recipe, micro: int, world: int) -> int | None:
    """Return the number of samples that batch norms of the built network need, if they would see fewer; else None."""
    seen = _normalised(recipe, micro, world)
    least = recipe.task.batch_norm_least if isinstance(recipe.task, NormalisesBatch) else 1
    return least if seen is not None and seen < least else None


def refuse_few(recipe: Recipe, micro: int, batch: int, world: int) -> None:
    """Raise UserError if batch norm would see fewer samples at once than the built network needs."""
    if (least := _lacking(recipe, micro, world)) is not None:
        raise UserError(
            "train.micro_batch",
            f"{micro}, but batch norm needs {least} samples at once",
            f"{least} or more" + ("" if batch >= least * world else f", of a train.batch_size from {least * world}"),
            "group norm does not depend on the batch: task.norm.name=group",
        )


def halved(plan: Plan) -> Plan:
    """Return the plan with micro-batches of half the size, or of the largest divisor of a process's part below it."""
    micro = max(m for m in range(1, plan.micro_batch // 2 + 1) if plan.share % m == 0)
    return replace(plan, micro_batch=micro, accumulation=plan.share // micro)


def gates(recipe: Recipe, plan: Plan) -> dict[str, Gate]:
    """Return the gates of a recipe by name, in the order in which events of one step run."""
    cut = (plan.steps_per_epoch, plan.batch_size)
    return {
        "log": Gate(recipe.log.every, *cut),
        **{f"evaluate.{name}": Gate(e.every, *cut, e.budget) for name, e in recipe.evaluations.items()},
        "checkpoint": Gate(recipe.checkpoints.every, *cut),
        "safeguard": Safeguard(recipe.checkpoints.lose_at_most, *cut),
        "figures": Gate(recipe.log.figures, *cut),
    }


def evaluated(recipe: Recipe, data: Dataset) -> dict[str, Split]:
    """Return the split of each evaluation. Raises UserError if the data has none of that name."""
    splits = {}
    for name, evaluation in recipe.evaluations.items():
        word = evaluation.split or name
        if word not in data.evaluations:
            known = ", ".join(data.evaluations) or "none"
            raise UserError(f"evaluations.{name}", f"the data has no evaluation set {word!r}", f"one of: {known}")
        splits[name] = data.evaluations[word]
    return splits


def protocol_rules(splits: Mapping[str, Split]) -> dict[str, str]:
    """Return the rule of each evaluation whose protocol can follow several, in words."""
    rules = {name: split.protocol.rule for name, split in splits.items() if isinstance(split.protocol, Search)}
    return {name: rule for name, rule in rules.items() if rule}


def refuse_unfitted(recipe: Recipe, data: Dataset) -> None:
    """Raise UserError for a task that is fitted before training, to data whose training set is only read augmented."""
    task = recipe.task
    if isinstance(task, FitsBeforeTraining) and task.fits and "train" not in data.evaluations:
        found = f"{task.fits}, but the data does not offer its training set as the evaluation set `train`"
        raise UserError("task", found, "data of kind images")


def refuse_unheld(recipe: Recipe, plan: Plan) -> None:
    """Raise UserError for a metric of an evaluation whose interval is longer than the training."""
    times, _ = to_come(recipe, plan)
    for key, metric in recipe.named_metrics():
        every = recipe.evaluations[name := metric.partition("/")[0]].every
        if every is not None and not every.timed and not times[name]:
            found = f"{metric!r}, but evaluations.{name} runs every {every}, and the training has {plan.steps} steps"
            raise UserError(key, found, "an evaluation within the training", "lower its `every`, or set `at_end: true`")


def describe(recipe: Recipe, plan: Plan, splits: Mapping[str, Split], seconds: Mapping[str, float]) -> str:
    """Return the plan in words: length, batch sizes, and each evaluation with its schedule and estimated cost."""
    epochs = f"{plan.steps / plan.steps_per_epoch:g} epochs of {number_of(plan.steps_per_epoch, 'steps')}"
    processes = number_of(plan.active, "processes", "process")
    parts = f"{processes} x {number_of(plan.accumulation, 'micro-batches', 'micro-batch')} x {plan.micro_batch}"
    lines = [
        ("Length", f"{number_of(plan.steps, 'steps')} = {epochs}"),
        ("Batch", f"{number_of(plan.batch_size, 'samples')} = {parts}"),
    ]
    if plan.idle:
        idle = f"{plan.idle} of {plan.world} processes: a batch of {plan.batch_size} gives samples to {plan.active}"
        remedy = 'a larger train.batch_size, such as "1 per process", uses all but changes the training'
        lines.append(("Idle", f"{idle}; {remedy}"))
    if plan.parts > 1:
        shared = f"{plan.parts} processes share each block of {plan.micro_batch * plan.parts}"
        seen_by = f"batch norm, if any, sees the {number_of(plan.micro_batch, 'samples')} of its process"
        lines.append(("Blocks", f"{shared}: samples are compared across processes; {seen_by}"))
    seen = _normalised(recipe, plan.micro_batch, plan.active)
    if seen is not None and seen < plan.batch_size:
        found = f"batch norm sees {number_of(seen, 'samples')} at once, not the {plan.batch_size} of a step"
        lines.append(("Warning", f"{found}; more: train.micro_batch, norm: sync; as many in any case: norm: group"))
    lines += [("LR", text) for text in _rates(recipe, plan)]
    lines += [
        ("Evaluation", _evaluation(name, e, plan, splits[name].size, seconds.get(name, 0.0)))
        for name, e in recipe.evaluations.items()
    ]
    saves = recipe.checkpoints
    limit = f"; a killed run loses at most {saves.lose_at_most}" if saves.lose_at_most else ""
    lines.append(("Checkpoint", f"{f'every {saves.every}' if saves.every else 'at the end'}{limit}"))
    return "\n".join(plan_line(key, text) for key, text in lines)


def plan_line(key: str, text: str) -> str:
    """Return a line of the start plan: `Length      40 steps`."""
    return f"{key:12}{text}"


def _rates(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield how the learning rate follows from the batch size, and from the scores, where it does."""
    if (rule := recipe.optim.lr_rule) is not None:
        ratio = f"({plan.batch_size} / {rule.batch_size})" + ("" if rule.name == "linear" else "^0.5")
        rate = optimizer.rate(recipe.optim, plan.batch_size)
        yield f"{rate:.4g} = {recipe.optim.lr:.4g} x {ratio}, by the {rule.name} scaling rule"
    if (curve := recipe.train.schedule).metric:
        least = f", down to {curve.floor:g} of the full learning rate" if curve.floor else ""
        waits = number_of(curve.patience or 0, "evaluations")
        yield f"x {curve.gamma:g} each time {curve.metric} has not improved for {waits}{least}"


def _evaluation(name: str, e: Evaluation, plan: Plan, size: int, cost: float) -> str:
    """Return when an evaluation is run, and what it costs."""
    when = [word for word, on in (("at the start", e.at_start), ("at the end", e.at_end)) if on]
    if e.every is not None:
        when.insert(0, f"every {e.every}")
    times = e.at_start + _times(e, plan)
    limit = f", in at most {100 * e.budget:g} % of the time" if e.budget else ""
    total = f", about {cost:.2g} s each, {times} planned = {times * cost:.2g} s" if cost else ""
    return f"{name}: {', '.join(when) or 'never'}{limit}; {number_of(size, 'samples')}{total}"


def _times(e: Evaluation | Checkpoints, plan: Plan) -> int:
    """Return how often an evaluation is run, or a checkpoint written; by the clock: only at the end."""
    if e.every is None or e.every.timed:
        return int(e.at_end)
    length = e.every.steps(plan.steps_per_epoch, plan.batch_size)
    return plan.steps // length + (e.at_end and plan.steps % length != 0)


def to_come(recipe: Recipe, plan: Plan) -> tuple[dict[str, int], int]:
    """Return how often each evaluation will run, and how many checkpoints will be written.

    If the schedule depends on the clock, only the event at the end counts, because the number of others is unknown.
    """
    return {name: _times(e, plan) for name, e in recipe.evaluations.items()}, _times(recipe.checkpoints, plan)

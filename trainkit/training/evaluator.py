"""Evaluate a network on a split, and run the evaluations of a recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

from trainkit.config import metric_table
from trainkit.config.schema import Recipe
from trainkit.data.loader import stream as loading
from trainkit.distributed.runtime import Runtime
from trainkit.distributed.stop_signal import Stop, Stopped
from trainkit.errors import UserError
from trainkit.interfaces import Columns, Dataset, FitsBeforeTraining, Rows, Scores, Split, Task
from trainkit.training import best
from trainkit.training import plan as planning
from trainkit.training.checkpointer import Checkpointer
from trainkit.training.model import Model
from trainkit.training.out_of_memory import MicroBatching
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState

_PROBE_BATCH = 64
"""Samples of a forward pass before training, per process."""


@torch.no_grad()
def evaluate(
    task: Task,
    net: nn.Module,
    split: Split,
    batch_size: int,
    runtime: Runtime,
    stop: Stop | None = None,
) -> Scores:
    """Evaluate a network on a split. Every rank takes part, and every sample counts exactly once.

    Rows are gathered with the sample's index, and padding is dropped. Raises RuntimeError unless there is exactly one
    row for each sample, and `Stopped`, on all ranks, if a rank gets a stop signal.
    """

    rows, samples = predict(task, net, split, batch_size, runtime, stop := stop or Stop())

    def score() -> Scores:
        with stop.at_once():
            return task.score(rows, split)

    scores = runtime.on_main(score, stop)
    scores.samples = samples
    return scores


@torch.no_grad()
def predict(
    task: Task, net: nn.Module, split: Split, batch_size: int, runtime: Runtime, stop: Stop
) -> tuple[Rows, int]:
    """Return what a network predicts for every sample of a split, in order, and how many there are, on every rank.

    Raises as `evaluate` does.
    """

    def forward(rows: np.ndarray, real: np.ndarray) -> Rows:
        batch = split.on_device(runtime.to_device(split.fetch(rows, epoch=0)))
        index = torch.where(torch.as_tensor(real, device=runtime.device), batch["index"], -1)
        runtime.begin_batch()
        with runtime.accelerator.autocast():
            predicted = task.predict(net, batch)
        return {"index": index, **{key: value.float() for key, value in predicted.items()}}

    was_training = net.training
    net.eval()
    try:
        kept, ends, asked = list[Rows](), False, runtime.any_async(stop.told)
        for rows, real in loading.every_sample(split, batch_size, runtime.world, runtime.rank):
            kept.append(forward(rows, real))
            # Of several processes read a batch late, so that none waits for the answer, and all leave at the same one.
            if ends := asked() or (runtime.world == 1 and stop.told):
                break
            asked = runtime.any_async(stop.told)
        if ends or asked():
            raise Stopped
        own = loading.stack(kept)
    finally:
        net.train(was_training)
        runtime.reshard(net)
    return _ordered({key: runtime.gather(value) for key, value in own.items()}, split)


def _ordered(gathered: Rows, split: Split) -> tuple[Rows, int]:
    """Return rows by sample, without padding, and how many; raises RuntimeError unless each sample has one."""
    index = gathered.pop("index")
    order = index.argsort()[int((index < 0).sum()) :]
    if not torch.equal(index[order].cpu(), torch.arange(split.size)):
        raise RuntimeError(
            f"{split.name}: {len(index[order].unique())} samples were evaluated, the set has {split.size}"
        )
    return {key: value[order].cpu() for key, value in gathered.items()}, len(order)


@torch.no_grad()
def trial(task: Task, net: nn.Module, split: Split, batch_size: int, runtime: Runtime) -> float:
    """Return the seconds that an evaluation will take, measured on its first batch, read twice.

    Errors in an evaluation then show before training, and not after the first epoch.
    """
    began, was_training = time.perf_counter(), net.training
    net.eval()
    batches = list(loading.every_sample(split, batch_size, runtime.world, runtime.rank))
    for _ in range(2):
        began = time.perf_counter()
        batch = split.on_device(runtime.to_device(split.fetch(batches[0][0], epoch=0)))
        runtime.begin_batch()
        with runtime.accelerator.autocast():
            task.predict(net, batch)
        runtime.synchronize()
    net.train(was_training)
    runtime.reshard(net)
    return (time.perf_counter() - began) * len(batches)


class Evaluator:
    """Run the evaluations of the recipe, log their scores, and save a checkpoint if it is among the best."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        model: Model,
        runtime: Runtime,
        logger: RunLogger,
        stop: Stop,
        *,
        state: TrainState,
        checkpoints: Checkpointer,
        micro_batching: MicroBatching,
    ):
        self._recipe, self._data, self._model, self._state = recipe, data, model, state
        self._checkpoints, self._micro_batching = checkpoints, micro_batching
        self._runtime, self._logger, self._stop = runtime, logger, stop
        self.splits = planning.evaluated(recipe, data)
        self.costs: dict[str, float] = {}
        """Seconds that each evaluation will take, as far as its first batch tells."""
        self.fitted_s = 0.0
        """Seconds that `fit_before_training` took, in this process."""
        self.at: dict[str, int] = {}
        """The step at which each evaluation was run last, in this process."""
        self.curves: dict[str, Columns] = {}
        """Curves of the last evaluation of each network, by evaluation and network."""
        self.rows: dict[str, Columns] = {}
        """Per-sample columns of the last evaluations, by `best.kept_rows`."""
        self.leading: tuple[int, Columns] | None = None
        """Step and per-sample columns of the evaluation that leads, where it was run in this process."""

    def measure_costs(self) -> dict[str, float]:
        """Return the seconds that each evaluation will take, from its first batch; also kept as `costs`."""
        task, bare, runtime = self._recipe.task, self._model.bare, self._runtime

        def timed(split: Split) -> Callable[[int], float]:
            return lambda size: trial(task, bare, split, size, runtime)

        costs = {name: self._micro_batching.evaluate(name, bare, timed(split)) for name, split in self.splits.items()}
        times = 1 if self._model.ema is None else 2
        self.costs = {name: seconds * times for name, seconds in runtime.broadcast(costs).items()}
        return self.costs

    def score(self, module: nn.Module, name: str) -> Scores:
        """Score a network by an evaluation of the recipe, in as large batches as memory suffices for."""
        task, split, runtime, stop = self._recipe.task, self.splits[name], self._runtime, self._stop
        return self._micro_batching.evaluate(
            name, module, lambda size: evaluate(task, module, split, size, runtime, stop)
        )

    def fit_before_training(self) -> None:
        """Fit what the task fits to the training set before the first step, such as a linear probe."""
        task, runtime = self._recipe.task, self._runtime
        if not isinstance(task, FitsBeforeTraining) or not task.fits:
            return
        planning.refuse_unfitted(self._recipe, self._data)
        if runtime.sharded:
            raise UserError("task", f"{task.fits} over sharded parameters", "a launch config without sharding")
        began = time.perf_counter()
        train, bare = self._data.evaluations["train"], self._model.bare
        rows, _ = predict(task, bare, train, _PROBE_BATCH, runtime, self._stop)
        self._model.set_parameters(runtime.on_main(lambda: task.fit(bare, rows, train), self._stop))
        self.fitted_s = runtime.broadcast(time.perf_counter() - began)

    def begin_training(self) -> None:
        """Let the task change what it fitted, before the first step."""
        task = self._recipe.task
        if isinstance(task, FitsBeforeTraining) and task.fits and not self._state.step:
            task.begin_training(self._model.bare)
            self._model.restart_average()

    def score_frozen(self) -> None:
        """Score frozen networks on the first evaluation. Raises UserError where one that is trusted only guesses."""
        networks = self._model.networks
        for name, module in networks.frozen.items() if self.splits else ():
            self._logger.clock.to("eval")
            first = next(iter(self.splits))
            with self._runtime.uncompiled():
                scores = self.score(module, first)
            self._logger.tracker.log(0, {f"{name}/{first}/{key}": value for key, value in scores.metrics.items()})
            self.curves.setdefault(first, {})[name] = scores.curves
            if name in networks.trusted:
                best.refuse_chance(name, first, scores, metric_table.declared_by(self._recipe.task))
                if not scores.chance:
                    self._logger.say(f"{name}: {first} is too small to tell it from guessing")

    def run(self, names: Iterable[str]) -> list[str]:
        """Run evaluations, log their scores, and save a checkpoint if one is among the best so far.

        Told to stop, it leaves off, and returns the names of those that are yet to be run.
        """
        better, names = False, list(names)
        for number, name in enumerate(names):
            began = time.perf_counter()
            try:
                scored = self._score_all(name)
            except Stopped:
                return names[number:]
            better = self._enter(name, scored, began) or better
        if better:  # after the last of them: a run resumed from here does not run them again
            self._checkpoints.save(again=True)
        return []

    def _score_all(self, name: str) -> dict[str, Scores]:
        """Score the weights as they are and, where there is one, their average; by the title of the scores."""
        self._logger.clock.to("eval")
        bare, ema = self._model.bare, self._model.ema
        scored = {name: self.score(bare, name)}
        if ema is not None:
            self._checkpoints.wait_for_copies("eval")
            with ema.swapped(bare):
                scored[f"{name}/ema"] = self.score(bare, name)
        return scored

    def _enter(self, name: str, scored: dict[str, Scores], began: float) -> bool:
        """Log scores and enter them in the list of the best; returns whether they are among those."""
        state, logger = self._state, self._logger
        logger.clock.to("log")
        metrics = {f"{title}/{key}": v for title, scores in scored.items() for key, v in scores.metrics.items()}
        seconds, elapsed = self._runtime.broadcast((time.perf_counter() - began, state.total_elapsed(logger.clock)))
        state.events.gates[f"evaluate.{name}"].took(seconds, elapsed)
        leads, entered = False, False
        if state.entered.get(name) != state.step:  # else that was before the run was interrupted
            reduced = state.plateau["reduced"]
            leads, entered = best.enter(state, self._recipe, name, metrics)
            if state.plateau["reduced"] > reduced:
                logger.lr_reduced(state.step, state.plateau["reduced"])
            state.entered[name] = state.step
        task = self._recipe.task
        if not state.step and isinstance(task, FitsBeforeTraining) and task.fits:
            logger.tracker.log(0, {f"{task.fits}/{key}": v for key, v in metrics.items() if "/ema/" not in key})
        if leads and self._recipe.best is not None:
            self.leading = (state.step, scored[self._recipe.best.metric.rpartition("/")[0]].rows)
        logger.scored(state.step, name, scored, metrics, seconds, leads)
        self.at[name] = state.step
        state.final.update(metrics)
        self.rows |= best.kept_rows(self._recipe, name, scored)
        titles = {name: "this run", f"{name}/ema": "EMA weights"}
        self.curves.setdefault(name, {}).update({titles[t]: scores.curves for t, scores in scored.items()})
        return entered

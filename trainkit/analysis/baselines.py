"""Compare a training with its trivial baselines: predictions from labels and pixels alone (`Task.baselines`).

They are evaluated on the evaluation of the primary metric, after training, on rank 0 and on the CPU, so that no step
waits for them. A baseline that exceeds `BUDGET_S` is fitted to a part of the training set, or is left out; the report
says which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainkit import rng
from trainkit.analysis import frozen_baseline
from trainkit.config import metric_table
from trainkit.config.schema import Recipe
from trainkit.data.loader import stream
from trainkit.distributed.stop_signal import Stop
from trainkit.interfaces import Baseline, Batch, Columns, HasBaselines, Rows, Scores, Split
from trainkit.metrics import bootstrap
from trainkit.metrics.score import headline
from trainkit.tracking import markdown
from trainkit.training.evaluator import Evaluator
from trainkit.training.outcome import Outcome
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState
from trainkit.training.trainer import Trainer

BUDGET_S = 30.0
"""Seconds for the baselines of an evaluation: a quarter to read training samples, the rest to
predict and evaluate."""
MOST_BYTES = 2e9
"""Largest size of the predictions kept in memory; pixels as embeddings are large."""
_READING = 0.25
_AT_ONCE = 256
_DRAWS, _FEWEST, _DRAWN = 500, 100, 5_000_000
"""Bootstrap resamples, at least, and most rows in all: 500 resamples of 2,000 images take 0.26 s of CPU time."""


@dataclass
class Scored:
    """Scores of a baseline."""

    name: str
    metrics: dict[str, float]
    rows: dict[str, np.ndarray]
    """Per-sample columns, as a run saves them of its evaluations."""
    learned: str = ""
    """`2,000 of 10,000 training samples`, where the time was too short for all of them."""

    @property
    def title(self) -> str:
        """Name, and the number of training samples it was fitted to if not all."""
        return f"{self.name}, over {self.learned}" if self.learned else self.name


@dataclass
class Comparison:
    """The primary metric of a run and those of its baselines."""

    evaluation: str
    """Name of the evaluation of the primary metric."""
    metric: str
    """The primary metric, by its full name: `val/ema/top1`."""
    scored: list[Scored] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Baselines that were not computed, with the reasons."""
    warning: str = ""
    """Set where the primary metric is not significantly better than the best baseline: difference and advice."""

    @property
    def score(self) -> str:
        """The primary metric without its evaluation: `top1`."""
        return self.metric.rpartition("/")[2]


def compare(recipe: Recipe, trainer: Trainer, stop: Stop) -> Comparison | None:
    """Evaluate the baselines of a finished training, and test its primary metric against the best of them.

    None where the recipe disables it, and where the task or the evaluation has none.
    Errors are listed in `left_out` and not raised, since training is done. A signal to stop leaves out the rest.
    """
    task, splits = recipe.task, trainer.evaluator.splits
    found = _primary(recipe, splits) if recipe.log.baseline else None
    if found is None or not isinstance(task, HasBaselines):
        return None
    split, train = splits[found.evaluation], trainer.data.evaluations.get("train")
    batch_size = min(recipe.evaluations[found.evaluation].batch_size, _AT_ONCE)
    budget = _Budget(time.monotonic() + BUDGET_S, batch_size, stop)
    with stop.later():
        several = list(task.baselines(split, train))
        try:
            several += frozen_baseline.of(recipe, split, several)
        except Exception as error:
            found.left_out.append(f"frozen network: {type(error).__name__}: {error}"[:300])
        for baseline in several:
            try:
                found.scored.append(compute(task, baseline, split, train, budget))
            except _LeftOut as reason:
                found.left_out.append(f"{baseline.name}: {reason}")
            except Exception as error:
                found.left_out.append(f"{baseline.name}: {type(error).__name__}: {error}"[:300])
        _judge(found, recipe, trainer.evaluator, trainer.state)
    return found


# ---- Scores


class _LeftOut(Exception):
    """A baseline is not computed; the message is the reason."""


@dataclass
class _Budget:
    """Time budget of the baselines, and the batch size for reading samples."""

    ends: float
    """End of the budget, by `time.monotonic`."""
    batch_size: int
    stop: Stop

    def left(self) -> float:
        """Return the seconds left. Raises `_LeftOut` after a signal to stop."""
        if self.stop.told:
            raise _LeftOut("not computed: the run received a signal to stop")
        return self.ends - time.monotonic()


@torch.no_grad()
def compute(task: Any, baseline: Baseline, split: Split, train: Split | None, budget: _Budget) -> Scored:
    """Fit a baseline, predict and evaluate. Raises `_LeftOut` where that takes too long."""
    reading = _Training(baseline, train, budget)
    predict, rows = baseline.fit(iter(reading)), []
    began = time.monotonic()
    for number, (indices, real) in enumerate(stream.every_sample(split, budget.batch_size, 1, 0), start=1):
        predicted = predict(_samples(baseline, split, indices))
        if number == 1 and (size := _bytes(predicted) * split.size // len(indices)) > MOST_BYTES:
            raise _LeftOut(f"not computed: predictions for {split.name} take {size / 1e9:.1f} GB of memory")
        rows.append({name: values[torch.from_numpy(real)].float() for name, values in predicted.items()})
        whole = (time.monotonic() - began) / number * math.ceil(split.size / len(indices))
        if number > 1 and began + whole - time.monotonic() > budget.left():
            raise _LeftOut(f"not computed within {BUDGET_S:.0f} s: predicting {split.name} takes about {whole:.0f} s")
    found: Scores = task.score(stream.stack(rows), split)
    metrics = {name: value for name, value in found.metrics.items() if name not in baseline.lacks}
    return Scored(baseline.name, metrics, columns(found.rows), reading.said())


def _bytes(rows: Rows) -> int:
    return sum(4 * values.numel() for values in rows.values())


class _Training:
    """Training samples without augmentation, in a fixed order, until their part of the budget is spent."""

    def __init__(self, baseline: Baseline, train: Split | None, budget: _Budget):
        self._baseline, self._train, self._budget, self._read = baseline, train, budget, 0
        self._stops = 0.0

    def __iter__(self) -> Iterator[Batch]:
        train = self._train
        if train is None:
            return
        self._stops = time.monotonic() + _READING * self._budget.left()
        step = min(self._budget.batch_size, train.at_once or train.size)
        order = rng.permutation(0, 0, train.size)
        for at in range(0, train.size, step):
            if self._read and (self._budget.left() <= 0 or time.monotonic() > self._stops):
                return
            batch = _samples(self._baseline, train, order[at : at + step])
            self._read += len(batch["index"])
            yield batch

    def said(self) -> str:
        """Return how many samples were read, where it was not all of them."""
        total = 0 if self._train is None else self._train.size
        return f"{self._read:,} of {total:,} training samples" if 0 < self._read < total else ""


def _samples(baseline: Baseline, split: Split, indices: np.ndarray) -> Batch:
    if baseline.sees == "index":
        return {"index": torch.from_numpy(indices)}
    batch = split.fetch(indices, epoch=0)
    return batch if baseline.sees == "fetched" else split.on_device(batch)


def columns(rows: Columns) -> dict[str, np.ndarray]:
    """Return the per-sample columns from which metrics are computed, as arrays: numbers, or objects."""
    plain = {name: np.asarray(values) for name, values in rows.items() if name not in bootstrap.NEVER_READ}
    return {name: own if own.dtype.kind in "fiub" else own.astype(object) for name, own in plain.items()}


# ---- Comparison with the primary metric


def _primary(recipe: Recipe, splits: Mapping[str, Split]) -> Comparison | None:
    """Return the metric of the recipe's `best`, else the first headline metric of the first evaluation."""
    if recipe.best is not None:
        head = recipe.best.metric.rpartition("/")[0]
        name = head.removesuffix("/ema")
        return Comparison(name, recipe.best.metric) if name in splits else None
    names = ((name, headline(split.protocol)) for name, split in splits.items())
    return next((Comparison(name, f"{name}/{scores[0]}") for name, scores in names if scores), None)


def _judge(found: Comparison, recipe: Recipe, evaluator: Evaluator, state: TrainState) -> None:
    """Sort baselines by the primary metric, best first; warn where the run is not significantly better."""
    less = recipe.best.lower if recipe.best else metric_table.is_lower(found.metric)
    sign = -1.0 if less else 1.0

    def rank(one: Scored) -> float:
        value = sign * one.metrics.get(found.score, math.nan)
        return value if math.isfinite(value) else -math.inf

    found.scored.sort(key=rank, reverse=True)
    best = evaluator.leading if recipe.best is not None else None
    if recipe.best is None:
        value, rows = state.final.get(found.metric, math.nan), evaluator.rows.get(found.evaluation)
    else:
        value = state.best[0]["value"] if state.best else math.nan
        rows = best[1] if best is not None and state.best and best[0] == state.best[0]["step"] else None
    if not found.scored or not math.isfinite(value) or not math.isfinite(rank(found.scored[0])):
        return
    other = found.scored[0]
    gap = value - other.metrics[found.score]
    draws = max(_FEWEST, min(_DRAWS, _DRAWN // max(1, len(next(iter(other.rows.values()), ())))))
    interval = bootstrap.difference(other.rows, None if rows is None else columns(rows), found.score, gap, draws)
    if sign * gap > 0 and (interval is None or interval.apart == sign):
        return
    how, side = "not" if sign * gap <= 0 else "not significantly", "below" if less else "above"
    ends = "" if interval is None else f", 95 % CI of the difference {interval.low:+.2g} to {interval.high:+.2g}"
    found.warning = (
        f"{found.metric} {value:.4g} is {how} {side} the trivial baseline {other.metrics[found.score]:.4g} "
        f"({other.title}{ends}): {_remedy(recipe)}"
    )


def _remedy(recipe: Recipe) -> str:
    """Return what may help a run that is not better than a trivial baseline."""
    if not recipe.train.length.amount:
        return "train more than the last layer (trainkit cp --start fine-tune)"
    longer = f"train longer (train.length is {recipe.train.length})"
    return longer if "net" in recipe.task.required_weights() else f"{longer}, or start from pretrained weights"


def log(found: Comparison, outcome: Outcome, logger: RunLogger) -> None:
    """Log the best baseline as a metric, all of them as a table, and put a warning before the verdict."""
    tracker = logger.tracker
    if found.left_out:
        logger.say("\n".join(f"trivial baseline, {reason}" for reason in found.left_out))
    if found.warning:
        outcome.page = f"{markdown.plain(found.warning)}  \n\n{outcome.page}"
        tracker.tags({"trainkit.verdict": f"baseline: {found.warning}", "mlflow.note.content": outcome.page})
    if not found.scored:
        return
    best = found.scored[0].metrics
    if found.score in best:
        tracker.log(outcome.step, {f"baseline/{found.metric}": best[found.score]})
    names = list(dict.fromkeys(name for one in found.scored for name in one.metrics))
    table = {"baseline": [one.title for one in found.scored]}
    tracker.table("tables/baselines.csv", table | {n: [one.metrics.get(n) for one in found.scored] for n in names})

"""Keep the list of the best evaluations, count patience, and refuse networks at chance level."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from trainkit.checkpoint import storage, verification
from trainkit.config import metric_table
from trainkit.config.metric_table import Declared
from trainkit.config.schedule import Curve
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, few
from trainkit.interfaces import Columns, Scores
from trainkit.training.state import Plateau, TrainState

_log = logging.getLogger("trainkit")


def refuse_unmeasured(recipe: Recipe, evaluation: str, metrics: Collection[str]) -> None:
    """Raise UserError if the recipe names a metric of an evaluation that is not among its full names."""
    for key, metric in named_of(recipe, evaluation):
        if metric not in metrics:
            near = difflib.get_close_matches(metric, metrics, n=1)
            known = near[0] if near else ", ".join(metrics)
            raise UserError(key, f"{metric!r}, which is not measured", known)


def named_of(recipe: Recipe, evaluation: str) -> list[tuple[str, str]]:
    """Return the keys of the recipe that name a metric of an evaluation, each with its full name."""
    return [(key, metric) for key, metric in recipe.named_metrics() if metric.startswith(f"{evaluation}/")]


def enter(state: TrainState, recipe: Recipe, evaluation: str, metrics: Mapping[str, float]) -> tuple[bool, bool]:
    """Add an evaluation to the list of the best and to the patience count; return whether it leads and is listed.

    Raises UserError if the evaluation lacks a metric that the recipe names.
    """
    refuse_unmeasured(recipe, evaluation, metrics)
    stop, best, curve = recipe.stop_when, recipe.best, recipe.train.schedule
    if stop is not None and stop.metric in metrics:
        value, first = metrics[stop.metric], state.record is None and math.isfinite(metrics[stop.metric])
        if first or (state.record is not None and _better(value, state.record, stop.lower, stop.min_delta)):
            state.record, state.waited = value, 0
        else:
            state.waited += 1
    if curve.metric is not None and curve.metric in metrics:
        cut = state.events.gates[f"evaluate.{evaluation}"]
        if state.step >= curve.warm(cut.steps_per_epoch, cut.batch_size):
            count_plateau(state.plateau, curve, metrics[curve.metric])
    if best is None or not math.isfinite(metrics.get(best.metric, math.nan)):
        return False, False
    value = metrics[best.metric]
    leads = not state.best or _better(value, state.best[0]["value"], best.lower)
    weights = "ema" if best.metric.startswith(f"{evaluation}/ema/") else "model"
    state.best.append({"value": value, "step": state.step, "weights": weights})
    state.best.sort(key=lambda record: (record["value"] if best.lower else -record["value"], record["step"]))
    del state.best[max(1, recipe.checkpoints.keep_best) :]
    return leads, any(record["step"] == state.step for record in state.best)


def count_plateau(plateau: Plateau, curve: Curve, value: float) -> None:
    """Add a score to the counters of a `plateau` schedule, and reduce the learning rate if it is due."""
    if (math.isfinite(value) and plateau["best"] is None) or (
        plateau["best"] is not None and _better(value, plateau["best"], curve.lower, curve.min_delta)
    ):
        plateau.update(best=value, waited=0)
    elif not plateau["cooling"]:
        plateau["waited"] += 1
    plateau["cooling"] = max(0, plateau["cooling"] - 1)
    if plateau["waited"] == curve.patience:
        plateau["waited"] = 0
        if curve.gamma ** plateau["reduced"] > curve.floor:
            plateau.update(cooling=curve.cooldown, reduced=plateau["reduced"] + 1)


def kept_rows(recipe: Recipe, evaluation: str, scored: Mapping[str, Scores]) -> dict[str, Columns]:
    """Return the rows of an evaluation that are kept, by the first word of their file name.

    These are the rows of the raw weights, and those of the EMA weights if they select the best checkpoint.
    """
    best = recipe.best.metric if recipe.best else ""
    titles = [title for title in scored if title == evaluation or best.startswith(f"{title}/")]
    return {title.replace("/", "_"): scored[title].rows for title in titles}


def refuse_chance(name: str, evaluation: str, scores: Scores, declared: Declared) -> None:
    """End the run if a network that the training relies on is not better than chance level."""
    for metric, chance in scores.chance.items():
        lower = metric_table.is_lower(f"{evaluation}/{metric}", declared)
        if not _better(scores.metrics[metric], chance, lower):
            raise UserError(
                f"task.{name}",
                f"{evaluation}/{metric} is {scores.metrics[metric]:.4f}, no better than guessing",
                f"{'below' if lower else 'above'} {chance:.4f}",
                "its weights are untrained, are for another network, or expect other images",
            )


def _better(value: float, than: float, lower: bool, by: float = 0.0) -> bool:
    return math.isfinite(value) and (value < than - by if lower else value > than + by)


def best_weights(run: Path) -> Path:
    """Return the weights of a run's best checkpoint, or of its last if no evaluation selected a best.

    These are the EMA weights if the recipe's best metric is evaluated on them. Files are verified first: if the best
    checkpoint is damaged or missing, a warning names the checkpoint used instead.
    """
    newest, refused = storage.newest_valid(run / "checkpoints")
    if newest is None:
        why = f": {refused[0]}" if refused else ""
        raise UserError(
            str(run), f"holds no checkpoint{' that is whole' * bool(refused)}{why}", remedy="train it again"
        )
    best = storage.state_of(newest)["best"]
    if strange := {record.get("weights", "model") for record in best} - {"model", "ema"}:
        raise UserError(str(newest / storage.STATE), f"weights {few(strange)}"[:200], "model or ema")
    for record in best:
        file = run / "checkpoints" / f"step-{record['step']:09d}" / f"{record.get('weights', 'model')}.safetensors"
        try:
            if not file.parent.is_dir():
                raise UserError(str(file.parent), "is missing")  # it could not be written, or was deleted
            verification.check_file(file)
            return file
        except UserError as error:
            refused.append(f"{error.where}: {error.found}")
    file = newest / f"{best[0].get('weights', 'model') if best else 'model'}.safetensors"
    if refused:
        _log.warning("left aside: %s; %s of %s takes its place", "; ".join(refused), file.name, newest.name)
    return file

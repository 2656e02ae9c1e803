"""Check the modes of a recipe against the directions of its metrics, in the table and as the task declares them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from trainkit.config import metric_table
from trainkit.config.metric_table import Declared
from trainkit.config.schema import Recipe
from trainkit.config.yaml_reader import KeyPath, Problem, Source, Tree, dotted


def lower_is_better(metric: str, recipe: Mapping[str, Tree], declared: Declared) -> bool | None:
    """Return whether lower values of a metric are better, for a run with a stored recipe; None where nobody knows.

    `declared` are the directions of its task. Of a metric without any, the mode in the recipe counts.
    """
    if (known := metric_table.mode(metric, declared)) is not None:
        return known == "min"
    train = recipe.get("train")
    blocks = recipe.get("best"), recipe.get("stop_when"), train.get("schedule") if isinstance(train, dict) else None
    modes = [block.get("mode") for block in blocks if isinstance(block, dict) and block.get("metric") == metric]
    return modes[0] == "min" if modes else None


def problems(recipe: Recipe, source: Source) -> Iterator[Problem]:
    """Yield the errors in directions, modes and evaluations of the metrics of a recipe that was read from `source`."""
    declared, known = metric_table.declared_by(recipe.task), set()

    def problem(path: KeyPath, found: str, expected: str, remedy: str, nearest: str = "") -> Problem:
        about = {"found": found, "expected": expected, "nearest": nearest, "remedy": remedy}
        return Problem(dotted(path), **about, **source.at(path))

    def unknown(path: KeyPath, metric: str, remedy: str) -> Problem:
        head, _, name = metric.rpartition("/")
        near = [f"{head}/{other}" for other in difflib.get_close_matches(name, metric_table.names(), 1, 0.75)]
        return problem(path, metric, "a metric whose direction is known", remedy, "".join(near))

    for pattern, word in declared.items():
        ours, said = metric_table.direction(pattern), f"`directions` of the task has {word!r} for {pattern}"
        if word not in ("higher", "lower"):
            yield problem(("task",), said, "higher or lower", "change the plug-in")
        elif ours not in (None, "none", word):
            yield problem(("task",), said, f"{ours}, as in other tasks", "give its metric another name")
    for path, metric, rule in recipe.rules():
        if rule.mode is not None and rule.lower != (rule.mode == "min"):
            right, word = ("max", "higher") if rule.mode == "min" else ("min", "lower")
            yield problem((*path, "mode"), rule.mode, f"{right}: {word} {metric} is better", "leave mode out")
        known |= {metric} if rule.mode is not None else set()
        if rule.mode is None:
            yield unknown((*path, "metric"), metric, f"set {dotted((*path, 'mode'))} to max or min")
    for key, metric in recipe.named_metrics():
        evaluation = recipe.evaluations[name := metric.partition("/")[0]]
        path = tuple(key.split("."))
        if evaluation.every is None and key == "stop_when.metric":
            yield problem(
                path, metric, f"an evaluation during the training, but evaluations.{name} has no `every`", "set it"
            )
        elif evaluation.every is None and not evaluation.at_end:
            expected = f"an evaluation after a step, but evaluations.{name} has neither `every` nor `at_end`"
            yield problem(path, metric, expected, "set one of them")

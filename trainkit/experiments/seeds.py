"""`trainkit repeat`: a recipe trained with several seeds, and how far its scores come out apart.

Each seed is a run of its own, the one that `seed=K` would start, beneath a run above that gets of every final score the
mean, the standard deviation and a 95 % interval of the mean (`interval`). Knows nothing of what is learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.config.run_request import Order, load
from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.experiments import group
from trainkit.experiments.group import Child, Family, Parent, child_of, final_scores
from trainkit.metrics import significance
from trainkit.text_table import aligned, chosen, numbers
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store


def repeat(order: Order, children: Sequence[Child], machine: Any, store: Store, train: group.Train) -> str:
    """Train every seed that has no finished run, and sum them up in a run above. Returns its status.

    Raises UserError for what the user can mend; the seeds that have finished by then are used by the next attempt.
    """
    first, digests = children[0].recipe, {}
    keys = [group.key(child, digests) for child in children]
    digest = group.fingerprint(children)
    whole = Family(order, first, "seeds", "repetition", len(children), "seeds", ("seed",), digest)
    drawn = len(set(digests.values())) > 1
    with group.above(whole, machine, store, train) as parent:
        runs = parent.bring_all(children, keys)
        if runs is None:
            return "KILLED"
        machine.lead(lambda: _conclude(first, children, runs, parent, drawn))
    return "FINISHED"


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Ends of Student's t-interval of the mean, over the values that there are; two NaN of fewer than two.

    Mean +- t * std / sqrt(n), t the quantile of n - 1 degrees of freedom. It supposes that the score of a seed, drawn
    anew, is normally distributed, which few seeds cannot show.
    """
    found = group.known(values)
    if len(found) < 2:
        return math.nan, math.nan
    half = significance.t_quantile(len(found) - 1, level) * group.std(found) / math.sqrt(len(found))
    return group.mean(found) - half, group.mean(found) + half


def _conclude(
    recipe: Recipe, children: Sequence[Child], runs: Sequence[RunFolder], parent: Parent, drawn: bool
) -> None:
    """Sum the seeds up in the run above and in the terminal."""
    values, step = final_scores(runs)
    # The ends of a run's own interval say nothing beside those of other seeds.
    names = [name for name in values if not name.endswith(("_low", "_high"))]
    ends = {name: interval(values[name]) for name in names}
    scores: dict[str, float] = {}
    for name in names:
        scores[f"final/{name}"] = group.mean(values[name])
        if not name.startswith(("speed/", "time/")):
            scores[f"std/{name}"] = group.std(values[name])
            scores |= dict(zip((f"seeds/{name}_low", f"seeds/{name}_high"), ends[name], strict=True))
    parent.tracker.log(step, scores)
    # The page shows the first few rows and columns.
    lead = recipe.best.metric.partition("/")[0] if recipe.best else ""
    names.sort(key=lambda name: not name.startswith(f"{lead}/"))
    columns: dict[str, Any] = {"score": names}
    columns |= {"mean": [group.mean(values[name]) for name in names]}
    columns |= {"std": [group.std(values[name]) for name in names]}
    columns |= {key: [ends[name][k] for name in names] for k, key in enumerate(("low", "high"))}
    for k, child in enumerate(children):
        columns[child.title.replace(" ", "_")] = [values[name][k] for name in names]
    parent.tracker.table("tables/seeds.csv", columns)
    text = describe(recipe, values, {c.title: run.name for c, run in zip(children, runs, strict=True)})
    if drawn:
        text += "\nThe data differs between the seeds: one that draws what is held out is scored on other samples.\n"
    parent.conclude(text)


def describe(recipe: Recipe, values: Mapping[str, Sequence[float]], runs: Mapping[str, str]) -> str:
    """The final scores of all seeds as a table for each evaluation, and the run of each seed."""
    lines = [f"{recipe.name}, {len(runs)} seeds", ""]
    for evaluation in recipe.evaluations:
        shown, more = chosen(list(values), evaluation)
        if not shown:
            continue
        table = [[evaluation, *runs, "mean", "std", "95 % of the mean"]]
        for name in shown:
            ends = interval(values[name])
            mean, std, low, high = numbers([group.mean(values[name]), group.std(values[name]), *ends])
            span = "-" if math.isnan(ends[0]) else f"{low} to {high}"
            table.append([name.removeprefix(f"{evaluation}/"), *numbers(values[name]), mean, std, span])
        lines += aligned(table)
        if more:
            lines.append(f"and {more} more in MLflow")
        lines.append("")
    return "\n".join([*lines, *(f"{title}  {name}" for title, name in runs.items()), ""])


def repeated(order: Order) -> list[Child]:
    """An order with `order.seeds` seeds, the first that of the recipe. Raises UserError for what has no spread."""
    recipe = load(order)
    if order.seeds < 2:
        raise UserError("--seeds", f"{order.seeds}", "2 or more", "the spread of one run cannot be known")
    if not recipe.evaluations:
        raise UserError("--seeds", f"{recipe.name} has no evaluations", "one whose scores are averaged")
    words = [word for word in order.overrides if word.partition("=")[0].strip() != "seed"]
    seeds = range(recipe.seed, recipe.seed + order.seeds)
    return [child_of(order, f"seed {seed}", (*words, f"seed={seed}")) for seed in seeds]

"""`trainkit repeat`: train a recipe with several seeds, and summarise the spread of its scores.

Each seed is the run that `seed=K` would start, a child of a parent run. The parent run gets the mean, the standard
deviation and a 95 % interval of the mean of every final score (`interval`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, few
from trainkit.experiments import group
from trainkit.experiments.group import Child, Parent, RunGroup, child_of
from trainkit.metrics import significance
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime


def repeated(request: RunRequest) -> list[Child]:
    """Return the requests of `order.seeds` seeds, from the recipe's seed on. Raises UserError without a spread."""
    recipe, count = load(request), request.seeds or 0
    if count < 2:
        raise UserError("--seeds", f"{count}", "2 or more", "one run has no spread")
    if not recipe.evaluations:
        raise UserError("--seeds", f"{recipe.name} has no evaluations", "one whose scores are averaged")
    words = [word for word in request.overrides if word.partition("=")[0].strip() != "seed"]
    seeds = range(recipe.seed, recipe.seed + count)
    return [child_of(request, f"seed {seed}", (*words, f"seed={seed}")) for seed in seeds]


def repeat(request: RunRequest, children: Sequence[Child], runtime: Runtime, store: Store, train: group.Train) -> str:
    """Train every seed that has no finished run, and summarise them in a parent run. Returns its status.

    Raises UserError for errors that the user can correct; the next attempt reuses the finished seeds.
    """
    first, digests = children[0].recipe, {}
    keys = [group.child_key(child, digests) for child in children]
    _refuse_other_data([scored for _, scored in digests.values()])
    digest = group.group_digest(children)
    whole = RunGroup(request, first, "seeds", "repetition", len(children), "seeds", ("seed",), digest)
    with group.parent_run(whole, runtime, store, train) as parent:
        runs = parent.run_children(children, keys)
        if runs is None:
            return "KILLED"
        runtime.on_main(lambda: _conclude(first, children, runs, parent))
    return "FINISHED"


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the ends of Student's t-interval of the mean over the finite values; two NaN for fewer than two.

    Mean +- t * std / sqrt(n), with the quantile t of n - 1 degrees of freedom. It assumes that the scores of seeds are
    normally distributed, which few seeds cannot show.
    """
    found = group.known(values)
    if len(found) < 2:
        return math.nan, math.nan
    half = significance.t_quantile(len(found) - 1, level) * group.std(found) / math.sqrt(len(found))
    return group.mean(found) - half, group.mean(found) + half


def _refuse_other_data(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise UserError where the seeds would be evaluated on different data, so that no spread of them says anything."""
    names = [name for name in digests[0] if len({scored[name] for scored in digests}) > 1]
    if names:
        found = f"not comparable: {few(names)} is other data for each seed, drawn by the seed of the training"
        raise UserError("--seeds", found, "the same data for every seed", "draw it by a seed of its own")


def _conclude(recipe: Recipe, children: Sequence[Child], runs: Sequence[RunFolder], parent: Parent) -> None:
    """Sum the seeds up in the parent run and in the terminal."""
    values, step = group.final_scores(runs)
    names = group.summary_names(recipe, values)
    ends = {name: interval(values[name]) for name in names}
    scores = group.summary_metrics(names, values)
    for name in names:
        if not name.startswith(("speed/", "time/")):
            scores |= dict(zip((f"seeds/{name}_low", f"seeds/{name}_high"), ends[name], strict=True))
    parent.tracker.log(step, scores)
    columns: dict[str, Any] = {"score": names}
    columns |= {"mean": [group.mean(values[name]) for name in names]}
    columns |= {"std": [group.std(values[name]) for name in names]}
    columns |= {key: [ends[name][k] for name in names] for k, key in enumerate(("low", "high"))}
    for k, child in enumerate(children):
        columns[child.title.replace(" ", "_")] = [values[name][k] for name in names]
    parent.tracker.table("tables/seeds.csv", columns)
    text = describe(recipe, values, {c.title: run.name for c, run in zip(children, runs, strict=True)})
    parent.conclude(text, group.following(parent.folder.name, recipe, runs))


def describe(recipe: Recipe, values: Mapping[str, Sequence[float]], runs: Mapping[str, str]) -> str:
    """Return the final scores of all seeds as a table for each evaluation, and the run of each seed."""
    lines = [f"{recipe.name}, {len(runs)} seeds", ""]
    for evaluation in recipe.evaluations:
        heads = [*runs, "mean", "std", "95 % CI of the mean"]
        if table := group.score_table(evaluation, values, heads, lambda name: interval(values[name])):
            lines += [*table, ""]
    return "\n".join([*lines, *(f"{title}  {name}" for title, name in runs.items()), ""])

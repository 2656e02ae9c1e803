"""Select the metrics of a run that MLflow gets: by default at most 40, those by which runs are compared.

MLflow's page draws a chart of each metric. The journal keeps all of them, and `tables/metrics.csv` of the run lists
them; a recipe asks for more by `log.metrics`. `tracking.upload.matcher` reads the patterns.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.config.schema import Recipe
from trainkit.interfaces import FitsBeforeTraining, Split
from trainkit.metrics.score import headline

MOST = 40
"""Metrics of a run by default."""
_TRAINING = 12
"""Metrics `train/...` that are counted on; the shipped tasks have 5 to 12."""
_MEASURED = (
    "speed/samples_per_s",
    "final/speed/samples_per_s",
    "speed/peak_memory_gb",
    "time/data_share",
    "time/compute_share",
    "time/eval_share",
    "system/cpu_utilization_percentage",
    "system/system_memory_usage_percentage",
    "system/rss_gb",
    "system/gpu_0_utilization_percentage",
    "system/gpu_0_memory_usage_megabytes",
    "baseline/**",
)


def selected(recipe: Recipe, splits: Mapping[str, Split]) -> list[str] | None:
    """Return patterns of the metrics of a training that MLflow gets; None for all.

    `splits` are those of the recipe's evaluations. By default: what is logged of the training, throughput, shares of
    time and load; the metric that chooses the best, and the one that ends the training early; and of the headline
    scores of each evaluation, of the weights and their average, the first one, two, ... that fit into 40 metrics.
    """
    if recipe.log.metrics == "all":
        return None
    rules = [recipe.best.metric, f"best/{recipe.best.metric}"] if recipe.best else []
    fits = recipe.task.fits if isinstance(recipe.task, FitsBeforeTraining) else ""
    rules += [f"{fits}/{recipe.best.metric}"] if recipe.best and fits else []
    rules += [recipe.stop_when.metric] if recipe.stop_when else []
    rules += [recipe.train.schedule.metric] if recipe.train.schedule.metric else []
    names = list(dict.fromkeys(rules))
    networks = ("", "ema/") if recipe.train.ema else ("",)
    known = {name: headline(split.protocol) for name, split in splits.items()}
    for rank in range(max((len(scores) for scores in known.values() if scores), default=0)):
        more = [f"{name}/{net}{s[rank]}" for name, s in known.items() if s and rank < len(s) for net in networks]
        more = [name for name in more if name not in names]
        if _TRAINING + len(_MEASURED) + len(names) + len(more) > MOST:
            break
        names += more
    # Of what a plug-in scores nothing is known.
    names += [f"{name}/*" for name, scores in known.items() if scores is None]
    asked = [] if recipe.log.metrics == "default" else recipe.log.metrics
    return ["train/*", *_MEASURED, *names, *asked]

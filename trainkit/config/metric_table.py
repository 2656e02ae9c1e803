"""The table of metrics: what each is, its unit, and whether higher or lower is better. Nothing else states a direction.

Metrics that every training logs stand here by their full names, in which `<evaluation>`, `<metric>` and the like stand
for any text; the scores of evaluations, by protocol, in `score_definitions`. A task of a plug-in declares those of its
metrics in its field `directions`. docs/reference/metrics.md is made of both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from trainkit.config.score_definitions import GROUPS, STANDARD, Direction, Group, Metric

Mode = Literal["max", "min"]
Declared = Mapping[str, Literal["higher", "lower"]]
"""Metrics of a plug-in's task, or patterns of them with `*`, and the values that are better."""

DEFINITIONS: dict[str, dict[str, Metric]] = {
    "Training": {
        "train/loss": Metric("Training loss, mean since the last log line.", "", "lower"),
        "train/lr": Metric("Learning rate of the last step."),
        "train/grad_norm": Metric("Norm of the gradient of the last step, before clipping."),
        "train/epoch": Metric("Epochs of training so far; a fraction within an epoch."),
        "train/left_out": Metric(
            "Steps skipped so far, because they were not finite. Absent if none was skipped.", "", "lower"
        ),
        "train/accuracy": Metric("Share of training samples that the model assigns to their class.", "", "higher"),
        "train/dice": Metric("Dice of the training batches, over all foreground voxels.", "", "higher"),
        "train/pixel_accuracy": Metric(
            "Share of correct pixels of the training batches, at output resolution.", "", "higher"
        ),
        "train/cosine_to_teacher": Metric(
            "AdaDistill: mean cosine of the student's and the teacher's embedding.", "", "higher"
        ),
        "train/alpha": Metric("AdaDistill: share of a class center that is kept at a step."),
        "train/<term>": Metric(
            "Another value that the task logs: a term of the loss, or a norm of features.", "", None
        ),
    },
    "Best and final scores": {
        "best/<metric>": Metric(
            "Score that chooses the best checkpoint (`best.metric`), at the best evaluation.", "", None
        ),
        "at_best/<metric>": Metric(
            "Every other score of that evaluation. Such a score may be better at another step.", "", None
        ),
        "final/speed/<metric>": Metric("Speed over the whole run.", "", None),
        "final/time/wall_s": Metric(
            "Duration of the run, from the start of the command to the last file.", "s", "lower"
        ),
        "final/time/total_s": Metric(
            "Duration from the start of the command to the end of the training.", "s", "lower"
        ),
        "final/time/<phase>_share": Metric("Share of the duration of the training that a phase took."),
        "final/<metric>": Metric("Score of the last evaluation.", "", None),
        "baseline/<metric>": Metric(
            "Score of the best trivial baseline in the metric that chooses the best.", "", None
        ),
        "time_to/<metric>_<value>": Metric(
            "Time from the start of the training to the first evaluation that reached a value of `time_to`, set-up "
            "and evaluations included. Absent if none reached it.",
            "s",
            "lower",
        ),
    },
    "Evaluations": {
        "eval/<evaluation>/unique_samples": Metric("Samples that were evaluated, each counted once."),
        "time/eval_<evaluation>_s": Metric("Duration of the evaluation.", "s", "lower"),
        "pixels/<evaluation>/<metric>": Metric("Score of raw pixels as an embedding, once at step 0.", "", None),
        "teacher/<evaluation>/<metric>": Metric("Score of the teacher, once at step 0.", "", None),
        "<evaluation>/ema/<metric>": Metric("Score of the EMA weights.", "", None),
    },
    "Speed": {
        "speed/samples_per_s": Metric(
            "Throughput of all processes since the last log line. It includes waiting for data, and excludes "
            "evaluations, checkpoints and logging.",
            "1/s",
            "higher",
        ),
        "speed/steps_per_s": Metric("Optimizer steps per second, counted in the same way.", "1/s", "higher"),
        "speed/step_ms_p50": Metric("Median duration of a step.", "ms", "lower"),
        "speed/step_ms_p99": Metric("99th percentile of the duration of a step.", "ms", "lower"),
        "speed/peak_memory_gb": Metric("Peak GPU memory of PyTorch's allocator.", "GB", "lower"),
        "speed/ceiling_loader": Metric("Upper bound: throughput of the loader alone.", "1/s"),
        "speed/ceiling_model": Metric("Upper bound: throughput of the network alone.", "1/s"),
        "speed/ceiling_share": Metric("Throughput as a share of the lower of the two upper bounds.", "", "higher"),
        "speed/mfu": Metric("Model FLOPs utilization: share of the peak arithmetic of the device.", "", "higher"),
        "speed/recompiles": Metric("Recompilations of a compiled network since step 20.", "", "lower"),
        "speed/graph_breaks": Metric("Graph breaks of a compiled network since step 20.", "", "lower"),
        "speed/forecast_s": Metric("Predicted duration of the rest of the training, made after 50 steps.", "s"),
        "speed/forecast_error": Metric("Relative error of that prediction; positive if it was too long."),
    },
    "Time on the device": {
        "device/<phase>_ms": Metric("Time of a step on the device, by phase; `step` is the whole step.", "ms", "lower"),
        "device/idle_ms": Metric("Time of a step in which the device is idle.", "ms", "lower"),
        "device/allreduce_ms": Metric("Time of a step in all-reduce of gradients.", "ms", "lower"),
        "device/allreduce_exposed_ms": Metric("Part of it that does not overlap the backward pass.", "ms", "lower"),
    },
    "Shares of time": {
        "time/data_share": Metric("Share of training time in which the main thread waits for data."),
        "time/transfer_share": Metric("Share of training time for copies to the device."),
        "time/compute_share": Metric("Share of training time for forward pass, backward pass and optimizer."),
        "time/eval_share": Metric("Share of training time for evaluations."),
        "time/checkpoint_share": Metric("Share of training time for checkpoints."),
        "time/log_share": Metric("Share of training time for logging."),
        "time/setup_share": Metric(
            "Share of training time for start-up; that of the whole run begins with the command, and so has "
            "imports and the packing of data in it. All shares add up to 1."
        ),
    },
    "Cost": {
        "cost/core_hours": Metric(
            "Duration of the run, start-up included, times the CPU cores that it may use, on all hosts.", "h", "lower"
        ),
        "cost/gpu_hours": Metric("Duration of the run times its GPUs, busy or idle.", "h", "lower"),
    },
    "System": {
        "system/cpu_utilization_percentage": Metric("CPU utilization of the whole machine.", "%"),
        "system/system_memory_usage_<unit>": Metric("Memory in use on the whole machine."),
        "system/disk_<quantity>": Metric("Usage of the disk that holds the run's folder."),
        "system/network_<direction>_megabytes": Metric("Network traffic since the run began.", "MB"),
        "system/own_cores": Metric("CPU cores that this process keeps busy."),
        "system/worker_cores": Metric("CPU cores that the loader's workers keep busy."),
        "system/rss_gb": Metric("Resident memory of this process and its workers; shared pages count once.", "GB"),
        "system/read_mb_s": Metric("Read from disk by this process and its workers.", "MB/s"),
        "system/gpu_<n>_utilization_percentage": Metric("Utilization of a GPU of this run.", "%"),
        "system/gpu_<n>_memory_usage_megabytes": Metric("Memory in use on a GPU of this run.", "MB"),
        "system/gpu_<n>_memory_usage_percentage": Metric("The same as a share of its memory.", "%"),
        "system/gpu_<n>_power_usage_watts": Metric("Power draw.", "W"),
    },
    "Parent runs: folds, seeds, sweeps": {
        "std/<metric>": Metric("Standard deviation over the child runs; `final/<metric>` is the mean."),
        "pooled/<metric>_low": Metric("Lower end of the 95 % confidence interval of the pooled score."),
        "pooled/<metric>_high": Metric("Upper end of it."),
        "pooled/<metric>": Metric("Folds: score of all held-out samples together.", "", None),
        "seeds/<metric>_low": Metric("Seeds: lower end of Student's 95 % confidence interval of the mean."),
        "seeds/<metric>_high": Metric("Upper end of it."),
        "sweep/<metric>": Metric("Sweep: score of each setting, over the number of the setting.", "", None),
    },
}
"""Metrics by the heading under which a page shows them. Without a direction: that of the metric in the name."""

CUSTOMARY = Group(
    "Customary names",
    "No shipped task measures these. A metric of a plug-in with such a name needs no declared direction.",
    {
        **{
            name: Metric("Spread, end of an interval, or share.", "", "none", STANDARD)
            for name in ("*_std", "*_low", "*_high", "*_far", "*_share")
        },
        **{name: Metric("Loss.", "", "lower", STANDARD) for name in ("loss", "*_loss")},
        **{
            name: Metric("Error, or rate of errors.", "", "lower", STANDARD)
            for name in ("mae", "mse", "rmse", "error", "*_error", "error_rate", "*_error_rate", "fnmr*", "fmr*")
        },
        **{
            name: Metric("Share that is right, or that is found.", "share", "higher", STANDARD)
            for name in ("precision", "recall", "sensitivity", "specificity", "*_accuracy")
        },
    },
)
"""Names of metrics with one meaning in the field."""

SIGNS: dict[Mode, int] = {"max": 1, "min": -1}
"""Factor by which values are turned so that higher is better."""
MODES: dict[Direction | None, Mode] = {"higher": "max", "lower": "min"}


def definition(metric: str) -> tuple[str, Metric] | None:
    """Return name and definition of what every training logs, by its exact name where there is one; None for scores."""
    every = [one for group in DEFINITIONS.values() for one in group.items()]
    exact = [one for one in every if one[0] == metric]
    return next(iter(exact or [one for one in every if _form(one[0]).fullmatch(metric)]), None)


def score(metric: str) -> Metric | None:
    """Return the definition of a score, with or without its evaluation and class: `val/ema/nll`, `iou.road`."""
    words = metric.split("/")
    names = (".".join(words[at:]) for at in reversed(range(len(words))))  # `val/iou/road` is `iou.road`, too
    return next((found for name in names if (found := _score(name)) is not None), None)


def direction(metric: str, declared: Declared | None = None) -> Direction | None:
    """Return the values of a metric that are better; None for one that nobody defines.

    `metric` is a full name (`at_best/val/ema/nll`, `time/eval_val_s`) or one without an evaluation (`nll`). `declared`
    are those of the task.
    """
    for pattern, better in (declared or {}).items():
        if any(fnmatchcase(name, pattern) for name in (metric.rpartition("/")[2], metric)):
            return better
    words = metric.split("/")
    for at in range(len(words)):  # `final/time/wall_s` as it is, `final/train/loss` as `train/loss`
        found = definition("/".join(words[at:]))
        if found is not None and found[1].direction is not None:
            return found[1].direction
    one = score(metric)
    return one.direction if one is not None else None


def mode(metric: str, declared: Declared | None = None) -> Mode | None:
    """Return `max` or `min` for a metric of an evaluation, `EVALUATION/NAME`; None where neither is known to be better.

    The evaluation has a name of its own choice, which is left out: `time/nll` is no time.
    """
    return MODES.get(direction(metric.partition("/")[2], declared))


def is_lower(metric: str, declared: Declared | None = None) -> bool:
    """Return True for a metric of an evaluation, `EVALUATION/NAME`, of which lower values are better."""
    return mode(metric, declared) == "min"


def settled(metric: str, given: Mode | None, declared: Declared | None = None) -> tuple[Mode | None, bool]:
    """Return the mode of a rule as its recipe says it, else that of the metric; and whether lower values are better.

    Of a mode that contradicts the metric, which only the recipe of an older run can have, the metric counts.
    """
    known = mode(metric, declared)
    return given or known, (known or given) == "min"


def declared_by(task: object) -> Declared:
    """Return the directions that a task declares of its metrics; none of a shipped task, whose are in the table."""
    found = getattr(type(task), "directions", None)
    return found if isinstance(found, dict) else {}


def is_score(metric: str) -> bool:
    """Return True for a metric of quality, False for a threshold, a count, or the end of an interval."""
    return direction(metric) != "none"


def names() -> list[str]:
    """Return the names of scores without those that are patterns."""
    return [name for group in GROUPS for name in group.metrics if "*" not in name]


def unit(metric: str) -> str:
    """Return the unit of a score; empty where it has none, or nobody defines it."""
    one = score(metric)
    return one.unit if one is not None else ""


def scale(metric: str) -> str:
    """Return the scale that a score shares with others: `share`, `mm`, `mm3`, else its own name."""
    shared = unit(metric)
    return shared if shared in ("share", "mm", "mm3") else metric.partition(".")[0]


@functools.cache
def _form(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<[a-z ]+>)", name)
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in parts))


@functools.cache
def _score(name: str) -> Metric | None:
    every = [one for group in (*GROUPS, CUSTOMARY) for one in group.metrics.items()]
    exact = [metric for known, metric in every if known == name]
    # `hd95_mm.map` is that of the organ `map`, and no `*.map`: the pattern that begins with the most of a name counts.
    ordered = sorted(every, key=lambda one: -len(one[0].partition("*")[0]))
    return next(iter(exact or [metric for pattern, metric in ordered if fnmatchcase(name, pattern)]), None)

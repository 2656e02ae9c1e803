"""Definitions of the metrics that every training logs, by name. The scores of an evaluation are defined in `metrics`.

docs/reference/metrics.md is made of them. In a name `<evaluation>`, `<metric>` and the like stand for any text.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """Meaning of a metric, or of all whose names have one form."""

    name: str
    """The name, with `<...>` for the parts that differ."""
    meaning: str
    unit: str = ""

    def matches(self, metric: str) -> bool:
        """Return whether a metric has a name of this form."""
        return _pattern(self.name).fullmatch(metric) is not None


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<[a-z ]+>)", name)
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in parts))


DEFINITIONS: dict[str, tuple[Definition, ...]] = {
    "Training": (
        Definition("train/loss", "Training loss, mean since the last log line."),
        Definition("train/lr", "Learning rate of the last step."),
        Definition("train/grad_norm", "Norm of the gradient of the last step, before clipping."),
        Definition("train/epoch", "Epochs of training so far; a fraction within an epoch."),
        Definition(
            "train/left_out", "Steps skipped so far: not finite, or around a loss spike. Absent if none was skipped."
        ),
        Definition("train/accuracy", "Share of training samples that the model assigns to their class."),
        Definition("train/dice", "Dice of the training batches, over all foreground voxels."),
        Definition("train/pixel_accuracy", "Share of correct pixels of the training batches, at output resolution."),
        Definition("train/cosine_to_teacher", "AdaDistill: mean cosine of the student's and the teacher's embedding."),
        Definition("train/alpha", "AdaDistill: share of a class center that is kept at a step."),
        Definition("train/<term>", "Another value that the task logs: a term of the loss, or a norm of features."),
    ),
    "Best and final scores": (
        Definition("best/<metric>", "Score that chooses the best checkpoint (`best.metric`), at the best evaluation."),
        Definition(
            "at_best/<metric>", "Every other score of that evaluation. Such a score may be better at another step."
        ),
        Definition("final/speed/<metric>", "Speed over the whole run."),
        Definition("final/time/wall_s", "Duration of the run, from the start of the command to the last file.", "s"),
        Definition("final/time/total_s", "Duration of the training alone.", "s"),
        Definition("final/time/<phase>_share", "Share of the duration of the training that a phase took."),
        Definition("final/<metric>", "Score of the last evaluation."),
        Definition("baseline/<metric>", "Score of the best trivial baseline in the metric that chooses the best."),
        Definition(
            "time_to/<metric>_<value>",
            "Time from the start of the training to the first evaluation that reached a value of `time_to`, set-up "
            "and evaluations included. Absent if none reached it.",
            "s",
        ),
    ),
    "Evaluations": (
        Definition("eval/<evaluation>/unique_samples", "Samples that were evaluated, each counted once."),
        Definition("time/eval_<evaluation>_s", "Duration of the evaluation.", "s"),
        Definition("pixels/<evaluation>/<metric>", "Score of raw pixels as an embedding, once at step 0."),
        Definition("teacher/<evaluation>/<metric>", "Score of the teacher, once at step 0."),
        Definition("<evaluation>/ema/<metric>", "Score of the EMA weights."),
    ),
    "Speed": (
        Definition(
            "speed/samples_per_s",
            "Throughput of all processes since the last log line. It includes waiting for data, and excludes "
            "evaluations, checkpoints and logging.",
            "1/s",
        ),
        Definition("speed/steps_per_s", "Optimizer steps per second, counted in the same way.", "1/s"),
        Definition("speed/step_ms_p50", "Median duration of a step.", "ms"),
        Definition("speed/step_ms_p99", "99th percentile of the duration of a step.", "ms"),
        Definition("speed/peak_memory_gb", "Peak GPU memory of PyTorch's allocator.", "GB"),
        Definition("speed/ceiling_loader", "Upper bound: throughput of the loader alone.", "1/s"),
        Definition("speed/ceiling_model", "Upper bound: throughput of the network alone.", "1/s"),
        Definition("speed/ceiling_eval_<evaluation>", "Upper bound: throughput of this evaluation alone.", "1/s"),
        Definition("speed/ceiling_share", "Throughput as a share of the lower of the two upper bounds."),
        Definition("speed/mfu", "Model FLOPs utilization: share of the peak arithmetic of the device."),
        Definition("speed/recompiles", "Recompilations of a compiled network since step 20."),
        Definition("speed/graph_breaks", "Graph breaks of a compiled network since step 20."),
        Definition("speed/forecast_s", "Predicted duration of the rest of the training, made after 50 steps.", "s"),
        Definition("speed/forecast_error", "Relative error of that prediction; positive if it was too long."),
    ),
    "Time on the device": (
        Definition("device/<phase>_ms", "Time of a step on the device, by phase; `step` is the whole step.", "ms"),
        Definition("device/idle_ms", "Time of a step in which the device is idle.", "ms"),
        Definition("device/allreduce_ms", "Time of a step in all-reduce of gradients.", "ms"),
        Definition("device/allreduce_exposed_ms", "Part of it that does not overlap the backward pass.", "ms"),
    ),
    "Shares of time": (
        Definition("time/data_share", "Share of training time in which the main thread waits for data."),
        Definition("time/transfer_share", "Share of training time for copies to the device."),
        Definition("time/compute_share", "Share of training time for forward pass, backward pass and optimizer."),
        Definition("time/eval_share", "Share of training time for evaluations."),
        Definition("time/checkpoint_share", "Share of training time for checkpoints."),
        Definition("time/log_share", "Share of training time for logging."),
        Definition("time/setup_share", "Share of training time for set-up. All shares add up to 1."),
    ),
    "Cost": (
        Definition(
            "cost/core_hours", "Duration of the training times the CPU cores that it may use, on all hosts.", "h"
        ),
        Definition("cost/gpu_hours", "Duration of the training times its GPUs, busy or idle.", "h"),
    ),
    "System": (
        Definition("system/cpu_utilization_percentage", "CPU utilization of the whole machine.", "%"),
        Definition("system/system_memory_usage_<unit>", "Memory in use on the whole machine."),
        Definition("system/disk_<quantity>", "Usage of the disk that holds the run's folder."),
        Definition("system/network_<direction>_megabytes", "Network traffic since the run began.", "MB"),
        Definition("system/own_cores", "CPU cores that this process keeps busy."),
        Definition("system/worker_cores", "CPU cores that the loader's workers keep busy."),
        Definition("system/rss_gb", "Resident memory of this process and its workers; shared pages count once.", "GB"),
        Definition("system/read_mb_s", "Read from disk by this process and its workers.", "MB/s"),
        Definition("system/major_faults_s", "Pages fetched from disk by this process and its workers.", "1/s"),
        Definition("system/throttled_share", "Share of the wanted CPU time that the container's quota refused."),
        Definition("system/cpu_mhz", "Clock of the busiest CPU cores.", "MHz"),
        Definition("system/gpu_<n>_utilization_percentage", "Utilization of a GPU of this run.", "%"),
        Definition("system/gpu_<n>_memory_usage_megabytes", "Memory in use on a GPU of this run.", "MB"),
        Definition("system/gpu_<n>_memory_usage_percentage", "The same as a share of its memory.", "%"),
        Definition("system/gpu_<n>_power_usage_watts", "Power draw.", "W"),
        Definition("system/gpu_<n>_power_usage_percentage", "The same as a share of the power limit.", "%"),
        Definition("system/gpu_<n>_clock_mhz", "Clock of the GPU.", "MHz"),
        Definition("system/gpu_<n>_throttled", "Is 1 while power, temperature or hardware limit the clock."),
        Definition("system/gpu_<n>_other_processes", "Other processes on this GPU."),
    ),
    "Parent runs: folds, seeds, sweeps": (
        Definition("std/<metric>", "Standard deviation over the child runs; `final/<metric>` is the mean."),
        Definition("pooled/<metric>_low", "Lower end of the 95 % confidence interval of the pooled score."),
        Definition("pooled/<metric>_high", "Upper end of it."),
        Definition("pooled/<metric>", "Folds: score of all held-out samples together."),
        Definition("seeds/<metric>_low", "Seeds: lower end of Student's 95 % confidence interval of the mean."),
        Definition("seeds/<metric>_high", "Upper end of it."),
        Definition("sweep/best/<metric>", "Sweep: best score so far, over the number of the setting."),
        Definition("sweep/<metric>", "Sweep: score of each setting, over the number of the setting."),
    ),
}
"""Definitions by the heading under which a page shows them."""


def definition(metric: str) -> Definition | None:
    """Return the definition of a metric, by its exact name where there is one; None for scores of evaluations."""
    every = [one for group in DEFINITIONS.values() for one in group]
    exact = [one for one in every if one.name == metric]
    return next(iter(exact or [one for one in every if one.matches(metric)]), None)

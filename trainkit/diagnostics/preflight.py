"""Try a training for about a minute: find errors early, forecast time, disk and memory, and say what bounds the speed.

The training loop runs a few steps, an evaluation, a checkpoint, a resume from it and more steps, in a temporary folder.
The schedule is that of the whole training.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from trainkit.checkpoint import storage
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.diagnostics import throughput_limits
from trainkit.diagnostics.short_recipe import steps_alone
from trainkit.distributed.launch_settings import with_compile_mode
from trainkit.distributed.runtime import Runtime
from trainkit.environment.process import peak_memory
from trainkit.errors import UserError, number_of
from trainkit.interfaces import Dataset
from trainkit.paths import recipe_word
from trainkit.speed import bottleneck, cost
from trainkit.speed.clock import STEP, Steps
from trainkit.speed.eta import Forecast, checkpoint_cost, mean_step
from trainkit.speed.limits import ThroughputLimits, rate_words
from trainkit.speed.limits import lines as upper_bounds
from trainkit.tracking.run_folder import RunFolder, RunInfo
from trainkit.tracking.store import Store
from trainkit.training import plan, teacher_cache
from trainkit.training.checkpointer import Resume
from trainkit.training.dependencies import gather
from trainkit.training.run_logger import RunLogger
from trainkit.training.teacher_cache import Building
from trainkit.training.trainer import Trainer

FIRST = 3
"""Steps before the checkpoint."""
SECONDS, MOST = 15.0, 200
"""How long steps are timed after it, and how many at most."""


@dataclass(kw_only=True)
class Tried:
    """Measurements of a short trial of a training."""

    steps: Steps
    """Times of the steps after the checkpoint, without the first."""
    costs: Mapping[str, float]
    """Seconds that each evaluation will take."""
    evaluation_s: Mapping[str, float]
    """Seconds of the evaluation that ran."""
    samples: Mapping[str, int]
    """Samples it evaluated."""
    written_s: float
    """To write a checkpoint."""
    blocking_s: float
    """For which one checkpoint blocks training: most of it is written while steps go on."""
    bytes: int
    """Of a checkpoint."""
    building: Sequence[Building]
    """Cost of computing the outputs of frozen models before the first step."""
    fitted_s: float = 0.0
    """Seconds in which the task fitted to the training set before the first step, such as a linear probe."""
    peak_gb: float
    """Greatest memory of the device; on a CPU the resident set of the process."""
    left_gb: float
    """Memory of the device, or the machine, that is left."""
    hourly: Mapping[str, float]
    """What an hour of the training is charged for: `cost/core_hours`, `cost/gpu_hours`."""
    verdict: Sequence[str]
    """Throughput as a share of its upper bound, and what takes the time, in sentences."""


def command(request: RunRequest, say: Callable[[str], object]) -> int:
    """Try a recipe and report the time, disk and memory of its training. Raises UserError for what would end it.

    Returns 0, or 2 where the disk is too small for its checkpoints.
    """
    recipe = load(request)
    runtime, store = Runtime(recipe), Store.locate()
    try:
        runtime.on_main(store.prepare)
        data = recipe.data.open(recipe.seed)
        found = {name: dependency.file for name, dependency in gather(request, recipe, runtime, store, None).items()}
        mark = throughput_limits.fingerprint(recipe, data, runtime)
        others = throughput_limits.busy()
        with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
            folder, outputs = Path(runtime.broadcast(scratch)), store.home / "outputs"
            limits = throughput_limits.measure(recipe, data, runtime, found, min(SECONDS, throughput_limits.SECONDS))
            tried = fly(recipe, data, runtime, found, folder, outputs, limits, recipe_word(request.path))
        runtime.on_main(lambda: throughput_limits.keep(store, mark, limits))
        cut = plan.Plan.make(recipe, data, runtime.world, runtime.rank)
        lines, fits = report(recipe, cut, tried, shutil.disk_usage(store.home).free)
    finally:
        runtime.close()
    if runtime.main:
        for line in [*lines, "", *upper_bounds(limits), *tried.verdict, *filter(None, [others])]:
            say(line)
    return 0 if fits else 2


def fly(
    recipe: Recipe,
    data: Dataset,
    runtime: Runtime,
    found: Mapping[str, Path],
    folder: Path,
    outputs: Path,
    limits: ThroughputLimits | None = None,
    named: str = "RECIPE",
) -> Tried:
    """Train a few steps, run an evaluation, write a checkpoint, and resume from it.

    `outputs` is the folder of cached teacher outputs; none are written. `named` is the recipe in suggested commands.
    """
    runtime.configure(recipe)
    sizes = {name: split.size for name, split in plan.evaluated(recipe, data).items()}
    smallest = min(sizes, key=lambda name: sizes[name], default=None)
    short = _shortened(
        with_compile_mode(recipe, runtime.device.type, plan.updates(recipe, data, runtime.world)[1]), smallest
    )
    logger = RunLogger(short, _Scratch(folder))
    with Trainer(short, data, runtime, logger, weights=found) as trainer:
        if trainer.plan.steps < FIRST + 2:  # the first step after the resume is not timed
            steps = number_of(trainer.plan.steps, "steps")
            raise UserError("preflight", f"a training of {steps}", f"{FIRST + 2} steps or more")
        trainer.start()
        costs, fitted_s = trainer.evaluator.costs, trainer.evaluator.fitted_s
        _updates(trainer, FIRST)
        path, blocking_s, written_s = _saved(trainer)
        building = teacher_cache.forecast(trainer.model.networks, data.train, runtime, outputs)
        step_s = runtime.broadcast(float(trainer.clock.recent(1).seconds[-1]))
    del trainer  # its models take memory
    timed = min(MOST, max(4, round(SECONDS / max(step_s, 1e-4))))
    again = RunLogger(short, _Scratch(folder))
    again.limits = limits
    with Trainer(short, data, runtime, again, weights=found, resume=Resume(path)) as trainer:
        trainer.open()
        _updates(trainer, timed)
        steps = trainer.clock.recent()[1:]
        phases = dict(zip(STEP, steps.phases.sum(0).tolist(), strict=True))
        evidence = trainer.monitor.evidence(steps, phases, len(steps))
    peak, left = _memory(runtime)
    return Tried(
        steps=steps,
        costs=costs,
        evaluation_s={name: seconds[-1] for name, seconds in logger.evaluation_s.items()},
        samples={name: sizes[name] for name in logger.evaluation_s},
        written_s=written_s,
        blocking_s=blocking_s,
        bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        building=building,
        fitted_s=fitted_s,
        peak_gb=peak,
        left_gb=left,
        hourly=cost.allotted(runtime),
        verdict=bottleneck.describe(evidence, bottleneck.judge(evidence), named),
    )


def _updates(trainer: Trainer, many: int) -> None:
    for _ in range(min(many, trainer.plan.steps - trainer.state.step)):
        trainer.step()
        trainer.after_step()


def _saved(trainer: Trainer) -> tuple[Path, float, float]:
    """Write a checkpoint during a step and read it back; returns its folder, how long it held up the step and took."""
    usual, began = float(trainer.clock.recent(FIRST).seconds.min()), time.perf_counter()
    trainer.checkpoints.save(required=True)
    _updates(trainer, 1)  # it may wait for copies of the weights
    blocked = max(0.0, time.perf_counter() - began - usual)
    trainer.checkpoints.wait()
    blocked, written = trainer.runtime.broadcast((blocked, time.perf_counter() - began))
    folder = trainer.logger.folder
    path, problems = storage.newest_valid(folder.checkpoints) if folder is not None else (None, [])
    if path is None:
        raise UserError("checkpoint", "; ".join(problems), "a checkpoint that can be read back")
    return path, blocked, written


def forecast(recipe: Recipe, cut: plan.Plan, tried: Tried) -> Forecast:
    """Forecast what the whole training will take.

    One checkpoint is written at a time: where they follow each other faster than that, each waits for the one before.
    """
    mean, error = mean_step(tried.steps.seconds)
    evaluations, written = plan.to_come(recipe, cut)
    times = {name: times + recipe.evaluations[name].at_start for name, times in evaluations.items()}
    # A full evaluation, that of EMA weights included, is a better estimate than a first batch.
    costs = {**tried.costs, **tried.evaluation_s}
    each = checkpoint_cost(tried.blocking_s, tried.written_s, mean * cut.steps / max(1, written))
    return Forecast(
        steps=cut.steps,
        step_s=mean,
        step_error=error,
        evaluations={name: (times[name], costs.get(name, 0.0)) for name in times},
        budgets={name: e.budget for name, e in recipe.evaluations.items() if e.budget},
        checkpoints=(written, each),
        before_s=sum(one.seconds for one in tried.building) + tried.fitted_s,
        last_s=max(0.0, tried.written_s - each) if recipe.checkpoints.at_end else 0.0,
    )


def report(recipe: Recipe, cut: plan.Plan, tried: Tried, free: int) -> tuple[list[str], bool]:
    """Return the report as lines, and whether the checkpoints fit into `free` bytes of disk."""
    steps, expected = tried.steps, forecast(recipe, cut, tried)
    shares = steps.phases.sum(0) / max(steps.phases.sum(), 1e-12)
    where = ", ".join(
        f"{phase} {100 * share:.0f} %" for phase, share in zip(STEP, shares, strict=True) if share >= 0.01
    )
    lines = [
        f"steps       {len(steps)} timed: mean {1e3 * expected.step_s:.3g} ms, "
        f"{rate_words(cut.batch_size / expected.step_s)} samples/s; {where}",
    ]
    for name, seconds in tried.evaluation_s.items():
        lines.append(f"evaluation  {name}: {tried.samples[name]} samples in {seconds:.3g} s")
    for name, seconds in tried.costs.items():
        if name not in tried.evaluation_s:
            lines.append(f"evaluation  {name}: about {seconds:.3g} s (estimated from its first batch)")
    keep = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    tables = sum(one.bytes for one in tried.building)
    if tried.fitted_s:
        lines.append(f"fit         to the training set, before the first step: {tried.fitted_s:.3g} s")
    dependency = (keep + 1) * tried.bytes + tables  # one more while it is written
    for one in tried.building:
        what = f"{one.samples:,} samples in {one.views} views"
        kept = f"{one.bytes / 1e9:.3g} GB in the cache, once" if one.bytes else "in memory, at every start"
        took = f"computed in {_span(one.seconds)}, {kept}" if one.seconds else "already cached"
        lines.append(f"teacher     outputs of {one.name} for {what}: {took}")
    more = f", {tables / 1e9:.2g} GB of teacher outputs" if tables else ""
    lines += [
        f"checkpoint  {tried.bytes / 1e6:.3g} MB, written in {tried.written_s:.2g} s and resumed from. "
        f"Asynchronous writing blocks training for {tried.blocking_s:.2g} s",
        f"disk        {dependency / 1e9:.2g} GB needed for {keep} checkpoints and one being written{more}; "
        f"{free / 1e9:.3g} GB free",
        f"memory      peak {tried.peak_gb:.2g} GB so far; {tried.left_gb:.3g} GB left",
        f"epoch       {_span(cut.steps_per_epoch * expected.step_s)} for {cut.steps_per_epoch:,} steps",
        expected.describe(),
    ]
    hours = expected.total() / 3600
    charged = (
        f"{each * hours:.3g} {name.removeprefix(cost.PREFIX).replace('_', ' ')}" for name, each in tried.hourly.items()
    )
    lines.append(f"cost        {', '.join(charged)}")
    low, high = expected.interval
    now = time.time()
    ends = [time.strftime("%Y-%m-%d %H:%M", time.localtime(now + seconds)) for seconds in (low, high)]
    lines.append(f"finished    {ends[0]}" + (f" to {ends[1]}" if ends[0] != ends[1] else "") + ", if you start it now")
    if dependency > free:
        what = "checkpoints and teacher outputs" if tables else "checkpoints"
        lines.append(f"error: not enough disk space for the {what}; free some, or lower checkpoints.keep_last")
    return lines, dependency <= free


# ---- The trial


class _Scratch(RunFolder):
    """A folder without a record of its run."""

    def update(self, **changes: Any) -> RunInfo:
        """Keep no record."""
        return RunInfo(self.name, "", "", 0, 0.0)


def _shortened(recipe: Recipe, evaluation: str | None) -> Recipe:
    """Return a recipe with one evaluation, at its start, and without scheduled checkpoints and figures."""
    recipe = steps_alone(recipe)
    evaluations = {name: replace(e, at_start=name == evaluation) for name, e in recipe.evaluations.items()}
    return replace(recipe, evaluations=evaluations, checkpoints=replace(recipe.checkpoints, failing="stop"))


def _memory(runtime: Runtime) -> tuple[float, float]:
    """Peak memory so far and the memory left, GB."""
    if runtime.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(runtime.device)
        return peak / 1e9, (torch.cuda.mem_get_info(runtime.device)[1] - peak) / 1e9
    return peak_memory() / 1e9, psutil.virtual_memory().available / 1e9


def _span(s: float) -> str:
    return f"{s:.3g} s" if s < 120 else f"{s / 60:.3g} min" if s < 7200 else f"{s / 3600:.3g} h"

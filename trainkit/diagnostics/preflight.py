"""A minute of a training before the training: what will fail fails now, and what it will take is forecast.

A few updates, one evaluation, a checkpoint, going on from that checkpoint, and one more that is written beside the
updates: by the loop itself, in a folder that is thrown away. The schedule is that of the whole training, of which these
are the first updates.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from trainkit.checkpoint import storage
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.distributed.launch_settings import with_compile_mode
from trainkit.distributed.runtime import Runtime
from trainkit.environment.process import peak_memory
from trainkit.errors import UserError, number_of
from trainkit.interfaces import Dataset
from trainkit.speed.clock import BETWEEN, STEP, Steps
from trainkit.speed.eta import Forecast, checkpoint_cost, pace
from trainkit.tracking.run_folder import RunFolder, RunInfo
from trainkit.tracking.store import Store
from trainkit.training import plan, teacher_cache
from trainkit.training.checkpointer import Resume
from trainkit.training.dependencies import gather
from trainkit.training.run_logger import RunLogger
from trainkit.training.teacher_cache import Building
from trainkit.training.trainer import Trainer

FIRST = 3
"""Updates before the checkpoint."""
SECONDS, MOST = 15.0, 200
"""How long updates are timed after it, and how many at most."""


@dataclass(kw_only=True)
class Tried:
    """Findings of the trial of a training."""

    steps: Steps
    """Times of the updates after the checkpoint, without the first and those made while another was being written."""
    costs: Mapping[str, float]
    """Seconds that each evaluation will take."""
    held: Mapping[str, float]
    """Seconds that the evaluation which was held took."""
    scored: Mapping[str, int]
    """Samples that it scored."""
    written_s: float
    """To write a checkpoint."""
    holds_up_s: float
    """For which a checkpoint that is written beside the training holds it up: what it is waited for, and what the
    updates made meanwhile take longer than others."""
    bytes: int
    """Of a checkpoint."""
    building: Sequence[Building]
    """What it takes to compute the outputs of frozen networks before the first update."""
    peak_gb: float
    """Greatest memory of the device; on a CPU the resident set of the process."""
    left_gb: float
    """What the device, or the machine, has left beside that."""


def command(request: RunRequest, say: Callable[[str], object]) -> int:
    """Try a recipe and say what its training will take. Raises UserError for what would end it.

    Returns 0, or 2 where the disk does not hold its checkpoints.
    """
    recipe = load(request)
    runtime, store = Runtime(recipe), Store.locate()
    try:
        runtime.on_main(store.prepare)
        data = recipe.data.open(recipe.seed)
        found = {name: dependency.file for name, dependency in gather(request, recipe, runtime, store, None).items()}
        with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
            tried = fly(recipe, data, runtime, found, Path(runtime.broadcast(scratch)), store.home / "outputs")
        cut = plan.Plan.make(recipe, data, runtime.world, runtime.rank)
        lines, fits = report(recipe, cut, tried, shutil.disk_usage(store.home).free)
    finally:
        runtime.close()
    if runtime.main:
        for line in lines:
            say(line)
    return 0 if fits else 2


def fly(
    recipe: Recipe, data: Dataset, runtime: Runtime, found: Mapping[str, Path], folder: Path, outputs: Path
) -> Tried:
    """Train a few updates, hold an evaluation, write a checkpoint, and go on from it.

    `outputs` is where tables of outputs are kept; none is written.
    """
    runtime.configure(recipe)
    sizes = {name: split.size for name, split in plan.evaluated(recipe, data).items()}
    smallest = min(sizes, key=lambda name: sizes[name], default=None)
    short = _shortened(
        with_compile_mode(recipe, runtime.device.type, plan.updates(recipe, data, runtime.world)[1]), smallest
    )
    logger = RunLogger(short, _Scratch(folder))
    with Trainer(short, data, runtime, logger, weights=found) as trainer:
        if trainer.plan.steps <= FIRST:
            steps = number_of(trainer.plan.steps, "updates", "update")
            raise UserError("preflight", f"a training of {steps}", f"more than {FIRST}")
        trainer.start()
        costs = trainer.evaluator.costs
        _updates(trainer, FIRST)
        path, written_s = _saved(trainer)
        building = teacher_cache.forecast(trainer.model.networks, data.train, runtime, outputs)
        step_s = runtime.broadcast(float(trainer.clock.recent(1).seconds[-1]))
    del trainer  # its networks take memory
    timed = min(MOST, max(4, round(SECONDS / max(step_s, 1e-4))))
    with Trainer(
        short, data, runtime, RunLogger(short, _Scratch(folder)), weights=found, resume=Resume(path)
    ) as trainer:
        trainer.open()
        beside = _updates(trainer, timed, save_at=max(2, timed // 3))
        steps, holds_up_s = apart(trainer.clock.recent()[1:], beside)
    peak, left = _memory(runtime)
    return Tried(
        steps=steps,
        costs=costs,
        held={name: seconds[-1] for name, seconds in logger.evaluation_s.items()},
        scored={name: sizes[name] for name in logger.evaluation_s},
        written_s=written_s,
        holds_up_s=runtime.broadcast(written_s if holds_up_s is None else holds_up_s),
        bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        building=building,
        peak_gb=peak,
        left_gb=left,
    )


def _updates(trainer: Trainer, many: int, save_at: int = 0) -> list[int]:
    """Make updates, and write a checkpoint beside those after `save_at`.

    Returns how many had been made when it was begun and when it was written; or nothing.
    """
    beside: list[int] = []
    for number in range(1, min(many, trainer.plan.steps - trainer.state.step) + 1):
        trainer.step()
        trainer.after_step()
        if len(beside) == 1 and not trainer.checkpoints.writer.writing:
            beside.append(trainer.clock.steps - 1)
        if number == save_at:
            beside.append(trainer.clock.steps)
            trainer.checkpoints.save(required=True)
    trainer.checkpoints.wait()
    return [*beside, trainer.clock.steps] if len(beside) == 1 else beside


def _saved(trainer: Trainer) -> tuple[Path, float]:
    """Write a checkpoint, wait for it and read it back; returns its folder, and the seconds that it took to write."""
    began = time.perf_counter()
    trainer.checkpoints.save(required=True)
    trainer.checkpoints.wait()
    seconds = trainer.runtime.broadcast(time.perf_counter() - began)
    folder = trainer.logger.folder
    path, problems = storage.newest_valid(folder.checkpoints) if folder is not None else (None, [])
    if path is None:
        raise UserError("checkpoint", "; ".join(problems), "one that can be read back")
    return path, seconds


def apart(steps: Steps, beside: Sequence[int]) -> tuple[Steps, float | None]:
    """The updates made in peace, and the seconds for which a checkpoint held the training up.

    `beside` has how many updates had been made when it was asked for and when it was written; None where it was not.
    """
    if len(beside) < 2:
        return steps, None
    among = (steps.number > beside[0]) & (steps.number <= beside[1] + 1)
    if not among.any() or among.all():
        return steps, None
    # Medians: a burst of a neighbour, or of the loader, is none of the checkpoint's.
    slowed = among.sum() * (np.median(steps.seconds[among]) - np.median(steps.seconds[~among]))
    waited = steps.between[among, BETWEEN.index("checkpoint")].sum()
    return steps[~among], float(waited + max(0.0, slowed))


def forecast(recipe: Recipe, cut: plan.Plan, tried: Tried) -> Forecast:
    """Forecast what the whole training will take.

    One checkpoint is written at a time: where they follow each other faster than that, each waits for the one before.
    """
    mean, error = pace(tried.steps.seconds)
    held, written = plan.to_come(recipe, cut)
    times = {name: times + recipe.evaluations[name].at_start for name, times in held.items()}
    # The evaluation that was held, that of EMA weights included, is known better than by its first batch.
    costs = {**tried.costs, **tried.held}
    each = checkpoint_cost(tried.holds_up_s, tried.written_s, mean * cut.steps / max(1, written))
    return Forecast(
        steps=cut.steps,
        step_s=mean,
        step_error=error,
        evaluations={name: (times[name], costs.get(name, 0.0)) for name in times},
        budgets={name: e.budget for name, e in recipe.evaluations.items() if e.budget},
        checkpoints=(written, each),
        before_s=sum(one.seconds for one in tried.building),
        last_s=max(0.0, tried.written_s - each) if recipe.checkpoints.at_end else 0.0,
    )


def report(recipe: Recipe, cut: plan.Plan, tried: Tried, free: int) -> tuple[list[str], bool]:
    """The trial in lines, and whether `free` bytes of disk hold the checkpoints."""
    steps, expected = tried.steps, forecast(recipe, cut, tried)
    shares = steps.phases.sum(0) / max(steps.phases.sum(), 1e-12)
    where = ", ".join(
        f"{phase} {100 * share:.0f} %" for phase, share in zip(STEP, shares, strict=True) if share >= 0.01
    )
    lines = [
        f"updates     {len(steps)} timed: {1e3 * expected.step_s:.3g} ms each, "
        f"{cut.batch_size / expected.step_s:.3g} samples/s; {where}",
    ]
    for name, seconds in tried.held.items():
        lines.append(f"evaluation  {name}: {tried.scored[name]} samples scored in {seconds:.3g} s")
    for name, seconds in tried.costs.items():
        if name not in tried.held:
            lines.append(f"evaluation  {name}: about {seconds:.3g} s, from its first batch")
    keep = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    tables = sum(one.bytes for one in tried.building)
    dependency = (keep + 1) * tried.bytes + tables  # one more while it is written
    for one in tried.building:
        what = f"{one.samples:,} samples in {one.views} views"
        kept = f"{one.bytes / 1e9:.3g} GB in the store, once" if one.bytes else "in memory, at every start"
        took = f"computed in {_span(one.seconds)}, {kept}" if one.seconds else "in the store already"
        lines.append(f"outputs     of {one.name} for {what}: {took}")
    more = f", {tables / 1e9:.2g} GB of outputs" if tables else ""
    lines += [
        f"checkpoint  {tried.bytes / 1e6:.3g} MB written in {tried.written_s:.2g} s; training went on from it. Beside "
        f"the training, one holds it up for {tried.holds_up_s:.2g} s",
        f"disk        {dependency / 1e9:.2g} GB for {keep} checkpoints kept and one being written{more}; "
        f"{free / 1e9:.3g} GB free",
        f"memory      {tried.peak_gb:.2g} GB at most so far; {tried.left_gb:.3g} GB left",
        f"epoch       {_span(cut.steps_per_epoch * expected.step_s)} of updates ({cut.steps_per_epoch:,})",
        expected.said(),
    ]
    low, high = expected.interval
    now = time.time()
    ends = [time.strftime("%Y-%m-%d %H:%M", time.localtime(now + seconds)) for seconds in (low, high)]
    lines.append(f"finished    {ends[0]}" + (f" to {ends[1]}" if ends[0] != ends[1] else "") + ", if it began now")
    if dependency > free:
        what = "checkpoints and outputs" if tables else "checkpoints"
        lines.append(f"error: the disk does not hold the {what}; free some, or lower checkpoints.keep_last")
    return lines, dependency <= free


# ---- The trial


class _Scratch(RunFolder):
    """A folder without a record of its run."""

    def update(self, **changes: Any) -> RunInfo:
        """Keep no record."""
        return RunInfo(self.name, "", "", 0, 0.0)


def _shortened(recipe: Recipe, held: str | None) -> Recipe:
    """Return a recipe with one evaluation at its start and no other, that writes nothing by itself on the way."""
    evaluations = {
        name: replace(e, every=None, at_start=name == held, at_end=False) for name, e in recipe.evaluations.items()
    }
    log = replace(recipe.log, figures=None, profile=None, system_every=None)
    checkpoints = replace(recipe.checkpoints, every=None, lose_at_most=None, failing="stop")
    train = replace(recipe.train, schedule=recipe.train.schedule.without_scores())
    out = {
        "train": train,
        "best": None,
        "stop_when": None,
        "time_to": {},
        "promote": None,
        "log": log,
        "checkpoints": checkpoints,
    }
    return replace(recipe, evaluations=evaluations, **out)


def _memory(runtime: Runtime) -> tuple[float, float]:
    """Greatest memory so far and what is left beside it, GB."""
    if runtime.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(runtime.device)
        return peak / 1e9, (torch.cuda.mem_get_info(runtime.device)[1] - peak) / 1e9
    return peak_memory() / 1e9, psutil.virtual_memory().available / 1e9


def _span(s: float) -> str:
    return f"{s:.3g} s" if s < 120 else f"{s / 60:.3g} min" if s < 7200 else f"{s / 3600:.3g} h"

"""Measure upper bounds of throughput: the loader and the model, each timed alone.

`Trainer.step` trains the model on one batch that is read once; its weights are discarded, and the training that follows
is bitwise unchanged. The figures are kept in the store, under a fingerprint of everything that affects them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from trainkit.config import loader
from trainkit.config.schedule import Curve
from trainkit.config.schema import Recipe
from trainkit.config.units import Span, samples_per_update
from trainkit.data.loader import stream as loading
from trainkit.diagnostics.repeated_batches import RepeatedBatches
from trainkit.diagnostics.short_recipe import steps_alone
from trainkit.distributed.launch_settings import with_compile_mode
from trainkit.distributed.runtime import Runtime
from trainkit.distributed.stop_poll import StopPoll
from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.interfaces import Dataset
from trainkit.speed.limits import ThroughputLimits, lines, metrics
from trainkit.tracking import journal
from trainkit.tracking.store import Store
from trainkit.training.plan import Plan
from trainkit.training.run_logger import RunLogger
from trainkit.training.trainer import Trainer

T = TypeVar("T")

FOLDER = "ceilings"
"""Folder of the store's home that keeps what was measured."""
SECONDS = 5.0
"""Time of each part; longer where a few batches take longer."""
WARM = 3
"""Steps on the one batch that are not timed: they compile, choose algorithms and fetch memory."""
_FORMAT = 1
_ENDLESS = Span(10**9, "steps")
_VERSIONS = ("torch", "torchvision", "accelerate", "timm", "numpy", "pillow", "trainkit")
_WORDS = ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "TORCH_COMPILE_DISABLE", "KMP_AFFINITY", "MKL_NUM_THREADS")
_STOPPED = "the run was stopped"


# ---- When they are measured, and where they are kept


def ensure(
    recipe: Recipe,
    data: Dataset,
    runtime: Runtime,
    store: Store,
    found: Mapping[str, Path],
    say: Callable[[str], None],
    stopping: Callable[[], bool] = lambda: False,
) -> ThroughputLimits | None:
    """Return the upper bounds of a recipe as its `log.ceilings` asks for them: known, measured now, or None.

    Called on every process. What cannot be measured is named in `absent` and never ends the run.
    """
    word = recipe.log.ceilings
    if word == "off" or not _updates(recipe, data, runtime.world):
        return None
    if word == "auto" and not runtime.on_main(lambda: (store.home / FOLDER).is_dir()):
        return None
    mark = fingerprint(recipe, data, runtime)
    if word == "auto":
        return _checked(runtime.on_main(lambda: _kept(store, mark)))
    others = busy()
    measured = measure(recipe, data, runtime, found, SECONDS, say, stopping)
    if _STOPPED not in measured.absent.values():
        runtime.on_main(lambda: keep(store, mark, measured))
    say("\n".join([*lines(measured), *([others] if others else [])]))
    return measured


def known(store: Store, mark: str) -> ThroughputLimits | None:
    """Return what was measured under a fingerprint; None where nothing was, or the file is damaged."""
    return _checked(_kept(store, mark))


def busy() -> str:
    """Return a warning where other processes keep the machine busy, which lowers the bounds; else an empty text."""
    try:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
    except OSError:
        return ""
    if load <= cores:
        return ""
    return f"the machine is busy (load {load:.1f} on {cores} cores): these figures are lower than on an idle machine"


def keep(store: Store, mark: str, ceilings: ThroughputLimits) -> None:
    """Keep what was measured; ignore a store that cannot be written to."""
    entry = {"format": _FORMAT, "fingerprint": mark, "measured": time.time(), "ceilings": asdict(ceilings)}
    with contextlib.suppress(OSError):
        (store.home / FOLDER).mkdir(parents=True, exist_ok=True)
        write_aside(store.home / FOLDER / f"{mark}.json", json.dumps(entry, indent=1) + "\n")


def fingerprint(recipe: Recipe, data: Dataset, runtime: Runtime) -> str:
    """Return 32 hexadecimal digits of everything that affects the bounds: recipe, data, hardware, versions, processes.

    Of the recipe, length, learning rate, seed, gates, checkpoints and log do not. The host's name is left out: machines
    of one kind share their figures. So are the project's own sources beyond its version: `log.ceilings: measure`
    measures again.
    """
    recipe = with_compile_mode(recipe, runtime.device.type, _updates(recipe, data, runtime.world))
    tree = json.loads(json.dumps(loader.to_tree(recipe), default=str))
    train = {key: value for key, value in tree["train"].items() if key not in ("length", "schedule")}
    versions = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    optim = {key: tree["optim"][key] for key in ("name", "clip_norm", "clip_agc", "fused", "nesterov")}
    parts = [
        {key: tree[key] for key in ("task", "data", "loader", "device")},
        [train, optim, data.meta.digest],
        [runtime.describe(), _cores(), {word: os.environ.get(word) for word in _WORDS}],
        [versions, torch.version.cuda],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _cores() -> float:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _updates(recipe: Recipe, data: Dataset, world: int) -> int:
    """Steps of a training; 0 where its numbers do not fit, which the training itself will say."""
    batch = samples_per_update(recipe.train.batch_size, world)
    per_epoch = data.train.size // batch
    return recipe.train.length.steps(per_epoch, batch) if per_epoch else 0


def _kept(store: Store, mark: str) -> Any:
    """Return the tree of JSON under a fingerprint; None where there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        entry = json.loads((store.home / FOLDER / f"{mark}.json").read_text(encoding="utf-8"))
        if entry["format"] == _FORMAT and entry["fingerprint"] == mark:
            return entry["ceilings"]
    return None


def _checked(tree: Any) -> ThroughputLimits | None:
    """Return bounds as JSON kept them; None where they cannot be bounds."""
    try:
        found = ThroughputLimits(**tree)
        rates = [found.loader, found.model, found.flops_per_sample, found.peak_flops]
        return found if all(0 <= rate < math.inf for rate in rates if rate is not None) else None
    except (TypeError, AttributeError):
        return None


# ---- Measuring


def measure(
    recipe: Recipe,
    data: Dataset,
    runtime: Runtime,
    found: Mapping[str, Path],
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda text: None,
    stopping: Callable[[], bool] = lambda: False,
) -> ThroughputLimits:
    """Time the model and the loader, each alone, for `seconds` and a few batches at least.

    Called on every process. `found` holds the weights that the task needs. What cannot be measured is in `absent` with
    the reason. Afterwards generators, compiled code and peak memory are as they were, or as if new.
    """
    say(f"measuring upper bounds: model and loader, each alone, for about {seconds:g} s")
    # What a task may note about its training belongs to this one.
    recipe = replace(recipe, task=copy.deepcopy(recipe.task))
    alone = _Alone(recipe, data, runtime, found, seconds, stopping)
    with _unchanged(runtime, alone.recipe):
        figures = alone.all()
    return ThroughputLimits(**figures, absent=alone.absent)


class _Alone:
    """The parts of one measurement; each puts into `absent` why it has no figure."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        runtime: Runtime,
        found: Mapping[str, Path],
        seconds: float,
        stopping: Callable[[], bool],
    ):
        self.data, self.runtime, self.found = data, runtime, found
        self.recipe = with_compile_mode(recipe, runtime.device.type, _updates(recipe, data, runtime.world))
        self.seconds, self.stopping = seconds, stopping
        self.absent: dict[str, str] = {}

    def all(self) -> dict[str, Any]:
        """Every figure of `Ceilings`."""
        self.plan = Plan.make(self.recipe, self.data, self.runtime.world, self.runtime.rank)
        batch = self.plan.batch_size
        frozen = self._each("model", lambda: RepeatedBatches(self.data.train, self.plan, self.runtime))
        own = frozen[self.runtime.rank] if frozen else None
        model = self._each("model", lambda: self._model(own)) if own else None
        counted = [count for _, count in model or ()]
        if own and model and not any(counted):
            counted = self._each("flops_per_sample", lambda: self._flops(own)) or []
        # A process that was not ready when the others were has counted nothing; all do the same.
        counted = [count for count in counted if count]
        if frozen and not counted:
            self.absent.setdefault("flops_per_sample", self.absent.get("model", "no counted operation ran"))
        loader = self._each("loader", self._loader)
        self.runtime.barrier()
        peaks = self._each("peak_flops", self._peak)
        # Every step waits for the slowest process.
        return {
            "model": batch / max(seconds for seconds, _ in model) if model else None,
            "loader": batch / max(loader) if loader else None,
            "flops_per_sample": sum(counted) / len(counted) * self.plan.world / batch if counted else None,
            "peak_flops": sum(most for most, _ in peaks) if peaks else None,
            "peak_source": peaks[0][1] if peaks else "",
        }

    def _each(self, name: str, act: Callable[[], T]) -> list[T] | None:
        """Return what `act` returns on each process; None with the reason in `absent` where it fails on any."""
        done, reason = None, ""
        if any(self.runtime.all_gather(self.stopping())):
            reason = _STOPPED
        else:
            try:
                done = act()
                reason = _STOPPED if self.stopping() else ""
            except (UserError, RuntimeError, ValueError, OSError, MemoryError) as error:
                text = str(error).strip() or type(error).__name__
                reason = text.splitlines()[0][:300]
        # A batch stays on its process.
        told = self.runtime.all_gather((reason, None if isinstance(done, RepeatedBatches) else done))
        reasons = [reason for reason, _ in told if reason]
        if reasons:
            self.absent.setdefault(name, reasons[0])
            return None
        return [cast(T, done if rank == self.runtime.rank else other) for rank, (_, other) in enumerate(told)]

    # ---- the model

    def _model(self, frozen: RepeatedBatches) -> tuple[float, int | None]:
        """Return seconds of a step on this process, and its operations where they can be counted on the way."""
        # Compiled code cannot be looked into.
        return self._train(frozen, self.seconds, counted=self.recipe.train.compile == "off")

    def _flops(self, frozen: RepeatedBatches) -> int | None:
        """Return the operations of a step on this process that is not compiled."""
        return self._train(frozen, 0.0, counted=True, compile="off")[1]

    def _train(
        self, frozen: RepeatedBatches, seconds: float, counted: bool, **changes: Any
    ) -> tuple[float, int | None]:
        """Train on one batch for so long; returns seconds of a step, and operations of one more."""
        from trainkit.speed.flops import Counter  # what torch has of it takes a quarter of a second to import

        data = replace(self.data, train=frozen, evaluations={}, notes=())
        ends, handed = [time.perf_counter()], [frozen.seconds]

        def done() -> bool:
            warm = len(ends) > WARM + 1 or ends[-1] - ends[0] > 2 * seconds  # of slow steps there is time for few
            return self.stopping() or (len(ends) > 2 and warm and ends[-1] - ends[min(WARM, len(ends) - 2)] >= seconds)

        with Trainer(self._endless(**changes), data, self.runtime, weights=self.found) as trainer:
            trainer.open()
            poll = StopPoll(self.runtime, done)
            ended = False
            while not ended:
                poll.ask()
                trainer.step()
                trainer.judge(wait=False)
                ended = poll.answer()
                if len(ends) <= WARM or ended or done():
                    self.runtime.synchronize()  # so that what was handed to the device counts
                ends.append(time.perf_counter())
                handed.append(frozen.seconds)
            operations = None
            if counted:
                with Counter() as counter:
                    trainer.step()
                operations = counter.total
        first = min(WARM, len(ends) - 2)
        spent = np.diff(ends[first:])
        if frozen.copied:  # on a GPU copying overlaps with the device's work
            spent = spent - np.diff(handed[first:])
        return steady(spent), operations

    def _endless(self, **changes: Any) -> Recipe:
        """Return the recipe without an end, and without all that is not a step."""
        recipe = steps_alone(self.recipe)
        train = replace(recipe.train, length=_ENDLESS, schedule=Curve(), on_oom="stop", **changes)
        return replace(
            recipe,
            train=train,
            # A tiny learning rate: training on one batch would overfit or diverge.
            optim=replace(recipe.optim, lr=1e-6 * recipe.optim.lr),
            evaluations={},
            log=replace(recipe.log, every=_ENDLESS),
            loader=replace(recipe.loader, workers=0),
        )

    # ---- the loader

    def _loader(self) -> float:
        """Seconds in which this process reads its share of a step."""
        plan, loader = replace(self.plan, steps=10**9), self.recipe.loader
        stream = loading.training(
            self.data.train, partial(plan.keys, self.data.train, 0), loader, pin=self.runtime.device.type == "cuda"
        )
        # Leave out what the workers prefetched; then count whole rounds of them.
        at_once = max(1, loader.workers)
        warm = 1 + loader.workers * (loader.prefetch + 1)
        times: list[float] = []
        began = time.perf_counter()
        try:
            for _ in stream:
                times.append(time.perf_counter())
                if len(times) == 1 + at_once and times[-1] - began > 2 * self.seconds:
                    warm = 1  # too slow to wait for all prefetched batches
                rounds, rest = divmod(len(times) - warm, at_once)
                if self.stopping() or (rounds >= 1 and rest == 0 and times[-1] - times[warm - 1] >= self.seconds):
                    break
        finally:
            stream.close()
        spent = np.diff(times[warm - 1 :])
        if len(spent) < at_once:
            raise ValueError(_STOPPED)
        return plan.accumulation * steady(spent[: len(spent) // at_once * at_once].reshape(-1, at_once).mean(1))

    # ---- the device

    def _peak(self) -> tuple[float, str]:
        from trainkit.speed import flops

        return flops.peak(self.runtime.device, self.runtime.precision, min(0.3, self.seconds))


def steady(seconds: np.ndarray) -> float:
    """Seconds of one of several like things in a row: the median of the means of five parts.

    So bursts of other processes do not count, and periodic work, such as EMA weights every tenth step, does.
    """
    return float(np.median([part.mean() for part in np.array_split(seconds, 5) if len(part)]))


@contextlib.contextmanager
def _unchanged(runtime: Runtime, recipe: Recipe) -> Iterator[None]:
    """Put back what a training leaves in the process: generators, compiled code, memory and its peak."""
    cuda, mps = runtime.device.type == "cuda", runtime.device.type == "mps"
    kept, on_device = torch.get_rng_state(), torch.cuda.get_rng_state(runtime.device) if cuda else None
    on_mps = torch.mps.get_rng_state() if mps else None
    try:
        yield
    finally:
        torch.set_rng_state(kept)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, runtime.device)
        if on_mps is not None:
            torch.mps.set_rng_state(on_mps)
        if recipe.train.compile != "off":
            # Else shapes seen here would make the code of the run another one.
            torch._dynamo.reset()
        runtime.accelerator.free_memory()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(runtime.device)


# ---- Journal


def note(logger: RunLogger, resuming: bool) -> None:
    """Write the upper bounds of a run into its journal at step 0, once: not again where it is resumed."""
    if logger.limits is None or not logger.main or logger.folder is None:
        return
    figures = metrics(logger.limits)
    if resuming:
        before = journal.read(logger.folder.journal).metrics
        figures = {name: rate for name, rate in figures.items() if name not in before}
    if figures:
        logger.tracker.log(0, figures)
        if logger.limits.absent:
            logger.tracker.event(0, "ceilings_absent", dict(logger.limits.absent))

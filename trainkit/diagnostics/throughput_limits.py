"""Measure upper bounds of throughput: the loader, the model and each evaluation, each timed alone.

`Trainer.step` trains the model on one batch that is read once; its weights are discarded, and the training that follows
is bitwise unchanged. The figures are kept in the store, under a fingerprint of everything that affects them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import itertools
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
from torch import nn

from trainkit import rng
from trainkit.config import loader
from trainkit.config.schedule import Curve
from trainkit.config.schema import Log, Recipe
from trainkit.config.units import Span, samples_per_update
from trainkit.data.loader import stream as loading
from trainkit.diagnostics.repeated_batches import RepeatedBatches
from trainkit.distributed.launch_settings import with_compile_mode
from trainkit.distributed.runtime import Runtime
from trainkit.distributed.stop_poll import StopPoll
from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.interfaces import Dataset, Split, TrainsOnFeatures
from trainkit.models.compilation import compile_in_place
from trainkit.speed.limits import ThroughputLimits, lines, metrics
from trainkit.tracking import journal
from trainkit.tracking.store import Store
from trainkit.training import plan as planning
from trainkit.training.plan import Plan
from trainkit.training.run_logger import RunLogger
from trainkit.training.trainer import Trainer

T = TypeVar("T")

FOLDER = "ceilings"
"""Folder of the store's home that keeps what was measured."""
ENOUGH = 500
"""Steps from which `log.ceilings: auto` measures."""
SECONDS = 5.0
"""Time of each part; longer where a few batches take longer."""
SHARE = 0.01
"""Largest share of the training time that `auto` spends on each part."""
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
    word, updates = recipe.log.ceilings, _updates(recipe, data, runtime.world)
    if word == "off" or not updates:
        return None
    if word == "auto" and updates < ENOUGH and not runtime.on_main(lambda: (store.home / FOLDER).is_dir()):
        return None
    mark = fingerprint(recipe, data, runtime)
    if word == "auto":
        kept = _from_words(runtime.on_main(lambda: _words_of(known(store, mark))))
        if kept is not None or updates < ENOUGH:
            return kept
    others = busy()
    part = SHARE if word == "auto" else None
    measured = measure(recipe, data, runtime, found, SECONDS, say, part, stopping)
    if _STOPPED not in measured.absent.values():
        runtime.on_main(lambda: keep(store, mark, measured))
    say("\n".join([*lines(measured), *([others] if others else [])]))
    return measured


def known(store: Store, mark: str) -> ThroughputLimits | None:
    """Return what was measured under a fingerprint; None where nothing was, or the file is damaged."""
    try:
        entry = json.loads((store.home / FOLDER / f"{mark}.json").read_text(encoding="utf-8"))
        if entry["format"] != _FORMAT or entry["fingerprint"] != mark:
            return None
        return _from_words(entry["ceilings"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


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
    scored = {name: [e.split or name, e.batch_size] for name, e in recipe.evaluations.items()}
    versions = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    optim = {key: tree["optim"][key] for key in ("name", "clip_norm", "clip_agc", "fused", "nesterov")}
    parts = [
        {key: tree[key] for key in ("task", "data", "loader", "device")},
        [train, scored, optim, data.meta.digest],
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


def _words_of(ceilings: ThroughputLimits | None) -> dict[str, Any] | None:
    return None if ceilings is None else asdict(ceilings)


def _from_words(words: Any) -> ThroughputLimits | None:
    """Ceilings from what JSON kept of them. Raises ValueError or TypeError for what they cannot be."""
    if words is None:
        return None
    for key in ("loader", "model", "flops_per_sample", "peak_flops"):
        if words[key] is not None and not (isinstance(words[key], int | float) and 0 < words[key] < math.inf):
            raise ValueError(f"{key} is {words[key]!r}")
    for key in ("evaluations", "fetch", "absent"):
        if not isinstance(words[key], dict):
            raise ValueError(f"{key} is {words[key]!r}")
    if not all(
        isinstance(v, int | float) and 0 <= v < math.inf for k in ("evaluations", "fetch") for v in words[k].values()
    ):
        raise ValueError("a rate or a share is not a number")
    return ThroughputLimits(**words)


# ---- Measuring


def measure(
    recipe: Recipe,
    data: Dataset,
    runtime: Runtime,
    found: Mapping[str, Path],
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda text: None,
    share: float | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> ThroughputLimits:
    """Time the model, the loader and the evaluations, each alone, for `seconds` each and a few batches at least.

    With `share`, for at most that share of the expected training time. Called on every process.
    `found` holds the weights that the task needs. What cannot be measured is in `absent` with the reason. Afterwards
    generators, compiled code and peak memory are as they were, or as if new.
    """
    say(f"measuring upper bounds: model, loader and evaluations, each alone, for about {seconds:g} s at most")
    # What a task may note about its training belongs to this one.
    recipe = replace(recipe, task=copy.deepcopy(recipe.task))
    alone = _Alone(recipe, data, runtime, found, seconds, share, stopping)
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
        share: float | None,
        stopping: Callable[[], bool],
    ):
        self.data, self.runtime, self.found = data, runtime, found
        self.recipe = with_compile_mode(recipe, runtime.device.type, _updates(recipe, data, runtime.world))
        self.stopping = stopping
        self.absent: dict[str, str] = {}
        self._seconds, self._share = seconds, share
        self._updates, self._step_seconds = _updates(recipe, data, runtime.world), 0.0

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
        loader, parts = self._each("loader", self._loader), self._each("fetch", self._fetch)
        held = self._each("evaluations", self._evaluations)
        self.runtime.barrier()
        peaks = self._each("peak_flops", self._peak)
        # Every step waits for the slowest process.
        return {
            "model": batch / max(seconds for seconds, _ in model) if model else None,
            "loader": batch / max(loader) if loader else None,
            "fetch": parts[0] if parts else {},
            "evaluations": self._rates(held) if held else {},
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

    def budget(self, step_seconds: float | None = None) -> float:
        """Return the seconds a part may take; with a share of the training, from the step time."""
        self._step_seconds = step_seconds or self._step_seconds
        if self._share is None:
            return self._seconds
        wanted = self._share * self._updates * self._step_seconds if self._step_seconds else self._seconds / 5
        return min(self._seconds, max(0.1, wanted))

    # ---- the model

    def _model(self, frozen: RepeatedBatches) -> tuple[float, int | None]:
        """Return seconds of a step on this process, and its operations where they can be counted on the way."""
        # Compiled code cannot be looked into.
        return self._train(frozen, counted=self.recipe.train.compile == "off", timing=_Timing(self, frozen))

    def _flops(self, frozen: RepeatedBatches) -> int | None:
        """Return the operations of a step on this process that is not compiled."""
        return self._train(frozen, counted=True, compile="off")[1]

    def _train(
        self, frozen: RepeatedBatches, counted: bool, timing: _Timing | None = None, **changes: Any
    ) -> tuple[float, int | None]:
        """Train on one batch until `timing` has enough; returns seconds of a step, and operations of one more."""
        from trainkit.speed.flops import Counter  # what torch has of it takes a quarter of a second to import

        data = replace(self.data, train=frozen, evaluations={}, notes=())
        with Trainer(self._endless(**changes), data, self.runtime, weights=self.found) as trainer:
            trainer.open()
            poll = StopPoll(self.runtime, lambda: timing is None or timing.done or self.stopping())
            ends = False
            while not ends:
                poll.ask()
                trainer.step()
                trainer.judge(wait=False)
                if timing is not None:
                    timing.add()
                ends = poll.answer()
            if not counted:
                return (timing.seconds() if timing else 0.0), None
            with Counter() as counter:
                trainer.step()
            return (timing.seconds() if timing else 0.0), counter.total

    def _endless(self, **changes: Any) -> Recipe:
        """Return the recipe without an end, and without all that is not a step."""
        train = replace(self.recipe.train, length=_ENDLESS, schedule=Curve(), on_oom="stop", **changes)
        if train.nonfinite == "rollback":  # it would look for checkpoints; it costs what `stop` does
            train = replace(train, nonfinite="stop")
        return replace(
            self.recipe,
            train=train,
            # A tiny learning rate: training on one batch would overfit or diverge.
            optim=replace(self.recipe.optim, lr=1e-6 * self.recipe.optim.lr),
            evaluations={},
            best=None,
            stop_when=None,
            time_to={},
            promote=None,
            checkpoints=replace(self.recipe.checkpoints, every=None, at_end=False, lose_at_most=None),
            log=Log(every=_ENDLESS, figures=None, system_every=None, ceilings="off", profile=None),
            loader=replace(self.recipe.loader, workers=0),
        )

    # ---- the loader

    def _loader(self) -> float:
        """Seconds in which this process reads its share of a step."""
        self._refuse_features()
        plan, loader = replace(self.plan, steps=10**9), self.recipe.loader
        stream = loading.training(
            self.data.train, partial(plan.keys, self.data.train, 0), loader, pin=self.runtime.device.type == "cuda"
        )
        # Leave out what the workers prefetched; then count whole rounds of them.
        at_once, budget = max(1, loader.workers), self.budget()
        warm = 1 + loader.workers * (loader.prefetch + 1)
        times: list[float] = []
        began = time.perf_counter()
        try:
            for _ in stream:
                times.append(time.perf_counter())
                if len(times) == 1 + at_once and times[-1] - began > 2 * budget:
                    warm = 1  # too slow to wait for all prefetched batches
                rounds, rest = divmod(len(times) - warm, at_once)
                if self.stopping() or (rounds >= 1 and rest == 0 and times[-1] - times[warm - 1] >= budget):
                    break
        finally:
            stream.close()
        spent = np.diff(times[warm - 1 :])
        rounds = (
            spent[: len(spent) // at_once * at_once].reshape(-1, at_once).mean(1) if len(spent) >= at_once else spent
        )
        if not len(rounds):
            raise ValueError(_STOPPED)
        return plan.accumulation * steady(rounds)

    def _refuse_features(self) -> None:
        """Raise ValueError where training reads no images: reading those bounds nothing."""
        if isinstance(self.recipe.task, TrainsOnFeatures) and self.recipe.task.cached_features:
            raise ValueError("training reads cached features, not images")

    def _fetch(self) -> dict[str, float]:
        self._refuse_features()
        from trainkit.speed import fetch_profile

        split, plan = self.data.train, replace(self.plan, steps=10**9)
        threads = torch.get_num_threads()
        if self.recipe.loader.workers:
            torch.set_num_threads(1)  # as in a worker
        try:
            # From the middle of an epoch on: the beginning was just read, and is in memory.
            keys = plan.keys(split, plan.steps_per_epoch // 2)
            calls = (functools.partial(split.fetch, rows, epoch) for epoch, rows in keys)
            return fetch_profile.shares(calls, min(1.0, self.budget()))
        finally:
            torch.set_num_threads(threads)

    # ---- evaluations

    @torch.no_grad()
    def _evaluations(self) -> dict[str, float]:
        """Seconds of a batch of each evaluation on this process."""
        recipe, runtime = self.recipe, self.runtime
        if not recipe.evaluations:
            return {}
        if runtime.sharded:
            raise ValueError("parameters are sharded: a forward pass involves all ranks")
        splits = planning.evaluated(recipe, self.data)
        torch.manual_seed(rng.number(recipe.seed, "weights"))
        net = runtime.to_memory_format(recipe.task.build(self.data.meta, self.found, recipe.seed).model).eval()
        compile_in_place(net, recipe.train.compile)
        return {name: self._held(net, name, split) for name, split in splits.items()}

    def _held(self, net: nn.Module, name: str, split: Split) -> float:
        """Seconds of a batch of an evaluation, read and predicted; the first does not count where others follow."""
        runtime = self.runtime
        budget = self.budget() / len(self.recipe.evaluations)
        batches, times = self._batches(name, split), [time.perf_counter()]
        for rows, _ in itertools.chain(batches[:1], itertools.cycle(batches)):
            batch = split.on_device(runtime.to_device(split.fetch(rows, epoch=0)))
            with runtime.accelerator.autocast():
                self.recipe.task.predict(net, batch)
            runtime.synchronize()
            times.append(time.perf_counter())
            if len(times) == 2 and times[1] - times[0] > 2 * budget:
                break  # what takes so long shows little of its beginning
            if len(times) > 2 and (times[-1] - times[1] >= budget or self.stopping()):
                del times[0]
                break
        return steady(np.diff(times))

    def _batches(self, name: str, split: Split) -> list[tuple[np.ndarray, np.ndarray]]:
        size = self.recipe.evaluations[name].batch_size
        return list(loading.every_sample(split, size, self.runtime.world, self.runtime.rank))

    def _rates(self, held: list[dict[str, float]]) -> dict[str, float]:
        """Return samples/s of each evaluation over all processes; padding is not counted."""
        splits = planning.evaluated(self.recipe, self.data)
        slowest = {name: max(seconds[name] for seconds in held) for name in held[0]}
        return {name: splits[name].size / (s * len(self._batches(name, splits[name]))) for name, s in slowest.items()}

    # ---- the device

    def _peak(self) -> tuple[float, str]:
        from trainkit.speed import flops

        return flops.peak(self.recipe, self.runtime, seconds=min(0.3, self.budget()))


class _Timing:
    """When each step ended, and whether enough of them were steady."""

    def __init__(self, alone: _Alone, frozen: RepeatedBatches):
        self._alone, self._frozen = alone, frozen
        self._ends: list[float] = []
        self._handed: list[float] = []
        self._warm = 0
        """Steps that are left out; 0: not yet known."""
        self.done = False

    def add(self) -> None:
        """Note that a step has ended."""
        if not self.done:
            self._ends.append(time.perf_counter())
            self._handed.append(self._frozen.seconds)
            self.done = self._enough(len(self._ends))

    def _enough(self, step: int) -> bool:
        if step < 2:
            return False
        last = self._ends[-1] - self._ends[-2]
        budget = self._alone.budget(last)
        if not self._warm:
            # The first ones compile, choose algorithms and fetch memory; of slow ones two are all there is time for.
            if last > budget or (step >= 3 and self._ends[-1] - self._ends[0] >= 0.2 * budget):
                self._settle()
                self._warm = step
            return False
        if self._ends[-1] - self._ends[self._warm - 1] < budget:
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        """Let the device finish, so that what was handed to it counts."""
        self._alone.runtime.synchronize()
        self._ends[-1] = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds of a steady step; raises ValueError where the training ended before.

        On a CPU without the time in which batches were copied; on a GPU copying overlaps with the device's work.
        """
        spent = np.diff(self._ends[self._warm - 1 :]) if self._warm else np.zeros(0)
        if not len(spent):
            raise ValueError(f"training on one batch ended after {len(self._ends)} steps")
        if self._frozen.copied:
            spent = spent - np.diff(self._handed[self._warm - 1 :])
        return steady(spent)


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

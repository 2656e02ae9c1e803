"""Run `trainkit bench`: a parent run for the benchmark, a child run for each setting."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import loader, yaml_editor
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.diagnostics import stepped_process, switches
from trainkit.diagnostics.benchmark import SECONDS, Benchmark
from trainkit.diagnostics.benchmark_report import (
    BenchmarkState,
    Result,
    largest,
    metrics,
    outcome,
    rows,
    table,
)  # fmt: skip
from trainkit.errors import UserError, number_of
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.run_lifecycle import about, begin, ending
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.tracking.tracker import Silent, Tracker

_STATE = "benchmark.json"


def command(
    request: RunRequest,
    *,
    only: Sequence[str] = (),
    repeats: int = 5,
    steps: int | None = None,
    write: Path | None = None,
    resume: bool = False,
    say: Callable[[str], object] = print,
) -> int:
    """`trainkit bench`. Returns 0. Raises UserError for what the user can fix."""
    recipe = load(request)
    chosen = _refuse(request, recipe, only, repeats, steps, write)
    store = Store.locate()
    store.ready()
    begun = replace(request, resume="" if resume else None)
    with _stop_on_sigterm(), _tracked(begun, recipe, store, say) as (tracker, folder):
        for left in folder.path.glob(f"{stepped_process.PREFIX}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        file = folder.path / _STATE
        state = BenchmarkState.read(file)

        def save(result: Result | None) -> None:
            state.save(file)
            if result is not None:
                _nested(request, recipe, result, folder, store)

        benchmark = Benchmark(
            request, recipe, state, repeats=repeats, steps=steps, within=folder.path, say=say, save=save
        )
        try:
            many, took = benchmark.estimate(chosen)
            state.save(file)
            size = f"{steps} steps" if steps else f"about {SECONDS:g} s"
            say(
                f"{number_of(many, 'settings', 'setting')} of {repeats} pairs of {size}: about {_duration(took)}; "
                "compiled settings take longer. If it is interrupted, continue with --resume."
            )
            benchmark.run(chosen)
        finally:
            benchmark.close()
        kept = benchmark.kept()
        _conclude(state, kept, tracker)
        say("\n" + table(state, kept))
        say(outcome(kept))
        if write is not None:
            say(_write(request, recipe, state, kept, write, tracker))
    return 0


def _refuse(
    request: RunRequest, recipe: Recipe, only: Sequence[str], repeats: int, steps: int | None, write: Path | None
) -> list[str]:
    """Return the switches that are asked for. Raises UserError."""
    unknown = [name for name in only if name not in switches.NAMES]
    if unknown:
        raise UserError("--only", f"no switch {', '.join(map(repr, unknown))}", f"one of {', '.join(switches.NAMES)}")
    if repeats < 2:
        raise UserError("--repeats", f"{repeats}", "2 or more", "a confidence interval needs repeats")
    if steps is not None and steps < 1:
        raise UserError("--steps", f"{steps}", "1 or more")
    if not hasattr(os, "killpg"):
        raise UserError("bench", "this system cannot freeze processes", remedy="run it on Linux or macOS")
    if missing := recipe.data.missing():
        raise UserError(str(request.path), "; ".join(missing))
    if write is not None:
        yaml_editor.refuse(
            write, request.path, [s.recipe for s in recipe.task.required_weights().values() if s.recipe is not None]
        )
    return [name for name in switches.NAMES if name in only] if only else list(switches.NAMES)


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """End the benchmark on SIGTERM as on Ctrl-C: close trainings, keep the state, mark the run KILLED."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _tracked(
    request: RunRequest, recipe: Recipe, store: Store, say: Callable[[str], object]
) -> Iterator[tuple[Tracker, RunFolder]]:
    """Open the parent run of the benchmark: its tracker and its folder."""
    from trainkit.tracking.tracker import Silent, Tracker

    text = loader.dump(recipe)
    # Of the whole text: the hash of a recipe leaves out settings that affect speed, such as the loader.
    digest = hashlib.sha256(f"bench\n{text}".encode()).hexdigest()
    tracker: Tracker | Silent = Silent()
    with ending(lambda: tracker):
        folder, resuming = begin(request, store, f"{recipe.name}-bench", recipe.seed, digest, text, False)
        tracker = Tracker.start(
            folder,
            store,
            experiment=_experiment(recipe),
            run_name=folder.name,
            params=loader.flat(recipe),
            tags={"trainkit.recipe": recipe.name, "trainkit.benchmark": "benchmark"},
            note=f"Effect of each switch: `trainkit bench {request.path.name}`.\n\n{about(request)}",
            resume=resuming,
            system_metrics_every=0.0,
        )
        if resuming:
            tracker.cut_back(0)
        tracker.artifact_text("recipe/original.yaml", request.path.read_text(encoding="utf-8"))
        tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in request.overrides))
        say(f"run {folder.name}{' (resumed)' if resuming else ''}")
        yield tracker, folder
        tracker.finish("FINISHED")


def _experiment(recipe: Recipe) -> str:
    return f"{recipe.log.experiment or recipe.name}-bench"


def _nested(request: RunRequest, recipe: Recipe, result: Result, folder: RunFolder, store: Store) -> None:
    """Log one setting as a child run of the benchmark."""
    from trainkit.tracking.tracker import Tracker

    digest = hashlib.sha256(json.dumps(asdict(result), sort_keys=True).encode()).hexdigest()
    own = store.new_run(f"{recipe.name}-{result.switch}", recipe.seed, digest, parent=folder.name)
    tracker = Tracker.start(
        own,
        store,
        experiment=_experiment(recipe),
        run_name=f"{result.switch}: {result.title}"[:200],
        params={
            "switch": result.switch,
            "change": result.title,
            "overrides": " ".join(result.words),
            "environment": " ".join(f"{k}={v}" for k, v in result.environment),
            "gives_up": result.gives_up,
        },
        tags={"trainkit.recipe": recipe.name, "trainkit.benchmark": folder.name, "trainkit.verdict": result.verdict},
        parent=folder.name,
        system_metrics_every=0.0,
    )
    tracker.log(0, metrics(result))
    tracker.finish("FAILED" if result.failed else "FINISHED", result.failed or None)


def _conclude(state: BenchmarkState, kept: Result | None, tracker: Tracker) -> None:
    from trainkit.plots import benchmark as drawing

    listed = rows(state, kept)
    found = metrics(kept) if kept is not None else {"speed/ratio": 1.0}
    if (most := largest(state)) is not None:
        found["speed/largest_micro_batch"] = most[0]
    tracker.log(0, found)
    tracker.artifact_text("tables/benchmark.txt", table(state, kept) + "\n")
    # A CSV column has one type: what was not measured is NaN.
    numbers = ("samples_per_s", "ratio", "low", "high", "memory_gb", "loss_drift", "output_drift")
    columns = {
        key: [math.nan if row[key] is None else row[key] for row in listed]
        if key in numbers
        else [row[key] for row in listed]
        for key in listed[0]
    }
    tracker.table("tables/benchmark.csv", columns)
    tracker.figure("figures/benchmark.png", drawing.figure(listed))


def _write(
    request: RunRequest, recipe: Recipe, state: BenchmarkState, kept: Result | None, new: Path, tracker: Tracker
) -> str:
    if kept is None or not kept.words or kept.interval is None:
        return f"{new} was not written: no override to put into it"
    machine = state.machine
    lines = [f"speed    {kept.interval} vs {request.path.name}, {kept.rate:.4g} samples/s, by"]
    lines.append(f"         {kept.title}; trainkit bench, {time.strftime('%Y-%m-%d')}")
    where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores'):g} cores"
    lines.append(f"         on {where}, torch {machine.get('torch')}, {platform.system()}")
    lines += [f"         with {key}={value}" for key, value in kept.environment if key != "OMP_NUM_THREADS"]
    text = yaml_editor.rewrite(
        request.path, switches.merge(request.overrides, kept.words), [line[:117] for line in lines], request.plugins
    )
    new.write_text(text, encoding="utf-8")
    tracker.artifact_text(f"recipe/{new.name}", text)
    return f"wrote {new}"


def _duration(took: float) -> str:
    return f"{took / 60:.0f} minutes" if took >= 90 else f"{took:.0f} seconds"

"""Run `trainkit bench`: compare settings, and keep the table as a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.config import loader
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.diagnostics import bench_settings
from trainkit.diagnostics.benchmark import Benchmark, Result
from trainkit.environment.process import interrupted_by_signals
from trainkit.errors import UserError, number_of
from trainkit.terminal import duration
from trainkit.tracking.run_lifecycle import about, begin, ending
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.tracking.tracker import Silent, Tracker


def command(
    request: RunRequest,
    *,
    repeats: int = 5,
    steps: int | None = None,
    say: Callable[[str], object] = print,
) -> RunRequest | None:
    """`trainkit bench`. Returns the request that trains with what helps, or None. Raises UserError."""
    base, axes = bench_settings.read(request)
    recipe = load(base)
    _refuse(base, recipe, repeats, steps)
    store = Store.locate()
    store.ready()
    with interrupted_by_signals(), _tracked(request, recipe, store, say) as (tracker, within):
        benchmark = Benchmark(base, repeats, steps, within, say)
        try:
            axes = axes or bench_settings.suggested(recipe, benchmark.ready)
            many = number_of(sum(len(axis.values) for axis in axes), "settings")
            say(f"{many} in {repeats} pairs of blocks each: about {duration(benchmark.seconds(axes))}")
            benchmark.run(axes)
        finally:  # what was measured before an interrupt is kept, too
            kept = benchmark.kept()
            if benchmark.results:
                say("\n" + benchmark.table())
                _log(benchmark, kept, tracker)
    if kept is None:
        say("no setting is significantly faster with the same training: keep the recipe as it is")
        return None
    say(f"kept: {' '.join(kept.words)}, {kept.ratio}")
    return replace(base, overrides=bench_settings.merge(base.overrides, kept.words))


def _refuse(request: RunRequest, recipe: Recipe, repeats: int, steps: int | None) -> None:
    if repeats < 2:
        raise UserError("--repeats", f"{repeats}", "2 or more", "a confidence interval needs repeats")
    if steps is not None and steps < 1:
        raise UserError("--steps", f"{steps}", "1 or more")
    if not hasattr(os, "killpg"):
        raise UserError("bench", "this system cannot freeze processes", remedy="run it on Linux or macOS")
    if missing := recipe.data.missing():
        raise UserError(str(request.path), "; ".join(missing))


@contextmanager
def _tracked(
    request: RunRequest, recipe: Recipe, store: Store, say: Callable[[str], object]
) -> Iterator[tuple[Tracker, Path]]:
    """Open the run of the benchmark: its tracker and its folder."""
    from trainkit.tracking.tracker import Silent, Tracker

    text = loader.dump(recipe)
    # Of the whole text: the hash of a recipe leaves out settings that affect speed, such as the loader.
    digest = hashlib.sha256(f"bench\n{text}".encode()).hexdigest()
    tracker: Tracker | Silent = Silent()
    with ending(lambda: tracker):
        folder, _ = begin(
            replace(request, resume=None), store, f"{recipe.name}-bench", recipe.seed, digest, text, False
        )
        tracker = Tracker.start(
            folder,
            store,
            experiment=f"{recipe.log.experiment or recipe.name}-bench",
            run_name=folder.name,
            params=loader.flat(recipe),
            tags={"trainkit.recipe": recipe.name, "trainkit.benchmark": "benchmark"},
            note=f"Throughput of settings: `trainkit bench {request.path.name}`.\n\n{about(request)}",
            system_metrics_every=0.0,
        )
        tracker.artifact_text("recipe/original.yaml", request.path.read_text(encoding="utf-8"))
        tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in request.overrides))
        say(f"run {folder.name}")
        yield tracker, folder.path
        tracker.finish("FINISHED")


def _log(benchmark: Benchmark, kept: Result | None, tracker: Tracker) -> None:
    tracker.artifact_text("tables/benchmark.txt", benchmark.table() + "\n")
    ratio = kept.ratio if kept is not None else None
    figures = {"speed/ratio": 1.0}
    if ratio is not None:
        figures = {"speed/ratio": ratio.value, "speed/ratio_low": ratio.low, "speed/ratio_high": ratio.high}
    tracker.log(0, figures)

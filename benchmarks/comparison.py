"""Shared by the accuracy benchmarks: table rows, each a recipe with overrides, trained with several seeds.

A finished run is found by the hash of its recipe and its number of processes, and not repeated. Seeds are the outer
loop, so that rows are interleaved in time. `--table` trains nothing; `--jobs 2` trains two runs at once; `--quick`
trains one seed for a few steps, to see that the benchmark runs: its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
DATA = ROOT.parent / "shared" / "data"
SEEDS = (0, 1, 2)
QUICK = ("train.length=4 steps", "train.schedule={name: constant}", "log.every=2 steps")


@dataclass(frozen=True)
class Row:
    """One row: what it is called, its recipe, what is changed in it, and where it runs."""

    title: str
    recipe: str
    changes: tuple[str, ...] = ()
    config: str | None = None
    """A file of accelerate_configs; None: this process's Python, without a launcher."""


def run(rows: Sequence[Row], columns: Mapping[str, str], experiment: str, reference: str | None = None) -> None:
    """Train what is missing and print the table: mean and standard deviation of each column's last value.

    `columns` are titles to names of metrics; `reference` is a frozen model (`pixels`) that runs score before step 1.
    """
    words = argparse.ArgumentParser()
    words.add_argument("--table", action="store_true", help="train nothing")
    words.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    words.add_argument("--quick", action="store_true", help="one seed, a few steps: to see that it runs")
    asked = words.parse_args()
    seeds = SEEDS
    if asked.quick:
        rows, seeds = [replace(row, changes=(*row.changes, *QUICK)) for row in rows], SEEDS[:1]
    if not asked.table:
        missing = [(row, seed) for seed in seeds for row in rows if finished(row, seed, experiment) is None]
        with ThreadPoolExecutor(asked.jobs) as pool:
            list(pool.map(lambda job: _train(*job, experiment), missing))
    print(table(rows, columns, experiment, reference))


def need_data() -> None:
    """End where the real data sets are not there, and let recipes find them."""
    if not DATA.is_dir():
        sys.exit("the real data sets (../shared/data) are not here")
    os.environ.setdefault("TRAINKIT_DATA", str(DATA))


def finished(row: Row, seed: int, experiment: str, fits: Callable[[Any], bool] = lambda _: True) -> Any:
    """The newest finished run of a row and seed whose folder `fits`, or None."""
    from trainkit.checkpoint import storage
    from trainkit.config import loader
    from trainkit.tracking.store import Store

    digest = loader.digest(loader.load(recipe(row), _changes(row, seed, experiment)))
    processes = 2 if row.config == "cpu_2proc" else 1
    for folder in reversed(Store.locate().runs()):
        if (folder.info().recipe_hash, folder.info().status) == (digest, "FINISHED"):
            newest, _ = storage.newest_valid(folder.checkpoints)
            state = json.loads((newest / storage.STATE).read_text())
            if state["identity"]["processes"] == processes and fits(folder):
                return folder
    return None


def table(rows: Sequence[Row], columns: Mapping[str, str], experiment: str, reference: str | None = None) -> str:
    """The table of the runs that are there, as Markdown."""
    from trainkit.tracking import journal

    lines = [f"| | {' | '.join(columns)} | samples/s | runs, seeds {' '.join(map(str, SEEDS))} |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for row in rows:
        runs = [found for seed in SEEDS if (found := finished(row, seed, experiment)) is not None]
        if not runs:
            continue
        histories = [journal.read(found.journal) for found in runs]
        if reference is not None and len(lines) == 2:
            before = [histories[0].series(f"{reference}/{metric}")[1][0] for metric in columns.values()]
            lines.append(f"| {reference} | {' | '.join(f'{value:.3f}' for value in before)} | | |")
        cells = [spread([h.series(metric)[1][-1] for h in histories]) for metric in columns.values()]
        rate = statistics.mean(h.series("final/speed/samples_per_s")[1][-1] for h in histories)
        names = " ".join(found.name.removeprefix(f"{row.recipe}-") for found in runs)
        lines.append(f"| {row.title} | {' | '.join(cells)} | {rate:.0f} | {row.recipe} {names} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation; a single value as it is."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def command(row: Row, seed: int, experiment: str) -> list[str]:
    """The words that train a row with a seed."""
    words = [sys.executable]
    if row.config is not None:
        words += ["-m", "accelerate.commands.launch", "--config_file"]
        words += [str(ROOT / "accelerate_configs" / f"{row.config}.yaml")]
    return [*words, str(ROOT / "trainkit" / "run.py"), str(recipe(row)), *_changes(row, seed, experiment)]


def recipe(row: Row) -> Path:
    """The file of a row's recipe."""
    return ROOT / "recipes" / f"{row.recipe}.yaml"


def _train(row: Row, seed: int, experiment: str) -> None:
    print(f"== {row.title}, seed {seed}", flush=True)
    subprocess.run(command(row, seed, experiment), check=True)


def _changes(row: Row, seed: int, experiment: str) -> list[str]:
    return [*row.changes, f"log.experiment={experiment}", f"seed={seed}"]

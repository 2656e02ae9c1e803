"""The statements of the guides, read from `table.yaml`, and the ways to measure them.

A claim about a switch is measured by two trainings in alternation, that of a part by timing it, and one that follows
from numbers alone is computed.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from benchmarks.claims import measurements
from benchmarks.claims.bench import COMPILING, PATIENCE, Bench, Found, found_ratio
from benchmarks.results import Skipped
from trainkit.config.run_request import load
from trainkit.config.schema import Recipe
from trainkit.config.units import samples_per_update
from trainkit.diagnostics import stepped_process
from trainkit.diagnostics.stepped_process import Ready

TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True, kw_only=True)
class Switch:
    """Two trainings of the recipe in alternating blocks. `{cores}` in an override stands for the number of cores."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()
    """Variables of the second alone; the first has none of these."""
    of: Literal["samples/s", "memory"] = "samples/s"
    gpu: bool = False
    """True for a claim about GPUs only."""
    compiles: bool = False
    cores: int = 1
    """Least number of cores for which the claim can be measured."""
    note: str = ""

    recipe = True

    def __call__(self, bench: Bench, guide: str) -> Found:
        """Measure it."""
        if bench.cores < self.cores:
            raise Skipped(f"{self.cores} loader processes need {self.cores} cores; this machine has {bench.cores:g}")
        before, after = (bench.words((*self.both, *words)) for words in (self.before, self.after))
        blank = tuple((name, None) for name, _ in self.environment)
        patience = COMPILING if self.compiles else PATIENCE
        with (
            bench.training(guide, before, blank, patience) as slow,
            bench.training(guide, after, self.environment, patience) as fast,
        ):
            steps = bench.count(slow), bench.count(fast)
            pairs = list(stepped_process.in_turns(slow, fast, steps, bench.repeats))
        one, other = [a for a, _ in pairs], [b for _, b in pairs]
        if self.of == "memory":
            used = [block.memory_gb for block in one], [block.memory_gb for block in other]
            found, unit = stepped_process.ratio(used[0], used[1]), "GB"
            shown = max(used[0]), max(used[1])
        else:
            rates = [block.rate for block in one], [block.rate for block in other]
            found, unit = stepped_process.ratio(rates[1], rates[0]), "samples/s"
            shown = float(np.median(rates[0])), float(np.median(rates[1]))
        said = f"{shown[0]:.4g} {unit} before, {shown[1]:.4g} after"
        return found_ratio(found, f"{said}; {self.note}" if self.note else said)


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Something timed or computed in this process. `function` names one of `measurements`: (bench, guide) -> Found."""

    function: str
    gpu: bool = False
    recipe: bool = True
    """Whether the figure is of the guide's recipe."""

    def __call__(self, bench: Bench, guide: str) -> Found:
        """Measure it."""
        return getattr(measurements, self.function)(bench, guide)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole training with more and fewer evaluations: computed from the measured seconds of a step and of one
    evaluation."""

    evaluation: str
    """Its name; empty: the recipe's first."""
    every: tuple[str, str]
    """How often before and after."""
    length: str
    """Of the training, as the guide has it."""

    gpu = False
    recipe = True

    def __call__(self, bench: Bench, guide: str) -> Found:
        """Measure it."""
        recipe = load(bench.request(guide))
        name = self.evaluation or next(iter(recipe.evaluations), "")
        if name not in recipe.evaluations:
            raise Skipped(f"{recipe.name} has no evaluation {name!r}")
        cost, held = bench.evaluation(guide, name)
        recipes = [
            load(
                bench.request(
                    guide,
                    (
                        f"train.length={self.length}",
                        f"evaluations.{name}.every={every}",
                        f"evaluations.{name}.budget=null",
                    ),
                )
            )
            for every in self.every
        ]
        ready = bench.ready(guide)
        took = [[_seconds(r, name, ready, pace, cost) for pace in bench.updates(guide)] for r in recipes]
        ratio = stepped_process.ratio([1 / s for s in took[1]], [1 / s for s in took[0]])
        epoch = ready.steps_per_epoch * float(np.median(bench.updates(guide)))
        word = "takes" if held else "would take"
        return found_ratio(ratio, f"one evaluation {word} {cost:.3g} s, an epoch {epoch:.3g} s")


def _seconds(recipe: Recipe, name: str, ready: Ready, step_s: float, cost: float) -> float:
    """Return the seconds of a whole training with one of its evaluations."""
    per_epoch, batch = ready.steps_per_epoch, samples_per_update(recipe.train.batch_size, 1)
    steps, evaluation = recipe.train.length.steps(per_epoch, batch), recipe.evaluations[name]
    apart = evaluation.every.steps(per_epoch, batch) if evaluation.every is not None else steps + 1
    times = evaluation.at_start + steps // apart + (evaluation.at_end and steps % apart != 0)
    return steps * step_s + times * cost


@dataclass(frozen=True, kw_only=True)
class Known:
    """A statement that follows from numbers alone."""

    true: bool

    gpu = recipe = False

    def __call__(self, bench: Bench, guide: str) -> Found:
        """Say whether it is true."""
        return Found(true=self.true)


Way = Switch | Inside | Whole | Known


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of a guide."""

    id: str
    guide: str
    """Of `GUIDES`."""
    said: str
    """The statement, translated and shortened."""
    promised: str = "faster"
    """The number as the guide has it."""
    least: float = 1.0
    """The ratio that this means at least; 1: better at all."""
    most: float | None = None
    """The ratio that it means at most."""
    how: str = ""
    """How it is measured, where its way does not say it."""
    way: Way


_WAYS: Mapping[str, type[Way]] = {"switch": Switch, "inside": Inside, "whole": Whole}


def read_claims(file: Path = TABLE) -> tuple[Claim, ...]:
    """Read the claims of all guides, in the order of the file."""
    guides = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tuple(_claim(guide, name, row) for guide, rows in guides.items() for name, row in rows.items())


def _claim(guide: str, name: str, row: Mapping[str, Any]) -> Claim:
    (word,) = {*_WAYS, "known"} & row.keys()
    rest = {key: value for key, value in row.items() if key != word}
    if word == "known":
        return Claim(id=name, guide=guide, way=Known(true=row[word]), **rest)
    settings = {key: _frozen(value) for key, value in row[word].items()}
    return Claim(id=name, guide=guide, way=_WAYS[word](**settings), **rest)


def _frozen(value: Any) -> Any:
    """Lists as tuples, and the name of the system where it is asked for."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return value.replace("{system}", platform.system()) if isinstance(value, str) else value


CLAIMS = read_claims()

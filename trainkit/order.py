"""What the command line asked for: a recipe, its changes, and how to begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from trainkit import config, copying, pretrained
from trainkit.errors import UserError
from trainkit.places import locate
from trainkit.recipe import Recipe


@dataclass(frozen=True)
class Order:
    """What the command line asked for."""

    path: Path
    """The recipe's file; recipes it names are looked up from its folder."""
    overrides: Sequence[str] = ()
    plugins: Sequence[str] = ()
    resume: str | None = None
    """Name of a run to continue; empty: the newest unfinished one of this recipe; None: start a new one."""
    elastic: bool = False
    """Continue on another number of processes: every sample still counts once, but bits are no longer promised."""
    folds: bool = False
    """Train once for each part into which the data is divided, that part held out."""


def check(order: Order) -> str:
    """The resolved recipe, and sentences about data and weights that are not there yet, and about lines that a copy has
    marked. Touches no device or store.

    Raises ConfigError with every mistake of the recipe and of the recipes it needs.
    """
    recipe = load(order)
    if order.folds:
        divide(order)
    notes = list(recipe.data.missing())
    for name, source in recipe.task.needs().items():
        if source.recipe is not None:
            load(Order(beside(order.path, source.recipe), plugins=order.plugins))
        elif source.weights.startswith(pretrained.PREFIX):
            if not pretrained.is_here(source.weights):
                notes.append(f"task.{name}: {source.weights} is not here yet; `trainkit fetch RECIPE` downloads it")
        elif ":" not in source.weights and not locate(source.weights).is_file():
            notes.append(f"task.{name}.weights: {locate(source.weights)} does not exist")
    said = [f"to decide: {line}" for line in copying.open_lines(order.path, recipe)]
    said += [f"not there yet: {note}" for note in notes]
    return config.dump(recipe) + "".join(f"# {line}\n" for line in said)


def load(order: Order) -> Recipe:
    """Load the recipe of an order."""
    return config.load(order.path, list(order.overrides), tuple(order.plugins))


@dataclass(frozen=True)
class Fold:
    """One part of the data, held out."""

    number: int
    order: Order
    recipe: Recipe


def divide(order: Order) -> list[Fold]:
    """The folds of an order, checked as far as that goes without a device: `data.fold` is 0, 1, ... in them.

    Raises UserError for data that has no folds, and for a recipe that scores nothing.
    """
    recipe = load(order)
    if not {"folds", "fold"} <= {f.name for f in fields(recipe.data)}:
        kind = getattr(recipe.data, "name", type(recipe.data).__name__)
        found = f"the data of {recipe.name}, {kind}, has no `folds` and `fold`"
        raise UserError("--folds", found, "data that is divided by patients, such as `volumes`")
    for word in order.overrides:
        if word.partition("=")[0].strip() == "data.fold":
            raise UserError(
                "--folds", f"{word} is given too", remedy="leave one of them out: --folds trains every fold"
            )
    if recipe.data.folds < 2:
        raise UserError("data.folds", f"{recipe.data.folds}", "2 or more", "one part cannot be held out of itself")
    if not recipe.evaluations:
        raise UserError("--folds", f"{recipe.name} has no evaluations", "one of what is held out")
    parts = []
    for number in range(recipe.data.folds):
        words = (*order.overrides, f"data.fold={number}")
        child = replace(order, overrides=words, resume=order.resume and "", folds=False)
        parts.append(Fold(number, child, load(child)))
    return parts


def beside(recipe: Path, named: str) -> Path:
    """A recipe named in a recipe, from that recipe's folder."""
    return (recipe.parent / named).resolve()

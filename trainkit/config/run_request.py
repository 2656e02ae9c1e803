"""What the command line asked for: a recipe, its changes, and how to begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

from trainkit.autoconfig import new_recipe
from trainkit.checkpoint import timm_weights
from trainkit.config import loader
from trainkit.config.schema import Recipe
from trainkit.config.validation import nearest
from trainkit.errors import UserError
from trainkit.paths import locate

_SHOWN = 30
"""Settings of a sweep that are listed when it is checked."""


@dataclass(frozen=True)
class Sweep:
    """How the settings of a sweep are chosen: all that there are, so many at random, or so many proposed by Optuna."""

    random: int | None = None
    """How many are drawn."""
    tpe: int | None = None
    """How many are proposed, by a tree-structured Parzen estimator."""
    draws: int = 0
    """Seed of draws and proposals; that of the training is `seed` of the recipe."""
    pruner: str | None = None
    """What ends a run that promises little: a word of `advice.PRUNERS`."""


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
    or_start: bool = False
    """Where `resume` is empty and there is nothing to continue, start a run."""
    seeds: int | None = None
    """Train once for each of so many seeds, from that of the recipe upwards."""
    sweep: Sweep | None = None
    """Train once for each of several settings; some of `overrides` then have several values, or a range."""


def check(order: Order) -> str:
    """The resolved recipe, of several the first; sentences about data and weights that are not there yet, about lines
    that a copy has marked; and of a sweep its settings. Touches no device or store.

    Raises ConfigError with every mistake of the recipe and of the recipes it needs, else UserError for what timm lacks.
    """
    children = children_of(order)
    recipe = children[0].recipe if order.sweep else load(order)
    refuse_unknown(recipe, *(child.recipe for child in children))
    notes = list(recipe.data.missing())
    said = [f"to decide: {line}" for line in new_recipe.open_lines(order.path, recipe)]
    for name, source in recipe.task.needs().items():
        if source.recipe is not None:
            other = Order(beside(order.path, source.recipe), plugins=order.plugins)
            needed = load(other)
            refuse_unknown(needed)
            open_lines = new_recipe.open_lines(other.path, needed)
            said += [f"to decide: {other.path.name}, {line}" for line in open_lines]
        elif source.weights.startswith(timm_weights.PREFIX):
            if not timm_weights.is_here(source.weights):
                notes.append(f"task.{name}: {source.weights} is not here yet; `trainkit fetch RECIPE` downloads it")
        elif ":" not in source.weights and not locate(source.weights).is_file():
            notes.append(f"task.{name}.weights: {locate(source.weights)} does not exist")
    said += [f"not there yet: {note}" for note in notes]
    if order.sweep:
        said += [f"{child.title}: {child.said}" for child in children[:_SHOWN]]
        said += [f"and {len(children) - _SHOWN} more"] if len(children) > _SHOWN else []
        said += [f"one of {order.sweep.tpe} that will be proposed"] if order.sweep.tpe else []
    return loader.dump(recipe) + "".join(f"# {line}\n" for line in said)


def refuse_unknown(*recipes: Recipe) -> None:
    """Raise UserError for the first network or optimizer of timm that timm does not have, with the nearest names.

    timm, which takes seconds to import, is imported where a recipe names something of it, and no network is built. A
    field says by `metadata={"timm": PREFIX}` that it names a network of timm where its text begins so.
    """
    for recipe in recipes:
        for where, model in _of_timm(recipe, ""):
            from trainkit.models import timm_classifier

            timm_classifier.refuse_unknown(model, where)
        if recipe.optim.name.startswith("timm:"):
            from timm.optim import list_optimizers

            if (name := recipe.optim.name[5:].lower().rpartition("_")[2]) not in (known := list_optimizers()):
                near = nearest(name, known)
                remedy = f"did you mean timm:{near}?" if near else "timm.optim.list_optimizers() lists the names"
                raise UserError("optim.name", f"timm has no optimizer {name!r}", remedy=remedy)


def _of_timm(block: object, path: str) -> Iterator[tuple[str, str]]:
    """Key path and name of every network of timm in a block."""
    if not is_dataclass(block):
        return
    for f in fields(block):
        value, place = getattr(block, f.name), f"{path}.{f.name}".lstrip(".")
        prefix = f.metadata.get("timm")
        if prefix is not None and value.startswith(prefix):
            yield place, value.removeprefix(prefix)
        yield from _of_timm(value, place)


def load(order: Order) -> Recipe:
    """Load the recipe of an order."""
    return loader.load(order.path, list(order.overrides), tuple(order.plugins))


@dataclass(frozen=True)
class Child:
    """One of several runs that an order asks for."""

    title: str
    """`fold 0`, `seed 3`, `trial 7`."""
    order: Order
    recipe: Recipe
    said: str = ""
    """What sets it apart, where the title does not say it: the words of a setting."""


def children_of(order: Order) -> list[Child]:
    """The runs that an order asks for beneath one of their own; none where it asks for a single run.

    Of a sweep whose settings are proposed as it goes, one example. Raises UserError.
    """
    if order.folds:
        return divide(order)
    if order.seeds is not None:
        return repeated(order)
    if order.sweep is not None:
        from trainkit.experiments.sweep import settings

        return settings(order)
    return []


def child_of(order: Order, title: str, words: Sequence[str], said: str = "") -> Child:
    """An order for one run with these overrides. With --resume it goes on where there is something to go on with."""
    resume = order.resume and ""  # by name it is the run above that goes on
    own = replace(order, overrides=tuple(words), resume=resume, folds=False, seeds=None, sweep=None)
    return Child(title, own, load(own), said)


def divide(order: Order) -> list[Child]:
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
    return [
        child_of(order, f"fold {number}", (*order.overrides, f"data.fold={number}"))
        for number in range(recipe.data.folds)
    ]


def repeated(order: Order) -> list[Child]:
    """An order with `order.seeds` seeds, the first that of the recipe. Raises UserError for what has no spread."""
    recipe = load(order)
    if order.seeds < 2:
        raise UserError("--seeds", f"{order.seeds}", "2 or more", "the spread of one run cannot be known")
    if not recipe.evaluations:
        raise UserError("--seeds", f"{recipe.name} has no evaluations", "one whose scores are averaged")
    words = [word for word in order.overrides if word.partition("=")[0].strip() != "seed"]
    seeds = range(recipe.seed, recipe.seed + order.seeds)
    return [child_of(order, f"seed {seed}", (*words, f"seed={seed}")) for seed in seeds]


def beside(recipe: Path, named: str) -> Path:
    """A recipe named in a recipe, from that recipe's folder."""
    return (recipe.parent / named).resolve()

"""Check a recipe without a device or a store, and open the data and weights that its run would open."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainkit.autoconfig import new_recipe
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, beside, load
from trainkit.config.schema import Recipe
from trainkit.data import hub, kinds
from trainkit.data.sources import PARTS, SAMPLE, split_of
from trainkit.data.split import key, named_sets
from trainkit.data.storage.image_store import is_packed
from trainkit.environment.process import asked_processes
from trainkit.errors import UserError
from trainkit.experiments import validation
from trainkit.experiments.launch import children_of
from trainkit.experiments.timm_names import refuse_unknown
from trainkit.interfaces import Dataset
from trainkit.paths import locate, recipe_word
from trainkit.tracking.store import Store
from trainkit.training import dependencies

_SHOWN = 30
"""Settings of a sweep that are listed when it is checked."""
MOST_FILES, MOST_BYTES = 5_000, 64 << 20
"""Largest sets that are opened: of so many images of 32 pixels it takes some 10 s of a core, once."""


def check(request: RunRequest, whole: bool = True) -> str:
    """Return notes, the settings of a sweep, and if `whole` the resolved recipe (the first of several) below them.

    The notes are about missing data and weights and about marked lines. Uses no device and no store. Raises ConfigError
    with every error of the recipe and of its dependencies, and UserError for names that timm does not have.
    """
    request = dependencies.with_their_split(request, Store.locate())
    children = children_of(request)
    recipe = children[0].recipe if request.sweep else load(request)
    refuse_unknown(recipe, *(child.recipe for child in children))
    notes = list(recipe.data.missing())
    said = [f"to decide: {line}" for line in new_recipe.open_lines(request.path, recipe)]
    for name, source in recipe.task.required_weights().items():
        if source.recipe is not None:
            other = RunRequest(beside(request.path, source.recipe), plugins=request.plugins)
            other = dependencies.with_split_of(other, loader.tree(recipe), request.path.name, makes=True)
            needed = load(other)
            refuse_unknown(needed)
            open_lines = new_recipe.open_lines(other.path, needed)
            said += [f"to decide: {other.path.name}, {line}" for line in open_lines]
            continue
        where, named = f"task.{name}.weights", recipe_word(request.path)
        if absent := dependencies.missing(source.weights or "", Store.locate(), where, named):
            notes.append(absent)
    said += [f"not there yet: {note}" for note in notes]
    if request.sweep:
        said += [f"{child.title}: {child.overrides}" for child in children[:_SHOWN]]
        said += [f"and {len(children) - _SHOWN} more"] if len(children) > _SHOWN else []
    if not whole:
        return "".join(f"{line}\n" for line in said)
    return "".join(f"# {line}\n" for line in said) + loader.dump(recipe)


def open_copied(files: Sequence[Path], plugins: Sequence[str]) -> None:
    """Open the data of a recipe that was copied, if it is small, as its run would. Raises UserError, and removes the
    `files` of the copy, the recipe first, where that fails."""
    recipe = load(RunRequest(files[0], plugins=tuple(plugins)))
    try:
        if _is_opened(recipe):
            recipe.data.open(recipe.seed)
    except UserError:
        for file in files:
            file.unlink()
        raise


def open_all(request: RunRequest, large: bool = False) -> list[str]:
    """Validate what a run of this request would refuse before its first step, and open its data, weights and networks.

    Data that is not packed yet is packed into the cache. Unless with `large`, only the files of sets that are too large
    for that are looked for, and no network is built for them; returns the names of such recipes. Raises the UserError
    with which the run would end.
    """
    left: list[str] = []

    def opened(recipe: Recipe) -> Dataset | None:
        if large or _is_opened(recipe):
            return recipe.data.open(recipe.seed)
        left.append(recipe.name)
        return None

    request = dependencies.with_their_split(request, Store.locate())
    recipes = [child.recipe for child in children_of(request)] or [load(request)]
    validation.validate(request, recipes, asked_processes(), opened)
    return list(dict.fromkeys(left))


def _is_opened(recipe: Recipe) -> bool:
    """Return False for data that is large. Raises UserError where it cannot be opened."""
    absent = dict(sentence.split(": ", 1) for sentence in recipe.data.missing())
    sets = {key(name): text for name, text in named_sets(recipe.data).items() if text not in ("", *PARTS)}
    small = kinds.of(recipe.data) is None or all(_is_small(text) for name, text in sets.items() if name not in absent)
    if not small:
        for where, found in absent.items():
            raise UserError(where, found)
    return small


def _is_small(text: str) -> bool:
    """Return True for a set that is opened at once: a packed one, or a built-in one, which is drawn and packed once."""
    if f"{text}:".startswith(SAMPLE):
        return True
    path = split_of(locate(text))[0]
    if hub.is_hub(text) or not path.exists():  # a word of a set that lies elsewhere
        return False
    if is_packed(path):
        return True
    count = size = 0
    for entry in _files(path):
        count, size = count + 1, size + entry
        if count > MOST_FILES or size > MOST_BYTES:
            return False
    return True


def _files(path: Path) -> Iterator[int]:
    """Yield the sizes of the files below a folder, or of a file; none of what is not there."""
    if path.is_file():
        yield path.stat().st_size
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.lstat(os.path.join(folder, name)).st_size

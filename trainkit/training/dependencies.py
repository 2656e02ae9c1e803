"""The weights that a recipe needs before it can begin: found, or trained first by the recipe that makes them.

What `weights:` may say, `find` finds:

| word                                           | file                                                           |
|------------------------------------------------|----------------------------------------------------------------|
| `timm:NAME.TAG`                                | timm's pretrained weights, which `trainkit download` brought   |
| `run:NAME`, or the name of a run               | its best weights, or the last where no score names a best      |
| `models:/ID`, `models:/NAME@ALIAS`, `.../NAME/3` | a logged model, a version of the registry                    |
| a folder                                       | of a run, a checkpoint, a logged model or `trainkit export`    |
| a path                                         | that file; relative ones begin at TRAINKIT_DATA                |

A word without a slash is a path where no run has the name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.checkpoint import timm_weights, verification
from trainkit.config import diff, loader, stored_recipes, yaml_reader
from trainkit.config.run_request import RunRequest, beside, load
from trainkit.config.schema import Recipe
from trainkit.config.yaml_reader import Tree
from trainkit.data.folders import read_json
from trainkit.data.split import named_sets
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.interfaces import ChecksLeakage
from trainkit.paths import data_root, locate, recipe_word
from trainkit.tracking.logged_model import ABOUT
from trainkit.tracking.run_folder import RunFolder, run_key
from trainkit.tracking.run_names import is_path
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights

RUN, MODEL = "run:", "models:/"
_DESCRIPTION_BYTES = 16 << 20
_EXPECTED = "a file, run:NAME, models:/NAME@ALIAS, timm:NAME.TAG, or a folder of trainkit export"
_log = logging.getLogger("trainkit")

Train = Callable[[RunRequest, Recipe, dict[str, "Dependency"]], RunFolder]


@dataclass(frozen=True)
class Dependency:
    """A file of weights, and the run that produced it, if any."""

    file: Path
    run: RunFolder | None = None
    new: bool = False
    """The run was made just now, for the run that needs it."""


def gather(
    request: RunRequest, recipe: Recipe, runtime: Runtime, store: Store, train: Train | None
) -> dict[str, Dependency]:
    """Return a file for each dependency of the recipe. `train` produces missing ones; None: they must exist.

    Raises UserError that names the missing ones.
    """

    def file(name: str, word: str) -> Path:
        return find(word, store, f"task.{name}.weights", recipe_word(request.path))

    dependencies = {}
    for name, source in recipe.task.required_weights().items():
        if source.recipe is None:
            dependencies[name] = Dependency(
                Path(runtime.on_main(lambda n=name, s=source: str(file(n, s.weights or ""))))
            )
        else:
            child = RunRequest(beside(request.path, source.recipe), plugins=request.plugins, elastic=request.elastic)
            child = with_split_of(child, loader.tree(recipe), request.path.name, makes=True)
            dependencies[name] = _made(name, child, request.resume is not None, runtime, store, train)
    return dependencies


def _made(
    name: str, child: RunRequest, resume: bool, runtime: Runtime, store: Store, train: Train | None
) -> Dependency:
    """The best weights of a recipe's run: one that finished with this recipe and data, or one made now."""
    recipe = load(child)
    digest = loader.digest(recipe)
    key = run_key(digest, recipe.data.open(recipe.seed).meta.digest)

    def look() -> tuple[str | None, str | None]:
        done, begun = store.finished_with(key), store.newest_unfinished(recipe.name, digest)
        return done and str(done.path), begun and begun.name

    done, begun = runtime.on_main(look)
    if done is not None:
        if runtime.main:
            print(f"{name}: reusing run {Path(done).name} (same recipe and data)", flush=True)
        return Dependency(best_weights(Path(done)), RunFolder(Path(done)))
    if train is None:
        raise UserError(str(child.path), "has no finished run", remedy="train it first")
    if runtime.main:
        print(f"{name}: training {child.path} first", flush=True)
    child = replace(child, resume=begun if resume else None)
    folder = train(child, recipe, gather(child, recipe, runtime, store, train))
    return Dependency(best_weights(folder.path), folder, new=True)


# ---- The split of weights


def with_their_split(request: RunRequest, store: Store, logged: bool = False) -> RunRequest:
    """Return the request with the split of the runs whose weights its recipe starts from, or that it continues by name.

    Else images that those were trained on would be evaluated. A run that is continued by its name alone has its own.
    `logged`: ask MLflow for logged models too. Raises UserError as `with_split_of` does. What cannot be read or found
    is left to those who need it.
    """
    if request.settings is not None:
        return request
    trained: list[tuple[Tree, str]] = []
    with contextlib.suppress(UserError):  # words of a sweep have several values
        if request.resume:
            run = store.find(request.resume, unfinished=True)
            trained.append((diff.read(run.recipe), f"run {run.name}"))
        for name, source in load(request).task.required_weights().items():
            word = source.weights or ""
            if word and not word.startswith((timm_weights.PREFIX, *([] if logged else [MODEL]))):
                trained.append(trained_by(find(word, store, name)))
    for recipe, named in trained:
        request = with_split_of(request, recipe, named)
    return request


def trained_by(weights: Path) -> tuple[Tree, str]:
    """Return the recipe, as values, by which a file of weights was trained, and its run; None where it is not known.

    It stands in the folder of the run, or in the description beside a logged or exported model. Raises UserError.
    """
    if (run := run_of(weights)) is not None:
        return diff.read(run.recipe), f"run {run.name}"
    for about in filter(Path.is_file, (weights.with_name(ABOUT), weights.with_name("model.json"))):
        said = read_json(about, _DESCRIPTION_BYTES, "a description of a model")
        if isinstance(said, dict) and isinstance(text := said.get("recipe"), str):
            return stored_recipes.complete(yaml_reader.read(text).tree), f"run {said.get('run')}"
    return None, ""


def run_of(weights: Path) -> RunFolder | None:
    """Return the run in whose checkpoints a file of weights lies; None where it lies elsewhere."""
    home = next(iter(weights.absolute().parents[2:3]), None)
    return RunFolder(home) if home is not None and (home / "run.json").is_file() else None


def with_split_of(
    request: RunRequest, other: Tree, named: str, *, makes: bool = False, recipe: Recipe | None = None
) -> RunRequest:
    """Return the request with the split of another recipe, as values, of the same data, where it names no split.

    `other` trained the weights that the request starts from; with `makes` the request makes those of `other`. `recipe`
    is that of the request where it is loaded already.
    Raises UserError where it names a different one, or holds out more than the weights were kept from; with `leakage:
    allow` that is a warning.
    """
    recipe = recipe or load(request)
    own, theirs = loader.tree(recipe)["data"], other.get("data") if isinstance(other, dict) else None
    if not isinstance(theirs, dict) or own.get("name") != theirs.get("name"):
        return request
    if locate(named_sets(recipe.data)["train"]) != locate(str(theirs.get("train"))):
        return request
    seeds = [stored_recipes.split_seed({"data": data}) for data in (own, theirs)]
    key = stored_recipes.exposed(*((own, theirs) if makes else (theirs, own)))
    if None not in seeds and seeds[0] != seeds[1]:
        if loader.states(request.path, request.overrides, "data", "split_seed"):
            key = "split_seed"
        else:
            _tell_split(f"note: data.split_seed={seeds[1]} in {request.path.name}, the split of {named}")
            request = replace(request, overrides=(*request.overrides, f"data.split_seed={seeds[1]}"))
    if not key:
        return request
    found, expected = f"{own.get(key)} in {request.path.name}", f"{theirs.get(key)}, the split of {named}"
    if isinstance(recipe.data, ChecksLeakage) and recipe.data.leakage == "allow":
        _log.warning("data.%s: %s, not %s: images that were trained on are evaluated", key, found, expected)
        return request
    remedy = "leave it out, or use other weights: these were trained on what it holds out"
    raise UserError(f"data.{key}", found, expected, remedy)


@functools.cache
def _tell_split(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


# ---- Words of `weights:`


def find(word: str, store: Store, where: str, recipe: str = "RECIPE") -> Path:
    """Return the file of weights that a word names. `where` is the key of the recipe that has it, and `recipe` the
    recipe as a command takes it, for messages.

    Raises UserError where there is no such file, run or model, and where timm's are not on this machine yet.
    """
    if word.startswith(RUN):
        return best_weights(store.find(word.removeprefix(RUN)).path)
    if word.startswith(MODEL):
        return store.model_file(word)
    if word.startswith(timm_weights.PREFIX):
        return timm_weights.find(word, recipe=recipe)
    try:
        named = store.find_or_path(word, data_root())
    except UserError as error:
        found, as_path = f"{locate(word)} does not exist", is_path(word) or Path(word).suffix
        if as_path:
            raise UserError(where, found, _EXPECTED) from None
        raise UserError(where, f"{found}, and as a run {error.found}", _EXPECTED, error.remedy) from None
    if isinstance(named, RunFolder):
        return best_weights(named.path)
    return in_folder(named) if named.is_dir() else named


def missing(word: str, store: Store, where: str, recipe: str = "RECIPE") -> str:
    """Return a sentence where `find` would find nothing, else nothing; a logged model is not looked for.

    Raises UserError for weights that timm does not have.
    """
    if word.startswith(MODEL):
        return ""
    if word.startswith(timm_weights.PREFIX) and timm_weights.is_here(word):
        return ""
    try:
        find(word, store, where, recipe)
    except UserError as error:
        return "; ".join(part for part in (f"{error.where}: {error.found}", error.remedy) if part)
    return ""


def in_folder(folder: Path) -> Path:
    """Return the file of weights in the folder of a run, a checkpoint, a logged model or an export.

    Of a run they are its best ones. Raises UserError for another folder, and for a checkpoint that is damaged.
    """
    if (folder / "run.json").is_file():
        return best_weights(RunFolder(folder).path)
    if (folder / verification.STATE).is_file():
        if problems := verification.verify(folder):
            place, _, found = problems[0].partition(": ")
            raise UserError(place, found, remedy="name another checkpoint of the run")
        return folder / "model.safetensors"
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        expected = "a folder of a run, a checkpoint, a logged model or `trainkit export`"
        raise UserError(str(folder), f"a folder with {len(files)} safetensors files", expected)
    return files[0]

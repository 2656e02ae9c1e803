"""The weights that a recipe needs before it can begin: found, or trained first by the recipe that makes them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.checkpoint import timm_weights
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, beside, load
from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.paths import locate
from trainkit.tracking.run_folder import RunFolder, run_key
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights

_log = logging.getLogger("trainkit")

Train = Callable[[RunRequest, Recipe, dict[str, "Dependency"]], RunFolder]


@dataclass(frozen=True)
class Dependency:
    """A file of weights, and the run that made it where there is one."""

    file: Path
    run: RunFolder | None = None
    new: bool = False
    """The run was made just now, for the run that needs it."""


def gather(
    request: RunRequest, recipe: Recipe, runtime: Runtime, store: Store, train: Train | None
) -> dict[str, Dependency]:
    """A file for each of the recipe's needs. `train` makes the missing ones; None: they must be there.

    Raises UserError naming what is missing.
    """
    dependencies = {}
    for name, source in recipe.task.required_weights().items():
        if source.recipe is None:
            dependencies[name] = Dependency(
                Path(runtime.on_main(lambda n=name, s=source: str(weights_file(n, s.weights or "", store))))
            )
        else:
            child = RunRequest(beside(request.path, source.recipe), plugins=request.plugins, elastic=request.elastic)
            dependencies[name] = _made(name, child, request.resume is not None, runtime, store, train)
    return dependencies


def weights_file(name: str, word: str, store: Store) -> Path:
    """The file behind `weights: ...`: a path, `run:NAME`, or a logged model. Raises UserError where there is none."""
    if word.startswith("run:"):
        return best_weights(store.find(word[4:]).path)
    if word.startswith("models:/"):
        return store.model_file(word)
    if word.startswith(timm_weights.PREFIX):
        return timm_weights.find(word)
    path = locate(word)
    if not path.is_file():
        raise UserError(f"task.{name}.weights", f"{path} does not exist", remedy="give a file, run:NAME or models:/ID")
    return path


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

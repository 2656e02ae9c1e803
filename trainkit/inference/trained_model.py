"""Load the trained network of a run, and the description of its data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from trainkit.config.schema import Recipe
from trainkit.data.folders import read_json
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.interfaces import DatasetInfo
from trainkit.tracking.run_folder import META, RunFolder
from trainkit.training.dependencies import best_weights

if TYPE_CHECKING:
    from torch import nn

    from trainkit.distributed.runtime import Runtime

JSON_BYTES = 64 << 20
"""Most bytes of a description of a model or its data; the names of two million classes take 40 MB."""


@dataclass(frozen=True)
class Rebuilt:
    """A trained network in evaluation mode, on the device that a run would use."""

    recipe: Recipe
    meta: DatasetInfo
    net: nn.Module
    runtime: Runtime
    weights: Path


def load_network(
    recipe: Recipe, meta: DatasetInfo, file: Path, part: Callable[[nn.Module], nn.Module] = lambda net: net
) -> nn.Module:
    """Build the network of a recipe and load the weights of a file, or those of a part of it, in evaluation mode.

    Initial weights of the training are not needed. Raises UserError if the file does not fit.
    """
    from trainkit.checkpoint import safe_load

    tensors = safe_load.read_tensors(file)
    try:
        net = recipe.task.build(meta, {}, recipe.seed).model
    except UserError:
        raise
    except Exception as error:  # recipe and description may be anybody's; none of them may become a traceback
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        found = f"the network of recipe {recipe.name} cannot be built ({reason})"
        raise UserError(str(file), found, remedy="use weights and recipe of the same network") from error
    safe_load.load_into(part(net), tensors, str(file))
    return net.eval()


@contextmanager
def rebuilt(folder: RunFolder, recipe: Recipe, meta: DatasetInfo) -> Iterator[Rebuilt]:
    """Load the network of a run with the weights of its best checkpoint.

    Initial weights of the training are not needed. Raises UserError if there is no checkpoint, or it does not fit.
    """
    made = placed(recipe, meta, best_weights(folder.path))
    try:
        yield made
    finally:
        made.runtime.close()


def placed(
    recipe: Recipe, meta: DatasetInfo, weights: Path, part: Callable[[nn.Module], nn.Module] = lambda net: net
) -> Rebuilt:
    """Load the network of a recipe, or a part of it, from a file and place it on the device.

    Raises UserError if the file does not fit.
    """
    from trainkit.distributed.runtime import Runtime

    runtime = Runtime(recipe)
    return Rebuilt(recipe, meta, runtime.to_memory_format(load_network(recipe, meta, weights, part)), runtime, weights)


def origin(folder: RunFolder, weights: Path, meta: DatasetInfo) -> dict[str, Any]:
    """Describe the origin of a prediction."""
    return {"run": folder.name, "weights": f"{weights.parent.name}/{weights.name}", "trained_on": meta.digest}


def read_meta(folder: RunFolder) -> DatasetInfo:
    """Read the description of a run's data, `meta.json`. Raises UserError if it is missing or damaged."""
    file = folder.path / META
    if not os.path.lexists(file):
        remedy = "name a run that has trained; for a cross-validation, the run of a fold"
        raise UserError(str(file), "does not exist", remedy=remedy)
    return meta_of(read_json(file, JSON_BYTES, "a description of data"), str(file), "repeat the run")


def meta_of(said: Json, where: str, remedy: str) -> DatasetInfo:
    """Parse a `DatasetInfo` from JSON; ignore fields of newer versions. Raises UserError for values of other types."""
    try:
        found = TypeAdapter(DatasetInfo).validate_python(said)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "meta"
        raise UserError(where, f"cannot be read: {key}: {first['msg']}"[:300], remedy=remedy) from None
    if min((found.classes, found.vocabulary, found.text_length, *found.shape)) < 0:
        raise UserError(where, "cannot be read: a negative size", remedy=remedy)
    return found

"""Load the trained network of a run, and the description of its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.tracking.run_folder import META, RunFolder
from trainkit.training.dependencies import best_weights

if TYPE_CHECKING:
    from torch import nn

    from trainkit.distributed.runtime import Runtime


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

    net = recipe.task.build(meta, {}, recipe.seed).model
    safe_load.load_into(part(net), safe_load.read_tensors(file), str(file))
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
    try:
        return meta_of(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        remedy = "name a run that has trained; for a cross-validation, the run of a fold"
        raise UserError(str(file), "does not exist", remedy=remedy) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="repeat the run") from None


def meta_of(said: Mapping[str, Any]) -> DatasetInfo:
    """Parse a `DatasetInfo` from JSON; ignore fields of newer versions."""
    known = {field.name for field in fields(DatasetInfo)}
    held: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known}
    return DatasetInfo(**held)

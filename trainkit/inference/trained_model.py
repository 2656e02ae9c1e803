"""Load the network that a run trained, and the description of its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.interfaces import Meta
from trainkit.tracking.store import RunFolder
from trainkit.training.dependencies import best_weights

if TYPE_CHECKING:
    from torch import nn

    from trainkit.distributed.runtime import Machine

META = "meta.json"
"""File of a run's folder that says what it was trained on, as far as its task knew: `task.Meta`."""


@dataclass(frozen=True)
class Rebuilt:
    """A run's network with its best weights, in evaluation mode, on the device that a run would take."""

    folder: RunFolder
    recipe: Recipe
    meta: Meta
    net: nn.Module
    machine: Machine
    weights: Path


def load_network(
    recipe: Recipe, meta: Meta, file: Path, part: Callable[[nn.Module], nn.Module] = lambda net: net
) -> nn.Module:
    """Build the network of a recipe and load the weights of a file, or those of a part of it, in evaluation mode.

    Weights that training started from need not be there. Raises UserError where the file does not fit.
    """
    from trainkit.checkpoint import safe_load

    net = recipe.task.build(meta, {}, recipe.seed).learns
    safe_load.load_into(part(net), safe_load.read_tensors(file), str(file))
    return net.eval()


@contextmanager
def rebuilt(folder: RunFolder, recipe: Recipe, meta: Meta) -> Iterator[Rebuilt]:
    """Load the network of a run, all of whose weights are those of its best checkpoint.

    Weights that it started from need not be there. Raises UserError where there is no checkpoint, or it does not fit.
    """
    from trainkit.distributed.runtime import Machine

    file = best_weights(folder.path)
    machine = Machine(recipe)
    try:
        yield Rebuilt(folder, recipe, meta, machine.layout(load_network(recipe, meta, file)), machine, file)
    finally:
        machine.close()


def origin(folder: RunFolder, weights: Path, meta: Meta) -> dict[str, Any]:
    """Describe where a prediction comes from."""
    return {"run": folder.name, "weights": f"{weights.parent.name}/{weights.name}", "trained_on": meta.digest}


def read_meta(folder: RunFolder) -> Meta:
    """Read the description of a run's data, `meta.json`. Raises UserError when that is missing or damaged."""
    file = folder.path / META
    try:
        return meta_of(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        remedy = "name a run that trained; of a cross-validation one of its folds"
        raise UserError(str(file), "is missing", remedy=remedy) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="repeat the run") from None


def meta_of(said: Mapping[str, Any]) -> Meta:
    """Parse a `Meta` that was written as JSON, without what a newer version has beside it."""
    known = {field.name for field in fields(Meta)}
    held: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known}
    return Meta(**held)

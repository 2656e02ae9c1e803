"""Load what a run trained: its network, weights and what its data were."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UserError
from trainkit.interfaces import Meta
from trainkit.tracking.store import RunFolder
from trainkit.training.dependencies import best_weights

if TYPE_CHECKING:
    from torch import nn

    from trainkit.config.schema import Recipe
    from trainkit.distributed.runtime import Machine

from trainkit.config.schema import Recipe

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


@contextmanager
def rebuilt(folder: RunFolder, recipe: Recipe, meta: Meta) -> Iterator[Rebuilt]:
    """The network of a run, all of whose weights are those of its best checkpoint.

    Weights that it started from need not be there. Raises UserError where there is no checkpoint, or it does not fit.
    """
    from trainkit.checkpoint import safe_load
    from trainkit.distributed.runtime import Machine

    file = best_weights(folder.path)
    machine = Machine(recipe)
    try:
        net = recipe.task.build(meta, {}, recipe.seed).learns
        safe_load.load_into(net, safe_load.read_tensors(file), str(file))
        yield Rebuilt(folder, recipe, meta, machine.layout(net).eval(), machine, file)
    finally:
        machine.close()


def origin(folder: RunFolder, weights: Path, meta: Meta) -> dict[str, Any]:
    """Where a prediction comes from, in words that stand beside it."""
    return {"run": folder.name, "weights": f"{weights.parent.name}/{weights.name}", "trained_on": meta.digest}


def read_meta(folder: RunFolder) -> Meta:
    """What a run was trained on, as its `meta.json` says. Raises UserError when that is missing or damaged."""
    file = folder.path / META
    try:
        return meta_of(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        remedy = "name a run that trained; of a cross-validation one of its folds"
        raise UserError(str(file), "is missing", remedy=remedy) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="repeat the run") from None


def meta_of(said: Mapping[str, Any]) -> Meta:
    """A `Meta` that was written as JSON; what a newer version has beside it is left out."""
    known = {field.name for field in fields(Meta)}
    return Meta(**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known})

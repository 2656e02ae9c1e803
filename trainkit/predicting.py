"""Label maps for new volumes or pictures: the best weights of a run, and files named after those that they are of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import config
from trainkit.errors import UserError
from trainkit.launch import META
from trainkit.needs import best_weights
from trainkit.store import RunFolder, Store
from trainkit.task import Meta

if TYPE_CHECKING:
    from torch import nn

    from trainkit.machine import Machine
    from trainkit.recipe import Recipe


@dataclass(frozen=True)
class Predicted:
    """What was written, and what was not."""

    written: tuple[Path, ...]
    """Label maps."""
    damaged: tuple[str, ...]
    """Sentences about files that could not be read: they have no label map."""
    notes: tuple[str, ...]
    """Sentences about what is odd."""
    names: tuple[str, ...]
    """What the labels 0, 1, ... stand for."""
    weights: Path


@dataclass(frozen=True)
class Rebuilt:
    """A run's network with its best weights, in evaluation mode, on the device that a run would take."""

    folder: RunFolder
    recipe: Recipe
    meta: Meta
    net: nn.Module
    machine: Machine
    weights: Path


OnProgress = Callable[[int, int], None]


def predict(
    run: str,
    source: Path | str,
    out: Path,
    *,
    mirror: bool = False,
    plugins: tuple[str, ...] = (),
    on_progress: OnProgress | None = None,
) -> Predicted:
    """Write a label map for every volume or picture at `source`, by the best weights of a run.

    What they are is what the run learned from: see `predicting_volumes` and `predicting_scenes`. `mirror`: mean over
    mirror images, of volumes along all axes, of pictures left to right. Files that cannot be read are named, and the
    others go on. On the GPU if there is one.

    Raises UserError before any work when the run does not write label maps, there is nothing to read, or a file to be
    written is there already.
    """
    folder = Store.locate().find(run)
    meta = read_meta(folder)
    recipe = config.load(folder.recipe, (), plugins)
    if hasattr(recipe.task, "label_map") and meta.axes:
        from trainkit import predicting_volumes as of_kind
    elif hasattr(recipe.task, "probabilities") and recipe.data.name == "scenes":
        from trainkit import predicting_scenes as of_kind
    else:
        raise UserError(
            f"run {folder.name}",
            "writes no label maps of volumes or pictures",
            "a run of the task segment3d or segment2d",
        )
    return of_kind.predict(folder, recipe, meta, source, out, mirror, on_progress)


@contextmanager
def rebuilt(folder: RunFolder, recipe: Recipe, meta: Meta) -> Iterator[Rebuilt]:
    """The network of a run, all of whose weights are those of its best checkpoint.

    Weights that it started from need not be there. Raises UserError where there is no checkpoint, or it does not fit.
    """
    from trainkit import weights
    from trainkit.machine import Machine

    file = best_weights(folder.path)
    machine = Machine(recipe)
    try:
        net = recipe.task.build(meta, {}, recipe.seed).learns
        weights.load_into(net, weights.read_tensors(file), str(file))
        yield Rebuilt(folder, recipe, meta, machine.layout(net).eval(), machine, file)
    finally:
        machine.close()


def read_meta(folder: RunFolder) -> Meta:
    """What a run was trained on, as its `meta.json` says. Raises UserError when that is missing or damaged."""
    file = folder.path / META
    try:
        return meta_of(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        remedy = "name a run that trained; of a cross-validation one of its folds"
        raise UserError(str(file), "is missing", remedy=remedy) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="repeat the run") from None


def meta_of(said: Mapping[str, Any]) -> Meta:
    """A `Meta` that was written as JSON; what a newer version has beside it is left out."""
    known = {field.name for field in fields(Meta)}
    return Meta(**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known})


def check_free(out: Path, targets: Sequence[Path]) -> None:
    """Refuse to write over anything: a folder of images may be named by mistake."""
    if out.exists() and not out.is_dir():
        raise UserError(str(out), "is a file", "a folder to write to")
    there = [target for target in targets if target.exists()]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UserError(str(there[0]), f"is there already{more}", remedy="name another folder, or move them away")

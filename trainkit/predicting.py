"""Label maps for new volumes: the best weights of a run, and files written over those that they are of.

A volume is prepared as those that the run was trained on, and its label map brought back to the grid and the axes of
its file, with the same affine: it lies over the image in any viewer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import config
from trainkit.errors import UserError
from trainkit.launch import META
from trainkit.needs import best_weights, gather
from trainkit.order import Order
from trainkit.store import RunFolder, Store
from trainkit.task import Meta

if TYPE_CHECKING:
    import numpy as np

    from trainkit.data.nifti import Header
    from trainkit.data.volume_prepare import Preparation, Prepared
    from trainkit.data.volume_sources import Case

COARSER = 1.5
"""How many times the spacing of a volume may be that of the training, or the other way round, before it is said."""


@dataclass(frozen=True)
class Predicted:
    """What was written, and what was not."""

    written: tuple[Path, ...]
    damaged: tuple[str, ...]
    """Sentences about files that could not be read: they have no label map."""
    notes: tuple[str, ...]
    """Sentences about what is odd."""
    names: tuple[str, ...]
    """What the labels 0, 1, ... stand for."""
    weights: Path


def predict(
    run: str,
    source: Path | str,
    out: Path,
    *,
    mirror: bool = False,
    plugins: tuple[str, ...] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Predicted:
    """Write a label map `OUT/<id>.nii.gz`, uint8, for every volume at `source`, by the best weights of a run.

    `source` is as `volume_sources.open_volumes` takes it, without label maps. `mirror`: mean over the mirror images
    along all axes, in eight times the time. Files that cannot be read are named, and the others go on. On the GPU if
    there is one.

    Raises UserError before any work when the run does not write label maps, there are no volumes, or a file to be
    written is there already.
    """
    from trainkit.data import nifti, volume_sources
    from trainkit.data.volume_prepare import Preparation, prepare

    store = Store.locate()
    folder = store.find(run)
    meta = read_meta(folder)
    recipe = config.load(folder.recipe, (), plugins)
    if not hasattr(recipe.task, "label_map") or not meta.axes:
        raise UserError(f"run {folder.name}", "writes no label maps of volumes", "a run of the task segment3d")
    found = volume_sources.open_volumes(source, labelled=False)
    targets = {case.id: out / f"{case.id}.nii.gz" for case in found.cases}
    _check_free(out, list(targets.values()))
    how = Preparation(meta.axes, tuple(meta.resampled) or None)
    headers, damaged, notes = _headers(found.cases)
    notes = [*found.left_out, *notes, *_odd_spacings(headers, how, meta)]

    from trainkit import weights
    from trainkit.machine import Machine

    file = best_weights(folder.path)
    machine = Machine(recipe)
    try:
        order = Order(folder.recipe, plugins=plugins)
        needs = {name: need.file for name, need in gather(order, recipe, machine, store, None).items()}
        net = recipe.task.build(meta, needs, recipe.seed).learns
        weights.load_into(net, weights.read_tensors(file), str(file))
        machine.layout(net).eval()
        out.mkdir(parents=True, exist_ok=True)
        written = []
        for done, case in enumerate(case for case in found.cases if case.id in headers):
            if on_progress:
                on_progress(done, len(headers))
            try:
                array, header = nifti.read_image(case.image)
                prepared = prepare(array, header, how)
            except UserError as error:
                damaged.append(str(error))
                continue
            labels = _label(prepared, recipe.task, net, machine, mirror)
            nifti.write_labels(targets[case.id], prepared.orientation.undo(labels), header)
            written.append(targets[case.id])
        if on_progress:
            on_progress(len(headers), len(headers))
    finally:
        machine.close()
    return Predicted(tuple(written), tuple(damaged), tuple(notes), meta.class_names, file)


def read_meta(folder: RunFolder) -> Meta:
    """What a run was trained on, as its `meta.json` says. Raises UserError when that is missing or damaged."""
    file = folder.path / META
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Meta)}
        return Meta(**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known})
    except FileNotFoundError:
        remedy = "name a run that trained; of a cross-validation one of its folds"
        raise UserError(str(file), "is missing", remedy=remedy) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="repeat the run") from None


def _check_free(out: Path, targets: list[Path]) -> None:
    """Refuse to write over anything: a folder of images may be named by mistake."""
    if out.exists() and not out.is_dir():
        raise UserError(str(out), "is a file", "a folder to write label maps to")
    there = [target for target in targets if target.exists()]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UserError(str(there[0]), f"is there already{more}", remedy="name another folder, or move them away")


def _headers(cases: tuple[Case, ...]) -> tuple[dict[str, Header], list[str], list[str]]:
    """The headers that can be read by id, sentences about those that cannot, and about what is odd."""
    from trainkit.data import nifti

    headers, damaged, notes = {}, [], []
    for case in cases:
        try:
            headers[case.id] = nifti.read_header(case.image)
            notes += [f"{case.image}: {note}" for note in headers[case.id].notes]
        except UserError as error:
            damaged.append(str(error))
    return headers, damaged, notes


def _odd_spacings(headers: Mapping[str, Header], how: Preparation, meta: Meta) -> list[str]:
    """A sentence where volumes that are not resampled have another spacing than those of the training."""
    from trainkit.data import nifti

    if how.spacing is not None:
        return []
    off = {}
    for id, header in headers.items():
        spacing = nifti.orientation(header.affine, how.axes).spacing(header)
        if max(max(a / b, b / a) for a, b in zip(spacing, meta.spacing, strict=True)) > COARSER:
            off[id] = spacing
    if not off:
        return []
    first = next(iter(off))
    mm, trained = (" x ".join(f"{v:.3g}" for v in grid) for grid in (off[first], meta.spacing))
    many = f"{first} has" if len(off) == 1 else f"{len(off)} volumes, {first} first, have"
    return [f"{many} voxels of {mm} mm; the network was trained on {trained} mm"]


def _label(prepared: Prepared, task: Any, net: Any, machine: Any, mirror: bool) -> np.ndarray:
    """The label map of a prepared volume, uint8, on the grid of its file in stored axes."""
    import torch

    image = torch.from_numpy(prepared.image)[None, None].to(machine.device).float()
    with torch.no_grad(), machine.accelerator.autocast():
        return task.label_map(net, image, prepared.original_shape, (mirror,) * 3).cpu().numpy()

"""Label maps for new volumes, over the volumes that they are of.

A volume is prepared as those that the run was trained on, and its label map brought back to the grid and the axes of
its file, with the same affine: it lies over the image in any viewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UserError
from trainkit.inference.output_folder import Begun, Predicted, check_free
from trainkit.inference.predict import OnProgress
from trainkit.inference.trained_model import rebuilt
from trainkit.interfaces import Meta
from trainkit.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    import numpy as np

    from trainkit.config.schema import Recipe
    from trainkit.data.formats.nifti_header import Header
    from trainkit.data.volumes.preprocess import Preparation, Prepared
    from trainkit.data.volumes.sources import Case

COARSER = 1.5
"""How many times the spacing of a volume may be that of the training, or the other way round, before it is said."""


def predict(
    folder: RunFolder,
    recipe: Recipe,
    meta: Meta,
    source: Path | str,
    out: Path,
    mirror: bool,
    on_progress: OnProgress | None,
) -> Predicted:
    """Write a label map `OUT/<id>.nii.gz`, uint8, for every volume at `source`; see `predicting.predict`.

    `source` is as `volume_sources.open_volumes` takes it, without label maps. With `mirror` it takes eight times as
    long.
    """
    from trainkit.data.formats import nifti
    from trainkit.data.volumes import sources
    from trainkit.data.volumes.preprocess import Preparation, prepare

    found = sources.open_volumes(source, labelled=False)
    targets = {case.id: out / f"{case.id}.nii.gz" for case in found.cases}
    begun = Begun(folder, source, out, mirror)
    check_free(out, begun.missing(targets.values()))
    how = Preparation(meta.axes, tuple(meta.resampled) or None)
    headers, damaged, notes = _headers(found.cases)
    notes = [*found.left_out, *notes, *_odd_spacings(headers, how, meta)]
    with rebuilt(folder, recipe, meta) as made:
        out.mkdir(parents=True, exist_ok=True)
        written = []
        for done, case in enumerate(case for case in found.cases if case.id in headers):
            if on_progress:
                on_progress(done, len(headers))
            if begun.has(targets[case.id]):
                written.append(targets[case.id])
                continue
            try:
                array, header = nifti.read_image(case.image)
                prepared = prepare(array, header, how)
            except UserError as error:
                damaged.append(str(error))
                continue
            labels = _label(prepared, recipe.task, made.net, made.machine, mirror)
            begun.note(targets[case.id])
            nifti.write_labels(targets[case.id], prepared.orientation.undo(labels), header)
            written.append(targets[case.id])
        if on_progress:
            on_progress(len(headers), len(headers))
    begun.end()
    return Predicted(tuple(written), tuple(damaged), tuple(notes), meta.class_names, made.weights)


def _headers(cases: tuple[Case, ...]) -> tuple[dict[str, Header], list[str], list[str]]:
    """The headers that can be read by id, sentences about those that cannot, and about what is odd."""
    from trainkit.data.formats import nifti

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
    from trainkit.data.formats import volume_grid

    if how.spacing is not None:
        return []
    off = {}
    for id, header in headers.items():
        spacing = volume_grid.orientation(header.affine, how.axes).spacing(header)
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

"""Predict label maps for volumes.

Volumes are prepared as in training; label maps have the grid, axes and affine of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.errors import UserError, number_of
from trainkit.inference import samples
from trainkit.inference.output_folder import Predicted, Request, check_free, write_each
from trainkit.inference.trained_model import Rebuilt, rebuilt
from trainkit.interfaces import DatasetInfo, LabelsVolumes

if TYPE_CHECKING:
    import numpy as np

    from trainkit.data.formats.nifti_header import Header
    from trainkit.data.volumes.preprocess import Preparation
    from trainkit.data.volumes.sources import Case
    from trainkit.inference.table_writer import Columns

COARSER = 1.5
"""Ratio of the spacings of volume and training above which a warning is printed."""


def predict(asked: Request) -> Predicted | None:
    """Write a label map `OUT/<id>.nii.gz`, uint8, for every volume at `source`; see `predict.predict`.

    `source` is as for `sources.open_volumes`, without label maps. With `mirror` it takes eight times as long. None if
    the run's task does not segment volumes.
    """
    from trainkit.data.formats import nifti
    from trainkit.data.volumes import reader, sources

    meta, out, task = asked.meta, asked.out, asked.recipe.task
    if not (isinstance(task, LabelsVolumes) and meta.axes):
        return None
    found = sources.open_volumes(asked.source, labelled=False, channels=meta.channels)
    targets = {case.id: out / f"{case.id}.nii.gz" for case in found.cases}
    check_free(out, list(targets.values()))
    how = _preparation(meta)
    headers, damaged, notes = _headers(found.cases, meta)
    notes = [*found.left_out, *notes, *_odd_spacings(headers, how, meta)]
    with rebuilt(asked.folder, asked.recipe, meta) as made:
        out.mkdir(parents=True, exist_ok=True)

        def label(case: Case) -> tuple[np.ndarray, Header]:
            array, header = reader.read_image(case)
            return _label(array, header, how, task, made, asked.mirror), header

        readable = [(targets[case.id], case) for case in found.cases if case.id in headers]
        written, more = write_each(
            readable, label, lambda target, found: nifti.write_labels(target, *found), asked.on_progress
        )
    return Predicted(tuple(written), (*damaged, *more), tuple(notes), meta.class_names, made.weights)


def predictor(made: Rebuilt) -> Callable[[Sequence[Any], bool], Columns]:
    """Return the function that makes label maps of volumes in memory; see `predictor.Predictor`."""
    task = made.recipe.task
    if not (isinstance(task, LabelsVolumes) and made.meta.axes):
        found = "its task does not segment volumes"
        raise UserError(f"recipe {made.recipe.name}", found, "task segment3d", "use another run")
    how = _preparation(made.meta)

    def predict(volumes: Sequence[Any], mirror: bool) -> Columns:
        def label(sample: Any, where: str) -> np.ndarray:
            array, header = samples.volume(sample, where)
            if (wrong := _wrong_channels(header, made.meta)) is not None:
                raise UserError(where, *wrong)
            return _label(array, header, how, task, made, mirror)

        return samples.each(volumes, label)

    return predict


def _wrong_channels(header: Header, meta: DatasetInfo) -> tuple[str, str] | None:
    """Return found and expected channels of a volume if they differ from those of the training, else None."""
    if header.channels == meta.shape[0]:
        return None
    names = f": {', '.join(meta.channels)}" if meta.channels else ""
    return number_of(header.channels, "channels"), f"{meta.shape[0]}, as in training{names}"


def _headers(cases: tuple[Case, ...], meta: DatasetInfo) -> tuple[dict[str, Header], list[str], list[str]]:
    """Read the headers by id; return also errors of unusable volumes, and warnings."""
    from trainkit.data.volumes import reader

    headers, damaged, notes = {}, [], []
    for case in cases:
        try:
            header = reader.read_header(case)
            if (wrong := _wrong_channels(header, meta)) is not None:
                raise UserError(str(case.image), *wrong)
            headers[case.id] = header
            notes += [f"{case.image}: {note}" for note in header.notes]
        except UserError as error:
            damaged.append(str(error))
    return headers, damaged, notes


def _odd_spacings(headers: Mapping[str, Header], how: Preparation, meta: DatasetInfo) -> list[str]:
    """Return a warning if volumes that are not resampled have another spacing than those of the training."""
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
    return [f"{many} a voxel spacing of {mm} mm; the network was trained with {trained} mm"]


def _preparation(meta: DatasetInfo) -> Preparation:
    from trainkit.data.volumes.preprocess import Preparation

    grid = meta.resampled
    return Preparation(meta.axes, (grid[0], grid[1], grid[2]) if grid else None)


def _label(
    array: np.ndarray, header: Header, how: Preparation, task: LabelsVolumes, made: Rebuilt, mirror: bool
) -> np.ndarray:
    """Predict the label map of a volume, uint8, on the grid and in the axes of its file."""
    import torch

    from trainkit.data.volumes.preprocess import prepare

    prepared, runtime = prepare(array, header, how), made.runtime
    image = torch.from_numpy(prepared.image)[None].to(runtime.device).float()
    with torch.no_grad(), runtime.accelerator.autocast():
        labels = task.label_map(made.net, image, prepared.original_shape, (mirror,) * 3).cpu().numpy()
    return prepared.orientation.undo(labels)

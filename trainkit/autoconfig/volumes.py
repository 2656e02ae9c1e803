"""Fitting recipes of volumes: channels, labels, spacing, patch, and folds where nothing splits a set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from trainkit.autoconfig import fit
from trainkit.autoconfig.fit import Fitted
from trainkit.config.schema import Recipe
from trainkit.data.formats import nifti, volume_grid
from trainkit.data.sources import HELD_OUT
from trainkit.data.threads import each, every, threads
from trainkit.data.volumes import importer, label_names, reader, sources, volume_store
from trainkit.data.volumes.augment import sides
from trainkit.data.volumes.dataset import Volumes
from trainkit.data.volumes.sources import VolumeSource
from trainkit.errors import UserError, few, number_of
from trainkit.models.patch_geometry import levels_for
from trainkit.paths import locate

READ = 20
"""Label maps that are read for their labels where nothing names them."""

FOLDS = 5

UNLIKE = 1.5
"""Factor between the spacings of the cases from which resampling is filled in."""

_LOST = ("names", "labels", "spacing", "patient", "fold", "folds")


@dataclass(frozen=True)
class Looked:
    """Shapes and spacings of a set of volumes, from their headers."""

    axes: str
    shapes: np.ndarray
    """int64 (cases, 3), voxels along depth, height and width."""
    spacings: np.ndarray
    """float64 (cases, 3), mm from voxel to voxel along them."""
    channels: tuple[str, ...] = ()
    """Names of the channels; empty where there is one."""


def look(source: VolumeSource) -> Looked:
    """Shapes and spacings of the cases of a source, in the order in which they are stored. Reads headers alone.

    Raises UserError at the first that cannot be read.
    """
    headers = every(reader.read_header, source.cases, source.where, "cases")
    counts = Counter(header.channels for header in headers)
    usual = len(source.channels) or counts.most_common(1)[0][0]
    for header in headers:
        if header.channels != usual:
            found = f"{number_of(header.channels, 'channels')}, others have {usual}"
            raise UserError(str(header.path), found, "the same number in each case", "leave it out")
    axes = importer.order(headers)
    grids = [volume_grid.orientation(header.affine, axes) for header in headers]
    shapes = [[header.shape[axis] for axis in grid.order] for header, grid in zip(headers, grids, strict=True)]
    spacings = [grid.spacing(header) for header, grid in zip(headers, grids, strict=True)]
    names = source.channels or sources.numbered(usual)
    return Looked(axes, np.asarray(shapes, np.int64), np.asarray(spacings, np.float64), names)


def volumes(fitted: Fitted, recipe: Recipe, text: str) -> None:
    """Fit a recipe with data `volumes`. Of a set without splits a fold is held out."""
    block = cast(Volumes, recipe.data)
    fit.refuse(text, "volumes (NIfTI)", own="volumes")
    train, sets = fit.parts(text, lambda name: sources.open_volumes(locate(name)))
    source = sources.open_volumes(locate(train))
    looked = look(source)
    known = source.names is not None
    numbers = _values(source) if source.names is None else ()
    names = tuple(f"label {number}" for number in numbers) if source.names is None else source.names[1:]
    patients, count = len({case.patient for case in source.cases}), len(source.cases)
    fitted.drop(*(f"data.{key}" for key in _LOST), "task.objective.class_weights")
    if isinstance(fitted.get("task.tolerance"), dict):
        fitted.drop("task.tolerance")
    if block.augment.swap:
        fitted.drop("data.augment.swap")
    fitted.put("data.train", train)
    if not known and numbers == tuple(range(1, len(numbers) + 1)):
        fitted.put("data.names", list(names))
        fitted.decide("data.names", f"names of the labels 1 to {len(names)}")
    elif not known:
        fitted.put("data.labels", dict(zip(names, numbers, strict=True)))
        said = ", ".join(map(str, numbers))
        fitted.decide("data.labels", f"label maps hold {said}: set their names, in the order of the classes")
    count = count if sets else _fold(fitted, sets, patients, count, text)
    spacing, shape = _spacing(fitted, looked)
    _patch(fitted, block.patch, shape, spacing)
    if "left_right" in block.augment.flips:
        _sides(fitted, names if known else ())
    fit.score(fitted, sets)
    fit.measure(fitted, count * block.patches)
    voxels, mm = _by(np.median(looked.shapes, axis=0)), _by(np.median(looked.spacings, axis=0))
    said = f"{len(looked.shapes)} volumes of {voxels} voxels of {mm} mm in the median, stored as {looked.axes}"
    of = f" of the channels {few(looked.channels, 12)}" if looked.channels else ""
    fitted.seen.append(f"{text}: {said}{of}; labels {few(names, 12)}")
    fitted.seen += [f"left out: {sentence}" for sentence in source.left_out]


def _sides(fitted: Fitted, names: Sequence[str]) -> None:
    """Labels of the left and the right, which a flip exchanges; where no names are known that is to be decided."""
    if pairs := sides(names):
        fitted.put("data.augment.swap", [list(pair) for pair in pairs])
        fitted.notes["data", "augment"] = fit.Note("swap: labels that a flip of left_right exchanges", False)
    elif not names:
        fitted.decide("data.augment", "for left_right in flips: list pairs of left and right labels in swap, as [a, b]")


def _values(source: VolumeSource) -> tuple[int, ...]:
    """Values of labels that nothing names, in some of the label maps; all up to the largest where few are missing."""
    read = [case.label for case in fit.spread(source.cases, len(source.cases), READ) if case.label is not None]
    found = sorted({value for one in each(nifti.label_values, read, threads()) for value in one})
    values = tuple(value for value in found if value)
    if not values:
        raise UserError(source.where, f"no labelled voxel in {len(read)} cases", "label maps with labels above 0")
    if values[0] < 0 or len(values) >= volume_store.LABEL_LIMIT or values[-1] >= label_names.VALUE_LIMIT:
        expected = f"1 to {volume_store.LABEL_LIMIT - 1} labels above 0"
        raise UserError(source.where, f"labels {few(map(str, values))} in {len(read)} cases", expected)
    return values


def _fold(fitted: Fitted, sets: dict[str, str], patients: int, count: int, where: str) -> int:
    """Hold out a part of the patients; how many cases are trained on, about."""
    if patients < 2:
        raise UserError(where, f"{patients} patient", "2 or more: one for training, one for evaluation")
    folds = min(FOLDS, patients)
    if folds < FOLDS:
        fitted.put("data.folds", folds, f"{patients} patients")
    fitted.put("data.fold", 0)
    sets["val"] = HELD_OUT
    if patients == count:
        what = "each file counts as its own patient; otherwise set `patient`, such as '^([^_]+)_'"
        fitted.decide("data.fold", what)
    return max(1, count - round(count / folds))


def _spacing(fitted: Fitted, looked: Looked) -> tuple[np.ndarray, np.ndarray]:
    """Resample to the median where spacings differ; spacing and shape of a case that is trained on, in the median."""
    spacing, shape = np.median(looked.spacings, axis=0), np.median(looked.shapes, axis=0)
    low, high = looked.spacings.min(0), looked.spacings.max(0)
    if (high / low).max() < UNLIKE:
        return spacing, shape
    digits = [float(f"{mm:.4g}") for mm in spacing]
    fitted.put("data.spacing", digits)
    fitted.decide("data.spacing", f"the median: files have {_by(low)} to {_by(high)} mm, and all are resampled")
    return np.asarray(digits), np.median(looked.shapes * looked.spacings / digits, axis=0)


def _patch(fitted: Fitted, old: tuple[int, int, int], shape: np.ndarray, spacing: np.ndarray) -> None:
    """The recipe's patch, as large as volumes are at most, in sides that the network can halve."""
    patch = [min(side, max(1, int(most))) for side, most in zip(old, shape, strict=True)]
    given = (fitted.get(f"task.net.{key}") for key in ("blocks", "filters"))
    lists = [levels for levels in given if isinstance(levels, list)]
    if lists:
        patch = _divisible(patch, spacing.tolist(), len(lists[0]))
    if patch != list(old):
        fitted.put("data.patch", patch, f"volumes are {_by(shape)} in the median")
    elif (np.asarray(shape) >= 2 * np.asarray(patch)).all():
        fitted.decide("data.patch", f"volumes are {_by(shape)} in the median: a larger patch sees more")


def _divisible(patch: Sequence[int], spacing: Sequence[float], most: int) -> list[int]:
    """A patch whose sides are multiples of what a network of so many levels divides them by."""
    sides = list(patch)
    for _ in range(most):  # a smaller patch may have fewer levels
        multiple = levels_for(sides, spacing, most).multiple
        smaller = [max(m, side // m * m) for side, m in zip(sides, multiple, strict=True)]
        if smaller == sides:
            break
        sides = smaller
    return sides


def _by(numbers: Sequence[float] | np.ndarray) -> str:
    return "x".join(f"{number:.4g}" for number in numbers)

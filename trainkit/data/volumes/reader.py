"""Images and label maps of cases: NIfTI of one or several channels, a file for each channel, or a DICOM series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainkit.data.formats import dicom, nifti, volume_grid
from trainkit.data.formats.nifti_header import Header
from trainkit.data.volumes.sources import Case
from trainkit.errors import UserError


def read_header(case: Case) -> Header:
    """Read the header of an image, that of its first channel; `channels` of it counts all.

    Raises UserError naming the file that cannot be read, or does not lie on the grid of the first channel.
    """
    first, *others = (_header(file) for file in case.images)
    for other in others:
        if both := [one for one in (first, other) if one.channels > 1]:
            found = f"{both[0].channels} volumes along its 4th axis, beside files of other channels"
            raise UserError(str(both[0].path), found, "one channel in each file")
        if (differs := volume_grid.same_grid(other, first)) is not None:
            raise UserError(str(other.path), differs, f"the grid of {first.path}, the first channel")
    return replace(first, channels=len(case.images)) if others else first


def read_image(case: Case) -> tuple[np.ndarray, Header]:
    """Read an image, float32 (channels, *axes of the file), and its header. Raises UserError as `read_header`."""
    if len(case.images) == 1:
        return _image(case.image)
    header = read_header(case)
    array = np.empty((header.channels, *header.shape), np.float32)
    for place, file in enumerate(case.images):
        one, read = _image(file)
        if read.shape != header.shape:
            raise UserError(str(file), "changed while it was read")
        array[place] = one[0]
    return array, header


def read_label_header(label: Path, image: Header) -> Header:
    """Read the header of a label map. Raises UserError where it does not lie on the grid of the image."""
    header = nifti.read_header(label)
    if (differs := volume_grid.same_grid(_turned(header, image), image)) is not None:
        raise UserError(str(label), differs, f"the grid of {image.path}")
    return header


def read_labels(label: Path, image: Header, classes: int | None, values: Sequence[int] | None) -> np.ndarray:
    """Read a label map, uint8 in the axes of the image. Raises UserError as `nifti.read_labels`."""
    array, header = nifti.read_labels(label, classes, values)
    turned = _turned(header, image)
    if turned is header:
        return array
    grid = volume_grid.orientation(image.affine, "xyz")
    return grid.undo(volume_grid.orientation(header.affine, "xyz").apply(array))


def _turned(label: Header, image: Header) -> Header:
    """Return the header of a label map with its axes in the order of those of a DICOM series.

    Programs that make NIfTI of DICOM turn the axes, so a label map that was drawn on one may be of other axes. Where
    the image is of NIfTI too, what is drawn on it has its axes, and others are an error.
    """
    if not image.path.is_dir():
        return label
    own, its = (volume_grid.orientation(header.affine, "xyz") for header in (label, image))
    if own == its:
        return label
    # The voxel of the label map that is that of the image at 0, 0, 0, and the step along each axis of the image.
    step, corner = np.zeros((3, 3)), np.zeros(3)
    for world in range(3):
        axis, to = own.order[world], its.order[world]
        backwards = own.flip[world] != its.flip[world]
        step[axis, to] = -1 if backwards else 1
        corner[axis] = label.shape[axis] - 1 if backwards else 0
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = step, corner
    order = [int(np.flatnonzero(step[:, to])[0]) for to in range(3)]
    first, second, third = (label.shape[axis] for axis in order)
    mm = tuple(label.spacing[axis] for axis in order)
    return replace(label, shape=(first, second, third), spacing=(mm[0], mm[1], mm[2]), affine=label.affine @ matrix)


def _header(file: Path) -> Header:
    return dicom.read_header(file) if file.is_dir() else nifti.read_header(file, channels=True)


def _image(file: Path) -> tuple[np.ndarray, Header]:
    if file.is_dir():
        array, header = dicom.read_image(file)
        return array[None], header
    return nifti.read_channels(file)

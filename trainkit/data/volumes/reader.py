"""Images and label maps of cases: NIfTI of one or several channels, or a file for each channel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from trainkit.data.formats import nifti, volume_grid
from trainkit.data.formats.nifti_header import Header
from trainkit.data.formats.volume_grid import Orientation
from trainkit.data.volumes.label_names import Classes
from trainkit.data.volumes.sources import Case
from trainkit.errors import UserError


def read_header(case: Case) -> Header:
    """Read the header of an image, that of its first channel; `channels` of it counts all.

    Raises UserError naming the file that cannot be read, or does not lie on the grid of the first channel.
    """
    first, *others = (nifti.read_header(file, channels=True) for file in case.images)
    for other in others:
        if max(first.channels, other.channels) > 1:
            found = f"{max(first.channels, other.channels)} volumes along its 4th axis, or that of {first.path.name}"
            raise UserError(str(other.path), found, "one channel in each file")
        _turn(other, first)
    return replace(first, channels=len(case.images)) if others else first


def read_image(case: Case) -> tuple[np.ndarray, Header]:
    """Read an image, float32 (channels, *axes of its first file), and its header. Raises UserError as `read_header`."""
    if len(case.images) == 1:
        return nifti.read_image(case.image)
    header = read_header(case)
    array = np.empty((header.channels, *header.shape), np.float32)
    for place, file in enumerate(case.images):
        (channel,), read = nifti.read_image(file)
        array[place] = _turn(read, header).apply(channel)
    return array, header


def read_label_header(label: Path, image: Header) -> Header:
    """Read the header of a label map. Raises UserError where it does not lie on the grid of the image."""
    header = nifti.read_header(label)
    _turn(header, image)
    return header


def read_labels(label: Path, image: Header, classes: Classes) -> np.ndarray:
    """Read a label map, uint8 in the axes of the image. Raises UserError as `nifti.read_labels` and the above."""
    array, header = nifti.read_labels(label, classes.count, classes.values, classes.ignored)
    return _turn(header, image).apply(array)


def _turn(header: Header, onto: Header) -> Orientation:
    """Return how the axes of a file are turned to those of another. Raises UserError where their voxels differ."""
    turned, turn = volume_grid.turned(header, onto)
    if (differs := volume_grid.same_grid(turned, onto)) is not None:
        again = "" if turn.order == (0, 1, 2) else ", its axes being turned"
        raise UserError(str(header.path), f"{differs}{again}", f"the grid of {onto.path}")
    return turn

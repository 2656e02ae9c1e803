"""Grids of voxels: how one is turned to stored axes, which axis runs across slices, and whether two are the same.

World axes are RAS+: x grows to the right of the patient, y to the front, z to the head. Distances are in mm.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from trainkit.data.formats.nifti_header import Header, by

GRID_TOLERANCE, GRID_SHARE = 1e-3, 0.02
"""By how many mm, or by which share of the finest spacing if that is more, corners of equal grids may differ: programs
that copy an affine through a quaternion in float32 move corners by some micrometres, which is no error."""


@dataclass(frozen=True)
class Orientation:
    """Permutation and flips that turn a volume from the axes of its file to stored axes."""

    order: tuple[int, int, int]
    """The axis of the file that becomes each stored axis."""
    flip: tuple[bool, bool, bool]
    """True for each stored axis that runs against that of the file."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return a view of a volume of the file's axes, in stored axes."""
        return array.transpose(self.order)[self._slices()]

    def undo(self, array: np.ndarray) -> np.ndarray:
        """Return a view of a volume of stored axes, in those of the file: the exact inverse of `apply`."""
        return array[self._slices()].transpose(np.argsort(self.order))

    def spacing(self, header: Header) -> tuple[float, float, float]:
        """Return mm from voxel to voxel along the stored axes."""
        first, second, third = (header.spacing[axis] for axis in self.order)
        return first, second, third

    def _slices(self) -> tuple[slice, ...]:
        return tuple(slice(None, None, -1) if flip else slice(None) for flip in self.flip)


def orientation(affine: np.ndarray, axes: str) -> Orientation:
    """Bring a volume with this affine closest to stored axes such as `yzx`, growing to right, front and head.

    `axes` names the world axis of each stored one.
    """
    from nibabel.orientations import io_orientation

    closest, signs = io_orientation(np.asarray(affine, np.float64)).T
    first, second, third = (int(np.flatnonzero(closest == "xyz".index(axis))[0]) for axis in axes)
    return Orientation(
        (first, second, third), (bool(signs[first] < 0), bool(signs[second] < 0), bool(signs[third] < 0))
    )


def slice_axis_order(spacings_ras: np.ndarray) -> str:
    """Return the word for the stored axes of a set of volumes, from their spacings along x, y, z in mm, (N, 3).

    The first is the one across slices, with the largest median; of those within 1 % of it z before y before x. The
    others follow in the order z, y, x.
    """
    median = np.median(np.asarray(spacings_ras, np.float64).reshape(-1, 3), axis=0)
    across = max(axis for axis in range(3) if median[axis] >= 0.99 * median.max())
    return "".join("xyz"[axis] for axis in (across, *(other for other in (2, 1, 0) if other != across)))


def turned(header: Header, onto: Header) -> tuple[Header, Orientation]:
    """Return the header of a file with its axes in the order and the directions of another's, and the turn to them.

    Of one grid there are 48 ways to store it, and programs choose as they like: a label map may be LPS where its image
    is RAS.
    """
    from nibabel.orientations import inv_ornt_aff

    # By the axes of the other file and not those of the world: rounding cannot send two that lie askew different ways.
    turn = orientation(np.linalg.solve(onto.affine, header.affine), "xyz")
    first, second, third = (header.shape[axis] for axis in turn.order)
    moves = np.empty((3, 2))  # of each axis of the file, as nibabel has it
    moves[list(turn.order)] = np.stack([np.arange(3), np.where(turn.flip, -1, 1)], axis=1)
    affine = header.affine @ inv_ornt_aff(moves, header.shape)
    return replace(header, shape=(first, second, third), spacing=turn.spacing(header), affine=affine), turn


def same_grid(a: Header, b: Header) -> str | None:
    """Return a sentence when the voxels of two files do not lie in the same places, else None."""
    if a.shape != b.shape:
        return f"{by(a.shape)} voxels, {b.path.name} has {by(b.shape)}"
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, n - 1) for n in a.shape))], np.float64)
    apart = np.linalg.norm((corners @ (a.affine - b.affine).T)[:, :3], axis=1).max()
    if apart <= max(GRID_TOLERANCE, GRID_SHARE * min(*a.spacing, *b.spacing)):
        return None
    spacings = f"{by(a.spacing)} and {by(b.spacing)} mm"
    return f"lies elsewhere than {b.path.name}: corners are up to {apart:.3g} mm apart (spacing {spacings})"

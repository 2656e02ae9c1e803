"""Small NIfTI sets for tests: noise with organs in it whose sizes are known to the voxel."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainkit.data.formats import nifti
from trainkit.data.formats.nifti_header import Header

SPACING = (1.0, 1.5, 4.0)


def affine(spacing=SPACING, order=(0, 1, 2), flip=(False, False, False), origin=(-10.0, 5.0, 30.0)) -> np.ndarray:
    """Voxel axis `i` runs along world axis `order[i]`, backwards where `flip[i]`."""
    matrix = np.eye(4)
    matrix[:3, :3] = 0
    for axis, world in enumerate(order):
        matrix[world, axis] = -spacing[axis] if flip[axis] else spacing[axis]
    matrix[:3, 3] = origin
    return matrix


def volume(seed: int = 0, shape=(12, 10, 6), organs: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """An image float32 and labels uint8 of file axes: organ n is a box of its own place, brighter by n."""
    rng = np.random.default_rng(seed)
    image = rng.normal(100, 10, shape).astype(np.float32)
    labels = np.zeros(shape, np.uint8)
    for organ in range(1, organs + 1):
        begin = 1 + 3 * (organ - 1)
        labels[begin : begin + 2, 2 : 5 + seed % 3, 1:4] = organ
    image += 50 * labels
    return image, labels


def put(path: Path, array: np.ndarray, matrix: np.ndarray | None = None) -> Path:
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, affine() if matrix is None else matrix), path)
    return path


def put_case(root: Path, id: str, image: np.ndarray, labels: np.ndarray, matrix: np.ndarray | None = None) -> None:
    put(root / "image" / f"{id}.nii.gz", image, matrix)
    put(root / "label" / f"{id}.nii.gz", labels, matrix)


def put_set(root: Path, cases: int = 4, **kind) -> Path:
    for number in range(cases):
        put_case(root, f"p{number:02d}", *volume(number, **kind))
    return root


def read_volume(path: Path) -> tuple[np.ndarray, Header]:
    """The one channel of a file, in its axes, and its header."""
    (array,), header = nifti.read_image(path)
    return array, header

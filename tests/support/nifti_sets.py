"""Small NIfTI sets for tests: a bright ball and a dark box in noise, on coronal slices as TOM500's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NAMES = ["ball", "box"]
SPACING = (1.0, 1.0, 3.0)
"""mm along the axes of the files: right to left, feet to head, front to back."""


def write_set(root: Path, cases: int, seed: int = 0, shape: tuple[int, int, int] = (40, 36, 10)) -> Path:
    """`root/image/<id>.nii.gz` and `root/label/<id>.nii.gz` for so many patients."""
    for number in range(cases):
        write_case(root, f"{seed}{number:02d}", 100 * seed + number, shape)
    return root


def write_case(root: Path, name: str, seed: int, shape: tuple[int, int, int] = (40, 36, 10)) -> None:
    """One patient, whose size differs a little from that of others."""
    import nibabel

    rng = np.random.default_rng(seed)
    shape = tuple(side + int(rng.integers(0, 3)) for side in shape)
    image, label = draw(rng, shape)
    affine = np.array([[-SPACING[0], 0, 0, 20.0], [0, 0, SPACING[2], -12.0], [0, SPACING[1], 0, 7.5], [0, 0, 0, 1]])
    for part, array in (("image", image), ("label", label)):
        (root / part).mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(array, affine), root / part / f"{name}.nii.gz")


def draw(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """An image, float32, on a scale of its own, and its labels, uint8."""
    at = np.stack(np.meshgrid(*(np.arange(side) * mm for side, mm in zip(shape, SPACING, strict=True)), indexing="ij"))
    size = np.asarray(shape) * SPACING
    label = np.zeros(shape, np.uint8)
    box = size * rng.uniform(0.55, 0.75, 3)
    label[(np.abs(at - box[:, None, None, None]) < 5).all(0)] = 2
    ball = size * rng.uniform(0.25, 0.45, 3)
    label[((at - ball[:, None, None, None]) ** 2).sum(0) < 7**2] = 1
    image = np.asarray([0.0, 1.0, -1.0])[label] + rng.normal(0, 0.4, shape)
    return (np.exp(rng.uniform(-1, 3)) * (image + 3)).astype(np.float32), label

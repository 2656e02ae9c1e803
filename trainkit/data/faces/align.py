"""From five landmarks to the pose that face networks are trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from trainkit.data import folders
from trainkit.errors import UserError

TEMPLATE = np.asarray(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
"""Where eyes, nose and corners of the mouth lie in a 112 x 112 image (ArcFace, Deng et al. 2019); x, y in pixels."""

LANDMARKS = "landmarks5.json"
"""A file beside the identities: relative path of an image to its five points."""

LIMIT = 4 << 30
"""Largest such file that is read, in bytes: some 200 for each image."""


def similarity(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Compute rotation, scale and shift that bring points (n, 2) nearest to others, a (2, 3) matrix (Umeyama 1991)."""
    source, target = np.asarray(source, float), np.asarray(target, float)
    middle_s, middle_t = source.mean(0), target.mean(0)
    centred_s, centred_t = source - middle_s, target - middle_t
    variance = (centred_s**2).sum() / len(source)
    if variance == 0:
        raise ValueError("all points in one place")
    left, stretch, right = np.linalg.svd(centred_t.T @ centred_s / len(source))
    # Without this sign a mirrored set of points would be met by a reflection, which is no rotation.
    sign = np.asarray([1.0, np.sign(np.linalg.det(left) * np.linalg.det(right)) or 1.0])
    rotation = left * sign @ right
    scale = (stretch * sign).sum() / variance
    return np.column_stack([scale * rotation, middle_t - scale * rotation @ middle_s])


def align_face(pixels: np.ndarray, landmarks: np.ndarray, size: int, where: str) -> np.ndarray:
    """Warp an image (uint8, height, width, 3) so that its landmarks lie on the template; bilinear, black outside.

    Coordinates name pixel centres by whole numbers, as in OpenCV, so that old landmarks and new images fit together.
    """
    landmarks = np.asarray(landmarks, float)
    if landmarks.shape != (5, 2) or not np.isfinite(landmarks).all():
        raise UserError(where, f"landmarks of shape {landmarks.shape}", "five finite points (x, y)")
    try:
        forward = similarity(landmarks, TEMPLATE * (size / 112))
        inverse = np.linalg.inv(np.vstack([forward, [0, 0, 1]]))[:2]
    except (ValueError, np.linalg.LinAlgError):
        raise UserError(where, "landmarks in one place", "five different points") from None
    # PIL puts the centre of the first pixel at 0.5, not at 0.
    inverse[:, 2] += 0.5 - inverse[:, :2] @ [0.5, 0.5]
    warped = Image.fromarray(pixels).transform(
        (size, size), Image.Transform.AFFINE, tuple(inverse.ravel()), Image.Resampling.BILINEAR
    )
    return np.asarray(warped)


def read_landmarks(file: Path) -> dict[str, np.ndarray]:
    """Read five points (5, 2) by relative path. Raises UserError naming the first entry that is something else."""
    entries = folders.read_json(file, LIMIT, "a JSON mapping")
    if not isinstance(entries, dict):
        raise UserError(str(file), type(entries).__name__, "a mapping of paths to five points")
    points: dict[str, np.ndarray] = {}
    for name, value in entries.items():
        try:
            points[name] = np.asarray(value, float)
        except (TypeError, ValueError):
            points[name] = np.empty(0)
        if points[name].shape != (5, 2) or not np.isfinite(points[name]).all():
            raise UserError(f"{file}, {name}", repr(value)[:100], "five points [x, y]")
    return points

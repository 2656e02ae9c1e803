"""From five landmarks to the pose that face networks are trained on."""

from __future__ import annotations

import numpy as np
from PIL import Image

from trainkit.errors import UserError

TEMPLATE = np.asarray(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
"""Where eyes, nose and corners of the mouth lie in a 112 x 112 image (ArcFace, Deng et al. 2019); x, y in pixels."""

NO_FACE = 0.9
"""Distance from the template after the best fit, as a share of the points' spread, from which they are of no face.

Of 120 photographs of LFW it is 0.12 in the median and 0.285 at most; a face in profile has up to 0.89."""

_INSIDE = 3
"""Points of a face that lie in its image at least: one that is cut off by its edge is used."""
_SMALLEST = 1.0
"""Least spread of the points of a face, in pixels: that of coordinates from 0 to 1 is below 0.5."""

_ORDER = "five points: left eye, right eye, nose, left and right corner of the mouth, where left is on the image's left"


def misfit(points: np.ndarray) -> np.ndarray:
    """Compute how far points (..., 5, 2) are from the template after the best similarity, as a share of its spread.

    0 is the template itself, turned, scaled and shifted; 1 is what nothing of it is in.
    """
    here, there = (values[..., 0] + 1j * values[..., 1] for values in (np.asarray(points, float), TEMPLATE))
    here, there = here - here.mean(-1, keepdims=True), there - there.mean()
    alike = np.abs((here.conj() * there).sum(-1)) ** 2
    spread = (np.abs(here) ** 2).sum(-1) * (np.abs(there) ** 2).sum()
    return np.sqrt(np.clip(1 - alike / np.maximum(spread, np.finfo(float).tiny), 0, 1))


def check_landmarks(landmarks: np.ndarray, where: str, shape: tuple[int, int] | None = None) -> None:
    """Raise UserError for points that are of no face in an image of `shape` (height, width)."""
    points = np.asarray(landmarks, float)
    if points.shape != (5, 2) or not np.isfinite(points).all():
        raise UserError(where, f"landmarks of shape {points.shape}", "five finite points (x, y)")
    if float(np.sqrt(points.var(0).sum())) < _SMALLEST:
        found = f"landmarks within {float(np.ptp(points, 0).max()):.2g} pixels"
        raise UserError(where, found, "pixels", "multiply coordinates from 0 to 1 by the sides of the image")
    if (off := float(misfit(points))) > NO_FACE:
        raise UserError(where, f"landmarks that fit no face (off by {off:.0%} of their spread)", _ORDER)
    if shape is None:
        return
    inside = int(((points >= -0.5) & (points <= np.asarray(shape[::-1]) - 0.5)).all(1).sum())
    if inside < _INSIDE:
        found = f"{5 - inside} of 5 landmarks outside of an image of {shape[1]} x {shape[0]} pixels"
        raise UserError(where, found, "points in the image", "were they found in an image of another size?")


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
    Raises UserError as `check_landmarks` does.
    """
    landmarks = np.asarray(landmarks, float)
    check_landmarks(landmarks, where, (pixels.shape[0], pixels.shape[1]))
    forward = similarity(landmarks, TEMPLATE * (size / 112))
    inverse = np.linalg.inv(np.vstack([forward, [0, 0, 1]]))[:2]
    # PIL puts the centre of the first pixel at 0.5, not at 0.
    inverse[:, 2] += 0.5 - inverse[:, :2] @ [0.5, 0.5]
    warped = Image.fromarray(pixels).transform(
        (size, size), Image.Transform.AFFINE, tuple(inverse.ravel()), Image.Resampling.BILINEAR
    )
    return np.asarray(warped)

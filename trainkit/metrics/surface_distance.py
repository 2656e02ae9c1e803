"""Scores of one case, organ by organ: overlap, distances between surfaces in mm, volumes in mm3.

Plain NumPy and SciPy, in float64, on the box around each organ. All distances are exact and use the true spacing.
Definitions, which are those of MONAI's metrics (`compute_hausdorff_distance`, `compute_average_surface_distance`,
`compute_surface_dice`) and of Maier-Hein et al., "Metrics reloaded" (Nature Methods 21, 2024):

- The surface of an organ is those of its voxels that have one of their six neighbours outside; what lies beyond the
  volume is outside.
- hd95: of each voxel of one surface the distance to the nearest voxel of the other; the 95th percentile of those (with
  linear interpolation) from prediction to truth, and from truth to prediction; the larger.
- asd: the mean of those distances, of both directions together (symmetric, as `symmetric=True`).
- nsd: the share of the voxels of both surfaces whose distance is at most the tolerance (Nikolov et al., 2018, arXiv
  1809.04430); every voxel counts as one, whatever area of the surface it stands for.

Voxels whose truth is `IGNORED` count as background in both, whatever is predicted there.

Empty organs: if both truth and prediction are empty, all scores are nan, so that the organ is left out of means. If one
of the two is empty, dice, iou and nsd are 0, and hd95 and asd the diagonal of the volume, the largest distance in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trainkit.interfaces import IGNORED

SCORES = ("dice", "iou", "hd95", "asd", "nsd", "volume_truth", "volume_prediction", "volume_error")
"""Keys of `case_scores`."""
PERCENTILE = 95.0
_ROUNDING = 1e-6
"""Share by which a distance may exceed the tolerance: 3 x 0.1 mm is within 0.3 mm."""

_QUERY = 24
"""A search in a tree costs as much as so many voxels of a distance transform: 2 to 7 us against 0.25."""


def case_scores(
    prediction: np.ndarray, truth: np.ndarray, spacing: ArrayLike, classes: int, tolerance: ArrayLike
) -> dict[str, np.ndarray]:
    """Scores of one case, each float64 (C-1,), one for each class but the background.

    `prediction` and `truth` (D, H, W) hold the class of every voxel, 0 .. classes-1; truth may hold IGNORED.
    `spacing` is the mm from voxel to voxel along each axis; `tolerance` (C-1,) are the mm that a surface may be off in
    nsd. Keys: dice, iou, hd95 and asd (mm), nsd, volume_truth, volume_prediction and volume_error (mm3; prediction less
    truth). An organ that is empty has volume 0. Raises ValueError for shapes that differ, classes that do not exist,
    and sizes below 0.
    """
    prediction, truth = annotated(np.asarray(prediction), np.asarray(truth))
    mm, within = np.asarray(spacing, dtype=np.float64), np.asarray(tolerance, dtype=np.float64)
    if prediction.shape != truth.shape or mm.shape != (truth.ndim,) or not truth.size:
        raise ValueError(f"prediction {prediction.shape}, truth {truth.shape}, spacing {mm.shape}")
    if within.shape != (classes - 1,) or not (within >= 0).all() or not (mm > 0).all():
        raise ValueError(f"tolerance {within} and spacing {mm} of {classes} classes")
    for name, labels in (("prediction", prediction), ("truth", truth)):
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"{name}: classes {labels.min()} to {labels.max()}, 0 to {classes - 1} expected")
    voxel, diagonal = float(mm.prod()), float(np.linalg.norm(mm * truth.shape))
    boxes = [_boxes(labels, classes) for labels in (prediction, truth)]
    scores = {name: np.full(classes - 1, np.nan) for name in SCORES}
    for k in range(classes - 1):
        box = _union(boxes[0][k], boxes[1][k])
        found, there = (
            np.zeros((1,) * truth.ndim, bool) if box is None else labels[box] == k + 1 for labels in (prediction, truth)
        )
        for name, value in organ_scores(found, there, mm, within[k], voxel, diagonal).items():
            scores[name][k] = value
    return scores


def annotated(prediction: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both label maps with 0 in the voxels whose truth is IGNORED."""
    known = truth != IGNORED
    if prediction.shape != truth.shape or known.all():
        return prediction, truth
    return prediction * known, truth * known


def organ_scores(
    prediction: np.ndarray, truth: np.ndarray, spacing: np.ndarray, tolerance: float, voxel: float, diagonal: float
) -> dict[str, float]:
    """The scores of one organ from two bool arrays, which may be cut to a box around it; nan where there is none."""
    predicted, actual = int(prediction.sum()), int(truth.sum())
    volumes = {"volume_truth": actual * voxel, "volume_prediction": predicted * voxel}
    if not predicted and not actual:
        return volumes
    volumes["volume_error"] = (predicted - actual) * voxel
    if not predicted or not actual:
        return {"dice": 0.0, "iou": 0.0, "hd95": diagonal, "asd": diagonal, "nsd": 0.0, **volumes}
    hit = int((prediction & truth).sum())
    there, back = surface_distances(prediction, truth, spacing)
    both = np.concatenate([there, back])
    return {
        "dice": 2 * hit / (predicted + actual),
        "iou": hit / (predicted + actual - hit),
        "hd95": float(max(np.percentile(there, PERCENTILE), np.percentile(back, PERCENTILE))),
        "asd": float(both.mean()),
        "nsd": float((both <= tolerance * (1 + _ROUNDING)).mean()),
        **volumes,
    }


def surface(mask: np.ndarray) -> np.ndarray:
    """Voxels of a bool array that have a neighbour outside along one of its axes; beyond the array is outside."""
    inside = mask.copy()
    for axis in range(mask.ndim):
        along, within = np.moveaxis(mask, axis, 0), np.moveaxis(inside, axis, 0)
        within[1:] &= along[:-1]
        within[:-1] &= along[1:]
        within[[0, -1]] = False
    return mask & ~inside


def surface_distances(a: np.ndarray, b: np.ndarray, spacing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distance in mm from each surface voxel of `a` to the nearest of `b`, and the reverse; neither may be empty.

    The order within each is not that of the voxels.
    """
    a, b = surface(a), surface(b)
    return _nearest(a, b, spacing), _nearest(b, a, spacing)


def _nearest(of: np.ndarray, to: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """Distance in mm from each voxel of `of` to the nearest of `to`; 0 for voxels of both."""
    apart = of & ~to
    many = int(apart.sum())
    out = np.zeros(int(of.sum()))
    if many * _QUERY < of.size:
        from scipy.spatial import KDTree

        # On grid points a tree that is neither balanced nor compact is twice as fast to build and search.
        tree = KDTree(np.argwhere(to) * spacing, leafsize=32, balanced_tree=False, compact_nodes=False)
        out[:many] = tree.query(np.argwhere(apart) * spacing)[0]
    else:
        from scipy.ndimage import distance_transform_edt

        out[:many] = np.asarray(distance_transform_edt(~to, spacing))[apart]
    return out


def _boxes(labels: np.ndarray, classes: int) -> list[tuple[slice, ...] | None]:
    from scipy.ndimage import find_objects

    return find_objects(labels, max_label=classes - 1)


def _union(a: tuple[slice, ...] | None, b: tuple[slice, ...] | None) -> tuple[slice, ...] | None:
    if a is None or b is None:
        return a or b
    return tuple(slice(min(i.start, j.start), max(i.stop, j.stop)) for i, j in zip(a, b, strict=True))

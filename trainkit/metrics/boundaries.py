"""How well the outlines of classes are met: the boundary F-score of Csurka, Larlus and Perronnin (BMVC 2013).

The boundary of a class are those of its pixels that have a pixel of another class above, below, left or right of them.
The frame of a picture is no boundary, nor is the border of a region without labels; what is predicted in such a region
is not looked at. A boundary pixel of the prediction is right when the truth has a boundary pixel of the same class
within the tolerance, by Euclidean distance from centre to centre; one of the truth is found the other way round. The
customary tolerance, 0.75 % of the picture's diagonal, is that of the Berkeley benchmark (Martin, Fowlkes and Malik,
PAMI 26, 2004), whose one-to-one matching is not done here, as it is not in the paper.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainkit.task import IGNORED, Rows

SHARE = 0.0075
"""Of the diagonal of a picture."""
COUNTS = ("edge_found", "edge_predicted", "edge_met", "edge_actual")
"""What `boundary_counts` gives."""
_AT_ONCE = 1 << 22
"""Places looked up at a time: 32 MB of addresses."""


def tolerance(height: int, width: int, share: float = SHARE) -> float:
    """Pixels that a boundary may be off in a picture of this size: a share of its diagonal."""
    return share * math.hypot(height, width)


def boundary_counts(predicted: Tensor, mask: Tensor, classes: int, within: float) -> Rows:
    """Boundary pixels of each class, int64 (B, C), where the tensors are.

    `predicted` (B, H, W) holds classes, `mask` (B, H, W) classes or IGNORED; `within` is the tolerance in pixels.
    edge_predicted and edge_actual are the boundary pixels of prediction and truth; edge_found are those of the
    prediction that the truth has within the tolerance, edge_met those of the truth that the prediction has.
    """
    truth = mask.to(torch.uint8)
    found = torch.where(truth == IGNORED, truth, predicted.to(torch.uint8))
    outlines = [outline(found), outline(truth)]
    reach = int(within)
    # As far beyond the frame as is looked: no address is checked one by one.
    padded = [torch.nn.functional.pad(lines, (reach,) * 4, value=IGNORED) for lines in outlines]
    counts = []
    for own, other in (padded, padded[::-1]):
        at = (own.flatten() != IGNORED).nonzero()[:, 0]
        line = own.flatten()[at]
        cell = at // (own.shape[1] * own.shape[2]) * classes + line.long()
        met = _met(at, line, other.flatten(), own.shape[2], within)
        counts += [torch.bincount(cell[which], minlength=len(mask) * classes) for which in (met, slice(None))]
    return {name: count.view(len(mask), classes) for name, count in zip(COUNTS, counts, strict=True)}


def outline(labels: Tensor) -> Tensor:
    """(B, H, W) uint8: the class at the boundary pixels of each class, IGNORED elsewhere."""
    edge = torch.zeros_like(labels, dtype=torch.bool)
    for axis in (1, 2):
        size = labels.shape[axis] - 1
        first, second = labels.narrow(axis, 0, size), labels.narrow(axis, 1, size)
        differs = (first != second) & (first != IGNORED) & (second != IGNORED)
        edge.narrow(axis, 0, size).logical_or_(differs)
        edge.narrow(axis, 1, size).logical_or_(differs)
    return torch.where(edge, labels, IGNORED)


def _met(at: Tensor, line: Tensor, other: Tensor, width: int, within: float) -> Tensor:
    """Whether `other`, pictures of `width` one after another, has the class `line` (n,) near each address `at` (n,).

    Boundary pixels are few, so each looks around itself, near places first, and stops where it is met: 55 to 900 places
    for a disc, against a dilation of every class over the whole picture.
    """
    met = torch.zeros(len(at), dtype=torch.bool, device=at.device)
    waiting = torch.arange(len(at), device=at.device)
    steps = torch.tensor([y * width + x for y, x in disc(within)], device=at.device)
    first, many = 0, 9
    while first < len(steps) and len(waiting):
        step = steps[first : first + max(1, min(many, _AT_ONCE // len(waiting)))]
        hit = (other[at[waiting, None] + step] == line[waiting, None]).any(1)
        met[waiting[hit]] = True
        waiting = waiting[~hit]
        first, many = first + len(step), 4 * many
    return met


def disc(within: float) -> list[tuple[int, int]]:
    """Steps (down, right) to the pixels whose centres lie within so many pixels, the nearest first."""
    reach = int(within)
    steps = [(y, x) for y in range(-reach, reach + 1) for x in range(-reach, reach + 1)]
    inside = [(y * y + x * x, y, x) for y, x in steps if y * y + x * x <= within * within]
    return [(y, x) for _, y, x in sorted(inside)]

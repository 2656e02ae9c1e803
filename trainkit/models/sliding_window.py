"""Sliding-window prediction: class probabilities of a whole volume or image from a network for windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.models.segmentation_specs import WindowWeight

LEAST_WEIGHT = 1e-3
"""Smallest weight of a voxel, relative to the centre of a window; avoids a division by zero at corners."""


def window_starts(length: int, window: int, overlap: float) -> list[int]:
    """First voxels of the windows that cover an axis of `length` voxels with an `overlap` (a share).

    The last window ends with the axis. A window longer than the axis begins at 0.
    """
    if window >= length:
        return [0]
    step = max(1, int(window * (1 - overlap)))
    return [min(i * step, length - window) for i in range(-(-(length - window) // step) + 1)]


def window_weights(window: Sequence[int], kind: WindowWeight, device: torch.device | str = "cpu") -> Tensor:
    """Weight of each voxel of a window, float32 with the window's sides, at most 1.

    `gaussian` has a standard deviation of an eighth of the window (nnU-Net): predictions are worst at its border.
    """
    weight = torch.ones(tuple(window), device=device)
    if kind == "gaussian":
        for axis, side in enumerate(window):
            away = torch.arange(side, device=device) - (side - 1) / 2
            shape = [-1 if a == axis else 1 for a in range(len(window))]
            weight *= torch.exp(-0.5 * (away * 8 / side) ** 2).view(shape)
    return weight.clamp_min(LEAST_WEIGHT)


@torch.no_grad()
def sliding_probabilities(
    forward: Callable[[Tensor], Tensor],
    image: Tensor,
    window: Sequence[int],
    *,
    overlap: float = 0.5,
    weight: WindowWeight = "gaussian",
    batch_size: int = 4,
    mirrors: Sequence[bool] = (False, False, False),
    fill: float | None = None,
) -> Tensor:
    """Class probabilities, float32 (classes, *S), of one volume or image `image` (1, channels, *S).

    They are the weighted mean over windows of the softmax of `forward`, which maps (b, channels, *window) to class
    scores (b, classes, *window), with at most `batch_size` windows per call. `mirrors` selects axes: each window is
    also predicted mirrored along every combination of them. An image smaller than a window is padded on both sides with
    `fill`, or with the lowest value of each channel. Besides the result, one window's weights and a map of their sums
    are in memory.
    """
    window, size = tuple(window), tuple(image.shape[2:])
    missing = [max(0, w - s) for w, s in zip(window, size, strict=True)]
    before = [m // 2 for m in missing]
    if any(missing):
        sides = [side for b, m in zip(reversed(before), reversed(missing), strict=True) for side in (b, m - b)]
        fills = [float(channel.min()) if fill is None else fill for channel in image[0]]
        image = torch.cat([F.pad(image[:, c : c + 1], sides, value=value) for c, value in enumerate(fills)], 1)
    corners = [window_starts(s, w, overlap) for s, w in zip(image.shape[2:], window, strict=True)]
    places = [tuple(slice(a, a + w) for a, w in zip(c, window, strict=True)) for c in product(*corners)]
    weigh = window_weights(window, weight, image.device)
    flips = list(axis_subsets([2 + axis for axis, on in enumerate(mirrors) if on]))
    total, counted = image.new_zeros(0), torch.zeros(image.shape[2:], device=image.device)
    for place in places:
        counted[place] += weigh
    for i in range(0, len(places), batch_size):
        chunk = places[i : i + batch_size]
        seen = torch.cat([image[(slice(None), slice(None), *place)] for place in chunk])
        for flip in flips:
            scores = forward(seen.flip(flip) if flip else seen)
            part = scores.float().softmax(1)
            part = part.flip(flip) if flip else part
            if not total.numel():
                total = part.new_zeros((part.shape[1], *image.shape[2:]))
            for place, values in zip(chunk, part, strict=True):
                total[(slice(None), *place)] += values * weigh
    total /= counted * len(flips)
    inside = tuple(slice(b, b + s) for b, s in zip(before, size, strict=True))
    return total[(slice(None), *inside)]


def axis_subsets(axes: Sequence[int]) -> Iterator[list[int]]:
    """Every choice of some of the axes, none first."""
    for chosen in product((False, True), repeat=len(axes)):
        yield [axis for axis, on in zip(axes, chosen, strict=True) if on]

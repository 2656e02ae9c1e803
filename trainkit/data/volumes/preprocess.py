"""Preparation of the voxels of a file for networks: oriented, resampled where asked, and of comparable intensity.

Arrays are in stored order (depth, height, width) unless said otherwise; depth is the axis across slices.

Resampling keeps the extent of a volume: n voxels of s mm become round(n * s / t) voxels of about t mm, whose centres
are spread evenly over the same millimetres (`align_corners=False`). Images use Catmull-Rom's cubic kernel and labels a
linear one on each class, followed by the largest; both are widened where voxels grow, so that nothing is skipped.
Across thick slices (more than `THICK` times the finest spacing) the nearest slice is taken instead, as nnU-Net does
(Isensee et al., Nature Methods 2021): what lies between two slices 4 mm apart was not measured, and a mean of the two
shows every edge twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from trainkit.data.formats import nifti_header, volume_grid
from trainkit.errors import UserError
from trainkit.tensors import F, torch

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.data.formats.nifti_header import Header
    from trainkit.data.formats.volume_grid import Orientation

VERSION = 1
"""Raised whenever the same file would be prepared to other numbers: sets in the cache are then made anew."""

PERCENTILES = (0.5, 99.5)
"""Between these a volume is clipped before its mean and deviation are taken; bright vessels would rule both."""

THICK = 3.0
"""Slices are thick when their spacing is more than this many times the finest."""

PLANES = {"zyx": "axial", "yzx": "coronal", "xzy": "sagittal"}
"""Orders in which axes are stored, and the names of slices across the first one; axial where there are none."""

AXES = tuple(PLANES)

_AT_ONCE = 1 << 24

Kernel = Literal["cubic", "linear", "nearest"]


@dataclass(frozen=True)
class Preparation:
    """How volumes are prepared; equal for all volumes that one network sees."""

    axes: str
    """Order of the stored axes, such as `yzx`."""
    spacing: tuple[float, float, float] | None = None
    """mm to which volumes are resampled, in stored order; None: as they are."""


@dataclass(frozen=True)
class Prepared:
    """A prepared volume, and how to get back from it."""

    image: np.ndarray
    """float16 (channels, depth, height, width), each channel of mean 0 and deviation 1 before rounding."""
    orientation: Orientation
    """Between the axes of the file and the stored ones."""
    original_shape: tuple[int, int, int]
    original_spacing: tuple[float, float, float]
    """mm between voxels of the file, in stored order."""
    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    """mm between voxels of `image`; near what was asked for, since the extent is kept."""
    facts: tuple[dict[str, float], ...]
    """Of each channel `lowest` and `highest` value, `clip_low` and `clip_high`, and `mean` and `std` between these."""

    @property
    def floors(self) -> tuple[float, ...]:
        """The lowest value of each channel of `image`, which stands for what lies outside."""
        return tuple(float(channel.min()) for channel in self.image)


def prepare(array: np.ndarray, header: Header, how: Preparation) -> Prepared:
    """Prepare an image, float32 in the axes of its file, perhaps with the channels before these, each on its own.

    A channel without contrast between its percentiles becomes zeros, with `std` 0 in its facts.
    Raises UserError when the volume would have more voxels than `nifti_header.VOXEL_LIMIT` at the spacing asked for.
    """
    orientation = volume_grid.orientation(header.affine, how.axes)
    channels = array if array.ndim == 4 else array[None]
    depth, height, width = original = orientation.apply(channels[0]).shape
    spacing = three(orientation.spacing(header))
    shape = (depth, height, width)
    if how.spacing is not None:
        exact = [n * s / t for n, s, t in zip(original, spacing, how.spacing, strict=True)]
        if np.prod(np.maximum(exact, 1)) > nifti_header.VOXEL_LIMIT:
            found = f"{nifti_header.by(exact, '.4g')} voxels at {nifti_header.by(how.spacing)} mm"
            raise UserError(str(header.path), found, f"at most {nifti_header.VOXEL_LIMIT}", "choose a larger spacing")
        shape = (max(1, round(exact[0])), max(1, round(exact[1])), max(1, round(exact[2])))
    along = kernels(original, spacing, shape, "cubic")
    image, facts = np.empty((len(channels), *shape), np.float16), []
    for place, channel in enumerate(channels):
        # In one order in memory, so that sums do not depend on how the axes of the file run.
        oriented = np.ascontiguousarray(orientation.apply(channel), np.float32)
        image[place], used = normalise(resample(oriented, shape, along))
        facts.append({"lowest": float(channel.min()), "highest": float(channel.max()), **used})
    reached = three(s * n / m for s, n, m in zip(spacing, original, shape, strict=True))
    return Prepared(image, orientation, (depth, height, width), spacing, shape, reached, tuple(facts))


def prepare_labels(labels: np.ndarray, ready: Prepared) -> np.ndarray:
    """Bring a label map, uint8 in the axes of the file, to the grid of its prepared image."""
    oriented = np.ascontiguousarray(ready.orientation.apply(labels))
    along = kernels(ready.original_shape, ready.original_spacing, ready.shape, "linear")
    return resample_labels(oriented, ready.shape, along)


def normalise(array: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """Clip to `PERCENTILES`, take the mean away and divide by the deviation: float16, and the four numbers used.

    Scanners scale as they like (in TOM500 the mean of fat is 331 to 25,000), so only a volume's own numbers can do.
    """
    low, high = (float(bound) for bound in np.percentile(array, PERCENTILES))
    values = np.clip(array, low, high, dtype=np.float32)
    mean = float(values.mean(dtype=np.float64))
    values -= np.float32(mean)
    # Slice by slice: a float64 copy of the whole would take more memory than all else.
    std = float(np.sqrt(sum(float(np.square(part, dtype=np.float64).sum()) for part in values) / values.size))
    if high <= low or not std > 0:
        return np.zeros(array.shape, np.float16), {"clip_low": low, "clip_high": high, "mean": low, "std": 0.0}
    values /= np.float32(std)
    # Within the percentiles nothing is farther than 1 / sqrt(0.005) = 14 deviations: float16 holds it to 0.004.
    return values.astype(np.float16), {"clip_low": low, "clip_high": high, "mean": mean, "std": std}


def kernels(
    shape: Sequence[int], spacing: Sequence[float], new: Sequence[int], kernel: Kernel
) -> tuple[Kernel, Kernel, Kernel]:
    """Return the kernel of each axis: `kernel`, and `nearest` across slices that are or become thick."""
    reached = [s * n / m for s, n, m in zip(spacing, shape, new, strict=True)]
    along: list[Kernel] = [kernel] * 3
    for grid in (reached, spacing):
        if max(grid) > THICK * min(grid):
            along = [kernel] * 3
            along[int(np.argmax(grid))] = "nearest"
    return along[0], along[1], along[2]


def resample(array: np.ndarray, shape: Sequence[int], along: Sequence[Kernel]) -> np.ndarray:
    """Bring an image of three axes to `shape`, float32, each axis by its kernel."""
    array = np.asarray(array, np.float32)
    # Axes that shrink come first: what follows has less to do.
    for axis in sorted(range(3), key=lambda axis: shape[axis] / array.shape[axis]):
        length, new = array.shape[axis], int(shape[axis])
        if length == new:
            continue
        if along[axis] == "nearest":
            array = np.take(array, nearest_voxels(length, new), axis)
        else:
            array = _summed(array, *_taps(length, new, along[axis]), axis)
    return array


def resample_labels(labels: np.ndarray, shape: Sequence[int], along: Sequence[Kernel]) -> np.ndarray:
    """Bring labels, uint8 of three axes, to `shape`: each class by the kernels, then the class with the largest share.

    Voxels that are IGNORED are as a class of their own: what they fill most of is ignored.
    Where shares are equal the nearest voxel decides: were it the lower number, halving a volume would take half a voxel
    off many surfaces. Each class is resampled in the box that it fills, so time and memory hardly grow with classes.
    """
    from scipy import ndimage

    if tuple(shape) == labels.shape:
        return labels.copy()
    taps = [_taps(n, m, kernel) for n, m, kernel in zip(labels.shape, shape, along, strict=True)]
    nearest = labels
    for axis, length in enumerate(shape):
        nearest = np.take(nearest, nearest_voxels(labels.shape[axis], length), axis)
    result = np.zeros(tuple(shape), np.uint8)
    best, own = np.zeros(tuple(shape), np.float32), np.zeros(tuple(shape), np.float32)
    rest = np.ones(tuple(shape), np.float32)
    for label, box in enumerate(ndimage.find_objects(labels), start=1):
        if box is None:
            continue
        share, block = (labels[box] == label).astype(np.float32), []
        for axis, (places, weights) in enumerate(taps):
            first, last = box[axis].start, box[axis].stop
            weights = np.where((places >= first) & (places < last), weights, 0)
            reached = np.flatnonzero(weights.any(0))
            block.append(slice(int(reached[0]), int(reached[-1]) + 1) if len(reached) else slice(0, 0))
            inside = np.clip(places[:, block[-1]] - first, 0, last - first - 1)
            share = _summed(share, inside, weights[:, block[-1]], axis)
        block = tuple(block)
        larger = share > best[block]
        best[block][larger], result[block][larger] = share[larger], label
        here = nearest[block] == label
        own[block][here] = share[here]
        rest[block] -= share
    # What no organ has is background.
    result[rest > best] = 0
    np.maximum(best, rest, out=best)
    np.copyto(own, rest, where=nearest == 0)
    tied = own >= best - 1e-5
    result[tied] = nearest[tied]
    return result


def to_original(scores: Tensor, shape: Sequence[int]) -> Tensor:
    """Turn class scores (C, D, H, W) of a prepared grid into labels of the original one, uint8 (D0, H0, W0).

    Scores are interpolated (trilinear, extents aligned as in `prepare`) and then the largest is taken, lower numbers
    first, so that borders between organs are smooth where voxels become finer. Slices are done a few at a time, which
    bounds the memory. Runs where `scores` live.
    """
    classes, depth, height, width = scores.shape
    new_depth, *plane = (int(length) for length in shape)
    labels = torch.empty((new_depth, *plane), dtype=torch.uint8, device=scores.device)
    step = max(1, _AT_ONCE // (classes * max(height * width, plane[0] * plane[1])))
    place = (torch.arange(new_depth, dtype=torch.float64) + 0.5) * (depth / new_depth) - 0.5
    lower = place.clamp(0, depth - 1).floor().long()
    upper = (lower + 1).clamp(max=depth - 1)
    share = (place.clamp(0, depth - 1) - lower).float().to(scores.device)
    lower, upper = lower.to(scores.device), upper.to(scores.device)
    for first in range(0, new_depth, step):
        part = slice(first, min(first + step, new_depth))
        if depth == new_depth:
            slab = scores[:, part].float()
        else:
            slab = torch.lerp(scores[:, lower[part]].float(), scores[:, upper[part]].float(), share[part, None, None])
        if (height, width) != tuple(plane):
            slab = F.interpolate(slab, size=tuple(plane), mode="bilinear", align_corners=False)
        labels[part] = slab.argmax(0).to(torch.uint8)
    return labels


def _summed(array: np.ndarray, places: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    """The sum over taps of what stands at `places` along `axis`, by `weights`; both (taps, new)."""
    line = [1, 1, 1]
    line[axis] = places.shape[1]
    # A sum over taps rather than a product of matrices, whose last bits differ between machines.
    total = np.zeros((*array.shape[:axis], places.shape[1], *array.shape[axis + 1 :]), np.float32)
    for place, weight in zip(places, weights, strict=True):
        total += np.take(array, place, axis) * weight.reshape(line)
    return total


def nearest_voxels(length: int, new: int) -> np.ndarray:
    """Return for each voxel of an axis of `new` voxels the one of `length` that its centre lies in, int64 (new,)."""
    # Whole numbers, so that halves always fall to the same side.
    return (2 * np.arange(new) + 1) * length // (2 * new)


def _taps(length: int, new: int, kernel: Kernel) -> tuple[np.ndarray, np.ndarray]:
    """For every tap the places it reads (int64) and their weights (float32), each (taps, new)."""
    if length == new or kernel == "nearest":
        return nearest_voxels(length, new)[None], np.ones((1, new), np.float32)
    scale = max(length / new, 1.0)
    reach = (2.0 if kernel == "cubic" else 1.0) * scale
    centre = (np.arange(new) + 0.5) * (length / new) - 0.5
    first = np.floor(centre - reach).astype(np.int64) + 1
    places = first + np.arange(int(np.ceil(2 * reach)))[:, None]
    distance = np.abs(places - centre) / scale
    weights = _cubic(distance) if kernel == "cubic" else np.maximum(1 - distance, 0)
    weights = np.where((places < 0) | (places >= length), 0, weights)
    weights /= weights.sum(0)
    return np.clip(places, 0, length - 1), weights.astype(np.float32)


def _cubic(x: np.ndarray) -> np.ndarray:
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def three(numbers: Iterable[float]) -> tuple[float, float, float]:
    """Return three numbers as a tuple. Raises ValueError for more or fewer."""
    depth, height, width = map(float, numbers)
    return depth, height, width

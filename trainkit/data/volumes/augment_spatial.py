"""Rotation, scale and mirroring of patches, interpolated once, all together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from trainkit import rng
from trainkit.config.ranges import Fraction
from trainkit.data.augment import check_order
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

STREAM = "augment-volume"

DRAWS = (
    "rotate", "turn_0", "turn_1", "turn_2", "scale", "factor", "unused", "flip_0", "flip_1", "flip_2",
    "bias_field", "blur", "sigma", "low_resolution", "zoom", "noise", "deviation", "key",
    "gamma", "exponent", "invert", "contrast", "gain", "brightness", "shift",
)  # fmt: skip
"""One draw in [0, 1) for each, in this order: what a setting draws does not depend on the other settings."""

NAMES = frozenset({"warp", "matrix", "flip", "labels"})
"""Numbers of changes of shape, which are one for all channels."""

FLAT = 3.0
"""Slices farther apart than this many times the voxels within them are not mixed: shape changes stay in the plane
(nnU-Net's threshold, Isensee et al. 2021)."""

_SLAB = 1 << 16
"""Voxels that are interpolated at once on a CPU, so that what is computed for them stays in its cache."""


@dataclass(kw_only=True)
class Rotate:
    """Rotation about the centre of the patch. nnU-Net: p 0.2, in_plane 30 and out_of_plane 30; p 0.2, in_plane 180 for
    thick slices."""

    p: Fraction = 0.2
    """Fraction of the samples that are changed."""
    in_plane: Annotated[float, Field(ge=0, le=180)] = 15.0
    """Largest rotation within the slices in either direction, in degrees."""
    out_of_plane: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation about each of the two axes within the slices, in degrees; no effect where slices are thick
    (`FLAT`)."""

    def largest(self, flat: bool) -> np.ndarray:
        """Largest turn in radians about each of the stored axes; `flat`: where slices are thick."""
        aside = 0.0 if flat else self.out_of_plane
        return np.radians([self.in_plane, aside, aside])


@dataclass(kw_only=True)
class Scale:
    """Scaling, the same along all axes, or within the slices where they are thick (`FLAT`). nnU-Net: p 0.2, 0.7 to
    1.4."""

    p: Fraction = 0.2
    """Fraction of the samples that are changed."""
    factor: tuple[Annotated[float, Field(ge=0.1, le=10)], Annotated[float, Field(ge=0.1, le=10)]] = (0.8, 1.25)
    """Smallest and largest factor, sampled uniformly on a logarithmic scale. Above 1, objects become larger."""

    def __post_init__(self) -> None:
        check_order(self, "factor")


# ---- draws -----------------------------------------------------------------------------------------------------------


class Draws:
    """Draws of rows of an epoch: a function of seed, epoch, row and channel. `patch` in voxels, `spacing` in mm of its
    grid."""

    def __init__(
        self, seed: int, epoch: int, rows: np.ndarray, patch: Sequence[int], spacing: Sequence[float], channel: int = 0
    ):
        self.stream = f"{STREAM}-channel-{channel}" if channel else STREAM
        self.at, self.rows, self.count = (seed, epoch), np.asarray(rows), len(rows)
        self.patch, self.mm = patch, np.asarray(spacing, float)
        draws = rng.uniform(seed, self.stream, epoch, self.rows[:, None], np.arange(len(DRAWS)))
        self.values: dict[str, np.ndarray] = dict(zip(DRAWS, draws.T, strict=True))

    def below(self, name: str, p: float) -> np.ndarray:
        """Choose a share of the rows, bool (N,)."""
        return self.values[name] < p

    def between(self, name: str, ends: Sequence[float] | np.ndarray) -> np.ndarray:
        """Draw a number between two for each row, float64 (N,)."""
        return ends[0] + (ends[1] - ends[0]) * self.values[name]

    def further(self, name: str, chosen: np.ndarray, count: int) -> np.ndarray:
        """Draw `count` more numbers in [0, 1) for each chosen row."""
        seed, epoch = self.at
        return rng.uniform(seed, f"{self.stream}-{name}", epoch, self.rows[chosen][:, None], np.arange(count))


def is_flat(mm: np.ndarray) -> bool:
    """Return whether slices are thick: farther apart than `FLAT` times the voxels within them."""
    return bool(mm[0] > FLAT * max(mm[1], mm[2]))


def reach(patch: Sequence[int], spacing: Sequence[float], rotate: Rotate | None, scale: Scale | None) -> np.ndarray:
    """Return how many voxels beyond a patch the largest turn and size read along each axis, float64 (3,)."""
    mm, half = np.asarray(spacing, float), (np.asarray(patch, float) - 1) / 2
    largest = rotate.largest(is_flat(mm)) if rotate else np.zeros(3)
    ends = [np.linspace(-angle, angle, 13) if angle else np.zeros(1) for angle in largest]
    turns = np.stack([each.ravel() for each in np.meshgrid(*ends)], axis=1)
    smallest = min(1.0, scale.factor[0]) if scale else 1.0
    far = (np.abs(matrices(turns, np.full(len(turns), smallest), mm)) @ half).max(0)
    return np.ceil(far - half - 1e-6)


def numbers(draw: Draws, rotate: Rotate | None, scale: Scale | None) -> dict[str, np.ndarray]:
    """Draw which rows are interpolated (`warp`), and from where. Two axes instead of three where slices are thick."""
    flat = is_flat(draw.mm)
    turns, size, warp = np.zeros((draw.count, 3)), np.ones(draw.count), np.zeros(draw.count, bool)
    if rotate:
        chosen = draw.below("rotate", rotate.p)
        turns = np.stack([draw.between(f"turn_{i}", (-1, 1)) for i in range(3)], axis=1)
        turns, warp = turns * rotate.largest(flat) * chosen[:, None], warp | chosen
    if scale:
        chosen = draw.below("scale", scale.p)
        size, warp = np.exp(draw.between("factor", np.log(scale.factor)) * chosen), warp | chosen
    axes = slice(1 if flat else 0, 3)
    return {"warp": warp, "matrix": matrices(turns, size, draw.mm)[:, axes, axes].astype(np.float32)}


def matrices(turns: np.ndarray, size: np.ndarray, mm: np.ndarray) -> np.ndarray:
    """Return for each outcome the matrix from offsets within it to offsets within its source, voxels from the middle.

    It is the inverse of turns about the three axes (radians, N x 3) and a size; in the plane, where slices are thick.
    """
    cos, sin = np.cos(turns), np.sin(turns)
    out = np.tile(np.eye(3), (len(turns), 1, 1))
    for axis, (i, j) in enumerate(((1, 2), (0, 2), (0, 1))):
        turn = np.tile(np.eye(3), (len(turns), 1, 1))
        turn[:, i, i] = turn[:, j, j] = cos[:, axis]
        turn[:, i, j], turn[:, j, i] = -sin[:, axis], sin[:, axis]
        out = out @ turn
    factor = np.tile(1 / size[:, None], 3)
    if is_flat(mm):
        factor[:, 0] = 1.0
    return out.transpose(0, 2, 1) * factor[:, :, None] * mm / mm[:, None]


# ---- voxels ----------------------------------------------------------------------------------------------------------


def by_sample(image: Tensor) -> bool:
    """Return whether work is done for each sample that needs it; else for all at once."""
    return image.device.type == "cpu"


def apply(image: Tensor, mask: Tensor, at: Mapping[str, Tensor], patch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return patches and masks after all changes of shape, as new tensors."""
    return (_shaped_by_sample if by_sample(image) else _shaped)(image, mask, at, patch)


def _cropped(whole: Tensor, patch: Sequence[int]) -> Tensor:
    """The middle of the last axes, a view."""
    for axis, size in zip(range(-len(patch), 0), patch, strict=True):
        whole = whole.narrow(axis, (whole.shape[axis] - size) // 2, size)
    return whole


def _channels(whole: Tensor, patch: Sequence[int], axes: int) -> Tensor:
    """Volumes (B, C, D', H', W') as (B, channels, *source) with as many axes in the source as are interpolated: with
    two, the slices of the patch are channels too."""
    return whole if axes == 3 else _cropped(whole, (patch[0], *whole.shape[3:])).flatten(1, 2)


def _shaped(image: Tensor, mask: Tensor, at: Mapping[str, Tensor], patch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As `apply`, all samples at once."""
    out, labels = _cropped(image, patch).float(), _cropped(mask, patch)
    if "warp" in at:
        axes, warp = at["matrix"].shape[1], at["warp"].view(-1, 1, 1, 1, 1)
        source = _channels(image, patch, axes).float()
        grid = _grid(at["matrix"], patch[-axes:], source.shape[2:])
        moved = torch.nn.functional.grid_sample(source, grid, "bilinear", "border", align_corners=False)
        out = torch.where(warp, moved.view_as(out), out)
        source = _channels(mask[:, None], patch, axes).float()
        moved = torch.nn.functional.grid_sample(source, grid, "nearest", "border", align_corners=False)
        labels = torch.where(warp[:, 0], moved.view_as(labels).to(mask.dtype), labels)
    if "flip" in at:
        for axis in range(3):
            flip = at["flip"][:, axis].view(-1, 1, 1, 1)
            out = torch.where(flip[:, None], out.flip(axis + 2), out)
            labels = torch.where(flip, labels.flip(axis + 1), labels)
    if "labels" in at:
        table = at["labels"]
        first = torch.arange(len(table), device=table.device).view(-1, 1, 1, 1) * table.shape[1]
        labels = table.reshape(-1)[labels.long() + first]
    return out.contiguous(), labels.contiguous()


def _shaped_by_sample(
    image: Tensor, mask: Tensor, at: Mapping[str, Tensor], patch: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """As `apply`, with work for the samples alone that need it, written where the batch will be."""
    out = torch.empty(len(image), image.shape[1], *patch)
    labels = torch.empty(len(mask), *patch, dtype=mask.dtype)
    axes = at["matrix"].shape[1] if "warp" in at else 3
    for i in range(len(image)):
        flips = at["flip"][i].nonzero().view(-1).tolist() if "flip" in at else []
        one, its_labels = out[i], labels[i]
        if "warp" in at and at["warp"][i]:
            _interpolate(
                _channels(image[i : i + 1], patch, axes)[0].float(),
                _channels(mask[i : i + 1, None], patch, axes)[0],
                at["matrix"][i].tolist(),
                one.view(-1, *patch[-axes:]),
                its_labels.view(-1, *patch[-axes:]),
            )
            if flips:
                one.copy_(one.flip([axis + 1 for axis in flips]))
                its_labels.copy_(its_labels.flip(flips))
        else:
            one.copy_(_cropped(image[i], patch).flip([axis + 1 for axis in flips]))
            its_labels.copy_(_cropped(mask[i], patch).flip(flips))
        if "labels" in at:
            table = at["labels"][i]
            if not torch.equal(table, torch.arange(len(table), dtype=table.dtype)):
                its_labels.copy_(table.index_select(0, its_labels.view(-1).int()).view_as(its_labels))
    return out, labels


def _grid(matrix: Tensor, patch: Sequence[int], source: Sequence[int]) -> Tensor:
    """Where each voxel comes from, in grid_sample's units: (B, *patch, axes), the last axis first."""
    out, count = [], len(patch)
    for axis in range(count):
        place = sum(matrix[:, axis, j].view(-1, *[1] * count) * _offsets(patch, j, matrix.device) for j in range(count))
        out.append((place * 2 + 1) / source[axis] + (source[axis] - 1) / source[axis] - 1)
    return torch.stack(out[::-1], dim=-1)


def _offsets(patch: Sequence[int], axis: int, device: torch.device) -> Tensor:
    """Voxels from the middle along one axis, in the shape that broadcasts to the patch."""
    size = patch[axis]
    place = torch.arange(size, device=device) - (size - 1) / 2
    return place.view([size if i == axis else 1 for i in range(len(patch))])


def _interpolate(image: Tensor, mask: Tensor, matrix: list[list[float]], out: Tensor, labels: Tensor) -> None:
    """One sample on a CPU: linear interpolation of `image` (channels, *source) into `out` (channels, *patch), and the
    nearest voxel of `mask` (slices or 1, *source) into `labels`; beyond the border the outermost voxel.

    Three times as fast as grid_sample on one thread: neighbours are picked from the flat volume with one index for
    all eight, by slabs whose places and shares stay in the cache, and the mask shares the places.
    """
    source, patch = image.shape[1:], out.shape[1:]
    axes = range(len(source))
    # Flat places are computed as floats and must be whole numbers.
    number = torch.float32 if math.prod(source) < 1 << 24 else torch.float64
    strides = [math.prod(source[i + 1 :]) if source[i] > 1 else 0 for i in axes]
    offsets = [_offsets(patch, j, image.device).to(number) for j in axes]
    across = [
        sum((offsets[j] * matrix[i][j] for j in axes[1:]), torch.full((), (source[i] - 1) / 2, dtype=number))
        for i in axes
    ]
    along = [offsets[0] * matrix[i][0] for i in axes]
    pixels, marks = image.flatten(1), mask.flatten(1)
    step = max(1, _SLAB // math.prod(patch[1:]))
    for start in range(0, patch[0], step):
        slab = slice(start, start + step)
        first = nearest = torch.zeros(())
        shares = []
        for i in axes:
            place = across[i] + along[i][slab]
            place.clamp_(0, source[i] - 1)
            near, low = place.round(), place.floor().clamp_(max=max(source[i] - 2, 0))
            shares.append(place.sub_(low).float().view(-1))
            first = low.add_(first, alpha=source[i]) if i else low
            nearest = near.add_(nearest, alpha=source[i]) if i else near
        first, nearest = first.view(-1).int(), nearest.view(-1).int()
        for channel in range(len(image)):
            value = _mixed(pixels[channel], first, shares, strides)
            out[channel, slab] = value.view(-1, *patch[1:])
        for channel in range(len(mask)):
            labels[channel, slab] = marks[channel].index_select(0, nearest).view(-1, *patch[1:])


def _mixed(flat: Tensor, first: Tensor, shares: Sequence[Tensor], strides: Sequence[int]) -> Tensor:
    """Linear interpolation between the neighbours that begin at `first`, along each axis in turn."""
    if not shares:
        return flat.index_select(0, first)
    value = _mixed(flat, first, shares[1:], strides[1:])
    return value.lerp_(_mixed(flat[strides[0] :], first, shares[1:], strides[1:]), shares[0])

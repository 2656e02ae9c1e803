"""Augmentation of patches of volumes: drawn on the host by hash, computed where the batch lives.

Shape changes come first and are interpolated once, all together: rotation, scale and elastic deformation in mm, then
mirrors, which pick voxels and exchange the labels of left and right. Then intensities, in the order in which a scanner
makes them: bias field, blur, low resolution, noise; and at last gamma, gain and shift, as scanners differ in these.

What happens to a sample is a function of seed, epoch and row of the split alone, whatever its batch. On a CPU the work
is done for the samples that are drawn for it; on a GPU for all, and the others keep what they had, because to know
which are drawn the host would have to wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import seeding
from trainkit.errors import UserError

STREAM = "augment-volume"

DRAWS = (
    "rotate", "turn_0", "turn_1", "turn_2", "scale", "factor", "elastic", "flip_0", "flip_1", "flip_2",
    "bias_field", "blur", "sigma", "low_resolution", "zoom", "noise", "deviation", "key",
    "gamma", "exponent", "invert", "contrast", "gain", "brightness", "shift",
)  # fmt: skip
"""One draw in [0, 1) for each, in this order: what a setting draws does not depend on the other settings."""

FLAT = 3.0
"""Slices farther apart than this many times the voxels within them are not mixed: shape changes stay in the plane
(nnU-Net's threshold, Isensee et al. 2021)."""

FOLD = 0.403
"""Largest shift of control points, in distances between them, for which a cubic B-spline deformation cannot fold
(Choi and Lee 2000, in three dimensions)."""

ANATOMY = {"left_right": "x", "back_front": "y", "down_up": "z"}
"""The world axis along which a flip goes."""

Flip = Literal["left_right", "back_front", "down_up"]

_SLAB = 1 << 16
"""Voxels that are interpolated at once on a CPU, so that what is computed for them stays in its cache."""


@dataclass(kw_only=True)
class Rotate:
    """Turn about the middle of the patch. nnU-Net: p 0.2, in_plane 30 and out_of_plane 30; p 0.2, in_plane 180 for
    thick slices."""

    p: float = 0.2
    """Share of the samples."""
    in_plane: float = 15.0
    """Largest turn within the slices, in degrees, either way."""
    out_of_plane: float = 0.0
    """Largest turn about each of the two axes within the slices; without effect where slices are thick (`FLAT`)."""

    def __post_init__(self) -> None:
        _share(self, "p")
        for name in ("in_plane", "out_of_plane"):
            if not 0 <= getattr(self, name) <= 180:
                raise ValueError(f"{name} is {getattr(self, name)}; degrees from 0 to 180 are needed")


@dataclass(kw_only=True)
class Scale:
    """Size, the same along all axes, or within the slices where they are thick (`FLAT`). nnU-Net: p 0.2, 0.7 to
    1.4."""

    p: float = 0.2
    factor: tuple[float, float] = (0.8, 1.25)
    """Smallest and largest; drawn evenly on a logarithmic scale. Above 1 things become larger."""

    def __post_init__(self) -> None:
        _share(self, "p")
        _range(self, "factor", 0.1, 10)


@dataclass(kw_only=True)
class Elastic:
    """Smooth deformation: a cubic B-spline through shifted control points (Rueckert et al. 1999). nnU-Net has it off
    since version 2; U-Net (Ronneberger et al. 2015) owed much to it."""

    p: float = 0.2
    every: float = 32.0
    """mm between control points."""
    shift: float = 6.0
    """Largest shift of a control point along each axis, in mm. Tissue moves by a fifth of it (standard deviation)."""

    def __post_init__(self) -> None:
        _share(self, "p")
        if not (self.every > 0 and 0 <= self.shift <= FOLD * self.every):
            raise ValueError(
                f"shift is {self.shift} mm with control points every {self.every} mm; up to "
                f"{FOLD * max(self.every, 0.0):.3g} mm are possible, or tissue folds"
            )


@dataclass(kw_only=True)
class BiasField:
    """Smooth factor on intensities, exp of a cubic B-spline: what receiving coils leave in the image."""

    p: float = 0.15
    every: float = 64.0
    """mm between control points."""
    log: float = 0.6
    """Largest logarithm of the factor at a control point, either way; a fifth of it is usual."""

    def __post_init__(self) -> None:
        _share(self, "p")
        if self.every <= 0 or not 0 <= self.log <= 5:
            raise ValueError("needed: every above 0 mm and log from 0 to 5")


@dataclass(kw_only=True)
class Blur:
    """Gaussian blur. nnU-Net: p 0.2, 0.5 to 1 voxel."""

    p: float = 0.2
    sigma: tuple[float, float] = (0.25, 0.5)
    """Smallest and largest standard deviation in mm, the same along all axes."""

    def __post_init__(self) -> None:
        _share(self, "p")
        _range(self, "sigma", 0.0)


@dataclass(kw_only=True)
class LowResolution:
    """Fewer voxels, brought back to their number by linear interpolation. nnU-Net: p 0.25, 0.5 to 1."""

    p: float = 0.25
    zoom: tuple[float, float] = (0.5, 1.0)
    """Smallest and largest share of the voxels along each axis; within the slices only, where they are thick."""

    def __post_init__(self) -> None:
        _share(self, "p")
        _range(self, "zoom", 0.05, 1.0)


@dataclass(kw_only=True)
class Noise:
    """Gaussian noise. nnU-Net: p 0.1, variance up to 0.1, hence a deviation up to 0.3."""

    p: float = 0.1
    deviation: tuple[float, float] = (0.0, 0.3)
    """Smallest and largest standard deviation, in those of the volume."""

    def __post_init__(self) -> None:
        _share(self, "p")
        _range(self, "deviation", 0.0)


@dataclass(kw_only=True)
class Gamma:
    """Power of the intensities, taken as 0 .. 1 between the lowest and the highest of the patch; mean and standard
    deviation are kept. nnU-Net: p 0.3, 0.7 to 1.5, and inverted for a third of them."""

    p: float = 0.3
    exponent: tuple[float, float] = (0.7, 1.5)
    """Smallest and largest; drawn evenly on a logarithmic scale, so that 1 / a is as likely as a."""
    invert: float = 0.25
    """Share of these for which dark and bright are exchanged before and after."""

    def __post_init__(self) -> None:
        _share(self, "p", "invert")
        _range(self, "exponent", 0.05, 20)


@dataclass(kw_only=True)
class Contrast:
    """Factor on intensities about 0, the mean of the volume. nnU-Net: p 0.15, 0.75 to 1.25 (twice: about 0 and about
    the patch's mean)."""

    p: float = 0.15
    factor: tuple[float, float] = (0.75, 1.25)

    def __post_init__(self) -> None:
        _share(self, "p")
        _range(self, "factor", 0.0)


@dataclass(kw_only=True)
class Brightness:
    """What is added to all intensities."""

    p: float = 0.15
    shift: float = 0.2
    """Largest, either way, in standard deviations of the volume."""

    def __post_init__(self) -> None:
        _share(self, "p")
        if self.shift < 0:
            raise ValueError(f"shift is {self.shift}; a number from 0 is needed")


@dataclass(kw_only=True)
class VolumeAugment:
    """What happens to patches while training; nothing where a block is not given.

    Lengths are in mm and angles are true, whatever the spacing. Where slices are thick (`FLAT`), rotation, scale,
    elastic deformation and low resolution stay within them.
    """

    rotate: Rotate | None = None
    scale: Scale | None = None
    elastic: Elastic | None = None
    flips: list[Flip] = field(default_factory=list)
    """Anatomical axes along which a patch is mirrored, each for half of the samples."""
    swap: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of labels that a flip of left_right exchanges, such as [left kidney, right kidney]."""
    bias_field: BiasField | None = None
    blur: Blur | None = None
    low_resolution: LowResolution | None = None
    noise: Noise | None = None
    gamma: Gamma | None = None
    contrast: Contrast | None = None
    brightness: Brightness | None = None
    reach: float = 0.25
    """Most that is read beyond the patch on either side for turning and scaling it, as a share of its side. Farther
    out the outermost voxel is repeated."""

    def __post_init__(self) -> None:
        if not 0 <= self.reach <= 2:
            raise ValueError(f"reach is {self.reach}; a share from 0 to 2 is needed")
        if len(set(self.flips)) < len(self.flips):
            raise ValueError(f"flips has {', '.join(self.flips)}; each axis once")

    @property
    def spatial(self) -> bool:
        """Whether patches are interpolated."""
        return any(block is not None and block.p > 0 for block in (self.rotate, self.scale, self.elastic))

    def checked(self, names: Sequence[str], axes: str) -> None:
        """Raise UserError where the labels do not fit: `names` are those of all labels, the background first, `axes`
        the stored order such as `yzx`."""
        if sorted(axes) != ["x", "y", "z"]:
            raise ValueError(f"axes {axes!r}: x, y and z in some order are needed")
        said = [name for pair in self.swap for name in pair]
        if wrong := [name for name in said if name not in names[1:]]:
            raise UserError("data.augment.swap", f"no label is named {wrong[0]!r}", f"pairs of {', '.join(names[1:])}")
        if twice := [name for name in said if said.count(name) > 1]:
            raise UserError("data.augment.swap", f"{twice[0]!r} stands in it twice", "each label once")
        if self.swap and "left_right" not in self.flips:
            raise UserError(
                "data.augment.swap", "nothing is flipped from left to right", remedy="add left_right to augment.flips"
            )
        if "left_right" in self.flips:
            for left, right in _sides(names[1:]):
                if not {(left, right), (right, left)} & {tuple(pair) for pair in self.swap}:
                    raise UserError(
                        "data.augment.flips",
                        f"left_right would turn {left!r} into {right!r} with the wrong label",
                        remedy=f"add [{left}, {right}] to data.augment.swap, or leave out left_right",
                    )

    def margin(self, patch: Sequence[int], spacing: Sequence[float]) -> tuple[int, int, int]:
        """Voxels that are to be read beyond a patch on each side along each axis; zeros where none are needed.

        `spacing` in mm is that of the whole set, in stored order, as for `numbers`.
        """
        size, mm = np.asarray(patch, float), np.asarray(spacing, float)
        if not self.spatial:
            return (0, 0, 0)
        flat = _flat(mm)
        ends = [np.zeros(1)] * 3
        if self.rotate:
            largest = np.radians([self.rotate.in_plane, *[0 if flat else self.rotate.out_of_plane] * 2])
            ends = [np.linspace(-angle, angle, 13) if angle else np.zeros(1) for angle in largest]
        turns = np.stack([each.ravel() for each in np.meshgrid(*ends)], axis=1)
        smallest = min(1.0, self.scale.factor[0]) if self.scale else 1.0
        half = (size - 1) / 2
        far = (np.abs(_matrices(turns, np.full(len(turns), smallest), mm)) @ half).max(0)
        if self.elastic:
            far = far + self.elastic.shift / mm * (np.asarray([not flat, True, True]))
        needed = np.ceil(far - half - 1e-6)
        return tuple(int(n) for n in np.clip(needed, 0, np.floor(self.reach * size)))

    def numbers(
        self,
        seed: int,
        epoch: int,
        rows: np.ndarray,
        patch: Sequence[int],
        spacing: Sequence[float],
        axes: str,
        names: Sequence[str] = (),
    ) -> dict[str, np.ndarray]:
        """What happens to each of `rows` of an epoch: arrays with one entry a row, for `apply`; none where all is off.

        `patch` in voxels and `spacing` in mm are in stored order, which `axes` names; `spacing` is one for the whole
        set. `names` are those of all labels, the background first; needed with `swap`.
        """
        rows = np.asarray(rows)
        draw = _draws(seed, epoch, rows)
        mm = np.asarray(spacing, float)
        flat = _flat(mm)
        out: dict[str, np.ndarray] = {}
        if self.spatial:
            out |= self._shape(draw, patch, mm, flat, (seed, epoch, rows))
        if self.flips:
            flips = np.zeros((len(rows), 3), bool)
            for name in self.flips:
                axis = axes.index(ANATOMY[name])
                flips[:, axis] = draw[f"flip_{'xyz'.index(ANATOMY[name])}"] < 0.5
            out["flip"] = flips
            if self.swap:
                table = np.tile(np.arange(len(names), dtype=np.uint8), (len(rows), 1))
                sides = flips[:, axes.index("x")]
                for one, other in self.swap:
                    i, j = list(names).index(one), list(names).index(other)
                    table[sides, i], table[sides, j] = j, i
                out["labels"] = table
        if block := self.bias_field:
            field, cell = _control_points(seed, epoch, rows, "bias", 1, patch, mm, block.every)
            out["bias"] = (field[:, 0] * block.log * _chosen(draw, "bias_field", block.p)[:, None, None, None]).astype(
                np.float32
            )
            out["bias_cell"] = cell
        if block := self.blur:
            sigma = _between(draw["sigma"], block.sigma) * (draw["blur"] < block.p)
            for axis in range(3):
                radius = min(math.ceil(3 * block.sigma[1] / mm[axis]), patch[axis] - 1)
                if block.sigma[1] / mm[axis] > 0.2:  # below, the neighbours' weight is under 1e-5
                    out[f"blur_{axis}"] = _gaussian(sigma / mm[axis], radius)
        if block := self.low_resolution:
            zoom = np.where(draw["low_resolution"] < block.p, _between(draw["zoom"], block.zoom), 1.0)
            coarse = np.rint(np.asarray(patch) * zoom[:, None]).clip(1)
            coarse[:, 0] = np.where(flat, patch[0], coarse[:, 0])
            out["coarse"] = coarse.astype(np.float32)
        if block := self.noise:
            out["noise"] = (_between(draw["deviation"], block.deviation) * (draw["noise"] < block.p)).astype(np.float32)
            out["noise_key"] = (draw["key"] * (1 << 31)).astype(np.int32)
        if block := self.gamma:
            exponent = np.exp(_between(draw["exponent"], np.log(block.exponent)) * (draw["gamma"] < block.p))
            out["gamma"] = exponent.astype(np.float32)
            out["invert"] = draw["invert"] < block.invert
        if self.contrast or self.brightness:
            gain, shift = np.ones(len(rows)), np.zeros(len(rows))
            if block := self.contrast:
                gain = np.where(draw["contrast"] < block.p, _between(draw["gain"], block.factor), 1.0)
            if block := self.brightness:
                shift = _between(draw["shift"], (-block.shift, block.shift)) * (draw["brightness"] < block.p)
            out["gain"], out["shift"] = gain.astype(np.float32), shift.astype(np.float32)
        return {f"augment_{name}": values for name, values in out.items()}

    def _shape(
        self, draw: dict[str, np.ndarray], patch: Sequence[int], mm: np.ndarray, flat: bool, at: tuple
    ) -> dict[str, np.ndarray]:
        count = len(draw["rotate"])
        turns, size, warp = np.zeros((count, 3)), np.ones(count), np.zeros(count, bool)
        out = {}
        if block := self.rotate:
            chosen = draw["rotate"] < block.p
            largest = np.radians([block.in_plane, *[0 if flat else block.out_of_plane] * 2])
            turns = np.stack([_between(draw[f"turn_{i}"], (-1, 1)) for i in range(3)], axis=1) * largest
            turns, warp = turns * chosen[:, None], warp | chosen
        if block := self.scale:
            chosen = draw["scale"] < block.p
            size, warp = np.exp(_between(draw["factor"], np.log(block.factor)) * chosen), warp | chosen
        if block := self.elastic:
            chosen = draw["elastic"] < block.p
            field, cell = _control_points(*at, "elastic", 3, patch, mm, block.every, flat)
            field *= (block.shift / mm * [not flat, True, True])[:, None, None, None]
            out["elastic"] = (field * chosen[:, None, None, None, None]).astype(np.float32)
            out["elastic_cell"], warp = cell, warp | chosen
        return out | {"warp": warp, "matrix": _matrices(turns, size, mm).astype(np.float32)}

    def apply(
        self, image: Tensor, mask: Tensor, numbers: Mapping[str, Tensor], patch: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Augmented patches, float32 (B, 1, D, H, W), and their masks, uint8 (B, D, H, W), of size `patch`.

        `image`, float (B, 1, D', H', W'), and `mask`, uint8 (B, D', H', W'), reach beyond it by `margin`; they are
        not changed. `numbers` are those of `numbers`, whole batches may hold them among others.
        """
        at = {name.removeprefix("augment_"): each for name, each in numbers.items() if name.startswith("augment_")}
        with torch.no_grad():
            if image.device.type == "cpu":
                image, mask = _shaped_by_sample(image, mask, at, patch)
            else:
                image, mask = _shaped(image, mask, at, patch)
            return _intensities(image, at), mask


# ---- draws -----------------------------------------------------------------------------------------------------------


def _share(block: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(block, name) <= 1:
            raise ValueError(f"{name} is {getattr(block, name)}; a share from 0 to 1 is needed")


def _range(block: object, name: str, least: float, most: float = math.inf) -> None:
    low, high = getattr(block, name)
    if not least <= low <= high <= most:
        raise ValueError(
            f"{name} is [{low}, {high}]; two numbers are needed, the smaller first, from {least} to {most}"
        )


def _draws(seed: int, epoch: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(DRAWS, _uniform(seed, STREAM, epoch, rows[:, None], np.arange(len(DRAWS))).T, strict=True))


def _uniform(seed: int, stream: str, *parts: int | np.ndarray) -> np.ndarray:
    return (seeding.words(seed, stream, *parts) >> np.uint64(11)) * (1.0 / (1 << 53))


def _between(draws: np.ndarray, ends: Sequence[float]) -> np.ndarray:
    return ends[0] + (ends[1] - ends[0]) * draws


def _chosen(draw: dict[str, np.ndarray], name: str, p: float) -> np.ndarray:
    return draw[name] < p


def _flat(mm: np.ndarray) -> bool:
    return bool(mm[0] > FLAT * max(mm[1], mm[2]))


def _sides(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names that differ in the words left and right (or l and r) alone."""
    import re

    def other(name: str) -> str:
        sides = {"left": "right", "l": "r"}
        return "".join(sides.get(part, part) for part in re.split(r"([^a-zA-Z0-9])", name.lower()))

    lower = {name.lower(): name for name in names}
    pairs = [(name, lower.get(other(name))) for name in names if other(name) != name.lower()]
    return [(name, right) for name, right in pairs if right is not None]


def _matrices(turns: np.ndarray, size: np.ndarray, mm: np.ndarray) -> np.ndarray:
    """For each outcome the matrix from offsets within it to offsets within its source, both in voxels from the middle:
    the inverse of turns about the three axes (radians, N x 3) and a size. In the plane, where slices are thick."""
    cos, sin = np.cos(turns), np.sin(turns)
    out = np.tile(np.eye(3), (len(turns), 1, 1))
    for axis, (i, j) in enumerate(((1, 2), (0, 2), (0, 1))):
        turn = np.tile(np.eye(3), (len(turns), 1, 1))
        turn[:, i, i] = turn[:, j, j] = cos[:, axis]
        turn[:, i, j], turn[:, j, i] = -sin[:, axis], sin[:, axis]
        out = out @ turn
    factor = np.tile(1 / size[:, None], 3)
    if _flat(mm):
        factor[:, 0] = 1.0
    return out.transpose(0, 2, 1) * factor[:, :, None] * mm / mm[:, None]


def _control_points(
    seed: int,
    epoch: int,
    rows: np.ndarray,
    name: str,
    channels: int,
    patch: Sequence[int],
    mm: np.ndarray,
    every: float,
    flat: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws in -1 .. 1 (N, channels, n, n, n) at control points, and the voxels between these (N, 3) along each axis.

    With `flat`, one along the first axis, for all slices.
    """
    cell = every / mm
    counts = [math.ceil(size / step) + 3 for size, step in zip(patch, cell, strict=True)]
    if flat:
        counts[0] = 1
    places = np.arange(channels * math.prod(counts))
    draws = _uniform(seed, f"{STREAM}-{name}", epoch, rows[:, None], places) * 2 - 1
    return draws.reshape(len(rows), channels, *counts), np.tile(cell, (len(rows), 1)).astype(np.float32)


def _gaussian(sigma: np.ndarray, radius: int) -> np.ndarray:
    """Weights at the distances 0 .. radius (N, radius + 1), which sum to 1 over both sides."""
    place = np.arange(radius + 1)
    weights = np.exp(-0.5 * (place / np.maximum(sigma, 1e-3)[:, None]) ** 2)
    return (weights / (2 * weights.sum(1, keepdims=True) - 1)).astype(np.float32)


# ---- shape -----------------------------------------------------------------------------------------------------------


def _cropped(whole: Tensor, patch: Sequence[int]) -> Tensor:
    for axis, size in zip((-3, -2, -1), patch, strict=True):
        whole = whole.narrow(axis, (whole.shape[axis] - size) // 2, size)
    return whole


def _shaped(image: Tensor, mask: Tensor, at: Mapping[str, Tensor], patch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All samples at once."""
    out, labels = _cropped(image, patch).float(), _cropped(mask, patch)
    if "warp" in at:
        places = _places(at, patch, image.shape[2:])
        grid = _grid(places, image.shape[2:])
        warp = at["warp"].view(-1, 1, 1, 1, 1)
        moved = F.grid_sample(image.float(), grid, "bilinear", "border", align_corners=False)
        out = torch.where(warp, moved, out)
        moved = F.grid_sample(mask[:, None].float(), grid, "nearest", "border", align_corners=False)
        labels = torch.where(warp[:, 0], moved[:, 0].to(mask.dtype), labels)
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
    parts = [
        _shaped(image[i : i + 1], mask[i : i + 1], {k: v[i : i + 1] for k, v in at.items()}, patch)
        for i in range(len(image))
    ]
    return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])


def _places(at: Mapping[str, Tensor], patch: Sequence[int], source: Sequence[int]) -> list[Tensor]:
    """Where each voxel of the outcome comes from: coordinates along each axis of the source, (B, D, H, W)."""
    matrix = at["matrix"]
    offsets = [
        (torch.arange(size, device=matrix.device) - (size - 1) / 2).view([-1 if i == axis else 1 for i in range(3)])
        for axis, size in enumerate(patch)
    ]
    field = _spread(at["elastic"], at["elastic_cell"], patch) if "elastic" in at else None
    out = []
    for axis in range(3):
        place = sum(matrix[:, axis, j].view(-1, 1, 1, 1) * offsets[j] for j in range(3)) + (source[axis] - 1) / 2
        out.append(place + field[:, axis] if field is not None else place)
    return out


def _grid(places: list[Tensor], source: Sequence[int]) -> Tensor:
    return torch.stack([(2 * places[axis] + 1) / source[axis] - 1 for axis in (2, 1, 0)], dim=-1)


def _spread(points: Tensor, cell: Tensor, patch: Sequence[int]) -> Tensor:
    """The cubic B-spline of control points (B, C, n, n, n), which stand `cell` voxels apart (B, 3), at all voxels.

    One point along an axis stands for all of it.
    """
    for axis, size in enumerate(patch):
        if points.shape[axis + 2] > 1:
            basis = _basis(points.shape[axis + 2], cell[:, axis], size)  # B, size, n
            points = torch.stack(
                [
                    torch.tensordot(w, p, ([1], [axis + 1])).movedim(0, axis + 1)
                    for w, p in zip(basis, points, strict=True)
                ]
            )
    return points


def _basis(count: int, cell: Tensor, size: int) -> Tensor:
    """Weights of `count` control points at each of `size` voxels, (B, size, count). The first stands one cell before
    the border."""
    place = (torch.arange(size, device=cell.device) + 0.5) / cell[:, None]
    far = (place[:, :, None] + 1 - torch.arange(count, device=cell.device)).abs_()
    near, rest = 2 / 3 - far**2 + far**3 / 2, (2 - far).clamp(min=0) ** 3 / 6
    return torch.where(far < 1, near, rest)


# ---- intensities -----------------------------------------------------------------------------------------------------


def _some(
    image: Tensor, chosen: Tensor, at: Mapping[str, Tensor], change: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
) -> Tensor:
    """Patches of which the chosen ones, bool (B,), are changed."""
    if image.device.type != "cpu":
        return torch.where(chosen.view(-1, 1, 1, 1, 1), change(image, at), image)
    for i in chosen.nonzero().view(-1).tolist():
        image[i : i + 1] = change(image[i : i + 1], {name: each[i : i + 1] for name, each in at.items()})
    return image


def _intensities(image: Tensor, at: Mapping[str, Tensor]) -> Tensor:
    if "bias" in at:
        image = _some(image, at["bias"].flatten(1).ne(0).any(1), at, _bias)
    for axis in range(3):
        if (name := f"blur_{axis}") in at:
            image = _some(image, at[name][:, 0] < 1, at, lambda x, at, axis=axis, name=name: _blur(x, at[name], axis))
    if "coarse" in at:
        size = torch.tensor(image.shape[2:], device=image.device)
        image = _some(image, at["coarse"].ne(size).any(1), at, _coarse)
    if "noise" in at:
        image = _some(image, at["noise"] > 0, at, _noise)
    if "gamma" in at:
        image = _some(image, at["gamma"] != 1, at, _gamma)
    if "gain" in at:
        chosen = (at["gain"] != 1) | (at["shift"] != 0)
        image = _some(image, chosen, at, lambda x, at: x * _wide(at["gain"]) + _wide(at["shift"]))
    return image


def _wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1, 1)


def _bias(image: Tensor, at: Mapping[str, Tensor]) -> Tensor:
    """Factor on the distance from the lowest: that is air, which no coil brightens."""
    lowest = image.amin((1, 2, 3, 4), keepdim=True)
    return (image - lowest) * _spread(at["bias"][:, None], at["bias_cell"], image.shape[2:]).exp() + lowest


def _blur(image: Tensor, weights: Tensor, axis: int) -> Tensor:
    radius, size = weights.shape[1] - 1, image.shape[axis + 2]
    places = torch.arange(-radius, size + radius, device=image.device).clamp(0, size - 1)
    wide = image.index_select(axis + 2, places)
    out = image * _wide(weights[:, 0])
    for step in range(1, radius + 1):
        pair = wide.narrow(axis + 2, radius - step, size) + wide.narrow(axis + 2, radius + step, size)
        out = out + pair * _wide(weights[:, step])
    return out


def _coarse(image: Tensor, at: Mapping[str, Tensor]) -> Tensor:
    for axis in range(3):
        size = image.shape[axis + 2]
        coarse = at["coarse"][:, axis, None]
        step = size / coarse
        place = ((torch.arange(size, device=image.device) + 0.5) / step - 0.5).clamp(min=0)
        place = torch.minimum(place, coarse - 1)
        low = place.floor()
        high = torch.minimum(low + 1, coarse - 1)
        share = (place - low).view(len(place), 1, *[size if i == axis else 1 for i in range(3)])
        at_low, at_high = (
            ((k + 0.5) * step).floor().long().clamp(max=size - 1).view(share.shape).expand(image.shape)
            for k in (low, high)
        )
        image = torch.lerp(image.gather(axis + 2, at_low), image.gather(axis + 2, at_high), share)
    return image


def _noise(image: Tensor, at: Mapping[str, Tensor]) -> Tensor:
    return image + _normal(at["noise_key"], image[0].numel()).view_as(image) * _wide(at["noise"])


def _normal(keys: Tensor, count: int) -> Tensor:
    """Normal numbers (B, count), each a hash of its place and the key of its sample (B,): the same on every device, and
    no generator that each sample had to be seeded with."""
    half = (count + 1) // 2
    word = keys[:, None] ^ (torch.arange(half, dtype=torch.int32, device=keys.device) * -1640531527)
    for shift, factor in ((16, 0x21F0AAAD), (15, -0x2CA5D269), (15, 1)):
        word = word ^ ((word >> shift) & ((1 << (32 - shift)) - 1))
        word = word * factor
    radius = (((word >> 16) & 0xFFFF).float() + 0.5).mul_(1 / 65536).log_().mul_(-2).sqrt_()
    angle = (word & 0xFFFF).float().mul_(2 * math.pi / 65536)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def _gamma(image: Tensor, at: Mapping[str, Tensor]) -> Tensor:
    axes = (1, 2, 3, 4)
    # Sums in float64: the order in which a float32 sum is taken, and with it its last bit, depends on the batch.
    mean, std = _moments(image)
    low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
    span = (high - low).clamp(min=1e-6)
    unit = (image - low) / span
    invert = _wide(at["invert"])
    unit = torch.where(invert, 1 - unit, unit) ** _wide(at["gamma"])
    unit = torch.where(invert, 1 - unit, unit)
    new_mean, new_std = _moments(unit)
    return (unit - new_mean) * (std / new_std.clamp(min=1e-6)) + mean


def _moments(image: Tensor) -> tuple[Tensor, Tensor]:
    image = image.double()
    mean = image.mean((1, 2, 3, 4), keepdim=True)
    std = ((image - mean) ** 2).mean((1, 2, 3, 4), keepdim=True).sqrt()
    return mean.float(), std.float()

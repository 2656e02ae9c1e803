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
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trainkit import rng
from trainkit.config.ranges import Factor, Fraction
from trainkit.data.images.augment import check_order
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


ControlSpacing = Annotated[float, Field(ge=1, le=10_000)]
"""mm between control points: their number, and with it the memory, grows with the third power of what is finer."""


@dataclass(kw_only=True)
class Rotate:
    """Turn about the middle of the patch. nnU-Net: p 0.2, in_plane 30 and out_of_plane 30; p 0.2, in_plane 180 for
    thick slices."""

    p: Fraction = 0.2
    """Share of the samples."""
    in_plane: Annotated[float, Field(ge=0, le=180)] = 15.0
    """Largest turn within the slices, in degrees, either way."""
    out_of_plane: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest turn about each of the two axes within the slices; without effect where slices are thick (`FLAT`)."""

    def largest(self, flat: bool) -> np.ndarray:
        """Largest turn in radians about each of the stored axes; `flat`: where slices are thick."""
        aside = 0.0 if flat else self.out_of_plane
        return np.radians([self.in_plane, aside, aside])


@dataclass(kw_only=True)
class Scale:
    """Size, the same along all axes, or within the slices where they are thick (`FLAT`). nnU-Net: p 0.2, 0.7 to
    1.4."""

    p: Fraction = 0.2
    factor: tuple[Annotated[float, Field(ge=0.1, le=10)], Annotated[float, Field(ge=0.1, le=10)]] = (0.8, 1.25)
    """Smallest and largest; drawn evenly on a logarithmic scale. Above 1 things become larger."""

    def __post_init__(self) -> None:
        check_order(self, "factor")


@dataclass(kw_only=True)
class Elastic:
    """Smooth deformation: a cubic B-spline through shifted control points (Rueckert et al. 1999). nnU-Net has it off
    since version 2; U-Net (Ronneberger et al. 2015) owed much to it."""

    p: Fraction = 0.2
    every: ControlSpacing = 32.0
    """mm between control points."""
    shift: Annotated[float, Field(ge=0, le=1000)] = 6.0
    """Largest shift of a control point along each axis, in mm. Tissue moves by a fifth of it (standard deviation)."""

    def __post_init__(self) -> None:
        if self.shift > FOLD * self.every:
            raise ValueError(
                f"shift is {self.shift} mm with control points every {self.every} mm; up to "
                f"{FOLD * self.every:.3g} mm are possible, or tissue folds"
            )


@dataclass(kw_only=True)
class BiasField:
    """Smooth factor on intensities, exp of a cubic B-spline: what receiving coils leave in the image."""

    p: Fraction = 0.15
    every: ControlSpacing = 64.0
    """mm between control points."""
    log: Annotated[float, Field(ge=0, le=5)] = 0.6
    """Largest logarithm of the factor at a control point, either way; a fifth of it is usual."""


@dataclass(kw_only=True)
class Blur:
    """Gaussian blur. nnU-Net: p 0.2, 0.5 to 1 voxel."""

    p: Fraction = 0.2
    sigma: tuple[Annotated[float, Field(ge=0, le=50)], Annotated[float, Field(ge=0, le=50)]] = (0.25, 0.5)
    """Smallest and largest standard deviation in mm, the same along all axes."""

    def __post_init__(self) -> None:
        check_order(self, "sigma")


@dataclass(kw_only=True)
class LowResolution:
    """Fewer voxels, brought back to their number by linear interpolation. nnU-Net: p 0.25, 0.5 to 1."""

    p: Fraction = 0.25
    zoom: tuple[Annotated[float, Field(ge=0.05, le=1)], Annotated[float, Field(ge=0.05, le=1)]] = (0.5, 1.0)
    """Smallest and largest share of the voxels along each axis; within the slices only, where they are thick."""

    def __post_init__(self) -> None:
        check_order(self, "zoom")


@dataclass(kw_only=True)
class Noise:
    """Gaussian noise. nnU-Net: p 0.1, variance up to 0.1, hence a deviation up to 0.3."""

    p: Fraction = 0.1
    deviation: tuple[Factor, Factor] = (0.0, 0.3)
    """Smallest and largest standard deviation, in those of the volume."""

    def __post_init__(self) -> None:
        check_order(self, "deviation")


@dataclass(kw_only=True)
class Gamma:
    """Power of the intensities, taken as 0 .. 1 between the lowest and the highest of the patch; mean and standard
    deviation are kept. nnU-Net: p 0.3, 0.7 to 1.5, and inverted for a third of them."""

    p: Fraction = 0.3
    exponent: tuple[Annotated[float, Field(ge=0.05, le=20)], Annotated[float, Field(ge=0.05, le=20)]] = (0.7, 1.5)
    """Smallest and largest; drawn evenly on a logarithmic scale, so that 1 / a is as likely as a."""
    invert: Fraction = 0.25
    """Share of these for which dark and bright are exchanged before and after."""

    def __post_init__(self) -> None:
        check_order(self, "exponent")


@dataclass(kw_only=True)
class Contrast:
    """Factor on intensities about 0, the mean of the volume. nnU-Net: p 0.15, 0.75 to 1.25 (twice: about 0 and about
    the patch's mean)."""

    p: Fraction = 0.15
    factor: tuple[Factor, Factor] = (0.75, 1.25)

    def __post_init__(self) -> None:
        check_order(self, "factor")


@dataclass(kw_only=True)
class Brightness:
    """What is added to all intensities."""

    p: Fraction = 0.15
    shift: Factor = 0.2
    """Largest, either way, in standard deviations of the volume."""


@dataclass(kw_only=True)
class VolumeAugment:
    """What happens to patches while training; nothing where a block is not given. `p` of a block is the share of the
    samples that it changes.

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
    reach: Annotated[float, Field(ge=0, le=2)] = 0.25
    """Most that is read beyond the patch on either side for turning and scaling it, as a share of its side. Farther
    out the outermost voxel is repeated."""

    def __post_init__(self) -> None:
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
            for left, right in sides(names[1:]):
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
            largest = self.rotate.largest(flat)
            ends = [np.linspace(-angle, angle, 13) if angle else np.zeros(1) for angle in largest]
        turns = np.stack([each.ravel() for each in np.meshgrid(*ends)], axis=1)
        smallest = min(1.0, self.scale.factor[0]) if self.scale else 1.0
        half = (size - 1) / 2
        shift = self.elastic.shift / mm * [not flat, True, True] if self.elastic else 0.0
        far = (np.abs(_matrices(turns, np.full(len(turns), smallest), mm)) @ (half + shift)).max(0)
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
            chosen = draw["bias_field"] < block.p
            points, out["bias_cell"] = _control_points((seed, epoch, rows), "bias", chosen, 1, patch, block.every / mm)
            out["bias"] = (points * block.log).astype(np.float32)
        if block := self.blur:
            sigma = _between(draw["sigma"], block.sigma) * (draw["blur"] < block.p)
            out["sigma"] = sigma.astype(np.float32)
            for axis, widest in enumerate(block.sigma[1] / mm):
                if widest > 0.2 and patch[axis] > 1:  # below, neighbours have a weight under 1e-5
                    out[f"blur_{axis}"] = _gaussian(sigma / mm[axis], math.ceil(3 * widest))
        if block := self.low_resolution:
            zoom = np.where(draw["low_resolution"] < block.p, _between(draw["zoom"], block.zoom), 1.0)
            coarse = np.rint(np.asarray(patch) * zoom[:, None]).clip(1)
            if flat:
                coarse[:, 0] = patch[0]
            out["coarse"] = coarse.astype(np.float32)
            out["coarser"] = (coarse < patch).any(1)
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
        self,
        draw: dict[str, np.ndarray],
        patch: Sequence[int],
        mm: np.ndarray,
        flat: bool,
        at: tuple[int, int, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Whether each sample is interpolated, and from where. Two axes instead of three where slices are thick."""
        count, axes = len(draw["rotate"]), slice(1 if flat else 0, 3)
        turns, size, warp = np.zeros((count, 3)), np.ones(count), np.zeros(count, bool)
        out = {}
        if block := self.rotate:
            chosen = draw["rotate"] < block.p
            turns = np.stack([_between(draw[f"turn_{i}"], (-1, 1)) for i in range(3)], axis=1)
            turns, warp = turns * block.largest(flat) * chosen[:, None], warp | chosen
        if block := self.scale:
            chosen = draw["scale"] < block.p
            size, warp = np.exp(_between(draw["factor"], np.log(block.factor)) * chosen), warp | chosen
        matrix = _matrices(turns, size, mm)[:, axes, axes]
        if block := self.elastic:
            chosen = draw["elastic"] < block.p
            shift = block.shift / mm[axes]
            points, out["elastic_cell"] = _control_points(
                at, "elastic", chosen, len(shift), patch[axes], block.every / mm[axes]
            )
            points *= shift.reshape(-1, *[1] * len(shift))
            # The deformation comes before the matrix, so that no scale can make it fold.
            out["elastic"] = np.einsum("nij,nj...->ni...", matrix, points).astype(np.float32)
            warp = warp | chosen
        return out | {"warp": warp, "matrix": matrix.astype(np.float32)}

    def apply(
        self, image: Tensor, mask: Tensor, numbers: Mapping[str, Tensor], patch: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Augmented patches, float32 (B, 1, D, H, W), and their masks, uint8 (B, D, H, W), of size `patch`.

        `image`, float (B, 1, D', H', W'), and `mask`, uint8 (B, D', H', W'), reach beyond it by `margin`; they are
        not changed. `numbers` are those of `numbers`; a whole batch may hold them among others.
        """
        at = {name.removeprefix("augment_"): each for name, each in numbers.items() if name.startswith("augment_")}
        with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
            shaped = _shaped_by_sample if _by_sample(image) else _shaped
            image, mask = shaped(image, mask, at, tuple(patch))
            return _intensities(image, at), mask


# ---- draws -----------------------------------------------------------------------------------------------------------


def _draws(seed: int, epoch: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(DRAWS, rng.uniform(seed, STREAM, epoch, rows[:, None], np.arange(len(DRAWS))).T, strict=True))


def _between(draws: np.ndarray, ends: Sequence[float]) -> np.ndarray:
    return ends[0] + (ends[1] - ends[0]) * draws


def _flat(mm: np.ndarray) -> bool:
    return bool(mm[0] > FLAT * max(mm[1], mm[2]))


def sides(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names that differ in the words left and right (or l and r) alone."""

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
    at: tuple[int, int, np.ndarray],
    name: str,
    chosen: np.ndarray,
    channels: int,
    patch: Sequence[int],
    cell: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws in -1 .. 1, (N, channels, *n), at control points that stand `cell` voxels apart, for the chosen rows and 0
    for the others; and `cell` for each row, float32 (N, axes). One point more than it takes stands on either side."""
    seed, epoch, rows = at
    counts = [math.ceil(size / step) + 3 for size, step in zip(patch, cell, strict=True)]
    out = np.zeros((len(rows), channels, *counts))
    places = np.arange(channels * math.prod(counts))
    draws = rng.uniform(seed, f"{STREAM}-{name}", epoch, rows[chosen][:, None], places)
    out[chosen] = (draws * 2 - 1).reshape(-1, channels, *counts)
    return out, np.tile(cell.astype(np.float32), (len(rows), 1))


def _gaussian(sigma: np.ndarray, radius: int) -> np.ndarray:
    """Weights at the distances 0 .. radius (N, radius + 1), which sum to 1 over both sides."""
    place = np.arange(radius + 1)
    weights = np.exp(-0.5 * (place / np.maximum(sigma, 1e-3)[:, None]) ** 2)
    return (weights / (2 * weights.sum(1, keepdims=True) - 1)).astype(np.float32)


# ---- shape -----------------------------------------------------------------------------------------------------------


def _by_sample(image: Tensor) -> bool:
    """Whether work is done for each sample that needs it; else for all at once."""
    return image.device.type == "cpu"


def _cropped(whole: Tensor, patch: Sequence[int]) -> Tensor:
    """The middle of the last axes, a view."""
    for axis, size in zip(range(-len(patch), 0), patch, strict=True):
        whole = whole.narrow(axis, (whole.shape[axis] - size) // 2, size)
    return whole


def _channels(whole: Tensor, patch: Sequence[int], axes: int) -> Tensor:
    """Volumes (B, D', H', W') as (B, channels, *source) with as many axes in the source as are interpolated: with two,
    the slices of the patch are channels."""
    return whole[:, None] if axes == 3 else _cropped(whole, (patch[0], *whole.shape[2:]))


def _shaped(image: Tensor, mask: Tensor, at: Mapping[str, Tensor], patch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Patches and masks after all changes of shape: all samples at once."""
    out, labels = _cropped(image, patch).float(), _cropped(mask, patch)
    if "warp" in at:
        axes, warp = at["matrix"].shape[1], at["warp"].view(-1, 1, 1, 1, 1)
        source = _channels(image[:, 0], patch, axes).float()
        grid = _grid(at, patch[-axes:], source.shape[2:])
        moved = torch.nn.functional.grid_sample(source, grid, "bilinear", "border", align_corners=False)
        out = torch.where(warp, moved.view_as(out), out)
        source = _channels(mask, patch, axes).float()
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
    """The same, with work for the samples alone that need it, written where the batch will be."""
    out = torch.empty(len(image), 1, *patch)
    labels = torch.empty(len(mask), *patch, dtype=mask.dtype)
    axes = at["matrix"].shape[1] if "warp" in at else 3
    for i in range(len(image)):
        flips = at["flip"][i].nonzero().view(-1).tolist() if "flip" in at else []
        one, its_labels = out[i, 0], labels[i]
        if "warp" in at and at["warp"][i]:
            _interpolate(
                _channels(image[i : i + 1, 0], patch, axes)[0].float(),
                _channels(mask[i : i + 1], patch, axes)[0],
                {name: at[name][i] for name in ("matrix", "elastic", "elastic_cell") if name in at},
                one.view(-1, *patch[-axes:]),
                its_labels.view(-1, *patch[-axes:]),
            )
            if flips:
                one.copy_(one.flip(flips))
                its_labels.copy_(its_labels.flip(flips))
        else:
            one.copy_(_cropped(image[i, 0], patch).flip(flips))
            its_labels.copy_(_cropped(mask[i], patch).flip(flips))
        if "labels" in at:
            table = at["labels"][i]
            if not torch.equal(table, torch.arange(len(table), dtype=table.dtype)):
                its_labels.copy_(table.index_select(0, its_labels.view(-1).int()).view_as(its_labels))
    return out, labels


def _grid(at: Mapping[str, Tensor], patch: Sequence[int], source: Sequence[int]) -> Tensor:
    """Where each voxel comes from, in grid_sample's units: (B, *patch, axes), the last axis first."""
    matrix, count = at["matrix"], len(patch)
    field = _spread(at["elastic"], at["elastic_cell"], patch) if "elastic" in at else None
    out = []
    for axis in range(count):
        place = sum(matrix[:, axis, j].view(-1, *[1] * count) * _offsets(patch, j, matrix.device) for j in range(count))
        if field is not None:
            place = place + field[:, axis]
        out.append((place * 2 + 1) / source[axis] + (source[axis] - 1) / source[axis] - 1)
    return torch.stack(out[::-1], dim=-1)


def _offsets(patch: Sequence[int], axis: int, device: torch.device) -> Tensor:
    """Voxels from the middle along one axis, in the shape that broadcasts to the patch."""
    size = patch[axis]
    place = torch.arange(size, device=device) - (size - 1) / 2
    return place.view([size if i == axis else 1 for i in range(len(patch))])


def _interpolate(image: Tensor, mask: Tensor, at: Mapping[str, Tensor], out: Tensor, labels: Tensor) -> None:
    """One sample on a CPU: linear interpolation of `image` (channels, *source) into `out` (channels, *patch), and the
    nearest voxel of `mask` into `labels`; beyond the border the outermost voxel.

    Three times as fast as grid_sample on one thread: neighbours are picked from the flat volume with one index for
    all eight, by slabs whose places and shares stay in the cache, and the mask shares the places.
    """
    matrix, source, patch = at["matrix"].tolist(), image.shape[1:], out.shape[1:]
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
    if "elastic" in at:
        points, cell = at["elastic"], at["elastic_cell"]
        # All but the first axis; the first follows by slabs.
        points = _spread(points[None], cell[None], patch, axes[1:])[0].flatten(2)
        basis = _basis(points.shape[1], cell[:1], patch[0])[0]
    pixels, marks = image.flatten(1), mask.flatten(1)
    step = max(1, _SLAB // math.prod(patch[1:]))
    for start in range(0, patch[0], step):
        slab = slice(start, start + step)
        field = torch.matmul(basis[slab], points) if "elastic" in at else None
        first = nearest = None
        shares = []
        for i in axes:
            place = across[i] + along[i][slab]
            if field is not None:
                place += field[i].view_as(place)
            place.clamp_(0, source[i] - 1)
            near, low = place.round(), place.floor().clamp_(max=max(source[i] - 2, 0))
            shares.append(place.sub_(low).float().view(-1))
            first = low if first is None else low.add_(first, alpha=source[i])
            nearest = near if nearest is None else near.add_(nearest, alpha=source[i])
        first, nearest = first.view(-1).int(), nearest.view(-1).int()
        for channel in range(len(image)):
            value = _mixed(pixels[channel], first, shares, strides)
            out[channel, slab] = value.view(-1, *patch[1:])
            labels[channel, slab] = marks[channel].index_select(0, nearest).view(-1, *patch[1:])


def _mixed(flat: Tensor, first: Tensor, shares: Sequence[Tensor], strides: Sequence[int]) -> Tensor:
    """Linear interpolation between the neighbours that begin at `first`, along each axis in turn."""
    if not shares:
        return flat.index_select(0, first)
    value = _mixed(flat, first, shares[1:], strides[1:])
    return value.lerp_(_mixed(flat[strides[0] :], first, shares[1:], strides[1:]), shares[0])


def _spread(points: Tensor, cell: Tensor, patch: Sequence[int], axes: Sequence[int] | None = None) -> Tensor:
    """The cubic B-spline of control points (B, C, *n), `cell` voxels apart (B, axes), at all voxels: (B, C, *patch).

    Sample by sample, because how a product of matrices is summed depends on the size of the batch.
    """
    out = []
    for each, its_cell in zip(points, cell, strict=True):
        for axis in range(len(patch)) if axes is None else axes:
            basis = _basis(each.shape[axis + 1], its_cell[axis : axis + 1], patch[axis])[0]
            rest = each.shape[axis + 2 :]
            each = torch.matmul(basis, each.reshape(*each.shape[: axis + 2], -1)).view(
                *each.shape[: axis + 1], patch[axis], *rest
            )
        out.append(each)
    return torch.stack(out)


def _basis(count: int, cell: Tensor, size: int) -> Tensor:
    """Weights of `count` control points at each of `size` voxels, (B, size, count), for the distances `cell` (B,) of
    the points in voxels. The first stands one cell before the border."""
    place = (torch.arange(size, device=cell.device) + 0.5) / cell[:, None]
    far = (place[:, :, None] + 1 - torch.arange(count, device=cell.device)).abs_()
    near, rest = 2 / 3 - far**2 + far**3 / 2, (2 - far).clamp(min=0) ** 3 / 6
    return torch.where(far < 1, near, rest)


# ---- intensities -----------------------------------------------------------------------------------------------------


def _some(
    image: Tensor, chosen: Tensor, at: Mapping[str, Tensor], change: Callable[[Tensor, Mapping[str, Tensor]], None]
) -> Tensor:
    """Patches of which the chosen ones, bool (B,), are changed. `change` works in place."""
    if _by_sample(image):
        for i in chosen.nonzero().view(-1).tolist():
            change(image[i : i + 1], {name: each[i : i + 1] for name, each in at.items()})
        return image
    changed = image.clone()
    change(changed, at)
    return torch.where(chosen.view(-1, 1, 1, 1, 1), changed, image)


def _intensities(image: Tensor, at: Mapping[str, Tensor]) -> Tensor:
    if "bias" in at:
        image = _some(image, at["bias"].flatten(1).ne(0).any(1), at, _bias)
    if any(f"blur_{axis}" in at for axis in range(3)):
        image = _some(image, at["sigma"] > 0, at, _blur)
    if "coarse" in at:
        image = _some(image, at["coarser"], at, _coarse)
    if "noise" in at:
        image = _some(image, at["noise"] > 0, at, _noise)
    if "gamma" in at:
        image = _some(image, at["gamma"] != 1, at, _gamma)
    if "gain" in at:
        image = _some(image, (at["gain"] != 1) | (at["shift"] != 0), at, _linear)
    return image


def _wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1, 1)


def _bias(image: Tensor, at: Mapping[str, Tensor]) -> None:
    """Factor on the distance from the lowest: that is air, which no coil brightens."""
    lowest = image.amin((1, 2, 3, 4), keepdim=True)
    factor = _spread(at["bias"], at["bias_cell"], image.shape[2:]).exp_()
    image.sub_(lowest).mul_(factor).add_(lowest)


def _blur(image: Tensor, at: Mapping[str, Tensor]) -> None:
    for axis in range(3):
        if (name := f"blur_{axis}") not in at:
            continue
        weights, size = at[name], image.shape[axis + 2]
        radius = weights.shape[1] - 1
        border = [0, 0] * (2 - axis) + [radius, radius] + [0, 0] * axis
        wide = torch.nn.functional.pad(image, border, mode="replicate")
        image.mul_(_wide(weights[:, 0]))
        for step in range(1, radius + 1):
            pair = wide.narrow(axis + 2, radius - step, size) + wide.narrow(axis + 2, radius + step, size)
            image.addcmul_(pair, _wide(weights[:, step]))


def _coarse(image: Tensor, at: Mapping[str, Tensor]) -> None:
    """Of each axis, as many voxels as `coarse` says are picked at even distances, and lie at the middle of what they
    stand for when lines are drawn between them."""
    out = image
    for axis in range(3):
        size, coarse = image.shape[axis + 2], at["coarse"][:, axis, None]
        step = size / coarse
        place = torch.minimum(((torch.arange(size, device=image.device) + 0.5) / step - 0.5).clamp_(min=0), coarse - 1)
        low = place.floor()
        shape = (len(image), 1, *[size if i == axis else 1 for i in range(3)])
        ends = []
        for k in (low, torch.minimum(low + 1, coarse - 1)):
            picked = ((k + 0.5) * step).floor().long()
            if _by_sample(image) and axis < 2:  # half the time, but for the last axis five times
                ends.append(out.index_select(axis + 2, picked[0]))
            else:
                ends.append(out.gather(axis + 2, picked.view(shape).expand(out.shape)))
        out = ends[0].lerp_(ends[1], (place - low).view(shape))
    image.copy_(out)


def _noise(image: Tensor, at: Mapping[str, Tensor]) -> None:
    image.addcmul_(_normal(at["noise_key"], image[0].numel()).view_as(image), _wide(at["noise"]))


def _normal(keys: Tensor, count: int) -> Tensor:
    """Normal numbers (B, count), each a hash of its place and of the key of its sample, int32 (B,).

    The same on every device, and no generator has to be seeded for each sample, for which the host would have to know
    the key. 32 bits are mixed as in `lowbias32` (Wellons 2018), and halves of them are turned into pairs of normal
    numbers (Box and Muller 1958), up to 4.9 standard deviations.
    """
    half = (count + 1) // 2
    word = torch.arange(half, dtype=torch.int32, device=keys.device).mul_(-0x61C88647) ^ keys[:, None]
    for shift, factor in ((16, 0x21F0AAAD), (15, -0x2CA5D269)):
        word ^= (word >> shift).bitwise_and_((1 << (32 - shift)) - 1)  # what is shifted in may be the sign
        word *= factor
    word ^= (word >> 15).bitwise_and_((1 << 17) - 1)
    radius = (word >> 16).bitwise_and_(0xFFFF).float().add_(0.5).mul_(1 / 65536).log_().mul_(-2).sqrt_()
    angle = word.bitwise_and_(0xFFFF).float().mul_(2 * math.pi / 65536)
    out = torch.empty(len(keys), 2 * half, device=keys.device)
    torch.mul(radius, angle.cos(), out=out[:, :half])
    torch.mul(radius, angle.sin(), out=out[:, half:])
    return out[:, :count]


def _gamma(image: Tensor, at: Mapping[str, Tensor]) -> None:
    mean, std = _moments(image)
    low, high = image.amin((1, 2, 3, 4), keepdim=True), image.amax((1, 2, 3, 4), keepdim=True)
    # Inverted is counted from the highest down; that distances are negative then is mended by the span's sign.
    invert = _wide(at["invert"])
    start, span = torch.where(invert, high, low), torch.where(invert, low - high, high - low)
    image.sub_(start).div_(torch.where(span == 0, 1.0, span))
    image.log_().mul_(_wide(at["gamma"])).exp_()  # a fifth of the time of pow on a CPU
    new_mean, new_std = _moments(image)
    factor = torch.where(new_std > 0, std / new_std.clamp(min=1e-12), 1.0) * torch.where(invert, -1.0, 1.0)
    image.mul_(factor).add_(mean - new_mean * factor)


def _moments(image: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each sample. Sums in float64: the order in which a float32 sum is taken, and with
    it its last bit, depends on the batch."""
    count, axes = image[0].numel(), (1, 2, 3, 4)
    mean = (image.sum(axes, keepdim=True, dtype=torch.float64) / count).float()
    far = (image - mean).square_()
    return mean, (far.sum(axes, keepdim=True, dtype=torch.float64) / count).sqrt_().float()


def _linear(image: Tensor, at: Mapping[str, Tensor]) -> None:
    image.mul_(_wide(at["gain"])).add_(_wide(at["shift"]))

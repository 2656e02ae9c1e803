"""Bias field, blur, low resolution, noise, gamma, gain and shift of patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from trainkit.config.ranges import Factor, Fraction
from trainkit.data.augment import check_order
from trainkit.data.volumes import augment_spatial
from trainkit.data.volumes.augment_spatial import Draws
from trainkit.tensors import torch, wide

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class BiasField:
    """Smooth factor on intensities, exp of a cubic B-spline: the inhomogeneity of receiver coils."""

    p: Fraction = 0.15
    """Fraction of the samples that are changed."""
    every: Annotated[float, Field(ge=1, le=10_000)] = 64.0
    """Distance between control points, in mm."""
    log: Annotated[float, Field(ge=0, le=5)] = 0.6
    """Largest logarithm of the factor at a control point, in either direction; a fifth of it is typical."""

    def numbers(self, draw: Draws) -> dict[str, np.ndarray]:
        """Draw the logarithms at control points, 0 where a row is not chosen, and the voxels between these.

        One point more than it takes stands on either side.
        """
        chosen, cell = draw.below("bias_field", self.p), self.every / draw.mm
        counts = [math.ceil(size / step) + 3 for size, step in zip(draw.patch, cell, strict=True)]
        points = np.zeros((draw.count, 1, *counts))
        points[chosen] = (draw.further("bias", chosen, math.prod(counts)) * 2 - 1).reshape(-1, 1, *counts)
        cells = np.tile(cell.astype(np.float32), (draw.count, 1))
        return {"bias": (points * self.log).astype(np.float32), "bias_cell": cells}


@dataclass(kw_only=True)
class Blur:
    """Gaussian blur. nnU-Net: p 0.2, 0.5 to 1 voxel."""

    p: Fraction = 0.2
    """Fraction of the samples that are changed."""
    sigma: tuple[Annotated[float, Field(ge=0, le=50)], Annotated[float, Field(ge=0, le=50)]] = (0.25, 0.5)
    """Smallest and largest standard deviation in mm, the same along all axes."""

    def __post_init__(self) -> None:
        check_order(self, "sigma")

    def numbers(self, draw: Draws) -> dict[str, np.ndarray]:
        """Draw the standard deviations, and compute the weights along each axis."""
        sigma = draw.between("sigma", self.sigma) * draw.below("blur", self.p)
        out = {"sigma": sigma.astype(np.float32)}
        for axis, widest in enumerate(self.sigma[1] / draw.mm):
            if widest > 0.2 and draw.patch[axis] > 1:  # below, neighbours have a weight under 1e-5
                out[f"blur_{axis}"] = _gaussian(sigma / draw.mm[axis], math.ceil(3 * widest))
        return out


@dataclass(kw_only=True)
class LowResolution:
    """Simulated low resolution: fewer voxels, resized back by linear interpolation. nnU-Net: p 0.25, 0.5 to 1."""

    p: Fraction = 0.25
    """Fraction of the samples that are changed."""
    zoom: tuple[Annotated[float, Field(ge=0.05, le=1)], Annotated[float, Field(ge=0.05, le=1)]] = (0.5, 1.0)
    """Smallest and largest fraction of the voxels along each axis; within the slices only, where they are thick."""

    def __post_init__(self) -> None:
        check_order(self, "zoom")

    def numbers(self, draw: Draws) -> dict[str, np.ndarray]:
        """Draw how many voxels along each axis are kept, and which rows have fewer than before."""
        zoom = np.where(draw.below("low_resolution", self.p), draw.between("zoom", self.zoom), 1.0)
        coarse = np.rint(np.asarray(draw.patch) * zoom[:, None]).clip(1)
        if augment_spatial.is_flat(draw.mm):
            coarse[:, 0] = draw.patch[0]
        return {"coarse": coarse.astype(np.float32), "coarser": np.any(coarse < np.asarray(draw.patch), axis=1)}


@dataclass(kw_only=True)
class Noise:
    """Gaussian noise. nnU-Net: p 0.1, variance up to 0.1, hence a standard deviation up to 0.3."""

    p: Fraction = 0.1
    """Fraction of the samples that are changed."""
    deviation: tuple[Factor, Factor] = (0.0, 0.3)
    """Smallest and largest standard deviation, in standard deviations of the volume."""

    def __post_init__(self) -> None:
        check_order(self, "deviation")

    def numbers(self, draw: Draws) -> dict[str, np.ndarray]:
        """Draw the standard deviations, and a key of the noise of each row."""
        deviation = draw.between("deviation", self.deviation) * draw.below("noise", self.p)
        key = (draw.values["key"] * (1 << 31)).astype(np.int32)
        return {"noise": deviation.astype(np.float32), "noise_key": key}


@dataclass(kw_only=True)
class Gamma:
    """Power of the intensities, scaled to 0 .. 1 between the minimum and maximum of the patch; mean and standard
    deviation are kept. nnU-Net: p 0.3, 0.7 to 1.5, inverted for a third of them."""

    p: Fraction = 0.3
    """Fraction of the samples that are changed."""
    exponent: tuple[Annotated[float, Field(ge=0.05, le=20)], Annotated[float, Field(ge=0.05, le=20)]] = (0.7, 1.5)
    """Smallest and largest exponent, sampled uniformly on a logarithmic scale."""
    invert: Fraction = 0.25
    """Fraction of these samples whose intensities are inverted before and after."""

    def __post_init__(self) -> None:
        check_order(self, "exponent")

    def numbers(self, draw: Draws) -> dict[str, np.ndarray]:
        """Draw the exponents, and which rows are inverted."""
        exponent = np.exp(draw.between("exponent", np.log(self.exponent)) * draw.below("gamma", self.p))
        return {"gamma": exponent.astype(np.float32), "invert": draw.below("invert", self.invert)}


@dataclass(kw_only=True)
class Contrast:
    """Factor on intensities about 0, the mean of the volume. nnU-Net: p 0.15, 0.75 to 1.25 (twice: about 0 and about
    the patch's mean)."""

    p: Fraction = 0.15
    """Fraction of the samples that are changed."""
    factor: tuple[Factor, Factor] = (0.75, 1.25)
    """Smallest and largest factor."""

    def __post_init__(self) -> None:
        check_order(self, "factor")


@dataclass(kw_only=True)
class Brightness:
    """Shift of all intensities."""

    p: Fraction = 0.15
    """Fraction of the samples that are changed."""
    shift: Factor = 0.2
    """Largest shift in either direction, in standard deviations of the volume."""


def gain_and_shift(draw: Draws, contrast: Contrast | None, brightness: Brightness | None) -> dict[str, np.ndarray]:
    """Draw the factor on the intensities of each row, and what is added to them."""
    gain, shift = np.ones(draw.count), np.zeros(draw.count)
    if contrast:
        gain = np.where(draw.below("contrast", contrast.p), draw.between("gain", contrast.factor), 1.0)
    if brightness:
        most = brightness.shift
        shift = draw.between("shift", (-most, most)) * draw.below("brightness", brightness.p)
    return {"gain": gain.astype(np.float32), "shift": shift.astype(np.float32)}


def _gaussian(sigma: np.ndarray, radius: int) -> np.ndarray:
    """Weights at the distances 0 .. radius (N, radius + 1), which sum to 1 over both sides."""
    place = np.arange(radius + 1)
    weights = np.exp(-0.5 * (place / np.maximum(sigma, 1e-3)[:, None]) ** 2)
    return (weights / (2 * weights.sum(1, keepdims=True) - 1)).astype(np.float32)


def _some(
    image: Tensor, chosen: Tensor, at: Mapping[str, Tensor], change: Callable[[Tensor, Mapping[str, Tensor]], None]
) -> Tensor:
    """Patches of which the chosen ones, bool (B,), are changed. `change` works in place."""
    if augment_spatial.by_sample(image):
        for i in chosen.nonzero().view(-1).tolist():
            change(image[i : i + 1], {name: each[i : i + 1] for name, each in at.items()})
        return image
    changed = image.clone()
    change(changed, at)
    return torch.where(chosen.view(-1, 1, 1, 1, 1), changed, image)


def apply(image: Tensor, at: Mapping[str, Tensor]) -> Tensor:
    """Return patches (B, C, D, H, W) after all changes of intensity, each channel by its own numbers; on a CPU they are
    changed in place."""
    if image.shape[1] > 1:
        own = {name: each.flatten(0, 1) for name, each in at.items() if name not in augment_spatial.NAMES}
        return apply(image.view(-1, 1, *image.shape[2:]), own).view(image.shape)
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
    # Sample by sample: how a product of matrices is summed depends on the size of the batch.
    pairs = zip(at["bias"], at["bias_cell"], strict=True)
    factor = torch.stack([spline(points, cell, image.shape[2:]) for points, cell in pairs]).exp_()
    image.sub_(lowest).mul_(factor).add_(lowest)


def spline(points: Tensor, cell: Tensor, patch: Sequence[int]) -> Tensor:
    """Evaluate the cubic B-spline of control points (C, *n), `cell` voxels apart (axes,): (C, *patch)."""
    for axis, size in enumerate(patch):
        weights = _basis(points.shape[axis + 1], cell[axis], size)
        before, rest = points.shape[: axis + 1], points.shape[axis + 2 :]
        points = torch.matmul(weights, points.reshape(*before, points.shape[axis + 1], -1)).view(*before, size, *rest)
    return points


def _basis(count: int, cell: Tensor, size: int) -> Tensor:
    """Weights of `count` control points at each of `size` voxels, (size, count), of points that are `cell` voxels
    apart. The first stands one cell before the border."""
    place = (torch.arange(size, device=cell.device) + 0.5) / cell
    far = (place[:, None] + 1 - torch.arange(count, device=cell.device)).abs_()
    near, rest = 2 / 3 - far**2 + far**3 / 2, (2 - far).clamp(min=0) ** 3 / 6
    return torch.where(far < 1, near, rest)


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
            if augment_spatial.by_sample(image) and axis < 2:  # half the time, but for the last axis five times
                ends.append(out.index_select(axis + 2, picked[0]))
            else:
                ends.append(out.gather(axis + 2, picked.view(shape).expand(out.shape)))
        out = ends[0].lerp_(ends[1], (place - low).view(shape))
    image.copy_(out)


def _noise(image: Tensor, at: Mapping[str, Tensor]) -> None:
    image.addcmul_(normal(at["noise_key"], image[0].numel()).view_as(image), _wide(at["noise"]))


def normal(keys: Tensor, count: int) -> Tensor:
    """Return normal numbers (B, count), each a hash of its place and of the key of its sample, int32 (B,).

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
    count, axes, kind = image[0].numel(), (1, 2, 3, 4), wide(image.device)
    mean = (image.sum(axes, keepdim=True, dtype=kind) / count).float()
    far = (image - mean).square_()
    return mean, (far.sum(axes, keepdim=True, dtype=kind) / count).sqrt_().float()


def _linear(image: Tensor, at: Mapping[str, Tensor]) -> None:
    image.mul_(_wide(at["gain"])).add_(_wide(at["shift"]))

"""Kernels and strides of networks for volumes, which follow from patch and spacing.

Kernels and strides follow from both as in nnU-Net (Isensee et al., Nature Methods 2021): an axis whose spacing is twice
the finest or more is neither pooled nor convolved until the others have caught up.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from trainkit.errors import UserError

SMALLEST_SIDE = 4
"""Voxels; no axis of a patch is pooled below this."""

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Levels:
    """Kernels and strides of the levels of a network, finest first; all along depth, height and width."""

    kernels: tuple[Triple, ...]
    strides: tuple[Triple, ...]
    """From the level before; 1, 1, 1 for the first."""

    @property
    def multiple(self) -> Triple:
        """The sides of a patch must be multiples of these numbers."""
        return triple(prod(sides) for sides in zip(*self.strides, strict=True))

    def __str__(self) -> str:
        kernels, strides = (" ".join(map(format_sides, sides)) for sides in (self.kernels, self.strides[1:]))
        return f"kernels {kernels}, strides {strides}"


def triple(sides: Iterable[int]) -> Triple:
    """Return three numbers as a tuple with a known length."""
    deep, high, wide = sides
    return deep, high, wide


def format_sides(sides: Sequence[float]) -> str:
    """`1x3x3`."""
    return "x".join(f"{side:g}" for side in sides)


def levels_for(patch: Sequence[int], spacing: Sequence[float], most: int) -> Levels:
    """At most `most` levels for a patch in voxels, with a spacing in mm; without spacing the voxels are cubes.

    An axis is halved from one level to the next while its spacing is less than twice that of the finest axis that can
    be halved, and half its side is still 4 voxels or more; an axis that would be halved alone needs 12. Its kernel is 1
    until its spacing is less than twice the finest, then 3; the coarsest level has 3 everywhere.
    """
    axes, size, mm = range(len(patch)), list(patch), list(spacing or (1.0,) * len(patch))
    kernel, kernels, strides = [1] * len(size), [], [triple([1] * len(size))]
    while len(strides) < most:
        possible = [a for a in axes if size[a] >= 2 * SMALLEST_SIDE]
        halved = [a for a in possible if mm[a] < 2 * min(mm[b] for b in possible)]
        if not halved or (len(halved) == 1 and size[halved[0]] < 3 * SMALLEST_SIDE):
            break
        # A halved axis needs a kernel of 3, or voxels would be skipped.
        wide = [a in halved or (size[a] > 1 and mm[a] < 2 * min(mm)) for a in axes]
        kernel = [3 if wide[a] else kernel[a] for a in axes]
        kernels.append(triple(kernel))
        strides.append(triple(2 if a in halved else 1 for a in axes))
        for a in halved:
            size[a], mm[a] = -(-size[a] // 2), 2 * mm[a]
    kernels.append(triple(3 if side > 1 else 1 for side in size))
    return Levels(tuple(kernels), tuple(strides))


def check_patch(
    name: str, patch: Sequence[int], multiple: Sequence[int], where: str = "data.patch", unit: str = "voxels"
) -> None:
    """Raise UserError for a patch whose sides are not multiples of the network's strides."""
    if any(side % m for side, m in zip(patch, multiple, strict=True)):
        near = [max(m, round(side / m) * m) for side, m in zip(patch, multiple, strict=True)]
        raise UserError(
            where,
            f"{format_sides(patch)} {unit}, not divisible by the strides of {name}",
            f"sides that are multiples of {format_sides(multiple)}",
            f"use [{', '.join(map(str, near))}]",
        )


def require(package: str, extra: str = "medical") -> None:
    """Raise UserError if a package of an extra is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            "task.net", f"{package} is not installed", remedy=f'install it with pip install "trainkit[{extra}]"'
        )

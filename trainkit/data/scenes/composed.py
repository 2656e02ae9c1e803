"""Masks that are painted from the outlines of objects (`coco`).

Regions that stand for no class lie lowest. The others are painted by their area, the largest first, so that the smaller
of two that overlap is on top; of two of one area the later one. Pixels that no region covers are background, or where
the set has a class called so have no class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainkit.data.scenes import label_maps
from trainkit.data.scenes.label_maps import Labels
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED

BACKGROUND = "background"
"""Class 0 of what no region covers."""

_CALLED_BACKGROUND = frozenset({BACKGROUND, "_background_", "bg"})

MEMORY = 1 << 30
"""Most bytes of the regions of one image, a bit for each pixel of their rectangles."""


@dataclass(frozen=True, eq=False)
class Region:
    """Pixels of one class in a rectangle of an image."""

    number: int
    """Of the class; `IGNORED` for none."""
    top: int
    left: int
    area: int
    """Pixels that are covered."""
    size: tuple[int, int]
    bits: np.ndarray
    """uint8, 8 pixels a byte."""
    of: int
    """Class of the object; `IGNORED` for what encloses several. Not `number` where that is in no class."""
    fate: str = ""
    """Why it is not seen as what it is, whatever lies on it; see `lost_objects`."""

    @classmethod
    def covering(cls, number: int, covered: np.ndarray, top: int = 0, left: int = 0) -> Region:
        """Make a region of the pixels `covered`, bool (h, w), whose first is at `top` and `left`."""
        size = (covered.shape[0], covered.shape[1])
        return cls(number, top, left, int(np.count_nonzero(covered)), size, np.packbits(covered), number)

    @classmethod
    def lost(cls, of: int, fate: str) -> Region:
        """Make a region without a pixel, of an object of a class."""
        return cls(IGNORED, 0, 0, 0, (0, 0), np.empty(0, np.uint8), of, fate)


@dataclass(frozen=True, eq=False)
class Painted:
    """A mask, and what it was painted from."""

    classes: np.ndarray
    """uint8 (height, width)."""
    on_top: np.ndarray
    """Place, from 1 on, of the region that is seen at each pixel, and 0 where there is none: (height, width)."""
    regions: tuple[Region, ...]
    """In the order in which they were painted, without their pixels."""


def paint(size: tuple[int, int], regions: Iterable[Region], empty: int, where: str) -> Painted:
    """Paint regions on a mask of `size` (height, width), of class `empty` where no region is.

    Raises UserError where the regions take more than `MEMORY`.
    """
    kept: list[Region] = []
    used = 0
    for region in regions:
        used += len(region.bits)
        if used > MEMORY:
            raise UserError(where, f"more than {MEMORY >> 20} MB of regions in one mask", "fewer or smaller ones")
        kept.append(region)
    kept.sort(key=lambda region: (region.number != IGNORED, -region.area))
    classes, on_top = np.full(size, empty, np.uint8), np.zeros(size, np.min_scalar_type(len(kept)))
    for place, region in enumerate(kept, start=1):
        height, width = region.size
        covered = np.unpackbits(region.bits, count=height * width).reshape(height, width).astype(bool)
        rows, columns = slice(region.top, region.top + height), slice(region.left, region.left + width)
        classes[rows, columns][covered] = region.number
        on_top[rows, columns][covered] = place
    none = np.empty(0, np.uint8)
    return Painted(classes, on_top, tuple(replace(region, bits=none) for region in kept))


def numbering(classes: Sequence[str]) -> tuple[dict[str, int], int, Labels]:
    """Return the number of each class, that of uncovered pixels, and the labels, whose class 0 is the background.

    Where one of `classes` is called background it is class 0, and uncovered pixels have no class. Raises ValueError as
    `Labels` does.
    """
    own = next((name for name in classes if name.lower() in _CALLED_BACKGROUND), None)
    names = (BACKGROUND if own is None else own, *(name for name in classes if name != own))
    labels = label_maps.numbered(names)
    return {name: number for number, name in enumerate(names)}, 0 if own is None else IGNORED, labels

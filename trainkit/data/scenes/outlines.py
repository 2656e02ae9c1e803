"""Outlines of objects, polygons and run lengths, and masks that are painted from them.

Of polygons a pixel is inside where its centre is, by the even-odd rule; several polygons of an object are one area.
Regions that stand for no class lie lowest. The others are painted by their area, the largest first, so that the smaller
of two that overlap is on top; of two of one area the later one. Pixels that no region covers are background, class 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainkit.data.formats.image_decode import PIXEL_CAP
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED

CROSSINGS = 1 << 20
"""Most rows that the edges of a polygon may cross together, 0.1 s of painting: more is no outline."""

MEMORY = 1 << 30
"""Most bytes of the regions of one image, a bit for each pixel of their rectangles."""

_RUN_TEXT = 7
"""Most characters of a run length: an image has less than 2^30 pixels."""


@dataclass(frozen=True, eq=False)
class Outline:
    """One object of an image: polygons, or run lengths; nothing where it has neither."""

    of: int
    """Class of the object; `IGNORED` for what encloses several."""
    polygons: tuple[np.ndarray, ...] = ()
    """float64 (n, 2) each, x and y in pixels."""
    runs: str | np.ndarray | None = None
    """Lengths of runs outside and inside in turn, down the columns: compressed, or int64."""
    is_box: bool = False
    """True where the polygon is only a box around the object: its pixels are of no class."""


class _Region(NamedTuple):
    """Pixels of one object in a rectangle of an image; none where `bits` is empty."""

    of: int
    """Class of its pixels."""
    top: int = 0
    left: int = 0
    area: int = 0
    size: tuple[int, int] = (0, 0)
    bits: bytes = b""


class Painted(NamedTuple):
    """A mask, and what it was painted from."""

    classes: np.ndarray
    """uint8 (height, width)."""
    objects: tuple[int, ...]
    """Class of each object that has one."""
    unseen: int
    """How many of these have no pixel of their class in the image, whatever lies on them: outlines without an area,
    outside of the image or between the centres of pixels, and boxes without an outline."""


def paint(size: tuple[int, int], outlines: Sequence[Outline], where: str) -> Painted:
    """Paint outlines on a mask of `size` (height, width).

    Raises UserError for one that cannot be painted, and where their regions take more than `MEMORY`.
    """
    regions: list[_Region] = []
    used = 0
    for outline in outlines:
        try:
            regions.append(_region(outline, size))
        except ValueError as error:
            raise UserError(where, str(error), "an outline of the image's size") from None
        used += len(regions[-1].bits)
        if used > MEMORY:
            raise UserError(where, f"more than {MEMORY >> 20} MB of regions in one mask", "fewer or smaller ones")
    classes = np.zeros(size, np.uint8)
    for region in sorted(regions, key=lambda region: (region.of != IGNORED, -region.area)):
        height, width = region.size
        bits = np.unpackbits(np.frombuffer(region.bits, np.uint8), count=height * width)
        covered = bits.reshape(height, width).view(bool)
        classes[region.top : region.top + height, region.left : region.left + width][covered] = region.of
    known = [(one, region) for one, region in zip(outlines, regions, strict=True) if one.of != IGNORED]
    unseen = sum(region.of != one.of or not region.area for one, region in known)
    return Painted(classes, tuple(one.of for one, _ in known), unseen)


def _region(outline: Outline, size: tuple[int, int]) -> _Region:
    of = IGNORED if outline.is_box else outline.of
    if outline.runs is not None:
        covered, low = decode_runs(outline.runs, size), np.zeros(2, int)
    elif outline.polygons:
        covered, low = _filled(outline.polygons, size)
    else:
        return _Region(of)
    area, shape = int(np.count_nonzero(covered)), (covered.shape[0], covered.shape[1])
    return _Region(of, int(low[1]), int(low[0]), area, shape, np.packbits(covered).tobytes()) if area else _Region(of)


def decode_runs(runs: str | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Decode run lengths, compressed or whole numbers, to bool of `size` (height, width).

    Raises ValueError where they do not make up so many pixels, or that is more than any image has.
    """
    pixels = size[0] * size[1]
    if pixels > PIXEL_CAP:
        raise ValueError(f"{size[1]} x {size[0]} pixels; at most {PIXEL_CAP} are allowed")
    lengths = _unpacked(runs) if isinstance(runs, str) else runs
    # Each first: the sum of absurd ones might pass the largest number.
    if not len(lengths) or lengths.min() < 0 or lengths.max() > pixels or lengths.sum() != pixels:
        raise ValueError(f"run lengths that do not make up {size[1]} x {size[0]} pixels")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(size[1], size[0]).T


def _unpacked(text: str) -> np.ndarray:
    """Unpack lengths from a text: 5 bits a character, the sixth says that more follow; each after the third is told by
    its difference from the last but one."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(codes & 32 == 0)
    if not len(ends) or ends[-1] != len(codes) - 1 or codes.min() < 0 or codes.max() > 63:
        raise ValueError("truncated run lengths, or characters that none have")
    begins = np.append(0, ends[:-1] + 1)
    if int((ends - begins).max()) >= _RUN_TEXT:
        raise ValueError("impossible run lengths")
    place = np.arange(len(codes)) - np.repeat(begins, ends - begins + 1)
    values = np.add.reduceat((codes & 31) << 5 * place, begins)
    values -= np.where(codes[ends] & 16, 1 << 5 * (ends - begins + 1), 0)
    values[1::2] = values[1::2].cumsum()
    values[2::2] = values[2::2].cumsum()
    return values


def _filled(polygons: Sequence[np.ndarray], size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Fill polygons into one rectangle of an image of `size` (height, width): bool, and its first column and row."""
    points = np.concatenate(polygons)
    low = np.clip(np.floor(points.min(0)), 0, size[::-1]).astype(int)
    high = np.clip(np.ceil(points.max(0)), low, size[::-1]).astype(int)
    width, height = (high - low).tolist()
    covered = np.zeros((height, width), bool)
    for polygon in polygons:
        covered |= fill(polygon - low, (height, width))
    return covered, low


def fill(polygon: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Fill a polygon, float64 (n, 2) of x and y: bool of `size` (height, width), true where a pixel's centre is inside.

    Raises ValueError where its edges cross more rows than `CROSSINGS`.
    """
    height, width = size
    x, y = polygon.T
    x_end, y_end = np.roll(x, -1), np.roll(y, -1)
    first = np.clip(np.ceil(np.minimum(y, y_end) - 0.5), 0, height).astype(np.int64)
    last = np.clip(np.ceil(np.maximum(y, y_end) - 0.5), 0, height).astype(np.int64)
    counts = last - first
    total = int(counts.sum())
    if total > CROSSINGS:
        raise ValueError(f"an outline of {len(polygon)} points that crosses {total} rows")
    edge = np.repeat(np.arange(len(x)), counts)
    row = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    slope = (x_end - x)[edge] / (y_end - y)[edge]
    column = np.ceil(x[edge] + (row + 0.5 - y[edge]) * slope - 0.5)
    column = np.clip(column, 0, width).astype(np.int64)
    turns = np.zeros((height, width + 1), np.uint8)
    np.add.at(turns.reshape(-1), row * (width + 1) + column, 1)  # beyond 255 it goes on from 0, which is even too
    np.bitwise_xor.accumulate(turns, 1, out=turns)
    turns &= 1
    return turns[:, :width].view(bool)

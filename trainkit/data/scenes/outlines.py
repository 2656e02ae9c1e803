"""Outlines of objects, polygons and run lengths, and masks that are painted from them.

Of polygons a pixel is inside where its centre is, by the even-odd rule; several polygons of an object are one area.
Regions that stand for no class lie lowest. The others are painted by their area, the largest first, so that the smaller
of two that overlap is on top; of two of one area the later one. Pixels that no region covers are background, or where
the set has a class called so have no class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainkit.data.formats.image_decode import PIXEL_CAP
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED

BOX, THIN, OUTSIDE, SMALL = "with a box and no outline", "without an area", "outside of the image", "below a pixel"
"""Why an outline is not seen as what it is."""

CROSSINGS = 1 << 20
"""Most rows that the edges of a polygon may cross together, 0.1 s of painting: more is no outline."""

LENGTH_TEXT = 7
"""Most characters of a run length: an image has less than 2^30 pixels."""

_BLOCK = 1 << 20
"""Run lengths, or characters of them, that are decoded at a time; an even number."""

_NO_AREA = 1e-9

MEMORY = 1 << 30
"""Most bytes of the regions of one image, a bit for each pixel of their rectangles."""


@dataclass(frozen=True, eq=False)
class Outline:
    """One object of an image: polygons, run lengths, or for lack of both a box."""

    number: int
    """Class of its pixels; `IGNORED` for none."""
    of: int
    """Class of the object; `IGNORED` for what encloses several."""
    polygons: tuple[np.ndarray, ...] = ()
    """float64 (n, 2) each, x and y in pixels."""
    runs: str | np.ndarray | None = None
    """Lengths of runs outside and inside in turn, down the columns: compressed, or int64."""
    box: tuple[float, float, float, float] | None = None
    """Left, top, width and height."""


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


def paint(size: tuple[int, int], outlines: Iterable[Outline], empty: int, where: str) -> Painted:
    """Paint outlines on a mask of `size` (height, width), of class `empty` where nothing is.

    Raises UserError for one that cannot be painted, and where their regions take more than `MEMORY`.
    """
    kept: list[Region] = []
    used = 0
    for outline in outlines:
        try:
            region = _region(outline, size)
        except ValueError as error:
            raise UserError(where, str(error), "an outline of the image's size") from None
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


def _region(outline: Outline, size: tuple[int, int]) -> Region:
    if outline.runs is not None:
        region = Region.covering(outline.number, decode_runs(outline.runs, size))
        return replace(region, of=outline.of, fate="" if region.area else THIN)
    polygons, fate = outline.polygons, ""
    if outline.box is not None:
        x, y, width, height = outline.box
        polygons, fate = (np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]]),), BOX
    region = _filled(outline.number, polygons, size) if polygons else None
    if region is None:
        return Region.lost(outline.of, fate or _reason(polygons, size))
    return replace(region, of=outline.of, fate=fate)


def decode_runs(runs: str | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Decode run lengths, compressed or whole numbers, to bool of `size` (height, width).

    Raises ValueError where they do not make up so many pixels, or that is more than any image has.
    """
    pixels = size[0] * size[1]
    if pixels > PIXEL_CAP:
        raise ValueError(f"{size[1]} x {size[0]} pixels; at most {PIXEL_CAP} are allowed")
    made, done, odd = np.empty(pixels, bool), 0, 0
    for lengths in _unpacked(runs) if isinstance(runs, str) else _blocks(runs):
        total = int(lengths.sum())
        if (lengths < 0).any() or done + total > pixels:
            raise ValueError(f"run lengths below 0, or of more pixels than {size[1]} x {size[0]}")
        made[done : done + total] = np.repeat((np.arange(len(lengths)) + odd) % 2 == 1, lengths)
        done, odd = done + total, (odd + len(lengths)) % 2
    if done != pixels:
        raise ValueError(f"run lengths of {done} pixels for {size[1]} x {size[0]}")
    return made.reshape(size[1], size[0]).T


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[first : first + _BLOCK].astype(np.int64) for first in range(0, len(values), _BLOCK))


def _unpacked(text: str) -> Iterator[np.ndarray]:
    """Unpack lengths from a text, some at a time: 5 bits a character, the sixth says that more follow; each after the
    third is told by its difference from the last but one."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8)
    last, begin, first, more = np.zeros(2, np.int64), 0, 0, 0
    while begin < len(codes):
        some = codes[begin : begin + _BLOCK] - np.uint8(48)
        ends = np.flatnonzero(some & 32 == 0)
        if begin + len(some) < len(codes):
            ends = ends[: len(ends) // 2 * 2]
        elif 0 < (more := len(some) - 1 - int(ends[-1] if len(ends) else -1)) < LENGTH_TEXT:
            raise ValueError("truncated run lengths")
        begins = np.append(0, ends[:-1] + 1)
        if not len(ends) or int((ends - begins).max()) >= LENGTH_TEXT or more >= LENGTH_TEXT:
            raise ValueError("impossible run lengths")
        some = some[: int(ends[-1]) + 1].astype(np.int64)
        place = np.arange(len(some)) - np.repeat(begins, ends - begins + 1)
        values = np.add.reduceat((some & 31) << 5 * place, begins)
        values -= np.where(some[ends] & 16, 1 << 5 * (ends - begins + 1), 0)
        if int(np.abs(values).max()) > PIXEL_CAP:
            raise ValueError("impossible run lengths")
        yield _summed(values, last, first)
        begin, first = begin + len(some), first + len(ends)


def _summed(values: np.ndarray, last: np.ndarray, first: int) -> np.ndarray:
    """Return lengths of differences from the last but one; `last` are the two before, and are set to the last two.

    The first three of all, from `first` 0 on, are lengths themselves.
    """
    for parity in (0, 1):
        own = values[parity::2]
        if first == 0 and parity == 0:
            own[1:].cumsum(out=own[1:])
        else:
            own[:1] += last[parity]
            own.cumsum(out=own)
        if len(own) > (first == 0 and parity == 0):
            last[parity] = own[-1]
    return values


def _filled(number: int, polygons: Sequence[np.ndarray], size: tuple[int, int]) -> Region | None:
    """Fill polygons into one region; None where they cover no pixel of an image of `size` (height, width)."""
    points = np.concatenate(polygons)
    low = np.clip(np.floor(points.min(0)), 0, None).astype(int)
    high = np.minimum(np.ceil(points.max(0)).astype(int), (size[1], size[0]))
    width, height = (high - low).tolist()
    if width < 1 or height < 1:
        return None
    covered = np.zeros((height, width), bool)
    for polygon in polygons:
        covered |= fill(polygon - low, (height, width))
    return Region.covering(number, covered, int(low[1]), int(low[0])) if covered.any() else None


def _reason(polygons: Sequence[np.ndarray], size: tuple[int, int]) -> str:
    """Return why polygons cover no pixel of an image of `size` (height, width)."""
    areas = (np.dot(p[:, 0], np.roll(p[:, 1], -1)) - np.dot(p[:, 1], np.roll(p[:, 0], -1)) for p in polygons)
    if all(abs(area) < _NO_AREA for area in areas):
        return THIN
    points = np.concatenate(polygons)
    outside = (points.max(0) <= 0).any() or (points.min(0) >= size[::-1]).any()
    return OUTSIDE if outside else SMALL


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

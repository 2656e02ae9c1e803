"""Crops and scales that do not fit the images they are meant for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainkit.errors import UserError, few, number_of

LEAST = 16
"""Pixels of the shorter side below which nothing of an image is left to tell."""

CROP_LIMIT = 1 << 26
"""Most pixels of a crop; 8,192 along each side."""


def crop_errors(
    where: str, shapes: np.ndarray, crop: Sequence[int], base: np.ndarray, largest: float
) -> Iterator[UserError]:
    """Yield an error for each side of a crop that is larger than every image of `shapes` (n, 2), scaled by `base`
    (n,) and by the `largest` scale: all crops would be padded, always."""
    scaled = np.rint(shapes * (base * largest)[:, None]).astype(np.int64)
    for axis, word in enumerate(("high", "wide")):
        if (scaled[:, axis] < crop[axis]).all():
            most = int(scaled[:, axis].max())
            found = f"{crop[axis]} pixels {word}, larger than all {len(shapes)} images at their largest scale"
            remedy = "lower data.crop, or raise data.augment.scales or data.short_side"
            yield UserError(where, found, f"at most {most}, at scale {largest:g}", remedy)


def scale_errors(
    where: str, ids: Sequence[str], shapes: np.ndarray, base: np.ndarray, smallest: float, largest: float
) -> Iterator[UserError]:
    """Yield an error where images of `shapes` (n, 2), scaled by `base` (n,) and by the `smallest` scale, have a
    shorter side of less than `LEAST` pixels, or by the `largest` scale more than `CROP_LIMIT` in all."""
    sides = shapes.min(1) * base * smallest
    if len(small := np.flatnonzero(sides < LEAST)):
        listed = few(f"{ids[row]} ({shapes[row][0]} x {shapes[row][1]})" for row in small.tolist())
        found = f"{len(small)} of {len(shapes)} images with a side below {LEAST} pixels at scale {smallest:g}: {listed}"
        yield UserError(where, found, f"{LEAST} or more", "raise the smallest scale, or remove them")
    if len(large := np.flatnonzero(shapes.prod(1) * (base * largest) ** 2 > CROP_LIMIT)):
        listed = few(f"{ids[row]} ({shapes[row][0]} x {shapes[row][1]})" for row in large.tolist())
        found = f"{number_of(len(large), 'images')} of more pixels than a crop may have at scale {largest:g}: {listed}"
        yield UserError(where, found, f"{CROP_LIMIT:,} or fewer", "lower data.short_side, or cut or remove them")

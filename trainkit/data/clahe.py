"""Contrast-limited adaptive histogram equalisation (Zuiderveld, "Graphics Gems IV", 1994, chapter VIII.5)."""

from __future__ import annotations

import numpy as np

_BINS = 256


def equalise(image: np.ndarray, clip: float = 2.0, tiles: int = 8) -> np.ndarray:
    """Return the image, uint8 (3, h, w), with its luminance equalised and its two colour differences kept."""
    red, green, blue = image.astype(np.float32)
    before = np.clip(np.rint(0.299 * red + 0.587 * green + 0.114 * blue), 0, 255).astype(np.uint8)
    # In YCbCr each of red, green and blue is luminance plus something that depends on the colour differences alone.
    change = equalise_plane(before, clip, tiles).astype(np.int16) - before
    return np.clip(image.astype(np.int16) + change, 0, 255).astype(np.uint8)


def equalise_plane(plane: np.ndarray, clip: float = 2.0, tiles: int = 8) -> np.ndarray:
    """Equalise uint8 (h, w) by `tiles` x `tiles` tiles, whose mappings are blended between the tiles' centres.

    As OpenCV's `createCLAHE(clip, (tiles, tiles))` does. A tile's histogram is cut at `clip` times its mean height,
    rounded down, at least 1, and what is cut off is spread over all bins, what is then left over every so many of them;
    the running sum of it, brought to 0 .. 255 and rounded, is the tile's mapping. Where `tiles` does not divide both
    sides, the image is mirrored about its last row and column until it does, by a row and a column or more.
    """
    height, width = plane.shape
    beyond = [tiles - side % tiles for side in plane.shape] if height % tiles or width % tiles else [0, 0]
    seen = np.pad(plane, [(0, more) for more in beyond], mode="reflect")
    tall, wide = (side // tiles for side in seen.shape)
    tile = (np.arange(seen.shape[0]) // tall)[:, None] * tiles + np.arange(seen.shape[1]) // wide
    histogram = np.bincount((tile * _BINS + seen).ravel(), minlength=tiles * tiles * _BINS).reshape(tiles, tiles, _BINS)
    levelled = np.minimum(histogram, max(1, int(clip * tall * wide / _BINS)))
    each, left = np.divmod((histogram - levelled).sum(-1, keepdims=True), _BINS)
    step, bins = _BINS // np.maximum(left, 1), np.arange(_BINS)
    levelled += each + ((bins % step == 0) & (bins // step < left))
    # In float32, as there: what lies near a half is rounded alike.
    mapping = np.rint(np.cumsum(levelled, -1).astype(np.float32) * (np.float32(255) / np.float32(tall * wide)))
    y0, y1, dy = _between(height, tall, tiles)
    x0, x1, dx = _between(width, wide, tiles)
    y0, y1, dy = y0[:, None], y1[:, None], dy[:, None]
    above = mapping[y0, x0, plane] * (1 - dx) + mapping[y0, x1, plane] * dx
    below = mapping[y1, x0, plane] * (1 - dx) + mapping[y1, x1, plane] * dx
    return np.rint(above * (1 - dy) + below * dy).astype(np.uint8)


def _between(size: int, side: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tiles of `side` pixels before and after each of `size` places, and the share of the second, float32.

    Beyond the outermost centres both are the nearest tile.
    """
    place = np.arange(size, dtype=np.float32) * (np.float32(1) / np.float32(side)) - np.float32(0.5)
    before = np.floor(place).astype(int)
    return np.maximum(before, 0), np.minimum(before + 1, count - 1), place - before.astype(np.float32)

"""Contrast-limited adaptive histogram equalisation (Zuiderveld, "Graphics Gems IV", 1994, chapter VIII.5)."""

from __future__ import annotations

import numpy as np

_BINS = 256


def equalise(image: np.ndarray, clip: float = 2.0, tiles: int = 8) -> np.ndarray:
    """The picture, uint8 (3, h, w), with its luminance equalised and its two colour differences kept."""
    red, green, blue = image.astype(np.float32)
    before = np.clip(np.rint(0.299 * red + 0.587 * green + 0.114 * blue), 0, 255).astype(np.uint8)
    # In YCbCr each of red, green and blue is luminance plus something that depends on the colour differences alone.
    change = equalise_plane(before, clip, tiles).astype(np.int16) - before
    return np.clip(image.astype(np.int16) + change, 0, 255).astype(np.uint8)


def equalise_plane(plane: np.ndarray, clip: float = 2.0, tiles: int = 8) -> np.ndarray:
    """Equalise uint8 (h, w) by `tiles` x `tiles` tiles, whose mappings are blended between the tiles' centres.

    A tile's histogram is cut at `clip` times its mean height, at least 1, and what is cut off is spread over all bins;
    the running sum of it, brought to 0 .. 255, is the tile's mapping.
    """
    height, width = plane.shape
    down, right = min(tiles, height), min(tiles, width)
    tile_y, centre_y = _tiles(height, down)
    tile_x, centre_x = _tiles(width, right)
    place = (tile_y[:, None] * right + tile_x) * _BINS + plane
    histogram = np.bincount(place.ravel(), minlength=down * right * _BINS).reshape(down, right, _BINS)
    pixels = histogram.sum(-1, keepdims=True)
    limit = np.maximum(1.0, clip * pixels / _BINS)
    cut = np.maximum(histogram - limit, 0).sum(-1, keepdims=True)
    levelled = np.minimum(histogram, limit) + cut / _BINS
    mapping = np.cumsum(levelled, -1) * (255 / pixels)
    # Beyond the outermost centres the nearest tile alone counts.
    y0, y1, dy = _between(np.arange(height), centre_y)
    x0, x1, dx = _between(np.arange(width), centre_x)
    dy = dy[:, None]
    above = mapping[y0[:, None], x0, plane] * (1 - dx) + mapping[y0[:, None], x1, plane] * dx
    below = mapping[y1[:, None], x0, plane] * (1 - dx) + mapping[y1[:, None], x1, plane] * dx
    return np.clip(np.rint(above * (1 - dy) + below * dy), 0, 255).astype(np.uint8)


def _tiles(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The tile of each position, and where each tile has its centre; tiles differ by one pixel at most."""
    edges = np.arange(count + 1) * size // count
    return np.repeat(np.arange(count), np.diff(edges)), (edges[:-1] + edges[1:] - 1) / 2


def _between(places: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The centres before and after each place, and how far it is from the one to the other, 0 to 1."""
    after = np.searchsorted(centres, places, side="right")
    low, high = np.maximum(after - 1, 0), np.minimum(after, len(centres) - 1)
    gap = np.where(high > low, centres[high] - centres[low], 1.0)
    return low, high, np.where(high > low, (places - centres[low]) / gap, 0.0)

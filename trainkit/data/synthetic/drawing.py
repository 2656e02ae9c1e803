"""Renderer of the drawn sets: the folder that a set is written to once, shapes and colours, and a camera.

A set depends on nothing but a seed: numpy's PCG64 seeded per subject and image, polygons filled by Pillow, PNG files.
Arrays of pixels see only + - * / and comparisons, whose last bit is the same on every processor; another Pillow may
fill polygons otherwise, which a test notices. No number from a drawn set belongs beside a published one.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFilter

from trainkit.data import cache
from trainkit.paths import user_cache

ABOUT = "sample.json"
"""The file of a set that says how it was made; a folder that has it is whole."""
SUPERSAMPLING = 2
"""Pixels that are drawn for each that is saved, along each side."""

Colour = Sequence[float] | np.ndarray


def root() -> Path:
    """Return where sets are kept: `$TRAINKIT_CACHE`, else `$TRAINKIT_DATA/.trainkit-sample`, else the user's cache."""
    if chosen := os.environ.get("TRAINKIT_CACHE"):
        return Path(chosen)
    if data := os.environ.get("TRAINKIT_DATA"):
        return Path(data) / ".trainkit-sample"
    return user_cache()


def drawn_once(name: str, write: Callable[[Path], None]) -> Path:
    """Return the folder `name` under `root()`, written by `write`, `sample.json` last, if it is not there.

    Raises:
        UserError: the folder cannot be written (no permission, disk full).
    """
    return cache.fill_once(root() / name, ABOUT, write, f"drawing the sample set {name}")


def write_about(to: Path, what: str, version: int, seed: int, **facts: Any) -> None:
    """Write `sample.json`: what the set is and shows, and the numbers that it was made with."""
    about = {"what": what, "version": version, "seed": seed, **facts}
    (to / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def save(pixels: np.ndarray, file: Path, compress_level: int = 1) -> None:
    """Write pixels, uint8 (height, width) or (height, width, 3), as PNG; make the folder where it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, compress_level=compress_level)


def generator(*key: int) -> np.random.Generator:
    """Return the generator of a seed and the numbers of what is drawn."""
    return np.random.Generator(np.random.PCG64(key))


def listed(words: Sequence[str]) -> str:
    """List words: `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def mix(a: ArrayLike, b: ArrayLike, share: float | np.ndarray) -> np.ndarray:
    """Mix two colours, float64: `share` of the second."""
    return np.asarray(a, dtype=np.float64) * (1 - share) + np.asarray(b, dtype=np.float64) * share


def tint(colour: Sequence[float] | np.ndarray) -> tuple[int, ...]:
    """Round a colour to 0 .. 255, as Pillow takes it."""
    return tuple(min(255, max(0, round(v))) for v in np.asarray(colour).tolist())


def to_bytes(values: np.ndarray) -> np.ndarray:
    """Round values to 0 .. 255, uint8."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def draw_numbers(rng: np.random.Generator, ranges: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Draw a number from each of the named ranges."""
    low, high = np.array(list(ranges.values())).T
    return dict(zip(ranges, rng.uniform(low, high).tolist(), strict=True))


def turned(points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return points times a matrix, added up in one order on every processor."""
    total = points[:, :1] * rows[0]
    for i in range(1, len(rows)):
        total += points[:, i : i + 1] * rows[i]
    return total


@functools.cache
def circle(n: int) -> np.ndarray:
    """Return n points of the unit circle, float64 (n, 2)."""
    turns = [2 * math.pi * i / n for i in range(n)]
    return np.array([(math.cos(t), math.sin(t)) for t in turns])


def oval(x: float, y: float, rx: float, ry: float, tilt: float = 0.0, n: int = 20) -> np.ndarray:
    """Return the corners of an ellipse, turned by `tilt` radians: (n, 2)."""
    c, s = math.cos(tilt), math.sin(tilt)
    return turned(circle(n), np.array([(rx * c, rx * s), (-ry * s, ry * c)])) + np.array((x, y))


def box(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    """Return the corners of an upright rectangle: (4, 2)."""
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)])


def points(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return points (n, 2) of their coordinates."""
    return np.array((x, y)).T


def band(x: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Return the corners of what lies between two lines: along the one and back along the other, (2n, 2)."""
    return np.concatenate([points(x, upper), points(x, lower)[::-1]])


def placement(
    rng: np.random.Generator,
    *,
    turn: float,
    scale: tuple[float, float],
    shift: tuple[float, float],
    squeeze: tuple[float, float] = (1.0, 1.0),
    shear: float = 0.0,
) -> Callable[[np.ndarray], np.ndarray]:
    """Draw where something stands: what it returns mirrors, squeezes, shears, turns, scales and shifts points (n, 2).

    The deviation of the angle is `turn` radians; `shift` is the most along each axis.
    """
    angle, size, narrow = turn * float(rng.standard_normal()), float(rng.uniform(*scale)), float(rng.uniform(*squeeze))
    c, s, lean = math.cos(angle) * size, math.sin(angle) * size, float(rng.uniform(-shear, shear))
    wide = narrow if float(rng.uniform()) < 0.5 else -narrow
    rows = np.array([(wide * c, wide * s), (lean * c - s, lean * s + c)])
    to = rng.uniform(-1, 1, 2) * shift
    return lambda points: turned(points, rows) + to


class Canvas:
    """An image on which shapes are laid: x right, y down, the middle is 0, and half its height is 1."""

    def __init__(self, image: Image.Image):
        self.image = image
        self._pen, self._glaze = ImageDraw.Draw(image), ImageDraw.Draw(image, "RGBA")

    def pixels(self, points: np.ndarray) -> list[float]:
        """Return points (n, 2) in pixels: x, y, x, y and so on."""
        half = self.image.height / 2
        return (points * half + (self.image.width / 2, half)).ravel().tolist()

    def fill(self, points: np.ndarray, colour: Colour, share: float = 1.0) -> None:
        """Fill a polygon; `share` is how much of what is below it hides."""
        if share < 1:
            self._glaze.polygon(self.pixels(points), fill=(*tint(colour), round(255 * share)))
        else:
            self._pen.polygon(self.pixels(points), fill=tint(colour))

    def line(self, points: np.ndarray, colour: Colour, width: float, closed: bool = False) -> None:
        """Draw a line through points, one pixel wide at least."""
        at = self.pixels(points)
        whole = max(1, round(width * self.image.height / 2))
        self._pen.line([*at, *at[:2]] if closed else at, fill=tint(colour), width=whole)


def enlarged(image: Image.Image, width: int, height: int) -> Image.Image:
    """Bring an image to `SUPERSAMPLING` times a width and height, without edges."""
    return image.resize((width * SUPERSAMPLING, height * SUPERSAMPLING), Image.Resampling.BILINEAR)


def gradient(colours: np.ndarray, width: int, height: int) -> Canvas:
    """Return a canvas for an image of that size, with colours (rows, columns, 3) spread over it."""
    return Canvas(enlarged(Image.fromarray(to_bytes(colours)), width, height))


def spread(grid: np.ndarray, *places: np.ndarray) -> np.ndarray:
    """Interpolate a coarse grid linearly at places along each of its first axes, in steps of the grid."""
    for axis, at in enumerate(places):
        low = np.clip(np.floor(at), 0, grid.shape[axis] - 2).astype(np.intp)
        share = (at - low).reshape(-1, *[1] * (grid.ndim - axis - 1))
        grid = np.take(grid, low, axis) * (1 - share) + np.take(grid, low + 1, axis) * share
    return grid


def blurred(image: Image.Image, radius: float) -> Image.Image:
    """Blur an image, where the radius is above 0.2 pixels."""
    return image.filter(ImageFilter.GaussianBlur(radius)) if radius > 0.2 else image


def exposed(
    rng: np.random.Generator,
    picture: np.ndarray,
    light: np.ndarray,
    *,
    contrast: tuple[float, float],
    exposure: tuple[float, float],
    tint: float,
    noise: float,
    grey: float,
    channels: int = 3,
) -> np.ndarray:
    """Photograph float32 pixels (height, width, 3) in a light: drawn contrast, exposure, tint and noise; uint8.

    Colours of the light differ by at most `tint`; the deviation of the noise is 1 to `noise`, in so many channels; low
    contrast leaves `grey` unchanged.
    """
    one, much = float(rng.uniform(*contrast)), float(rng.uniform(*exposure))
    gain = (one * much * (1 + rng.uniform(-tint, tint, 3))).astype(np.float32)
    grain = np.float32(rng.uniform(1, noise)) * rng.standard_normal(picture.shape, dtype=np.float32)
    return to_bytes(picture * (light * gain) + grain[:, :, :channels] + np.float32(grey * (1 - one)))


def photograph(
    rng: np.random.Generator,
    image: Image.Image,
    *,
    blur: tuple[float, float],
    light: float,
    contrast: tuple[float, float] = (0.7, 1.15),
    exposure: tuple[float, float] = (0.7, 1.25),
    noise: float = 12,
    coarse: tuple[float, float] = (1.0, 1.0),
    infrared: float = 0.0,
) -> np.ndarray:
    """Photograph what was drawn, in a light from one side: uint8 (height, width, 3), `SUPERSAMPLING` times smaller.

    Drawn are the radius of the blur, the share of pixels of a coarse sensor, and whether the camera sees `infrared`.
    """
    image = blurred(image.reduce(SUPERSAMPLING), float(rng.uniform(*blur)))
    share = float(rng.uniform(*coarse))
    if share < 0.9:  # to that share of its pixels and back
        small = image.resize((round(image.width * share), round(image.height * share)), Image.Resampling.BILINEAR)
        image = small.resize(image.size, Image.Resampling.BILINEAR)
    grey = float(rng.uniform()) < infrared
    picture = np.asarray(image.getchannel("R").convert("RGB") if grey else image, dtype=np.float32)
    x, y = (((np.arange(n) + 0.5) * (2 / n) - 1).astype(np.float32) for n in image.size)
    side = [np.float32(v) for v in rng.uniform(-light, light, 2)]
    lit = 1 + x[None, :, None] * side[0] + y[:, None, None] * side[1]
    tint, channels = (0.0, 1) if grey else (0.12, 3)
    return exposed(
        rng, picture, lit, contrast=contrast, exposure=exposure, tint=tint, noise=noise, grey=105, channels=channels
    )

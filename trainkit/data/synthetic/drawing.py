"""Renderer of the drawn sets: the folder that a set is written to once, shapes and colours, and a camera.

A set depends on nothing but a seed: numpy's PCG64 seeded per subject and image, polygons filled by Pillow, PNG files.
Arrays of pixels see only + - * / and comparisons, whose last bit is the same on every processor; another Pillow may
fill polygons otherwise, which a test notices. No number from a drawn set belongs beside a published one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageFilter

from trainkit.errors import UserError
from trainkit.paths import make_private, user_cache

ABOUT = "sample.json"
"""The file of a set that says how it was made; a folder that has it is whole."""


def root() -> Path:
    """Return where sets are kept: `$TRAINKIT_CACHE`, else `$TRAINKIT_DATA/.trainkit-sample`, else the user's cache."""
    if cache := os.environ.get("TRAINKIT_CACHE"):
        return Path(cache)
    if data := os.environ.get("TRAINKIT_DATA"):
        return Path(data) / ".trainkit-sample"
    return user_cache()


def drawn_once(name: str, write: Callable[[Path], None], megabytes: int) -> Path:
    """Return the folder `name` under `root()`, written by `write` if it is not there.

    `write` fills a folder that does not exist yet, `sample.json` last; the folder gets its name when `write` has
    returned, so that no reader sees a half. Of processes that ask at the same time one writes and the others wait.

    Raises:
        UserError: the folder cannot be written (no permission, disk full); `megabytes` says how much it needs.
    """
    from filelock import FileLock

    target = root() / name
    if (target / ABOUT).is_file():
        return target
    aside = target.with_name(f"{target.name}.part")
    try:
        make_private(target.parent)
        with FileLock(f"{target}.lock"):
            if (target / ABOUT).is_file():
                return target
            for stale in (aside, target):
                if stale.exists():
                    shutil.rmtree(stale)
            write(aside)
            aside.rename(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            str(target),
            f"the sample set cannot be written ({error})",
            f"a writable folder with {megabytes} MB free",
            "set TRAINKIT_DATA or TRAINKIT_CACHE to another folder",
        ) from error
    return target


def write_about(to: Path, what: str, version: int, seed: int, **facts: Any) -> None:
    """Write `sample.json`: what the set is and shows, and the numbers that it was made with."""
    about = {"what": what, "version": version, "seed": seed, **facts}
    (to / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def save(pixels: np.ndarray, file: Path, compress_level: int = 1) -> None:
    """Write pixels, uint8 (height, width) or (height, width, 3), as PNG."""
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
    return tuple(min(255, max(0, round(float(v)))) for v in colour)


def to_bytes(values: np.ndarray) -> np.ndarray:
    """Round values to 0 .. 255, uint8."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


@cache
def circle(n: int) -> np.ndarray:
    """Return n points of the unit circle, float64 (2, n): x, then y."""
    turns = [2 * math.pi * i / n for i in range(n)]
    return np.array([[math.cos(t) for t in turns], [math.sin(t) for t in turns]])


def oval(x: float, y: float, rx: float, ry: float, tilt: float = 0.0, n: int = 20) -> np.ndarray:
    """Return the corners of an ellipse, turned by `tilt` radians: (n, 2)."""
    c, s = math.cos(tilt), math.sin(tilt)
    a, b = circle(n)
    a, b = rx * a, ry * b
    return np.stack([x + a * c - b * s, y + a * s + b * c], axis=1)


def band(x: np.ndarray, upper: np.ndarray, lower: np.ndarray, x_lower: np.ndarray | None = None) -> np.ndarray:
    """Return the corners of what lies between two lines: along the one and back along the other, (2n, 2)."""
    back = np.stack([x if x_lower is None else x_lower, lower], axis=1)[::-1]
    return np.concatenate([np.stack([x, upper], axis=1), back])


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


def resampled(image: Image.Image, share: float, below: float) -> Image.Image:
    """Bring an image to a share of its pixels along each side and back, as a coarse sensor, where it is `below`."""
    if share >= below:
        return image
    size = (round(image.width * share), round(image.height * share))
    return image.resize(size, Image.Resampling.BILINEAR).resize(image.size, Image.Resampling.BILINEAR)


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

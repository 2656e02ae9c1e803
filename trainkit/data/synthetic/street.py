"""A street in metres, and its projection: u to the right of its middle, s along it, z up.

Projection is in Python's own floats: a polygon has few corners, and a matrix product of numpy may round otherwise on
another processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from PIL import Image, ImageDraw

from trainkit.data.synthetic.drawing import mix, tint

HEIGHT, WIDTH = 96, 128
SKY, BUILDING, ROAD, PAVEMENT, PLANTS, FENCE, POLE, CAR, PERSON = range(9)
SUPERSAMPLING = 3
Point = tuple[float, float, float]
NEAR = 0.4
"""Metres in front of the camera where what is drawn begins."""
IGNORED = 255
"""The value of pixels that nobody labelled."""
PLAIN, SMOOTH, GRAIN, LEAVES, BRICK = range(5)
"""Kinds of surface."""
Colour = Sequence[float] | np.ndarray

TURNS = [(math.cos(2 * math.pi * i / 10), math.sin(2 * math.pi * i / 10)) for i in range(10)]


class Street:
    """A street and its weather as a camera sees them: `image` and, in the same pixels, `labels` and `surface`."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        size = (WIDTH * SUPERSAMPLING, HEIGHT * SUPERSAMPLING)
        self.image, self.labels, self.surface = Image.new("RGB", size), Image.new("L", size), Image.new("L", size)
        self.pens = [ImageDraw.Draw(one) for one in (self.image, self.labels, self.surface)]
        one = self.one
        # The street.
        self.half = one(2.6, 6.0)
        self.walk = [one(1.0, 4.0), one(1.0, 4.0)]
        self.bend = one(-1, 1) * abs(one(-1, 1)) / 90
        self.junction = (s := one(8, 60), s + one(6, 12)) if self.chance(0.4) else None
        self.park = [self.chance(0.25), self.chance(0.25)]
        self.setback = [one(0, 7) * self.chance(0.75), one(0, 7) * self.chance(0.75)]
        # The weather: what the air hides, how dark it is, and whether there are shadows.
        kind = one(0, 1)
        self.sun = kind < 0.45
        self.dusk = kind > 0.88
        self.clear = one(25, 70) if 0.45 < kind < 0.6 else one(150, 700)
        grey = one(150, 225)
        self.high = np.array([one(70, 140), one(120, 175), one(190, 235)]) if self.sun else np.full(3, grey)
        self.haze = mix(self.high, (225, 225, 225), one(0.5, 1.0)) + np.array([one(-14, 14), 0, one(-14, 14)])
        if self.dusk:
            self.high, self.haze = np.array([40, 50, 85]) * one(0.5, 1.2), np.array([150, 105, 90]) * one(0.5, 1.1)
        self.lit = [one(0.55, 1.1), one(0.55, 1.1)]
        if not self.sun:
            self.lit = [float(np.mean(self.lit))] * 2
        self.winter = self.chance(0.3)
        # The camera: M's rows are what is right of it, below it and before it.
        yaw, pitch, roll = one(-0.22, 0.22), one(-0.12, 0.10), one(-0.05, 0.05)
        if self.chance(0.12):
            yaw *= 3
        cy, sy, cp, sp, cr, sr = (f(v) for v in (yaw, pitch, roll) for f in (math.cos, math.sin))
        right, ahead = np.array([cy, -sy, 0]), np.array([sy * cp, cy * cp, sp])
        down = np.cross(ahead, right)
        self.matrix = np.stack([cr * right + sr * down, -sr * right + cr * down, ahead]).tolist()
        self.focal = one(78, 135)
        self.eye = (one(-0.75, 0.75) * self.half, 0.0, one(1.2, 2.4))
        self.things: list[tuple[int, float, Callable[[], None]]] = []

    def one(self, low: float, high: float) -> float:
        """Draw a number."""
        return float(self.rng.uniform(low, high))

    def chance(self, share: float) -> bool:
        """Decide with a probability."""
        return float(self.rng.uniform()) < share

    def pick(self, *options: tuple) -> np.ndarray:
        """Draw one of the colours, lighter or darker."""
        return np.asarray(options[int(self.rng.integers(len(options)))], dtype=np.float64) * self.one(0.75, 1.2)

    def at(self, u: float, s: float, z: float) -> tuple[float, float, float]:
        """Turn a place in the street into metres right of the camera, below it and before it; the street bends."""
        x, y, z = u + self.bend * s * s - self.eye[0], s, z - self.eye[2]
        a, b, c = self.matrix
        return (
            a[0] * x + a[1] * y + a[2] * z,
            b[0] * x + b[1] * y + b[2] * z,
            c[0] * x + c[1] * y + c[2] * z,
        )

    def pixel(self, right: float, down: float, before: float) -> tuple[float, float]:
        """Turn what `at` gives into x, y of the drawing, kept within what Pillow can fill."""
        x = (right / before * self.focal + WIDTH / 2) * SUPERSAMPLING
        y = (down / before * self.focal + HEIGHT / 2) * SUPERSAMPLING
        return min(max(x, -20000.0), 20000.0), min(max(y, -20000.0), 20000.0)

    def outline(self, points: Sequence[Point]) -> tuple[list[tuple[float, float]], float]:
        """Return the corners in the drawing of what is before the camera of a polygon, and its mean distance.

        No corners for what is behind the camera or outside the drawing.
        """
        seen = [self.at(*point) for point in points]
        if min(point[2] for point in seen) < NEAR:  # cut it where the camera begins
            kept = []
            for here, there in zip(seen, seen[1:] + seen[:1], strict=True):
                if here[2] >= NEAR:
                    kept.append(here)
                if (here[2] >= NEAR) != (there[2] >= NEAR):
                    share = (NEAR - here[2]) / (there[2] - here[2])
                    right, down = (here[k] + (there[k] - here[k]) * share for k in (0, 1))
                    kept.append((right, down, NEAR))
            seen = kept
        if len(seen) < 3:
            return [], 0.0
        where = [self.pixel(*point) for point in seen]
        across, down = zip(*where, strict=True)
        if max(across) < 0 or min(across) > WIDTH * SUPERSAMPLING:
            return [], 0.0
        if max(down) < 0 or min(down) > HEIGHT * SUPERSAMPLING:
            return [], 0.0
        return where, sum(point[2] for point in seen) / len(seen)

    def lay(
        self,
        points: Sequence[Point],
        colour: Colour,
        label: int | None,
        surface: int = SMOOTH,
        glow: bool = False,
    ) -> None:
        """Draw a polygon of points (u, s, z). `label` None: in the image alone, as what nobody labels apart."""
        where, depth = self.outline(points)
        if not where:
            return
        picture, labels, surfaces = self.pens
        picture.polygon(where, fill=tint(colour if glow else self.far(colour, depth)))
        surfaces.polygon(where, fill=surface)
        if label is not None:
            labels.polygon(where, fill=label)

    def only_labels(self, points: Sequence[Point], label: int) -> None:
        """Draw a polygon in the labels and leave the image as it is."""
        where, _ = self.outline(points)
        if where:
            self.pens[1].polygon(where, fill=label)

    def far(self, colour: Colour, depth: float) -> list[float]:
        """Return the colour of something through so many metres of air."""
        dim, hidden = 0.55 if self.dusk else 1.0, depth / (depth + self.clear)
        return [float(c) * dim * (1 - hidden) + float(air) * hidden for c, air in zip(colour, self.haze, strict=True)]

    def faces(self, u: float, s: float) -> tuple[float, float]:
        """Return the direction (u, s) that a flat thing at (u, s) spreads in to face the camera, of length 1."""
        x = u + self.bend * s * s - self.eye[0]
        length = math.sqrt(x * x + s * s) or 1.0
        return s / length, -x / length

    def disc(
        self, u: float, s: float, z: float, r: tuple[float, float], colour: Colour, label: int | None, how: int
    ) -> None:
        """Draw a round thing that faces the camera, `r` wide and high from its middle."""
        fu, fs = self.faces(u, s)
        points = [(u + a * r[0] * fu, s + a * r[0] * fs, z + b * r[1]) for a, b in TURNS]
        self.lay(points, colour, label, how)

    def upright(
        self, u: float, s: float, outline: list[tuple[float, float]], colour: Colour, label: int | None, how: int
    ) -> None:
        """Draw a flat thing that faces the camera: `outline` is across and up from (u, s)."""
        fu, fs = self.faces(u, s)
        self.lay([(u + a * fu, s + a * fs, z) for a, z in outline], colour, label, how)

    def height_px(self, u: float, s: float, high: float) -> float:
        """Return how many pixels of the image something of `high` metres takes there; 0 behind the camera."""
        depth = self.at(u, s, 0.0)[2]
        return 0.0 if depth < NEAR else self.focal * high / depth

    def shadow(self, u: float, s: float, ru: float, rs: float) -> None:
        """Draw a shadow on the ground, where the sun leaves one; labels do not change."""
        if not self.sun:
            return
        lean = ru if self.lit[0] < self.lit[1] else -ru
        where, _ = self.outline([(u + lean + a * ru * 1.4, s + b * rs, 0.0) for a, b in TURNS])
        if where:
            ImageDraw.Draw(self.image, "RGBA").polygon(where, fill=(14, 16, 24, 120))

    def later(self, layer: int, u: float, s: float, thing: Callable[..., None], *words: float) -> None:
        """Have `thing` drawn with these words after all of a lower layer and after what is farther away in its own."""
        x, y = u + self.bend * s * s - self.eye[0], s - self.eye[1]
        self.things.append((layer, -(x * x + y * y), partial(thing, self, *words)))

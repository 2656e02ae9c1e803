"""A built-in set of drawn street scenes with a class for each pixel, so that a segmentation network can train at once.

What it is: pictures, 96 x 128, as a camera on a car would take them, each of a street of its own. A street has a width,
a bend, pavements, perhaps a junction, houses or a park on either side, fences, hedges and walls, trees with leaves or
without, lamps, signs, parked and moving cars, people. Camera height, direction and roll, weather (sun with shadows,
cloud, fog, dusk), light and the sensor change from picture to picture. All of it is laid out in metres and projected,
so that far things are small and near things hide them. Classes look alike in places: pavements as dark as the road,
glass fronts that mirror the sky, hedges as high as fences, walls of the brick of a house, bare trunks beside lamps.

Masks come from the same polygons and are then made as people make them: borders wander by about half a pixel, crowns
and railings are filled although sky shows through, thin poles are drawn a pixel wide, a few small far things are not
drawn at all. Nothing can therefore score 1.0 here. Not labelled (255) are the bonnet of the own car, strips at the
sides that the lens left over, bins and benches, and now and then the muddle at the end of the street.

What it shows: that the code runs, and that a network beats the commonest class of each place and a larger network a
smaller one. What it does not show: that anything works on photographs, or what a method is worth there: 240 pictures
of flat polygons are few and easy. No number from it belongs beside a published one.

The drawing depends on nothing but a seed: numpy's PCG64 seeded per picture, polygons filled by Pillow, PNG files.
Arrays of pixels see only + - * / and comparisons, whose last bit is the same on every processor; another Pillow may
fill polygons otherwise, which a test notices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from trainkit.data.synthetic.faces import drawn_once

VERSION = 4
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20251122
HEIGHT, WIDTH = 96, 128
PICTURES = {"train": 240, "val": 60}
"""Pictures of each split; each is of another street."""
NAMES = ("sky", "building", "road", "pavement", "vegetation", "fence", "pole", "car", "person")
"""The classes 0 to 8. Grass and hedges are `vegetation`, garden walls `fence`, signs and lamps `pole`."""
COLOURS = (
    (120, 170, 220), (150, 90, 70), (110, 80, 130), (225, 110, 200), (90, 140, 50), (190, 150, 110), (240, 220, 60),
    (30, 50, 160), (220, 40, 60),
)  # fmt: skip
"""Red, green and blue of each class; the palette of the mask files, in which 255 is white."""
IGNORED = 255
"""What pixels are that nobody labelled."""

SKY, BUILDING, ROAD, PAVEMENT, PLANTS, FENCE, POLE, CAR, PERSON = range(9)
_SUPERSAMPLING = 3
Point = tuple[float, float, float]
_NEAR = 0.4
"""Metres in front of the camera where what is drawn begins."""
_FAR = 160.0
_PLAIN, _SMOOTH, _GRAIN, _LEAVES, _BRICK = range(5)
_TEXTURE = np.array([(0, 0, 0), (0.02, 0.02, 0.05), (0.07, 0.05, 0.06), (0.16, 0.14, 0.08), (0.08, 0.06, 0.08)])
"""How strong noise of one pixel, of three and of twelve is on each kind of surface."""


def folder() -> Path:
    """The sample set as a folder, drawn when first asked for (about 25 s on one core, 10 MB).

    Holds pictures `train/0000.png` and `val/0240.png` (RGB, 96 high and 128 wide), their masks of the same names in
    `trainannot` and `valannot` (palette files: the index is the class, 255 is not labelled), and `sample.json`, which
    says how it was made. Any number of processes may call this at the same time: one draws, the others wait, and a
    folder that exists is whole.

    Raises:
        UserError: the folder cannot be written (no permission, disk full).
    """
    return drawn_once(f"scenes-v{VERSION}", _write, megabytes=20)


def numbers(split: str) -> range:
    """The numbers of the pictures of `split` ("train" or "val")."""
    first = 0 if split == "train" else PICTURES["train"]
    return range(first, first + PICTURES[split])


def draw(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Picture `number`, uint8 (96, 128, 3), and its mask, uint8 (96, 128): classes, or 255."""
    rng = np.random.Generator(np.random.PCG64([SEED, 1, number]))
    scene = _Scene(rng)
    scene.draw()
    return _photograph(rng, scene), _annotate(rng, scene)


def _write(to: Path) -> None:
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(COLOURS)], palette[IGNORED] = COLOURS, 255
    for split in PICTURES:
        (to / split).mkdir(parents=True)
        (to / f"{split}annot").mkdir()
        for number in numbers(split):
            picture, mask = draw(number)
            Image.fromarray(picture).save(to / split / f"{number:04d}.png", compress_level=3)
            labels = Image.fromarray(mask)
            labels.putpalette(palette.tobytes())
            labels.save(to / f"{split}annot" / f"{number:04d}.png")
    about = {
        "what": "drawn streets made by trainkit.data.synthetic.scenes; they show that code runs, not that it works",
        "version": VERSION,
        "seed": SEED,
        "pictures": PICTURES,
        "names": NAMES,
        "ignored": IGNORED,
    }
    (to / "sample.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


# ---- drawing: metres in the street's frame, u to the right of its middle, s along it, z up ----


def _mix(a: np.ndarray | Sequence[float], b: np.ndarray | Sequence[float], share: float | np.ndarray) -> np.ndarray:
    """The colours `a` and `b`, with so much of `b`."""
    return np.asarray(a) * (1 - share) + np.asarray(b) * share


def _tint(colour: Sequence[float]) -> tuple[int, ...]:
    return tuple(min(255, max(0, round(float(v)))) for v in colour)


_TURNS = [(math.cos(2 * math.pi * i / 10), math.sin(2 * math.pi * i / 10)) for i in range(10)]


class _Scene:
    """Draws one street: `image` and, in the same pixels, `labels` and the kind of surface in `surface`."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        size = (WIDTH * _SUPERSAMPLING, HEIGHT * _SUPERSAMPLING)
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
        self.haze = _mix(self.high, (225, 225, 225), one(0.5, 1.0)) + np.array([one(-14, 14), 0, one(-14, 14)])
        if self.dusk:
            self.high, self.haze = np.array([40, 50, 85]) * one(0.5, 1.2), np.array([150, 105, 90]) * one(0.5, 1.1)
        self.lit = [one(0.55, 1.1), one(0.55, 1.1)]
        if not self.sun:
            self.lit = [np.mean(self.lit), np.mean(self.lit)]
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
        return float(self.rng.uniform(low, high))

    def chance(self, share: float) -> bool:
        return float(self.rng.uniform()) < share

    def pick(self, *options: tuple) -> np.ndarray:
        """One of the colours, lighter or darker."""
        return np.asarray(options[int(self.rng.integers(len(options)))], dtype=np.float64) * self.one(0.75, 1.2)

    # ---- projection, in Python's own floats: a polygon has few corners, and a matrix product of numpy may round
    # ---- otherwise on another processor

    def at(self, u: float, s: float, z: float) -> tuple[float, float, float]:
        """From the street to metres right of the camera, below it and before it; the street bends."""
        x, y, z = u + self.bend * s * s - self.eye[0], s, z - self.eye[2]
        a, b, c = self.matrix
        return (
            a[0] * x + a[1] * y + a[2] * z,
            b[0] * x + b[1] * y + b[2] * z,
            c[0] * x + c[1] * y + c[2] * z,
        )

    def pixel(self, right: float, down: float, before: float) -> tuple[float, float]:
        """From what `at` gives to x, y of the drawing, kept within what Pillow can fill."""
        x = (right / before * self.focal + WIDTH / 2) * _SUPERSAMPLING
        y = (down / before * self.focal + HEIGHT / 2) * _SUPERSAMPLING
        return min(max(x, -20000.0), 20000.0), min(max(y, -20000.0), 20000.0)

    def outline(self, points: Sequence[Point]) -> tuple[list[tuple[float, float]], float]:
        """The corners in the drawing of what is before the camera of a polygon, and its mean distance.

        No corners for what is behind the camera or outside the drawing.
        """
        seen = [self.at(*point) for point in points]
        if min(point[2] for point in seen) < _NEAR:  # cut it where the camera begins
            kept = []
            for here, there in zip(seen, seen[1:] + seen[:1], strict=True):
                if here[2] >= _NEAR:
                    kept.append(here)
                if (here[2] >= _NEAR) != (there[2] >= _NEAR):
                    share = (_NEAR - here[2]) / (there[2] - here[2])
                    right, down = (here[k] + (there[k] - here[k]) * share for k in (0, 1))
                    kept.append((right, down, _NEAR))
            seen = kept
        if len(seen) < 3:
            return [], 0.0
        where = [self.pixel(*point) for point in seen]
        across, down = zip(*where, strict=True)
        if max(across) < 0 or min(across) > WIDTH * _SUPERSAMPLING:
            return [], 0.0
        if max(down) < 0 or min(down) > HEIGHT * _SUPERSAMPLING:
            return [], 0.0
        return where, sum(point[2] for point in seen) / len(seen)

    def lay(
        self,
        points: Sequence[Point],
        colour: Sequence[float],
        label: int | None,
        surface: int = _SMOOTH,
        glow: bool = False,
    ) -> None:
        """Draw a polygon of points (u, s, z). `label` None: in the picture alone, as what nobody labels apart."""
        where, depth = self.outline(points)
        if not where:
            return
        picture, labels, surfaces = self.pens
        picture.polygon(where, fill=_tint(colour if glow else self.far(colour, depth)))
        surfaces.polygon(where, fill=surface)
        if label is not None:
            labels.polygon(where, fill=label)

    def only_labels(self, points: Sequence[Point], label: int) -> None:
        """Draw a polygon in the labels and leave the picture as it is."""
        where, _ = self.outline(points)
        if where:
            self.pens[1].polygon(where, fill=label)

    def far(self, colour: Sequence[float], depth: float) -> list[float]:
        """The colour of something through so many metres of air."""
        dim, hidden = 0.55 if self.dusk else 1.0, depth / (depth + self.clear)
        return [float(c) * dim * (1 - hidden) + float(air) * hidden for c, air in zip(colour, self.haze, strict=True)]

    def faces(self, u: float, s: float) -> tuple[float, float]:
        """The direction (u, s) that a flat thing at (u, s) spreads in to face the camera, of length 1."""
        x = u + self.bend * s * s - self.eye[0]
        length = math.sqrt(x * x + s * s) or 1.0
        return s / length, -x / length

    def disc(
        self, u: float, s: float, z: float, r: tuple[float, float], colour: Sequence[float], label: int | None, how: int
    ) -> None:
        """A round thing that faces the camera, `r` wide and high from its middle."""
        fu, fs = self.faces(u, s)
        points = [(u + a * r[0] * fu, s + a * r[0] * fs, z + b * r[1]) for a, b in _TURNS]
        self.lay(points, colour, label, how)

    def upright(
        self, u: float, s: float, outline: list[tuple[float, float]], colour: np.ndarray, label: int | None, how: int
    ) -> None:
        """A flat thing that faces the camera: `outline` is across and up from (u, s)."""
        fu, fs = self.faces(u, s)
        self.lay([(u + a * fu, s + a * fs, z) for a, z in outline], colour, label, how)

    def height_px(self, u: float, s: float, high: float) -> float:
        """How many pixels of the picture something of `high` metres takes there; 0 behind the camera."""
        depth = self.at(u, s, 0.0)[2]
        return 0.0 if depth < _NEAR else self.focal * high / depth

    # ---- what is in a street

    def draw(self) -> None:
        self.ground()
        self.skyline()
        for side in (0, 1):
            self.edge(side)
        self.pavements()
        self.traffic()
        for _, _, thing in sorted(self.things, key=lambda item: item[:2]):
            thing()

    def later(self, layer: int, u: float, s: float, thing: Callable[[], None]) -> None:
        """Draw it after everything of a lower layer and after what is farther away in its own."""
        x, y = u + self.bend * s * s - self.eye[0], s - self.eye[1]
        self.things.append((layer, -(x * x + y * y), thing))

    def ground(self) -> None:
        """Sky, road, pavement and what is beside it: for each pixel where its ray meets the ground."""
        one, n = self.one, _SUPERSAMPLING
        x = ((np.arange(WIDTH * n) + 0.5) / n - WIDTH / 2) / self.focal
        y = ((np.arange(HEIGHT * n) + 0.5) / n - HEIGHT / 2) / self.focal
        # Sky: two colours and clouds. It has no edges, so that it is drawn small.
        clouds = Image.fromarray(self.rng.uniform(0, 1, (6, 8)).astype(np.float32))
        soft = np.asarray(clouds.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))[..., None]
        colour = _mix(self.high, self.haze, np.clip(0.9 + y[n // 2 :: n] * 1.3, 0, 1)[:, None, None])
        cover = np.clip((soft - np.float32(one(0.3, 0.9))) * np.float32(2.5), 0, 1) * np.float32(one(0.2, 0.9))
        colour = _mix(colour, self.haze * 0.5 + 100 * (0.5 if self.dusk else 1.05), cover)
        sky = Image.fromarray(np.clip(np.rint(colour), 0, 255).astype(np.uint8))
        # Rays of the rows that meet the ground somewhere: where on the street they do.
        (a0, a1, a2), (b0, b1, b2), (c0, c1, c2) = self.matrix
        falls = a2 * x[None] + b2 * y[:, None] + c2 < -1e-3
        top = int(falls.any(1).argmax()) if falls.any() else len(y)
        below, down = falls[top:], y[top:, None]
        t = -self.eye[2] / np.where(below, a2 * x[None] + b2 * down + c2, -1e-3)
        s = t * (a1 * x[None] + b1 * down + c1)
        u = self.eye[0] + t * (a0 * x[None] + b0 * down + c0) - self.bend * s * s
        # The ground: what it is painted with, an index into `paints`, and how bright it is.
        asphalt = np.full(3, one(62, 140)) + np.array([one(-6, 10), 0, one(-10, 8)])
        slabs = asphalt * one(0.85, 1.15) if self.chance(0.35) else self.pick((160, 156, 150), (150, 120, 105))
        paints = [asphalt, slabs, slabs * one(1.1, 1.4), self.pick((92, 120, 50), (120, 124, 66))]
        paints += [np.full(3, one(170, 240)), self.pick((140, 84, 72), (150, 110, 96))]
        plain, slab, kerb, grass, white, red = range(len(paints))
        shape = u.shape
        tone, bright = np.full(shape, plain, np.uint8), np.ones(shape, np.float32)
        kind, texture = np.full(shape, ROAD, np.uint8), np.full(shape, _GRAIN, np.uint8)
        crossing = (s >= self.junction[0]) & (s < self.junction[1]) if self.junction else np.zeros_like(below)
        for side, sign in enumerate((-1.0, 1.0)):
            across = u * sign - self.half
            beside = (across >= 0) & ~crossing
            tone[beside], kind[beside] = slab, PAVEMENT
            if self.chance(0.7):
                tone[beside & (across < 0.25)] = kerb
            joint = beside & (s < 16) & ((s * 1.1 - np.floor(s * 1.1) < 0.06) | (across - np.floor(across) < 0.06))
            bright[joint] *= one(0.75, 1.0)
            green = np.zeros_like(below)
            if self.park[side] or (self.setback[side] > 1 and self.chance(0.5)):
                green |= beside & (across >= self.walk[side])
            if self.chance(0.15):  # a strip of grass along the kerb
                green |= beside & (across < 0.9) & (across > 0.2)
            tone[green], kind[green], texture[green] = grass, PLANTS, _LEAVES
        on = (kind == ROAD) & ~crossing
        if self.chance(0.7):
            period, dash, place = one(3, 9), one(0.35, 1.0), one(-0.3, 0.3) * self.half
            tone[on & (np.abs(u - place) < 0.08) & (s / period - np.floor(s / period) < dash)] = white
        if self.chance(0.5):
            tone[on & (np.abs(np.abs(u) - self.half + 0.35) < 0.06)] = white
        if self.chance(0.25):  # a lane for bicycles, as red as some pavements
            tone[on & (u > self.half - 1.5)] = red
        if self.chance(0.25):
            start = one(5, 20)
            tone[on & (s > start) & (s < start + 3) & (u - np.floor(u) < 0.5)] = white
        if self.chance(0.4):  # a patch of other asphalt
            start, left = one(3, 20), one(-1, 0.5) * self.half
            patch = (s > start) & (s < start + one(2, 9)) & (u > left) & (u < left + one(0.8, 3))
            bright[on & patch] *= one(0.7, 1.2)
        if self.sun:  # the shadow of the houses of one side
            shade, reach = one(0.45, 0.7), one(-1.4, 1.4) * self.half
            edge = reach + 2.5 * (np.floor(s / one(5, 14)) % 2)
            bright[(u < edge) if self.lit[0] < self.lit[1] else (u > -edge)] *= shade
        hidden = (t / (t + self.clear)).astype(np.float32)
        lit = bright * np.float32(0.55 if self.dusk else 1.0) * (1 - hidden)
        ground = np.stack(paints).astype(np.float32)[tone] * lit[..., None]
        ground += self.haze.astype(np.float32) * hidden[..., None]
        self.image.paste(sky.resize(self.image.size, Image.Resampling.BILINEAR))
        mask = Image.fromarray(below.astype(np.uint8) * 255)
        for image, array in ((self.image, ground), (self.labels, kind), (self.surface, texture)):
            image.paste(Image.fromarray(np.clip(np.rint(array), 0, 255).astype(np.uint8)), (0, top), mask)

    def skyline(self) -> None:
        """What closes the street far away: roofs or trees."""
        wood = self.chance(0.5)
        s, u = _FAR * self.one(0.6, 1.0), -220.0
        middle = -self.bend * s * s
        end = self.chance(0.5)
        while u < 220:
            wide, high = self.one(8, 26), self.one(3, 17)
            if abs(u + wide / 2) > 16 or end:
                spread = [(u + middle, s, -1), (u + middle + wide, s, -1), (u + middle + wide, s, high)]
                colour = self.pick((84, 100, 62)) if wood else self.pick((130, 118, 110))
                self.lay([*spread, (u + middle, s, high)], colour, PLANTS if wood else BUILDING, _GRAIN)
            u += wide * (0.8 if end else 1.0)
        if self.chance(0.3):  # the street ends before a house
            s = self.one(35, 90)
            self.later(2, 0.0, s + 60, lambda: self.house(-16, 16, s, s + 12, self.one(6, 15), across=True))

    def edge(self, side: int) -> None:
        """One side of the street behind its pavement: houses or a park, and what stands before them."""
        sign, one = (-1.0, 1.0)[side], self.one
        line = self.half + self.walk[side]
        s = one(-12, -2)
        while s < 130:
            long = one(6, 22)
            gap = one(0.5, 8) if self.chance(0.35) else 0.0
            back = line + self.setback[side] + one(0, 1.5) * self.chance(0.3)
            free = not (self.junction and s + long > self.junction[0] - 1 and s < self.junction[1] + 1)
            if free and not self.park[side]:
                high = one(3.5, 16)
                self.later(2, back * sign, s + long / 2, self.keep(self.house, back * sign, sign, s, s + long, high))
            if free and self.park[side]:
                for _ in range(int(self.rng.integers(1, 4))):
                    u, at = (line + one(2, 16)) * sign, s + one(0, long)
                    self.later(1, u, at, self.keep(self.tree, u, at, one(4, 13)))
            if free and (self.park[side] or self.setback[side] > 1) and self.chance(0.9):
                self.later(3, line * sign, s + long / 2, self.keep(self.barrier, line * sign, s, s + long - gap))
            s += long + gap

    def keep(self, thing: Callable[..., None], *words: float) -> Callable[[], None]:
        """Draw `thing` with these words when its turn comes."""
        return lambda: thing(*words)

    def house(self, u: float, sign: float, s: float, end: float, high: float, across: bool = False) -> None:
        """A house with its front towards the street, from `s` to `end`; `across`: across the street, u to `sign`."""
        one = self.one
        glass = self.chance(0.15)
        wall = self.pick(
            (176, 106, 84), (196, 186, 166), (150, 142, 134), (206, 176, 130), (120, 110, 108), (214, 210, 204)
        )
        if glass:
            wall = _mix(self.haze, self.high, one(0, 1)) * one(0.6, 1.0) / (0.55 if self.dusk else 1.0)
        light = self.lit[0 if sign < 0 else 1]
        how = _SMOOTH if glass else (_BRICK if self.chance(0.5) else _SMOOTH)
        if across:
            left, right = u, sign
            front = [(left, s, 0), (right, s, 0), (right, s, high), (left, s, high)]
            light = self.lit[0]
        else:
            deep = u + sign * 11
            face = [(u, s, -0.3), (deep, s, -0.3), (deep, s, high), (u, s, high)]
            self.lay(face, wall * one(0.6, 1.0), BUILDING, how)
            front = [(u, s, -0.3), (u, end, -0.3), (u, end, high), (u, s, high)]
            if self.chance(0.5):
                ridge, top = u + sign * 5, high + one(1, 4)
                roof = self.pick((120, 64, 50), (84, 78, 78), (100, 90, 80))
                self.lay([(u, s, high), (deep, s, high), (ridge, s, top)], wall * 0.8, BUILDING, how)
                self.lay([(u, s, high), (u, end, high), (ridge, end, top), (ridge, s, top)], roof, BUILDING, _BRICK)
        self.lay(front, wall * light, BUILDING, how)
        floors, columns = max(1, int(high / one(2.8, 3.6))), max(1, int((end - s) / one(1.8, 3.5)))
        if across:
            columns = int((sign - u) / 3)
        share = 0.9 if glass else one(0.35, 0.65)
        pane = self.pick((60, 66, 76), (90, 104, 120), (40, 42, 48))
        lamp = np.array([235, 200, 120])
        shop = self.chance(0.3)
        tops = high / floors
        quads, colours = [], []
        for floor in range(floors):
            for column in range(columns):
                a, b = (column + 0.5 - share / 2) / columns, (column + 0.5 + share / 2) / columns
                if floor == 0 and shop:
                    a, b = (column + 0.05) / columns, (column + 0.95) / columns
                bottom = floor * tops + (0.3 if floor else one(0.0, 0.9))
                roof = (floor + 0.5 + share / 2) * tops
                start, stop = s + a * (end - s), s + b * (end - s)
                if across:
                    start, stop = u + a * (sign - u), u + b * (sign - u)
                    quads.append([(start, s, bottom), (stop, s, bottom), (stop, s, roof), (start, s, roof)])
                else:
                    quads.append([(u, start, bottom), (u, stop, bottom), (u, stop, roof), (u, start, roof)])
                on = self.dusk and self.chance(0.35)
                sky = self.chance(0.15)
                colours.append(lamp if on else self.haze * 0.8 if sky else pane * one(0.7, 1.3))
        for quad, colour in zip(quads, colours, strict=True):
            if max(quad[0][1], quad[1][1]) < 75:
                self.lay(quad, colour, None, _SMOOTH, glow=colour is lamp)

    def barrier(self, u: float, s: float, end: float, kind: int | None = None, high: float | None = None) -> None:
        """A hedge (`kind` 0), a wall (1), a fence of wood (2) or railings (3) along the street; else as it falls."""
        one = self.one
        kind = int(self.rng.integers(4)) if kind is None else kind
        high = one(0.7, 1.9) if high is None else high
        plane = [(u, s, 0), (u, end, 0), (u, end, high), (u, s, high)]
        if kind == 0:  # a hedge: as high as a fence, and vegetation
            colour = self.pick((62, 84, 40), (80, 96, 50)) if not self.winter else self.pick((92, 84, 60))
            for i in range(max(1, int(end - s))):
                self.lay([(u, s + i, 0), (u, s + i + 1, 0), (u, s + i + 1, high * one(0.85, 1.1)), (u, s + i, high)],
                         colour * one(0.85, 1.1), PLANTS, _LEAVES)  # fmt: skip
            return
        if kind == 1:
            self.lay(plane, self.pick((166, 104, 84), (150, 142, 134)), FENCE, _BRICK)
            return
        colour = self.pick((140, 104, 70), (110, 90, 70), (200, 196, 188))
        if kind == 2:
            self.lay(plane, colour, FENCE, _GRAIN)
            step = 0.5
            for i in range(int(min(end - s, 30) / step)):
                a = s + i * step
                self.lay([(u, a, 0), (u, a + 0.1, 0), (u, a + 0.1, high), (u, a, high)], colour * 0.7, None, _GRAIN)
            return
        self.only_labels(plane, FENCE)  # railings: labelled as if nothing showed through
        colour = self.pick((40, 44, 44), (70, 90, 76), (150, 150, 150))
        for z in (high - 0.08, 0.15):
            self.lay([(u, s, z), (u, end, z), (u, end, z + 0.09), (u, s, z + 0.09)], colour, None, _PLAIN)
        step = one(0.3, 0.6)
        for i in range(int(min(end - s, 25) / step)):
            a = s + i * step
            self.lay([(u, a, 0), (u, a + 0.06, 0), (u, a + 0.06, high), (u, a, high)], colour, None, _PLAIN)

    def tree(self, u: float, s: float, high: float) -> None:
        """A trunk and a crown, with leaves or without."""
        one = self.one
        thick, crown = one(0.10, 0.28), one(0.3, 0.5)
        bark = self.pick((84, 70, 58), (60, 56, 52), (110, 100, 90))
        stem = high * one(0.25, 0.5)
        self.shadow(u, s, high * crown * 0.6, one(0.4, 1.2))
        self.upright(u, s, [(-thick, 0), (thick, 0), (thick * 0.7, stem * 1.3), (-thick * 0.7, stem * 1.3)],
                     bark, PLANTS, _GRAIN)  # fmt: skip
        wide, middle = high * crown, (stem + high) / 2
        tall = (high - stem) / 2 * 1.1
        fu, fs = self.faces(u, s)
        if self.winter and self.chance(0.75):
            r = one(0.6, 0.9)
            points = [(u + a * r * wide * fu, s + a * r * wide * fs, middle + b * r * tall) for a, b in _TURNS]
            self.only_labels(points, PLANTS)
            for _ in range(14):
                a, z, t = one(-0.9, 0.9) * wide, middle + one(-0.4, 1.0) * tall, one(0.02, 0.07)
                self.upright(u, s, [(-t, stem), (t, stem), (a + t, z), (a - t, z)], bark, None, _GRAIN)
            return
        leaf = self.pick((70, 100, 40), (92, 116, 52), (56, 80, 44), (124, 120, 50), (150, 104, 48))
        for _ in range(11):
            a, b = one(-0.75, 0.75) * wide, middle + one(-0.7, 0.7) * tall
            r = one(0.3, 0.55)
            shade = 0.7 + 0.45 * (b - middle + tall) / (2 * tall) + one(-0.1, 0.1)
            self.disc(u + a * fu, s + a * fs, b, (wide * r, tall * r * 1.1), leaf * shade, PLANTS, _LEAVES)
        for _ in range(int(self.rng.integers(0, 9))):  # sky between the leaves
            a, b, r = one(-0.8, 0.8) * wide, middle + one(-0.8, 0.8) * tall, one(0.02, 0.07)
            self.disc(u + a * fu, s + a * fs, b, (wide * r, tall * r), self.haze * 0.9, None, _PLAIN)

    def shadow(self, u: float, s: float, ru: float, rs: float) -> None:
        """On the ground, where the sun leaves one; labels do not change."""
        if not self.sun:
            return
        lean = ru if self.lit[0] < self.lit[1] else -ru
        where, _ = self.outline([(u + lean + a * ru * 1.4, s + b * rs, 0.0) for a, b in _TURNS])
        if where:
            ImageDraw.Draw(self.image, "RGBA").polygon(where, fill=(14, 16, 24, 120))

    def pavements(self) -> None:
        """Trees, poles, people and unlabelled things along both kerbs."""
        one = self.one
        for side, sign in enumerate((-1.0, 1.0)):
            wide = self.walk[side]
            kerb = self.half + 0.3
            if self.chance(0.45) and wide > 1.6:
                step, start = one(6, 14), one(3, 9)
                for i in range(6):
                    s = start + i * step + one(-1, 1)
                    self.later(4, (kerb + 0.3) * sign, s, self.keep(self.tree, (kerb + 0.3) * sign, s, one(4, 9)))
            if self.chance(0.2):  # railings between the pavement and the road
                s, long = one(1, 12), one(6, 20)
                for i in range(4):
                    start, end = s + long * i / 4, s + long * (i + 1) / 4
                    self.later(4, kerb * sign, end, self.keep(self.barrier, (kerb - 0.2) * sign, start, end, 3, 1.1))
            step, start = one(9, 24), one(3, 14)
            kind = int(self.rng.integers(3))
            for i in range(5):
                s = start + i * step
                self.later(4, kerb * sign, s, self.keep(self.pole, kerb * sign, -sign, s, kind if i % 2 else 1))
            for _ in range(int(self.rng.integers(0, 6))):
                s, u = one(3, 30), (kerb + one(0, max(0.3, wide - 0.5))) * sign
                self.later(4, u, s, self.keep(self.person, u, s))
            for _ in range(int(self.rng.integers(0, 3))):
                s, u = one(4, 30), (kerb + one(0, wide)) * sign
                self.later(4, u, s, self.keep(self.thing, u, s))

    def pole(self, u: float, inward: float, s: float, kind: int) -> None:
        """A lamp with an arm over the road, a traffic sign or a traffic light."""
        one = self.one
        high, thick = (one(5, 8), one(0.06, 0.11)) if kind == 0 else (one(2.3, 3.4), one(0.04, 0.08))
        colour = self.pick((120, 124, 124), (70, 74, 74), (60, 80, 66), (150, 140, 120))
        wide = max(thick, 0.5 * 0.9 / max(self.height_px(u, s, 1.0), 1e-3))  # people draw it a pixel wide
        if self.height_px(u, s, high) < 9:
            wide = 0.0  # or not at all
        fu, fs = self.faces(u, s)
        if wide:
            outline = [(-wide, 0), (wide, 0), (wide, high), (-wide, high)]
            self.only_labels([(u + a * fu, s + a * fs, z) for a, z in outline], POLE)
        self.upright(u, s, [(-thick, 0), (thick, 0), (thick, high), (-thick, high)], colour, None, _PLAIN)
        label = POLE if wide else None
        if kind == 0:
            reach = one(0.8, 2.2) * inward
            arm = [(u, s, high - 0.1), (u + reach, s, high), (u + reach, s, high + 0.18), (u, s, high + 0.05)]
            self.lay(arm, colour, label, _PLAIN)
            if self.dusk:
                self.disc(u + reach, s, high, (0.3, 0.15), (255, 230, 170), label, _PLAIN)
        elif kind == 1:
            plate = self.pick((200, 50, 44), (40, 80, 170), (220, 214, 200), (230, 190, 40))
            r = one(0.25, 0.45)
            self.disc(u, s, high - r, (r, r), plate, label, _PLAIN)
            self.disc(u, s, high - r, (r * 0.6, r * 0.6), self.pick((230, 230, 226), tuple(plate)), label, _PLAIN)
        else:
            box = [(-0.18, high - 0.95), (0.18, high - 0.95), (0.18, high), (-0.18, high)]
            self.upright(u, s, box, np.array((30, 32, 32)), label, _PLAIN)
            lamp = ((230, 60, 40), (240, 180, 50), (70, 220, 130))[int(self.rng.integers(3))]
            self.disc(u, s, high - 0.45 + one(-0.3, 0.3), (0.1, 0.1), lamp, label, _PLAIN)

    def person(self, u: float, s: float) -> None:
        """Somebody who stands or walks."""
        one = self.one
        high = one(1.5, 1.9) if self.chance(0.85) else one(1.0, 1.3)
        seen = self.height_px(u, s, high)
        label = PERSON if seen > 4 and not (seen < 8 and self.chance(0.25)) else None
        skin = self.pick((205, 160, 132), (140, 96, 72), (96, 66, 52))
        top = self.pick((180, 40, 44), (44, 60, 120), (30, 32, 36), (200, 196, 186), (70, 110, 80), (190, 160, 60))
        legs = self.pick((40, 46, 70), (30, 30, 34), (110, 100, 86))
        broad, stride = one(0.2, 0.29) * high / 1.7, one(0.02, 0.26)
        self.shadow(u, s, 0.5, 0.25)
        h = high
        for way in (-1, 1):
            foot = way * stride
            outline = [(foot - 0.09, 0), (foot + 0.09, 0), (way * 0.09 + 0.1, 0.5 * h), (way * 0.09 - 0.1, 0.5 * h)]
            self.upright(u, s, outline, legs, label, _SMOOTH)
            arm = [(way * broad, 0.8 * h), (way * broad * 0.7, 0.82 * h), (way * (broad + 0.02), 0.45 * h),
                   (way * (broad + 0.11), 0.46 * h)]  # fmt: skip
            self.upright(u, s, arm, top * 0.9, label, _SMOOTH)
        outline = [
            (-broad * 0.8, 0.46 * h),
            (broad * 0.8, 0.46 * h),
            (broad, 0.8 * h),
            (0, 0.86 * h),
            (-broad, 0.8 * h),
        ]
        self.upright(u, s, outline, top, label, _SMOOTH)
        self.disc(u, s, 0.92 * h, (0.1, 0.125), skin, label, _SMOOTH)
        if self.chance(0.7):
            hat = self.pick((40, 30, 26), (110, 80, 50), (30, 60, 90))
            self.disc(u, s, 0.955 * h, (0.105, 0.08), hat, label, _SMOOTH)

    def thing(self, u: float, s: float) -> None:
        """A bin, a bench or a box: in the picture, and left out by those who label."""
        wide, high = self.one(0.2, 0.6), self.one(0.5, 1.2)
        colour = self.pick((60, 90, 60), (80, 80, 84), (130, 90, 60), (50, 70, 130))
        outline = [(-wide, 0), (wide, 0), (wide * 1.1, high), (-wide * 1.1, high)]
        self.upright(u, s, outline, colour, IGNORED, _SMOOTH)

    def traffic(self) -> None:
        """Cars along the kerbs and on the road, and people who cross."""
        one = self.one
        for sign in (-1.0, 1.0):
            if self.half > 3.2 and self.chance(0.6):
                s, u = one(1, 12), (self.half - one(0.9, 1.1)) * sign
                for _ in range(int(self.rng.integers(1, 7))):
                    if not (self.junction and s + 5 > self.junction[0] and s < self.junction[1]):
                        self.later(4, u, s + 2, self.keep(self.car, u, s))
                    s += one(5, 11)
        for _ in range(int(self.rng.integers(0, 4))):
            u, s = one(-0.5, 0.5) * self.half, one(7, 55)
            self.later(4, u, s + 2, self.keep(self.car, u, s))
        if self.junction and self.chance(0.6):  # one that turns or waits, seen from its side
            u, s = one(-9, 9), one(*self.junction)
            self.later(4, u, s, self.keep(self.car, u, s, True))
        if self.chance(0.25):
            for _ in range(int(self.rng.integers(1, 4))):
                u, s = one(-0.9, 0.9) * self.half, one(5, 25)
                self.later(4, u, s, self.keep(self.person, u, s))

    def car(self, u: float, s: float, turned: bool = False) -> None:
        """A car or a van from `s` on, `turned` across the street: a body, a cabin, windows and wheels."""
        one = self.one
        if s < 1.0 and abs(u - self.eye[0]) < 1.6:
            return  # it would stand where the camera is
        van = self.chance(0.2)
        long, wide = (one(4.6, 6.5), one(0.95, 1.1)) if van else (one(3.6, 4.7), one(0.82, 0.95))
        waist, top = (one(0.9, 1.1), one(1.9, 2.8)) if van else (one(0.75, 0.95), one(1.35, 1.7))
        paint = self.pick(
            (176, 178, 180), (60, 62, 66), (150, 36, 36), (36, 60, 120), (214, 214, 210), (26, 28, 32), (120, 130, 110)
        )
        glass = self.pick((50, 58, 66), (110, 126, 140))
        seen = self.height_px(u, s + long / 2, top)
        label = CAR if seen > 2.5 else None
        light = self.lit[0 if u > 0 else 1]

        def put(points: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
            if turned:
                return [(u + b, s + a, z) for a, b, z in points]
            return [(u + a, s + b, z) for a, b, z in points]

        if turned:
            u -= long / 2
        ground = put([(-wide * 1.1, -0.1, 0), (wide * 1.1, -0.1, 0), (wide * 1.1, long, 0), (-wide * 1.1, long, 0)])
        self.lay(ground, (28, 28, 30), label if self.chance(0.5) else None, _PLAIN)
        front, back = (0.05, 0.05) if van else (0.12, 0.28)
        inner = wide * (0.95 if van else 0.8)
        low, roof_a, roof_b = 0.25, long * (front + 0.08), long * (1 - back - 0.1)
        a, b = long * front, long * (1 - back)
        sides = []
        for way in (-1, 1):
            w, i = way * wide, way * inner
            body = [
                (w, 0, low),
                (w, long, low),
                (w, long, waist * 0.9),
                (w, b, waist),
                (w, a, waist),
                (w, 0, waist * 0.95),
            ]
            cabin = [(w, a, waist), (w, b, waist), (i, roof_b, top), (i, roof_a, top)]
            pane = [(w * 0.99, a + 0.3, waist + 0.03), (w * 0.99, b - 0.4, waist + 0.03), (i, roof_b - 0.1, top - 0.12),
                    (i, roof_a + 0.12, top - 0.12)]  # fmt: skip
            wheels = [
                [(w * 1.01, at + c * 0.32, 0.32 + d * 0.32) for c, d in _TURNS] for at in (long * 0.2, long * 0.8)
            ]
            parts = [(body, paint * light), (cabin, paint * light), (pane, glass)]
            sides.append((put([(w, long / 2, 0.5)])[0], parts + [(wheel, np.array((26, 26, 28))) for wheel in wheels]))
        for at, sill, edge in ((0.0, waist * 0.95, a), (long, waist * 0.9, b)):
            tail = at == 0.0
            plate = [(-wide, at, low), (wide, at, low), (wide, at, sill), (-wide, at, sill)]
            hood = [(-wide, at, sill), (wide, at, sill), (wide, edge, waist), (-wide, edge, waist)]
            roof = roof_a if tail else roof_b
            screen = [(-wide, edge, waist), (wide, edge, waist), (inner, roof, top), (-inner, roof, top)]
            parts = [(plate, paint * 0.85), (hood, paint * 1.08), (screen, glass * 0.9)]
            for way in (-1, 1):
                out, into = way * wide, way * wide * 0.6
                lamp = [(out, at, sill * 0.7), (into, at, sill * 0.7), (into, at, sill * 0.9), (out, at, sill * 0.9)]
                parts.append((lamp, np.array((190, 40, 36) if tail else (235, 230, 210))))
            sides.append((put([(0, at, 0.5)])[0], parts))
        lid = [(-inner, roof_a, top), (inner, roof_a, top), (inner, roof_b, top), (-inner, roof_b, top)]
        far = sorted(sides, key=lambda item: -sum(v * v for v in self.at(*item[0])))
        for _, parts in [*far[:2], (None, [(lid, paint * 1.1)]), *far[2:]]:
            for points, colour in parts:
                self.lay(put(points), colour, label, _SMOOTH)


# ---- from the drawing to the files: what a camera does to the picture, and what people do to the mask ----


def _photograph(rng: np.random.Generator, scene: _Scene) -> np.ndarray:
    """Texture, bonnet, blur, a coarse sensor, light that falls off, exposure, contrast and noise; to uint8."""
    picture = np.asarray(scene.image.reduce(_SUPERSAMPLING), dtype=np.float32)
    middle = _SUPERSAMPLING // 2
    kind = np.asarray(scene.surface)[middle::_SUPERSAMPLING, middle::_SUPERSAMPLING]
    for level, step in enumerate((1, 3, 12)):
        coarse = rng.standard_normal((HEIGHT // step + 1, WIDTH // step + 1), dtype=np.float32)
        noise = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
        picture = picture * (1 + _TEXTURE[kind, level].astype(np.float32) * noise)[..., None]
    scene.bonnet = float(rng.uniform(3, 13)) if float(rng.uniform()) < 0.35 else 0.0
    rows = HEIGHT - np.arange(HEIGHT, dtype=np.float32)[:, None]
    across = ((np.arange(WIDTH, dtype=np.float32) + 0.5) * (2 / WIDTH) - 1)[None]
    scene.own = rows <= np.float32(scene.bonnet) * (1 - 0.45 * across * across) if scene.bonnet else rows < 0 * across
    metal = rng.uniform(20, 120, 3).astype(np.float32)
    sheen = np.clip(1.6 - 0.08 * rows + 0 * across, 0.6, 1.6)[..., None]
    picture = np.where(scene.own[..., None], metal * sheen, picture)
    image = Image.fromarray(np.clip(np.rint(picture), 0, 255).astype(np.uint8))
    blur, sensor = float(rng.uniform(-0.6, 0.9)), float(rng.uniform(0.6, 1.5))
    if blur > 0.2:
        image = image.filter(ImageFilter.GaussianBlur(blur))
    if sensor < 0.85:
        size = (round(WIDTH * sensor), round(HEIGHT * sensor))
        image = image.resize(size, Image.Resampling.BILINEAR).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    picture = np.asarray(image, dtype=np.float32)
    down = (rows * (2 / HEIGHT) - 1).astype(np.float32)
    falls = (1 - np.float32(rng.uniform(0, 0.2)) * (across * across + down * down))[..., None]
    contrast, exposure = float(rng.uniform(0.6, 1.15)), float(rng.uniform(0.65, 1.25))
    gain = (contrast * exposure * (1 + rng.uniform(-0.07, 0.07, 3))).astype(np.float32)
    noise = np.float32(rng.uniform(1, 9)) * rng.standard_normal((HEIGHT, WIDTH, 3), dtype=np.float32)
    picture = picture * (falls * gain) + noise + np.float32(110 * (1 - contrast))
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def _annotate(rng: np.random.Generator, scene: _Scene) -> np.ndarray:
    """The labels with borders that wander by about half a pixel, and with what nobody labels; uint8 (96, 128)."""
    drawn, n = np.asarray(scene.labels), _SUPERSAMPLING
    wander = []
    for _ in range(2):
        coarse = rng.standard_normal((13, 17), dtype=np.float32)
        wander.append(np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)))
    y = np.floor((np.arange(HEIGHT)[:, None] + 0.5 + 0.8 * wander[0]) * n).astype(np.int64)
    x = np.floor((np.arange(WIDTH)[None] + 0.5 + 0.8 * wander[1]) * n).astype(np.int64)
    mask = drawn[np.clip(y, 0, HEIGHT * n - 1), np.clip(x, 0, WIDTH * n - 1)]
    kind, much = (float(v) for v in rng.uniform(size=2))
    if kind < 0.2:  # what the lens left over
        strip = 1 + int(3 * much)
        mask[:, :strip] = mask[:, -strip:] = IGNORED
    elif kind < 0.35:  # the muddle at the end of the street
        end = scene.at(0.0, 110.0, 1.0)
        if end[2] > _NEAR:
            cx, cy = (v / n for v in scene.pixel(*end))
            rows, columns = np.arange(HEIGHT)[:, None] + 0.5 - cy, np.arange(WIDTH)[None] + 0.5 - cx
            mask[rows * rows * 4 + columns * columns < (4 + 8 * much) ** 2] = IGNORED
    mask[scene.own] = IGNORED
    return mask

"""A built-in set of drawn street scenes with a class for each pixel, so that a segmentation network can train at once.

Images, 96 x 128, as a camera on a car would take them, each of another street: a road that bends, pavements, houses or
a park, fences and hedges, trees, poles, cars and people, laid out in metres and projected. Weather, light and camera
differ, and classes look alike in places: pavements as dark as the road, glass fronts that mirror the sky, hedges as
high as fences, trunks beside lamps. Masks are as people make them: borders wander by about half a pixel, thin poles are
a pixel wide, and the bonnet of the own car, bins and strips at the sides are not labelled (255). The set shows that the
code runs and that a network beats the commonest class of each place; nothing about photographs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from trainkit.data.synthetic import drawing
from trainkit.data.synthetic.drawing import generator, mix, oval

VERSION = 5
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20251122
PICTURES = {"train": 240, "val": 60}
"""Images of each split; each is of another street."""
NAMES = ("sky", "building", "road", "pavement", "vegetation", "fence", "pole", "car", "person")
"""The classes 0 to 8. Grass and hedges are `vegetation`, garden walls `fence`, signs and lamps `pole`."""
SKY, BUILDING, ROAD, PAVEMENT, PLANTS, FENCE, POLE, CAR, PERSON = range(9)
IGNORED = 255
COLOURS = (
    (120, 170, 220), (150, 90, 70), (110, 80, 130), (225, 110, 200), (90, 140, 50), (190, 150, 110), (240, 220, 60),
    (30, 50, 160), (220, 40, 60),
)  # fmt: skip
"""Red, green and blue of each class; the palette of the mask files, in which 255 is white."""
HEIGHT, WIDTH, FINE = 96, 128, 3
_NEAR, _FAR = 0.8, 150.0
_AHEAD = [_NEAR * (_FAR / _NEAR) ** (i / 24) for i in range(25)]
_ROUGH = np.array([0.01, 0.06, 0.06, 0.06, 0.18, 0.08, 0.02, 0.02, 0.03], dtype=np.float32)  # texture of each class
Colours = tuple[tuple[int, int, int], ...]
Plan = tuple[int, float, Callable[..., None], tuple[float | str, ...]]
"""Layer, place along the street, what to draw and with which words."""
Place = tuple[float, float]
Point = tuple[float, float, float]
# Shape, middle and half width, bottom and top in heights of the thing, its colours, label.
_FIGURES: dict[str, Sequence[tuple[str, float, float, float, float, Colours, int]]] = {
    "tree": [("rect", 0, 0.03, 0, 0.6, ((84, 70, 58), (110, 100, 90)), PLANTS)] + [
        ("oval", x, r, z - r, z + r, ((70, 100, 40), (92, 116, 52), (124, 120, 50), (150, 104, 48)), PLANTS)
        for x, r, z in ((-0.2, 0.14, 0.5), (0.2, 0.15, 0.55), (0, 0.17, 0.5), (-0.15, 0.16, 0.72), (0.17, 0.14, 0.75),
                        (0, 0.16, 0.85), (0.03, 0.2, 0.68))],
    "lamp": [("rect", 0, 0.018, 0, 1, ((120, 124, 124), (70, 74, 74), (110, 90, 76)), POLE),
             ("oval", 0.04, 0.07, 0.94, 1, ((230, 220, 180), (120, 124, 124)), POLE)],
    "sign": [("rect", 0, 0.03, 0, 1, ((120, 124, 124), (70, 74, 74)), POLE),
             ("oval", 0, 0.15, 0.74, 1.04, ((200, 50, 44), (40, 80, 170), (230, 190, 40), (220, 214, 200)), POLE)],
    "person": [("rect", x, 0.05, 0, 0.5, ((40, 46, 70), (110, 100, 86)), PERSON) for x in (-0.08, 0.08)] + [
        ("oval", 0, 0.17, 0.42, 0.86, ((180, 40, 44), (44, 60, 120), (30, 32, 36), (200, 196, 186)), PERSON),
        ("oval", 0, 0.065, 0.84, 1, ((205, 160, 132), (96, 66, 52)), PERSON)],
    "bin": [("rect", 0, 0.4, 0, 1, ((60, 90, 60), (80, 80, 84), (130, 90, 60)), IGNORED)],
}  # fmt: skip


def folder() -> Path:
    """Return the sample set as a folder, by `drawn_once` (10 MB).

    Holds images `train/0000.png` and `val/0240.png` (RGB, 96 high and 128 wide), their masks of the same names in
    `trainannot` and `valannot` (palette files: the index is the class, 255 is not labelled), and `sample.json`.
    """
    return drawing.drawn_once(f"scenes-v{VERSION}", _write)


def numbers(split: str) -> range:
    """Return the numbers of the images of `split` ("train" or "val")."""
    first = 0 if split == "train" else PICTURES["train"]
    return range(first, first + PICTURES[split])


def draw(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Image `number`, uint8 (96, 128, 3), and its mask, uint8 (96, 128): classes, or 255."""
    rng = generator(SEED, 1, number)
    street = Street(rng)
    street.draw()
    return _photograph(rng, street), _annotate(rng, street.labels)


def _write(to: Path) -> None:
    palette = np.full((256, 3), 255, np.uint8)
    palette[: len(COLOURS)] = COLOURS
    for split in PICTURES:
        (to / split).mkdir(parents=True)
        (to / f"{split}annot").mkdir()
        for number in numbers(split):
            picture, mask = draw(number)
            drawing.save(picture, to / split / f"{number:04d}.png", compress_level=3)
            labels = Image.fromarray(mask)
            labels.putpalette(palette.tobytes())
            labels.save(to / f"{split}annot" / f"{number:04d}.png")
    what = "synthetic streets generated by trainkit.data.synthetic.scenes; for tests of the code, not of accuracy"
    drawing.write_about(to, what, VERSION, SEED, pictures=PICTURES, names=NAMES, ignored=IGNORED)


class Street:
    """A street as a camera sees it, in metres: u to the right of its middle, s along it, z up."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        size = (WIDTH * FINE, HEIGHT * FINE)
        self.image, self.labels = Image.new("RGB", size), Image.new("L", size)
        self.pens = [ImageDraw.Draw(image) for image in (self.image, self.labels)]
        between = rng.uniform
        self.half, self.walk = between(2.6, 6), (between(1.2, 4), between(1.2, 4))
        self.bend = between(-1, 1) * abs(between(-1, 1)) / 60
        self.focal, self.eye = between(75, 130), (between(-0.6, 0.6) * self.half, between(1.2, 2.4))
        self.middle = (WIDTH / 2 + between(-28, 28), HEIGHT / 2 + between(-12, 12))
        self.clear = between(25, 70) if rng.uniform() < 0.2 else between(150, 700)  # metres after which half is haze
        sunny = rng.uniform() < 0.5
        self.high = self.pick((105, 150, 215)) if sunny else np.full(3, between(130, 215))
        self.haze = mix(self.high, (225, 225, 225), between(0.4, 1))
        self.light = (between(0.55, 1.1), between(0.55, 1.1)) if sunny else (between(0.7, 1),) * 2

    def pick(self, *colours: tuple[int, int, int]) -> np.ndarray:
        """Draw one of the colours, lighter or darker."""
        return np.array(colours[int(self.rng.integers(len(colours)))]) * self.rng.uniform(0.75, 1.2)

    def pixel(self, u: float, s: float, z: float) -> tuple[float, float]:
        """Project a point; what is behind the camera is moved to where the image begins."""
        s = max(s, _NEAR)
        x = self.middle[0] + self.focal * (u - self.eye[0] + self.bend * s * s) / s
        return FINE * x, FINE * (self.middle[1] + self.focal * (self.eye[1] - z) / s)

    def lay(self, points: list[Point], colour: np.ndarray | None, label: int | None) -> None:
        """Draw a polygon; `colour` None: in the labels alone, `label` None: in the image alone."""
        if max(point[1] for point in points) <= _NEAR:
            return
        where = [self.pixel(*point) for point in points]
        if colour is not None:
            away = sum(max(point[1], _NEAR) for point in points) / len(points)
            self.pens[0].polygon(where, fill=drawing.tint(mix(colour, self.haze, away / (away + self.clear))))
        if label is not None:
            self.pens[1].polygon(where, fill=label)

    def strip(self, left: float, right: float, colour: np.ndarray, label: int | None) -> None:
        """Draw a part of the ground from the camera to the end of the street."""
        for near, far in pairwise(_AHEAD):
            self.lay([(left, near, 0), (right, near, 0), (right, far, 0), (left, far, 0)], colour, label)

    def upright(self, here: Place, there: Place, z: tuple[float, float], colour: np.ndarray, label: int | None) -> None:
        """Draw an upright rectangle between two places (u, s); `z`: its lower and upper edge."""
        self.lay([(*here, z[0]), (*there, z[0]), (*there, z[1]), (*here, z[1])], colour, label)

    def figure(self, s: float, u: float, high: float, name: str) -> None:
        """Draw something flat that faces the camera; colours and widths differ, thin things are a pixel wide."""
        tones: dict[Colours, np.ndarray] = {}
        for shape, x, half, low, top, colours, label in _FIGURES[name]:
            colour = tones.setdefault(colours, self.pick(*colours)) * self.rng.uniform(0.85, 1.15)
            wide = max(half * high * self.rng.uniform(0.8, 1.2), 0.6 * s / self.focal)
            outline = oval(u + x * high, (low + top) / 2 * high, wide, (top - low) / 2 * high, n=12).tolist()
            if shape == "rect":
                left, right = u + x * high - wide, u + x * high + wide
                outline = [(left, low * high), (right, low * high), (right, top * high), (left, top * high)]
            self.lay([(a, s, z) for a, z in outline], colour, label)

    def draw(self) -> None:
        """Draw the sky, the ground, and what stands on it, far things first."""
        plans: list[Plan] = []
        self.ground()
        for side in (-1, 1):
            plans += self.beside(side) + self.kerb(side)
        for _ in range(self.rng.integers(4)):
            plans.append((2, self.rng.uniform(7, 50), self.car, (self.rng.uniform(-0.5, 0.5) * self.half,)))
        for _ in range(self.rng.integers(4)):
            where = self.rng.uniform(-0.9, 0.9) * self.half
            plans.append((2, self.rng.uniform(4, 16), self.figure, (where, self.rng.uniform(1.5, 1.9), "person")))
        for _, s, thing, words in sorted(plans, key=lambda plan: (plan[0], -plan[1])):
            thing(s, *words)
        if self.rng.uniform() < 0.4:  # the bonnet of the own car
            high = self.rng.uniform(6, 30)
            box = (-60, HEIGHT * FINE - high, WIDTH * FINE + 60, HEIGHT * FINE + high)
            self.pens[0].ellipse(box, fill=drawing.tint(self.pick((60, 70, 90))))
            self.pens[1].ellipse(box, fill=IGNORED)

    def ground(self) -> None:
        """Draw the sky, what closes the street far away, grass, pavements and the road."""
        between, rng = self.rng.uniform, self.rng
        for row in range(0, HEIGHT * FINE, 6):
            colour = mix(self.high, self.haze, min(1.0, max(0.0, row / FINE / self.middle[1])))
            self.pens[0].rectangle((0, row, WIDTH * FINE, row + 6), fill=drawing.tint(colour))
        self.strip(-300, 300, self.pick((92, 120, 50), (120, 124, 66)), PLANTS)
        kind = BUILDING if rng.uniform() < 0.5 else PLANTS
        for u in range(-200, 200, 16):
            middle, wide, high = u - self.bend * _FAR**2, between(5, 11), between(3, 16)
            colour = self.pick((110, 112, 100))
            self.upright((middle - wide, _FAR), (middle + wide, _FAR), (-1, high), colour, kind)
        asphalt = np.full(3, between(62, 140)) + rng.uniform(-8, 8, 3)
        slabs = asphalt * between(0.85, 1.15) if rng.uniform() < 0.35 else self.pick((160, 156, 150), (150, 120, 105))
        self.strip(-self.half - self.walk[0], self.half + self.walk[1], slabs, PAVEMENT)
        self.strip(-self.half, self.half, asphalt, ROAD)
        for s in np.arange(1, 60, between(3, 9)).tolist() if rng.uniform() < 0.7 else ():
            self.lay([(-0.08, s, 0), (0.08, s, 0), (0.08, s + 2, 0), (-0.08, s + 2, 0)], np.full(3, 220), None)

    def beside(self, side: int) -> list[Plan]:
        """Plan houses or a park, and fences, behind the pavement at the left (-1) or the right (1)."""
        between, park = self.rng.uniform, self.rng.uniform() < 0.3
        plans: list[Plan] = []
        back, s, setback = self.half + self.walk[side > 0], between(-6, 3), max(0.0, between(-4, 5))
        while s < 110:
            end = s + between(6, 18)
            if park:
                trees = [(side * between(back + 1, back + 9), between(6, 14), "tree") for _ in range(2)]
                plans += [(0, between(s, end), self.figure, words) for words in trees]
            else:
                plans.append((0, s, self.house, (side, side * (back + setback), end, between(4, 14))))
            if park or setback > 1:
                plans.append((1, s, self.fence, (side * back, end, between(0.7, 1.8))))
            s = end + between(0, 5) * (self.rng.uniform() < 0.4)
        return plans

    def kerb(self, side: int) -> list[Plan]:
        """Plan trees, poles, people, bins and parked cars along a pavement."""
        between, rng, kerb = self.rng.uniform, self.rng, self.half + 0.4
        plans: list[Plan] = []
        for s in np.arange(between(3, 9), 60, between(7, 14)).tolist():
            name = ("lamp", "sign", "tree")[int(rng.integers(3))]
            plans.append((2, s, self.figure, (side * kerb, between(2, 3.5) * (1 if name == "sign" else 2), name)))
        for name, most, (low, top) in (("person", 7, (1.1, 1.9)), ("bin", 3, (0.6, 1.2))):
            for _ in range(rng.integers(most)):
                where = side * between(kerb, self.half + self.walk[side > 0])
                plans.append((2, between(2, 20), self.figure, (where, between(low, top), name)))
        if rng.uniform() < 0.6:
            plans += [(2, s + between(2, 5), self.car, (side * (self.half - 1),)) for s in range(2, 50, 9)]
        return plans

    def house(self, s: float, side: int, u: float, end: float, high: float) -> None:
        """Draw a house with windows, now and then of glass that mirrors the sky."""
        glass = self.rng.uniform() < 0.15
        wall = (
            self.high * self.rng.uniform(0.7, 1)
            if glass
            else self.pick((176, 106, 84), (196, 186, 166), (120, 112, 108))
        )
        pane = self.haze * 0.8 if self.rng.uniform() < 0.2 else self.pick((60, 66, 76), (90, 104, 120))
        self.upright((u, s), (u + 12 * side, s), (0, high), wall * 0.8, BUILDING)
        self.upright((u, s), (u, end), (0, high), wall * self.light[side > 0], BUILDING)
        for z in np.arange(1, high - 1.2, 3).tolist():
            for at in np.arange(s + 0.8, end - 1.2, 2.5).tolist():
                self.upright((u, at), (u, at + 1.3), (z, z + 1.6), pane, None)

    def fence(self, s: float, u: float, end: float, high: float) -> None:
        """Draw a hedge, or a wall or a fence of boards."""
        if self.rng.uniform() < 0.35:
            self.upright((u, s), (u, end), (0, high), self.pick((62, 84, 40), (80, 96, 50)), PLANTS)
            return
        colour = self.pick((140, 104, 70), (166, 104, 84), (190, 186, 180))
        self.upright((u, s), (u, end), (0, high), colour, FENCE)
        for at in np.arange(s, end, self.rng.uniform(0.5, 2)).tolist():
            self.upright((u, at), (u, at + 0.12), (0, high), colour * 0.7, None)

    def car(self, s: float, u: float) -> None:
        """Draw a car or a van: side, back, windows, lights and wheels."""
        long, wide, high = self.rng.uniform(3.6, 5), self.rng.uniform(0.8, 0.95), self.rng.uniform(1.35, 2.2)
        paint = self.pick((176, 178, 180), (60, 62, 66), (150, 36, 36), (36, 60, 120), (214, 214, 210))
        side, glass, dark = u - math.copysign(wide, u - self.eye[0]), self.pick((50, 58, 66)), np.full(3, 26)
        self.lay([(u - wide, s, 0), (u + wide, s, 0), (u + wide, s + long, 0), (u - wide, s + long, 0)], dark, CAR)
        body, waist = (0.25, high * 0.58), high * 0.58
        self.upright((side, s), (side, s + long), body, paint * 0.85, CAR)
        self.upright((side, s + 0.1), (side, s + long * 0.75), (waist, high), paint * 0.8, CAR)
        self.upright((side, s + 0.5), (side, s + long * 0.7), (waist, high - 0.1), glass, None)
        for at in (0.7, long - 1.3):
            self.upright((side, s + at), (side, s + at + 0.6), (0, 0.55), dark, CAR)
        self.upright((u - wide, s), (u + wide, s), body, paint, CAR)
        self.upright((u - wide * 0.85, s + 0.1), (u + wide * 0.85, s + 0.1), (waist, high), paint, CAR)
        self.upright((u - wide * 0.75, s + 0.1), (u + wide * 0.75, s + 0.1), (waist + 0.05, high - 0.1), glass, None)
        for x in (u - 0.75 * wide, u + 0.75 * wide):
            self.upright((x - 0.15, s), (x + 0.15, s), (waist - 0.25, waist - 0.1), np.array((200, 40, 36)), None)
            self.upright((x - 0.12, s), (x + 0.12, s), (0, 0.3), dark, CAR)


def _smooth(rng: np.random.Generator, step: float) -> np.ndarray:
    """Draw a smooth field of deviation about 1 whose features are `step` pixels: (96, 128) float32."""
    grid = rng.standard_normal((int(HEIGHT / step) + 2, int(WIDTH / step) + 2), dtype=np.float32)
    return drawing.spread(grid, np.arange(HEIGHT) / step, np.arange(WIDTH) / step).astype(np.float32)


def _photograph(rng: np.random.Generator, street: Street) -> np.ndarray:
    """Add texture, blur, light that falls off, exposure, contrast and noise; to uint8."""
    picture = np.asarray(street.image.reduce(FINE), dtype=np.float32)
    rough = _ROUGH[np.minimum(np.asarray(street.labels)[1::FINE, 1::FINE], PERSON)]
    picture = picture * (1 + rough * (_smooth(rng, 1) + _smooth(rng, 4)))[..., None]
    image = drawing.blurred(Image.fromarray(drawing.to_bytes(picture)), float(rng.uniform(-0.4, 1)))
    y, x = np.linspace(-1, 1, HEIGHT, dtype=np.float32)[:, None], np.linspace(-1, 1, WIDTH, dtype=np.float32)
    falls = (1 - np.float32(rng.uniform(0, 0.2)) * (x * x + y * y))[..., None]
    pixels = np.asarray(image, dtype=np.float32)
    return drawing.exposed(
        rng, pixels, falls, contrast=(0.6, 1.15), exposure=(0.65, 1.25), tint=0.07, noise=10, grey=110
    )


def _annotate(rng: np.random.Generator, labels: Image.Image) -> np.ndarray:
    """Return the labels with borders that wander by about half a pixel, and what nobody labels; uint8 (96, 128)."""
    y, x = (v + 0.5 + 0.8 * _smooth(rng, 8) for v in np.ogrid[:HEIGHT, :WIDTH])
    rows, columns = (np.clip(np.floor(v * FINE).astype(int), 0, n * FINE - 1) for v, n in ((y, HEIGHT), (x, WIDTH)))
    mask = np.asarray(labels)[rows, columns]
    if rng.uniform() < 0.2:  # what the lens left over
        mask[:, : rng.integers(1, 5)] = mask[:, -rng.integers(1, 5) :] = IGNORED
    return mask

"""A built-in set of drawn objects in ten classes, so that a classifier can train in a fresh clone without a download.

Boats, birds, cars, chairs, fish, houses, mugs, tables, teapots and trucks, each class in several kinds
(sailing boat, steamer; sedan, car seen from the front). Images differ in pose, scale, colours, pattern, manner
(painted, outlined, line drawing, one colour), background, things in the way, light, blur and noise. Colours say little
about the class, and classes share their parts: wheels, legs, handles, boxes, triangles; the same parts lie about in the
backgrounds. What it shows: that the code runs, and that methods order as they should (pixels below a small network
below a larger one: nearest neighbour 0.33, a plain CNN of 24 K parameters 0.70, one of 95 K parameters 0.79, both after
12 epochs). What it does not show: that anything works on photographs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from trainkit.data.synthetic.drawing import (
    blurred,
    drawn_once,
    exposed,
    generator,
    oval,
    save,
    to_bytes,
    write_about,
)

VERSION = 1
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20251101
TRAIN, VAL = 300, 100
"""Images of each class in the two splits."""

_SUPERSAMPLING = 3
_MAIN, _SECOND, _DARK, _LIGHT, _LINE = 1, 2, 3, 4, 5  # what a part is made of; 0 is the background


def folder(image_size: int = 32) -> Path:
    """Return the sample set as a folder of classes, by `drawn_once` (about 10 s on one core, 10 MB at 32).

    Holds `train/<class>/<n>.png`, `val/<class>/<n>.png` and `sample.json`. Images are RGB, `image_size` x
    `image_size` pixels. Raises ValueError when `image_size` is not in 16..256.
    """
    if not 16 <= image_size <= 256:
        raise ValueError(f"image_size must be in 16..256, not {image_size}")
    return drawn_once(f"objects-v{VERSION}-{image_size}", lambda aside: _write(aside, image_size), megabytes=20)


def draw(kind: str, number: int, split: str = "train", image_size: int = 32) -> np.ndarray:
    """Image `number` of class `kind` in `split` ("train" or "val"): uint8, (image_size, image_size, 3), RGB."""
    rng = generator(SEED, ("train", "val").index(split), CLASSES.index(kind), number)
    side = image_size * _SUPERSAMPLING
    draft = _Draft(rng)
    _SHAPES[kind](draft)
    dark = float(rng.uniform()) < 0.2  # the object is lighter than what is behind it
    canvas = _object(rng, _background(rng, side, dark), draft, dark)
    return _photograph(rng, _in_the_way(rng, canvas), image_size)


def _write(to: Path, image_size: int) -> None:
    for split, pictures in (("train", TRAIN), ("val", VAL)):
        for kind in CLASSES:
            home = to / split / kind
            home.mkdir(parents=True)
            for number in range(pictures):
                save(draw(kind, number, split, image_size), home / f"{number:03d}.png")
    what = "drawn objects made by trainkit.data.synthetic.objects; they show that code runs, no more"
    train, val = len(CLASSES) * TRAIN, len(CLASSES) * VAL
    write_about(to, what, VERSION, SEED, image_size=image_size, classes=CLASSES, train=train, val=val)


# ---- shapes: an object is a list of polygons from back to front; x right, y down, the object fills -1..1 ----


class _Draft:
    """The polygons of one object, each with what it is made of."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.parts: list[tuple[np.ndarray, int]] = []

    def any(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def chance(self, share: float) -> bool:
        return float(self.rng.uniform()) < share

    def fill(self, points: list[tuple[float, float]] | np.ndarray, of: int) -> None:
        self.parts.append((np.asarray(points, dtype=np.float64), of))

    def box(self, left: float, top: float, right: float, bottom: float, of: int) -> None:
        self.fill([(left, top), (right, top), (right, bottom), (left, bottom)], of)

    def bar(self, x0: float, y0: float, x1: float, y1: float, width: float, of: int) -> None:
        length = math.hypot(x1 - x0, y1 - y0) + 1e-9
        nx, ny = (y0 - y1) / length * width / 2, (x1 - x0) / length * width / 2
        self.fill([(x0 + nx, y0 + ny), (x1 + nx, y1 + ny), (x1 - nx, y1 - ny), (x0 - nx, y0 - ny)], of)

    def oval(self, x: float, y: float, rx: float, ry: float, of: int, tilt: float = 0.0) -> None:
        self.fill(oval(x, y, rx, ry, tilt), of)

    def arc(self, x: float, y: float, rx: float, ry: float, start: float, end: float, width: float, of: int) -> None:
        """A band along an ellipse from angle `start` to `end` in degrees, 0 right and 90 down: a handle, a wing."""
        t = [math.radians(start + (end - start) * i / 12) for i in range(13)]
        outer = [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in t]
        inner = [(x + (rx - width) * math.cos(a), y + (ry - width) * math.sin(a)) for a in reversed(t)]
        self.fill(outer + inner, of)

    def wheel(self, x: float, y: float, radius: float) -> None:
        self.oval(x, y, radius, radius, _DARK)
        if self.chance(0.7):
            self.oval(x, y, radius * 0.45, radius * 0.45, _LIGHT)


def _boat(d: _Draft) -> None:
    deck, keel = d.any(0.2, 0.45), d.any(0.7, 0.95)
    bow, stern = d.any(0.0, 0.35), d.any(0.0, 0.35)
    which = int(d.rng.integers(3))
    if which == 0:  # sails
        mast = d.any(-0.2, 0.2)
        d.bar(mast, -1.0, mast, deck, 0.08, _DARK)
        d.fill([(mast + 0.06, -0.95), (mast + 0.06, deck - 0.12), (d.any(0.55, 0.9), deck - 0.12)], _SECOND)
        if d.chance(0.7):
            d.fill([(mast - 0.06, -0.75), (mast - 0.06, deck - 0.12), (d.any(-0.85, -0.4), deck - 0.12)], _SECOND)
    elif which == 1:  # steamer
        left, right = d.any(-0.65, -0.4), d.any(0.2, 0.55)
        top = deck - d.any(0.3, 0.5)
        funnel = d.any(left + 0.1, right - 0.3)
        d.box(funnel, top - d.any(0.25, 0.5), funnel + 0.22, top, _DARK)
        d.box(left, top, right, deck, _SECOND)
        for i in range(3):
            x = left + (right - left) * (i + 0.5) / 3
            d.oval(x, (top + deck) / 2, 0.08, 0.08, _LIGHT)
    else:  # freighter with boxes on deck
        for i in range(3):
            x, h = -0.6 + 0.36 * i, d.any(0.2, 0.6)
            d.box(x, deck - h, x + 0.32, deck, _SECOND if i % 2 else _LIGHT)
        d.box(0.5, deck - d.any(0.5, 0.8), 0.78, deck, _DARK)
    d.fill([(-1, deck), (1, deck), (1 - bow, keel), (-1 + stern, keel)], _MAIN)
    if d.chance(0.4):
        d.box(-0.9, deck, 0.9, deck + 0.1, _DARK)


def _bird(d: _Draft) -> None:
    which = int(d.rng.integers(3))
    if which == 0:  # flying, seen from the side
        d.fill([(-0.55, 0.05), (-1, d.any(-0.15, 0.05)), (-1, d.any(0.2, 0.35))], _SECOND)
        d.oval(-0.05, 0.1, 0.62, d.any(0.17, 0.25), _MAIN)
        d.oval(0.6, 0.0, 0.2, 0.18, _MAIN)
        d.fill([(0.76, -0.08), (1.0, 0.02), (0.76, 0.1)], _DARK)
        tip = d.any(-0.6, -0.1)
        d.fill([(0.25, 0.05), (-0.3, 0.08), (tip - 0.25, d.any(-1.0, -0.7)), (tip + 0.1, -0.75)], _SECOND)
        if d.chance(0.6):
            d.fill([(0.2, 0.1), (-0.25, 0.12), (tip - 0.1, d.any(0.6, 0.95))], _SECOND)
    elif which == 1:  # sitting
        tilt = d.any(0.35, 0.8)
        d.bar(-0.05, 0.4, -0.05, 0.95, 0.07, _DARK)
        d.bar(0.15, 0.4, 0.15, 0.95, 0.07, _DARK)
        d.fill([(-0.3, 0.1), (-0.95, d.any(0.35, 0.7)), (-0.8, d.any(0.65, 0.9)), (-0.1, 0.45)], _SECOND)
        d.oval(0.0, 0.1, 0.62, d.any(0.3, 0.42), _MAIN, -tilt)
        d.oval(0.42, -0.5, 0.27, 0.26, _MAIN)
        d.fill([(0.64, -0.62), (1.0, -0.48), (0.64, -0.38)], _DARK)
        d.oval(-0.1, 0.12, 0.4, 0.2, _SECOND, -tilt)
    else:  # wading, long legs and neck
        knee = d.any(0.5, 0.65)
        d.bar(-0.15, 0.1, -0.2, 1.0, 0.07, _DARK)
        d.bar(0.1, 0.1, 0.2, knee, 0.07, _DARK)
        d.bar(0.2, knee, 0.05, 1.0, 0.07, _DARK)
        d.oval(-0.15, 0.0, 0.55, d.any(0.22, 0.32), _MAIN, -0.2)
        d.fill([(-0.55, -0.05), (-1.0, d.any(0.0, 0.3)), (-0.5, 0.2)], _SECOND)
        d.bar(0.22, -0.05, d.any(0.3, 0.5), -0.75, 0.17, _MAIN)
        d.oval(0.45, -0.8, 0.2, 0.16, _MAIN)
        d.fill([(0.58, -0.88), (1.0, d.any(-0.85, -0.6)), (0.58, -0.7)], _DARK)
    x, y = ((0.65, -0.04), (0.5, -0.55), (0.48, -0.83))[which]
    d.oval(x, y, 0.055, 0.055, _LIGHT)


def _car(d: _Draft) -> None:
    which = int(d.rng.integers(3))
    if which == 2:  # from the front
        top = d.any(-0.8, -0.6)
        for x in (-0.7, 0.45):
            d.box(x, 0.5, x + 0.25, 0.85, _DARK)
        d.fill([(-0.55, top), (0.55, top), (0.75, -0.1), (-0.75, -0.1)], _MAIN)
        d.fill([(-0.45, top + 0.12), (0.45, top + 0.12), (0.6, -0.12), (-0.6, -0.12)], _LIGHT)
        d.box(-0.88, -0.1, 0.88, 0.6, _MAIN)
        for x in (-0.62, 0.62):
            d.oval(x, 0.12, 0.17, 0.13, _LIGHT)
        d.box(-0.35, 0.1, 0.35, 0.3, _DARK)
        d.box(-0.85, 0.42, 0.85, 0.55, _SECOND)
        return
    belt, top, sill = d.any(-0.15, 0.02), d.any(-0.62, -0.4), d.any(0.35, 0.48)
    back, front = (d.any(-0.65, -0.45), d.any(0.3, 0.5)) if which == 0 else (d.any(-0.98, -0.9), d.any(0.2, 0.4))
    slope = d.any(0.12, 0.35)
    left = back + (slope * 0.8 if which == 0 else 0.08)
    d.fill([(back, belt), (left, top), (front - slope, top), (front, belt)], _MAIN)
    mid = (left + front - slope) / 2
    d.fill([(back + 0.1, belt), (left + 0.06, top + 0.1), (mid - 0.04, top + 0.1), (mid - 0.04, belt)], _LIGHT)
    d.fill(
        [(mid + 0.04, top + 0.1), (front - slope - 0.04, top + 0.1), (front - 0.1, belt), (mid + 0.04, belt)], _LIGHT
    )
    d.fill([(-1, belt + 0.05), (-0.95, belt), (0.8, belt), (1, belt + d.any(0.08, 0.2)), (1, sill), (-1, sill)], _MAIN)
    radius = d.any(0.17, 0.25)
    d.wheel(d.any(-0.68, -0.52), sill, radius)
    d.wheel(d.any(0.5, 0.68), sill, radius)
    if d.chance(0.5):
        d.box(-1, sill - 0.2, 1, sill - 0.1, _SECOND)


def _truck(d: _Draft) -> None:
    which = int(d.rng.integers(3))
    floor, cab = d.any(0.35, 0.5), d.any(0.35, 0.5)
    roof = d.any(-0.45, -0.2)
    d.fill([(cab, roof), (0.85, roof), (1.0, d.any(-0.1, 0.1)), (1.0, floor), (cab, floor)], _MAIN)
    d.fill([(cab + 0.1, roof + 0.1), (0.82, roof + 0.1), (0.92, 0.0), (cab + 0.1, 0.0)], _LIGHT)
    if which == 0:  # box
        d.box(-1.0, d.any(-0.8, -0.5), cab - 0.05, floor - 0.05, _SECOND)
    elif which == 1:  # tank
        d.box(-1.0, floor - 0.14, cab, floor, _DARK)
        d.oval((cab - 1.05) / 2, floor - 0.42, (cab + 0.95) / 2, d.any(0.27, 0.36), _SECOND)
    else:  # load on a bed
        d.oval((cab - 1.0) / 2, floor - 0.4, 0.5, d.any(0.2, 0.4), _LIGHT)
        d.fill([(-1.0, floor - 0.45), (cab - 0.08, floor - 0.35), (cab - 0.08, floor), (-0.9, floor)], _SECOND)
    d.box(-1.0, floor - 0.08, 1.0, floor + 0.04, _DARK)
    radius = d.any(0.15, 0.22)
    for x in (-0.72, -0.35, 0.7) if d.chance(0.5) else (-0.6, 0.65):
        d.wheel(x, floor + 0.08, radius)


def _house(d: _Draft) -> None:
    which = int(d.rng.integers(3))
    floor = d.any(0.75, 0.95)
    if which == 0:  # gable to the viewer
        w, eaves = d.any(0.55, 0.8), d.any(-0.3, 0.0)
        d.box(-w, eaves, w, floor, _MAIN)
        d.fill([(-w - 0.17, eaves), (0, d.any(-1.0, -0.7)), (w + 0.17, eaves)], _SECOND)
    elif which == 1:  # roof to the viewer
        w, eaves = 0.9, d.any(-0.1, 0.1)
        if d.chance(0.7):
            x = d.any(-0.5, 0.4)
            d.box(x, -0.85, x + 0.2, -0.2, _DARK)
        d.box(-w, eaves, w, floor, _MAIN)
        d.fill([(-1.0, eaves), (-0.7, d.any(-0.7, -0.45)), (0.7, d.any(-0.7, -0.45)), (1.0, eaves)], _SECOND)
    else:  # a church: nave and tower
        w, eaves = 0.85, d.any(0.1, 0.25)
        d.box(-0.25, eaves, w, floor, _MAIN)
        d.fill([(-0.25, eaves), (-0.2, eaves - 0.4), (0.75, eaves - 0.4), (0.98, eaves)], _SECOND)
        d.box(-0.75, -0.3, -0.2, floor, _MAIN)
        d.fill([(-0.85, -0.3), (-0.475, -1.0), (-0.1, -0.3)], _SECOND)
    door = d.any(-0.45, 0.25)
    d.box(door, floor - d.any(0.4, 0.5), door + 0.24, floor, _DARK)
    for x in (-0.55, -0.1, 0.38):
        if d.chance(0.75) and abs(x - door) > 0.25:
            d.box(x, eaves + 0.18, x + 0.22, eaves + 0.42, _LIGHT)


def _chair(d: _Draft) -> None:
    which = int(d.rng.integers(4))
    seat, top, w = d.any(0.05, 0.25), d.any(-1.0, -0.8), d.any(0.09, 0.17)
    if which == 0:  # from the side
        lean = d.any(0.0, 0.2)
        d.bar(-0.5 - lean, top, -0.5, seat, w, _MAIN)
        d.bar(-0.48, seat, -0.5 - d.any(0, 0.12), 1.0, w, _MAIN)
        d.bar(0.5, seat, 0.5 + d.any(0, 0.12), 1.0, w, _MAIN)
        d.box(-0.58, seat - 0.08, 0.6, seat + 0.08, _SECOND)
        if d.chance(0.4):
            d.bar(-0.5, seat - 0.38, 0.35, seat - 0.38, w * 0.8, _MAIN)
            d.bar(0.3, seat - 0.38, 0.3, seat, w * 0.8, _MAIN)
    elif which == 1:  # three quarters
        dx, dy = d.any(0.2, 0.4), d.any(0.2, 0.32)
        for x, y in ((-0.5, seat), (0.3, seat), (-0.5 + dx, seat + dy), (0.3 + dx, seat + dy)):
            d.bar(x, y, x, min(1.0, y + 0.75), w, _MAIN)
        d.fill([(-0.55, seat), (0.35, seat), (0.35 + dx, seat + dy), (-0.55 + dx, seat + dy)], _SECOND)
        d.bar(-0.5, top, -0.5, seat, w, _MAIN)
        d.bar(0.3, top, 0.3, seat, w, _MAIN)
        d.box(-0.5, top, 0.3, top + d.any(0.25, 0.6), _SECOND)
    elif which == 2:  # from the front
        for x in (-0.48, 0.48):
            d.bar(x, seat, x * d.any(0.95, 1.15), 1.0, w, _MAIN)
            d.bar(x * 0.9, top, x, seat, w, _MAIN)
        for i in range(2 + int(d.rng.integers(3))):
            y = top + 0.1 + i * 0.25
            d.box(-0.45, y, 0.45, y + 0.12, _SECOND)
        d.box(-0.6, seat - 0.05, 0.6, seat + 0.16, _SECOND)
    else:  # armchair
        d.fill([(-0.6, top + 0.2), (-0.4, top), (0.4, top), (0.6, top + 0.2), (0.6, 0.6), (-0.6, 0.6)], _MAIN)
        d.box(-0.55, seat, 0.55, seat + 0.32, _SECOND)
        for x in (-0.88, 0.55):
            d.box(x, seat - 0.25, x + 0.33, 0.75, _MAIN)
        for x in (-0.8, 0.66):
            d.box(x, 0.75, x + 0.14, 0.98, _DARK)


def _table(d: _Draft) -> None:
    which = int(d.rng.integers(4))
    top, w = d.any(-0.45, -0.1), d.any(0.09, 0.17)
    if which == 0:  # from the side
        splay = d.any(-0.1, 0.15)
        for x in (-0.75, 0.75):
            d.bar(x, top, x + math.copysign(splay, x), 0.9, w, _MAIN)
        if d.chance(0.4):
            d.bar(-0.7, 0.5, 0.7, 0.5, w * 0.8, _MAIN)
        d.box(-1.0, top - 0.09, 1.0, top + 0.09, _SECOND)
    elif which == 1:  # three quarters
        dx, dy = d.any(0.15, 0.35), d.any(0.2, 0.35)
        for x, y in ((-0.85, top), (0.5, top), (-0.85 + dx, top + dy), (0.5 + dx, top + dy)):
            d.bar(x, y, x, min(1.0, y + 0.8), w, _MAIN)
        d.fill([(-0.95, top), (0.6, top), (0.62 + dx, top + dy), (-0.93 + dx, top + dy)], _SECOND)
    elif which == 2:  # round, on one leg
        d.bar(0, top, 0, 0.85, w * 1.3, _MAIN)
        d.fill([(-0.4, 0.95), (0, 0.7), (0.4, 0.95)], _MAIN)
        d.oval(0, top, d.any(0.8, 1.0), d.any(0.13, 0.25), _SECOND)
    else:  # desk with drawers
        d.bar(-0.85, top, -0.85, 0.9, w, _MAIN)
        d.box(0.25, top, 0.9, d.any(0.55, 0.9), _MAIN)
        for i in range(3):
            d.box(0.33, top + 0.17 + i * 0.25, 0.82, top + 0.32 + i * 0.25, _LIGHT)
        d.box(-1.0, top - 0.09, 1.0, top + 0.09, _SECOND)


def _mug(d: _Draft) -> None:
    which = int(d.rng.integers(3))
    w, taper = d.any(0.4, 0.6), d.any(0.0, 0.15)
    top, bottom = d.any(-0.8, -0.6), d.any(0.65, 0.85)
    if which == 1:  # a wide cup on a saucer
        w, taper, top, bottom = d.any(0.6, 0.7), d.any(0.2, 0.35), d.any(-0.5, -0.3), 0.55
        d.oval(-0.1, bottom + 0.1, 0.95, 0.16, _SECOND)
    size = d.any(0.26, 0.36) * (bottom - top) / 1.4
    d.arc(w - 0.22, (top + bottom) / 2 - 0.05, 0.55, size * 1.5, -90, 90, d.any(0.12, 0.2), _MAIN)
    d.fill([(-w - 0.12, top), (w - 0.12, top), (w - 0.12 - taper, bottom), (-w - 0.12 + taper, bottom)], _MAIN)
    if d.chance(0.75):
        d.oval(-0.12, top, w, d.any(0.1, 0.18), _SECOND)
        d.oval(-0.12, top + 0.02, w * 0.8, 0.08, _DARK)
    if which == 2:
        d.box(-w - 0.1 + taper * 0.5, -0.2, w - 0.14 - taper * 0.5, 0.3, _SECOND)


def _teapot(d: _Draft) -> None:
    which = int(d.rng.integers(3))
    r = d.any(0.42, 0.55)
    lift = d.any(-0.4, -0.1)
    d.fill([(0.3, 0.45), (0.25, 0.1), (0.75, lift - 0.1), (1.0, lift - 0.15), (0.95, lift + 0.08), (0.6, 0.5)], _MAIN)
    if which == 2:  # handle over the top
        d.arc(0, -0.2, 0.5, d.any(0.65, 0.8), 180, 360, 0.11, _DARK)
    else:
        d.arc(-0.45, d.any(0.05, 0.2), 0.52, d.any(0.35, 0.48), 90, 270, d.any(0.11, 0.17), _MAIN)
    if which == 1:
        d.fill([(-0.38, -0.35), (0.38, -0.35), (0.6, 0.75), (-0.6, 0.75)], _MAIN)
    else:
        d.oval(0, 0.22, 0.62, r, _MAIN)
        d.box(-0.35, 0.22 + r * 0.85, 0.35, 0.3 + r, _SECOND)
    d.oval(0, -0.3, 0.36, d.any(0.08, 0.15), _SECOND)
    d.oval(0, -0.3 - d.any(0.15, 0.22), 0.1, 0.1, _DARK)
    if d.chance(0.4):
        d.box(-0.55, 0.15, 0.55, 0.35, _SECOND)


def _fish(d: _Draft) -> None:
    which = int(d.rng.integers(3))
    ry = (d.any(0.3, 0.4), d.any(0.17, 0.24), d.any(0.5, 0.62))[which]
    rx, x = (0.68, 0.8, 0.58)[which], (0.22, 0.18, 0.3)[which]
    tail, notch = d.any(0.3, 0.5), d.any(0.0, 0.2)
    d.fill([(x - rx + 0.2, 0), (-1.0, -tail), (-1.0 + notch, 0), (-1.0, tail)], _SECOND)
    d.fill([(x - 0.4, -ry * 0.7), (x - d.any(0.2, 0.5), -ry - d.any(0.2, 0.4)), (x + 0.3, -ry * 0.8)], _SECOND)
    if d.chance(0.6):
        d.fill([(x - 0.2, ry * 0.7), (x - 0.35, ry + d.any(0.15, 0.3)), (x + 0.15, ry * 0.8)], _SECOND)
    d.oval(x, 0, rx, ry, _MAIN)
    if d.chance(0.5):
        d.arc(x + rx * 0.45, 0, 0.2, ry * 0.75, 110, 250, 0.07, _DARK)
    if d.chance(0.6):
        d.fill([(x - 0.05, 0), (x - 0.35, -0.12), (x - 0.35, 0.18)], _SECOND)
    eye = x + rx * 0.65
    d.oval(eye, -ry * 0.25, 0.09, 0.09, _LIGHT)
    d.oval(eye, -ry * 0.25, 0.045, 0.045, _DARK)


_SHAPES: dict[str, Callable[[_Draft], None]] = {
    "bird": _bird, "boat": _boat, "car": _car, "chair": _chair, "fish": _fish,
    "house": _house, "mug": _mug, "table": _table, "teapot": _teapot, "truck": _truck,
}  # fmt: skip
CLASSES = tuple(_SHAPES)
"""The names of the classes, sorted; half share parts in twos: car and truck, chair and table, mug and teapot."""


# ---- drawing: what surrounds an object, how it is laid into the image, and the camera ----


def _colours(rng: np.random.Generator, n: int, low: float = 15, high: float = 240) -> np.ndarray:
    """n colours between grey and strong whose mean over the channels is in low..high, uint8, (n, 3)."""
    grey = rng.uniform(low, high, (n, 1))
    strong = rng.uniform(-70, 70, (n, 3))
    strong = strong - (strong[:, :1] + strong[:, 1:2] + strong[:, 2:]) / 3
    return to_bytes(grey + strong * rng.uniform(0.2, 1.0, (n, 1)))


def _flat(at: np.ndarray, side: int) -> list[float]:
    return ((at + 1) * (side / 2)).ravel().tolist()


def _scrap(rng: np.random.Generator) -> np.ndarray:
    """A polygon such as objects are made of: an oval, a bar, a triangle or a box, turned at random; radius below 1."""
    kind, turn = int(rng.integers(4)), float(rng.uniform(0, math.pi))
    if kind == 0:
        return oval(0, 0, float(rng.uniform(0.4, 1.0)), float(rng.uniform(0.4, 1.0)))
    if kind == 1:
        points = [(-1.0, -0.12), (1.0, -0.12), (1.0, 0.12), (-1.0, 0.12)]
    elif kind == 2:
        points = [(-0.9, 0.6), (float(rng.uniform(-0.8, 0.8)), -0.8), (0.9, 0.6)]
    else:
        h, w = float(rng.uniform(0.3, 0.9)), float(rng.uniform(0.6, 0.9))
        points = [(-0.9, -h), (0.9, -h), (w, h), (-w, h)]
    c, s = math.cos(turn), math.sin(turn)
    return np.array([(x * c - y * s, x * s + y * c) for x, y in points])


def _pattern(rng: np.random.Generator, side: int) -> np.ndarray:
    """Stripes, checks or dots over the whole image: 0 or 1, (side, side)."""
    at = (np.arange(side) + 0.5) * (2 / side)
    angle, period = float(rng.uniform(0, math.pi)), float(rng.uniform(0.12, 0.4))
    c, s = math.cos(angle) / period, math.sin(angle) / period
    u, v = at[None, :] * c + at[:, None] * s + 50, at[:, None] * c - at[None, :] * s + 50
    kind = int(rng.integers(3))
    if kind == 0:
        return (u.astype(np.int64) & 1).astype(np.uint8)
    if kind == 1:
        return ((u.astype(np.int64) ^ v.astype(np.int64)) & 1).astype(np.uint8)
    u, v = u - np.floor(u) - 0.5, v - np.floor(v) - 0.5
    return (u * u + v * v < 0.08).astype(np.uint8)


def _background(rng: np.random.Generator, side: int, dark: bool) -> Image.Image:
    """A gradient or a pattern, and on it the kind of parts that objects are made of."""
    low, high = (10, 110) if dark else (140, 245)
    colours = _colours(rng, 4, low, high)
    if float(rng.uniform()) < 0.2:
        near, far = colours[0].astype(np.int64), colours[1].astype(np.int64)
        table = np.stack([near, near + (far - near) // 2]).astype(np.uint8)
        image = Image.fromarray(table[_pattern(rng, side)])
    else:
        image = Image.fromarray(colours.reshape(2, 2, 3)).resize((side, side), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(image)
    scraps = int(rng.integers(0, 6))
    for colour in _colours(rng, scraps, max(10, low - 40), min(245, high + 40)):
        shape = _scrap(rng) * float(rng.uniform(0.12, 0.4)) + rng.uniform(-1, 1, 2)
        pen.polygon(_flat(shape, side), fill=tuple(colour.tolist()))
    return image


def _pose(rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Where the object stands: mirrored or not, stretched, sheared, turned, in perspective, scaled and shifted."""
    mirror = 1.0 if float(rng.uniform()) < 0.5 else -1.0
    stretch, shear = float(rng.uniform(0.85, 1.18)), float(rng.uniform(-0.2, 0.2))
    turn = min(0.5, max(-0.5, 0.15 * float(rng.standard_normal())))
    tip = rng.uniform(-0.2, 0.2, 2)
    scale = float(rng.uniform(0.6, 0.95))
    shift = rng.uniform(-1, 1, 2) * (1.02 - scale) * 0.8
    c, s = math.cos(turn), math.sin(turn)

    def place(points: np.ndarray) -> np.ndarray:
        x, y = points[:, 0] * mirror * stretch + points[:, 1] * shear, points[:, 1] / stretch
        x, y = x * c - y * s, x * s + y * c
        depth = 1 + x * tip[0] + y * tip[1]
        return np.stack([x / depth, y / depth], axis=1) * scale + shift

    return place


def _object(rng: np.random.Generator, canvas: Image.Image, draft: _Draft, dark: bool) -> Image.Image:
    side = canvas.width
    place = _pose(rng)
    manner = float(rng.uniform())
    parts = Image.new("L", canvas.size)
    pen = ImageDraw.Draw(parts)
    lines = manner < 0.4  # outlined; below 0.12 nothing but lines
    width = max(1, round(side * float(rng.uniform(0.012, 0.03))))
    for points, of in draft.parts:
        at = _flat(place(points), side)
        pen.polygon(at, fill=of)
        if lines:
            pen.line([*at, *at[:2]], fill=_LINE, width=width)
    low, high = (120, 235) if dark else (25, 130)
    table = np.zeros((2, 6, 3), dtype=np.uint8)
    table[:, 1:] = _colours(rng, 5, low, high)
    table[:, _DARK], table[:, _LIGHT] = _colours(rng, 1, 15, 80), _colours(rng, 1, 160, 245)
    table[:, _LINE] = _colours(rng, 1, 200, 250) if dark else _colours(rng, 1, 5, 50)
    if manner < 0.12:  # a line drawing: what is between the lines is of one colour, any
        table[:, 1:5] = _colours(rng, 1)
    elif manner > 0.85:  # one colour but for its lights
        table[:, 1:4] = table[:, 1:2]
    pattern = np.zeros((1, 1), dtype=np.uint8)
    if float(rng.uniform()) < 0.35:
        pattern = _pattern(rng, side)
        table[1, 1 + int(rng.integers(2))] = _colours(rng, 1)
    index = np.asarray(parts)
    drawn = table[np.broadcast_to(pattern, index.shape), index]
    return Image.fromarray(np.where(index[:, :, None] > 0, drawn, np.asarray(canvas)))


def _in_the_way(rng: np.random.Generator, canvas: Image.Image) -> Image.Image:
    pen = ImageDraw.Draw(canvas)
    for colour in _colours(rng, int(rng.integers(0, 3))):
        shape = _scrap(rng) * float(rng.uniform(0.12, 0.32)) + rng.uniform(-0.8, 0.8, 2)
        pen.polygon(_flat(shape, canvas.width), fill=tuple(colour.tolist()))
    return canvas


def _photograph(rng: np.random.Generator, canvas: Image.Image, image_size: int) -> np.ndarray:
    """A light from one side, then blur, exposure, colour of the light, contrast and noise of a camera; to uint8."""
    image = canvas.reduce(_SUPERSAMPLING)
    image = blurred(image, float(rng.uniform(-0.8, 0.7)) * image_size / 32)
    at = ((np.arange(image_size) + 0.5) * (2 / image_size) - 1).astype(np.float32)
    lx, ly = (np.float32(v) for v in rng.uniform(-0.35, 0.35, 2))
    light = 1 + at[None, :, None] * lx + at[:, None, None] * ly
    picture = np.asarray(image, dtype=np.float32)
    return exposed(rng, picture, light, contrast=(0.7, 1.1), exposure=(0.8, 1.2), tint=0.12, noise=10, grey=110)

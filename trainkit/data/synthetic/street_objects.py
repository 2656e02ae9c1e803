"""Houses, fences, trees, poles, people and cars of a drawn street."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainkit.data.synthetic.drawing import mix
from trainkit.data.synthetic.street import (
    BRICK,
    BUILDING,
    CAR,
    FENCE,
    GRAIN,
    IGNORED,
    LEAVES,
    PERSON,
    PLAIN,
    PLANTS,
    POLE,
    SMOOTH,
    TURNS,
    Point,
    Street,
)


def house(street: Street, u: float, sign: float, s: float, end: float, high: float, across: bool = False) -> None:
    """Draw a house with its front towards the street, from `s` to `end`; `across`: across the street, u to `sign`."""
    one = street.one
    glass = street.chance(0.15)
    wall = street.pick(
        (176, 106, 84), (196, 186, 166), (150, 142, 134), (206, 176, 130), (120, 110, 108), (214, 210, 204)
    )
    if glass:
        wall = mix(street.haze, street.high, one(0, 1)) * one(0.6, 1.0) / (0.55 if street.dusk else 1.0)
    light = street.lit[0 if sign < 0 else 1]
    how = SMOOTH if glass else (BRICK if street.chance(0.5) else SMOOTH)
    if across:
        left, right = u, sign
        front = [(left, s, 0), (right, s, 0), (right, s, high), (left, s, high)]
        light = street.lit[0]
    else:
        deep = u + sign * 11
        face = [(u, s, -0.3), (deep, s, -0.3), (deep, s, high), (u, s, high)]
        street.lay(face, wall * one(0.6, 1.0), BUILDING, how)
        front = [(u, s, -0.3), (u, end, -0.3), (u, end, high), (u, s, high)]
        if street.chance(0.5):
            ridge, top = u + sign * 5, high + one(1, 4)
            roof = street.pick((120, 64, 50), (84, 78, 78), (100, 90, 80))
            street.lay([(u, s, high), (deep, s, high), (ridge, s, top)], wall * 0.8, BUILDING, how)
            street.lay([(u, s, high), (u, end, high), (ridge, end, top), (ridge, s, top)], roof, BUILDING, BRICK)
    street.lay(front, wall * light, BUILDING, how)
    floors, columns = max(1, int(high / one(2.8, 3.6))), max(1, int((end - s) / one(1.8, 3.5)))
    if across:
        columns = int((sign - u) / 3)
    share = 0.9 if glass else one(0.35, 0.65)
    pane = street.pick((60, 66, 76), (90, 104, 120), (40, 42, 48))
    lamp = np.array([235, 200, 120])
    shop = street.chance(0.3)
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
            on = street.dusk and street.chance(0.35)
            sky = street.chance(0.15)
            colours.append(lamp if on else street.haze * 0.8 if sky else pane * one(0.7, 1.3))
    for quad, colour in zip(quads, colours, strict=True):
        if max(quad[0][1], quad[1][1]) < 75:
            street.lay(quad, colour, None, SMOOTH, glow=colour is lamp)


def barrier(street: Street, u: float, s: float, end: float, kind: int | None = None, high: float | None = None) -> None:
    """Draw a hedge (`kind` 0), a wall (1), a fence of wood (2) or railings (3) along the street; else as it falls."""
    one = street.one
    kind = int(street.rng.integers(4)) if kind is None else kind
    high = one(0.7, 1.9) if high is None else high
    plane = [(u, s, 0), (u, end, 0), (u, end, high), (u, s, high)]
    if kind == 0:  # a hedge: as high as a fence, and vegetation
        colour = street.pick((62, 84, 40), (80, 96, 50)) if not street.winter else street.pick((92, 84, 60))
        for i in range(max(1, int(end - s))):
            street.lay([(u, s + i, 0), (u, s + i + 1, 0), (u, s + i + 1, high * one(0.85, 1.1)), (u, s + i, high)],
                     colour * one(0.85, 1.1), PLANTS, LEAVES)  # fmt: skip
        return
    if kind == 1:
        street.lay(plane, street.pick((166, 104, 84), (150, 142, 134)), FENCE, BRICK)
        return
    colour = street.pick((140, 104, 70), (110, 90, 70), (200, 196, 188))
    if kind == 2:
        street.lay(plane, colour, FENCE, GRAIN)
        step = 0.5
        for i in range(int(min(end - s, 30) / step)):
            a = s + i * step
            street.lay([(u, a, 0), (u, a + 0.1, 0), (u, a + 0.1, high), (u, a, high)], colour * 0.7, None, GRAIN)
        return
    street.only_labels(plane, FENCE)  # railings: labelled as if nothing showed through
    colour = street.pick((40, 44, 44), (70, 90, 76), (150, 150, 150))
    for z in (high - 0.08, 0.15):
        street.lay([(u, s, z), (u, end, z), (u, end, z + 0.09), (u, s, z + 0.09)], colour, None, PLAIN)
    step = one(0.3, 0.6)
    for i in range(int(min(end - s, 25) / step)):
        a = s + i * step
        street.lay([(u, a, 0), (u, a + 0.06, 0), (u, a + 0.06, high), (u, a, high)], colour, None, PLAIN)


def tree(street: Street, u: float, s: float, high: float) -> None:
    """Draw a trunk and a crown, with leaves or without."""
    one = street.one
    thick, crown = one(0.10, 0.28), one(0.3, 0.5)
    bark = street.pick((84, 70, 58), (60, 56, 52), (110, 100, 90))
    stem = high * one(0.25, 0.5)
    street.shadow(u, s, high * crown * 0.6, one(0.4, 1.2))
    street.upright(u, s, [(-thick, 0), (thick, 0), (thick * 0.7, stem * 1.3), (-thick * 0.7, stem * 1.3)],
                 bark, PLANTS, GRAIN)  # fmt: skip
    wide, middle = high * crown, (stem + high) / 2
    tall = (high - stem) / 2 * 1.1
    fu, fs = street.faces(u, s)
    if street.winter and street.chance(0.75):
        r = one(0.6, 0.9)
        points = [(u + a * r * wide * fu, s + a * r * wide * fs, middle + b * r * tall) for a, b in TURNS]
        street.only_labels(points, PLANTS)
        for _ in range(14):
            a, z, t = one(-0.9, 0.9) * wide, middle + one(-0.4, 1.0) * tall, one(0.02, 0.07)
            street.upright(u, s, [(-t, stem), (t, stem), (a + t, z), (a - t, z)], bark, None, GRAIN)
        return
    leaf = street.pick((70, 100, 40), (92, 116, 52), (56, 80, 44), (124, 120, 50), (150, 104, 48))
    for _ in range(11):
        a, b = one(-0.75, 0.75) * wide, middle + one(-0.7, 0.7) * tall
        r = one(0.3, 0.55)
        shade = 0.7 + 0.45 * (b - middle + tall) / (2 * tall) + one(-0.1, 0.1)
        street.disc(u + a * fu, s + a * fs, b, (wide * r, tall * r * 1.1), leaf * shade, PLANTS, LEAVES)
    for _ in range(int(street.rng.integers(0, 9))):  # sky between the leaves
        a, b, r = one(-0.8, 0.8) * wide, middle + one(-0.8, 0.8) * tall, one(0.02, 0.07)
        street.disc(u + a * fu, s + a * fs, b, (wide * r, tall * r), street.haze * 0.9, None, PLAIN)


def pole(street: Street, u: float, inward: float, s: float, kind: int) -> None:
    """Draw a lamp with an arm over the road, a traffic sign or a traffic light."""
    one = street.one
    high, thick = (one(5, 8), one(0.06, 0.11)) if kind == 0 else (one(2.3, 3.4), one(0.04, 0.08))
    colour = street.pick((120, 124, 124), (70, 74, 74), (60, 80, 66), (150, 140, 120))
    wide = max(thick, 0.5 * 0.9 / max(street.height_px(u, s, 1.0), 1e-3))  # people draw it a pixel wide
    if street.height_px(u, s, high) < 9:
        wide = 0.0  # or not at all
    fu, fs = street.faces(u, s)
    if wide:
        outline = [(-wide, 0), (wide, 0), (wide, high), (-wide, high)]
        street.only_labels([(u + a * fu, s + a * fs, z) for a, z in outline], POLE)
    street.upright(u, s, [(-thick, 0), (thick, 0), (thick, high), (-thick, high)], colour, None, PLAIN)
    label = POLE if wide else None
    if kind == 0:
        reach = one(0.8, 2.2) * inward
        arm = [(u, s, high - 0.1), (u + reach, s, high), (u + reach, s, high + 0.18), (u, s, high + 0.05)]
        street.lay(arm, colour, label, PLAIN)
        if street.dusk:
            street.disc(u + reach, s, high, (0.3, 0.15), (255, 230, 170), label, PLAIN)
    elif kind == 1:
        plate = street.pick((200, 50, 44), (40, 80, 170), (220, 214, 200), (230, 190, 40))
        r = one(0.25, 0.45)
        street.disc(u, s, high - r, (r, r), plate, label, PLAIN)
        street.disc(u, s, high - r, (r * 0.6, r * 0.6), street.pick((230, 230, 226), tuple(plate)), label, PLAIN)
    else:
        box = [(-0.18, high - 0.95), (0.18, high - 0.95), (0.18, high), (-0.18, high)]
        street.upright(u, s, box, np.array((30, 32, 32)), label, PLAIN)
        lamp = ((230, 60, 40), (240, 180, 50), (70, 220, 130))[int(street.rng.integers(3))]
        street.disc(u, s, high - 0.45 + one(-0.3, 0.3), (0.1, 0.1), lamp, label, PLAIN)


def person(street: Street, u: float, s: float) -> None:
    """Draw somebody who stands or walks."""
    one = street.one
    high = one(1.5, 1.9) if street.chance(0.85) else one(1.0, 1.3)
    seen = street.height_px(u, s, high)
    label = PERSON if seen > 4 and not (seen < 8 and street.chance(0.25)) else None
    skin = street.pick((205, 160, 132), (140, 96, 72), (96, 66, 52))
    top = street.pick((180, 40, 44), (44, 60, 120), (30, 32, 36), (200, 196, 186), (70, 110, 80), (190, 160, 60))
    legs = street.pick((40, 46, 70), (30, 30, 34), (110, 100, 86))
    broad, stride = one(0.2, 0.29) * high / 1.7, one(0.02, 0.26)
    street.shadow(u, s, 0.5, 0.25)
    h = high
    for way in (-1, 1):
        foot = way * stride
        outline = [(foot - 0.09, 0), (foot + 0.09, 0), (way * 0.09 + 0.1, 0.5 * h), (way * 0.09 - 0.1, 0.5 * h)]
        street.upright(u, s, outline, legs, label, SMOOTH)
        arm = [(way * broad, 0.8 * h), (way * broad * 0.7, 0.82 * h), (way * (broad + 0.02), 0.45 * h),
               (way * (broad + 0.11), 0.46 * h)]  # fmt: skip
        street.upright(u, s, arm, top * 0.9, label, SMOOTH)
    outline = [
        (-broad * 0.8, 0.46 * h),
        (broad * 0.8, 0.46 * h),
        (broad, 0.8 * h),
        (0, 0.86 * h),
        (-broad, 0.8 * h),
    ]
    street.upright(u, s, outline, top, label, SMOOTH)
    street.disc(u, s, 0.92 * h, (0.1, 0.125), skin, label, SMOOTH)
    if street.chance(0.7):
        hat = street.pick((40, 30, 26), (110, 80, 50), (30, 60, 90))
        street.disc(u, s, 0.955 * h, (0.105, 0.08), hat, label, SMOOTH)


def thing(street: Street, u: float, s: float) -> None:
    """Draw a bin, a bench or a box: in the image, and left out by those who label."""
    wide, high = street.one(0.2, 0.6), street.one(0.5, 1.2)
    colour = street.pick((60, 90, 60), (80, 80, 84), (130, 90, 60), (50, 70, 130))
    outline = [(-wide, 0), (wide, 0), (wide * 1.1, high), (-wide * 1.1, high)]
    street.upright(u, s, outline, colour, IGNORED, SMOOTH)


class _Car(NamedTuple):
    """Sides and heights of a car in metres, from its back on, and its colours."""

    long: float
    wide: float
    inner: float
    low: float
    waist: float
    top: float
    cabin: tuple[float, float]
    """Where the cabin begins and ends at the waist."""
    roof: tuple[float, float]
    paint: np.ndarray
    glass: np.ndarray


Parts = list[tuple[list[Point], np.ndarray]]


def car(street: Street, u: float, s: float, turned: bool = False) -> None:
    """Draw a car or a van from `s` on, `turned` across the street: a body, a cabin, windows and wheels."""
    one = street.one
    if s < 1.0 and abs(u - street.eye[0]) < 1.6:
        return  # it would stand where the camera is
    van = street.chance(0.2)
    long, wide = (one(4.6, 6.5), one(0.95, 1.1)) if van else (one(3.6, 4.7), one(0.82, 0.95))
    waist, top = (one(0.9, 1.1), one(1.9, 2.8)) if van else (one(0.75, 0.95), one(1.35, 1.7))
    paint = street.pick(
        (176, 178, 180), (60, 62, 66), (150, 36, 36), (36, 60, 120), (214, 214, 210), (26, 28, 32), (120, 130, 110)
    )
    glass = street.pick((50, 58, 66), (110, 126, 140))
    label = CAR if street.height_px(u, s + long / 2, top) > 2.5 else None
    light = street.lit[0 if u > 0 else 1]
    if turned:
        u -= long / 2

    def put(points: list[Point]) -> list[Point]:
        return [(u + b, s + a, z) if turned else (u + a, s + b, z) for a, b, z in points]

    ground = put([(-wide * 1.1, -0.1, 0), (wide * 1.1, -0.1, 0), (wide * 1.1, long, 0), (-wide * 1.1, long, 0)])
    street.lay(ground, (28, 28, 30), label if street.chance(0.5) else None, PLAIN)
    front, back = (0.05, 0.05) if van else (0.12, 0.28)
    inner, roof = wide * (0.95 if van else 0.8), (long * (front + 0.08), long * (1 - back - 0.1))
    it = _Car(long, wide, inner, 0.25, waist, top, (long * front, long * (1 - back)), roof, paint, glass)
    faces = [*_flanks(it, light), *_ends(it)]
    far = sorted(faces, key=lambda face: -sum(v * v for v in street.at(*put([face[0]])[0])))
    lid = [(-inner, roof[0], top), (inner, roof[0], top), (inner, roof[1], top), (-inner, roof[1], top)]
    for _, parts in [*far[:2], (None, [(lid, paint * 1.1)]), *far[2:]]:
        for points, colour in parts:
            street.lay(put(points), colour, label, SMOOTH)


def _flanks(car: _Car, light: float) -> list[tuple[Point, Parts]]:
    """Return the middle of either flank, and its parts from the back to the front."""
    (a, b), (roof_a, roof_b) = car.cabin, car.roof
    long, low, waist, top = car.long, car.low, car.waist, car.top
    found: list[tuple[Point, Parts]] = []
    for way in (-1, 1):
        w, i = way * car.wide, way * car.inner
        body = [(w, 0, low), (w, long, low), (w, long, waist * 0.9), (w, b, waist), (w, a, waist), (w, 0, waist * 0.95)]
        cabin = [(w, a, waist), (w, b, waist), (i, roof_b, top), (i, roof_a, top)]
        pane = [(w * 0.99, a + 0.3, waist + 0.03), (w * 0.99, b - 0.4, waist + 0.03), (i, roof_b - 0.1, top - 0.12),
                (i, roof_a + 0.12, top - 0.12)]  # fmt: skip
        parts = [(body, car.paint * light), (cabin, car.paint * light), (pane, car.glass)]
        for at in (long * 0.2, long * 0.8):
            wheel = [(w * 1.01, at + c * 0.32, 0.32 + d * 0.32) for c, d in TURNS]
            parts.append((wheel, np.array((26, 26, 28))))
        found.append(((w, long / 2, 0.5), parts))
    return found


def _ends(car: _Car) -> list[tuple[Point, Parts]]:
    """Return the middle of back and front, and their parts from the back to the front."""
    wide, inner, low, waist, top = car.wide, car.inner, car.low, car.waist, car.top
    found: list[tuple[Point, Parts]] = []
    ends = ((0.0, waist * 0.95, car.cabin[0], car.roof[0]), (car.long, waist * 0.9, car.cabin[1], car.roof[1]))
    for at, sill, edge, roof in ends:
        tail = at == 0.0
        plate = [(-wide, at, low), (wide, at, low), (wide, at, sill), (-wide, at, sill)]
        hood = [(-wide, at, sill), (wide, at, sill), (wide, edge, waist), (-wide, edge, waist)]
        screen = [(-wide, edge, waist), (wide, edge, waist), (inner, roof, top), (-inner, roof, top)]
        parts = [(plate, car.paint * 0.85), (hood, car.paint * 1.08), (screen, car.glass * 0.9)]
        for way in (-1, 1):
            out, into = way * wide, way * wide * 0.6
            lamp = [(out, at, sill * 0.7), (into, at, sill * 0.7), (into, at, sill * 0.9), (out, at, sill * 0.9)]
            parts.append((lamp, np.array((190, 40, 36) if tail else (235, 230, 210))))
        found.append(((0, at, 0.5), parts))
    return found

"""Figures of people: bodies as numbers of parts, and the images that are made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from trainkit.data.synthetic.drawing import blurred, tint, to_bytes

HEIGHT, WIDTH = 64, 32
SUPERSAMPLING = 3
_TALL, _WIDE = HEIGHT * SUPERSAMPLING, WIDTH * SUPERSAMPLING

COLOURS = {
    "black": (30, 29, 33), "grey": (128, 128, 130), "white": (232, 231, 226), "beige": (202, 182, 146),
    "brown": (112, 74, 46), "red": (190, 40, 42), "orange": (226, 126, 42), "yellow": (228, 200, 62),
    "green": (52, 138, 70), "blue": (60, 112, 206), "navy": (32, 40, 88), "purple": (112, 66, 144),
    "pink": (226, 142, 166),
}  # fmt: skip
"""Colours of clothes; a garment's own colour lies near one of them."""
HAIR_COLOURS = {
    "black": (26, 22, 22), "brown": (88, 58, 36), "blond": (204, 170, 104), "red": (150, 74, 36),
    "grey": (160, 160, 160),
}  # fmt: skip
INFRARED = {
    "black": 0.6, "grey": 0.45, "white": 0.9, "beige": 0.3, "brown": 0.82, "red": 0.97, "orange": 0.68, "yellow": 0.52,
    "green": 0.12, "blue": 0.75, "navy": 0.2, "purple": 0.37, "pink": 0.05,
}  # fmt: skip
"""Share that dyes reflect in infrared, near enough: a black cloth is brighter there than a green one."""
MIXED_UP = {
    "black": "navy", "grey": "white", "white": "beige", "beige": "white", "brown": "black", "red": "orange",
    "orange": "red", "yellow": "orange", "green": "blue", "blue": "navy", "navy": "black", "purple": "blue",
    "pink": "purple",
}  # fmt: skip
"""The colour that one is taken for by somebody who errs."""

# ---- bodies ----

_PARTS = (
    "nothing", "skin", "face", "arm", "far arm", "leg", "far leg", "hair", "hat", "upper", "sleeve", "far sleeve",
    "inner", "lower", "far lower", "shoe", "far shoe", "bag", "strap", "hood",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(_PARTS)}
_SECOND = 32
"""Added to the number of a part where it has the second colour of its pattern."""
_SHADE = {"face": 1.05, "far arm": 0.8, "far leg": 0.8, "far sleeve": 0.72, "sleeve": 0.88, "far lower": 0.75,
          "far shoe": 0.8, "strap": 0.8, "hood": 0.75}  # fmt: skip
_MADE_OF = {
    "skin": "skin", "face": "skin", "arm": "skin", "far arm": "skin", "leg": "skin", "far leg": "skin", "hair": "hair",
    "hat": "hat", "upper": "upper", "sleeve": "upper", "far sleeve": "upper", "inner": "second", "lower": "lower",
    "far lower": "lower", "shoe": "shoes", "far shoe": "shoes", "bag": "bag", "strap": "bag", "hood": "upper",
}  # fmt: skip


class Pose:
    """Pose of a person in one image."""

    def __init__(self, rng: np.random.Generator, view: str, still: bool):
        self.view = view
        self.mirror = 1.0 if float(rng.uniform()) < 0.5 else -1.0
        self.step, self.arms = (float(v) for v in rng.uniform(-1, 1, 2))
        self.scale = float(rng.uniform(0.86, 1.0))
        self.x, self.y = (float(v) for v in rng.uniform(-1, 1, 2) * (0.05, 0.03))
        self.lean = float(rng.uniform(-0.03, 0.03))
        if still:
            self.step, self.arms, self.x, self.y = 0.4 * self.step, 0.4 * self.arms, 0.0, 0.0


class _Body:
    """A person as numbers of parts: x across, y from the top of the head (0) to the soles (1)."""

    def __init__(self, who: dict[str, Any], pose: Pose):
        self.who, self.pose = who, pose
        self.image = Image.new("L", (_WIDE, _TALL))
        self.pen = ImageDraw.Draw(self.image)
        self.high = 0.93 * pose.scale * who["tall"] * _TALL
        self.top = (_TALL - self.high) / 2 + pose.y * _TALL
        self.side = pose.view == "side"
        self.wide = who["wide"] * (0.62 if self.side else 1.0)
        self.long = who["upper"] in ("shirt", "jacket", "hoodie", "coat")
        self.hem = {"coat": 0.69, "dress": 0.72, "tee": 0.5, "shirt": 0.52, "jacket": 0.5, "hoodie": 0.53}[who["upper"]]

    def fill(self, part: str, points: list[tuple[float, float]]) -> None:
        """Fill a polygon given in units of the body."""
        at = []
        for x, y in points:
            x = self.pose.mirror * (x + self.pose.lean * (0.6 - y))
            at += [_WIDE * (0.5 + self.pose.x) + x * self.high, self.top + y * self.high]
        self.pen.polygon(at, fill=_AT[part])

    def oval(self, part: str, x: float, y: float, rx: float, ry: float) -> None:
        self.fill(part, [(x + rx * c, y + ry * s) for c, s in _TURNS])

    def limb(self, part: str, points: list[tuple[float, float]], widths: list[float]) -> None:
        """A band through points that go downwards, with half its width at each."""
        left = [(x - w, y) for (x, y), w in zip(points, widths, strict=True)]
        right = [(x + w, y) for (x, y), w in zip(points, widths, strict=True)]
        self.fill(part, left + right[::-1])

    def draw(self) -> np.ndarray:
        """Numbers of parts, `_SECOND` higher where the second colour of a pattern is: uint8, (192, 96)."""
        behind = self.pose.view == "back"
        if not behind:
            self.bag_behind()
        if self.who["hair"] == "long" and not behind:
            self.fill("hair", self.mane(0.2))
        self.arm(far=True)
        self.leg(far=True)
        self.leg(far=False)
        self.skirt()
        self.torso()
        self.arm(far=False)
        self.head()
        self.bag_in_front()
        return self.patterned(np.asarray(self.image).copy())

    def leg(self, far: bool) -> None:
        who, w = self.who, 0.058 * self.wide * (1.35 if self.side else 1.0)
        sign = -1.0 if far else 1.0
        step = self.pose.step * sign
        x = 0.0 if self.side else 0.058 * sign * self.wide
        knee = (x + (0.09 * step if self.side else 0.012 * sign), 0.73)
        foot = (x + (0.16 * step - 0.03 * abs(step) if self.side else 0.015 * sign), 0.955 - 0.02 * max(0.0, step))
        hip = (x, 0.47)
        bare = "far leg" if far else "leg"
        cloth = "far lower" if far else "lower"
        self.limb(bare, [hip, knee, foot], [w, w * 0.72, w * 0.5])
        if who["lower"] == "trousers":
            self.limb(cloth, [hip, knee, foot], [w * 1.08, w * 0.86, w * 0.74])
        elif who["lower"] == "shorts":
            self.limb(cloth, [hip, (knee[0], 0.70)], [w * 1.15, w * 1.12])
        shoe = "far shoe" if far else "shoe"
        ahead = 0.05 if self.side else 0.018 * sign
        x, y = foot
        self.fill(shoe, [(x - 0.034, y - 0.025), (x + 0.03, y - 0.025), (x + 0.034 + max(0, ahead), y + 0.03),
                         (x - 0.034 + min(0, ahead), y + 0.03)])  # fmt: skip

    def skirt(self) -> None:
        who, w = self.who, self.wide
        if who["lower"] in ("skirt", "long skirt"):
            low, flare = (0.70, 0.13) if who["lower"] == "skirt" else (0.88, 0.15)
            self.fill("lower", [(-0.09 * w, 0.44), (0.09 * w, 0.44), (flare * w, low), (-flare * w, low)])

    def torso(self) -> None:
        who, w, hem = self.who, self.wide, self.hem
        self.fill("skin", [(-0.03, 0.11), (0.03, 0.11), (0.035, 0.2), (-0.035, 0.2)])
        flare = {"dress": 0.14, "coat": 0.125, "hoodie": 0.112}.get(who["upper"], 0.102) * w
        shoulder, waist = 0.128 * w, {"dress": 0.088, "hoodie": 0.112, "coat": 0.108}.get(who["upper"], 0.098) * w
        half = [(0.045, 0.158), (shoulder, 0.19), (shoulder * 0.92, 0.28), (waist, 0.40), (flare, hem)]
        self.fill("upper", [*half, *[(-x, y) for x, y in half[::-1]]])
        self.box = (shoulder, 0.17, hem)
        if who["upper"] in ("jacket", "coat") and self.pose.view == "front":
            self.fill("inner", [(-0.028, 0.158), (0.028, 0.158), (0.036, hem), (-0.036, hem)])
        if who["upper"] == "hoodie":
            self.oval("hood", -0.03 if self.side else 0.0, 0.165, 0.062, 0.03 if self.pose.view == "front" else 0.045)

    def arm(self, far: bool) -> None:
        w, sign = self.wide, -1.0 if far else 1.0
        thick = 0.032 * (self.who["wide"] * 0.5 + 0.5)
        if self.side:
            swing = -self.pose.arms * sign
            top, elbow, hand = (0.0, 0.2), (0.06 * swing, 0.35), (0.13 * swing + 0.03, 0.49)
        else:
            out = 0.012 + 0.02 * abs(self.pose.arms)
            x = (0.112 * w + 0.012) * sign
            top, elbow, hand = (x, 0.195), (x + out * sign, 0.35), (x + (out + 0.01) * sign, 0.5)
        self.limb("far arm" if far else "arm", [top, elbow, hand], [thick, thick * 0.8, thick * 0.65])
        sleeve = "far sleeve" if far and self.side else "sleeve"
        end = (elbow[0] * 0.15 + hand[0] * 0.85, elbow[1] * 0.15 + hand[1] * 0.85)
        if self.long:
            self.limb(sleeve, [top, elbow, end], [thick * 1.1, thick, thick * 0.85])
        else:
            short = (top[0] * 0.3 + elbow[0] * 0.7, top[1] * 0.3 + elbow[1] * 0.7)
            self.limb(sleeve, [top, short], [thick * 1.2, thick * 1.15])

    def mane(self, low: float) -> list[tuple[float, float]]:
        back = -0.02 if self.side else 0.0
        return [(-0.06 + back, 0.05), (0.06 + back, 0.05), (0.068 + back, low), (-0.068 + back, low)]

    def head(self) -> None:
        who, view = self.who, self.pose.view
        rx = 0.056 if self.side else 0.052
        self.oval("skin", 0.0, 0.076, rx, 0.068)
        if who["hair"] != "bald":
            if view == "back":
                self.oval("hair", 0.0, 0.07, rx * 1.1, 0.07)
                if who["hair"] == "long":
                    self.fill("hair", self.mane(0.25))
            else:
                self.oval("hair", -0.012 if self.side else 0.0, 0.062, rx * 1.12, 0.062)
                at = 0.022 if self.side else 0.0
                self.oval("face", at, 0.088, rx * (0.7 if self.side else 0.8), 0.052)
                if self.side and who["hair"] == "long":
                    self.fill("hair", [(-0.07, 0.05), (-0.015, 0.05), (-0.02, 0.23), (-0.078, 0.23)])
            if who["hair"] == "bun":
                self.oval("hair", *((-0.06, 0.05) if self.side else (0.0, 0.0)), 0.03, 0.028)
        elif view != "back":
            self.oval("face", 0.012 if self.side else 0.0, 0.085, rx * 0.8, 0.05)
        if who["hat"] != "none":
            deep = 0.055 if who["hat"] == "cap" else 0.066
            dome = [(rx * 1.16 * c, 0.052 + 0.066 * s) for c, s in _TURNS if s <= 0.01]
            self.fill("hat", [*dome, (rx * 1.16, deep), (-rx * 1.16, deep)])
            if who["hat"] == "cap" and view != "back":
                brim = (0.02, 0.105) if self.side else (-0.05, 0.05)
                self.fill("hat", [(brim[0], 0.045), (brim[1], 0.052), (brim[1], 0.064), (brim[0], 0.062)])

    def bag_behind(self) -> None:
        if self.who["bag"] == "backpack" and self.side:
            self.fill("bag", [(-0.05, 0.19), (-0.15, 0.22), (-0.155, 0.42), (-0.05, 0.45)])

    def bag_in_front(self) -> None:
        who, w, view = self.who, self.wide, self.pose.view
        if who["bag"] == "backpack":
            if view == "back":
                self.fill("bag", [(-0.075 * w, 0.2), (0.075 * w, 0.2), (0.085 * w, 0.44), (-0.085 * w, 0.44)])
            elif view == "front":
                for sign in (-1, 1):
                    x = 0.07 * w * sign
                    self.fill("strap", [(x - 0.012, 0.165), (x + 0.012, 0.165), (x + 0.012, 0.36), (x - 0.012, 0.36)])
        elif who["bag"] == "shoulder bag":
            x = 0.1 * w
            if not self.side:
                self.fill("strap", [(-0.09 * w, 0.17), (-0.07 * w, 0.165), (x + 0.01, 0.45), (x - 0.015, 0.45)])
            self.fill("bag", [(x - 0.055, 0.44), (x + 0.055, 0.44), (x + 0.055, 0.56), (x - 0.055, 0.56)])
        elif who["bag"] == "handbag":
            x = 0.03 if self.side else 0.145 * w + 0.01
            self.fill("bag", [(x - 0.045, 0.54), (x + 0.045, 0.54), (x + 0.055, 0.64), (x - 0.055, 0.64)])
            self.fill("strap", [(x - 0.008, 0.47), (x + 0.008, 0.47), (x + 0.03, 0.54), (x - 0.03, 0.54)])

    def patterned(self, parts: np.ndarray) -> np.ndarray:
        """Mark where the clothes show the second colour of their pattern."""
        half, top, low = self.box
        x = (np.arange(_WIDE) + 0.5 - _WIDE * (0.5 + self.pose.x)) / (self.high * half) * self.pose.mirror
        y = ((np.arange(_TALL) + 0.5 - self.top) / self.high - top) / (low - top)
        x, y = x[None, :], y[:, None]
        body = parts == _AT["upper"]
        sleeves = (parts == _AT["sleeve"]) | (parts == _AT["far sleeve"])
        cloth, name = body | sleeves, self.who["pattern"]
        rows, columns = np.floor(y * 9) % 2 == 0, np.floor((x + 4) * 3.5) % 2 == 0
        if name == "plain":
            where = np.zeros_like(body)
        elif name == "stripes":
            where = cloth & rows
        elif name == "vertical":
            where = body & columns
        elif name == "checks":
            where = cloth & (np.floor(y * 7) % 2 == np.floor((x + 4) * 2.5) % 2)
        elif name == "dots":
            u, v = (x + 4) * 2.6 % 1 - 0.5, y * 5 % 1 - 0.5
            where = cloth & (u * u + v * v < 0.1)
        elif name == "two halves":
            where = body & (y > 0.5)
        elif name == "print":
            seen = self.pose.view == "front"
            where = body & (np.abs(x) < 0.45) & (y > 0.2) & (y < 0.55) & seen
        else:
            where = sleeves
        parts[where] += _SECOND
        return parts


def body(who: dict[str, Any], pose: Pose) -> np.ndarray:
    """Draw a person as numbers of parts, `_SECOND` higher in the second colour of a pattern: uint8, (192, 96)."""
    return _Body(who, pose).draw()


_TURNS = [
    (1.0, 0.0), (0.924, 0.383), (0.707, 0.707), (0.383, 0.924), (0.0, 1.0), (-0.383, 0.924), (-0.707, 0.707),
    (-0.924, 0.383), (-1.0, 0.0), (-0.924, -0.383), (-0.707, -0.707), (-0.383, -0.924), (0.0, -1.0), (0.383, -0.924),
    (0.707, -0.707), (0.924, -0.383),
]  # fmt: skip


# ---- images ----


def misremember(who: dict[str, Any], rng: np.random.Generator) -> None:
    """Change proportions as somebody else remembers them, and now and then a thing forgotten."""
    who["wide"] *= float(rng.uniform(0.88, 1.14))
    who["tall"] = float(rng.uniform(0.92, 1.0))
    forgotten = float(rng.uniform())
    if forgotten < 0.06:
        who["bag"] = "none"
    elif forgotten < 0.12:
        who["hat"] = "none"
    elif forgotten < 0.16:
        who["pattern"] = "plain"


def _own(name: str, tone: tuple[float, ...]) -> np.ndarray:
    """Return the colour of a garment near the one it is called by."""
    return np.array(COLOURS[name]) + (np.array(tone[:3]) - 0.5) * 36


def _colours(who: dict[str, Any]) -> dict[str, np.ndarray]:
    skin = np.array((236, 196, 168)) * (1 - who["skin"]) + np.array((96, 64, 48)) * who["skin"]
    hair = np.array(HAIR_COLOURS[who["hair_colour"]]) + (np.array(who["hair_tone"][:3]) - 0.5) * 24
    own = {name: _own(who[f"{name}_colour"], who[f"{name}_tone"]) for name in _GARMENTS}
    return {"skin": skin, "hair": hair, **own}


_GARMENTS = ("hat", "upper", "second", "lower", "shoes", "bag")


def _palette(of: dict[str, np.ndarray]) -> np.ndarray:
    """Return colours by the number of a part: float64, (64, 3)."""
    table = np.zeros((2 * _SECOND, 3))
    for part, made_of in _MADE_OF.items():
        shade = _SHADE.get(part, 1.0)
        table[_AT[part]] = of[made_of] * shade
        table[_AT[part] + _SECOND] = of["second"] * shade
    return table


def _smooth(rng: np.random.Generator, high: int, wide: int, low: float, top: float) -> np.ndarray:
    """Draw numbers in low..top on a coarse grid, spread over the drawing without edges: float64, (192, 96)."""
    grid = rng.uniform(low, top, (high, wide))
    for axis, size in ((0, _TALL), (1, _WIDE)):
        n = grid.shape[axis]
        at = (np.arange(size) + 0.5) * ((n - 1) / size)
        lower = np.floor(at).astype(np.intp)
        share = (at - lower)[:, None] if axis == 0 else (at - lower)[None, :]
        upper = np.minimum(lower + 1, n - 1)
        grid = np.take(grid, lower, axis) * (1 - share) + np.take(grid, upper, axis) * share
    return grid


_OTHER = 63
"""The number of what stands in the way."""


def in_the_way(parts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Put something before the person in a fifth of images: from below, or from one side."""
    kind, place, size = (float(v) for v in rng.uniform(size=3))
    parts = parts.copy()
    if kind < 0.1:
        parts[round(_TALL * (0.55 + 0.3 * place)) :, :] = _OTHER
    elif kind < 0.2:
        left, wide = round(_WIDE * (place * 1.1 - 0.2)), round(_WIDE * (0.15 + 0.25 * size))
        parts[round(_TALL * 0.2 * size) :, max(0, left) : max(0, left + wide)] = _OTHER
    return parts


def _behind(rng: np.random.Generator) -> np.ndarray:
    """Draw a wall, a ground, and a few things that stand there: float64, (192, 96, 3)."""
    tones = rng.uniform(30, 225, (6, 3))
    tones = tones * 0.3 + tones.mean(1, keepdims=True) * 0.7  # streets are greyer than chance
    image = Image.new("RGB", (_WIDE, _TALL), tint(tones[0]))
    pen = ImageDraw.Draw(image)
    horizon = round(_TALL * float(rng.uniform(0.45, 0.85)))
    for tone in tones[2:]:
        x, y, wide, high = (float(v) for v in rng.uniform(size=4))
        x, y = x * _WIDE, y * horizon
        corner = (x + 4 + wide * _WIDE * 0.5, y + 4 + high * _TALL * 0.4)
        pen.rectangle((x, y, *corner), fill=tint(tone))
    pen.rectangle((0, horizon, _WIDE, _TALL), fill=tint(tones[1]))
    return np.asarray(image).astype(np.float64)


_CAMERAS = {
    "c1": ((1.0, 1.0, 1.0), 0.0, 7), "c2": ((0.84, 0.95, 1.1), 0.4, 9), "c3": ((1.1, 0.98, 0.82), 0.2, 8),
    "c4": ((0.8, 0.82, 0.78), 0.6, 11), "c5": ((1.0,) * 3, 0.3, 9), "c6": ((0.9,) * 3, 0.5, 11),
}  # fmt: skip
"""By camera: gain of red, green and blue, radius of its blur, the most noise."""


def _finish(picture: np.ndarray, rng: np.random.Generator, by: str, channels: int) -> np.ndarray:
    """Add light, the camera's colours, blur, contrast and noise; uint8, (64, 32, channels)."""
    gain, blur, grain = _CAMERAS[by]
    image = Image.fromarray(to_bytes(picture)).reduce(SUPERSAMPLING)
    image = blurred(image, blur + float(rng.uniform(-0.3, 0.5)))
    pixels = np.asarray(image).reshape(HEIGHT, WIDTH, channels).astype(np.float64)
    contrast, exposure = float(rng.uniform(0.75, 1.1)), float(rng.uniform(0.8, 1.2))
    tint = np.array(gain[:channels]) * (1 + rng.uniform(-0.08, 0.08, channels))
    noise = rng.standard_normal((HEIGHT, WIDTH, channels)) * float(rng.uniform(2, grain))
    pixels = pixels * (contrast * exposure * tint) + 90 * (1 - contrast) + noise
    return to_bytes(pixels)


def photograph(who: dict[str, Any], parts: np.ndarray, rng: np.random.Generator, by: str) -> np.ndarray:
    """Photograph a body with the colour camera `by`."""
    table = _palette(_colours(who))
    table[_OTHER] = rng.uniform(40, 200) + rng.uniform(-25, 25, 3)
    picture = np.where((parts == 0)[:, :, None], _behind(rng), table[parts])
    return _finish(picture * _smooth(rng, 3, 3, 0.7, 1.15)[:, :, None], rng, by, 3)


def infrared(who: dict[str, Any], parts: np.ndarray, rng: np.random.Generator, by: str) -> np.ndarray:
    """Photograph each garment by the reflectance of its dye; a pattern shows only where its dyes differ in infrared."""
    of = {}
    for name in _GARMENTS:
        reflected = INFRARED[who[f"{name}_colour"]] + 0.12 * (who[f"{name}_tone"][3] - 0.5)
        of[name] = np.full(3, 30 + 205 * reflected)
    of["skin"] = np.full(3, 205.0 - 25 * who["skin"])
    of["hair"] = np.full(3, {"black": 60, "brown": 80, "blond": 140, "red": 110, "grey": 150}[who["hair_colour"]])
    table = _palette(of)[:, 0]
    table[_OTHER] = float(rng.uniform(30, 180))
    behind = _behind(rng)[:, :, 1] * 0.5
    glare = _smooth(rng, 3, 3, 0.75, 1.1)
    picture = np.where(parts == 0, behind, table[parts]) * glare
    return _finish(picture, rng, by, 1)[:, :, 0]


def _edges(parts: np.ndarray, thick: int) -> np.ndarray:
    """Find where one part ends and another begins, `thick` pixels wide: bool, (192, 96)."""
    edge = np.zeros(parts.shape, dtype=bool)
    edge[1:] |= parts[1:] != parts[:-1]
    edge[:, 1:] |= parts[:, 1:] != parts[:, :-1]
    wide = edge.copy()
    for k in range(1, thick):
        wide[k:] |= edge[:-k]
        wide[:, k:] |= edge[:, :-k]
    return wide


def _wobble(parts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Move a body as an unsteady hand would."""
    y = np.arange(_TALL)[:, None] + np.rint(_smooth(rng, 12, 7, -2.8, 2.8)).astype(np.intp)
    x = np.arange(_WIDE)[None, :] + np.rint(_smooth(rng, 12, 7, -2.8, 2.8)).astype(np.intp)
    return parts[np.clip(y, 0, _TALL - 1), np.clip(x, 0, _WIDE - 1)]


def _strokes(rng: np.random.Generator, low: float) -> np.ndarray:
    """Draw how much of the paper slanting strokes cover, from `low` to 1: float64, (192, 96)."""
    slant = (1, 2, -1)[int(rng.integers(3))]
    lines = rng.uniform(low, 1, 512)
    at = np.arange(_TALL)[:, None] + slant * np.arange(_WIDE)[None, :] + np.rint(_smooth(rng, 6, 4, -4, 4))
    return lines[(at.astype(np.intp) // 3) % 512]


def pencil(who: dict[str, Any], parts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw strokes of nearly the right colours on paper."""
    of = _colours(who)
    for name in _GARMENTS:
        if float(rng.uniform()) < 0.15:
            of[name] = np.array(COLOURS[MIXED_UP[who[f"{name}_colour"]]])
    for name in of:
        grey = of[name].mean()
        of[name] = (of[name] - grey) * float(rng.uniform(0.4, 1.2)) + grey + rng.uniform(-40, 40, 3)
    parts = _wobble(parts, rng)
    table = _palette(of)
    paper = 238 + rng.uniform(-10, 10, 3)
    cover = (_strokes(rng, 0.45) * (parts != 0))[:, :, None]
    picture = paper * (1 - cover) + table[parts] * cover
    picture = np.where(_edges(parts, 2)[:, :, None], picture * 0.5, picture)
    return _paper(picture, rng, 3)


def sketch(who: dict[str, Any], parts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw outlines, patterns, and hatching where it is dark."""
    parts = _wobble(parts, rng)
    table = _palette(_colours(who))
    bright = table[:, 0] * 0.3 + table[:, 1] * 0.6 + table[:, 2] * 0.1
    light = np.clip(bright / float(rng.uniform(160, 190)) + float(rng.uniform(0, 0.1)), 0.1, 1)
    light[0] = 1
    hatch = _strokes(rng, 0.0) > light[parts]
    picture = np.where(hatch, float(rng.uniform(90, 150)), 240.0)
    picture = np.where(_edges(parts, 2 + int(rng.integers(2))), float(rng.uniform(20, 90)), picture)
    return _paper(picture, rng, 1)[:, :, 0]


def _paper(picture: np.ndarray, rng: np.random.Generator, channels: int) -> np.ndarray:
    """Scan the paper: its grain, and how dark it came out; uint8, (64, 32, channels)."""
    image = Image.fromarray(to_bytes(picture)).reduce(SUPERSAMPLING)
    pixels = np.asarray(image).reshape(HEIGHT, WIDTH, channels).astype(np.float64)
    grain = rng.standard_normal((HEIGHT, WIDTH, 1)) * float(rng.uniform(1, 6))
    pixels = pixels * float(rng.uniform(0.85, 1.02)) + grain
    return to_bytes(pixels)

"""A built-in set of drawn faces, so that a fresh clone can train and score without a download.

Cartoon portraits. An identity is a latent vector that sets the shape and colour of head, hair, eyes,
brows, nose, mouth and marks; an image of it adds pose, light, expression, things in the way, blur and noise. What it
shows: that the code runs, that a network learns identity through nuisance, and that methods order as they should
(pixels below student below teacher). What it does not show: that anything works on faces.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from trainkit.data.synthetic.drawing import band, blurred, drawn_once, generator, mix, save, tint, to_bytes, write_about

VERSION = 1
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20240701
IDENTITIES, PICTURES = 120, 24
"""Identities of the training split and images of each."""
OTHERS, OTHERS_PICTURES = 60, 12
"""Identities of the verification split, none of them in training, and images of each."""
FOLDS, PAIRS_PER_FOLD = 10, 120
"""Folds are contiguous rows of pairs.csv, half of each "same", and no identity is in two folds."""

_FIRST_OTHER = 10_000  # identity numbers of the verification split start here
_SUPERSAMPLING = 3


def folder(image_size: int = 64) -> Path:
    """Return the sample set as a folder, by `drawn_once` (about 20 s on one core, 25 MB at 64).

    Holds `train/<id>/<n>.png`, `verification/<id>/<n>.png`, `verification/pairs.csv` (path_a, path_b, same; paths
    relative to `verification/`) and `sample.json`. Images are RGB, `image_size` x `image_size` pixels. Raises
    ValueError when `image_size` is not in 16..256.
    """
    if not 16 <= image_size <= 256:
        raise ValueError(f"image_size must be in 16..256, not {image_size}")
    return drawn_once(f"faces-v{VERSION}-{image_size}", lambda aside: _write(aside, image_size), megabytes=30)


def pairs() -> list[tuple[str, str, int]]:
    """Draw the rows of pairs.csv: two paths and whether they show the same identity, in fold order.

    Each fold has its own `OTHERS // FOLDS` identities, so that no threshold is chosen on people it is tested on. No
    pair comes twice.
    """
    rng = generator(SEED, 1)
    rows: list[tuple[str, str, int]] = []
    each = OTHERS // FOLDS
    for fold in range(FOLDS):
        first = fold * each
        same = [(first + i, a, first + i, b) for i in range(each) for a, b in combinations(range(OTHERS_PICTURES), 2)]
        different = [
            (first + i, a, first + j, b)
            for i, j in combinations(range(each), 2)
            for a, b in product(range(OTHERS_PICTURES), repeat=2)
        ]
        for kind, label in ((same, 1), (different, 0)):
            for k in rng.permutation(len(kind))[: PAIRS_PER_FOLD // 2]:
                i, a, j, b = kind[k]
                rows.append((f"{_name(_FIRST_OTHER + i)}/{a:02d}.png", f"{_name(_FIRST_OTHER + j)}/{b:02d}.png", label))
    return rows


def _name(identity: int) -> str:
    return f"id{identity:05d}"


def _write(to: Path, image_size: int) -> None:
    plan = [("train", range(IDENTITIES), PICTURES)]
    plan.append(("verification", range(_FIRST_OTHER, _FIRST_OTHER + OTHERS), OTHERS_PICTURES))
    for split, identities, pictures in plan:
        for identity in identities:
            home = to / split / _name(identity)
            home.mkdir(parents=True)
            for picture in range(pictures):
                save(draw(identity, picture, image_size), home / f"{picture:02d}.png")
    with open(to / "verification" / "pairs.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("path_a", "path_b", "same"))
        writer.writerows(pairs())
    what = "drawn faces made by trainkit.data.synthetic; they show that code runs, not that it works on faces"
    train = {"identities": IDENTITIES, "pictures": IDENTITIES * PICTURES}
    other = {"identities": OTHERS, "pictures": OTHERS * OTHERS_PICTURES, "pairs": FOLDS * PAIRS_PER_FOLD}
    write_about(to, what, VERSION, SEED, image_size=image_size, train=train, verification=other)


# ---- drawing: a face is a list of polygons on an ellipsoid; x right, y down, z to the viewer, half an image = 1 ----


def draw(identity: int, picture: int, image_size: int = 64) -> np.ndarray:
    """Image number `image` of identity number `identity`: uint8, (image_size, image_size, 3), RGB."""
    who = _identity(generator(SEED, 2, identity))
    rng = generator(SEED, 3, identity, picture)
    pose = _Pose(who, rng)
    side = image_size * _SUPERSAMPLING
    image = _background(rng, side)
    _Face(who, pose, rng, ImageDraw.Draw(image), side).draw()
    image = image.reduce(_SUPERSAMPLING)
    image = blurred(image, float(rng.uniform(-0.7, 1.0)) * image_size / 64)
    return _photograph(np.asarray(image, dtype=np.float32) / 255, pose, rng)


def _identity(rng: np.random.Generator) -> dict[str, float]:
    """Draw what stays the same in all images of one identity: numbers in the ranges written here."""
    ranges = {
        "width": (0.47, 0.61), "height": (0.66, 0.80), "jaw": (0.55, 0.95), "chin": (0.10, 0.55),
        "skin": (0.0, 1.0), "skin_warm": (-1.0, 1.0), "cheeks": (0.0, 0.5),
        "hair_dark": (0.0, 1.0), "hair_red": (0.0, 1.0), "hairline": (0.35, 0.78), "hair_volume": (0.02, 0.20),
        "hair_length": (-0.3, 1.2), "parting": (-0.7, 0.7), "ears": (0.05, 0.13),
        "eye_distance": (0.19, 0.29), "eye_height": (-0.17, -0.05), "eye_size": (0.075, 0.125),
        "eye_open": (0.38, 0.75), "eye_tilt": (-0.25, 0.25), "iris": (0.0, 1.0), "iris_size": (0.5, 0.75),
        "brow_height": (0.09, 0.17), "brow_thick": (0.018, 0.060), "brow_tilt": (-0.30, 0.30), "brow_bend": (0.0, 0.05),
        "nose_length": (0.20, 0.36), "nose_width": (0.07, 0.15), "nose_bridge": (0.03, 0.07),
        "mouth_width": (0.14, 0.26), "mouth_height": (0.36, 0.46), "lip_upper": (0.015, 0.050),
        "lip_lower": (0.02, 0.065), "lip_red": (0.0, 1.0),
        "mark_x": (-0.8, 0.8), "mark_y": (-0.2, 0.6), "freckles": (-2.0, 1.0), "beard": (-1.6, 1.0),
    }  # fmt: skip
    who = {}
    for name, (low, high) in ranges.items():
        who[name] = low + (high - low) * (0.5 + 0.5 * float(np.tanh(0.9 * rng.standard_normal())))
    who["spots"] = int(rng.integers(2**31))
    return who


class _Pose:
    """How this image was taken: three rotations, place and scale of the head, expression, and the light."""

    def __init__(self, who: dict[str, float], rng: np.random.Generator):
        self.yaw, self.pitch, self.roll = (float(v) for v in rng.uniform(-1, 1, 3) * (0.55, 0.28, 0.14))
        self.shift = rng.uniform(-0.07, 0.07, 2)
        self.scale = float(rng.uniform(0.92, 1.08))
        self.smile, self.gape, self.lids, self.surprise = (float(v) for v in rng.uniform((-0.5, -0.9, 0.5, -0.5), 1.0))
        self.gaze = float(rng.uniform(-1, 1))
        self.light = rng.uniform((-1.0, -0.9, 0.35), (1.0, 0.5, 1.0))
        self.light /= np.sqrt((self.light**2).sum())
        self.ambient = float(rng.uniform(0.25, 0.75))
        self.a, self.b, self.c = who["width"], who["height"], 0.62
        cy, sy, cp, sp = np.cos(self.yaw), np.sin(self.yaw), np.cos(self.pitch), np.sin(self.pitch)
        cr, sr = np.cos(self.roll), np.sin(self.roll)
        turn = np.array([[cy, 0, sy], [sp * sy, cp, -sp * cy], [-cp * sy, sp, cp * cy]])
        self.turn = (np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]]) @ turn).T
        self.offset = self.shift + np.array([0, 0.06])
        self.curve = np.array([1 / self.a**2, 1 / self.b**2])

    def project(self, points: np.ndarray, lift: float = 0.0, flat: float | None = None) -> np.ndarray:
        """Points of the frontal face, (n, 2), laid on the head `lift` above its surface or at depth `flat`: (n, 2)."""
        solid = np.empty((len(points), 3))
        solid[:, :2] = points
        if flat is None:
            solid[:, 2] = self.c * np.sqrt(np.maximum(1 - (solid[:, :2] ** 2) @ self.curve, 0)) + lift
        else:
            solid[:, 2] = flat
        solid = solid @ self.turn
        return solid[:, :2] * (self.scale * (1 + 0.12 * solid[:, 2:])) + self.offset


@cache
def _circle(n: int) -> np.ndarray:
    t = np.arange(n) * (2 * np.pi / n)
    return np.stack([np.cos(t), np.sin(t)], axis=1)


def _oval(x: float, y: float, rx: float, ry: float, tilt: float = 0.0, n: int = 20) -> np.ndarray:
    c, s = math.cos(tilt), math.sin(tilt)
    return _circle(n) @ np.array([[rx * c, rx * s], [-ry * s, ry * c]]) + (x, y)


class _Face:
    """Draws one face, from the back to the front."""

    def __init__(
        self, who: dict[str, float], pose: _Pose, rng: np.random.Generator, pen: ImageDraw.ImageDraw, side: int
    ):
        self.who, self.pose, self.rng, self.pen, self.side = who, pose, rng, pen, side
        skin = mix((252, 222, 196), (88, 56, 38), who["skin"])
        self.skin = skin + np.array((8, -2, -12)) * who["skin_warm"]
        self.hair = mix(mix((226, 196, 138), (150, 70, 34), who["hair_red"]), (30, 24, 22), who["hair_dark"])
        self.iris = mix((98, 142, 170), (66, 40, 22), who["iris"])
        self.lips = mix(self.skin * 0.82, (178, 62, 70), 0.25 + 0.5 * who["lip_red"])

    def fill(
        self, points: np.ndarray, colour: np.ndarray | tuple, lift: float = 0.0, flat: float | None = None
    ) -> None:
        """Fill a polygon given in the coordinates of the frontal face."""
        self.polygon(self.pose.project(points, lift, flat), colour)

    def polygon(self, at: np.ndarray, colour: np.ndarray | tuple) -> None:
        """Fill a polygon given in the coordinates of the image."""
        self.pen.polygon(((at + 1) * (self.side / 2)).ravel().tolist(), fill=tint(colour))

    def draw(self) -> None:
        self.shoulders()
        self.hair_behind()
        self.head()
        for sign in (-1.0, 1.0):
            self.eye(sign)
            self.brow(sign)
        self.mouth()
        self.nose()
        self.hair_in_front()
        self.things_in_the_way()

    def contour(self, grow: float = 0.0, n: int = 48) -> np.ndarray:
        """The outline of the head: an ellipse above, narrowing to the chin below."""
        who = self.who
        t = np.arange(n) * (2 * np.pi / n)
        x, y = np.cos(t), np.sin(t)
        below = np.clip(y, 0, 1)
        narrow = 1 - (1 - who["jaw"]) * below**2 - who["chin"] * 0.35 * below**6
        return np.stack([(who["width"] + grow) * x * narrow, (who["height"] + grow) * y], axis=1)

    def shoulders(self) -> None:
        cloth = self.rng.uniform(20, 235, 3)
        who, w = self.who, self.who["width"]
        body = np.array([(-0.95, 1.5), (-0.8, 1.0), (-0.25, 0.82), (0.25, 0.82), (0.8, 1.0), (0.95, 1.5)])
        self.fill(body, cloth, flat=-0.35)
        neck = [(-w * 0.6, 0.4), (w * 0.6, 0.4), (w * 0.62, 0.92), (0, 1.05), (-w * 0.62, 0.92)]
        self.fill(np.array(neck), self.skin * 0.78, flat=-0.2)
        for sign in (-1, 1):
            ear = _oval(sign * (w + 0.01), 0.0, who["ears"] * 0.7, who["ears"] * 1.35, 0.15 * sign)
            self.fill(ear, self.skin * 0.86, flat=0.0)

    def hair_behind(self) -> None:
        who = self.who
        volume = who["hair_volume"] + float(self.rng.normal(0, 0.012))
        shape = self.contour(grow=volume)
        shape = shape[shape[:, 1] <= 0.05]
        low = who["hair_length"] + float(self.rng.normal(0, 0.05))
        if low > 0.05:
            w = who["width"] + volume
            ends = [(w * 1.02, low), (w * 0.6, low + 0.1), (-w * 0.6, low + 0.1), (-w * 1.02, low)]
            shape = np.concatenate([shape, ends])
            centre = shape.mean(0)
            shape = shape[np.argsort(np.arctan2(shape[:, 1] - centre[1], shape[:, 0] - centre[0]), kind="stable")]
        self.fill(shape, self.hair * 0.82, flat=-0.15)

    def head(self) -> None:
        who = self.who
        self.fill(self.contour(), self.skin, flat=0.08)
        self.fill(self.contour(grow=-0.03), self.skin * 1.015, flat=0.12)
        for sign in (-1, 1):
            blush = mix(self.skin, (214, 96, 84), 0.5 * who["cheeks"])
            self.fill(_oval(sign * who["width"] * 0.55, 0.22, 0.12, 0.09), blush)
        if who["beard"] > 0:
            ring = self.contour(grow=-0.015)
            ring = ring[ring[:, 1] > 0.16]
            order = np.argsort(ring[:, 0])
            ring = ring[order]
            height = 0.30 - 0.04 * np.cos(ring[::-1, 0] * 6)
            top = np.stack([ring[::-1, 0] * 0.8, height], axis=1)
            self.fill(np.concatenate([ring, top]), mix(self.skin, self.hair, 0.25 + 0.6 * who["beard"]))
        if who["freckles"] > 0:
            spots = np.random.Generator(np.random.PCG64(int(who["spots"])))
            for x, y in spots.uniform((-0.3, 0.02), (0.3, 0.28), (14, 2)):
                self.fill(_oval(x, y, 0.012, 0.012, n=6), self.skin * (0.8, 0.7, 0.62))
        mark = _oval(who["mark_x"] * who["width"] * 0.8, who["mark_y"], 0.022, 0.022, n=8)
        self.fill(mark, self.skin * (0.5, 0.4, 0.36))

    def eye(self, sign: float) -> None:
        who, pose = self.who, self.pose
        x, y = sign * who["eye_distance"], who["eye_height"]
        rx, tilt = who["eye_size"], -sign * who["eye_tilt"]
        ry = max(0.012, rx * who["eye_open"] * min(1.0, pose.lids + 0.15) * (1 + 0.25 * max(0.0, pose.surprise)))
        self.fill(_oval(x, y - 0.012, rx * 1.18, ry * 1.45, tilt), self.skin * 0.80)
        self.fill(_oval(x, y - 0.010, rx * 1.06, ry * 1.20, tilt), (44, 32, 30))
        self.fill(_oval(x, y, rx, ry, tilt), (242, 240, 236))
        r = min(rx * who["iris_size"], ry * 1.1)
        at = x + pose.gaze * rx * 0.3
        self.fill(_oval(at, y, min(r, rx * 0.6), min(r, ry), n=14), self.iris)
        self.fill(_oval(at, y, r * 0.42, min(r * 0.42, ry), n=10), (16, 12, 12))
        self.fill(_oval(at + 0.012, y - r * 0.3, 0.012, min(0.012, ry), n=6), (250, 250, 250))

    def brow(self, sign: float) -> None:
        who, pose = self.who, self.pose
        t = np.linspace(-1, 1, 9)
        half = who["eye_size"] * 1.35
        x = sign * who["eye_distance"] + t * half
        lift = who["brow_height"] + 0.03 * pose.surprise
        y = who["eye_height"] - lift - who["brow_bend"] * (1 - t**2) + sign * who["brow_tilt"] * t * 0.10
        thick = who["brow_thick"] * (1 - 0.5 * t**2)
        line = band(x, y - thick / 2, y + thick / 2)
        self.fill(line, mix(self.hair * 0.75, self.skin, 0.12))

    def nose(self) -> None:
        who = self.who
        top, tip = who["eye_height"] + 0.02, who["eye_height"] + who["nose_length"]
        w, bridge = who["nose_width"], who["nose_bridge"]
        shade, bright = self.skin * 0.86, np.minimum(self.skin * 1.10 + 6, 255)
        # lifted points move more than the cheeks when the head turns: that is what makes the nose look like one
        at = self.pose.project(np.array([(-bridge, top), (bridge, top)]), 0.02)
        low = self.pose.project(np.array([(w, tip), (0.0, tip + 0.035), (-w, tip)]), 0.09)
        self.polygon(np.concatenate([at, low]), shade)
        at = self.pose.project(np.array([(-bridge * 0.45, top), (bridge * 0.45, top)]), 0.03)
        low = self.pose.project(_oval(0.0, tip - 0.02, w * 0.55, 0.045), 0.13)
        edge = self.pose.project(np.array([(w * 0.4, tip - 0.03), (-w * 0.4, tip - 0.03)]), 0.13)
        self.polygon(np.concatenate([at, edge]), bright)
        self.polygon(low, bright)
        for sign in (-1, 1):
            self.fill(_oval(sign * w * 0.5, tip + 0.012, w * 0.22, 0.014, n=10), self.skin * 0.42, lift=0.10)

    def mouth(self) -> None:
        who, pose = self.who, self.pose
        t = np.linspace(-1, 1, 13)
        x = t * who["mouth_width"] * (1 + 0.18 * pose.smile)
        line = who["mouth_height"] - 0.07 * pose.smile * t**2 + 0.02 * pose.smile
        arch = np.sqrt(np.clip(1 - t**2, 0, 1))
        gape = 0.055 * max(0.0, pose.gape) * arch
        upper = line - gape * 0.4 - who["lip_upper"] * arch * (1 - 0.25 * np.exp(-((t / 0.25) ** 2)))
        lower = line + gape + who["lip_lower"] * arch
        self.fill(band(x, upper, lower), self.lips)
        self.fill(band(x, line - gape * 0.4 - 0.006, line + gape + 0.006), (70, 26, 28))
        if pose.gape > 0.35:
            self.fill(band(x, line - gape * 0.4, line + gape * 0.25), (236, 232, 224))

    def hair_in_front(self) -> None:
        who = self.who
        top = self.contour(grow=0.01)
        top = top[top[:, 1] < -0.18]
        order = np.argsort(top[:, 0])
        top = top[order]
        x = np.linspace(top[-1, 0], top[0, 0], 17)
        near = x / who["width"]
        jag = self.rng.normal(0, 0.012, 17)
        parting = 0.10 * np.exp(-(((near - who["parting"]) / 0.25) ** 2))
        y = -who["height"] * who["hairline"] + 0.42 * np.abs(near) ** 3 - parting + jag
        edge = np.stack([x, np.clip(y, -who["height"] * np.sqrt(np.clip(1 - near**2, 0, 1)), -0.02)], axis=1)
        upper = self.pose.project(top * (1.0 + who["hair_volume"] * 0.6), flat=0.05)
        self.polygon(np.concatenate([upper, self.pose.project(edge, 0.03)]), self.hair)

    def things_in_the_way(self) -> None:
        who, rng = self.who, self.rng
        kind, tone = float(rng.uniform()), rng.uniform(10, 240, 3)
        place, size = float(rng.uniform(-1, 1)), float(rng.uniform())
        if kind < 0.13:  # glasses, clear or dark
            for sign in (-1, 1):
                at = (sign * who["eye_distance"], who["eye_height"])
                rim = self.pose.project(_oval(*at, 0.155, 0.115), 0.06)
                points = ((rim + 1) * (self.side / 2)).ravel().tolist()
                if size > 0.6:
                    self.pen.polygon(points, fill=tint(tone * 0.35))
                self.pen.line([*points, *points[:2]], fill=tint(tone * 0.35), width=max(1, self.side // 64))
            bridge = [(-0.07, -0.02), (0.07, -0.02), (0.07, 0.0), (-0.07, 0.0)]
            self.fill(who["eye_height"] * np.array([0, 1]) + bridge, tone * 0.35, lift=0.07)
        elif kind < 0.22:  # a cap
            line = -who["height"] * (0.45 + 0.2 * size)
            top = self.contour(grow=0.12)
            top = top[top[:, 1] < line]
            self.polygon(self.pose.project(top, flat=0.05), tone)
            w, low = who["width"], line + 0.1
            brim = np.array([(-w * 1.05, line), (w * 1.05, line), (w * 0.7, low), (-w * 0.7, low)])
            self.polygon(self.pose.project(brim, flat=0.35), tone * 0.7)
        elif kind < 0.30:  # a scarf or mask over the mouth
            w = who["width"] * 1.02
            high = 0.14 + 0.1 * size
            shape = np.array([(-w, 0.22), (0, high), (w, 0.22), (w * 0.75, 0.72), (0, 0.92), (-w * 0.75, 0.72)])
            self.fill(shape, tone, flat=0.30)
        elif kind < 0.42:  # something between camera and face
            y, tilt = float(rng.uniform(-0.7, 0.9)), float(rng.uniform(0, 3.1))
            self.polygon(_oval(place * 0.8, y, 0.16 + 0.2 * size, 0.24, tilt), tone)


def _background(rng: np.random.Generator, side: int) -> Image.Image:
    """A soft gradient between two colours with two patches in it."""
    colours = rng.uniform(20, 235, (6, 3))
    colours = mix(colours, colours.mean(1, keepdims=True), 0.55)  # rooms and streets are greyer than chance
    small = Image.fromarray(np.rint(colours[:4]).astype(np.uint8).reshape(2, 2, 3))
    image = small.resize((side, side), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(image)
    for colour in colours[4:]:
        shape = _oval(*rng.uniform(-1, 1, 2), *rng.uniform(0.15, 0.5, 2), n=4 + int(rng.integers(12)))
        pen.polygon(((shape + 1) * (side / 2)).ravel().tolist(), fill=tint(colour))
    return image


def _photograph(picture: np.ndarray, pose: _Pose, rng: np.random.Generator) -> np.ndarray:
    """Light the head as an ellipsoid, then exposure, colour of the light, contrast and noise of a camera; to uint8."""
    size = picture.shape[0]
    at = (np.arange(size) + 0.5) * (2 / size) - 1
    x = (at[None, :] - pose.shift[0]) / (pose.a * 1.15 * pose.scale)
    y = (at[:, None] - pose.shift[1] - 0.06) / (pose.b * 1.15 * pose.scale)
    r = x**2 + y**2
    z = np.sqrt(np.maximum(1 - r, 0.02))
    lit = np.clip(x * pose.light[0] + y * pose.light[1] + z * pose.light[2], 0, 1)
    inside = np.clip((1.3 - r) / 0.6, 0, 1)  # fades into the even light of the background, so that no edge is drawn
    shade = inside * (pose.ambient + (1 - pose.ambient) * lit) + (1 - inside) * (0.5 + 0.5 * pose.ambient)
    exposure, contrast = float(rng.uniform(0.75, 1.30)), float(rng.uniform(0.75, 1.15))
    gain = (exposure * contrast * (1 + rng.uniform(-0.10, 0.10, 3))).astype(np.float32)
    grain = rng.standard_normal(picture.shape, dtype=np.float32) * np.float32(rng.uniform(0.005, 0.045))
    picture = picture * (shade[:, :, None].astype(np.float32) * gain) + grain + np.float32(0.45 * (1 - contrast))
    return to_bytes(picture * 255)

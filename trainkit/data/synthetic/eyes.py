"""A built-in set of drawn eyes, open and closed, so that an eye-state network can train without a download.

Crops of one eye, 32 x 64 pixels. A person has the shape of an eye, skin, iris, lashes, brow, folds, makeup
and perhaps glasses; an image of the person adds how far the eye is open, gaze, light, pose, blur, a coarse sensor,
noise, now and then the grey of an infrared camera, reflections and strands of hair. How far an eye is open runs from 0
to 1 of what that person's eye can do, "open" starts at `OPEN_FROM`, and people narrow their eyes: images near that
border are nearly ambiguous. On top of that, `WRONG` of the labels of both splits are wrong on purpose (`sample.json`
lists those images), as in sets that people have labelled. Nothing can therefore score 1.0 here.

What it shows: that the code runs, that a network beats pixels, and that wrong labels are found. What it does not show:
that anything works on eyes, or that large networks beat small ones: 3,600 images are few for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from trainkit.data.synthetic import drawing
from trainkit.data.synthetic.drawing import (
    band,
    blurred,
    drawn_once,
    exposed,
    generator,
    mix,
    resampled,
    save,
    tint,
    to_bytes,
    write_about,
)

VERSION = 3
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20251102
HEIGHT, WIDTH = 32, 64
PEOPLE = {"train": 180, "val": 40}
"""People of each split; nobody is in both."""
PICTURES = 20
"""Images of each person, half of them closed before labels are made wrong."""
OPEN_FROM = 0.22
"""An eye that is open at least this share of what it can be counts as open."""
WRONG = 0.02
"""The share of labels of each split that is wrong."""

_SUPERSAMPLING = 3
_UNIT = HEIGHT * _SUPERSAMPLING // 2  # drawn pixels of one unit: the crop spans -2..2 by -1..1


def folder() -> Path:
    """Return the sample set as a folder, by `drawn_once` (about 15 s on one core, 20 MB).

    Holds `train/closed`, `train/open`, `val/closed`, `val/open` with images `<person>_<n>.png` (`p0012_03.png`), and
    `sample.json`, which says which labels are wrong. Images are RGB, 32 high and 64 wide. People of `val` are not in
    `train`.
    """
    return drawn_once(f"eyes-v{VERSION}", _write, megabytes=30)


def rows(split: str) -> list[tuple[int, int, str, bool]]:
    """Return the images of `split` ("train" or "val"): person, number, label ("closed" or "open"), wrong or not."""
    first = 0 if split == "train" else PEOPLE["train"]
    people = range(first, first + PEOPLE[split])
    every = [(person, number) for person in people for number in range(PICTURES)]
    rng = generator(SEED, 1, first)
    wrong = set(rng.permutation(len(every))[: round(WRONG * len(every))].tolist())
    answer = []
    for i, (person, number) in enumerate(every):
        is_open = openness(person, number) >= OPEN_FROM
        answer.append((person, number, "open" if is_open != (i in wrong) else "closed", i in wrong))
    return answer


def openness(person: int, number: int) -> float:
    """Return how far the eye of an image is open, from 0 (shut) to 1 (as far as this person's eye goes)."""
    order = generator(SEED, 2, person).permutation(PICTURES)
    rng = generator(SEED, 3, person, number)
    how, much = (float(v) for v in rng.uniform(size=2))
    if order[number] < PICTURES // 2:  # closed: half are shut, half nearly
        return 0.04 * much if how < 0.5 else 0.04 + 0.17 * much
    if how < 0.5:  # narrowed
        return 0.23 + 0.27 * much
    return 0.5 + 0.5 * much


def _write(to: Path) -> None:
    wrongs = []
    for split in PEOPLE:
        for label in ("closed", "open"):
            (to / split / label).mkdir(parents=True)
        for person, number, label, wrong in rows(split):
            name = f"{split}/{label}/p{person:04d}_{number:02d}.png"
            save(draw(person, number), to / name)
            if wrong:
                wrongs.append(name)
    what = "drawn eyes made by trainkit.data.synthetic.eyes; they show that code runs, not that it works on eyes"
    write_about(to, what, VERSION, SEED, people=PEOPLE, pictures=PICTURES, wrong_labels=wrongs)


# ---- drawing: from the skin to what is in front of the eye; x right, y down, the crop spans -2..2 by -1..1 ----


def draw(person: int, number: int) -> np.ndarray:
    """Image `number` of `person`: uint8, (32, 64, 3), RGB."""
    who = _person(generator(SEED, 4, person))
    rng = generator(SEED, 5, person, number)
    return _photograph(rng, _Eye(who, rng, openness(person, number)).draw())


def _person(rng: np.random.Generator) -> dict[str, float]:
    """Draw what stays the same in all images of one person: numbers in the ranges written here."""
    ranges = {
        "width": (0.95, 1.30), "upper": (0.34, 0.50), "lower": (0.13, 0.20), "peak": (-0.30, 0.20),
        "tilt": (-0.16, 0.16), "skin": (0.0, 1.0), "warm": (-1.0, 1.0), "socket": (0.0, 0.45), "bags": (0.0, 0.35),
        "iris": (0.0, 1.0), "green": (0.0, 1.0), "iris_size": (0.33, 0.45), "sclera": (0.0, 1.0),
        "lash": (0.1, 0.30), "lash_thick": (0.02, 0.08), "liner": (-0.10, 0.13), "makeup": (-0.6, 0.75),
        "fold": (0.10, 0.34), "fold_dark": (0.0, 0.5), "lines": (-1.0, 1.0),
        "brow": (-1.05, -0.62), "brow_thick": (0.08, 0.24), "brow_bend": (0.02, 0.25), "hair": (0.0, 1.0),
        "glasses": (-0.7, 0.3), "rim": (0.75, 1.1), "rim_thick": (0.05, 0.13),
    }  # fmt: skip
    who = {name: float(rng.uniform(low, high)) for name, (low, high) in ranges.items()}
    who["upper"], who["lower"] = who["upper"] * who["width"], who["lower"] * who["width"]
    who.update({f"makeup_{i}": float(v) for i, v in enumerate(rng.uniform(30, 170, 3))})
    who.update({f"rim_{i}": float(v) for i, v in enumerate(rng.uniform(10, 110, 3))})
    return who


_circle = partial(drawing.oval, n=24)


class _Eye:
    """Draws one eye."""

    def __init__(self, who: dict[str, float], rng: np.random.Generator, opened: float):
        self.who, self.rng, self.opened = who, rng, opened
        self.size = (4 * _UNIT, 2 * _UNIT)
        skin = mix((240, 205, 180), (92, 60, 44), who["skin"])
        self.skin = skin + np.array((8, -2, -12)) * who["warm"]
        self.hair = mix((140, 104, 70), (24, 18, 16), who["hair"])
        self.lash_colour = mix(self.hair, (18, 14, 14), 0.6)
        turn, scale = who["tilt"] + 0.13 * float(rng.standard_normal()), float(rng.uniform(0.9, 1.5))
        mirror = 1.0 if float(rng.uniform()) < 0.5 else -1.0
        narrow = float(rng.uniform(0.82, 1.0))
        c, s = math.cos(turn) * scale, math.sin(turn) * scale
        self.turn = np.array([(c * narrow * mirror, s * narrow), (-s * mirror, c)])  # coordinates are rows
        self.shift = rng.uniform(-1, 1, 2) * (0.35, 0.24) + (2, 1.06)
        self.gaze = rng.uniform(-1, 1, 2) * (0.42, 0.14)
        if opened < 0.5:
            self.gaze[1] = abs(self.gaze[1])  # lids follow the gaze: a narrowed eye does not look up
        t = np.linspace(-1, 1, 25)
        bulge = 1 - t * t
        skewed = bulge * (1 + who["peak"] * t)
        self.x = t * who["width"]
        self.low = who["lower"] * (bulge + 0.35 * bulge * t)
        shut = self.low * 0.9 - 0.01
        self.lid = shut + (-who["upper"] * skewed - shut) * opened
        self.wide = -who["upper"] * skewed  # where the upper lid would be, wide open: the fold stays near it

    def flat(self, points: np.ndarray | list[tuple[float, float]], width: int = 4 * _UNIT) -> list[float]:
        """From the coordinates of the eye to pixels of a crop `width` wide, or of the drawing: x, y, x, y."""
        at = (np.asarray(points, dtype=np.float64) @ self.turn + self.shift) * (width / 4)
        return at.ravel().tolist()

    def over(
        self, image: Image.Image, points: np.ndarray, colour: Sequence[float] | np.ndarray, share: float = 1.0
    ) -> None:
        """Lay a polygon over the image; `share` 1 hides what is below."""
        fill = (*tint(colour), round(255 * min(1.0, max(0.0, share))))
        ImageDraw.Draw(image, "RGBA").polygon(self.flat(points, image.width), fill=fill)

    def line(
        self, image: Image.Image, x: np.ndarray, y: np.ndarray, colour: np.ndarray, width: float, share: float = 1.0
    ) -> None:
        """A line of `width` units through points of the eye, thin at its ends."""
        taper = 0.35 + 0.65 * (1 - np.linspace(-1, 1, len(x)) ** 2)
        half = taper * width / 2
        self.over(image, band(x, y - half, y + half), colour, share)

    def draw(self) -> Image.Image:
        image = self.face()
        if self.opened > 0.015:
            self.ball(image)
        self.lids(image)
        self.brow(image)
        self.in_front(image)
        return image

    def face(self) -> Image.Image:
        """Draw skin with its soft shadows: small and blurred, for it has no edges."""
        who, rng = self.who, self.rng
        corners = np.stack([self.skin * float(v) for v in rng.uniform(0.72, 1.12, 6)])
        small = Image.fromarray(to_bytes(corners).reshape(2, 3, 3))
        image = small.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
        w = who["width"]
        self.over(image, _circle(-w * 0.9, -0.25, 0.5, 0.5), self.skin * 0.5, who["socket"])
        self.over(image, _circle(0, -0.35, w * 1.15, 0.42), self.skin * 0.6, who["socket"] * 0.8)
        self.over(image, _circle(0, 0.42, w * 0.8, 0.14), self.skin * 0.55, who["bags"])
        lid = band(self.x, self.wide - who["fold"], self.lid, self.x * 1.05)
        if who["makeup"] > 0:
            self.over(image, lid, [who[f"makeup_{i}"] for i in range(3)], who["makeup"])
        dome = _circle(float(rng.uniform(-0.3, 0.3)), -0.1, w * 0.45, 0.2)
        self.over(image, dome, self.skin * 1.25, 0.3 * float(rng.uniform()))  # the ball below the lid catches light
        return image.filter(ImageFilter.GaussianBlur(1.8)).resize(self.size, Image.Resampling.BILINEAR)

    def ball(self, image: Image.Image) -> None:
        """Draw what is between the lids: sclera, iris, pupil, highlights and the shadow of the upper lid."""
        who, rng = self.who, self.rng
        white = mix((226, 220, 214), (190, 166, 150), who["sclera"]) * float(rng.uniform(0.7, 1.05))
        ball = Image.new("RGB", self.size, tint(white))
        gx, gy, r = float(self.gaze[0]), float(self.gaze[1]) - 0.05, who["iris_size"]
        iris = mix(mix((112, 150, 180), (110, 130, 80), who["green"]), (58, 34, 20), who["iris"])
        self.over(ball, _circle(gx, gy, r * 0.97, r), iris * 0.45)
        self.over(ball, _circle(gx, gy, r * 0.84, r * 0.87), iris)
        pupil = r * float(rng.uniform(0.28, 0.55))
        self.over(ball, _circle(gx, gy, pupil, pupil), (14, 10, 10))
        for _ in range(int(rng.integers(0, 3))):
            hx, hy = rng.uniform(-0.6, 0.6, 2) * r
            self.over(ball, _circle(gx + hx, gy + hy - 0.08, 0.07, 0.07), (250, 250, 250), float(rng.uniform(0.5, 1)))
        self.over(ball, band(self.x, self.lid - 0.05, self.lid + 0.11), (30, 22, 20), 0.45)
        mask = Image.new("L", self.size)
        ImageDraw.Draw(mask).polygon(self.flat(band(self.x, self.lid, self.low)), fill=255)
        image.paste(ball, mask=mask)

    def lids(self, image: Image.Image) -> None:
        """Draw the fold, the edges of the lids, lashes, liner and wrinkles."""
        who, rng, w = self.who, self.rng, self.who["width"]
        fold = self.wide * (0.55 + 0.45 * self.opened) - who["fold"] * (1.15 - 0.35 * self.opened)
        self.line(image, self.x * 1.02, fold, self.skin * 0.5, 0.06, who["fold_dark"] + 0.25)
        self.line(image, self.x, self.low + 0.02, self.skin * 0.62, 0.06, 0.7)
        thick = who["lash_thick"] + max(0.0, who["liner"])
        self.line(image, self.x * 1.03, self.lid - 0.01, self.lash_colour, thick + 0.03, 0.9)
        if who["liner"] > 0.04:
            self.line(image, self.x, self.low + 0.03, self.lash_colour, who["liner"], 0.6)
        lean = -1.0 + 1.9 * max(0.0, 0.55 - self.opened) / 0.55  # lashes point up when the eye is wide, down when shut
        pen = ImageDraw.Draw(image)
        for i in range(3, 23, 2):
            x, y = float(self.x[i]), float(self.lid[i])
            length = who["lash"] * float(rng.uniform(0.6, 1.1))
            tip = (x + 0.35 * length * x / w, y + length * lean)
            pen.line(self.flat([(x, y), tip]), fill=tint(self.lash_colour), width=1 + (who["lash_thick"] > 0.045))
        for i in range(int(max(0.0, who["lines"]) * 4)):
            x = np.linspace(w * 0.95, w * 1.5, 5)
            y = np.linspace(0, 0.12 * (i - 1), 5) + 0.05
            self.line(image, x, y, self.skin * 0.6, 0.035, 0.5)
        if rng.uniform() < who["lines"]:
            self.line(image, self.x * 0.8, self.low + 0.2, self.skin * 0.6, 0.05, 0.5)

    def brow(self, image: Image.Image) -> None:
        who, w = self.who, self.who["width"] * 1.15
        t = np.linspace(-1, 1, 13)
        y = who["brow"] + 0.05 * (1 - self.opened) + who["brow_bend"] * (t - 0.2) ** 2
        self.line(image, t * w, y, self.hair, who["brow_thick"], 0.85)

    def in_front(self, image: Image.Image) -> None:
        """Draw glasses with their reflections, and strands of hair."""
        who, rng = self.who, self.rng
        for _ in range(int(rng.integers(0, 4))):  # tears and powder glint on lids as eyes do
            x, y = float(rng.uniform(-0.8, 0.8)) * who["width"], float(rng.uniform(-0.35, 0.3))
            wide = float(rng.uniform(0.03, 0.11))
            glint = _circle(x, y, wide, wide * float(rng.uniform(0.5, 1.0)))
            self.over(image, glint, (240, 238, 236), float(rng.uniform(0.2, 0.8)))
        kind, place, tone = float(rng.uniform()), rng.uniform(-1, 1, 4), rng.uniform(150, 255, 3)
        pen = ImageDraw.Draw(image)
        if who["glasses"] > 0:
            slip = float(rng.uniform(-0.1, 0.2))
            rim = _circle(0.05, slip, 1.95, who["rim"])
            rim = mix(rim, np.clip(rim, (-1.6, slip - 0.8 * who["rim"]), (1.7, slip + 0.8 * who["rim"])), 0.7)
            at = self.flat(rim)
            colour = tint([who[f"rim_{i}"] for i in range(3)])
            pen.line([*at, *at[:2]], fill=colour, width=round(who["rim_thick"] * _UNIT))
            if kind < 0.6:
                x, y = place[0] * 0.9, place[1] * 0.3
                slant, wide, high = place[2] * 0.4, 0.15 + 0.3 * abs(place[3]), 0.5
                quad = [(x - wide - slant, y - high), (x + wide - slant, y - high)]
                quad += [(x + wide + slant, y + high), (x - wide + slant, y + high)]
                self.over(image, np.array(quad), tone, float(rng.uniform(0.2, 0.8)))
        elif kind < 0.25:
            for i in range(3):
                x = 2 * place[0] + 0.25 * i
                at = self.flat([(x, -1.6), (x + 0.4 * place[1], 0), (x + place[2], 1.6)])
                pen.line(at, fill=tint(self.hair), width=1 + i % 2)


def _photograph(rng: np.random.Generator, image: Image.Image) -> np.ndarray:
    """A light from one side, blur, a coarse sensor, infrared, exposure, contrast and noise; to uint8."""
    image = image.reduce(_SUPERSAMPLING)
    blur, coarse, infrared = float(rng.uniform(-0.6, 1.3)), float(rng.uniform(0.4, 1.5)), float(rng.uniform()) < 0.12
    picture = np.asarray(resampled(blurred(image, blur), coarse, below=0.9), dtype=np.float32)
    if infrared:
        grey = picture[:, :, :1] * np.float32(0.7) + picture[:, :, 1:2] * np.float32(0.3)
        picture = np.concatenate([grey, grey, grey], axis=2)
    x = ((np.arange(WIDTH) + 0.5) * (2 / WIDTH) - 1).astype(np.float32)[None, :, None]
    y = ((np.arange(HEIGHT) + 0.5) * (2 / HEIGHT) - 1).astype(np.float32)[:, None, None]
    lx, ly = (np.float32(v) for v in rng.uniform(-1, 1, 2) * (0.4, 0.25))
    return exposed(
        rng,
        picture,
        1 + x * lx + y * ly,
        contrast=(0.55, 1.15),
        exposure=(0.6, 1.3),
        tint=0.0 if infrared else 0.12,
        noise=16,
        grey=100,
        channels=1 if infrared else 3,
    )

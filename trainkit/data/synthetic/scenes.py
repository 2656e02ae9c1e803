"""A built-in set of drawn street scenes with a class for each pixel, so that a segmentation network can train at once.

Images, 96 x 128, as a camera on a car would take them, each of a street of its own. A street has a width,
a bend, pavements, perhaps a junction, houses or a park on either side, fences, hedges and walls, trees with leaves or
without, lamps, signs, parked and moving cars, people. Camera height, direction and roll, weather (sun with shadows,
cloud, fog, dusk), light and the sensor change from image to image. All of it is laid out in metres and projected,
so that far things are small and near things hide them. Classes look alike in places: pavements as dark as the road,
glass fronts that mirror the sky, hedges as high as fences, walls of the brick of a house, bare trunks beside lamps.

Masks come from the same polygons and are then made as people make them: borders wander by about half a pixel, crowns
and railings are filled although sky shows through, thin poles are drawn a pixel wide, a few small far things are not
drawn at all. Nothing can therefore score 1.0 here. Not labelled (255) are the bonnet of the own car, strips at the
sides that the lens left over, bins and benches, and now and then the muddle at the end of the street.

What it shows: that the code runs, and that a network beats the commonest class of each place and a larger network a
smaller one. What it does not show: that anything works on photographs, or what a method is worth there: 240 images
of flat polygons are few and easy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from trainkit.data.synthetic.drawing import (
    blurred,
    drawn_once,
    exposed,
    generator,
    mix,
    resampled,
    save,
    to_bytes,
    write_about,
)
from trainkit.data.synthetic.street import (
    BUILDING,
    GRAIN,
    HEIGHT,
    IGNORED,
    LEAVES,
    NEAR,
    PAVEMENT,
    PLANTS,
    ROAD,
    SUPERSAMPLING,
    WIDTH,
    Street,
)
from trainkit.data.synthetic.street_objects import barrier, car, house, person, pole, thing, tree

VERSION = 4
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20251122
PICTURES = {"train": 240, "val": 60}
"""Images of each split; each is of another street."""
NAMES = ("sky", "building", "road", "pavement", "vegetation", "fence", "pole", "car", "person")
"""The classes 0 to 8. Grass and hedges are `vegetation`, garden walls `fence`, signs and lamps `pole`."""
COLOURS = (
    (120, 170, 220), (150, 90, 70), (110, 80, 130), (225, 110, 200), (90, 140, 50), (190, 150, 110), (240, 220, 60),
    (30, 50, 160), (220, 40, 60),
)  # fmt: skip
"""Red, green and blue of each class; the palette of the mask files, in which 255 is white."""
_TEXTURE = np.array([(0, 0, 0), (0.02, 0.02, 0.05), (0.07, 0.05, 0.06), (0.16, 0.14, 0.08), (0.08, 0.06, 0.08)])
"""How strong noise of one pixel, of three and of twelve is on each kind of surface."""


_FAR = 160.0


def folder() -> Path:
    """Return the sample set as a folder, by `drawn_once` (about 25 s on one core, 10 MB).

    Holds images `train/0000.png` and `val/0240.png` (RGB, 96 high and 128 wide), their masks of the same names in
    `trainannot` and `valannot` (palette files: the index is the class, 255 is not labelled), and `sample.json`.
    """
    return drawn_once(f"scenes-v{VERSION}", _write, megabytes=20)


def numbers(split: str) -> range:
    """Return the numbers of the images of `split` ("train" or "val")."""
    first = 0 if split == "train" else PICTURES["train"]
    return range(first, first + PICTURES[split])


def draw(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Image `number`, uint8 (96, 128, 3), and its mask, uint8 (96, 128): classes, or 255."""
    rng = generator(SEED, 1, number)
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
            save(picture, to / split / f"{number:04d}.png", compress_level=3)
            labels = Image.fromarray(mask)
            labels.putpalette(palette.tobytes())
            labels.save(to / f"{split}annot" / f"{number:04d}.png")
    what = "drawn streets made by trainkit.data.synthetic.scenes; they show that code runs, not that it works"
    write_about(to, what, VERSION, SEED, pictures=PICTURES, names=NAMES, ignored=IGNORED)


class _Scene(Street):
    """Draws one street."""

    own: np.ndarray
    """Where the bonnet of the own car is, bool (96, 128); known once the street was photographed."""

    def draw(self) -> None:
        self.ground()
        self.skyline()
        for side in (0, 1):
            self.edge(side)
        self.pavements()
        self.traffic()
        for _, _, draw in sorted(self.things, key=lambda item: item[:2]):
            draw()

    def sky(self, y: np.ndarray) -> Image.Image:
        """Two colours and clouds, of the size of the image: there are no edges in it."""
        one, n = self.one, SUPERSAMPLING
        clouds = Image.fromarray(self.rng.uniform(0, 1, (6, 8)).astype(np.float32))
        soft = np.asarray(clouds.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))[..., None]
        colour = mix(self.high, self.haze, np.clip(0.9 + y[n // 2 :: n] * 1.3, 0, 1)[:, None, None])
        cover = np.clip((soft - np.float32(one(0.3, 0.9))) * np.float32(2.5), 0, 1) * np.float32(one(0.2, 0.9))
        return Image.fromarray(to_bytes(mix(colour, self.haze * 0.5 + 100 * (0.5 if self.dusk else 1.05), cover)))

    def ground(self) -> None:
        """Draw sky, road, pavement and what is beside it: for each pixel where its ray meets the ground."""
        x = ((np.arange(WIDTH * SUPERSAMPLING) + 0.5) / SUPERSAMPLING - WIDTH / 2) / self.focal
        y = ((np.arange(HEIGHT * SUPERSAMPLING) + 0.5) / SUPERSAMPLING - HEIGHT / 2) / self.focal
        sky = self.sky(y)
        # Rays of the rows that meet the ground somewhere: where on the street they do.
        (a0, a1, a2), (b0, b1, b2), (c0, c1, c2) = self.matrix
        falls = a2 * x[None] + b2 * y[:, None] + c2 < -1e-3
        top = int(falls.any(1).argmax()) if falls.any() else len(y)
        below, down = falls[top:], y[top:, None]
        t = -self.eye[2] / np.where(below, a2 * x[None] + b2 * down + c2, -1e-3)
        s = t * (a1 * x[None] + b1 * down + c1)
        u = self.eye[0] + t * (a0 * x[None] + b0 * down + c0) - self.bend * s * s
        colour, bright, kind, texture = self.surfaces(u, s)
        hidden = (t / (t + self.clear)).astype(np.float32)
        lit = bright * np.float32(0.55 if self.dusk else 1.0) * (1 - hidden)
        ground = colour * lit[..., None]
        ground += self.haze.astype(np.float32) * hidden[..., None]
        self.image.paste(sky.resize(self.image.size, Image.Resampling.BILINEAR))
        mask = Image.fromarray(below.astype(np.uint8) * 255)
        for image, array in ((self.image, ground), (self.labels, kind), (self.surface, texture)):
            image.paste(Image.fromarray(to_bytes(array)), (0, top), mask)

    def surfaces(self, u: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return colour, brightness, class and kind of surface of the ground at each place."""
        one = self.one
        asphalt = np.full(3, one(62, 140)) + np.array([one(-6, 10), 0, one(-10, 8)])
        slabs = asphalt * one(0.85, 1.15) if self.chance(0.35) else self.pick((160, 156, 150), (150, 120, 105))
        paints = [asphalt, slabs, slabs * one(1.1, 1.4), self.pick((92, 120, 50), (120, 124, 66))]
        paints += [np.full(3, one(170, 240)), self.pick((140, 84, 72), (150, 110, 96))]
        plain, slab, kerb, grass, white, red = range(len(paints))
        tone, bright = np.full(u.shape, plain, np.uint8), np.ones(u.shape, np.float32)
        kind, texture = np.full(u.shape, ROAD, np.uint8), np.full(u.shape, GRAIN, np.uint8)
        first, last = self.junction or (np.inf, np.inf)
        crossing = (s >= first) & (s < last)
        for side, sign in enumerate((-1.0, 1.0)):
            across = u * sign - self.half
            beside = (across >= 0) & ~crossing
            tone[beside], kind[beside] = slab, PAVEMENT
            if self.chance(0.7):
                tone[beside & (across < 0.25)] = kerb
            joint = beside & (s < 16) & ((s * 1.1 - np.floor(s * 1.1) < 0.06) | (across - np.floor(across) < 0.06))
            bright[joint] *= one(0.75, 1.0)
            green = np.zeros_like(beside)
            if self.park[side] or (self.setback[side] > 1 and self.chance(0.5)):
                green |= beside & (across >= self.walk[side])
            if self.chance(0.15):  # a strip of grass along the kerb
                green |= beside & (across < 0.9) & (across > 0.2)
            tone[green], kind[green], texture[green] = grass, PLANTS, LEAVES
        self.mark(u, s, (kind == ROAD) & ~crossing, tone, bright, white, red)
        return np.stack(paints).astype(np.float32)[tone], bright, kind, texture

    def mark(
        self, u: np.ndarray, s: np.ndarray, on: np.ndarray, tone: np.ndarray, bright: np.ndarray, white: int, red: int
    ) -> None:
        """Add markings, patches and the shadow of houses to the road, which is where `on` is set."""
        one = self.one
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

    def skyline(self) -> None:
        """Draw what closes the street far away: roofs or trees."""
        wood = self.chance(0.5)
        s, u = _FAR * self.one(0.6, 1.0), -220.0
        middle = -self.bend * s * s
        end = self.chance(0.5)
        while u < 220:
            wide, high = self.one(8, 26), self.one(3, 17)
            if abs(u + wide / 2) > 16 or end:
                spread = [(u + middle, s, -1), (u + middle + wide, s, -1), (u + middle + wide, s, high)]
                colour = self.pick((84, 100, 62)) if wood else self.pick((130, 118, 110))
                self.lay([*spread, (u + middle, s, high)], colour, PLANTS if wood else BUILDING, GRAIN)
            u += wide * (0.8 if end else 1.0)
        if self.chance(0.3):  # the street ends before a house
            s = self.one(35, 90)
            self.later(2, 0.0, s + 60, _across, s)

    def edge(self, side: int) -> None:
        """Plan one side of the street behind its pavement: houses or a park, and what stands before them."""
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
                self.later(2, back * sign, s + long / 2, house, back * sign, sign, s, s + long, high)
            if free and self.park[side]:
                for _ in range(int(self.rng.integers(1, 4))):
                    u, at = (line + one(2, 16)) * sign, s + one(0, long)
                    self.later(1, u, at, tree, u, at, one(4, 13))
            if free and (self.park[side] or self.setback[side] > 1) and self.chance(0.9):
                self.later(3, line * sign, s + long / 2, barrier, line * sign, s, s + long - gap)
            s += long + gap

    def pavements(self) -> None:
        """Plan trees, poles, people and unlabelled things along both kerbs."""
        one = self.one
        for side, sign in enumerate((-1.0, 1.0)):
            wide = self.walk[side]
            kerb = self.half + 0.3
            if self.chance(0.45) and wide > 1.6:
                step, start = one(6, 14), one(3, 9)
                for i in range(6):
                    s = start + i * step + one(-1, 1)
                    self.later(4, (kerb + 0.3) * sign, s, tree, (kerb + 0.3) * sign, s, one(4, 9))
            if self.chance(0.2):  # railings between the pavement and the road
                s, long = one(1, 12), one(6, 20)
                for i in range(4):
                    start, end = s + long * i / 4, s + long * (i + 1) / 4
                    self.later(4, kerb * sign, end, barrier, (kerb - 0.2) * sign, start, end, 3, 1.1)
            step, start = one(9, 24), one(3, 14)
            kind = int(self.rng.integers(3))
            for i in range(5):
                s = start + i * step
                self.later(4, kerb * sign, s, pole, kerb * sign, -sign, s, kind if i % 2 else 1)
            for _ in range(int(self.rng.integers(0, 6))):
                s, u = one(3, 30), (kerb + one(0, max(0.3, wide - 0.5))) * sign
                self.later(4, u, s, person, u, s)
            for _ in range(int(self.rng.integers(0, 3))):
                s, u = one(4, 30), (kerb + one(0, wide)) * sign
                self.later(4, u, s, thing, u, s)

    def traffic(self) -> None:
        """Plan cars along the kerbs and on the road, and people who cross."""
        one = self.one
        for sign in (-1.0, 1.0):
            if self.half > 3.2 and self.chance(0.6):
                s, u = one(1, 12), (self.half - one(0.9, 1.1)) * sign
                for _ in range(int(self.rng.integers(1, 7))):
                    if not (self.junction and s + 5 > self.junction[0] and s < self.junction[1]):
                        self.later(4, u, s + 2, car, u, s)
                    s += one(5, 11)
        for _ in range(int(self.rng.integers(0, 4))):
            u, s = one(-0.5, 0.5) * self.half, one(7, 55)
            self.later(4, u, s + 2, car, u, s)
        if self.junction and self.chance(0.6):  # one that turns or waits, seen from its side
            u, s = one(-9, 9), one(*self.junction)
            self.later(4, u, s, car, u, s, True)
        if self.chance(0.25):
            for _ in range(int(self.rng.integers(1, 4))):
                u, s = one(-0.9, 0.9) * self.half, one(5, 25)
                self.later(4, u, s, person, u, s)


def _across(street: Street, s: float) -> None:
    """Draw a house at the end of the street."""
    house(street, -16, 16, s, s + 12, street.one(6, 15), across=True)


# ---- from the drawing to the files: what a camera does to the image, and what people do to the mask ----


def _photograph(rng: np.random.Generator, scene: _Scene) -> np.ndarray:
    """Add texture, bonnet, blur, a coarse sensor, light that falls off, exposure, contrast and noise; to uint8."""
    picture = np.asarray(scene.image.reduce(SUPERSAMPLING), dtype=np.float32)
    middle = SUPERSAMPLING // 2
    kind = np.asarray(scene.surface)[middle::SUPERSAMPLING, middle::SUPERSAMPLING]
    for level, step in enumerate((1, 3, 12)):
        coarse = rng.standard_normal((HEIGHT // step + 1, WIDTH // step + 1), dtype=np.float32)
        noise = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
        picture = picture * (1 + _TEXTURE[kind, level].astype(np.float32) * noise)[..., None]
    bonnet = float(rng.uniform(3, 13)) if float(rng.uniform()) < 0.35 else 0.0
    rows = HEIGHT - np.arange(HEIGHT, dtype=np.float32)[:, None]
    across = ((np.arange(WIDTH, dtype=np.float32) + 0.5) * (2 / WIDTH) - 1)[None]
    scene.own = rows <= np.float32(bonnet) * (1 - 0.45 * across * across) if bonnet else rows < 0 * across
    metal = rng.uniform(20, 120, 3).astype(np.float32)
    sheen = np.clip(1.6 - 0.08 * rows + 0 * across, 0.6, 1.6)[..., None]
    image = Image.fromarray(to_bytes(np.where(scene.own[..., None], metal * sheen, picture)))
    blur, sensor = float(rng.uniform(-0.6, 0.9)), float(rng.uniform(0.6, 1.5))
    picture = np.asarray(resampled(blurred(image, blur), sensor, below=0.85), dtype=np.float32)
    down = (rows * (2 / HEIGHT) - 1).astype(np.float32)
    falls = (1 - np.float32(rng.uniform(0, 0.2)) * (across * across + down * down))[..., None]
    return exposed(rng, picture, falls, contrast=(0.6, 1.15), exposure=(0.65, 1.25), tint=0.07, noise=9, grey=110)


def _annotate(rng: np.random.Generator, scene: _Scene) -> np.ndarray:
    """Return the labels with borders that wander by about half a pixel, and what nobody labels; uint8 (96, 128)."""
    drawn, n = np.asarray(scene.labels), SUPERSAMPLING
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
        if end[2] > NEAR:
            cx, cy = (v / n for v in scene.pixel(*end))
            rows, columns = np.arange(HEIGHT)[:, None] + 0.5 - cy, np.arange(WIDTH)[None] + 0.5 - cx
            mask[rows * rows * 4 + columns * columns < (4 + 8 * much) ** 2] = IGNORED
    mask[scene.own] = IGNORED
    return mask

"""Modalities derived from photographs: infrared, colour pencil, sketch and words of people known in colour alone.

Of a folder of people, `<person>/*.jpg`, about half of each person's photographs stay as they are, and each of the
others becomes a record of one other modality: near infrared, colour pencil (Kuwahara et al. 1976, few colours, strokes)
or sketch (the image divided by its own blur). Nothing that is asked for has its own original in the gallery; captions
say what was measured on those photographs of a person that are not there either, at the places of aligned faces. It
shows how the method does on real faces, and nothing of infrared cameras or drawings by people: say "derived" beside
every number from it. All follows from the photographs, their names and a seed.
"""

from __future__ import annotations

import csv
import json
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from trainkit.data import cache, image_folder, import_images
from trainkit.data.formats import image_decode
from trainkit.data.synthetic.drawing import generator, listed, save, to_bytes
from trainkit.errors import UserError
from trainkit.interfaces import CP, MODALITIES, NIR, RGB, SK

VERSION = 1
"""Part of the folder's key; raised with any change to what is derived."""
SEED = 20251121
LARGEST, SMALLEST = 256, 16
"""Longer side of a derived image at most, and shorter side of a photograph at least, in pixels."""
Row = tuple[str, str, str, str, str]


def folder(path: Path) -> Path:
    """Return the derived set of the people in `path`, made once (10 to 20 s for 3,500 faces of 112 x 112).

    It holds `index.csv` (path, person, camera, modality, text; the text of a photograph is its caption), the images
    `<modality>/<person>/<number>.png`, the photographs that stayed, byte for byte, under `rgb/`, and `derived.json`. It
    lies in the cache, keyed by the files of `path`. Processes that start together make it once.

    Raises:
        UserError: no images of people there, damaged or tiny ones (naming them), or the cache cannot be written.
    """
    if not path.is_dir():
        raise UserError(str(path), "no such folder", "a folder of people, <person>/<image>.jpg")
    files = [Path(file) for file in image_folder.list_images(path, nested=False).paths()]
    if not files:
        raise UserError(str(path), "no images", "photographs of people in <person>/<image>.jpg")
    made = cache.place(f"derived-{cache.key(['derived', VERSION, str(path.absolute())], files)}")
    what = f"deriving modalities of {path}"
    return cache.fill_once(made, "derived.json", lambda aside: _write(path, files, aside), what)


def divided(person: str, count: int) -> list[int]:
    """Assign a modality to each of a person's `count` photographs, by their places in the order of names.

    Half stay RGB, but of four or more three are always left for the others, and at least one is RGB.
    """
    rng, codes = _rng(person), [RGB] * count
    order, first = rng.permutation(count), int(rng.integers(3))
    for i, place in enumerate(order[: max(min(3, count - 1), count // 2)].tolist()):
        codes[place] = (NIR, CP, SK)[(first + i) % 3]
    return codes


def _write(path: Path, files: Sequence[Path], to: Path) -> None:
    people: dict[str, list[Path]] = {}
    damaged: list[str] = []
    for photograph in files:
        people.setdefault(photograph.parent.name, []).append(photograph)
    rows = [row for person, some in people.items() for row in _person(person, some, to, damaged)]
    if damaged:
        raise import_images.unusable(str(path), damaged, "repair or remove them")
    with open(to / "index.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("path", "person", "camera", "modality", "text"), *rows])
    what = "modalities computed from photographs by trainkit.data.synthetic; none is a real recording"
    about = {"what": what, "made_from": str(path), "version": VERSION, "seed": SEED, "people": len(people)}
    (to / "derived.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _person(person: str, photographs: Sequence[Path], to: Path, damaged: list[str]) -> list[Row]:
    """Write the images of a person; rows of the index. What cannot be used is added to `damaged`."""
    names, seen = [], []
    for number, (file, code) in enumerate(zip(photographs, divided(person, len(photographs)), strict=True)):
        try:
            encoded = image_decode.read(file, str(file))
            pixels = image_decode.decode(encoded, str(file))
            if min(pixels.shape[:2]) < SMALLEST:
                found = f"{pixels.shape[1]} x {pixels.shape[0]} pixels"
                raise UserError(str(file), found, f"{SMALLEST} or more on each side")
        except UserError as error:
            damaged.append(str(error))
            continue
        name = f"{MODALITIES[code]}/{person}/{number:03d}{file.suffix.lower() if code == RGB else '.png'}"
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        names.append((name, code))
        if code == RGB:
            (to / name).write_bytes(encoded)
            continue
        seen.append(measured(pixels))
        image = Image.fromarray(pixels)
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.BICUBIC, reducing_gap=None)
        save(DERIVE[code](np.asarray(image), _rng(person, number)), to / name)
    rows = []
    for i, (name, code) in enumerate(names):  # nothing is said of a single photograph, which a caption would describe
        text = caption(np.mean(seen, axis=0), _rng(person, i, "words")) if code == RGB and seen else ""
        rows.append((name, person, "", MODALITIES[code], text))
    return rows


def _rng(*parts: str | int) -> np.random.Generator:
    return generator(SEED, *(zlib.crc32(str(part).encode(errors="surrogateescape")) for part in parts))


# ---- images: uint8 (height, width, 3) and a generator, to uint8 (height, width) or (height, width, 3)


def infrared(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Imitate a cheap infrared camera with a lamp beside it: (height, width).

    Mostly the red channel, in which skin is bright and even; the mixture, gain, gamma, vignette and noise differ from
    image to image.
    """
    red, green, blue = rng.uniform((0.75, 0.1, -0.35), (1.05, 0.4, -0.05))
    mixed = (pixels[..., 0] * red + pixels[..., 1] * green + pixels[..., 2] * blue) / (red + green + blue)
    gamma, gain, lamp, noise = rng.uniform((0.55, 0.75, 0.1, 3.0), (0.95, 1.15, 0.5, 10.0))
    curve = np.array([round(255 * (level / 255) ** float(gamma)) for level in range(256)], dtype=np.float64)
    seen = curve[np.clip(np.rint(mixed), 0, 255).astype(np.uint8)]
    height, width = seen.shape
    x, y = np.linspace(-1, 1, width)[None], np.linspace(-1, 1, height)[:, None]
    at = rng.uniform(-0.3, 0.3, 2)
    fall = 1 - lamp * ((x - at[0]) ** 2 + (y - at[1]) ** 2) / 2
    blurred = Image.fromarray(to_bytes(seen * fall * gain)).filter(ImageFilter.GaussianBlur(float(rng.uniform(0.3, 1))))
    return to_bytes(np.asarray(blurred, dtype=np.float64) + noise * rng.standard_normal((height, width)))


PENCILS = np.array([
    (28, 26, 28), (88, 84, 84), (150, 148, 146), (214, 212, 208), (250, 248, 244), (70, 44, 32), (116, 76, 50),
    (164, 116, 82), (204, 158, 122), (234, 198, 166), (248, 226, 204), (190, 92, 70), (214, 134, 116), (158, 40, 44),
    (226, 180, 60), (92, 122, 62), (48, 88, 84), (60, 84, 148), (140, 176, 212), (112, 72, 120),
])  # fmt: skip
"""A box of twenty: greys, skin and hair, and a few others. RGB, (20, 3)."""


def pencil(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw in colour pencil: (height, width, 3). Flat tones of few pencils, strokes, grain and light outlines."""
    loose = by_hand(pixels, rng, 0.008)
    tones = kuwahara(loose, max(2, round(min(pixels.shape[:2]) / 36)))
    colours = PENCILS + rng.uniform(-12, 12, (len(PENCILS), 3))  # another box for each drawing
    nearest = ((tones[:, :, None].astype(np.float64) - colours) ** 2).sum(-1).argmin(-1)
    laid = 0.75 * colours[nearest] + 0.25 * tones
    pressed = np.clip(0.78 + 0.16 * strokes(nearest.shape, rng), 0.35, 1)[..., None]
    lines = (0.4 + 0.6 * dodged(loose, 1.2) / 255)[..., None]
    return to_bytes((248 + (laid - 248) * pressed) * lines)


def sketch(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a sketch: (height, width). Edges and deep shadows in grey on white, where a hand does not quite hit."""
    loose = by_hand(pixels, rng, 0.015)
    short = min(pixels.shape[:2])
    lines = dodged(loose, float(rng.uniform(0.02, 0.045)) * short)
    dark = 255 - (255 - lines) * float(rng.uniform(1.3, 2.2))
    worn = dark + 14 * strokes(lines.shape, rng) * (dark < 235)
    return to_bytes(worn)


DERIVE: dict[int, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {NIR: infrared, CP: pencil, SK: sketch}
"""How an image of each modality is made of a photograph."""


def dodged(pixels: np.ndarray, radius: float) -> np.ndarray:
    """Divide grey by its own Gaussian blur of `radius` pixels, at most 255: (height, width), float64.

    What retouchers call colour dodge with the blurred inverse: white where an image is even, dark at its edges.
    """
    grey = Image.fromarray(pixels).convert("L")
    blurred = np.asarray(grey.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float64)
    return np.minimum(255.0 * (np.asarray(grey, dtype=np.float64) + 1) / (blurred + 1), 255.0)


def kuwahara(pixels: np.ndarray, radius: int) -> np.ndarray:
    """Smooth and keep edges (Kuwahara et al. 1976): (height, width, 3) uint8 to the same.

    Every pixel becomes the mean of that one of the four squares of `radius` + 1 pixels at its corners whose brightness
    varies least; of equals, the first of upper left, upper right, lower left, lower right.
    """
    height, width = pixels.shape[:2]
    side = radius + 1
    padded = np.pad(pixels.astype(np.int64), ((radius, radius), (radius, radius), (0, 0)), "edge")
    light = padded.sum(-1, keepdims=True)
    sums = np.zeros((height + 2 * radius + 1, width + 2 * radius + 1, 5), np.int64)
    sums[1:, 1:] = np.concatenate([padded, light, light**2], axis=-1).cumsum(0).cumsum(1)
    squares = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
    corners = [(0, 0), (0, radius), (radius, 0), (radius, radius)]
    four = np.stack([squares[y : y + height, x : x + width] for y, x in corners])
    spread = side**2 * four[..., 4] - four[..., 3] ** 2
    best = np.take_along_axis(four[..., :3], spread.argmin(0)[None, ..., None], axis=0)[0]
    return ((2 * best + side**2) // (2 * side**2)).astype(np.uint8)


def by_hand(pixels: np.ndarray, rng: np.random.Generator, much: float) -> np.ndarray:
    """Displace pixels smoothly by about `much` of the shorter side, as an unsteady hand would, by nearest pixels."""
    height, width = pixels.shape[:2]
    moved = []
    for _ in range(2):
        few = np.clip(128 + 45 * rng.standard_normal((5, 5)), 0, 255).astype(np.uint8)
        field = np.asarray(Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float64)
        moved.append((field - 128) / 45 * much * min(height, width))
    y = np.clip(np.rint(np.arange(height)[:, None] + moved[0]), 0, height - 1).astype(np.int64)
    x = np.clip(np.rint(np.arange(width)[None] + moved[1]), 0, width - 1).astype(np.int64)
    return pixels[y, x]


def strokes(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw slanting streaks of grain: (height, width), mean near 0 and standard deviation near 1."""
    grain = rng.standard_normal(shape)
    lean = 1 if rng.uniform() < 0.5 else -1
    streaks = sum(np.roll(grain, (i, lean * i), axis=(0, 1)) for i in range(7))
    return (streaks / math.sqrt(7) + 0.5 * rng.standard_normal(shape)) / math.sqrt(1.25)


# ---- words: what is measured at places of an aligned face, and how its degrees are called


class Trait(NamedTuple):
    """Something about a face that a number tells and words can say."""

    name: str
    box: tuple[int, int, int, int]
    """Left, right, upper and lower border of where it is measured on a face of 112 x 112, and mirrored."""
    cuts: tuple[float, ...]
    """Borders between its degrees, rising."""
    words: tuple[str, ...]
    """For each degree, one more than the cuts, the ways to say it with ` | ` between them; empty: it goes unsaid."""


CHEEK = (22, 40, 62, 78)
LIPS = (42, 72, 86, 98)
TRAITS = (
    Trait("crown", (30, 82, 0, 6), (0.37, 0.55, 0.75, 1.0), (
        "black hair | jet-black hair | very dark hair", "dark hair | dark brown hair",
        "brown hair | hair of a middle shade", "fair hair | light hair",
        "a bare crown | a bald or very fair crown | hair as light as the skin")),
    Trait("forehead", (38, 74, 14, 28), (0.85, 1.05, 1.2), (
        "a fringe | hair over the forehead | a covered forehead", "", "a clear forehead | an open forehead",
        "a high forehead | a tall bright forehead")),
    Trait("sides", (4, 16, 8, 30), (0.45, 0.6, 0.8), (
        "dark hair at the temples | thick dark sides", "", "lighter temples | short hair at the sides",
        "bare temples | grey or bare sides")),
    Trait("hair_tone", (30, 82, 0, 6), (1.3, 1.75, 2.3), (
        "hair of a cool grey tone | greyish hair", "", "hair of a warm tone | brownish hair",
        "hair of a reddish tone | golden or reddish hair")),
    Trait("brows", (24, 48, 38, 46), (0.75, 0.84, 0.96), (
        "heavy dark brows | thick black eyebrows", "dark brows | dark eyebrows", "", "fair brows | faint eyebrows")),
    Trait("eyes", (26, 48, 46, 58), (0.6, 0.68, 0.78), (
        "deep dark eyes | deep-set eyes", "dark eyes | shaded eyes", "", "light eyes | bright eyes")),
    Trait("glasses", (50, 62, 44, 62), (0.03, 0.055), ("no glasses | no spectacles", "", "glasses | spectacles")),
    Trait("lids", (22, 44, 56, 70), (0.036, 0.048, 0.06), (
        "smooth lower lids", "", "marked lower lids | lines below the eyes", "bags under the eyes | heavy lower lids")),
    Trait("lip", (44, 68, 77, 84), (0.76, 0.92), (
        "a moustache | hair on the upper lip | a dark upper lip", "", "a bare upper lip | a clean upper lip")),
    Trait("chin", (44, 68, 100, 110), (0.82, 1.0), (
        "a beard | a dark chin | a bearded chin", "", "a bare chin | a light chin")),
    Trait("mouth", (42, 72, 86, 96), (0.68, 0.85), (
        "a dark mouth | a mouth in shadow", "", "a bright smile | teeth that show | a toothy smile")),
    Trait("lips", LIPS, (1.04, 1.14), ("pale lips | colourless lips", "", "red lips | rosy lips")),
    Trait("cheeks", CHEEK, (0.025, 0.034, 0.045), (
        "smooth cheeks | even cheeks", "", "lined cheeks", "rough cheeks | deeply lined cheeks")),
    Trait("brow_lines", (38, 74, 14, 30), (0.02, 0.035, 0.055), (
        "a smooth brow | an unlined brow", "", "some lines on the brow | a lined brow",
        "deep lines on the brow | strands across the brow")),
    Trait("skin", CHEEK, (130.0, 150.0, 163.0), (
        "dark skin | deep-toned skin", "", "light skin | fair skin", "very light skin | pale skin")),
    Trait("warmth", CHEEK, (1.55, 1.85), (
        "cool-toned skin | pinkish skin", "", "tanned skin | warm-toned skin")),
)  # fmt: skip
"""Traits that captions are made of: of 27 that were tried those of which an eighth or more of the variance over the
photographs of 298 people of LFW lies between people; the cuts are near the quantiles of people there."""
LINES = ("glasses", "lids", "cheeks", "brow_lines")
"""Traits that are told by how grey changes from row to row; others by how bright they are beside the skin."""


def measured(pixels: np.ndarray) -> np.ndarray:
    """Measure each of `TRAITS` on one photograph of an aligned face, uint8 (height, width, 3): float64."""
    if pixels.shape[:2] != (112, 112):
        pixels = np.asarray(Image.fromarray(pixels).resize((112, 112), Image.Resampling.BICUBIC))
    whole = pixels.astype(np.float64) + 1  # never 0: it is divided by
    grey = whole[..., 0] * 0.299 + whole[..., 1] * 0.587 + whole[..., 2] * 0.114
    across = np.abs(np.diff(grey, axis=0))

    def mean(values: np.ndarray, left: int, right: int, upper: int, lower: int) -> np.ndarray:
        return values[upper:lower, left:right].mean((0, 1))

    def both(values: np.ndarray, left: int, right: int, upper: int, lower: int) -> np.ndarray:
        mirrored = mean(values, 112 - right, 112 - left, upper, lower)
        return (mean(values, left, right, upper, lower) + mirrored) / 2

    skin, cheek, hair, lips = both(grey, *CHEEK), both(whole, *CHEEK), mean(whole, *TRAITS[0].box), mean(whole, *LIPS)
    found = {t.name: both(across if t.name in LINES else grey, *t.box) / skin for t in TRAITS}
    found |= {"hair_tone": hair[0] / hair[2], "mouth": mean(grey, 42, 72, 86, 96) / skin, "skin": skin}
    found |= {"lips": lips[0] / lips[1] * cheek[1] / cheek[0], "warmth": cheek[0] / cheek[2]}
    return np.array([found[trait.name] for trait in TRAITS])


_OPENINGS = ("A person with", "Someone with", "The face has", "This person has", "One sees", "A face with")
_MORE = ("One also sees", "Besides:", "One notices", "Further,", "The person also has", "Then")


def caption(numbers: np.ndarray, rng: np.random.Generator) -> str:
    """Write two sentences about a person of whom `numbers` (one for each of `TRAITS`) were measured.

    They name six to ten traits, or all that can be said when those are fewer, in an order and in words of their own.
    """
    said = []
    for i in rng.permutation(len(TRAITS)).tolist():
        if words := TRAITS[i].words[int(np.searchsorted(TRAITS[i].cuts, numbers[i], side="right"))]:
            ways = words.split(" | ")
            said.append(ways[int(rng.integers(len(ways)))])
    said = said[: int(rng.integers(6, 11))]
    if not said:
        return "A person of whom nothing stands out."
    opening, more = (some[int(rng.integers(len(some)))] for some in (_OPENINGS, _MORE))
    half = (len(said) + 1) // 2
    rest = f" {more} {listed(said[half:])}." if said[half:] else ""
    return f"{opening} {listed(said[:half])}.{rest}"

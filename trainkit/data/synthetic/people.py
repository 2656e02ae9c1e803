"""A built-in set of synthetic people, so that search for a person by images and words can train without a download.

People from head to shoe, 64 x 32 pixels, as five kinds of records: colour images (rgb) by four cameras, infrared (nir),
which shows what dyes reflect there and not the brightness of their colours, colour pencil (cp) and sketch (sk) with
wrong proportions and forgotten things, and captions (text) that name some of what a colour image shows and err now and
then. Of each group of `GROUP`, two people differ in two facets alone, two wear the same clothes, two are alone. The set
shows that a network finds people across kinds of records where pixels cannot; nothing about real people.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from trainkit.data.synthetic import drawing
from trainkit.data.synthetic.drawing import generator, listed, oval, spread, tint
from trainkit.interfaces import CP, MODALITIES, NIR, RGB, SK, TEXT

VERSION = 4
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20260414
PEOPLE = {"train": 300, "val": 60}
"""People of each split; nobody is in both."""
GROUP = 6
"""People of a group, some of whom are alike; a group is never in two splits where `PEOPLE` are multiples of it."""
PICTURES = {NIR: 3, CP: 2, SK: 2}
"""Images of each person by modality; of rgb there are four to six, each with a caption."""
LACKS = {NIR: (23, 7), CP: (29, 11), SK: (31, 17), TEXT: (37, 20)}
"""People that lack a modality: those whose number leaves the second number when divided by the first."""
HEIGHT, WIDTH, FINE = 64, 32, 3
_TALL, _WIDE = HEIGHT * FINE, WIDTH * FINE
COLOURS = {  # red, green, blue; share that the dye reflects in infrared; the colour it is taken for
    "black": (30, 29, 33, 0.6, "navy"), "grey": (128, 128, 130, 0.45, "white"), "white": (232, 231, 226, 0.9, "beige"),
    "beige": (202, 182, 146, 0.3, "white"), "brown": (112, 74, 46, 0.82, "black"), "red": (190, 40, 42, 0.97, "orange"),
    "orange": (226, 126, 42, 0.68, "red"), "yellow": (228, 200, 62, 0.52, "orange"),
    "pink": (226, 142, 166, 0.05, "red"), "green": (52, 138, 70, 0.12, "blue"), "blue": (60, 112, 206, 0.75, "navy"),
    "navy": (32, 40, 88, 0.2, "black"), "purple": (112, 66, 144, 0.37, "blue"), "blond": (204, 170, 104, 0.55, "brown"),
}  # fmt: skip
_CLOTH = tuple(COLOURS)[:-1]
FACETS: dict[str, dict[str, tuple[str, ...] | tuple[float, ...]]] = {
    "build": {"wide": (0.8, 0.88, 0.95, 1.03, 1.12, 1.22), "skin": (0.0, 0.2, 0.5, 0.8, 1.0)},
    "hair": {"hair": ("short", "long", "bald"), "hair_colour": ("black", "brown", "blond", "orange", "grey")},
    "hat": {"hat": ("none", "none", "cap", "beanie"), "hat_colour": _CLOTH},
    "upper": {"upper": ("shirt", "t-shirt", "coat", "dress"), "upper_colour": _CLOTH, "second_colour": _CLOTH,
              "pattern": ("plain", "plain", "striped", "checked", "dotted", "two-tone")},
    "lower": {"lower": ("trousers", "trousers", "shorts", "skirt"), "lower_colour": _CLOTH},
    "shoes": {"shoes_colour": _CLOTH},
    "bag": {"bag": ("none", "backpack", "handbag", "shoulder bag"), "bag_colour": _CLOTH},
}  # fmt: skip
"""Attributes of people by facet, and what they may be; people who are alike differ in few facets."""
_WORDS = {"grey": ("grey", "gray"), "navy": ("navy", "dark blue"), "beige": ("beige", "cream"), "orange": ("orange",),
          "purple": ("purple", "violet"), "shirt": ("shirt", "long-sleeved top"), "t-shirt": ("t-shirt", "tee"),
          "coat": ("coat", "overcoat"), "trousers": ("trousers", "pants"), "backpack": ("backpack", "rucksack"),
          "cap": ("cap", "baseball cap"), "beanie": ("beanie", "knitted hat")}  # fmt: skip
"""Ways to say an attribute in a caption; others are called as they are."""
CAMERAS = {"c1": (1, 1, 1), "c2": (0.84, 0.95, 1.1), "c3": (1.1, 0.98, 0.82), "c4": (0.8, 0.82, 0.78), "c5": (1,) * 3,
           "c6": (0.85,) * 3}  # fmt: skip
"""What each camera makes of red, green and blue; the last two are infrared."""


class Row(NamedTuple):
    """A row of index.csv; empty where it does not apply."""

    path: str
    person: str
    camera: str
    modality: str
    text: str
    of: str


def folder() -> Path:
    """Return the sample set as a folder, by `drawn_once` (20 MB).

    Holds `train` and `val`, each with `index.csv` (the columns of `Row`; paths relative to it) and images
    `<modality>/<person>/<n>.png` (`nir/p0012/1.png`), and `sample.json`. A caption has a row of its own, whose `of` is
    the path of the colour image it describes. Images are 64 high and 32 wide, RGB or grey.
    """
    return drawing.drawn_once(f"people-v{VERSION}", _write)


def people(split: str) -> range:
    """Return the numbers of the people of `split` ("train" or "val")."""
    first = 0 if split == "train" else PEOPLE["train"]
    return range(first, first + PEOPLE[split])


def pictures(person: int) -> dict[int, int]:
    """Return how many records of each modality there are of `person`, by its place in `MODALITIES`; 0 without any."""
    rgb = 4 + int(_rng(6, person).integers(3))
    every = {RGB: rgb, **PICTURES, TEXT: rgb}
    return {m: 0 if m in LACKS and person % LACKS[m][0] == LACKS[m][1] else n for m, n in every.items()}


def rows(split: str) -> list[Row]:
    """List the rows of the split's index.csv: of each person images in the order of `MODALITIES`, then captions."""
    answer = []
    for person in people(split):
        name, counts = f"p{person:04d}", pictures(person)
        for m in (RGB, NIR, CP, SK):
            paths = [f"{MODALITIES[m]}/{name}/{i}.png" for i in range(counts[m])]
            answer += [Row(path, name, camera(person, m, i), MODALITIES[m], "", "") for i, path in enumerate(paths)]
        for i in range(counts[TEXT]):
            text, of = caption(person, i), f"{MODALITIES[RGB]}/{name}/{i}.png"
            answer.append(Row("", name, camera(person, RGB, i), MODALITIES[TEXT], text, of))
    return answer


def camera(person: int, modality: int, number: int) -> str:
    """Return the camera of an image, `c1`..`c4` in colour and `c5`, `c6` in infrared; drawings have none."""
    at = int(_rng(7, person).integers(12)) + number
    return {RGB: f"c{1 + at % 4}", NIR: f"c{5 + at % 2}"}.get(modality, "")


def view(person: int, modality: int, number: int) -> str:
    """Return from where an image shows its person: "front", "side" or "back"."""
    return ("front", "back", "side")[(int(_rng(4, person, modality).integers(3)) + number) % 3]


def _write(to: Path) -> None:
    for split in PEOPLE:
        records = rows(split)
        for row in records:
            if row.path:
                (to / split / row.path).parent.mkdir(parents=True, exist_ok=True)
                number = int(Path(row.path).stem)
                drawing.save(draw(int(row.person[1:]), MODALITIES.index(row.modality), number), to / split / row.path)
        with open(to / split / "index.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([Row._fields, *records])
    what = "synthetic people generated by trainkit.data.synthetic; for tests of the code, not of accuracy on people"
    counts = {split: len(rows(split)) for split in PEOPLE}
    drawing.write_about(to, what, VERSION, SEED, people=PEOPLE, records=counts)


def _rng(*key: int) -> np.random.Generator:
    return generator(SEED, *key)


def attributes(person: int) -> dict[str, Any]:
    """Return what stays the same in all records of a person: the names under `FACETS`."""
    group, place = divmod(person, GROUP)
    who, other = _anybody(_rng(1, group, (0, 0, 1, 1, 2, 3)[place])), _anybody(_rng(2, person))
    taken = {1: [list(FACETS)[i] for i in _rng(3, person).permutation(len(FACETS))[:2]], 3: ["build", "hair", "hat"]}
    return who | {name: other[name] for facet in taken.get(place, ()) for name in FACETS[facet]}


def _anybody(rng: np.random.Generator) -> dict[str, Any]:
    every = [attribute for facet in FACETS.values() for attribute in facet.items()]
    return {name: options[int(rng.integers(len(options)))] for name, options in every}


def caption(person: int, number: int) -> str:
    """Write what somebody says about colour image `number` of `person`: a sentence or two.

    Each facet is left out now and then, a colour is sometimes taken for its neighbour, a facet for somebody else's.
    """
    who, rng, clauses = attributes(person), _rng(5, person, TEXT, number), []
    other = _anybody(rng)
    for facet in FACETS.values():
        if rng.uniform() < 0.04:
            who |= {name: other[name] for name in facet}

    def called(word: str) -> str:
        ways = _WORDS.get(word, (word,))
        return ways[int(rng.integers(len(ways)))]

    def colour(name: str) -> str:
        word = who[f"{name}_colour"]
        return called(COLOURS[word][4] if rng.uniform() < 0.1 else word)

    for name, share in {"upper": 0.93, "lower": 0.85, "shoes": 0.5, "hat": 0.75, "hair": 0.5, "bag": 0.75}.items():
        kind = who.get(name, name)
        if kind == "none" or (name == "lower" and who["upper"] == "dress") or rng.uniform() > share:
            continue
        text = f"{colour(name)} {called(kind)}" if name != "hair" else f"{kind} {colour(name)} hair"
        if kind == "bald":
            text = "bald head"
        elif name == "upper" and who["pattern"] != "plain":
            text = f"{who['pattern']} {colour('upper')} and {colour('second')} {called(kind)}"
        clauses.append(text if kind in ("trousers", "shorts", "shoes", "short", "long") else f"a {text}")
    openings = ("A person with", "Somebody who has", "This is a pedestrian with", "One sees someone with")
    text = f"{openings[int(rng.integers(4))]} {listed([clauses[i] for i in rng.permutation(len(clauses))])}."
    if not clauses:
        text = "Somebody in the street."
    if rng.uniform() < 0.3:
        seen = view(person, RGB, number)
        text += {"front": " They face the camera.", "back": " Seen from behind.", "side": " They walk past."}[seen]
    return text.replace(" a o", " an o")


# ---- images: a body is numbers of parts, and what each part is made of ----


def body(who: dict[str, Any], seen: str, rng: np.random.Generator, still: bool) -> tuple[np.ndarray, list[str]]:
    """Draw a person seen from a side: the number of the part at each place, uint8 (192, 96), and materials of parts."""
    image, made_of, side = Image.new("L", (_WIDE, _TALL)), ["nothing"], seen == "side"
    pen, mirror, wide = ImageDraw.Draw(image), 1 if rng.uniform() < 0.5 else -1, who["wide"] * (0.62 if side else 1)
    step, swing, x0, y0 = (rng.uniform(-1, 1, 4) * (1, 1, 0.09, 0.04) * (0.4 if still else 1)).tolist()
    high = float(rng.uniform(0.82, 0.95)) * _TALL

    def fill(material: str, points: list[tuple[float, float]]) -> None:
        at = [(_WIDE * (0.5 + x0) + mirror * x * high, (_TALL - high) / 2 + y0 * _TALL + y * high) for x, y in points]
        pen.polygon(at, fill=len(made_of))
        made_of.append(material)

    def block(material: str, x: float, y: float, w: float, to_x: float, to_y: float, to_w: float) -> None:
        fill(material, [(x - w, y), (x + w, y), (to_x + to_w, to_y), (to_x - to_w, to_y)])

    def ellipse(material: str, x: float, y: float, rx: float, ry: float) -> None:
        fill(material, oval(x, y, rx, ry, n=16).tolist())

    upper, low = who["upper"], {"trousers": 0.94, "shorts": 0.7, "skirt": 0.5}[who["lower"]]
    hem = {"coat": 0.69, "dress": 0.72}.get(upper, 0.51)
    if who["bag"] == "backpack" and side:
        block("bag", -0.11, 0.2, 0.045, -0.11, 0.44, 0.05)
    for sign in (-1, 1):
        x, foot = (0.0, 0.15 * step * sign) if side else (0.055 * sign * wide, 0.06 * sign)
        block("skin", x, 0.47, 0.055 * wide, foot, 0.95, 0.03)
        block("lower", x, 0.47, 0.06 * wide, x + (foot - x) * (low - 0.47) / 0.48, low, 0.045)
        block("shoes", foot, 0.93, 0.035, foot + (0.015 if side else 0), 0.98, 0.048)
    if who["lower"] == "skirt":
        block("lower", 0, 0.45, 0.09 * wide, 0, 0.72, 0.14 * wide)
    block("skin", 0, 0.1, 0.03, 0, 0.19, 0.04)
    block("upper", 0, 0.165, 0.13 * wide, 0, hem, (0.14 if hem > 0.6 else 0.1) * wide)
    for sign in (-1, 1):
        x, hand = 0.125 * sign * wide, (0.15 + 0.03 * abs(swing)) * sign * wide
        if side:
            x, hand = 0.0, 0.13 * swing * sign
        block("skin", x, 0.2, 0.03, hand, 0.5, 0.022)
        share = 0.35 if upper in ("t-shirt", "dress") else 0.9
        block("upper", x, 0.175, 0.036, x + (hand - x) * share, 0.2 + 0.3 * share, 0.03)
    ellipse("skin", 0, 0.08, 0.055, 0.07)
    if who["hair"] != "bald":
        ellipse("hair", 0, 0.055 if seen == "front" else 0.07, 0.062, 0.055 if seen == "front" else 0.07)
        if seen == "front":
            ellipse("skin", 0, 0.09, 0.044, 0.05)
        if who["hair"] == "long":
            for x in (-0.055, 0.055) if seen == "front" else (-0.03, 0.03):
                block("hair", x, 0.06, 0.02, x, 0.22, 0.035)
    if who["hat"] != "none":
        block("hat", 0, -0.01, 0.04, 0, 0.05, 0.064)
        if who["hat"] == "cap" and seen != "back":
            block("hat", 0.03, 0.045, 0.06, 0.03, 0.06, 0.06)
    _bag(block, who["bag"], seen, wide)
    parts, cut = np.array(image), (_TALL - high) / 2 + 0.34 * high
    parts[(np.array(made_of) == "upper")[parts] & _pattern(who["pattern"], cut)] = len(made_of)
    return parts, [*made_of, "second"]


def _bag(block: Callable[..., None], bag: str, seen: str, wide: float) -> None:
    """Draw a bag before the body."""
    if bag == "backpack" and seen == "back":
        block("bag", 0, 0.2, 0.075 * wide, 0, 0.44, 0.085 * wide)
    elif bag == "backpack" and seen == "front":
        for x in (-0.07, 0.07):
            block("bag", x, 0.165, 0.012, x, 0.36, 0.012)
    elif bag == "shoulder bag":
        block("bag", -0.08 * wide, 0.165, 0.012, 0.08, 0.46, 0.012)
        block("bag", 0.09, 0.44, 0.055, 0.09, 0.55, 0.055)
    elif bag == "handbag":
        block("bag", 0.15 * wide, 0.54, 0.045, 0.15 * wide, 0.64, 0.055)


def _pattern(name: str, cut: float) -> np.ndarray:
    """Return where a cloth shows its second colour; of two, the lower one begins at `cut`."""
    y, x = np.ogrid[:_TALL, :_WIDE]
    shown = {"striped": y // 6 % 2 > 0, "checked": (x // 8 + y // 8) % 2 > 0, "dotted": (x % 9 < 5) & (y % 9 < 5)}
    return shown.get(name, y > cut if name == "two-tone" else y < 0)


def _smooth(rng: np.random.Generator, step: int) -> np.ndarray:
    """Draw a smooth field in -1..1 whose features are about `step` of the drawing's pixels: (192, 96)."""
    grid = rng.uniform(-1, 1, (_TALL // step + 2, _WIDE // step + 2))
    return spread(grid, np.arange(_TALL) / step, np.arange(_WIDE) / step)


def _tones(who: dict[str, Any], materials: list[str], infrared: bool) -> np.ndarray:
    """Return the colour of each part, as a dye looks or as it reflects in infrared: (n, 3)."""
    skin = (*drawing.mix((236, 196, 168), (96, 64, 48), who["skin"]), 0.8 - 0.1 * who["skin"])
    dyes = [skin if name in ("skin", "nothing") else COLOURS[who[f"{name}_colour"]] for name in materials]
    return np.array([(30 + 205 * dye[3],) * 3 if infrared else dye[:3] for dye in dyes])


def draw(person: int, modality: int, number: int) -> np.ndarray:
    """Draw image `number` of `person`: uint8, (64, 32, 3) RGB for rgb and cp, (64, 32) for nir and sk."""
    rng, by = _rng(5, person, modality, number), camera(person, modality, number)
    return picture(attributes(person), modality, view(person, modality, number), by, rng)


def picture(who: dict[str, Any], modality: int, seen: str, by: str, rng: np.random.Generator) -> np.ndarray:
    """Draw somebody with these attributes."""
    drawn = _by_hand(who, modality, seen, rng) if modality in (CP, SK) else _photograph(who, modality, seen, by, rng)
    return drawn if modality in (RGB, CP) else drawn[:, :, 0]


def _photograph(who: dict[str, Any], modality: int, seen: str, by: str, rng: np.random.Generator) -> np.ndarray:
    """Show a body before a wall, with something in the way in a fifth of images."""
    parts, materials = body(who, seen, rng, still=False)
    walls = rng.uniform(30, 225, (7, 3))
    walls = walls * 0.3 + walls.mean(1, keepdims=True) * 0.7  # streets are greyer than chance
    if modality == NIR:
        walls[:] = 0.6 * walls[:, :1]
    image = Image.new("RGB", (_WIDE, _TALL), tint(walls[0]))
    pen = ImageDraw.Draw(image)
    for tone in walls[1:5]:
        x, y, wide, high = (rng.uniform(size=4) * (_WIDE, 0.6 * _TALL, 50, 80)).tolist()
        pen.rectangle((x, y, x + wide + 4, y + high + 4), fill=tint(tone))
    pen.rectangle((0, _TALL * float(rng.uniform(0.5, 0.85)), _WIDE, _TALL), fill=tint(walls[5]))
    table = drawing.to_bytes(_tones(who, materials, modality == NIR))
    pixels = np.where(parts[..., None] == 0, np.asarray(image), table[parts])
    hidden, place = rng.uniform(size=2).tolist()
    if hidden < 0.1:
        pixels[round(_TALL * (0.55 + 0.3 * place)) :] = drawing.to_bytes(walls[6])
    elif hidden < 0.2:
        pixels[40:, round(_WIDE * place * 0.8) : round(_WIDE * place * 0.8) + 25] = drawing.to_bytes(walls[6])
    small = drawing.blurred(Image.fromarray(pixels).reduce(FINE), float(rng.uniform(-0.2, 0.9)))
    light = (0.92 + 0.2 * _smooth(rng, 90))[::FINE, ::FINE, None] * np.array(CAMERAS[by], dtype=np.float32)
    pixels = np.asarray(small, dtype=np.float32)
    return drawing.exposed(rng, pixels, light, contrast=(0.75, 1.1), exposure=(0.8, 1.2), tint=0.08, noise=9, grey=90)


def _by_hand(who: dict[str, Any], modality: int, seen: str, rng: np.random.Generator) -> np.ndarray:
    """Draw a body from memory: in strokes of nearly its colours, or in outlines with hatching where it is dark."""
    who = who | {"wide": who["wide"] * float(rng.uniform(0.88, 1.14))}
    forgotten = float(rng.uniform())
    if forgotten < 0.15:
        who |= [{"bag": "none"}, {"hat": "none"}, {"pattern": "plain"}][int(forgotten * 20)]
    for name in ("hat", "upper", "second", "lower", "shoes", "bag"):
        if modality == CP and rng.uniform() < 0.12:
            who[f"{name}_colour"] = COLOURS[who[f"{name}_colour"]][4]
    parts, materials = body(who, seen, rng, still=True)
    y, x = np.ogrid[:_TALL, :_WIDE]
    up, across = (np.rint(2.8 * _smooth(rng, 16)).astype(int) for _ in range(2))
    parts = parts[np.clip(y + up, 0, _TALL - 1), np.clip(x + across, 0, _WIDE - 1)]
    edge = np.zeros(parts.shape, dtype=bool)
    edge[1:, 1:] = (parts[1:, 1:] != parts[:-1, 1:]) | (parts[1:, 1:] != parts[1:, :-1])
    edge[:, 1:] |= edge[:, :-1]
    slant = y + (1, 2, -1)[int(rng.integers(3))] * x + np.rint(4 * _smooth(rng, 40)).astype(int)
    strokes = rng.uniform(0, 1, 256).astype(np.float32)[slant // 3 % 256]
    tones = _tones(who, materials, infrared=False).astype(np.float32)
    if modality == CP:
        grey = tones.mean(1, keepdims=True)
        kinds = sorted(set(materials))
        faded = rng.uniform((0.4, -30, -30, -30), (1.2, 30, 30, 30), (len(kinds), 4)).astype(np.float32)
        faded = faded[[kinds.index(name) for name in materials]]
        paper = (238 + rng.uniform(-10, 10, 3)).astype(np.float32)
        tones = grey + (tones - grey) * faded[:, :1] + faded[:, 1:]
        tones[0] = paper
        pixels = paper + (tones[parts] - paper) * (0.45 + 0.55 * strokes)[..., None]
        pixels[edge] *= 0.5
    else:
        light = np.clip(tones.mean(1) / float(rng.uniform(160, 190)) + 0.05, 0.1, 1)
        pixels = np.where((strokes > light[parts]) & (parts > 0), np.float32(rng.uniform(90, 150)), np.float32(240))
        pixels[edge] = float(rng.uniform(20, 90))
    small = np.asarray(Image.fromarray(drawing.to_bytes(pixels)).reduce(FINE), dtype=np.float64)
    grain = rng.standard_normal((HEIGHT, WIDTH, 1)) * float(rng.uniform(1, 6))
    return drawing.to_bytes(small.reshape(HEIGHT, WIDTH, -1) * float(rng.uniform(0.85, 1.02)) + grain)

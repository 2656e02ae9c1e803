"""A built-in set of synthetic people, so that search for a person by images and words can train without a download.

People from head to shoe, 64 x 32 pixels, as five kinds of records. A person has a build, skin, hair, a hat
or none, upper and lower clothes with patterns, shoes and perhaps a bag. A colour image (rgb) adds one of four
cameras, a view from the front, the side or behind, a step, light, a background, things in the way, blur and noise. An
infrared image (nir) shows what dyes reflect there, which is not the brightness of their colours. A colour pencil
drawing (cp) has the colours as somebody remembered them, a sketch (sk) has outlines, patterns and hatching where it is
dark; both have wrong proportions and forget things. A caption (text) names some of what its colour image shows,
leaves out the rest, and is sometimes wrong.

People come in groups of `GROUP`: two are alike but for two facets, two wear the same clothes, two are alone. Some
facets cannot be seen from some sides. Nothing can therefore score 1.0 here.

What it shows: that the code runs, that a network finds people across kinds of records where pixels cannot, and that
several records in a query find more than one. What it does not show: that anything works on people.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainkit.data.synthetic import figures
from trainkit.data.synthetic.drawing import drawn_once, generator, listed, save, write_about
from trainkit.data.synthetic.figures import COLOURS, HAIR_COLOURS, MIXED_UP
from trainkit.interfaces import CP, MODALITIES, NIR, RGB, SK, TEXT

VERSION = 3
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


class Row(NamedTuple):
    """A row of index.csv; empty where it does not apply."""

    path: str
    person: str
    camera: str
    modality: str
    text: str
    of: str


def folder() -> Path:
    """Return the sample set as a folder, by `drawn_once` (about 20 s on one core, 20 MB).

    Holds `train` and `val`, each with `index.csv` (the columns of `Row`; paths relative to it) and images
    `<modality>/<person>/<n>.png` (`nir/p0012/1.png`), and `sample.json`. A caption has a row of its own, whose `of` is
    the path of the colour image it describes. Images are 64 high and 32 wide, RGB or grey. People of `val` are not
    in `train`.
    """
    return drawn_once(f"people-v{VERSION}", _write, megabytes=30)


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
        paths = {m: [f"{MODALITIES[m]}/{name}/{i}.png" for i in range(counts[m])] for m in (RGB, NIR, CP, SK)}
        for m, some in paths.items():
            for i, path in enumerate(some):
                answer.append(Row(path, name, camera(person, m, i), MODALITIES[m], "", ""))
        for i in range(counts[TEXT]):
            path = paths[RGB][i]
            answer.append(Row("", name, camera(person, RGB, i), MODALITIES[TEXT], caption(person, i), path))
    return answer


def camera(person: int, modality: int, number: int) -> str:
    """Return the camera of an image, `c1`..`c4` in colour and `c5`, `c6` in infrared; drawings have none."""
    if modality in (CP, SK):
        return ""
    start = int(_rng(7, person).integers(12))
    return f"c{1 + (start + number) % 4}" if modality == RGB else f"c{5 + (start + number) % 2}"


def _write(to: Path) -> None:
    for split in PEOPLE:
        home = to / split
        home.mkdir(parents=True)
        some = rows(split)
        for row in some:
            if not row.path:
                continue
            file = home / row.path
            file.parent.mkdir(parents=True, exist_ok=True)
            save(draw(int(row.person[1:]), MODALITIES.index(row.modality), int(file.stem)), file)
        with open(home / "index.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Row._fields)
            writer.writerows(some)
    what = "synthetic people generated by trainkit.data.synthetic; for tests of the code, not of accuracy on people"
    write_about(to, what, VERSION, SEED, people=PEOPLE, records={split: len(rows(split)) for split in PEOPLE})


def _rng(*key: int) -> np.random.Generator:
    return generator(SEED, *key)


def _one(rng: np.random.Generator, some: Mapping[str, float]) -> str:
    """Draw one of the keys, with the weights that are their values."""
    at = float(rng.uniform()) * sum(some.values())
    for key, weight in some.items():
        at -= weight
        if at < 0:
            return key
    return list(some)[-1]


# ---- who they are ----

_UPPER = {"shirt": 3, "tee": 3, "jacket": 2.5, "hoodie": 2, "coat": 1.5, "dress": 1}
_LOWER = {"trousers": 4, "shorts": 2, "skirt": 1.5, "long skirt": 0.8}
_PATTERNS = {
    "plain": 3.2, "stripes": 1.2, "vertical": 1, "checks": 1, "dots": 1, "two halves": 1, "print": 1, "sleeves": 1.2,
}  # fmt: skip
_HAIR = {"short": 3, "long": 2.5, "bun": 1, "bald": 0.8}
_HATS = {"none": 4, "cap": 1, "beanie": 1}
_BAGS = {"none": 3, "backpack": 2, "shoulder bag": 1.5, "handbag": 1}
_DULL = {"black": 4, "grey": 3, "white": 2, "navy": 3, "blue": 2, "brown": 2, "beige": 2}

FACETS = {
    "build": ("tall", "wide", "skin"),
    "hair": ("hair", "hair_colour", "hair_tone"),
    "hat": ("hat", "hat_colour", "hat_tone"),
    "upper": ("upper", "upper_colour", "upper_tone", "pattern", "second_colour", "second_tone"),
    "lower": ("lower", "lower_colour", "lower_tone"),
    "shoes": ("shoes_colour", "shoes_tone"),
    "bag": ("bag", "bag_colour", "bag_tone"),
}
"""Attributes of people by facet; people who are alike differ in few of these. A `tone` is a garment's own colour within
its name and its reflectance in infrared: four numbers in 0..1."""


def attributes(person: int) -> dict[str, Any]:
    """Return what stays the same in all records of a person: the names under `FACETS`, with words or numbers."""
    return dict(_attributes(person))


@cache
def _attributes(person: int) -> dict[str, Any]:
    group, place = divmod(person, GROUP)
    kin = (0, 0, 1, 1, 2, 3)[place]
    who = _anybody(_rng(1, group, kin))
    if place not in (1, 3):
        return who
    other = _anybody(_rng(2, person))
    if kin == 1:
        taken = ["build", "hair", "hat"]
    else:
        taken = [list(FACETS)[i] for i in _rng(3, person).permutation(len(FACETS))[:2]]
    who.update({name: other[name] for facet in taken for name in FACETS[facet]})
    return who


def _anybody(rng: np.random.Generator) -> dict[str, Any]:
    bright = dict.fromkeys(COLOURS, 1.0)
    who: dict[str, Any] = {
        "tall": float(rng.uniform(0.86, 1.0)), "wide": float(rng.uniform(0.82, 1.2)), "skin": float(rng.uniform()),
        "hair": _one(rng, _HAIR), "hair_colour": _one(rng, dict.fromkeys(HAIR_COLOURS, 1.0)),
        "hat": _one(rng, _HATS), "hat_colour": _one(rng, bright),
        "upper": _one(rng, _UPPER), "upper_colour": _one(rng, bright),
        "pattern": _one(rng, _PATTERNS), "second_colour": _one(rng, bright),
        "lower": _one(rng, _LOWER), "lower_colour": _one(rng, bright if float(rng.uniform()) < 0.5 else _DULL),
        "shoes_colour": _one(rng, _DULL if float(rng.uniform()) < 0.6 else bright),
        "bag": _one(rng, _BAGS), "bag_colour": _one(rng, bright),
    }  # fmt: skip
    if who["second_colour"] == who["upper_colour"]:
        who["second_colour"] = "white" if who["upper_colour"] != "white" else "navy"
    for name in ("hair", "hat", "upper", "second", "lower", "shoes", "bag"):
        who[f"{name}_tone"] = tuple(float(v) for v in rng.uniform(size=4))
    return who


def view(person: int, modality: int, number: int) -> str:
    """Return from where an image shows its person: "front", "side" or "back"."""
    start = int(_rng(4, person, modality).integers(3))
    return ("front", "back", "side")[(start + number) % 3]


# ---- images and captions ----


def draw(person: int, modality: int, number: int) -> np.ndarray:
    """Draw image `number` of `person`: uint8, (64, 32, 3) RGB for rgb and cp, (64, 32) for nir and sk."""
    who, rng = attributes(person), _rng(5, person, modality, number)
    drawn = modality in (CP, SK)
    pose = figures.Pose(rng, view(person, modality, number), still=drawn)
    if drawn:
        figures.misremember(who, rng)
    parts = figures.body(who, pose)
    if modality == CP:
        return figures.pencil(who, parts, rng)
    if modality == SK:
        return figures.sketch(who, parts, rng)
    parts = figures.in_the_way(parts, rng)
    if modality == NIR:
        return figures.infrared(who, parts, rng, camera(person, modality, number))
    return figures.photograph(who, parts, rng, camera(person, modality, number))


_WORDS = {
    "black": ("black",), "grey": ("grey", "gray"), "white": ("white",), "beige": ("beige", "cream", "khaki"),
    "brown": ("brown",), "red": ("red",), "orange": ("orange",), "yellow": ("yellow",), "green": ("green",),
    "blue": ("blue", "bright blue"), "navy": ("navy", "dark blue"), "purple": ("purple", "violet"), "pink": ("pink",),
}  # fmt: skip
_CALLED = {
    "shirt": ("shirt", "long-sleeved top", "sweater"), "tee": ("t-shirt", "short-sleeved top", "tee"),
    "jacket": ("jacket", "open jacket"), "hoodie": ("hoodie", "hooded top"), "coat": ("coat", "long coat", "overcoat"),
    "dress": ("dress", "frock"), "trousers": ("trousers", "pants", "long trousers"), "shorts": ("shorts",),
    "skirt": ("skirt", "short skirt"), "long skirt": ("long skirt", "ankle-length skirt"),
    "cap": ("cap", "baseball cap"), "beanie": ("beanie", "knitted hat"), "backpack": ("backpack", "rucksack"),
    "shoulder bag": ("shoulder bag", "crossbody bag"), "handbag": ("handbag", "bag in the hand"),
}  # fmt: skip


def caption(person: int, number: int) -> str:
    """Write what somebody says about colour image `number` of `person`: one to three sentences, at most 60 words.

    Each facet is left out now and then, and what only the front shows is told of images from the front alone; a
    colour is sometimes taken for its neighbour, and a facet for somebody else's.
    """
    who, rng = attributes(person), _rng(5, person, TEXT, number)
    seen = view(person, RGB, number)
    other = _anybody(rng)
    for facet in ("hair", "upper", "lower", "bag"):
        if float(rng.uniform()) < 0.04:
            who.update({name: other[name] for name in FACETS[facet]})

    def pick(some: tuple[str, ...]) -> str:
        return some[int(rng.integers(len(some)))]

    def colour(name: str) -> str:
        called = who[f"{name}_colour"]
        return pick(_WORDS[MIXED_UP[called] if float(rng.uniform()) < 0.1 else called])

    def told(share: float) -> bool:
        return float(rng.uniform()) < share

    clothes, others = [], []
    if told(0.93):
        clothes.append(_upper(who, seen, colour, pick))
    if told(0.85) and who["upper"] != "dress":
        one = "a " if "skirt" in who["lower"] else ""
        clothes.append(f"{one}{colour('lower')} {pick(_CALLED[who['lower']])}")
    if told(0.5):
        clothes.append(f"{colour('shoes')} {pick(('shoes', 'sneakers', 'footwear'))}")
    if who["hat"] != "none" and told(0.75):
        clothes.append(f"a {colour('hat')} {pick(_CALLED[who['hat']])}")
    elif told(0.6):
        if who["hair"] == "bald":
            others.append(pick(("is bald", "has no hair")))
        else:
            shape = {"bun": pick(("hair in a bun", "tied-up hair"))}.get(who["hair"], f"{who['hair']} hair")
            where = shape.replace("hair", f"{who['hair_colour']} hair", 1) if told(0.8) else shape
            others.append(f"has {where}")
    if who["bag"] != "none" and told(0.75):
        bag = f"a {colour('bag')} {pick(_CALLED[who['bag']])}"
        others.append(f"{pick(('carries', 'has', 'is carrying'))} {bag}")
    elif who["bag"] == "none" and told(0.2):
        others.append("carries nothing")
    if told(0.3):
        others.append({"front": "faces the camera", "back": "is seen from behind", "side": "walks past"}[seen])
    if told(0.25):
        build = "is of average build"
        if not 0.92 <= who["wide"] <= 1.05:
            build = "is slim" if who["wide"] < 1 else "is heavily built"
        others.append(build)
    subject = pick(("A person", "Somebody", "A pedestrian", "This person", "Someone"))
    clothes = [clothes[i] for i in rng.permutation(len(clothes))]
    others = [others[i] for i in rng.permutation(len(others))]
    lines = [f"{subject} {pick(('wears', 'is wearing', 'is dressed in'))} {listed(clothes)}."] if clothes else []
    if others:
        lines.append(f"{pick(('The person', 'This one', 'The pedestrian')) if lines else subject} {listed(others)}.")
    text = " ".join(lines) or f"{subject} {pick(('walks along', 'stands in the street'))}."
    return text.replace(" a o", " an o").replace(" a a", " an a").replace(" a i", " an i")


def _upper(who: dict[str, Any], seen: str, colour: Callable[[str], str], pick: Callable[[tuple[str, ...]], str]) -> str:
    """Name the upper garment with its pattern, as far as the view shows it."""
    kind, first, name = pick(_CALLED[who["upper"]]), colour("upper"), who["pattern"]
    if name == "print" and seen != "front":
        name = "plain"
    if name == "plain":
        extra = f" over a {colour('second')} top" if who["upper"] in ("jacket", "coat") and seen == "front" else ""
        return f"a {first} {kind}{extra}"
    second = colour("second")
    return {
        "stripes": pick((f"a {first} and {second} striped {kind}", f"a {first} {kind} with {second} stripes")),
        "vertical": f"a {first} {kind} with {second} vertical stripes",
        "checks": pick((f"a {first} and {second} checked {kind}", f"a {first} plaid {kind}")),
        "dots": pick((f"a {first} {kind} with {second} dots", f"a {first} spotted {kind}")),
        "two halves": f"a {kind} that is {first} above and {second} below",
        "print": f"a {first} {kind} with a {second} print",
        "sleeves": f"a {first} {kind} with {second} sleeves",
    }[name]

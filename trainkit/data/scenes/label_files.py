"""Files beside a set that name its classes, whoever wrote the set: names of numbers, or names with colours.

| file                                                        | holds                                               |
|-------------------------------------------------------------|-----------------------------------------------------|
| `names.json`                                                | a list of names, or names each with a colour        |
| `labelmap.txt` (CVAT)                                       | `name:red,green,blue::` a line                      |
| `class_names.txt`, `classes.txt`, `names.txt`, `labels.txt` | a name a line: of 0, 1, ... (`__ignore__` is none)  |

The first that is there, in this order, is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainkit.data import folders
from trainkit.data.scenes import label_maps
from trainkit.data.scenes.label_maps import CLASS_LIMIT, Labels
from trainkit.errors import UserError

LIMIT = 1 << 20
"""Largest such file, in bytes."""

LABEL_MAP = "labelmap.txt"

LISTS = ("class_names.txt", "classes.txt", "names.txt", "labels.txt")

FILES = ("names.json", LABEL_MAP, *LISTS)

_RIM = (224, 224, 192)
"""Colour of the outlines of objects, which have no class, in Pascal VOC and what is written like it."""

_LINE = re.compile(r"([^:#][^:]*):\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*(:.*)?")


def find(places: Iterable[Path]) -> tuple[Path, Labels] | None:
    """Return the first such file in `places`, and the classes it names. Raises UserError for one that names none."""
    for place in dict.fromkeys(places):
        for name in FILES:
            if (file := place / name).is_file():
                return file, read(file)
    return None


def read(file: Path) -> Labels:
    """Read the classes of such a file, by its name. Raises UserError where it is too large or not of its form."""
    try:
        if file.suffix == ".json":
            return _of_json(file)
        lines = folders.read_text(file, LIMIT, "names of classes").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        if file.name == LABEL_MAP:
            return _of_label_map(file, lines)
        names = lines[1:] if lines[:1] == ["__ignore__"] else lines
        if len(names) > CLASS_LIMIT:
            raise ValueError(f"{len(names)} lines; the names of 2 to {CLASS_LIMIT} classes are needed, one per line")
        return label_maps.numbered(names)
    except ValueError as error:
        raise UserError(str(file), str(error)[:300], "names of classes") from None


def _of_json(file: Path) -> Labels:
    said = folders.read_json(file, LIMIT, "JSON")
    if isinstance(said, list) and all(isinstance(name, str) for name in said):
        return label_maps.numbered(said)
    if isinstance(said, dict) and all(_is_colour(colour) for colour in said.values()):
        return label_maps.from_palette(said)
    raise UserError(str(file), repr(said)[:100], 'a list such as ["sky", "road"], or {"sky": [70, 130, 180]}')


def _of_label_map(file: Path, lines: list[str]) -> Labels:
    palette: dict[str, list[int]] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        if (found := _LINE.fullmatch(line)) is None or found[1].strip() in palette:
            raise UserError(str(file), repr(line)[:100], "name:red,green,blue:: per line, each name once")
        palette[found[1].strip()] = [int(part) for part in found.groups()[1:4]]
        if len(palette) > CLASS_LIMIT:
            raise ValueError(f"more than {CLASS_LIMIT} classes")
    return label_maps.from_palette(palette, [] if list(_RIM) in palette.values() else [_RIM])


def _is_colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(part) is int for part in value)

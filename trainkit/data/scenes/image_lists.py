"""Lists of images and their masks: a line `image,label` each, with paths below one folder.

A label is a file of numbers or colours, or a file of COCO's form, which says what it has for the image. Cells are
parted by commas, tabs or spaces. Nothing is decoded.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.data.folders import Listing, listed_path
from trainkit.data.formats.image_decode import SUFFIXES
from trainkit.data.scenes import coco
from trainkit.data.scenes.coco import CocoMask
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.errors import UserError, few, number_of

LIST_LIMIT = 256 << 20
"""Largest list, in bytes."""

LINE_LIMIT = 8_000
"""Longest line of one, in characters."""

_HEADERS = [[a, b] for a in ("image", "img", "images", "picture") for b in ("label", "mask", "lb", "annotation", "ann")]


@dataclass
class Mistakes:
    """Lines that cannot be used, by what is wrong with them."""

    lines: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, number: int, said: str) -> None:
        """Note a line, by its number and what it says."""
        self.lines.setdefault(what, []).append(f"line {number} ({said})")

    def check(self, file: Path, lines: int, remedy: str) -> None:
        """Raise UserError that counts them among the `lines` of a file, where there are some."""
        if not self.lines:
            return
        bad = sum(map(len, self.lines.values()))
        listing = "".join(f"\n  {number_of(len(places), what)}: {few(places)}" for what, places in self.lines.items())
        found = f"{number_of(bad, 'errors')} in {number_of(lines, 'lines')}:{listing}\n"
        raise UserError(str(file), found, remedy=remedy)


def read(file: Path, root: Path) -> tuple[list[Scene], Labels | None]:
    """Return the scenes of a list whose paths begin in `root`, and their classes where its masks say them.

    Raises UserError that counts the lines which cannot be used: of another form, with files that are not there, are no
    images or lie outside `root`, or with an image named before.
    """
    if not root.is_dir():
        raise UserError(str(root), "no folder", "the folder where the paths of the list begin", "set data.root")
    there, outlines, mistakes = Listing(root), _Outlines(root), Mistakes()
    scenes: list[Scene] = []
    first: dict[str, int] = {}
    lines = 0
    for number, cells in lines_of(file):
        if not lines and [cell.lower() for cell in cells] in _HEADERS:
            continue
        lines += 1
        if (names := _names(cells, number, there, mistakes)) is None:
            continue
        image, label = names
        found = _all_there(names, number, there, mistakes)
        if image in first:
            said = f"{image[:200]}, as in line {first[image]}"
            mistakes.add("lines with an image of an earlier line", number, said)
            found = False
        first.setdefault(image, number)
        if not found:
            continue
        mask = outlines.of(image, label) if label.lower().endswith(".json") else root / label
        if mask is None:
            mistakes.add("lines with an image that is not in its JSON", number, image[:200])
        else:
            scenes.append(Scene(image, root / image, mask, f"{file}, line {number} ({image[:200]})"))
    mistakes.check(file, lines, f"correct them; paths begin at {root} (data.root changes that)")
    if not scenes:
        raise UserError(str(file), "no lines", "an image and its mask per line: image,label")
    return scenes, outlines.labels


def _names(cells: list[str], number: int, there: Listing, mistakes: Mistakes) -> tuple[str, str] | None:
    """Return the paths of image and mask of a line below the root; None, and a note, where they cannot be used."""
    if len(cells) != 2:
        mistakes.add("lines not of the form image,label", number, ",".join(cells)[:100])
        return None
    image, label = (listed_path(cell, there.root) for cell in cells)
    if image is None or label is None:
        outside = cells[0] if image is None else cells[1]
        mistakes.add("lines with a path outside of the root", number, f"{outside[:100]!r}")
        return None
    strange = [name for name in (image, label) if os.path.splitext(name)[1].lower() not in SUFFIXES]
    if strange == [label] and label.lower().endswith(".json"):
        strange = []
    if linked := [name for name in (image, label) if there.leads_out(name)]:
        mistakes.add("lines with a link out of the root", number, linked[0][:200])
    elif strange:
        mistakes.add("lines with a file that is not an image", number, strange[0][:200])
    elif image == label:
        mistakes.add("lines with one file as image and mask", number, image[:200])
    else:
        return image, label
    return None


def _all_there(names: tuple[str, str], number: int, there: Listing, mistakes: Mistakes) -> bool:
    """Return whether image and mask of a line are there; those that are not are noted."""
    gone = [(name, what) for name, what in zip(names, ("an image", "a mask"), strict=True) if not there.has_file(name)]
    for name, what in gone:
        mistakes.add(f"lines with {what} that does not exist", number, name[:200])
    return not gone


class _Outlines:
    """Files of COCO's form that a list names, each read once, and the classes that all of them have."""

    def __init__(self, root: Path):
        self.root = root
        self.labels: Labels | None = None
        self._read: dict[str, dict[Path, CocoMask]] = {}

    def of(self, image: str, name: str) -> CocoMask | None:
        """Return the mask that a file has for an image; None where it has none."""
        if name not in self._read:
            file = self.root / name
            said = coco.read(file)
            if self.labels is not None and self.labels.names != said.labels.names:
                raise UserError(str(file), f"classes {few(said.labels.names)}", "those of the other lines")
            base = coco.image_root(file, list(said.masks))
            self.labels = said.labels
            self._read[name] = {base / path: mask for path, mask in said.masks.items()}
        return self._read[name].get(self.root / image)


def lines_of(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a list and their numbers from 1, without empty ones, cut at comma, else tab, else space."""
    if file.stat().st_size > LIST_LIMIT:
        raise UserError(str(file), f"{file.stat().st_size} bytes", f"at most {LIST_LIMIT}")
    number = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            while line := stream.readline(LINE_LIMIT + 1):
                number += 1
                if len(line) > LINE_LIMIT:
                    raise UserError(f"{file}, line {number}", f"more than {LINE_LIMIT} characters", "image,label")
                line = line.strip()
                if not line or line.startswith("#"):
                    continue
                if "," in line:
                    cells = next(csv.reader([line], strict=True))
                else:
                    cells = line.split("\t" if "\t" in line else None)
                yield number, [cell.strip() for cell in cells]
    except (ValueError, csv.Error) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{file}, after line {number}", f"cannot be read ({text})", "a list in UTF-8") from None

"""Lists of images and their masks: a line each, with paths below one folder.

| line                                               | mask                                                    |
|----------------------------------------------------|---------------------------------------------------------|
| `image,label`                                      | a file of numbers or colours                            |
| `image,annotations.json`                           | what that file of COCO's form has for the image       |
| `image,a,b` under a header `image,class:x,class:y` | a file for each class; an empty cell: not in the image |

Cells are parted by commas, tabs or spaces. Nothing is decoded.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.data.folders import Listing, listed_path
from trainkit.data.formats.image_decode import SUFFIXES
from trainkit.data.scenes import class_files, coco, composed
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.errors import UserError, few, number_of

LIST_LIMIT = 256 << 20
"""Largest list, in bytes."""

LINE_LIMIT = 8_000
"""Longest line of one, in characters."""

CLASS = "class:"
"""Begins the name of a column with the file of a class."""

_HEADERS = [[a, b] for a in ("image", "img", "images", "picture") for b in ("label", "mask", "lb", "annotation", "ann")]


@dataclass
class _Mistakes:
    """Lines that cannot be used, by what is wrong with them."""

    lines: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, number: int, said: str) -> None:
        self.lines.setdefault(what, []).append(f"line {number} ({said})")

    def check(self, file: Path, root: Path, lines: int) -> None:
        """Raise UserError that counts them, where there are some."""
        if not self.lines:
            return
        bad = sum(map(len, self.lines.values()))
        listing = "".join(f"\n  {number_of(len(places), what)}: {few(places)}" for what, places in self.lines.items())
        remedy = f"correct them; paths begin at {root} (data.root changes that)"
        found = f"{number_of(bad, 'errors')} in {number_of(lines, 'lines')}:{listing}\n"
        raise UserError(str(file), found, remedy=remedy)


def read(file: Path, root: Path) -> tuple[list[Scene], Labels | None]:
    """Return the scenes of a list whose paths begin in `root`, and their classes where its masks say them.

    Raises UserError that counts the lines which cannot be used: of another form, with files that are not there, are no
    images or lie outside `root`, or with an image named before.
    """
    if not root.is_dir():
        raise UserError(str(root), "no folder", "the folder where the paths of the list begin", "set data.root")
    masks = _Masks(file, root)
    mistakes = _Mistakes()
    scenes: list[Scene] = []
    first: dict[str, int] = {}
    lines = 0
    for number, cells in lines_of(file):
        if not lines and ([cell.lower() for cell in cells] in _HEADERS or masks.is_header(cells)):
            continue
        lines += 1
        if (names := _names(cells, number, root, masks, mistakes)) is None:
            continue
        image = names[0]
        found = masks.all_there(names, number, mistakes)
        if image in first:
            said = f"{image[:200]}, as in line {first[image]}"
            mistakes.add("lines with an image of an earlier line", number, said)
            found = False
        first.setdefault(image, number)
        if found and (scene := masks.scene(names, number, mistakes)) is not None:
            scenes.append(scene)
    mistakes.check(file, root, lines)
    if not scenes:
        raise UserError(str(file), "no lines", "an image and its mask per line: image,label")
    return scenes, masks.labels


def _names(cells: list[str], number: int, root: Path, masks: _Masks, mistakes: _Mistakes) -> list[str] | None:
    """Return the paths of a line below the root, an empty one where a class has no file; None where it is wrong."""
    if len(cells) != masks.columns:
        form = "image,label" if not masks.classes else ",".join(("image", *masks.classes))[:100]
        mistakes.add(f"lines not of the form {form}", number, ",".join(cells)[:100])
        return None
    names: list[str] = []
    for place, cell in enumerate(cells):
        name = "" if masks.classes and place and not cell else listed_path(cell, root)
        if name is None:
            mistakes.add("lines with a path outside of the root", number, f"{cell[:100]!r}")
            return None
        names.append(name)
    if linked := [name for name in names if name and masks.there.leads_out(name)]:
        mistakes.add("lines with a link out of the root", number, linked[0][:200])
        return None
    strange = [name for place, name in enumerate(names) if name and not masks.is_readable(place, name)]
    if strange or names[0] in names[1:]:
        what = "lines with a file that is not an image" if strange else "lines with one file as image and mask"
        mistakes.add(what, number, (strange or names)[0][:200])
        return None
    return names


class _Masks:
    """How the lines of one list name masks, and the classes that follow from it."""

    def __init__(self, file: Path, root: Path):
        self.file, self.root = file, root
        self.there = Listing(root)
        self.classes: tuple[str, ...] = ()
        self.labels: Labels | None = None
        self._numbers: dict[str, int] = {}
        self._empty = 0
        self._coco: dict[str, dict[Path, coco.CocoMask]] = {}

    @property
    def columns(self) -> int:
        """Cells of a line."""
        return 1 + len(self.classes) if self.classes else 2

    def is_header(self, cells: Sequence[str]) -> bool:
        """Take the classes of a header `image,class:...`; False where it is none."""
        named = [cell[len(CLASS) :].strip() for cell in cells[1:] if cell.lower().startswith(CLASS)]
        if not named or len(named) < len(cells) - 1:
            return False
        try:
            self._numbers, self._empty, self.labels = composed.numbering(named)
        except ValueError as error:
            raise UserError(f"{self.file}, its first line", str(error)[:300], "names of classes") from None
        self.classes = tuple(named)
        return True

    def is_readable(self, place: int, name: str) -> bool:
        """Return whether a path of a line, the image at place 0, may be what it stands for."""
        suffix = os.path.splitext(name)[1].lower()
        return suffix in SUFFIXES or (place == 1 and not self.classes and suffix == ".json")

    def all_there(self, names: Sequence[str], number: int, mistakes: _Mistakes) -> bool:
        """Return whether the files of a line are there; those that are not are noted."""
        found = True
        for place, name in enumerate(names):
            if name and not self.there.has_file(name):
                what = "a mask" if place else "an image"
                mistakes.add(f"lines with {what} that does not exist", number, name[:200])
                found = False
        return found

    def scene(self, names: Sequence[str], number: int, mistakes: _Mistakes) -> Scene | None:
        """Return the scene of a line whose files are there; None, and a note, where no mask is said."""
        image = names[0]
        path, where = self.root / image, f"{self.file}, line {number} ({image[:200]})"
        if self.classes:
            by_class = {label: self.root / name for label, name in zip(self.classes, names[1:], strict=True) if name}
            if not by_class:
                mistakes.add("lines without a file of any class", number, image[:200])
                return None
            return Scene(image, path, class_files.of(where, by_class, self._numbers, self._empty), where)
        if not names[1].lower().endswith(".json"):
            return Scene(image, path, self.root / names[1], where)
        mask = self._of_coco(names[1]).get(path)
        if mask is None:
            mistakes.add("lines with an image that is not in its JSON", number, image[:200])
            return None
        return Scene(image, path, mask, where)

    def _of_coco(self, name: str) -> dict[Path, coco.CocoMask]:
        """Return the masks of a file of COCO's form by the image; each file is read once."""
        if name not in self._coco:
            file = self.root / name
            said = coco.read(file)
            if self.labels is not None and self.labels.names != said.labels.names:
                raise UserError(str(file), f"classes {few(said.labels.names)}", "those of the other lines")
            base = coco.image_root(file, list(said.masks))
            self.labels = said.labels
            self._coco[name] = {base / image: mask for image, mask in said.masks.items()}
        return self._coco[name]


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

"""Masks of one file for each class: a pixel is of the class whose file is not 0 (not black) there.

| masks                       | class            |
|-----------------------------|------------------|
| `masks/<class>/<image>.png` | name of a folder |
| `masks/<image>/<class>.png` | name of a file   |
| `masks/<image>_<class>.png` | end of a name    |

Classes are the background (0) and those that are found, in the order of their names; see `composed` for what lies on
top. A class without a file is not in the image; an image without any file is left out, as nobody says whether it is
empty.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.data.formats.image_decode import SUFFIXES
from trainkit.data.scenes import composed, files
from trainkit.data.scenes.composed import Painted, Region
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import CLASS_LIMIT
from trainkit.errors import UserError

ByClass = dict[str, dict[str, Path]]
"""Name of an image without its suffix, to the file of each of its classes."""


@dataclass(frozen=True, eq=False)
class ClassFilesMask:
    """The files of an image, one for each of its classes."""

    where: str
    classes: tuple[tuple[int, Path], ...]
    """Number of a class and its file."""
    empty: int

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of all classes."""
        return tuple(file for _, file in self.classes)

    def shape(self) -> tuple[int, int]:
        """Return height and width of the first file, from its header. Raises UserError."""
        _, file = self.classes[0]
        return files.picture_shape(Scene(self.where, file, None, str(file)))

    def painted(self) -> Painted:
        """Return classes and objects. Raises UserError for what cannot be read, and for several sizes."""
        size = self.shape()
        return composed.paint(size, self._regions(size), self.empty, self.where)

    def _regions(self, size: tuple[int, int]) -> Iterator[Region]:
        for number, file in self.classes:
            values = files.read_mask(Scene(self.where, file, file, str(file)))
            if values.shape[:2] != size:
                found = "{1} x {0} pixels, and {2} {4} x {3}".format(*values.shape[:2], self.classes[0][1].name, *size)
                raise UserError(str(file), found, "one size for all classes of an image")
            region = Region.covering(number, (values if values.ndim == 2 else values.max(2)) > 0)
            if region.area:  # a black file says that the class is not there
                yield region


def recognise(
    images: Iterable[str], masks: Mapping[str, Path], no_class: re.Pattern[str], splits: frozenset[str]
) -> tuple[ByClass, list[str]] | None:
    """Return masks of images by class where they are in one of the forms above, and masks of no image; else None.

    `images` and `masks` are paths below their folders. Ends of names that `no_class` matches, such as `_mask`, and
    names of `splits` are no classes. The form is the one that fits most masks, and half of them at least.
    """
    stems = {os.path.splitext(name)[0] for name in images if _is_picture(name)}
    named = {os.path.splitext(name)[0]: file for name, file in masks.items() if _is_picture(name)}
    best: list[tuple[str, str, Path]] = []
    for form in (_by_folder, _by_file, _by_end):
        found = [(*parts, file) for stem, file in named.items() if (parts := form(stem, stems)) is not None]
        if len(found) > len(best):
            best = found
    classes = {name for _, name, _ in best}
    if 2 * len(best) < max(1, len(named)) or not 0 < len(classes) < CLASS_LIMIT:
        return None
    if any(name.lower() in splits or no_class.fullmatch(f"x_{name}") for name in classes):
        return None
    made: ByClass = {}
    for stem, name, file in best:
        made.setdefault(stem, {})[name] = file
    used = {file for _, _, file in best}
    return made, [name for name, file in masks.items() if file not in used]


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _by_folder(stem: str, stems: set[str]) -> tuple[str, str] | None:
    name, _, rest = stem.partition("/")
    return (rest, name) if rest in stems else None


def _by_file(stem: str, stems: set[str]) -> tuple[str, str] | None:
    rest, _, name = stem.rpartition("/")
    return (rest, name) if rest in stems else None


def _by_end(stem: str, stems: set[str]) -> tuple[str, str] | None:
    ends = [place for place, letter in enumerate(stem) if letter in "_-" and place + 1 < len(stem)]
    place = next((place for place in reversed(ends) if stem[:place] in stems), None)
    return None if place is None or "/" in stem[place:] else (stem[:place], stem[place + 1 :])


def scenes(
    images: Mapping[str, Path], by_class: ByClass, numbers: Mapping[str, int], empty: int
) -> tuple[list[Scene], list[str]]:
    """Return scenes, and the images without a mask; `numbers` are those of the classes."""
    made, lonely = [], []
    stems = {os.path.splitext(name)[0]: name for name in images if _is_picture(name)}
    for stem, name in stems.items():
        if stem in by_class:
            made.append(
                Scene(name, images[name], of(str(images[name]), by_class[stem], numbers, empty), str(images[name]))
            )
        else:
            lonely.append(name)
    return made, lonely


def of(where: str, by_class: Mapping[str, Path], numbers: Mapping[str, int], empty: int) -> ClassFilesMask:
    """Return the mask of an image at `where`, from the file of each class that is in it."""
    pairs = ((number, by_class[name]) for name, number in numbers.items() if name in by_class)
    return ClassFilesMask(f"{where}, its masks", tuple(pairs), empty)

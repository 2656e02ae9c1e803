"""Objects and classes of masks that are lost: drawn where no pixel is, covered by others, gone when masks are resized.

Of masks that are painted from outlines objects are counted; of others the images in which a class
is, before and after masks are resized.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from trainkit.data.rows.row_files import is_count, is_list, is_text
from trainkit.data.scenes.augment import nearest
from trainkit.data.scenes.outlines import OUTSIDE, Painted
from trainkit.errors import UserError, few, number_of
from trainkit.files import Json
from trainkit.interfaces import IGNORED

THERE = "there"
COVERED, RESIZED = "covered by others", "gone when masks are resized"

_NAMED = 3
_CLASSES = 20
_BLOCK = 1 << 20

Fates = Counter[tuple[int, str]]
"""By class and what became of them, `THERE` for all: objects of a mask, or 1 for a class that is in it."""


def resized(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize a mask to `size` (height, width): every pixel has the class of the one that its centre lies in."""
    if mask.shape == tuple(size):
        return mask
    rows, columns = map(nearest, mask.shape, size)
    return mask[rows[:, None], columns]


def fates(classes: np.ndarray, painted: Painted | None, size: tuple[int, int] | None) -> Fates:
    """Return what became of the objects of a mask, or of its `classes`, when it was painted and resized to `size`."""
    found: Fates = Counter()
    smaller = None if size is None or classes.shape == tuple(size) else size
    if painted is None:
        if smaller is not None:
            before, after = _present(classes, IGNORED), _present(resized(classes, smaller), IGNORED)
            for number in np.flatnonzero(before[:IGNORED]).tolist():
                found[number, THERE] += 1
                found[number, RESIZED] += not after[number]
        return +found
    count = len(painted.regions)
    seen = _present(painted.on_top, count)
    left = seen if smaller is None else _present(resized(painted.on_top, smaller), count)
    for place, region in enumerate(painted.regions, start=1):
        if region.of == IGNORED:
            continue
        found[region.of, THERE] += 1
        if region.fate:
            found[region.of, region.fate] += 1
        elif not seen[place]:
            found[region.of, COVERED] += 1
        elif not left[place]:
            found[region.of, RESIZED] += 1
    return found


def _present(values: np.ndarray, most: int) -> np.ndarray:
    """Return which of the values 0 .. `most` are in an array: bool (most + 1,)."""
    there = np.zeros(most + 1, bool)
    rows = max(1, _BLOCK // max(1, values.shape[1]))
    for first in range(0, len(values), rows):
        there[values[first : first + rows]] = True
    return there


@dataclass(frozen=True)
class Objects:
    """Counts of the objects that were in the masks of a set, and of those that are left."""

    there: tuple[int, ...] = ()
    """Objects of each class, or images with it."""
    left: tuple[int, ...] = ()
    """Of these, what is seen."""
    outside: int = 0
    """Objects that lie outside of their image."""
    white: int = 0
    """Masks of one class and of 255, where that stands for no class."""
    lost: tuple[str, ...] = ()
    """A sentence for each class that lost something."""

    @classmethod
    def read(cls, value: Json) -> Self | None:
        """Return the counts that a manifest has; None where it has something else."""
        lists = {"there": is_count, "left": is_count, "lost": is_text}
        if not isinstance(value, dict) or set(value) != {field.name for field in dataclasses.fields(cls)}:
            return None
        sound = all(is_list(value[key], of) for key, of in lists.items())
        if not sound or not is_count(value["outside"]) or not is_count(value["white"]):
            return None
        counts: dict[str, Json] = {key: tuple(one) if key in lists else one for key, one in value.items()}
        return cls(**counts)

    def error(self, where: str, names: Sequence[str], pixels: np.ndarray, train: bool) -> UserError | None:
        """Return the error of a set that is plainly wrong: no pixel of a class, most objects outside, or 255 for a
        class; of what is trained on also a class of which nothing is left. `pixels` are those of each class."""
        labelled = np.flatnonzero(pixels).tolist()
        if not labelled:
            return UserError(where, "no labelled pixel", "some labelled pixels")
        if self.white and len(labelled) == 1:
            found = f"pixels of the class {names[labelled[0]]} and of 255 alone, which stands for no class"
            colours = f"{{{names[0]}: [0, 0, 0], {names[1]}: [255, 255, 255]}}"
            remedy = f"set data.palette to {colours}, or write masks of 0 and 1" if len(names) == 2 else ""
            return UserError(where, found, f"pixels of {few(names, 8)}", remedy or "write masks of 0, 1, 2 and so on")
        gone = [name for name, there, left in zip(names, self.there, self.left, strict=False) if there and not left]
        listed = "".join(f"\n  {text}" for text in self.lost) + "\n"
        if 2 * self.outside > (total := sum(self.there)):
            found = f"{self.outside} of {total} objects outside of their images:{listed}"
            return UserError(where, found, "outlines in pixels", "were they drawn on images of another size?")
        if gone and train:
            found = f"nothing is left of {number_of(len(gone), 'classes', 'class')} ({few(gone, 8)}):{listed}"
            remedy = "correct the masks, remove the class, or set a larger data.size"
            return UserError(where, found, "pixels of each class", remedy)
        return None


class Tally:
    """Counts what became of the objects of a set, and keeps the names of the first images that lost some."""

    def __init__(self, classes: int, painted: bool):
        self._classes, self._unit = classes, "objects" if painted else "images"
        self._counts: Fates = Counter()
        self._files: dict[tuple[int, str], dict[str, None]] = {}
        self._white: list[str] = []

    def add(self, id: str, found: Fates, white: bool) -> None:
        """Count an image: its name, `fates` of its mask, and True where it is of one class and 255 for no class."""
        self._counts.update(found)
        if white:
            self._white.append(id)
        for key in found:
            if key[1] != THERE:
                self._files.setdefault(key, {})[id] = None

    def objects(self, names: Sequence[str]) -> Objects:
        """Return the sums; `names` are those of the classes."""
        there = [self._counts[number, THERE] for number in range(self._classes)]
        lost: list[dict[str, int]] = [{} for _ in names]
        for (number, fate), count in self._counts.items():
            if fate != THERE:
                lost[number][fate] = count
        left = [count - sum(some.values()) for count, some in zip(there, lost, strict=True)]
        said = [
            f"{names[number]}: {left[number]} of {there[number]} {self._unit} left; {self._told(number, some)}"
            for number, some in enumerate(lost)
            if some
        ]
        if len(said) > _CLASSES:
            said[_CLASSES:] = [f"and {len(said) - _CLASSES} more classes"]
        if white := len(self._white):
            said.append(f"{number_of(white, 'masks')} of one class and of 255, for no class, alone: {few(self._white)}")
        outside = sum(some.get(OUTSIDE, 0) for some in lost)
        return Objects(tuple(there), tuple(left), outside, white, tuple(said))

    def _told(self, number: int, some: dict[str, int]) -> str:
        ordered = sorted(some.items(), key=lambda one: -one[1])
        return "; ".join(f"{count} {fate}: {few(self._files[number, fate], _NAMED)}" for fate, count in ordered)

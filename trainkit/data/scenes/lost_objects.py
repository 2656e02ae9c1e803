"""Objects and classes of masks that are lost: drawn where no pixel is, covered by others, gone when masks are resized.

Of masks that are painted from outlines objects are counted; of others the images in which a class is, before and after
masks are resized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from trainkit.data.rows.row_files import is_count, is_list, is_text
from trainkit.data.scenes.augment import nearest
from trainkit.data.scenes.outlines import Painted
from trainkit.errors import UserError, few, number_of
from trainkit.files import Json
from trainkit.interfaces import IGNORED

THERE = "there"
COVERED, RESIZED = "covered by others", "gone when masks are resized"

_NAMED, _CLASSES = 3, 20

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
    seen = classes if painted is None else painted.on_top
    before = _present(seen)
    after = before if size is None else _present(resized(seen, size))
    if painted is None:
        every = {number: (number, "") for number in before}
    else:
        every = dict(enumerate(painted.objects, start=1))
    found: Fates = Counter()
    for place, (number, fate) in every.items():
        if number != IGNORED:
            found[number, THERE] += 1
            fate = fate or (COVERED if place not in before else RESIZED if place not in after else THERE)
            found[number, fate] += fate != THERE
    return +found


def _present(values: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.bincount(values.ravel())).tolist())


@dataclass(frozen=True)
class Objects:
    """Counts of the objects that were in the masks of a set, and of those that are left."""

    there: tuple[int, ...] = ()
    """Objects of each class, or images with it."""
    left: tuple[int, ...] = ()
    """Of these, what is seen."""
    unseen: int = 0
    """Objects whose outlines are of no pixel of their class in their image, whatever lies on them."""
    lost: tuple[str, ...] = ()
    """A sentence for each class that lost something."""

    @classmethod
    def read(cls, value: Json) -> Self | None:
        """Return the counts that a manifest has; None where it has something else."""
        if not isinstance(value, dict):
            return None
        lists = [value.get(key, ()) for key in ("there", "left", "lost")]
        unseen: Json = value.get("unseen", value.get("outside"))  # its name in sets of before
        if not all(map(is_list, lists, (is_count, is_count, is_text))) or not is_count(unseen):
            return None
        there, left, lost = map(tuple, lists)
        return cls(there, left, unseen, lost)

    def error(
        self, where: str, names: Sequence[str], pixels: np.ndarray, *, train: bool, numbers: bool
    ) -> UserError | None:
        """Return the error of a set that is plainly wrong: most objects not seen, no pixel of a class; where its files
        hold `numbers` also one class and 255 alone; of what is trained on also a class of which nothing is left.

        `pixels` are those of each class, and last of no class.
        """
        labelled, lost = np.flatnonzero(pixels[:-1]).tolist(), "".join(f"\n  {text}" for text in self.lost) + "\n"
        if 2 * self.unseen > (total := sum(self.there)):
            found = f"{self.unseen} of {total} objects are not seen in their images:{lost}"
            return UserError(where, found, "outlines in pixels", "were they drawn on images of another size?")
        if not labelled:
            return UserError(where, "no labelled pixel", "some labelled pixels")
        if numbers and len(labelled) == 1 and pixels[-1]:
            found = f"pixels of the class {names[labelled[0]]} and unlabelled ones (255) alone"
            palette = f"{{{names[0]}: [0, 0, 0], NAME: [255, 255, 255]}}"
            remedy = f"write masks of 0, 1 and so on, or set data.palette: {palette}"
            return UserError(where, found, f"pixels of {few(names, 8)}", remedy)
        gone = [name for name, there, left in zip(names, self.there, self.left, strict=False) if there and not left]
        if gone and train:
            found = f"nothing is left of {number_of(len(gone), 'classes', 'class')} ({few(gone, 8)}):{lost}"
            remedy = "correct the masks, remove the class, or set a larger data.size"
            return UserError(where, found, "pixels of each class", remedy)
        return None


class Tally:
    """Counts what became of the objects of a set, and keeps the names of the first images that lost some."""

    def __init__(self, names: Sequence[str], painted: bool):
        self._names, self._unit = names, "objects" if painted else "images"
        self._counts: Fates = Counter()
        self._files: dict[tuple[int, str], list[str]] = {}

    def add(self, id: str, found: Fates) -> None:
        """Count an image: its name, and `fates` of its mask."""
        self._counts.update(found)
        for key in found:
            if key[1] != THERE:
                self._files.setdefault(key, []).append(id)

    def objects(self) -> Objects:
        """Return the sums."""
        there, left, said, unseen = [], [], [], 0
        for number, name in enumerate(self._names):
            lost = Counter({fate: n for (of, fate), n in self._counts.items() if of == number and fate != THERE})
            there.append(self._counts[number, THERE])
            left.append(there[-1] - lost.total())
            unseen += lost.total() - lost[COVERED] - lost[RESIZED]
            told = [f"{n} {fate}: {few(self._files[number, fate], _NAMED)}" for fate, n in lost.most_common() if n]
            if told:
                said.append(f"{name}: {left[-1]} of {there[-1]} {self._unit} left; {'; '.join(told)}")
        if len(said) > _CLASSES:
            said[_CLASSES:] = [f"and {len(said) - _CLASSES} more classes"]
        return Objects(tuple(there), tuple(left), unseen, tuple(said))

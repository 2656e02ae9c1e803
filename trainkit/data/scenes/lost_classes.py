"""Classes that are lost: annotated in an image and without a pixel in its mask, drawn nowhere, gone when it is resized.

A class is annotated where an outline is of it, or in a file a pixel. It is left where the mask that is trained on has a
pixel of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from trainkit.data.scenes.augment import nearest
from trainkit.data.scenes.outlines import Painted
from trainkit.errors import UserError, few, number_of
from trainkit.files import Json
from trainkit.interfaces import IGNORED

_NAMED, _CLASSES = 3, 20


class Annotated(NamedTuple):
    """Classes that are annotated in an image, and those left in its mask."""

    classes: frozenset[int]
    left: frozenset[int]
    objects: int = 0
    """Outlines of a class."""
    unseen: int = 0
    """Of these, those that have no pixel in the image."""


def resized(mask: np.ndarray, size: tuple[int, int] | None) -> np.ndarray:
    """Resize a mask to `size` (height, width): every pixel has the class of the one that its centre lies in."""
    if size is None or mask.shape == tuple(size):
        return mask
    rows, columns = map(nearest, mask.shape, size)
    return mask[rows[:, None], columns]


def annotated(classes: np.ndarray, painted: Painted | None, size: tuple[int, int] | None) -> Annotated:
    """Return what a mask has, uint8 (height, width), and what is left when it is resized to `size`."""
    left = _present(resized(classes, size))
    if painted is None:
        return Annotated(_present(classes), left)
    there = frozenset(painted.objects)
    return Annotated(there, left & there, len(painted.objects), painted.unseen)


def _present(mask: np.ndarray) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.bincount(mask.ravel())).tolist()) - {IGNORED}


@dataclass(frozen=True)
class Losses:
    """Counts of what is left of the annotations of a set."""

    there: tuple[int, ...] = ()
    """Images in which each class is annotated."""
    left: tuple[int, ...] = ()
    """Images in whose masks each of these classes is."""
    objects: int = 0
    unseen: int = 0
    lost: tuple[str, ...] = ()
    """Sentences about outlines that are not seen, and about each class that lost something."""

    def error(
        self, where: str, names: Sequence[str], pixels: np.ndarray, *, train: bool, numbers: bool
    ) -> UserError | None:
        """Return the error of a set that is plainly wrong: most outlines not seen, no pixel of a class; where its files
        hold `numbers` also one class and 255 alone; of what is trained on also a class of which nothing is left.

        `pixels` are those of each class, and last of no class.
        """
        labelled, lost = np.flatnonzero(pixels[:-1]).tolist(), "".join(f"\n  {text}" for text in self.lost) + "\n"
        if 2 * self.unseen > self.objects:
            found = f"{self.unseen} of {self.objects} outlines have no pixel in their images:{lost}"
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


_LOSSES = TypeAdapter(Losses)


def read(value: Json) -> Losses | None:
    """Return the losses that a manifest has; None where it has something else."""
    try:
        return _LOSSES.validate_python(value)
    except ValidationError:
        return None


def losses(names: Sequence[str], images: Sequence[tuple[str, Annotated]]) -> Losses:
    """Count the images of a set, each with its id, in which classes of `names` are annotated and left."""
    there, left, sentences = [], [], []
    unseen = [(id, one) for id, one in images if one.unseen]
    if unseen:
        count, every = sum(one.unseen for _, one in unseen), sum(one.objects for _, one in images)
        named = few((id for id, _ in unseen), _NAMED)
        sentences.append(f"{count} of {every} outlines have no pixel in their images: {named}")
    for number, name in enumerate(names):
        with_it = [(id, number in one.left) for id, one in images if number in one.classes]
        gone = [id for id, is_left in with_it if not is_left]
        there.append(len(with_it))
        left.append(len(with_it) - len(gone))
        if gone:
            sentences.append(f"{name}: no pixel left in {len(gone)} of {len(with_it)} images: {few(gone, _NAMED)}")
    if len(sentences) > _CLASSES:
        sentences[_CLASSES:] = [f"and {len(sentences) - _CLASSES} more classes"]
    objects = sum(one.objects for _, one in images), sum(one.unseen for _, one in images)
    return Losses(tuple(there), tuple(left), *objects, tuple(sentences))

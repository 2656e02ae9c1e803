"""Odd and repeated images of sets of scenes, found without reading a file again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trainkit.data import leakage
from trainkit.data.scenes.lost_objects import Objects
from trainkit.data.storage.image_store import Packed
from trainkit.data.storage.mask_store import PackedMasks
from trainkit.errors import UserError, few

MUCH = 0.5
"""Share of pixels without a class from which a set is odd."""


@dataclass(frozen=True)
class Audit:
    """Sizes, classes and fingerprints of a set whose files were all read. Images that cannot be used have no row."""

    words: str
    """Name of the set in messages."""
    names: tuple[str, ...]
    """Of the classes, in the order of their numbers."""
    ids: tuple[str, ...]
    """Name of each image in its source."""
    shapes: np.ndarray
    """int64 (n, 2), height and width of each."""
    counts: np.ndarray
    """int64 (n, classes + 1), pixels of each class, and last of those without one."""
    pictures: np.ndarray
    """uint64 (n,), fingerprint of the pixels of each; of one that was not decoded that of its file."""
    masks: np.ndarray
    """uint64 (n,), fingerprint of the classes of each."""
    damage: tuple[str, ...]
    """Sentences about what cannot be used, one for each kind of error."""
    turned: tuple[str, ...] = ()
    """Names of images that an EXIF orientation turns or mirrors without a change of their size."""
    objects: Objects = field(default_factory=Objects)
    """What was in the masks, and what is left of it."""

    def error(self, *, train: bool) -> UserError | None:
        """Return what makes the set useless though each of its masks can be read; see `Objects.error`."""
        return self.objects.error(self.words, self.names, self.counts[:, :-1].sum(0), train)


def audit_packed(words: str, masks: PackedMasks, pictures: Packed, shapes: np.ndarray) -> Audit:
    """Return the audit of a packed set of images of `shapes`, without reading one: for `oddities` and `shared`."""
    contents, prints = np.asarray(pictures.contents()), np.asarray(masks.fingerprints)
    counts, ids = np.asarray(masks.counts), tuple(masks.ids())
    return Audit(words, masks.names, ids, shapes, counts, contents, prints, (), objects=masks.objects)


def oddities(seen: Audit) -> list[str]:
    """Return sentences about what is odd but usable in a set."""
    notes, ids, labelled = [], seen.ids, seen.counts[:, :-1]
    if not len(ids):
        return notes
    if absent := [name for name, pixels in zip(seen.names, labelled.sum(0), strict=True) if not pixels]:
        notes.append(f"{len(absent)} of {len(seen.names)} classes have no pixel: {few(absent, 20)}")
    there = (labelled > 0).sum(1)
    if len(bare := np.flatnonzero(there == 0)):
        notes.append(f"{len(bare)} of {len(ids)} images have no labelled pixel: {few(ids[i] for i in bare)}")
    if len(single := np.flatnonzero(there == 1)):
        listed = few(f"{ids[i]} ({seen.names[int(labelled[i].argmax())]})" for i in single)
        notes.append(f"{len(single)} of {len(ids)} images have only one class: {listed}")
    notes += seen.objects.lost
    if seen.turned:
        notes.append(
            f"{len(seen.turned)} of {len(ids)} images are rotated or mirrored by their EXIF orientation, and their "
            f"sizes do not show whether their masks are too: {few(seen.turned)}"
        )
    share = seen.counts[:, -1].sum() / seen.counts.sum()
    if MUCH <= share < 1:
        notes.append(f"{share:.1%} of the pixels are not labelled")
    if twice := _twice(seen.pictures):
        others = sum(seen.masks[a] != seen.masks[b] for a, b in twice)
        said = f", {others} of them with a different mask" if others else ""
        listed = few(f"{ids[b]} = {ids[a]}" for a, b in twice)
        notes.append(f"{len(twice)} of {len(ids)} images are duplicates{said}: {listed}")
    # A mask of several classes that fits two images to the pixel was rather copied than drawn.
    several = np.where(there > 1, seen.masks, np.arange(len(ids), dtype=np.uint64))
    if twice := [(a, b) for a, b in _twice(several) if there[b] > 1 and seen.pictures[a] != seen.pictures[b]]:
        listed = few(f"{ids[b]} = {ids[a]}" for a, b in twice)
        notes.append(f"{len(twice)} of {len(ids)} masks are identical to those of other images: {listed}")
    return notes


def _twice(prints: np.ndarray) -> list[tuple[int, int]]:
    """Return the places of repeated fingerprints: of the first of each, and its own."""
    first: dict[int, int] = {}
    pairs = ((first.setdefault(content, place), place) for place, content in enumerate(prints.tolist()))
    return [(before, place) for before, place in pairs if before != place]


def shared(seen: Audit, other: Audit) -> str | None:
    """Return a sentence about images of a set that are in another one too; None where none are."""
    pairs = leakage.copies(seen.pictures, other.pictures)
    if not len(pairs):
        return None
    listed = few(f"{seen.ids[one]} = {other.ids[two]}" for one, two in pairs.tolist())
    return f"{len(pairs)} of its {len(seen.ids)} images are in {other.words}: {listed}"

"""Find what is odd about a set of scenes, and usable, from what is known of its images and masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainkit.data.leakage import repeats
from trainkit.data.scenes.lost_objects import Objects
from trainkit.errors import few

MUCH = 0.5
"""Share of pixels without a class from which a set is odd."""


def oddities(
    ids: Sequence[str],
    names: Sequence[str],
    counts: np.ndarray,
    pictures: np.ndarray,
    masks: np.ndarray,
    objects: Objects,
    turned: Sequence[str] = (),
    much: float = MUCH,
) -> list[str]:
    """Return sentences about what is odd but usable in a set of n images, called `ids`.

    `names` are those of the classes; `counts`, int64 (n, classes + 1), the pixels of each class and last of those
    without one; `pictures` and `masks`, uint64 (n,), fingerprints; `objects` what is left of the objects in the masks.
    `turned` are the images that an EXIF orientation turns or mirrors without a change of their size. A share of pixels
    without a class is told from `much` on.
    """
    if not len(ids):
        return []
    notes, labelled = [], counts[:, :-1]
    if absent := [name for name, pixels in zip(names, labelled.sum(0), strict=True) if not pixels]:
        notes.append(f"{len(absent)} of {len(names)} classes have no pixel: {few(absent, 20)}")
    there = (labelled > 0).sum(1)
    if len(bare := np.flatnonzero(there == 0)):
        notes.append(f"{len(bare)} of {len(ids)} images have no labelled pixel: {few(ids[i] for i in bare.tolist())}")
    if len(single := np.flatnonzero(there == 1)):
        listed = few(f"{ids[i]} ({names[int(labelled[i].argmax())]})" for i in single.tolist())
        notes.append(f"{len(single)} of {len(ids)} images have only one class: {listed}")
    notes += objects.lost
    if turned:
        notes.append(
            f"{len(turned)} of {len(ids)} images are rotated or mirrored by their EXIF orientation, and their "
            f"sizes do not show whether their masks are too: {few(turned)}"
        )
    share = counts[:, -1].sum() / counts.sum()
    if share and much <= share < 1:
        notes.append(f"{share:.1%} of the pixels are not labelled")
    if len(twice := repeats(pictures)):
        others = int((masks[twice[:, 0]] != masks[twice[:, 1]]).sum())
        said = f", {others} of them with a different mask" if others else ""
        notes.append(f"{len(twice)} of {len(ids)} images are duplicates{said}: {_pairs(ids, twice)}")
    # A mask of several classes that fits two images to the pixel was rather copied than drawn.
    several = np.flatnonzero(there > 1)
    twice = several[repeats(masks[several])]
    if len(twice := twice[pictures[twice[:, 0]] != pictures[twice[:, 1]]]):
        notes.append(f"{len(twice)} of {len(ids)} masks are identical to those of other images: {_pairs(ids, twice)}")
    return notes


def _pairs(ids: Sequence[str], pairs: np.ndarray) -> str:
    return few(f"{ids[again]} = {ids[first]}" for first, again in pairs.tolist())

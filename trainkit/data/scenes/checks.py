"""Find what is wrong or odd about a set of scenes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainkit.data.leakage import repeats
from trainkit.data.scenes.mask_store import PackedMasks
from trainkit.errors import UserError, few, number_of

_MUCH = 0.5
"""Share of pixels without a class from which a set is odd."""


def mistake(
    where: str, names: Sequence[str], there: Sequence[int], counts: np.ndarray, *, train: bool, numbers: bool
) -> UserError | None:
    """Return the error of a set that is plainly wrong: no labelled pixel; where its files hold `numbers` one class and
    255 alone; of what is trained on a class of which nothing is left.

    `names` are those of the classes; `there` counts the images whose files have each; `counts`, int64 (n, classes + 1),
    the pixels of each in masks as they are used, and last of those without one.
    """
    pixels, left = counts.sum(0), (counts[:, :-1] > 0).sum(0)
    labelled = np.flatnonzero(pixels[:-1]).tolist()
    if not labelled:
        return UserError(where, "no labelled pixel", "some labelled pixels")
    if numbers and len(labelled) == 1 and pixels[-1]:
        found = f"pixels of the class {names[labelled[0]]} and unlabelled ones (255) alone"
        palette = f"{{{names[0]}: [0, 0, 0], NAME: [255, 255, 255]}}"
        remedy = f"write masks of 0, 1 and so on, or set data.palette: {palette}"
        return UserError(where, found, f"pixels of {few(names, 8)}", remedy)
    gone = [name for name, before, after in zip(names, there, left, strict=True) if before and not after]
    if gone and train:
        found = f"nothing is left of {number_of(len(gone), 'classes', 'class')} ({few(gone, 8)}) in resized masks"
        return UserError(where, found, "pixels of each class", "remove the class, or set a larger data.size")
    return None


def oddities(ids: Sequence[str], masks: PackedMasks, prints: np.ndarray) -> Iterator[str]:
    """Yield sentences about what is odd but usable in a set of n images, called `ids`.

    `prints`, uint64 (n,), are fingerprints of the images.
    """
    names, counts, contents = masks.names, np.asarray(masks.counts), np.asarray(masks.fingerprints)
    for name, before, after in zip(names, masks.there, (counts[:, :-1] > 0).sum(0), strict=True):
        if after < before:
            yield f"{name}: no pixel left in {before - after} of {before} images"
    if absent := [name for name, pixels in zip(names, counts.sum(0), strict=False) if not pixels]:
        yield f"{len(absent)} of {len(names)} classes have no pixel: {few(absent, 20)}"
    classes = (counts[:, :-1] > 0).sum(1)
    if len(bare := np.flatnonzero(classes == 0)):
        yield f"{len(bare)} of {len(ids)} images have no labelled pixel: {few(ids[i] for i in bare.tolist())}"
    if len(single := np.flatnonzero(classes == 1)):
        listed = few(f"{ids[i]} ({names[int(counts[i, :-1].argmax())]})" for i in single.tolist())
        yield f"{len(single)} of {len(ids)} images have only one class: {listed}"
    if (share := counts[:, -1].sum() / counts.sum()) >= _MUCH:
        yield f"{share:.1%} of the pixels are not labelled"
    if len(twice := repeats(prints)):
        others = int((contents[twice[:, 0]] != contents[twice[:, 1]]).sum())
        said = f", {others} of them with a different mask" if others else ""
        pairs = few(f"{ids[again]} = {ids[first]}" for first, again in twice.tolist())
        yield f"{len(twice)} of {len(ids)} images are duplicates{said}: {pairs}"
    if turned := [ids[row] for row in masks.turned]:
        yield (
            f"{len(turned)} of {len(ids)} images are rotated or mirrored by their EXIF orientation, and their "
            f"sizes do not show whether their masks are too: {few(turned)}"
        )

"""Find what is odd about a set of scenes, and usable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainkit.data.leakage import repeats
from trainkit.data.scenes.lost_classes import Losses
from trainkit.errors import few

_MUCH = 0.5
"""Share of pixels without a class from which a set is odd."""


def oddities(
    ids: Sequence[str],
    names: Sequence[str],
    counts: np.ndarray,
    prints: np.ndarray,
    masks: np.ndarray,
    losses: Losses,
) -> Iterator[str]:
    """Yield sentences about what is odd but usable in a set of n images, called `ids`.

    `names` are those of the classes; `counts`, int64 (n, classes + 1), the pixels of each class and last of those
    without one; `prints` and `masks`, uint64 (n,), fingerprints of images and masks; `losses` what is left of
    the annotations.
    """
    if not len(ids):
        return
    yield from losses.lost
    if absent := [name for name, pixels in zip(names, counts.sum(0), strict=False) if not pixels]:
        yield f"{len(absent)} of {len(names)} classes have no pixel: {few(absent, 20)}"
    there = (counts[:, :-1] > 0).sum(1)
    if len(bare := np.flatnonzero(there == 0)):
        yield f"{len(bare)} of {len(ids)} images have no labelled pixel: {few(ids[i] for i in bare.tolist())}"
    if len(single := np.flatnonzero(there == 1)):
        listed = few(f"{ids[i]} ({names[int(counts[i, :-1].argmax())]})" for i in single.tolist())
        yield f"{len(single)} of {len(ids)} images have only one class: {listed}"
    if (share := counts[:, -1].sum() / counts.sum()) >= _MUCH:
        yield f"{share:.1%} of the pixels are not labelled"
    if len(twice := repeats(prints)):
        others = int((masks[twice[:, 0]] != masks[twice[:, 1]]).sum())
        said = f", {others} of them with a different mask" if others else ""
        pairs = few(f"{ids[again]} = {ids[first]}" for first, again in twice.tolist())
        yield f"{len(twice)} of {len(ids)} images are duplicates{said}: {pairs}"

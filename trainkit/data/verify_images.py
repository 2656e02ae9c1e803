"""Verify packed sets of images, of faces as well: every row is compared with what was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainkit.data import leakage, verification
from trainkit.data.cache import Progress
from trainkit.data.storage.image_store import Packed
from trainkit.data.verification import Examined
from trainkit.errors import FEW, few


def verify(path: Path | str, *, against: Sequence[Path | str] = (), on_progress: Progress | None = None) -> list[str]:
    """Read everything in a packed set and compare it with what was written. Returns sentences; empty when all is well.

    Damage: files whose SHA-256 differs, rows whose checksum differs or that cannot be decoded. What is only odd begins
    with `warning: `: classes with one image, one image under two classes, images and groups that are also in one
    of the packed sets `against` (of a training set: its evaluations).
    """

    def find(place: Path | str) -> list[Examined]:
        data = Packed(place)
        held, damage = leakage.held_in(data, subjects=frozenset(data.group_names)), list[str]()
        if place == path:
            damage = [*data.changed(), *verification.damaged(str(place), data.picture, range(len(data)), on_progress)]
        return [Examined(where=str(data.path), held=held, damage=damage, odd=oddities(data))]

    return verification.verified(find, path, against)


def oddities(data: Packed) -> list[str]:
    """Return sentences about what is odd but usable: people with one image, one image under two people."""
    notes = []
    names = data.class_names
    if data.classes:
        counts = sum(np.bincount(some, minlength=data.classes) for some in data.column_by_batch("label"))
        for said, wanted in (("one image", 1), ("no image", 0)):
            if len(found := np.flatnonzero(counts == wanted)):
                notes.append(f"{len(found)} of {data.classes} classes have {said}: {few(names[i] for i in found)}")
        count, first = 0, np.empty((0, 2), np.int64)
        for pairs in leakage.repeats_by_part(list(data.column_by_batch("content"))):
            pairs = pairs[data.at("label", pairs[:, 0]) != data.at("label", pairs[:, 1])]
            count, first = count + len(pairs), np.concatenate([first, pairs])
            first = first[np.argsort(first[:, 1])][:FEW]
        if count:
            listing = few((f"{data.text('id', a)} = {data.text('id', b)}" for a, b in first.tolist()), of=count)
            notes.append(f"{count} images are in two classes: {listing}")
    return notes

"""Verify packed sets of images, of faces as well: every row is compared with what was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainkit.data import leakage, verification
from trainkit.data.cache import Progress
from trainkit.data.storage.image_store import Packed
from trainkit.data.verification import Examined, Step
from trainkit.errors import FEW, UserError, few


def verify(path: Path | str, *, against: Sequence[Path | str] = (), on_progress: Progress | None = None) -> list[str]:
    """Read everything in a packed set and compare it with what was written. Returns sentences; empty when all is well.

    Damage: files whose SHA-256 differs, rows whose checksum differs or that cannot be decoded. What is only odd begins
    with `warning: `: classes with one image, one image under two classes, images and groups that are also in one
    of the packed sets `against` (of a training set: its evaluations).
    """
    try:
        data = Packed(path)
    except UserError as error:
        return [str(error)]
    others = [_known(Packed(other)) for other in against]
    return verification.sentences([_examine(data, verification.steps(on_progress, len(data)))], others)


def _examine(data: Packed, step: Step) -> Examined:
    def check(rows: Sequence[int]) -> None:
        if data.size is not None:
            data.fetch(np.asarray(rows))
        else:
            for row in rows:
                data.picture(row)

    known = _known(data)
    damage = verification.damaged(known.where, "images cannot be read", check, range(len(data)), step)
    return replace(known, damage=[*data.changed(), *damage], odd=oddities(data))


def _known(data: Packed) -> Examined:
    """Return what a set is compared with others by."""
    return Examined(where=str(data.path), held=leakage.held_in(data, subjects=frozenset(data.group_names)))


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

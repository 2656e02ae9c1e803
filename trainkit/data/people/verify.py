"""Verify sets of people: every image is read, and what a training would leave out is told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainkit.data import hub, sources, verification
from trainkit.data.cache import Progress
from trainkit.data.formats import image_decode
from trainkit.data.leakage import Held
from trainkit.data.people import layouts
from trainkit.data.people import sources as people_sources
from trainkit.data.people.index import indexed
from trainkit.data.verification import Examined
from trainkit.errors import UserError


def holds_people(path: Path | str) -> bool:
    """Return whether `path` is an index of people, a folder with one, or a published layout."""
    if str(path).startswith("sample:") or hub.is_hub(path):
        return str(path) == people_sources.SAMPLE
    try:
        place, _ = sources.split_of(path)
    except UserError:
        return False
    index = place if place.is_file() else people_sources.index_in(place)
    return layouts.kind_of(place) is not None if index is None else people_sources.is_index(index)


def verify(path: Path | str, *, against: Sequence[Path | str] = (), on_progress: Progress | None = None) -> list[str]:
    """Read the set at `path` and every image of it. Returns sentences; empty when all is well.

    Damage, which a training refuses: errors of the set, images that cannot be decoded. What begins with `warning: `
    is only odd: records that are left out, and people who are also in one of the sets `against`.
    """

    def find(place: Path | str) -> list[Examined]:
        index, damage = indexed(str(place), "val"), list[str]()
        if place == path:
            files = [os.path.join(index.root, id) for id in np.asarray(index.ids, object)[index.picture >= 0].tolist()]
            damage = verification.damaged(index.where, _decode, files, on_progress)
        none, people = np.empty(0, np.uint64), frozenset(index.persons)
        held = Held(prints=none, names=lambda places: [], subjects=people, kind="people")
        return [Examined(where=index.where, held=held, damage=damage, odd=index.left_out)]

    return verification.verified(find, path, against)


def _decode(file: str) -> None:
    image_decode.decode(image_decode.read(Path(file), file), file)

"""Verification of a set of volumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.data import verification
from trainkit.data.verification import Examined
from trainkit.data.volumes import importer, sources, volume_store


def verify(path: Path | str, *, against: Sequence[Path | str] = (), names: importer.Names = None) -> list[str]:
    """Prepare a set of volumes as a training without other settings does. Sentences; empty when all is well.

    Damage is whatever keeps a case from being trained on (truncated, NaN, label map on another grid, labels out of
    range ...), by file. What is only odd begins with `warning: `, as do patients and volumes that are also in one of
    the sets `against`. `names` are those of labels 1, 2, ..., or map names to values of label maps.
    """

    def find(place: Path | str) -> list[Examined]:
        source = sources.open_volumes(place)
        data = importer.pack_volumes_once(source, names=names)
        held = volume_store.held(data.ids(), data.patients(), data.fingerprints())
        return [Examined(where=source.where, held=held, odd=importer.notes(source, data))]

    return verification.verified(find, path, against)

"""Verification of a set of volumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.data import verification
from trainkit.data.cache import Progress
from trainkit.data.verification import Examined, Step
from trainkit.data.volumes import fingerprint, importer, reader, sources, volume_store
from trainkit.data.volumes.preprocess import Preparation
from trainkit.data.volumes.sources import Case, VolumeSource
from trainkit.data.volumes.volume_store import CaseInfo
from trainkit.errors import UserError, listing


def verify(
    path: Path | str,
    *,
    against: Sequence[Path | str] = (),
    names: importer.Names = None,
    on_progress: Progress | None = None,
) -> list[str]:
    """Read everything in a set of volumes. Sentences; empty when all is well.

    Damage is whatever keeps a case from being trained on (truncated, NaN, label map on another grid, labels out of
    range ...), by file. What is only odd begins with `warning: `, as do patients and volumes that are also in one of
    the sets `against`. `names` are those of labels 1, 2, ..., or map names to values of label maps.
    """
    others = [sources.open_volumes(place, labelled=False) for place in against]
    try:
        own = sources.open_volumes(path)
    except UserError as error:
        return [str(error)]
    step = verification.steps(on_progress, sum(len(one.cases) for one in (own, *others)))
    return verification.sentences([_examine(own, names, step)], [_compared(other, step) for other in others])


def _compared(source: VolumeSource, step: Step) -> Examined:
    """Return what another set is compared with: its images are read, and those that are damaged left out."""

    def read(case: Case) -> tuple[int, str]:
        return importer.fingerprint_of(*reader.read_image(case)), case.id

    found = [one for one in verification.read_all(read, source.cases, step) if not isinstance(one, UserError)]
    patients = (case.patient for case in source.cases)
    held = volume_store.held([id for _, id in found], patients, [one for one, _ in found])
    return Examined(where=source.where, held=held)


def _examine(source: VolumeSource, asked: importer.Names, step: Step) -> Examined:
    classes = importer.classes_of(source, asked)
    pairs, bad = importer.read_headers(source)
    infos: list[CaseInfo] = []
    how = Preparation(importer.order(pair.image for pair in pairs) if pairs else "zyx")
    for _ in range(len(source.cases) - len(pairs)):
        step()
    for found in importer.prepare_all(pairs, how, classes):
        step()
        if isinstance(found, UserError):
            bad.append(str(found))
        else:
            infos.append(replace(found.info, fingerprint=found.fingerprint))
    damage, odd = [], [f"not used: {text}" for text in source.left_out]
    if bad:
        said = f"{len(bad)} of {len(source.cases)} cases cannot be used"
        damage.append(f"{source.where}: {said}:{listing(bad, verification.NAMED)}")
    prints = [info.fingerprint for info in infos]
    if infos:
        try:
            names = classes.names or importer.numbered_names(source.where, (info.volumes_mm3 for info in infos))
            # Volumes end at the last label of a case.
            padded = [info.volumes_mm3 + (0.0,) * (len(names) - len(info.volumes_mm3)) for info in infos]
            infos = [replace(info, volumes_mm3=volumes) for info, volumes in zip(infos, padded, strict=True)]
            odd += fingerprint.oddities(names, infos, prints)
        except UserError as error:
            damage.append(str(error))
    held = volume_store.held([info.id for info in infos], (case.patient for case in source.cases), prints)
    return Examined(where=source.where, held=held, damage=damage, odd=odd)

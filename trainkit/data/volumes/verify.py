"""Description and verification of a set of volumes, packed or as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainkit.data import verification
from trainkit.data.cache import Progress
from trainkit.data.verification import Examined, Step
from trainkit.data.volumes import fingerprint, importer, reader, sources, volume_store
from trainkit.data.volumes.preprocess import Preparation, three
from trainkit.data.volumes.sources import Case, VolumeSource
from trainkit.data.volumes.volume_store import CaseInfo, PackedVolumes
from trainkit.errors import UserError, listing
from trainkit.interfaces import IGNORED


def described(path: Path | str) -> list[str]:
    """Write the properties of a set of volumes in lines; of packed ones also shapes, intensities and organs."""
    if not volume_store.is_packed(Path(path)):
        source = sources.open_volumes(path, labelled=False)
        facts = {"path": source.where, "made from": source.kind, "cases": len(source.cases)}
        facts |= {"labelled": sum(case.label is not None for case in source.cases), "left out": len(source.left_out)}
        return verification.fact_lines(facts | _names(source.names or (), source.channels))
    data = PackedVolumes(path)
    facts = {"path": str(data.path), "made from": data.manifest.get("made_from", ""), "cases": len(data)}
    facts |= {"patients": len(set(data.patients())), "bytes": data.bytes, "digest": data.digest}
    table = fingerprint.describe(data.names, data.infos(), data.preparation, data.channel_names)
    return verification.fact_lines(facts | _names(data.names, data.channel_names)) + table


def _names(labels: Sequence[str], channels: Sequence[str]) -> dict[str, str]:
    named = {"labels": ", ".join(f"{number} {name}" for number, name in enumerate(labels))}
    return named | ({"channels": ", ".join(channels)} if channels else {})


def verify(
    path: Path | str,
    *,
    against: Sequence[Path | str] = (),
    names: importer.Names = None,
    patient: str | None = None,
    spacing: Sequence[float] | None = None,
    on_progress: Progress | None = None,
) -> list[str]:
    """Read everything in a set of volumes, packed or as files. Sentences; empty when all is well.

    Damage in the packed form: files whose SHA-256 differs, cases that are not what was written. In files: whatever
    keeps a case from being imported (truncated, NaN, label map on another grid, labels out of range ...), by file. What
    is only odd begins with `warning: `, as do patients and volumes that are also in one of the sets `against`, packed
    or not. `names`, `patient` and `spacing` as at import, for files.
    """
    others = [_opened(place, patient, labelled=False) for place in against]
    try:
        own = _opened(path, patient, labelled=True)
    except UserError as error:
        return [str(error)]
    sizes = [len(other.cases) for other in others if isinstance(other, VolumeSource)]
    sizes.append(len(own) if isinstance(own, PackedVolumes) else len(own.cases))
    step = verification.steps(on_progress, sum(sizes))
    examined = _packed(own, step) if isinstance(own, PackedVolumes) else _files(own, names, spacing, step)
    return verification.sentences([examined], [_compared(other, step) for other in others])


def _opened(path: Path | str, patient: str | None, labelled: bool) -> PackedVolumes | VolumeSource:
    if volume_store.is_packed(Path(path)):
        return PackedVolumes(path)
    return sources.open_volumes(path, patient=patient, labelled=labelled)


def _compared(data: PackedVolumes | VolumeSource, step: Step) -> Examined:
    """Return what another set is compared with: of files the images are read, and those that are damaged left out."""
    if isinstance(data, PackedVolumes):
        return _known(data)

    def read(case: Case) -> tuple[int, str]:
        return importer.fingerprint_of(*reader.read_image(case)), case.id

    found = [one for one in verification.read_all(read, data.cases, step) if not isinstance(one, UserError)]
    patients = (case.patient for case in data.cases)
    held = volume_store.held([id for _, id in found], patients, [one for one, _ in found])
    return Examined(where=data.where, held=held)


def _known(data: PackedVolumes) -> Examined:
    held = volume_store.held(data.ids(), data.patients(), data.fingerprints())
    return Examined(where=str(data.path), held=held)


def _packed(data: PackedVolumes, step: Step) -> Examined:
    def check(cases: Sequence[int]) -> None:
        for case in cases:
            data.check(case)
            label, truth = data.label(case), data.truth(case)
            tops = [int(labels[labels != IGNORED].max(initial=0)) for labels in (label, truth)]
            if max(tops) >= len(data.names) or not np.isfinite(data.image(case)).all():
                raise UserError(data.where(case), "labels without a name, or NaN in the prepared image")
            for number in range(1, len(data.names)):
                places = data.foreground(case, number)
                if len(places) and (label.ravel().take(places, mode="clip") != number).any():
                    raise UserError(data.where(case), f"positions of label {number} that have another label")

    known = _known(data)
    damage = verification.damaged(known.where, "cases cannot be used", check, range(len(data)), step)
    odd = fingerprint.oddities(data.names, data.infos(), data.fingerprints())
    return replace(known, damage=[*data.changed(), *damage], odd=odd)


def _files(source: VolumeSource, asked: importer.Names, spacing: Sequence[float] | None, step: Step) -> Examined:
    classes = importer.classes_of(source, asked)
    pairs, bad = importer.read_headers(source)
    infos: list[CaseInfo] = []
    how = Preparation(
        importer.order(pair.image for pair in pairs) if pairs else "zyx", None if spacing is None else three(spacing)
    )
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

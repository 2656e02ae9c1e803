"""Description and verification of a set of volumes, packed or as files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainkit.data import verification
from trainkit.data.cache import Progress
from trainkit.data.formats import volume_grid
from trainkit.data.leakage import Held
from trainkit.data.verification import Examined, Step
from trainkit.data.volumes import fingerprint, importer, layouts, reader, sources, volume_store
from trainkit.data.volumes.fingerprint import Record, by
from trainkit.data.volumes.preprocess import PLANES, Preparation, three
from trainkit.data.volumes.sources import Case, VolumeSource
from trainkit.data.volumes.volume_store import PackedVolumes
from trainkit.errors import UserError, listing
from trainkit.files import Json
from trainkit.interfaces import IGNORED


def info(path: Path | str, *, patient: str | None = None) -> dict[str, Json]:
    """Describe a set of volumes, packed or as files (from their headers alone), by words for its properties."""
    path = Path(path)
    if volume_store.is_packed(path):
        data = PackedVolumes(path)
        asked = data.preparation.spacing
        return {
            "path": str(data.path),
            "made_from": data.manifest.get("made_from", ""),
            "cases": len(data),
            "patients": len(set(data.patients())),
            "labels": ", ".join(f"{number} {name}" for number, name in enumerate(data.names)),
            **({"channels": ", ".join(data.channel_names)} if data.channel_names else {}),
            "axes": f"{data.axes} ({PLANES[data.axes]} slices)",
            "spacing": f"{by(data.spacing)} mm" + ("" if asked is None else ", resampled"),
            "bytes": data.bytes,
            "digest": data.digest,
        }
    source = sources.open_volumes(path, patient=patient, labelled=False)
    pairs, bad = importer.read_headers(source)
    facts: dict[str, Json] = {
        "path": source.where,
        "layout": source.kind,
        "cases": len(source.cases),
        "labelled": sum(case.label is not None for case in source.cases),
        "patients": len({case.patient for case in source.cases}),
    }
    if source.names is not None:
        facts["labels"] = ", ".join(f"{number} {name}" for number, name in enumerate(source.names))
    if source.classes.ignored is not None:
        facts["ignored"] = f"label {source.classes.ignored}"
    if pairs and (channels := importer.channel_names(source, pairs)):
        facts["channels"] = ", ".join(channels)
    if pairs:
        axes = importer.order(pair.image for pair in pairs)
        grids = [volume_grid.orientation(pair.image.affine, axes) for pair in pairs]
        shapes = [[pair.image.shape[axis] for axis in grid.order] for pair, grid in zip(pairs, grids, strict=True)]
        spacings = [grid.spacing(pair.image) for pair, grid in zip(pairs, grids, strict=True)]
        facts["axes"] = f"{axes} ({PLANES[axes]} slices)"
        facts["shape"] = _spread_of(shapes, "d", "voxels")
        facts["spacing"] = _spread_of(spacings, ".4g", "mm")
        facts["stored as"] = fingerprint.commonest(fingerprint.codes(pair.image) for pair in pairs)
        facts["types"] = fingerprint.commonest(pair.image.dtype.name for pair in pairs)
    facts["unusable"] = len(bad)
    facts["left out"] = len(source.left_out)
    return facts


def described(path: Path | str) -> list[str]:
    """Write the properties of a set of volumes in lines; of packed ones also shapes, intensities and organs."""
    facts = verification.fact_lines(info(path))
    if not volume_store.is_packed(Path(path)):
        return facts
    data = PackedVolumes(path)
    return facts + fingerprint.describe(data.names, importer.records_of(data), data.preparation, data.channel_names)


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
    or not. `names`, `patient` and `spacing` as at import, for files. Of a folder of splits (TOM500's) every one is
    read, and compared with the others.
    """
    others = [_opened(place, patient, labelled=False) for place in against]
    own: list[PackedVolumes | VolumeSource] = []
    problems: list[str] = []
    for place in _splits(Path(path), patient):
        try:
            own.append(_opened(place, patient, labelled=True))
        except UserError as error:
            problems.append(str(error))
    counts = [len(one) if isinstance(one, PackedVolumes) else len(one.cases) + len(one.incomplete) for one in own]
    counts += [len(other.cases) for other in others if isinstance(other, VolumeSource)]
    step = verification.steps(on_progress, sum(counts))
    examined = [
        _examine_packed(one, step) if isinstance(one, PackedVolumes) else _examine_files(one, names, spacing, step)
        for one in own
    ]
    return problems + verification.sentences(examined, [_compared(other, step) for other in others])


def _splits(path: Path, patient: str | None) -> list[str]:
    """Return the sets at a path: itself, or where it is none, but a folder of several, these."""
    splits = layouts.splits_below(path) if path.is_dir() and not volume_store.is_packed(path) else []
    if splits:
        with contextlib.suppress(UserError):
            sources.open_volumes(path, patient=patient)
            splits = []
    return [f"{path}#{split}" for split in splits] or [str(path)]


def _opened(path: Path | str, patient: str | None, labelled: bool) -> PackedVolumes | VolumeSource:
    if volume_store.is_packed(Path(path)):
        return PackedVolumes(path)
    return sources.open_volumes(path, patient=patient, labelled=labelled)


def _compared(data: PackedVolumes | VolumeSource, step: Step) -> Examined:
    """Return what another set is compared with: of files the images are read, and those that are damaged left out."""
    if isinstance(data, PackedVolumes):
        return _known(str(data.path), data.patients(), data.fingerprints(), data.ids())

    def read(case: Case) -> tuple[int, str]:
        return fingerprint.of(*reader.read_image(case)), case.id

    found = [one for one in verification.read_all(read, data.cases, step) if not isinstance(one, UserError)]
    patients = (case.patient for case in data.cases)
    return _known(data.where, patients, [one for one, _ in found], [id for _, id in found])


def _known(where: str, patients: Iterable[str], prints: Sequence[int] | np.ndarray, ids: Sequence[str]) -> Examined:
    def names(places: Iterable[int]) -> list[str]:
        return [ids[place] for place in places]

    held = Held(
        noun="volumes", prints=np.asarray(prints, np.uint64), names=names, subjects=frozenset(patients), kind="patients"
    )
    return Examined(where=where, held=held)


def _examine_packed(data: PackedVolumes, step: Step) -> Examined:
    def check(cases: Sequence[int]) -> None:
        for case in cases:
            data.check(case)
            if found := "; ".join(_inside(data, case)):
                raise UserError(data.where(case), found)

    known = _compared(data, step)
    damage = verification.damaged(known.where, "cases cannot be used", check, range(len(data)), step)
    odd = fingerprint.oddities(data.names, importer.records_of(data))
    return replace(known, damage=[*data.changed(), *damage], odd=odd)


def _inside(data: PackedVolumes, i: int) -> Iterator[str]:
    """Yield sentences about what does not fit together inside a case that is as it was written."""
    label = data.label(i)
    if not np.isfinite(data.image(i)).all():
        yield "NaN or infinity in the prepared image"
    top = max(int(labels[labels != IGNORED].max(initial=0)) for labels in (label, data.truth(i)))
    if top >= len(data.names):
        yield f"labels up to {top}, named are {len(data.names) - 1}"
    for number in range(1, len(data.names)):
        places = data.foreground(i, number)
        if len(places) and (places.min() < 0 or places.max() >= label.size or (label.ravel()[places] != number).any()):
            yield f"positions of label {number} that have another label"


def _examine_files(
    source: VolumeSource, asked: importer.Names, spacing: Sequence[float] | None, step: Step
) -> Examined:
    classes = importer.classes_of(source, asked)
    pairs, bad = importer.read_headers(source)
    for _ in bad:
        step()
    records: list[Record] = []
    if pairs:
        how = Preparation(importer.order(pair.image for pair in pairs), None if spacing is None else three(spacing))
        for found in importer.prepare_all(pairs, how, classes):
            step()
            if isinstance(found, UserError):
                bad.append(str(found))
            else:
                records.append(found.record)
    said = f"{len(bad)} of {len(source.cases) + len(source.incomplete)} cases cannot be used"
    damage = [f"{source.where}: {said}:{listing(bad, verification.NAMED)}"] if bad else []
    odd = [*(f"not used: {text}" for text in source.left_out), *importer.notes_of(source)]
    if records:
        try:
            names = classes.names or importer.numbered_names(source, {r.info.id: r.info.volumes_mm3 for r in records})
            odd += fingerprint.oddities(names, [_padded(record, len(names)) for record in records])
        except UserError as error:
            damage.append(str(error))
    prints, ids = [record.fingerprint for record in records], [record.info.id for record in records]
    known = _known(source.where, (case.patient for case in source.cases), prints, ids)
    return replace(known, damage=damage, odd=odd)


def _padded(record: Record, classes: int) -> Record:
    volumes = record.info.volumes_mm3
    return Record(replace(record.info, volumes_mm3=volumes + (0.0,) * (classes - len(volumes))), record.fingerprint)


def _spread_of(values: Sequence[Sequence[float]], form: str, unit: str) -> str:
    low, high, middle = (find(values, axis=0).tolist() for find in (np.min, np.max, np.median))
    if low == high:
        return f"{by(low, form)} {unit}"
    middle = [int(length) if form == "d" else length for length in middle]
    return f"{by(low, form)} to {by(high, form)} {unit}, {by(middle, form)} in the median"

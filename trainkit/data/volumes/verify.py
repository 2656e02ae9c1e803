"""Description and verification of a set of volumes, packed or as files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainkit.data.cache import Progress
from trainkit.data.formats import volume_grid
from trainkit.data.storage import volume_store
from trainkit.data.storage.volume_store import PackedVolumes
from trainkit.data.threads import attempt, each, threads
from trainkit.data.volumes import fingerprint, importer, layouts, reader, sources
from trainkit.data.volumes.fingerprint import Record, by
from trainkit.data.volumes.preprocess import PLANES, Preparation, three
from trainkit.data.volumes.sources import Case, VolumeSource
from trainkit.errors import UserError, few, number_of
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


def lines(path: Path | str) -> list[str]:
    """Write the properties of a set of volumes in lines; of packed ones also shapes, intensities and organs."""
    facts = [f"{key:14} {value}" for key, value in info(path).items()]
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
    path = Path(path)
    splits = layouts.splits_below(path) if path.is_dir() and not _is_one(path, patient) else []
    if not splits:
        return _verify(path, against, names, patient, spacing, on_progress)
    found: list[str] = []
    places, before, last = [f"{path}#{split}" for split in splits], 0, 0

    def shifted(done: int, total: int) -> None:
        nonlocal last
        last = total
        if on_progress:
            on_progress(before + done, before + total)

    for number, place in enumerate(places):
        for line in _verify(place, [*places[number + 1 :], *against], names, patient, spacing, shifted):
            warns, note = line.startswith("warning: "), line.removeprefix("warning: ")
            found.append(f"warning: {splits[number]}: {note}" if warns else line)
        before += last
    return found


def _is_one(path: Path, patient: str | None) -> bool:
    """Return whether a folder is a set of volumes itself, not one of several splits."""
    if volume_store.is_packed(path):
        return True
    try:
        sources.open_volumes(path, patient=patient)
    except UserError:
        return False
    return True


def _verify(
    path: Path | str,
    against: Sequence[Path | str],
    names: importer.Names,
    patient: str | None,
    spacing: Sequence[float] | None,
    on_progress: Progress | None,
) -> list[str]:
    others = [_opened(other, patient, labelled=False) for other in against]
    try:
        own = _opened(path, patient, labelled=True)
    except UserError as error:
        return [str(error)]
    done, total = 0, len(own) if isinstance(own, PackedVolumes) else len(own.cases)
    total += sum(len(other.cases) for other in others if isinstance(other, VolumeSource))

    def step() -> None:
        nonlocal done
        done += 1
        if on_progress:
            on_progress(done, total)

    if isinstance(own, PackedVolumes):
        problems, named, records, odd = _verify_packed(own, step), own.names, importer.records_of(own), []
    else:
        problems, named, records = _verify_files(own, names, spacing, step)
        odd = [*(f"not used: {text}" for text in own.left_out), *importer.notes_of(own)]
    odd += fingerprint.oddities(named, records) if records else []
    for other in others:
        odd += _shared(records, other, step)
    return problems + [f"warning: {note}" for note in odd]


def _opened(path: Path | str, patient: str | None, labelled: bool) -> PackedVolumes | VolumeSource:
    if volume_store.is_packed(Path(path)):
        return PackedVolumes(path)
    return sources.open_volumes(path, patient=patient, labelled=labelled)


def _verify_packed(data: PackedVolumes, step: Callable[[], None]) -> list[str]:
    problems = data.changed()

    def look(i: int) -> list[str]:
        data.check(i)
        return [f"{data.where(i)}: {text}" for text in _inside(data, i)]

    for found in each(attempt(look), range(len(data)), threads()):
        problems += [str(found)] if isinstance(found, UserError) else found
        step()
    return problems


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


def _verify_files(
    source: VolumeSource, asked: importer.Names, spacing: Sequence[float] | None, step: Callable[[], None]
) -> tuple[list[str], tuple[str, ...], list[Record]]:
    classes = importer.classes_of(source, asked)
    names = classes.names
    pairs, problems = importer.read_headers(source)
    for _ in problems:
        step()
    records: list[Record] = []
    if pairs:
        how = Preparation(importer.order(pair.image for pair in pairs), None if spacing is None else three(spacing))
        for found in importer.prepare_all(pairs, how, classes):
            if isinstance(found, UserError):
                problems.append(str(found))
            else:
                records.append(found.record)
            step()
    if names is None and not records:
        return problems, (), []
    if names is None:
        try:
            names = importer.numbered_names(source, {r.info.id: r.info.volumes_mm3 for r in records})
        except UserError as error:
            return [*problems, str(error)], (), []
    return problems, names, [_padded(record, len(names)) for record in records]


def _shared(records: Sequence[Record], other: PackedVolumes | VolumeSource, step: Callable[[], None]) -> list[str]:
    """Sentences about patients and volumes that are in both."""
    if isinstance(other, PackedVolumes):
        where, patients = str(other.path), set(other.patients())
        prints = dict(zip(other.fingerprints().tolist(), other.ids(), strict=True))
    else:
        where, patients, prints = other.where, {case.patient for case in other.cases}, {}

        def look(case: Case) -> int:
            return fingerprint.of(*reader.read_image(case))

        for case, value in zip(other.cases, each(attempt(look), other.cases, threads()), strict=True):
            if not isinstance(value, UserError):  # a damaged file of the other set is that set's matter
                prints[value] = case.id
            step()
    notes = []
    if both := sorted({record.info.patient for record in records} & patients):
        notes.append(f"{number_of(len(both), 'patients')} also in {where}: {few(both)}")
    same = [f"{r.info.id} = {prints[r.fingerprint]}" for r in records if r.fingerprint in prints]
    if same:
        notes.append(f"{number_of(len(same), 'volumes')} also in {where}: {few(same)}")
    return notes


def _padded(record: Record, classes: int) -> Record:
    volumes = record.info.volumes_mm3
    return Record(replace(record.info, volumes_mm3=volumes + (0.0,) * (classes - len(volumes))), record.fingerprint)


def _spread_of(values: Sequence[Sequence[float]], form: str, unit: str) -> str:
    low, high, middle = (find(values, axis=0).tolist() for find in (np.min, np.max, np.median))
    if low == high:
        return f"{by(low, form)} {unit}"
    middle = [int(length) if form == "d" else length for length in middle]
    return f"{by(low, form)} to {by(high, form)} {unit}, {by(middle, form)} in the median"

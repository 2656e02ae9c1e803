"""From NIfTI files to packed volumes: read, check, prepare, write, report; and whether files or folder are well."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from trainkit.data.formats import nifti, volume_grid
from trainkit.data.formats.nifti_header import Header
from trainkit.data.sources import split_of
from trainkit.data.storage import cache, image_store, volume_store
from trainkit.data.storage.import_images import Progress, threads
from trainkit.data.storage.volume_store import CaseInfo, PackedVolumes, Writer
from trainkit.data.volumes import preprocess, sources
from trainkit.data.volumes.fingerprint import Record, by, codes, counted, describe, many, oddities, seen_organs, tilt
from trainkit.data.volumes.preprocess import PLANES, Preparation
from trainkit.data.volumes.sources import Case, VolumeSource
from trainkit.errors import UserError, few

Damaged = Literal["fail", "skip"]

_T, _R = TypeVar("_T"), TypeVar("_R")

_log = logging.getLogger(__name__)

_NAMED = 20
_MEMORY = 2 << 30
"""Bytes that the volumes in flight may take together; one volume is always read."""
_LOOKED_AT = 5000
_PER_VOXEL = 24
"""Bytes that preparing takes at its peak."""


@dataclass(frozen=True)
class VolumeReport:
    """What an import made of its source."""

    out: Path
    kind: str
    cases: int
    classes: int
    """Labels, the background included."""
    axes: str
    spacing: tuple[float, float, float]
    """mm from voxel to voxel along the stored axes, in the median."""
    bytes: int
    digest: str
    notes: list[str] = field(default_factory=list)
    """Sentences about what is odd but usable, and about what was left out."""
    table: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report in lines: what was made, the table of shapes, intensities and organs, and what is odd."""
        held = f"{many(self.cases, 'case')}, {many(self.classes - 1, 'organ')}, {_megabytes(self.bytes)}"
        made = f"{self.out}: {held}, from {self.kind}"
        odd = ["to look at:", *(f"  {note}" for note in self.notes)] if self.notes else []
        return [made, "", *self.table, *([""] if odd else []), *odd]


def import_volumes(
    source: Path | str | VolumeSource,
    out: Path | str,
    *,
    names: Sequence[str] | None = None,
    spacing: Sequence[float] | None = None,
    patient: str | None = None,
    clinical: Path | str | None = None,
    axes: str | None = None,
    damaged: Damaged = "fail",
    damaged_most: float = 1.0,
    on_progress: Progress | None = None,
) -> VolumeReport:
    """Prepare volumes and their label maps once, into the packed form at `out`, which must not exist yet.

    `names` are those of labels 1, 2, ... (a first `background` is understood), None what the source says, or where it
    says nothing `label 1`, `label 2`. `spacing` in mm, in stored order, is what volumes are resampled to; None leaves
    them as they are. `patient` and `clinical` as `volume_sources.open_volumes` takes them. `axes` is the order in which
    axes are stored, None what fits the set: one that is scored must be stored as the one that was trained on.
    `damaged: skip` leaves unusable cases out and names them in the report, up to the share `damaged_most` of all.

    Raises UserError naming the unusable cases by file, up to 20 of them; those whose headers say so before any voxel is
    read. Memory is that of a few volumes.
    """
    out = Path(out)
    if not isinstance(source, VolumeSource):
        if volume_store.is_packed(Path(source)) or image_store.is_packed(Path(source)):
            raise UserError(str(source), "is imported already", "NIfTI files", "use it as it is")
        source = sources.open_volumes(source, patient=patient, clinical=clinical)
    known = _names(source, names)
    if unlabelled := [case.id for case in source.cases if case.label is None]:
        found = f"{many(len(unlabelled), 'image')} without a label map: {few(unlabelled)}"
        raise UserError(source.where, found, "a label map for each", "predict for them with trainkit predict")
    bad: list[str] = []
    pairs = []
    for found in _ordered(_headers, source.cases, threads()):
        if isinstance(found, UserError):
            bad.append(str(found))
        else:
            pairs.append(found)
    most = damaged_most * len(source.cases) if damaged == "skip" else 0
    if bad and (len(bad) > most or not pairs):
        _refuse(source, bad)
    how = Preparation(axes or order(pair.image for pair in pairs), None if spacing is None else tuple(spacing))
    classes = None if known is None else len(known)
    records: list[Record] = []
    seen = len(bad)
    with Writer(out, how=how) as writer:
        _check_space(out, pairs, how)

        def prepared(pair: _Pair) -> _Made | UserError:
            try:
                return _prepared(pair, how, classes)
            except UserError as error:
                return error

        for made in _ordered(prepared, pairs, _workers(pairs, how)):
            seen += 1
            if isinstance(made, UserError):
                bad.append(str(made))
                if damaged == "fail" and len(bad) == _NAMED:
                    break
            elif damaged == "skip" or not bad:
                writer.add(made.record.info, made.image, made.label, made.truth, made.record.fingerprint)
                records.append(made.record)
            if on_progress:
                on_progress(seen, len(source.cases))
        if bad and (len(bad) > most or not records):
            _refuse(source, bad)
        data = writer.finish(
            names=known or _numbered(source, records), made_from=f"{source.kind} {Path(source.where).name}"
        )
    notes = _capped("left out", [*bad, *source.left_out])
    records = _records(data)
    notes += oddities(data.names, records)
    table = describe(data.names, records, data.preparation)
    return VolumeReport(
        out, source.kind, len(data), len(data.names), data.axes, data.spacing, data.bytes, data.digest, notes, table
    )


def pack_volumes_once(
    source: VolumeSource,
    *,
    names: Sequence[str] | None = None,
    spacing: Sequence[float] | None = None,
    axes: str | None = None,
) -> PackedVolumes:
    """The packed form of a source, made when it is not there yet. Processes that start together make it once.

    It lies at `packing.place`, keyed by its files and by all that it was made with. Raises as `import_volumes`.
    """
    cases = [(case.id, case.patient, str(case.image), str(case.label), dict(case.clinical)) for case in source.cases]
    asked = None if spacing is None else [float(mm) for mm in spacing]
    named = None if (known := _names(source, names)) is None else list(known)
    versions = volume_store.FORMAT, volume_store.VERSION, preprocess.VERSION, volume_store.FOREGROUND_CAP
    made = [*versions, source.kind, source.where, named, asked, axes, cases]
    folder = cache.place(f"volumes-{cache.key(made, source.files)}")

    def make() -> None:
        _log.info("preparing %s into %s, once", source.where, folder)
        report = import_volumes(source, folder, names=names, spacing=spacing, axes=axes)
        strays = _capped("left out", source.left_out)
        for note in strays:
            _log.warning("%s: %s", source.where, note)
        if odd := len(report.notes) - len(strays):
            said = f"{many(odd, 'thing')} to look at"
            _log.warning("%s: %s: `trainkit data verify %s`", source.where, said, source.where)

    cache.make_once(folder, volume_store.is_packed, make)
    return PackedVolumes(folder)


def order(headers: Iterable[Header]) -> str:
    """The order in which the axes of a set are stored, from its headers: see `volume_grid.slice_axis_order`."""
    return volume_grid.slice_axis_order(np.asarray([volume_grid.ras_spacing(header) for header in headers]))


def holds_volumes(path: Path | str) -> bool:
    """Whether `path` (or `path#split`) is packed volumes, or a folder of NIfTI files in some layout."""
    return a_volume(path) is not None


def a_volume(path: Path | str) -> Path | None:
    """The packed volumes that `path` (or `path#split`) is, or the first NIfTI file in it; None where there is none."""
    folder, split = split_of(path)
    if split is None and volume_store.is_packed(folder):
        return folder
    if not folder.is_dir() or image_store.is_packed(folder):
        return folder if nifti.is_nifti(folder) and folder.is_file() else None
    seen = 0
    for place, folders, files in os.walk(folder):
        if found := sorted(file for file in files if nifti.is_nifti(file)):
            return Path(place, found[0])
        # A folder of something else may hold a million files, and the volumes of a set are never that far down.
        seen += len(files) + len(folders)
        if seen > _LOOKED_AT:
            return None
        if len(Path(place).relative_to(folder).parts) >= 3:
            folders.clear()
    return None


def info(path: Path | str, *, patient: str | None = None) -> dict[str, Any]:
    """What a set of volumes is, packed or as files (from their headers alone)."""
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
            "axes": f"{data.axes} ({PLANES[data.axes]} slices)",
            "spacing": f"{by(data.spacing)} mm" + ("" if asked is None else ", resampled"),
            "bytes": data.bytes,
            "digest": data.digest,
        }
    source = sources.open_volumes(path, patient=patient, labelled=False)
    found = list(_ordered(_headers, source.cases, threads()))
    pairs = [pair for pair in found if not isinstance(pair, UserError)]
    facts: dict[str, Any] = {
        "path": source.where,
        "layout": source.kind,
        "cases": len(source.cases),
        "labelled": sum(case.label is not None for case in source.cases),
        "patients": len({case.patient for case in source.cases}),
    }
    if source.names is not None:
        facts["labels"] = ", ".join(f"{number} {name}" for number, name in enumerate(source.names))
    if pairs:
        axes = order(pair.image for pair in pairs)
        grids = [volume_grid.orientation(pair.image.affine, axes) for pair in pairs]
        shapes = [[pair.image.shape[axis] for axis in grid.order] for pair, grid in zip(pairs, grids, strict=True)]
        spacings = [grid.spacing(pair.image) for pair, grid in zip(pairs, grids, strict=True)]
        facts["axes"] = f"{axes} ({PLANES[axes]} slices)"
        facts["shape"] = _spread_of(shapes, "d", "voxels")
        facts["spacing"] = _spread_of(spacings, ".4g", "mm")
        facts["stored as"] = _counted(codes(pair.image) for pair in pairs)
        facts["types"] = _counted(pair.image.dtype.name for pair in pairs)
    facts["unusable"] = sum(isinstance(pair, UserError) for pair in found)
    facts["left out"] = len(source.left_out)
    return facts


def table(path: Path | str) -> list[str]:
    """The table of shapes, intensities and organs of packed volumes, in lines; empty for files, which it would read."""
    if not volume_store.is_packed(Path(path)):
        return []
    data = PackedVolumes(path)
    return describe(data.names, _records(data), data.preparation)


def verify(
    path: Path | str,
    *,
    against: Sequence[Path | str] = (),
    names: Sequence[str] | None = None,
    patient: str | None = None,
    on_progress: Progress | None = None,
) -> list[str]:
    """Read everything in a set of volumes, packed or as files. Sentences; empty when all is well.

    Damage in the packed form: files whose SHA-256 differs, cases that are not what was written. In files: whatever
    keeps a case from being imported (truncated, NaN, label map on another grid, labels out of range ...), by file. What
    is only odd begins with `warning: `, as do patients and volumes that are also in one of the sets `against`, packed
    or not. `names` and `patient` as at import, for files. Of a folder of splits (TOM500's) every one is read, and
    compared with the others.
    """
    path = Path(path)
    splits = sources.splits_below(path) if path.is_dir() and not _is_one(path, patient) else []
    if not splits:
        return _verify(path, against, names, patient, on_progress)
    found: list[str] = []
    places, before, last = [f"{path}#{split}" for split in splits], 0, 0

    def shifted(done: int, total: int) -> None:
        nonlocal last
        last = total
        if on_progress:
            on_progress(before + done, before + total)

    for number, place in enumerate(places):
        for line in _verify(place, [*places[number + 1 :], *against], names, patient, shifted):
            warns, note = line.startswith("warning: "), line.removeprefix("warning: ")
            found.append(f"warning: {splits[number]}: {note}" if warns else line)
        before += last
    return found


def _is_one(path: Path, patient: str | None) -> bool:
    """Whether a folder is a set of volumes itself, not one of several splits."""
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
    names: Sequence[str] | None,
    patient: str | None,
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
        problems, named, records, odd = *_verify_packed(own, step), []
    else:
        problems, named, records = _verify_files(own, _names(own, names), step)
        odd = [f"not used: {text}" for text in own.left_out]
    odd += oddities(named, records) if records else []
    for other in others:
        odd += _shared(records, other, step)
    return problems + [f"warning: {note}" for note in odd]


def _opened(path: Path | str, patient: str | None, labelled: bool) -> PackedVolumes | VolumeSource:
    if volume_store.is_packed(Path(path)):
        return PackedVolumes(path)
    return sources.open_volumes(path, patient=patient, labelled=labelled)


@dataclass(frozen=True)
class _Pair:
    """A case whose headers are well."""

    case: Case
    image: Header
    label: Header | None


@dataclass(frozen=True)
class _Made:
    """A case, prepared."""

    record: Record
    image: np.ndarray
    label: np.ndarray
    truth: np.ndarray | None


def _headers(case: Case) -> _Pair | UserError:
    try:
        image = nifti.read_header(case.image)
        label = None if case.label is None else nifti.read_header(case.label)
        if label is not None and (differs := volume_grid.same_grid(label, image)) is not None:
            raise UserError(str(case.label), differs, f"the grid of {case.image}")
    except UserError as error:
        return error
    return _Pair(case, image, label)


def _prepared(pair: _Pair, how: Preparation, classes: int | None) -> _Made:
    """Read and prepare one case. Raises UserError naming the file."""
    case = pair.case
    labels, _ = nifti.read_labels(case.label, classes)
    array, header = nifti.read_image(case.image)
    if volume_grid.same_grid(pair.image, header) is not None:
        raise UserError(str(case.image), "changed while it was read")
    ready = preprocess.prepare(array, header, how)
    print_ = volume_store.fingerprint(volume_grid.orientation(header.affine, "zyx").apply(array))
    highest = ready.facts["highest"]
    at_top = float(np.count_nonzero(array == highest)) / array.size
    del array
    truth = np.ascontiguousarray(ready.orientation.apply(labels))
    label = truth if how.spacing is None else preprocess.prepare_labels(labels, header, how)
    volume = math.prod(ready.original_spacing)
    counts = np.trim_zeros(counted(truth), "b")
    facts = {
        **ready.facts,
        "at_highest": at_top,
        "type": header.dtype.name,
        "stored": codes(header),
        "tilt": tilt(header),
        "notes": [*header.notes, *(f"label map: {note}" for note in pair.label.notes if note not in header.notes)],
        "organs": seen_organs(truth, label, ready.image),
    }
    info = CaseInfo(
        id=case.id,
        patient=case.patient,
        shape=ready.shape,
        spacing=ready.spacing,
        original_shape=ready.original_shape,
        original_spacing=ready.original_spacing,
        floor=ready.floor,
        volumes_mm3=tuple(float(count) * volume for count in counts),
        clinical=dict(case.clinical),
        facts=facts,
    )
    return _Made(Record(info, print_), ready.image, label, None if how.spacing is None else truth)


def _verify_packed(data: PackedVolumes, step: Callable[[], None]) -> tuple[list[str], tuple[str, ...], list[Record]]:
    problems = data.changed()

    def look(i: int) -> list[str]:
        try:
            data.check(i)
        except UserError as error:
            return [str(error)]
        return [f"{data.where(i)}: {text}" for text in _inside(data, i)]

    for found in _ordered(look, range(len(data)), threads()):
        problems += found
        step()
    return problems, data.names, _records(data)


def _inside(data: PackedVolumes, i: int) -> Iterator[str]:
    """What does not fit together inside a case that is as it was written."""
    label = data.label(i)
    if not np.isfinite(data.image(i)).all():
        yield "NaN or infinity in the prepared image"
    if max(int(label.max()), int(data.truth(i).max())) >= len(data.names):
        yield f"labels up to {max(label.max(), data.truth(i).max())}, named are {len(data.names) - 1}"
    for number in range(1, len(data.names)):
        places = data.foreground(i, number)
        if len(places) and (places.min() < 0 or places.max() >= label.size or (label.ravel()[places] != number).any()):
            yield f"places of label {number} that are not of it"


def _verify_files(
    source: VolumeSource, names: tuple[str, ...] | None, step: Callable[[], None]
) -> tuple[list[str], tuple[str, ...], list[Record]]:
    problems, pairs, records = [], [], []
    for found in _ordered(_headers, source.cases, threads()):
        if isinstance(found, UserError):
            problems.append(str(found))
            step()
        else:
            pairs.append(found)

    def look(pair: _Pair) -> Record | UserError:
        try:
            return _prepared(pair, how, None if names is None else len(names)).record
        except UserError as error:
            return error

    if pairs:
        how = Preparation(order(pair.image for pair in pairs))
        for found in _ordered(look, pairs, _workers(pairs, how)):
            if isinstance(found, UserError):
                problems.append(str(found))
            else:
                records.append(found)
            step()
    if names is None:
        try:
            names = _numbered(source, records)
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

        def look(case: Case) -> int | None:
            try:
                array, header = nifti.read_image(case.image)
            except UserError:
                return None  # a damaged file of the other set is that set's matter
            return volume_store.fingerprint(volume_grid.orientation(header.affine, "zyx").apply(array))

        for case, value in zip(other.cases, _ordered(look, other.cases, threads()), strict=True):
            prints[value] = case.id
            step()
    notes = []
    if both := sorted({record.info.patient for record in records} & patients):
        notes.append(f"{many(len(both), 'patient')} also in {where}: {few(both)}")
    same = [f"{r.info.id} = {prints[r.fingerprint]}" for r in records if r.fingerprint in prints]
    if same:
        notes.append(f"{many(len(same), 'volume')} also in {where}: {few(same)}")
    return notes


def _records(data: PackedVolumes) -> list[Record]:
    prints = data.fingerprints().tolist()
    return [Record(data.case(i), prints[i]) for i in range(len(data))]


def _padded(record: Record, classes: int) -> Record:
    volumes = record.info.volumes_mm3
    return Record(replace(record.info, volumes_mm3=volumes + (0.0,) * (classes - len(volumes))), record.fingerprint)


def _names(source: VolumeSource, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return source.names
    known = sources.named_labels(names, "names")
    if len(known) > volume_store.LABEL_LIMIT:
        raise UserError("names", f"{len(known) - 1} labels", f"at most {volume_store.LABEL_LIMIT - 1}")
    return known


def _numbered(source: VolumeSource, records: Sequence[Record]) -> tuple[str, ...]:
    """Names for labels that nobody named. Raises UserError where numbers look like something else than classes."""
    present = sorted({label for r in records for label, volume in enumerate(r.info.volumes_mm3) if label and volume})
    if not present:
        raise UserError(source.where, "no voxel is labelled in any case", "label maps with labels above 0")
    if present[-1] > 2 * len(present):
        having = [record.info.id for record in records if len(record.info.volumes_mm3) > present[-1]]
        found = f"labels {few(map(str, present))}, which nothing names; {present[-1]} is in {few(having)}"
        raise UserError(source.where, found, "labels 1, 2, ... or names for all up to the largest", "number them anew")
    return (sources.BACKGROUND, *(f"label {number}" for number in range(1, present[-1] + 1)))


def _refuse(source: VolumeSource, bad: Sequence[str]) -> None:
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else " (or more)" if len(bad) == _NAMED else ""
    listing = "".join(f"\n  {text}" for text in bad[:_NAMED])
    remedy = "mend or remove them, or import with --damaged skip, which leaves them out and says so"
    cases = "case" if len(bad) == 1 else "cases"
    raise UserError(source.where, f"{min(len(bad), _NAMED)}{more} unusable {cases}:{listing}\n", remedy=remedy)


def _check_space(out: Path, pairs: Sequence[_Pair], how: Preparation) -> None:
    """Refuse before any work what would not fit on the disk: 3 bytes a voxel, and 1 more as annotated."""
    annotated = sum(pair.image.voxels for pair in pairs) if how.spacing is not None else 0
    need = annotated + int(3 * sum(_voxels(pair, how) for pair in pairs))
    free = shutil.disk_usage(out.parent).free
    if need > free:
        found = f"{_megabytes(free)} are free"
        raise UserError(str(out), found, f"{_megabytes(need)} for {len(pairs)} cases", "choose another disk")


def _voxels(pair: _Pair, how: Preparation) -> float:
    """About how many voxels a volume has when it is prepared."""
    share = 1.0 if how.spacing is None else math.prod(pair.image.spacing) / math.prod(how.spacing)
    return pair.image.voxels * share


def _workers(pairs: Sequence[_Pair], how: Preparation) -> int:
    """How many volumes may be prepared at once, from the memory that the largest takes."""
    largest = max(max(pair.image.voxels, _voxels(pair, how)) for pair in pairs)
    return max(1, min(threads(), int(_MEMORY / (largest * _PER_VOXEL))))


def _ordered(work: Callable[[_T], _R], items: Iterable[_T], workers: int) -> Iterator[_R]:
    """Results in the order of the items, worked on by threads (zlib and numpy release the lock), few of them ahead."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[_R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _capped(word: str, sentences: Sequence[str]) -> list[str]:
    more = [f"{word}: {len(sentences) - _NAMED} more"] if len(sentences) > _NAMED else []
    return [f"{word}: {text}" for text in sentences[:_NAMED]] + more


def _spread_of(values: Sequence[Sequence[float]], form: str, unit: str) -> str:
    array = np.asarray(values)
    low, high = array.min(0).tolist(), array.max(0).tolist()
    if low == high:
        return f"{by(low, form)} {unit}"
    middle = np.median(array, axis=0)
    middle = middle.astype(int).tolist() if form == "d" else middle.tolist()
    return f"{by(low, form)} to {by(high, form)} {unit}, {by(middle, form)} in the median"


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

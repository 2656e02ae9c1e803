"""Import of NIfTI files as packed volumes: read, check, prepare, write, report."""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from trainkit.data import cache, folders
from trainkit.data.cache import Progress
from trainkit.data.formats import nifti, volume_grid
from trainkit.data.formats.nifti_header import Header, size_text
from trainkit.data.sources import split_of
from trainkit.data.storage import image_store
from trainkit.data.threads import attempt, each, threads
from trainkit.data.volumes import channels, fingerprint, label_names, preprocess, reader, sources, volume_store
from trainkit.data.volumes.fingerprint import Record
from trainkit.data.volumes.label_names import Classes
from trainkit.data.volumes.preprocess import Preparation, three
from trainkit.data.volumes.sources import Case, VolumeSource
from trainkit.data.volumes.volume_store import CaseInfo, PackedVolumes, Writer
from trainkit.errors import UserError, few, listing, number_of
from trainkit.files import Json
from trainkit.interfaces import IGNORED

Damaged = Literal["fail", "skip"]
Names = Sequence[str] | Mapping[str, int] | None
"""Names of labels 1, 2, ...; or with the values that they have in label maps."""

_log = logging.getLogger(__name__)

_NAMED = 20
_MEMORY = 2 << 30
"""Bytes that the volumes in flight may take together; one volume is always read."""
_LOOKED_AT = 5000
_OFFERED = 64
"""Most values of label maps for which a mapping to classes is offered."""
_OFFERED_FROM = 200
_PER_VOXEL = 24
"""Bytes that preparing takes at its peak."""


@dataclass(frozen=True)
class VolumeReport:
    """Result of an import."""

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
    lost: list[str] = field(default_factory=list)
    """Those of `notes` that say what the preparation lost."""

    def lines(self) -> list[str]:
        """The report in lines: what was made, the table of shapes, intensities and organs, and what is odd."""
        held = f"{number_of(self.cases, 'cases')}, {number_of(self.classes - 1, 'organs')}, {size_text(self.bytes)}"
        made = f"{self.out}: {held}, from {self.kind}"
        odd = ["to check:", *(f"  {note}" for note in self.notes)] if self.notes else []
        return [made, "", *self.table, *([""] if odd else []), *odd]


def import_volumes(
    source: Path | str | VolumeSource,
    out: Path | str,
    *,
    names: Names = None,
    spacing: Sequence[float] | None = None,
    patient: str | None = None,
    axes: str | None = None,
    damaged: Damaged = "fail",
    damaged_most: float = 1.0,
    on_progress: Progress | None = None,
) -> VolumeReport:
    """Prepare volumes and their label maps once, into the packed form at `out`, which must not exist yet.

    `names` are those of labels 1, 2, ... (a first `background` is understood), or map names to values of label maps;
    None what the source says, or where it says nothing `label 1`, `label 2`. `spacing` in mm, in stored order, is what
    volumes are resampled to; None leaves them as they are. `patient` as `sources.open_volumes` takes it.
    `axes` is the order in which axes are stored, None what fits the set: an evaluation set must be stored as the
    training set. `damaged: skip` leaves unusable cases out and names them in the report, up to the share
    `damaged_most` of all.

    Raises UserError naming the unusable cases by file, up to 20 of them; those whose headers say so before any voxel is
    read. Where label maps hold values that are no class, it shows the mapping to write. Memory is that of a few
    volumes.
    """
    out = Path(out)
    if not isinstance(source, VolumeSource):
        if volume_store.is_packed(Path(source)) or image_store.is_packed(Path(source)):
            raise UserError(str(source), "is already imported", "NIfTI files", "use it directly")
        source = sources.open_volumes(source, patient=patient)
    classes = classes_of(source, names)
    if unlabelled := [case.id for case in source.cases if case.label is None]:
        found = f"{number_of(len(unlabelled), 'images')} without a label map: {few(unlabelled)}"
        raise UserError(source.where, found, "a label map for each", "predict their labels with trainkit predict")
    pairs, bad = read_headers(source)
    most = damaged_most * (len(source.cases) + len(source.incomplete)) if damaged == "skip" else 0
    _check_bad(source, bad, most, len(pairs))
    how = Preparation(axes or order(pair.image for pair in pairs), None if spacing is None else three(spacing))
    written = _Written(bad)
    key = f"{_key(source, classes, spacing, axes)} {damaged}"
    with Writer(out, how=how, key=key, state=written.state) as writer:
        written.restore(writer.restored)
        _check_space(out, pairs[written.done :], how)
        unknown = _write(source, pairs, classes, writer, written, damaged, on_progress)
        offer = _offered(source, classes) if unknown and damaged == "fail" else ""
        _check_bad(source, written.bad, most, writer.rows, offer)
        data = writer.finish(
            names=classes.names or numbered_names(source, writer.volumes()),
            channels=channel_names(source, pairs),
            made_from=f"{source.kind} {Path(source.where).name}",
        )
    records = records_of(data)
    notes = [*_capped("left out", [*written.bad, *source.left_out]), *notes_of(source)]
    notes += fingerprint.oddities(data.names, records)
    table = fingerprint.describe(data.names, records, data.preparation, data.channel_names)
    return VolumeReport(
        out, source.kind, len(data), len(data.names), data.axes, data.spacing, data.bytes, data.digest, notes, table,
        fingerprint.lost_pieces(data.names, [record.info for record in records]),
    )  # fmt: skip


class _Written:
    """Cases that were prepared, and sentences about unusable ones: the state by which a killed import is resumed."""

    def __init__(self, bad: list[str]):
        """`bad` are sentences about headers, which every import reads."""
        self.bad, self.done, self._said = bad, 0, len(bad)

    def state(self) -> Json:
        """Return what is new since the case before."""
        bad, self._said = self.bad[self._said :], len(self.bad)
        return {"done": self.done, "bad": bad}

    def restore(self, states: Sequence[Json]) -> None:
        """Resume what another process left."""
        for state in states:
            self.done = state["done"]
            self.bad += state["bad"]
        self._said = len(self.bad)


def _write(
    source: VolumeSource,
    pairs: Sequence[_Pair],
    classes: Classes,
    writer: Writer,
    written: _Written,
    damaged: Damaged,
    on_progress: Progress | None,
) -> bool:
    """Prepare and write the cases that are not written yet; with `fail` up to `_NAMED` unusable ones.

    Return whether any has labels that are no class.
    """
    unknown, before = False, len(source.cases) - len(pairs)
    for made in prepare_all(pairs[written.done :], writer.how, classes):
        written.done += 1
        if isinstance(made, UserError):
            written.bad.append(str(made))
            unknown |= isinstance(made, nifti.UnknownLabels)
            if damaged == "fail" and len(written.bad) == _NAMED:
                break
        elif damaged == "skip" or not written.bad:
            writer.add_case(made.record.info, made.image, made.label, made.truth, made.record.fingerprint)
        if on_progress:
            on_progress(before + written.done, len(source.cases))
    return unknown


def _key(source: VolumeSource, classes: Classes, spacing: Sequence[float] | None, axes: str | None) -> str:
    """Return the key of a packed set: its files, and all that it is made with."""
    cases = [(case.id, case.patient, str(case.image), str(case.label)) for case in source.cases]
    asked = None if spacing is None else [float(mm) for mm in spacing]
    versions = volume_store.FORMAT, volume_store.VERSION, preprocess.VERSION, volume_store.FOREGROUND_CAP
    further = [[str(file) for file in case.further] for case in source.cases]
    labels = [classes.names, classes.values, classes.ignored]
    made = [*versions, source.kind, source.where, labels, asked, axes, cases]
    made += [source.channels, source.incomplete, further]
    return cache.key(made, source.files)


def pack_volumes_once(
    source: VolumeSource,
    *,
    names: Names = None,
    spacing: Sequence[float] | None = None,
    axes: str | None = None,
) -> PackedVolumes:
    """Return the packed form of a source, made when it is not there yet. Processes that start together make it once.

    It lies at `cache.place`, keyed by its files and by all that it was made with. Raises as `import_volumes`.
    """
    key = f"volumes-{_key(source, classes_of(source, names), spacing, axes)}"

    def make(folder: Path, on_progress: Progress) -> None:
        report = import_volumes(source, folder, names=names, spacing=spacing, axes=axes, on_progress=on_progress)
        strays = _capped("left out", source.left_out)
        for note in strays:
            _log.warning("%s: %s", source.where, note)
        for note in report.lost:
            _log.warning("%s: %s", source.where, note)
        if odd := len(report.notes) - len(strays) - len(report.lost):
            said = number_of(odd, "things to look at")
            grid = "" if spacing is None else f" --spacing {'x'.join(f'{mm:g}' for mm in spacing)}"
            _log.warning("%s: %s: `trainkit data verify %s%s`", source.where, said, source.where, grid)

    return cache.pack_once(key, PackedVolumes, make, f"preparing {source.where}", "case")


def order(headers: Iterable[Header]) -> str:
    """Return the order in which the axes of a set are stored, from its headers: see `volume_grid.slice_axis_order`."""
    grids = [volume_grid.orientation(header.affine, "xyz").spacing(header) for header in headers]
    return volume_grid.slice_axis_order(np.asarray(grids))


def holds_volumes(path: Path | str) -> bool:
    """Return whether `path` (or `path#split`) is packed volumes, or a folder of NIfTI files in some layout."""
    return a_volume(path) is not None


def a_volume(path: Path | str) -> Path | None:
    """Find the packed volumes that `path` (or `path#split`) is, or the first NIfTI file in it; else None."""
    folder, split = split_of(path)
    if split is None and volume_store.is_packed(folder):
        return folder
    if not folder.is_dir() or image_store.is_packed(folder):
        return folder if nifti.is_nifti(folder) and folder.is_file() else None
    looked_at = 0
    for below, inner, files in folders.walk(folder):
        if found := next(filter(nifti.is_nifti, files), None):
            return folder / below / found
        # A folder of something else may hold a million files, and the volumes of a set are never that far down.
        looked_at += len(files) + len(inner)
        if looked_at > _LOOKED_AT:
            break
        if len(Path(below).parts) >= 3:
            inner.clear()
    return None


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


def _headers(case: Case) -> _Pair:
    image = reader.read_header(case)
    label = None if case.label is None else reader.read_label_header(case.label, image)
    return _Pair(case, image, label)


def read_headers(source: VolumeSource) -> tuple[list[_Pair], list[str]]:
    """Read the headers of all cases; those that are well, and sentences about the others.

    All have as many channels as the source names, or else as in most cases.
    """
    found = list(each(attempt(_headers), source.cases, threads()))
    pairs = [one for one in found if isinstance(one, _Pair)]
    counts = Counter(pair.image.channels for pair in pairs)
    usual = len(source.channels) or (max(counts, key=lambda count: (counts[count], count)) if counts else 1)
    said = few(source.channels) if source.channels else "as in most cases"
    odd = [
        f"{pair.case.image}: {number_of(pair.image.channels, 'channels')}; expected {usual}, {said}"
        for pair in pairs
        if pair.image.channels != usual
    ]
    bad = [str(one) for one in found if isinstance(one, UserError)]
    return [pair for pair in pairs if pair.image.channels == usual], [*source.incomplete, *bad, *odd]


def channel_names(source: VolumeSource, pairs: Sequence[_Pair]) -> tuple[str, ...]:
    """Return the names of the channels; empty where there is but one."""
    return source.channels or channels.numbered(pairs[0].image.channels)


def prepare_all(pairs: Sequence[_Pair], how: Preparation, classes: Classes) -> Iterator[_Made | UserError]:
    """Read and prepare cases, as many at once as fit into memory; a UserError in place of one that is unusable."""
    return each(attempt(partial(_prepared, how=how, classes=classes)), pairs, _workers(pairs, how), waiting=1)


def _prepared(pair: _Pair, how: Preparation, classes: Classes) -> _Made:
    """Read and prepare one case. Raises UserError naming the file."""
    case = pair.case
    if case.label is None or pair.label is None:
        raise UserError(str(case.image), "an image without a label map")
    labels = reader.read_labels(case.label, pair.image, classes)
    array, header = reader.read_image(case)
    if volume_grid.same_grid(pair.image, header) is not None:
        raise UserError(str(case.image), "changed while it was read")
    ready = preprocess.prepare(array, header, how)
    print_ = fingerprint.of(array, header)
    at_top = float(np.count_nonzero(array[0] == ready.facts[0]["highest"])) / array[0].size
    del array
    truth = np.ascontiguousarray(ready.orientation.apply(labels))
    label = truth if how.spacing is None else preprocess.prepare_labels(labels, header, how)
    voxels = fingerprint.counted(truth)
    volumes = np.trim_zeros(voxels[:IGNORED], "b") * math.prod(ready.original_spacing)
    facts = {
        **ready.facts[0],
        **({"also": list(ready.facts[1:])} if len(ready.facts) > 1 else {}),
        "at_highest": at_top,
        "type": header.dtype.name,
        "stored": fingerprint.codes(header),
        "tilt": fingerprint.tilt(header),
        "notes": [*header.notes, *(f"label map: {note}" for note in pair.label.notes if note not in header.notes)],
        **({"ignored": float(voxels[IGNORED] / truth.size)} if voxels[IGNORED] else {}),
        "organs": fingerprint.seen_organs(truth, label, ready.image[0]),
    }
    info = CaseInfo(
        id=case.id,
        patient=case.patient,
        shape=ready.shape,
        spacing=ready.spacing,
        original_shape=ready.original_shape,
        original_spacing=ready.original_spacing,
        floors=ready.floors,
        volumes_mm3=tuple(volumes.tolist()),
        facts=facts,
    )
    return _Made(Record(info, print_), ready.image, label, None if how.spacing is None else truth)


def records_of(data: PackedVolumes) -> list[Record]:
    """Return all cases of a packed set, without their voxels."""
    prints = data.fingerprints().tolist()
    return [Record(data.case(i), prints[i]) for i in range(len(data))]


def classes_of(source: VolumeSource, names: Names) -> Classes:
    """Return what label maps may hold: classes that were asked for, else those of the source; it may ignore a value."""
    if names is None:
        return source.classes
    asked, ignored = label_names.classes_named(names, "names"), source.classes.ignored
    called = asked.names or ()
    if len(called) > volume_store.LABEL_LIMIT:
        raise UserError("names", f"{len(called) - 1} labels", f"at most {volume_store.LABEL_LIMIT - 1}")
    if ignored is None or asked.ignored is not None:
        return asked
    if ignored in (values := asked.values or range(1, len(called))):
        found = f"{called[1 + values.index(ignored)]!r} for label {ignored}, which {source.where} ignores"
        raise UserError("names", found, "the classes alone", f"leave it out, or call it {label_names.IGNORE}")
    return replace(asked, ignored=ignored)


def notes_of(source: VolumeSource) -> list[str]:
    """Return sentences about what is odd in the classes of a source."""
    ignored, count, zero, told = source.classes.ignored, source.classes.count or 1, source.classes.zero, []
    top = max(source.classes.values or range(count))
    if zero.lower() not in label_names.NOTHING:
        told.append(f"label 0, which {source.where} calls {zero!r}, is the background: no class; nnU-Net refuses that")
    if ignored is not None and ignored <= top:
        told.append(f"ignore is label {ignored} though labels go up to {top}; nnU-Net takes the highest value only")
    return told


def numbered_names(source: VolumeSource, volumes: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Number labels that nobody named, from the volume of each in each case by its id.

    Raises UserError where numbers look like something else than classes.
    """
    present = sorted({label for own in volumes.values() for label, volume in enumerate(own) if label and volume})
    if not present:
        raise UserError(source.where, "no labelled voxel in any case", "label maps with labels above 0")
    if present[-1] > 2 * len(present):
        having = [id for id, own in volumes.items() if len(own) > present[-1]]
        found = f"labels {few(map(str, present))}, which have no names; {present[-1]} is in {few(having)}"
        expected = "labels 1, 2, ... or names for all up to the largest"
        raise UserError(source.where, found, expected, _write_mapping(label_names.mapping(present, Classes())))
    return (label_names.BACKGROUND, *(f"label {number}" for number in range(1, present[-1] + 1)))


def _offered(source: VolumeSource, classes: Classes) -> str:
    """Return the sentence with the mapping of values to classes for the label maps of a source, or none.

    Reads up to `_OFFERED_FROM` label maps. What has more values than classes are likely is an image, not a label map.
    """
    maps = [case.label for case in source.cases if case.label is not None]
    step = max(1, len(maps) // _OFFERED_FROM)
    found: set[int] = set()
    for one in each(attempt(nifti.label_values), maps[::step], threads()):
        found |= set() if isinstance(one, UserError) else one
    values = sorted(value for value in found if value > 0)
    if not values or len(values) > _OFFERED or min(found) < 0 or max(found) >= label_names.VALUE_LIMIT:
        return ""
    return _write_mapping(label_names.mapping(values, classes))


def _write_mapping(mapping: str) -> str:
    return f"if these are classes, write `labels: {mapping}` in the block data, with your names"


def _check_bad(source: VolumeSource, bad: Sequence[str], most: float, usable: int, offer: str = "") -> None:
    """Raise UserError where more than `most` cases are unusable, or none is left."""
    if not bad or (len(bad) <= most and usable):
        return
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else " (or more)" if len(bad) == _NAMED else ""
    remedy = "repair or remove them, or import with --damaged skip, which leaves them out and lists them"
    remedy = f"{offer}; else {remedy}" if offer else remedy
    found = f"{min(len(bad), _NAMED)}{more} unusable {'case' if len(bad) == 1 else 'cases'}:{listing(bad[:_NAMED])}\n"
    raise UserError(source.where, found, remedy=remedy)


def _check_space(out: Path, pairs: Sequence[_Pair], how: Preparation) -> None:
    """Refuse before any work what would not fit on the disk: 2 bytes a voxel of each channel, 1 for its label, and 1
    more as annotated."""
    annotated = sum(pair.image.voxels for pair in pairs) if how.spacing is not None else 0
    need = annotated + int(sum((2 * pair.image.channels + 1) * _voxels(pair, how) for pair in pairs))
    free = shutil.disk_usage(out.parent).free
    if need > free:
        found = f"{size_text(free)} are free"
        raise UserError(str(out), found, f"{size_text(need)} for {len(pairs)} cases", "choose another disk")


def _voxels(pair: _Pair, how: Preparation) -> float:
    """Estimate how many voxels a volume has when it is prepared."""
    share = 1.0 if how.spacing is None else math.prod(pair.image.spacing) / math.prod(how.spacing)
    return pair.image.voxels * share


def _workers(pairs: Sequence[_Pair], how: Preparation) -> int:
    """Return how many volumes may be prepared at once, from the memory that the largest takes."""
    each_takes = [max(pair.image.voxels, _voxels(pair, how)) * pair.image.channels for pair in pairs]
    return max(1, min(threads(), int(_MEMORY / (max(each_takes, default=1) * _PER_VOXEL))))


def _capped(word: str, sentences: Sequence[str]) -> list[str]:
    more = [f"{word}: {len(sentences) - _NAMED} more"] if len(sentences) > _NAMED else []
    return [f"{word}: {text}" for text in sentences[:_NAMED]] + more

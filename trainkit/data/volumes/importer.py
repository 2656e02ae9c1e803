"""NIfTI files to packed volumes: read, check, prepare, write."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from trainkit.data import cache
from trainkit.data.cache import Progress
from trainkit.data.formats import volume_grid
from trainkit.data.formats.nifti_header import Header
from trainkit.data.threads import attempt, each, threads
from trainkit.data.volumes import fingerprint, label_names, preprocess, reader, sources, volume_store
from trainkit.data.volumes.label_names import Classes
from trainkit.data.volumes.preprocess import Preparation, three
from trainkit.data.volumes.sources import Case, VolumeSource
from trainkit.data.volumes.volume_store import CaseInfo, PackedVolumes, Writer
from trainkit.errors import UserError, few, listing, number_of
from trainkit.interfaces import IGNORED

Names = Sequence[str] | Mapping[str, int] | None
"""Names of labels 1, 2, ...; or with the values that they have in label maps."""

_NAMED = 20
_MEMORY = 2 << 30
"""Bytes that the volumes in flight may take together; one volume is always read."""
_PER_VOXEL = 32
"""Bytes that preparing takes at its peak."""


def import_volumes(
    source: Path | str | VolumeSource,
    out: Path | str,
    *,
    names: Names = None,
    spacing: Sequence[float] | None = None,
    axes: str | None = None,
    on_progress: Progress | None = None,
) -> PackedVolumes:
    """Prepare volumes and their label maps once, into the packed form at `out`, which must not exist yet.

    `names` are those of labels 1, 2, ... (a first `background` is understood), or map names to values of label maps;
    None what the source says, or where it says nothing `label 1`, `label 2`. `spacing` in mm, in stored order, is what
    volumes are resampled to; None leaves them as they are. `axes` is the order in which axes are stored, None what fits
    the set: an evaluation set must be stored as the training set.

    An import that was killed is resumed: cases that are written are not read again. Raises UserError naming the
    unusable cases by file, up to 20 of them; those whose headers say so before any voxel is read. Memory is that of a
    few volumes.
    """
    out, source = Path(out), source if isinstance(source, VolumeSource) else sources.open_volumes(source)
    classes = classes_of(source, names)
    pairs, bad = read_headers(source)
    total = len(source.cases)
    _check_bad(source, bad)
    how = Preparation(axes or order(pair.image for pair in pairs), None if spacing is None else three(spacing))
    with Writer(out, how=how, key=f"{_key(source, classes, spacing, axes)} fail") as writer:
        left = [pair for pair in pairs if pair.case.id not in {case.id for case in writer.cases}]
        _check_space(out, left, how)
        for done, made in enumerate(prepare_all(left, how, classes), start=total - len(left) + 1):
            if isinstance(made, UserError):
                bad.append(str(made))
                if len(bad) == _NAMED:
                    break
            elif not bad:
                writer.add_case(made.info, made.image, made.label, made.truth, made.fingerprint)
            if on_progress:
                on_progress(done, total)
        _check_bad(source, bad)
        return writer.finish(
            names=classes.names or numbered_names(source.where, (case.volumes_mm3 for case in writer.cases)),
            channels=source.channels or sources.numbered(pairs[0].image.channels),
            made_from=f"{source.kind} {Path(source.where).name}",
        )


def notes(source: VolumeSource, data: PackedVolumes) -> list[str]:
    """Return sentences about what was left out of a packed set, and what is odd about it."""
    left_out = [f"left out: {text}" for text in source.left_out]
    return left_out + fingerprint.oddities(data.names, data.infos(), data.fingerprints())


def _key(source: VolumeSource, classes: Classes, spacing: Sequence[float] | None, axes: str | None) -> str:
    """Return the key of a packed set: its files, and all that it is made with."""
    cases = [(case.id, case.patient, str(case.image), str(case.label)) for case in source.cases]
    asked = None if spacing is None else [float(mm) for mm in spacing]
    versions = volume_store.FORMAT, volume_store.VERSION, preprocess.VERSION, volume_store.FOREGROUND_CAP
    labels = [classes.names, classes.values, classes.ignored]
    further = [[str(file) for file in case.images[1:]] for case in source.cases]
    made = [*versions, source.kind, source.where, labels, asked, axes, cases]
    made += [source.channels, (), further]  # of cases that lack a channel, which are refused by their headers now
    return cache.key(made, source.files)


def pack_volumes_once(
    source: VolumeSource, *, names: Names = None, spacing: Sequence[float] | None = None, axes: str | None = None
) -> PackedVolumes:
    """Return the packed form of a source, made when it is not there yet. Processes that start together make it once.

    It lies at `cache.place`, keyed by its files and by all that it was made with. Raises as `import_volumes`.
    """
    key = f"volumes-{_key(source, classes_of(source, names), spacing, axes)}"

    def make(folder: Path, on_progress: Progress) -> None:
        import_volumes(source, folder, names=names, spacing=spacing, axes=axes, on_progress=on_progress)

    return cache.pack_once(key, PackedVolumes, make, f"preparing {source.where}", "case")


def order(headers: Iterable[Header]) -> str:
    """Return the order in which the axes of a set are stored, from its headers: see `volume_grid.slice_axis_order`."""
    grids = [volume_grid.orientation(header.affine, "xyz").spacing(header) for header in headers]
    return volume_grid.slice_axis_order(np.asarray(grids))


def holds_volumes(path: Path | str) -> bool:
    """Return whether `path` (or `path#split`) is a folder of NIfTI files in some layout."""
    return sources.a_volume(path) is not None


@dataclass(frozen=True)
class _Pair:
    """A case whose headers are well."""

    case: Case
    image: Header
    notes: list[str]


@dataclass(frozen=True)
class _Made:
    """A case, prepared."""

    info: CaseInfo
    fingerprint: int
    image: np.ndarray
    label: np.ndarray
    truth: np.ndarray | None


def _headers(case: Case) -> _Pair:
    image = reader.read_header(case)
    notes = list(image.notes)
    if case.label is not None:
        notes += [
            f"label map: {note}" for note in reader.read_label_header(case.label, image).notes if note not in notes
        ]
    return _Pair(case, image, notes)


def read_headers(source: VolumeSource) -> tuple[list[_Pair], list[str]]:
    """Read the headers of all cases; those that are well, and sentences about the others.

    All have as many channels as the source names, or else as in most cases.
    """
    found = list(each(attempt(_headers), source.cases, threads()))
    pairs = [one for one in found if isinstance(one, _Pair)]
    counts = Counter(pair.image.channels for pair in pairs)
    usual = len(source.channels) or max(counts, key=lambda count: (counts[count], count), default=1)
    expected = few(source.channels) if source.channels else "as in most cases"
    bad = [str(one) for one in found if isinstance(one, UserError)]
    for pair in pairs:
        if pair.image.channels != usual:
            bad.append(f"{pair.case.image}: {number_of(pair.image.channels, 'channels')}; expected {usual}, {expected}")
    return [pair for pair in pairs if pair.image.channels == usual], bad


def prepare_all(pairs: Sequence[_Pair], how: Preparation, classes: Classes) -> Iterator[_Made | UserError]:
    """Read and prepare cases, as many at once as fit into memory; a UserError in place of one that is unusable."""
    largest = max((max(pair.image.voxels, _voxels(pair, how)) * pair.image.channels for pair in pairs), default=1)
    workers = max(1, min(threads(), int(_MEMORY / (largest * _PER_VOXEL))))
    return each(attempt(partial(_prepared, how=how, classes=classes)), pairs, workers, waiting=1)


def _prepared(pair: _Pair, how: Preparation, classes: Classes) -> _Made:
    """Read and prepare one case. Raises UserError naming the file."""
    case = pair.case
    array, header = reader.read_image(case)
    if case.label is None or array.shape != (pair.image.channels, *pair.image.shape):
        raise UserError(str(case.image), "has no label map, or changed while it was read")
    labels = reader.read_labels(case.label, header, classes)
    ready = preprocess.prepare(array, header, how)
    print_ = fingerprint_of(array, header)
    del array
    truth = np.ascontiguousarray(ready.orientation.apply(labels))
    label = truth if how.spacing is None else preprocess.prepare_labels(labels, ready)
    voxels = np.bincount(truth.ravel(), minlength=256)
    facts = {
        **ready.facts[0],
        **({"also": list(ready.facts[1:])} if len(ready.facts) > 1 else {}),
        "notes": pair.notes,
        "organs": fingerprint.organs(truth, label),
    }
    info = CaseInfo(
        id=case.id,
        patient=case.patient,
        shape=ready.shape,
        spacing=ready.spacing,
        original_shape=ready.original_shape,
        original_spacing=ready.original_spacing,
        floors=ready.floors,
        volumes_mm3=tuple((np.trim_zeros(voxels[:IGNORED], "b") * math.prod(ready.original_spacing)).tolist()),
        facts=facts,
    )
    return _Made(info, print_, ready.image, label, None if how.spacing is None else truth)


def fingerprint_of(array: np.ndarray, header: Header) -> int:
    """Compute `volume_store.fingerprint` of an image (channels, *axes of its file)."""
    grid = volume_grid.orientation(header.affine, "zyx")
    channels = [grid.apply(channel) for channel in array]
    return volume_store.fingerprint(channels[0] if len(channels) == 1 else np.stack(channels))


def classes_of(source: VolumeSource, names: Names) -> Classes:
    """Return what label maps may hold: classes that were asked for, else those of the source; it may ignore a value."""
    if names is None:
        return source.classes
    asked, ignored = label_names.classes_named(names, "names"), source.classes.ignored
    if ignored is None or asked.ignored is not None:
        return asked
    if ignored in (asked.values or range(1, asked.count or 1)):
        found = f"a name for label {ignored}, which {source.where} ignores"
        raise UserError("names", found, "the classes alone", f"leave it out, or call it {label_names.IGNORE}")
    return replace(asked, ignored=ignored)


def numbered_names(where: str, volumes: Iterable[Sequence[float]]) -> tuple[str, ...]:
    """Number labels that nobody named, from the volume of each in each case.

    Raises UserError where numbers look like something else than classes.
    """
    present = sorted({label for own in volumes for label, volume in enumerate(own) if label and volume})
    if not present:
        raise UserError(where, "no labelled voxel in any case", "label maps with labels above 0")
    if present[-1] > 2 * len(present):
        found = f"labels {few(map(str, present))}, which have no names"
        remedy = "if these are classes, write `labels: {NAME: VALUE, ...}` in the block data"
        raise UserError(where, found, "labels 1, 2, ... or names for all up to the largest", remedy)
    return (label_names.BACKGROUND, *(f"label {number}" for number in range(1, present[-1] + 1)))


def _check_bad(source: VolumeSource, bad: Sequence[str]) -> None:
    """Raise UserError where cases are unusable."""
    if bad:
        found = f"{number_of(len(bad), 'unusable cases', 'unusable case')}:{listing(bad, _NAMED)}\n"
        raise UserError(source.where, found, remedy="repair them, or move them away with their label maps")


def _check_space(out: Path, pairs: Sequence[_Pair], how: Preparation) -> None:
    """Refuse before any work what would not fit on the disk: 2 bytes a voxel of each channel, 1 for its label, and 1
    more as annotated."""
    annotated = sum(pair.image.voxels for pair in pairs) if how.spacing is not None else 0
    need = annotated + sum((2 * pair.image.channels + 1) * _voxels(pair, how) for pair in pairs)
    if need > (free := shutil.disk_usage(out.parent).free):
        expected = f"{need / 1e9:,.1f} GB for {len(pairs)} cases"
        raise UserError(str(out), f"{free / 1e9:,.1f} GB are free", expected, "choose another disk")


def _voxels(pair: _Pair, how: Preparation) -> float:
    """Estimate how many voxels a volume has when it is prepared."""
    share = 1.0 if how.spacing is None else math.prod(pair.image.spacing) / math.prod(how.spacing)
    return pair.image.voxels * share

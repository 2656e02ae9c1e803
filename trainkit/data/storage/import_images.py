"""From any source to the packed form: decode, check, align, fit, number the people, write."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from trainkit.data import evaluation_sets, folders, leakage, sources
from trainkit.data.faces.align import align_face, check_records
from trainkit.data.formats import image_decode, tiff
from trainkit.data.formats.image_decode import Fit
from trainkit.data.record import Columns, Record, Source
from trainkit.data.storage import image_store
from trainkit.data.storage.image_store import Packed, Store, Writer
from trainkit.data.storage.map_store import each
from trainkit.errors import UserError, few, listing, number_of
from trainkit.evaluation_protocols import Protocol
from trainkit.files import Json

Progress = Callable[[int, int], None]
"""Called with (rows or cases done, those in all)."""

Resize = Literal["no", "down", "any"]

_COUNTED = 1000
"""Unusable images after which a set that is to be whole is read no further."""
_CHUNK = 64
_DARK = 16
"""Level below which all images of 16 bits lie where their values have 12 bits."""
_MANY = 1 << 30
"""Images of a set of which nothing says how many they are: too many to be kept as pixels."""


@dataclass(frozen=True)
class Report:
    """The outcome of an import."""

    out: Path
    kind: str
    rows: int
    classes: int
    store: Store
    digest: str
    renumbered: bool
    """The labels of the source were not 0 .. classes-1; `names.json` keeps them."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what is odd but usable, and about what was skipped."""
    groups: int = 0
    """How many people, videos or alphabets the images are of, where that is known."""


class Options(TypedDict, total=False):
    """Options that every import of images takes; see `import_pictures`."""

    damaged: Literal["fail", "skip"]
    damaged_most: float
    store: Literal["auto", "decoded", "encoded"]
    on_progress: Progress | None
    protocol: Protocol | None
    columns: Columns | None
    stream: bool


def import_pictures(
    source: Path | str | Source,
    out: Path | str,
    *,
    size: tuple[int, int] | None,
    fit: Fit = "no",
    group: str | None = None,
    align: bool = False,
    damaged: Literal["fail", "skip"] = "fail",
    damaged_most: float = 1.0,
    store: Literal["auto", "decoded", "encoded"] = "auto",
    on_progress: Progress | None = None,
    protocol: Protocol | None = None,
    columns: Columns | None = None,
    stream: bool = False,
) -> Report:
    """Convert a set of labelled images to the packed form at `out`, which must not exist yet.

    Images are brought to `size` (height, width) as `fit` says (`image_decode.fit`); with `size` None they keep their
    own sizes and are stored encoded. `group` is a regular expression with one group in parentheses, which finds in a
    image's id (relative path, or `image_path`) the person, video or alphabet that no two splits may share.
    `align` warps faces by their five landmarks to the ArcFace template. `damaged: skip` leaves damaged images
    out, up to the share `damaged_most` of all, and names them in the report. With a `protocol` it is an evaluation set:
    its rows have no class. `columns` and `stream` as `sources.open_source` takes them.
    Raises UserError for damaged images: up to 20 are named by file and row, the rest counted, up to 1,000.
    """
    if not isinstance(source, Source):
        source = sources.open_source(source, network=True, stream=stream, columns=columns)
    if source.size == 0:
        raise UserError(source.where, "no images", "at least one")
    folders.check_names(source.where, source.names or ())
    if protocol is not None and damaged == "skip":
        found, expected = "damaged images to be skipped", "all images of an evaluation set"
        raise UserError(source.where, found, expected)
    if store == "auto":
        small = size is not None and 3 * size[0] * size[1] * (source.size or _MANY) < image_store.DECODED_LIMIT
        form: Store = "decoded" if small else "encoded"
    else:
        form = store
    recipe = _Recipe(size, fit, align or not source.aligned, sources.grouping(group) if group is not None else None)
    if recipe.align and damaged == "fail":
        check_records(source.where, source.records())
    with Writer(Path(out), size=size, store=form) as writer:
        rows = _Rows(writer, skip=damaged == "skip")
        done = 0
        for done, made in enumerate(_prepare(source, recipe), start=1):
            if not rows.add(made):
                break
            if on_progress:
                on_progress(done, source.size or 0)
        if rows.bad and (damaged == "fail" or len(rows.bad) > damaged_most * (source.size or done)):
            remedy = "repair or remove them, or import with --damaged skip, which leaves them out and lists them"
            raise unusable(source.where, rows.bad, remedy)
        return rows.finish(source, protocol)


class _Rows:
    """The rows of a packed set while it is written, and sentences about unusable images."""

    def __init__(self, writer: Writer, skip: bool):
        self._writer, self._skip = writer, skip
        self._labels: list[int | str] = []
        self._groups: list[str | None] = []
        self._ids: list[str] = []
        self._shapes: list[tuple[int, int]] = []
        self._of_pages = self._deep = 0
        self._brightest = -1
        self.bad: list[str] = []

    def add(self, made: _Made | UserError) -> bool:
        """Write an image, or note why there is none; False where no more need be read."""
        if isinstance(made, UserError):
            self.bad.append(str(made))
            return self._skip or len(self.bad) < _COUNTED
        if self._skip or not self.bad:
            record, pixels = made.record, made.pixels
            self._writer.add(pixels, made.encoded, made.original)
            self._of_pages += made.pages > 1
            self._deep += made.brightest >= 0
            self._brightest = max(self._brightest, made.brightest)
            self._labels.append(record.label)
            self._groups.append(record.group)
            self._ids.append(record.id)
            self._shapes.append((pixels.shape[1], pixels.shape[2]))
        return True

    def finish(self, source: Source, protocol: Protocol | None) -> Report:
        """Publish the set. Raises UserError where it has no row."""
        if not self._ids:
            found = "no usable image" if self.bad else "no images"
            raise UserError(source.where, found, "" if self.bad else "at least one", "; ".join(self.bad[:3]))
        numbers, names, renumbered = np.full(len(self._ids), -1, np.int64), [], False
        if protocol is None:
            numbers, names, renumbered = number(self._labels)
            if source.names:
                names = [source.names[int(name)] for name in names]
        result = self._writer.finish(
            labels=numbers,
            class_names=names,
            ids=self._ids,
            **_group_numbers(source, self._groups, self._ids),
            protocol=protocol,
            made_from=f"{source.kind} {Path(source.where).name}",
        )
        notes = [f"left out: {text}" for text in source.left_out] + [f"skipped: {text}" for text in self.bad]
        if self._of_pages:
            notes.append(
                f"{number_of(self._of_pages, 'TIFF files')} of several pages: only the first page of each is read"
            )
        if 0 <= self._brightest < _DARK:
            found = f"no value of {number_of(self._deep, 'images')} of 16 bits is above {256 * _DARK - 1} of 65535"
            notes.append(f"{found}: they are nearly black; if their values have 12 bits, multiply them by 16")
        if renumbered:
            notes.append(f"labels were not 0 to {len(names) - 1} and were renumbered; names.json has the originals")
        if source.label and not source.names and not any(isinstance(label, str) for label in self._labels):
            notes.append(f"the column {source.label} holds numbers without names: the numbers are the class names")
        if result.size is None:
            notes.append(_spread(self._shapes))
        return Report(
            result.path,
            source.kind,
            len(result),
            result.classes,
            result.store,
            result.digest,
            renumbered,
            notes + oddities(result),
            len(result.group_names),
        )


def import_faces(
    source: Path | str | Source,
    out: Path | str,
    *,
    image_size: int = 112,
    align: bool = False,
    resize: Resize = "no",
    **options: Unpack[Options],
) -> Report:
    """Convert a set of faces to squares in the packed form; see `import_pictures`, which raises what this raises."""
    if not isinstance(source, Source):
        how: dict[str, Any] = {"stream": options.pop("stream", False), "columns": options.pop("columns", None)}
        source = sources.open_source(source, nested=False, network=True, **how)
    return import_pictures(source, out, size=(image_size, image_size), fit=resize, align=align, **options)


def import_evaluation(
    path: Path | str,
    out: Path | str,
    *,
    image_size: int = 112,
    resize: Resize = "no",
    **options: Unpack[Options],
) -> Report:
    """Convert an evaluation set of any kind to the packed form, protocol included. Raises as `import_faces` does."""
    source, options["protocol"] = evaluation_sets.recognise(Path(path)).read()
    return import_faces(source, out, image_size=image_size, resize=resize, **options)


def number(labels: list[int | str]) -> tuple[np.ndarray, list[str], bool]:
    """Return class numbers 0, 1, ... in the order of labels, these as names, and True if integers had to change."""
    distinct = sorted(set(labels), key=lambda label: (isinstance(label, str), label))
    place = {label: position for position, label in enumerate(distinct)}
    renumbered = any(not isinstance(label, str) and label != position for label, position in place.items())
    return np.asarray([place[label] for label in labels], np.int64), [str(label) for label in distinct], renumbered


def _group_numbers(source: Source, groups: list[str | None], ids: list[str]) -> dict[str, Json]:
    known = [group for group in groups if group is not None]
    if not known:
        return {}
    if len(known) < len(groups):
        raise UserError(f"{source.where}, {ids[groups.index(None)]}", "no group", "one for every image, or for none")
    names, numbers = np.unique(np.asarray(known, object), return_inverse=True)
    return {"groups": numbers.astype(np.int64), "group_names": names.tolist()}


def _spread(shapes: list[tuple[int, int]]) -> str:
    ordered = sorted(shapes, key=lambda shape: shape[0] * shape[1])
    least, middle, most = (image_store.describe(ordered[i]) for i in (0, len(ordered) // 2, -1))
    return f"images keep their own sizes (height x width): smallest {least}, median {middle}, largest {most}"


@dataclass(frozen=True)
class _Recipe:
    """Preparation of every image."""

    size: tuple[int, int] | None
    fit: Fit
    align: bool
    group: Callable[[Record], str] | None


class _Made(NamedTuple):
    """A record and its image, prepared."""

    record: Record
    pixels: np.ndarray
    """uint8 (3, height, width)."""
    original: bytes
    """A hash of what the source has."""
    encoded: bytes | None = None
    """Its bytes, where they can be kept for these pixels."""
    pages: int = 1
    """Pages of its file."""
    brightest: int = -1
    """Largest level, 0 .. 255, of an image of 16 bits; -1 for others."""


def _prepare(source: Source, recipe: _Recipe) -> Iterator[_Made | UserError]:
    def one(record: Record) -> _Made | UserError:
        if recipe.group is not None:
            # An image without a group is no damage that could be skipped: the expression does not fit the set.
            record = replace(record, group=recipe.group(record))
        try:
            return _one(record, recipe)
        except UserError as error:
            return error

    # PIL releases the interpreter lock while it decodes, so threads suffice. Images of their own sizes may take up to
    # 150 MB each.
    return each(one, source.records(), threads(), 2 if recipe.size is None else 64)


def threads() -> int:
    """Return the number of threads that read files: the cores that this process may use, 8 at the most."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _one(record: Record, recipe: _Recipe) -> _Made:
    folders.check_names(record.where, (record.id, str(record.label), record.group or ""))
    data = image_decode.read(record.data, record.where) if isinstance(record.data, Path) else record.data
    pixels = image_decode.decode(data, record.where) if isinstance(data, bytes) else data
    original = pixels
    if recipe.align:
        if record.landmarks is None:
            raise UserError(record.where, "no landmarks", "five points", "add it to landmarks5.json")
        if recipe.size is None or recipe.size[0] != recipe.size[1]:
            raise ValueError(f"faces are aligned to squares, not to {image_store.describe(recipe.size)}")
        pixels = align_face(pixels, record.landmarks, recipe.size[0], record.where)
    if recipe.size is not None:
        pixels = image_decode.fit(pixels, recipe.size, record.where, recipe.fit)
    hashed = hashlib.blake2b(data if isinstance(data, bytes) else np.ascontiguousarray(data).data, digest_size=16)
    if not isinstance(data, bytes):
        hashed.update(repr(data.shape).encode())
    if record.landmarks is not None:
        hashed.update(np.asarray(record.landmarks, np.float64).tobytes())
    made = _Made(record, np.ascontiguousarray(pixels.transpose(2, 0, 1)), hashed.digest())
    if not isinstance(data, bytes):
        return made
    encoded = data if pixels is original and image_decode.stored_as_is(data) else None
    brightest = int(original.max()) if image_decode.has_16_bits(data) else -1
    return made._replace(encoded=encoded, pages=tiff.pages(data, record.where), brightest=brightest)


def unusable(where: str, bad: Sequence[str], remedy: str) -> UserError:
    """Return what to raise about unusable images of a set: the first by name, and how many there are."""
    count = f"{number_of(len(bad), 'unusable images', 'unusable image')}{' or more' * (len(bad) == _COUNTED)}"
    return UserError(where, f"{count}:{listing(bad)}\n", remedy=remedy)


def oddities(data: Packed) -> list[str]:
    """Return sentences about what is odd but usable: people with one image, one image under two people."""
    notes = []
    names = data.class_names
    if data.classes:
        counts = np.bincount(data.labels, minlength=data.classes)
        lonely = np.flatnonzero(counts == 1)
        if len(lonely):
            notes.append(f"{len(lonely)} of {data.classes} classes have one image: {few(names[i] for i in lonely)}")
        missing = np.flatnonzero(counts == 0)
        if len(missing):
            notes.append(f"{len(missing)} of {data.classes} classes have no image: {few(names[i] for i in missing)}")
        pairs = leakage.label_conflicts(np.asarray(data.contents()), np.asarray(data.labels))
        if len(pairs):
            ids = data.ids()
            listing = few(f"{ids[a]} = {ids[b]}" for a, b in pairs.tolist())
            notes.append(f"{len(pairs)} images are in two classes: {listing}")
    return notes


def info(path: Path | str) -> dict[str, Json]:
    """Describe a packed set: numbers, digest, and how many images its classes have."""
    data = Packed(path)
    facts: dict[str, Json] = {
        "path": str(data.path),
        "made_from": data.manifest.get("made_from", ""),
        "images": len(data),
        "classes": data.classes,
        "image_size": data.size[0] if data.size and data.size[0] == data.size[1] else image_store.describe(data.size),
        "store": data.store,
        "bytes": data.bytes,
        "digest": data.digest,
    }
    if data.classes:
        counts = np.bincount(data.labels, minlength=data.classes)
        spread = int(counts.min()), float(np.median(counts)), int(counts.max())
        facts["images_per_class"] = dict(zip(("least", "median", "most"), spread, strict=True))
    if data.groups is not None:
        facts["groups"] = len(data.group_names)
    protocol = data.protocol()
    if protocol is not None:
        facts["protocol"] = type(protocol).__name__
        facts["trials"] = len(protocol)
    return facts


def lines(path: Path | str) -> list[str]:
    """Write the properties of a packed set in lines."""
    return [f"{key:14} {value}" for key, value in info(path).items()]


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
    problems = data.changed()

    def read(first: int) -> list[str]:
        rows = range(first, min(first + _CHUNK, len(data)))
        if data.size is not None:
            try:
                data.fetch(np.asarray(rows))
                return []
            except UserError:
                pass  # row by row, to name each
        return [text for row in rows for text in _damage(data, row)]

    for chunk, found in enumerate(each(read, range(0, len(data), _CHUNK), threads()), start=1):
        problems += found
        if on_progress:
            on_progress(min(chunk * _CHUNK, len(data)), len(data))
    odd = oddities(data) + [note for other in against for note in _shared(data, Packed(other))]
    return problems + [f"warning: {note}" for note in odd]


def _damage(data: Packed, row: int) -> list[str]:
    try:
        data.picture(row)
    except UserError as error:
        return [str(error)]
    return []


def _shared(data: Packed, other: Packed) -> list[str]:
    notes = []
    both, here, there = np.intersect1d(data.contents(), other.contents(), return_indices=True)
    if len(both):
        ids, others = data.ids(), other.ids()
        listing = few(f"{ids[a]} = {others[b]}" for a, b in zip(here, there, strict=True))
        notes.append(f"{len(both)} images are also in {other.path}: {listing}")
    groups = sorted(set(data.group_names) & set(other.group_names))
    if groups:
        notes.append(f"{len(groups)} groups are also in {other.path}: {few(groups)}")
    return notes

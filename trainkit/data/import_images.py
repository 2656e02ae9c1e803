"""From any source to the packed form: decode, check, align, fit, number the people, write."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from trainkit.data import cache, evaluation_sets, folders, sources, verify_images
from trainkit.data.cache import Progress
from trainkit.data.evaluation_sets import Evaluation
from trainkit.data.face_alignment import align_face
from trainkit.data.formats import image_decode
from trainkit.data.formats.image_decode import Fit
from trainkit.data.record import Columns, Record, Source
from trainkit.data.storage import image_store, record_store
from trainkit.data.storage.image_store import Packed, Store, Writer
from trainkit.data.threads import each, threads
from trainkit.errors import UserError, listing, number_of
from trainkit.evaluation_protocols import Protocol
from trainkit.files import Json

ALIGNMENT = 2
"""Version of how faces of template sets are aligned: raised where other landmarks are refused, so that no set packed
before is used."""

Resize = Literal["no", "down", "any"]

_log = logging.getLogger(__name__)
_IN_MEMORY = 16 << 20
"""Bytes of hashes of originals, 16 of each image, beyond which they are kept in a file beside the set."""
_AT_ONCE = 1 << 16
_COUNTED = 1000
"""Unusable images after which a set that is to be whole is read no further."""


@dataclass(frozen=True)
class Report:
    """The outcome of an import."""

    out: Path
    kind: str
    rows: int
    classes: int
    store: Store
    digest: str
    notes: list[str] = field(default_factory=list)
    """Sentences about what is odd but usable, and about what was skipped."""
    groups: int = 0
    """How many people, videos or alphabets the images are of, where that is known."""


class Options(TypedDict, total=False):
    """Options that every import of images takes; see `import_pictures`."""

    damaged: Literal["fail", "skip"]
    damaged_most: float
    store: Store | None
    on_progress: Progress | None
    protocol: Protocol | None
    columns: Columns | None


def import_pictures(
    source: Path | str | Source,
    out: Path | str,
    *,
    size: tuple[int, int] | None,
    fit: Fit = "no",
    group: str | None = None,
    damaged: Literal["fail", "skip"] = "fail",
    damaged_most: float = 1.0,
    store: Store | None = None,
    on_progress: Progress | None = None,
    protocol: Protocol | None = None,
    columns: Columns | None = None,
    key: str | None = None,
) -> Report:
    """Convert a set of labelled images to the packed form at `out`, which must not exist yet.

    Images are brought to `size` (height, width) as `fit` says (`image_decode.fit`); with `size` None they keep their
    own sizes and are stored encoded. `group` is a regular expression with one group in parentheses, which finds in a
    image's id (relative path, or `image_path`) the person, video or alphabet that no two splits may share.
    Faces of a source that is not aligned are warped by their five landmarks to the ArcFace template. `damaged: skip`
    leaves damaged images out, up to the share `damaged_most` of all, and names them in the report. With a `protocol` it
    is an evaluation set: its rows have no class. `columns` as `sources.open_source` takes them. An import of equal
    `key`, which follows from the files of the source where it is not given, resumes one that was killed.
    Raises UserError for damaged images: up to 20 are named by file and row, the rest counted, up to 1,000.
    """
    if not isinstance(source, Source):
        source = sources.open_source(source, network=True, columns=columns)
    _check_asked(source, protocol, damaged)
    if store is None:
        small = size is not None and 3 * size[0] * size[1] * source.size < image_store.DECODED_LIMIT
        store = "decoded" if small else "encoded"
    recipe = _Recipe(size, fit, not source.aligned, sources.grouping(group) if group is not None else None)
    if key is None and source.files:
        made = [columns, size, fit, group, damaged, store, type(protocol).__name__]
        key = cache.key([source.kind, source.where, source.split, *made], source.files)
    rows = _Rows(damaged == "skip", Path(out).parent)
    with Writer(Path(out), size=size, store=store, key=key or "", state=rows.state) as writer:
        rows.restore(writer.restored)
        if rows.done:
            _log.info("%s: resuming after %s", source.where, number_of(rows.done, "images"))
        for made in _prepare(source, recipe, rows.done):
            if not rows.add(writer, made):
                break
            if on_progress:
                on_progress(rows.done, source.size)
        if rows.bad and (damaged == "fail" or len(rows.bad) > damaged_most * source.size):
            remedy = "repair or remove them, or import with --damaged skip, which leaves them out and lists them"
            raise unusable(source.where, rows.bad, remedy)
        return rows.finish(writer, source, protocol)


def _check_asked(source: Source, protocol: Protocol | None, damaged: str) -> None:
    if source.size == 0:
        raise UserError(source.where, "no images", "at least one")
    folders.check_names(source.where, source.names or ())
    if protocol is not None and damaged == "skip":
        raise UserError(source.where, "damaged images to be skipped", "all images of an evaluation set")


class _Rows:
    """The rows of a packed set while it is written, and sentences about unusable images.

    Of each row 4 bytes are kept in memory, and 4 more where it has a group: both are numbered as they come, and sorted
    at the end.
    """

    def __init__(self, skip: bool, beside: Path):
        self._skip, self._labels, self._groups = skip, _Numbered(), _Numbered()
        self._originals = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(beside))  # noqa: SIM115 - until it is packed
        self._without_group = ""
        self.done = 0
        self._new: list[Json] = []
        self.bad: list[str] = []

    def add(self, writer: Writer, made: _Made | UserError) -> bool:
        """Write an image, or note why there is none; False where no more need be read."""
        if isinstance(made, UserError):
            self._note(str(made))
            return self._skip or len(self.bad) < _COUNTED
        if self.bad and not self._skip:
            self._note(None)
            return True
        record = made.record
        first_without = record.id if record.group is None and not self._without_group else ""
        self._note((record.label, record.group, first_without, made.original.hex()))
        writer.add_image(record.id, made.pixels, made.encoded)
        return True

    def _note(self, note: Json) -> None:
        self._new.append(note)
        self._take(note)

    def _take(self, note: Json) -> None:
        """Take up what is to be known of a record: facts of its image, why it has none, or None for one not written."""
        self.done += 1
        if isinstance(note, str):
            self.bad.append(note)
        elif note is not None:
            label, group, without_group, original = note
            self._labels.add(label)
            if group is not None:  # where some rows have one, all must
                self._groups.add(group)
            self._without_group = self._without_group or without_group
            self._originals.write(bytes.fromhex(original))

    def state(self) -> list[Json]:
        """Return what another process needs to resume here, beside what it was given before."""
        new, self._new = self._new, []
        return new

    def restore(self, states: Sequence[list[Json]]) -> None:
        """Resume what another process left."""
        for note in chain.from_iterable(states):
            self._take(note)

    def finish(self, writer: Writer, source: Source, protocol: Protocol | None) -> Report:
        """Publish the set. Raises UserError where it has no row."""
        if not writer.rows:
            found = "no usable image" if self.bad else "no images"
            raise UserError(source.where, found, "" if self.bad else "at least one", "; ".join(self.bad[:3]))
        numbers, names, renumbered = np.broadcast_to(np.int32(-1), writer.rows), [], False
        if protocol is None:
            numbers, names, renumbered = self._labels.sorted()
            if source.names:
                names = [source.names[int(name)] for name in names]
        self._originals.seek(0)
        result = writer.finish(
            labels=numbers,
            class_names=names,
            **self._group_numbers(source),
            protocol=protocol,
            made_from=f"{source.kind} {Path(source.where).name}",
            originals=iter(lambda: self._originals.read(1 << 20), b""),
        )
        notes = [f"left out: {text}" for text in source.left_out] + [f"skipped: {text}" for text in self.bad]
        if renumbered:
            notes.append(f"labels were not 0 to {len(names) - 1} and were renumbered; names.json has the originals")
        return Report(
            result.path,
            source.kind,
            len(result),
            result.classes,
            result.store,
            result.digest,
            notes + verify_images.oddities(result),
            len(result.group_names),
        )

    def _group_numbers(self, source: Source) -> dict[str, Any]:
        if not self._groups.values:
            return {}
        if self._without_group:
            raise UserError(f"{source.where}, {self._without_group}", "no group", "one for every image, or for none")
        numbers, names, _ = self._groups.sorted()
        return {"groups": numbers, "group_names": names}


class _Numbered:
    """A label of each row, as a number in the order in which labels came."""

    def __init__(self) -> None:
        self.values: dict[int | str, int] = {}
        self._numbers = array("i")

    def add(self, value: int | str) -> None:
        """Note the label of a row."""
        self._numbers.append(self.values.setdefault(value, len(self.values)))

    def sorted(self) -> tuple[np.ndarray, list[str], bool]:
        """Return numbers 0, 1, ... in the order of labels, these as names, and True if integers had to change.

        It is asked once, and no label is added after that.
        """
        distinct = sorted(self.values, key=lambda label: (isinstance(label, str), label))
        place, numbers = np.empty(len(distinct), np.int32), np.frombuffer(self._numbers, np.int32)
        place[[self.values[label] for label in distinct]] = np.arange(len(distinct))
        for begin in range(0, len(numbers), _AT_ONCE):  # in place: a set of millions has no second list of them
            numbers[begin : begin + _AT_ONCE] = place[numbers[begin : begin + _AT_ONCE]]
        renumbered = any(not isinstance(label, str) and label != position for position, label in enumerate(distinct))
        return numbers, [str(label) for label in distinct], renumbered


def pack_once(
    found: Source | Evaluation,
    size: tuple[int, int] | None,
    fit: Fit = "no",
    group: str | None = None,
) -> Packed:
    """Pack a source once, also where processes start together; a large `.rec` is read in place, not packed.

    `size`, `fit` and `group` as in `import_pictures`, whose UserErrors this raises.
    """
    # How it is read is part of it: the form of the source, its split, what is done to images.
    split = found.split if isinstance(found, Source) else None
    made = [image_store.FORMAT, image_store.VERSION, found.kind, found.where, split, size, fit, group]
    made += [columns] if (columns := getattr(found, "columns", ())) else []
    if found.kind == "templates":
        made.append(f"aligned {ALIGNMENT}")
    left_out = found.left_out if isinstance(found, Source) else ()
    for sentence in left_out:  # also where it is packed: an empty folder that was added since changes no file
        _log.warning("%s: left out: %s", found.where, sentence)
    key = cache.key(made, found.files)
    if isinstance(found, Source) and size is not None and not (group or cache.is_there(key)):
        opened = record_store.in_place(found, size, fit)
        if opened is not None:
            return opened

    def make(folder: Path, on_progress: Progress) -> None:
        source, protocol = found.read() if isinstance(found, Evaluation) else (found, None)
        report = import_pictures(
            source, folder, size=size, fit=fit, group=group, protocol=protocol,
            on_progress=on_progress, key=folder.name,
        )  # fmt: skip
        for note in report.notes[len(left_out) :]:
            _log.warning("%s: %s", source.where, note)

    return cache.pack_once(key, Packed, make, f"packing {found.where}")


def import_faces(
    source: Path | str | Source,
    out: Path | str,
    *,
    image_size: int = 112,
    resize: Resize = "no",
    **options: Unpack[Options],
) -> Report:
    """Convert a set of faces to squares in the packed form; see `import_pictures`, which raises what this raises."""
    if not isinstance(source, Source):
        source = sources.open_source(source, nested=False, network=True, columns=options.pop("columns", None))
    return import_pictures(source, out, size=(image_size, image_size), fit=resize, **options)


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


def _prepare(source: Source, recipe: _Recipe, begin: int) -> Iterator[_Made | UserError]:
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
    return each(one, islice(source.records(), begin, None), threads(), 2 if recipe.size is None else 64)


def _one(record: Record, recipe: _Recipe) -> _Made:
    folders.check_names(record.where, (record.id, str(record.label), record.group or ""))
    data = image_decode.read(record.data, record.where) if isinstance(record.data, Path) else record.data
    pixels = image_decode.decode(data, record.where) if isinstance(data, bytes) else data
    original = pixels
    if recipe.align:
        if record.landmarks is None:
            raise UserError(record.where, "no landmarks", "five points")
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
    kept = data if isinstance(data, bytes) and pixels is original and image_decode.stored_as_is(data) else None
    return _Made(record, np.ascontiguousarray(pixels.transpose(2, 0, 1)), hashed.digest(), kept)


def unusable(where: str, bad: Sequence[str], remedy: str) -> UserError:
    """Return what to raise about unusable images of a set: the first by name, and how many there are."""
    count = f"{number_of(len(bad), 'unusable images', 'unusable image')}{' or more' * (len(bad) == _COUNTED)}"
    return UserError(where, f"{count}:{listing(bad)}\n", remedy=remedy)

"""InsightFace's training sets: `train.rec`, `train.idx` and `property`, read without mxnet.

A `.rec` file is a row of records (dmlc RecordIO). Each is one or more parts; a part is

    u32 magic 0xced7230a | u32: 3 bits flag, 29 bits length | payload | 0 to 3 bytes of padding to a multiple of 4

with flag 0 for a whole record and 1, 2, 3 for the first, middle and last part of one that was split wherever the magic
number stood in its payload: there the magic number is left out, and is put back between the parts on reading.

The payload of an image is a header (u32 count, f32 label, u64, u64), `count` f32 labels that replace the one in the
header where count > 0, and the encoded image. Record 0 of a face set is no image: its two labels (a, b) say that
records 1 .. a-1 are images and a .. b-1 describe people (each the range of its images).

A set of millions is read in place through a table of numbers: where each record of an image begins and ends, and the
label in its header. It is made once, in one pass over both files that hashes them too, and kept in the cache under
their sizes and times. Records are read with `pread`: a mapped file that is cut on a network disk ends the process.
"""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainkit import files
from trainkit.data import cache, folders
from trainkit.data.record import Record, Source
from trainkit.data.rows import row_files
from trainkit.errors import UserError

KIND = "InsightFace RecordIO"
MAGIC = 0xCED7230A
KEY, BEGIN, END, LABEL = range(4)
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_PART = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_HEAD = _PART.size + _HEADER.size + 4
"""Bytes from the begin of a record to the end of the first label that it may have."""
_KEPT = 1 << 20
"""Size of an index, in bytes, from which the table is kept in the cache."""
_AHEAD = 32 << 10
"""Bytes of a record that are asked for at first, since its length stands in it: enough for the image of a face."""
_PIECE, _DIGITS, _AT_ONCE = 2 << 20, 18, 1 << 20


@dataclass(frozen=True, eq=False)
class Table:
    """The images of a `.rec`, in the order of their keys."""

    numbers: np.ndarray
    """int64 (4, images): the key of each, where its record begins and ends, and the label in its header; -1 for none
    that could be. Mapped where there are many."""
    digest: str
    """SHA-256 of the index, of the labels, and of the CRC-32 of each 2 MiB of the file."""


def insightface(root: Path) -> Source:
    """Open a folder with `train.rec` and `train.idx`. Raises UserError naming the record that is damaged."""
    rec = root / "train.rec" if root.is_dir() else root
    people, place = _people(rec.with_name("property")), _place(rec)
    kept = open_table(rec) if place is None or place.is_file() else None
    spans, pictures = (kept.numbers, slice(None)) if kept is not None else read_spans(rec)
    numbers = spans[:, pictures]

    def read(rows: Iterable[int]) -> Iterator[Record]:
        with rec.open("rb", buffering=0) as file:
            for row in rows:
                key, begin, end = numbers[:LABEL, row].tolist()
                where = f"{rec}, record {key}"
                labels, picture = unpack(read_record(file.fileno(), begin, end, where), where)
                label = float(labels[0])
                if not (label >= 0 and label.is_integer()) or (people is not None and label >= people):
                    expected = "a whole number from 0" + (f" to {people - 1} (file property)" if people else "")
                    raise UserError(where, f"label {label}", expected)
                yield Record(f"record {key}", int(label), picture, where)

    def labelled() -> tuple[Iterator[str], np.ndarray]:
        table = kept or open_table(rec, (spans, pictures))
        return names(numbers), table.numbers[LABEL]

    every, made_of = range(numbers.shape[1]), (rec, rec.with_suffix(".idx"))
    return Source(KIND, str(rec), len(every), lambda: read(every), made_of, some=read, labelled=labelled)


def names(numbers: np.ndarray) -> Iterator[str]:
    """Yield what the images of a table are called."""
    for first in range(0, numbers.shape[1], _AT_ONCE):
        yield from (f"record {key}" for key in numbers[KEY, first : first + _AT_ONCE].tolist())


def read_spans(rec: Path) -> tuple[np.ndarray, slice]:
    """Return of every record its key and where it begins and ends, int64 (3, records), and which are images.

    Raises UserError for an index that does not fit the file, or files without an image.
    """
    idx = rec.with_suffix(".idx")
    if not idx.is_file():
        raise UserError(str(idx), "is missing", "the index that belongs to the .rec file")
    index = read_index(idx)
    spans = np.vstack([*index.T, _ends(index, rec)])
    with rec.open("rb", buffering=0) as file:
        pictures = _pictures(rec, spans, file.fileno())
    if not spans[:, pictures].size:
        raise UserError(str(rec), "no images", "at least one")
    return spans, pictures


def _place(rec: Path) -> Path | None:
    """Return where the table of a `.rec` is kept; None where there are so few images that it is not."""
    made_of = rec, rec.with_suffix(".idx"), rec.with_name("property")
    small = not made_of[1].is_file() or made_of[1].stat().st_size < _KEPT
    return None if small else cache.place(f"recordio-{cache.key(['recordio', 2], made_of)}.npy")


def open_table(rec: Path, given: tuple[np.ndarray, slice] | None = None) -> Table:
    """Return where the images of a `.rec` are, from the cache where there are many and it has been made before.

    `given` is what `read_spans` returned, if it was asked. Raises UserError as that does.
    """
    file = _place(rec)
    if file is None:
        return _made(rec, given or read_spans(rec), lambda done, total: None)
    about = file.with_suffix(".json")

    def write(on_progress: cache.Progress) -> None:
        table = _made(rec, given or read_spans(rec), on_progress)
        aside = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.npy")
        np.save(aside, table.numbers, allow_pickle=False)
        files.write_aside(about, f'"{table.digest}"')
        aside.rename(file)

    cache.make_once(file, Path.is_file, write, f"reading the headers of {rec}", "record")
    digest, size = folders.read_json(about, 1000, "a digest"), rec.stat().st_size
    numbers = np.load(file, allow_pickle=False) if files.on_network(file.parent) else row_files.mapped(file)
    if numbers.dtype != np.int64 or numbers.ndim != 2 or len(numbers) != 4 or not numbers.size:
        raise UserError(str(file), f"{numbers.dtype} {numbers.shape}", "int64 (4, images)", "remove the file")
    if numbers[BEGIN].min() < 0 or numbers[END].max() > size:
        raise UserError(str(file), "records outside of their file", remedy="remove the file")
    return Table(numbers, str(digest))


def _made(rec: Path, given: tuple[np.ndarray, slice], on_progress: cache.Progress) -> Table:
    spans = given[0][:, given[1]]
    with rec.open("rb", buffering=0) as file:
        labels, sums = _pass_over(rec, file.fileno(), spans[BEGIN], on_progress)
    if (people := _people(rec.with_name("property"))) is not None:
        labels[labels >= people] = -1
    numbers = np.vstack([spans, labels])
    digest = hashlib.sha256(f"{KIND} 1\n{numbers.shape[1]}\n".encode() + np.asarray(sums, "<u4").tobytes())
    digest.update(numbers.data)
    return Table(numbers, digest.hexdigest())


def _pass_over(rec: Path, file: int, begins: np.ndarray, on_progress: cache.Progress) -> tuple[np.ndarray, list[int]]:
    """Read a file once: the label in the header of each record, int64, -1 where there is none that could be; and the
    CRC-32 of each piece. Reading a record checks its header."""
    labels, sums, size = np.full(len(begins), -1, np.int64), [], os.fstat(file).st_size
    order = np.argsort(begins, kind="stable")
    placed, data = begins[order], np.zeros(_PIECE + _HEAD, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(data, _HEAD)
    on_progress(0, len(begins))
    for at in range(0, size, _PIECE):
        count = os.preadv(file, [data.data], at)
        if count < min(_PIECE, size - at):
            raise UserError(str(rec), f"ends at byte {at + count}", f"{size} bytes")
        data[count:] = 0
        sums.append(zlib.crc32(data[: min(_PIECE, count)].data))
        first, last = np.searchsorted(placed, (at, at + _PIECE)).tolist()
        words = windows[placed[first:last] - at].view("<u4")
        label = np.where(words[:, 2] > 0, words[:, 8], words[:, 3]).view("<f4").astype(np.float64)
        whole = (label >= 0) & (label < 2**62) & (label == np.floor(label))
        labels[order[first:last]] = np.where(whole, label, -1)
        on_progress(last, len(begins))
    return labels, sums


def read_index(path: Path) -> np.ndarray:
    """Read keys and offsets from lines of `key<TAB>offset`, int64 (records, 2), in the order of keys.

    Raises UserError for a line that is none, or a key that comes again.
    """
    try:
        with path.open(encoding="ascii") as file, warnings.catch_warnings():
            warnings.simplefilter("error")  # such as of 1.5, which is read as 1
            index = np.loadtxt(file, np.int64, comments=None, ndmin=2)
    except (OSError, ValueError, OverflowError, Warning) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(str(path), f"cannot be read ({text})", "lines of a key and an offset") from None
    if not len(index) or index.shape[1] != 2:
        raise UserError(str(path), "no records", "lines of a key and an offset")
    index = index[np.argsort(index[:, 0], kind="stable")]
    odd = (index < 0).any(1) | (index >= 10**_DIGITS).any(1) | np.append(False, np.diff(index[:, 0]) == 0)
    for key, offset in index[odd][:1].tolist():
        raise UserError(f"{path}, record {key}", f"begins at byte {offset}", "each key once, and a place in the file")
    return index


def read_record(file: int, begin: int, end: int, where: str) -> bytes:
    """Return the payload of the record that begins at byte `begin` of an open file and must not reach beyond `end`."""
    ahead, offset = _read(file, begin, min(end - begin, _AHEAD), where), begin

    def take(at: int, count: int) -> bytes:
        inside = at + count - begin <= len(ahead)
        return ahead[at - begin : at + count - begin] if inside else _read(file, at, count, where)

    payload: list[bytes] = []
    wanted = (0, 1)
    while True:
        if offset + _PART.size > end:
            raise UserError(where, f"truncated at byte {offset}", f"a part header before byte {end}")
        magic, word = _PART.unpack(take(offset, _PART.size))
        if magic != MAGIC:
            raise UserError(where, f"bad magic {magic:#010x} at byte {offset}", f"{MAGIC:#010x}")
        flag, length = word >> 29, word & 0x1FFFFFFF
        if flag not in wanted:
            raise UserError(where, f"part flag {flag} at byte {offset}", f"{wanted[0]} or {wanted[1]}")
        at = offset + _PART.size
        if at + length > end:
            found = f"truncated or overlapping the next record: {length} bytes at byte {at}"
            raise UserError(where, found, f"at most {end - at}")
        payload.append(take(at, length))
        if flag in (0, 3):
            return _MAGIC_BYTES.join(payload)
        wanted = (2, 3)
        offset = at + (length + 3) // 4 * 4


def _read(file: int, at: int, count: int, where: str) -> bytes:
    try:
        data = os.pread(file, count, at)
    except OSError as error:
        raise UserError(where, f"cannot be read ({error.strerror or error})") from None
    if len(data) < count:
        raise UserError(where, f"truncated at byte {at + len(data)}", f"{count} bytes at byte {at}")
    return data


def unpack(payload: bytes, where: str) -> tuple[np.ndarray, bytes]:
    """Split a record into its labels, float32, and the encoded image."""
    if len(payload) < _HEADER.size:
        raise UserError(where, f"{len(payload)} bytes", f"a header of {_HEADER.size}")
    count, label, _, _ = _HEADER.unpack_from(payload)
    begin = _HEADER.size + 4 * count
    if begin > len(payload):
        raise UserError(where, f"{count} labels in {len(payload)} bytes", "labels that fit the record")
    if count == 0:
        return np.asarray([label], np.float32), payload[begin:]
    return np.frombuffer(payload, "<f4", count, _HEADER.size), payload[begin:]


def _people(path: Path) -> int | None:
    if not path.is_file():
        return None
    try:
        fields = [int(field) for field in path.read_text("ascii").strip().split(",")]
        if len(fields) != 3 or min(fields) < 1:
            raise ValueError
    except (OSError, ValueError):
        raise UserError(str(path), "cannot be parsed", "people,height,width") from None
    return fields[0]


def _ends(index: np.ndarray, rec: Path) -> np.ndarray:
    """Return where each record ends at the latest. Raises UserError for places outside of the file, or taken twice."""
    # A record ends before the next one begins: a length that says otherwise is damage, and is caught as such.
    try:
        size = rec.stat().st_size
    except OSError as error:
        raise UserError(str(rec), f"cannot be read ({error.strerror or error})", "a RecordIO file") from None
    order = np.argsort(index[:, 1], kind="stable")
    keys, begins = index[order].T
    if outside := np.flatnonzero(begins >= size)[:1].tolist():
        place = f"{rec}, record {keys[outside[0]]}"
        raise UserError(place, f"begins at byte {begins[outside[0]]}", f"a place within {size} bytes")
    if same := np.flatnonzero(begins[1:] == begins[:-1])[:1].tolist():
        found = f"overlaps record {keys[same[0] + 1]} at byte {begins[same[0]]}"
        raise UserError(f"{rec}, record {keys[same[0]]}", found, "one place each")
    ends = np.empty(len(index), np.int64)
    ends[order] = np.append(begins[1:], size)
    return ends


def _pictures(rec: Path, spans: np.ndarray, file: int) -> slice:
    """Return which records are images, in the order of their keys. Raises UserError where some are missing."""
    if spans[KEY, 0] != 0:
        return slice(None)
    where = f"{rec}, record 0"
    labels, picture = unpack(read_record(file, int(spans[BEGIN, 0]), int(spans[END, 0]), where), where)
    if picture or len(labels) < 2:
        return slice(None)
    first, last = labels[:2].tolist()
    if not (first >= 1 and last >= first and first.is_integer() and last.is_integer()):
        raise UserError(where, f"ranges {first} and {last}", "the ends of images and of people")
    many = int(first) - 1
    if many > spans.shape[1]:
        raise UserError(where, f"{many} images, but {spans.shape[1]} records in the index", "all of them")
    keys = spans[KEY, 1 : many + 1]
    missing = np.flatnonzero(keys != np.arange(1, len(keys) + 1))[:1].tolist()
    if missing or len(keys) < many:
        key = missing[0] + 1 if missing else spans.shape[1]
        raise UserError(f"{rec.with_suffix('.idx')}, record {key}", "is missing", f"all of 1 to {many}")
    return slice(1, many + 1)

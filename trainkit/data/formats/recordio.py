"""InsightFace's training sets: `train.rec`, `train.idx` and `property`, read without mxnet.

A `.rec` file is a row of records (dmlc RecordIO). Each is one or more parts; a part is

    u32 magic 0xced7230a | u32: 3 bits flag, 29 bits length | payload | 0 to 3 bytes of padding to a multiple of 4

with flag 0 for a whole record and 1, 2, 3 for the first, middle and last part of one that was split wherever the magic
number stood in its payload: there the magic number is left out, and is put back between the parts on reading.

The payload of an image is a header (u32 count, f32 label, u64, u64), `count` f32 labels that replace the one in the
header where count > 0, and the encoded image. Record 0 of a face set is no image: its two labels (a, b) say that
records 1 .. a-1 are images and a .. b-1 describe people (each the range of its images).

A set of millions is read in place through a table of numbers: where each record of an image begins and ends, and the
label in its header. It is made once, in a second for the index and one pass over the headers, and kept in the cache
under the sizes and times of both files.
"""

from __future__ import annotations

import mmap
import struct
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trainkit.data import cache, row_files
from trainkit.data.record import Record, Source
from trainkit.errors import UserError

MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_PART = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_KEPT = 100_000
"""Records from which the table is kept in the cache."""
_PIECE, _DIGITS, _AT_ONCE = 8 << 20, 18, 1 << 20
_KEY, _BEGIN, _END, _LABEL = range(4)


def insightface(root: Path) -> Source:
    """Open a folder with `train.rec` and `train.idx`. Raises UserError naming the record that is damaged."""
    rec = root / "train.rec" if root.is_dir() else root
    idx, properties = rec.with_suffix(".idx"), rec.with_name("property")
    if not idx.is_file():
        raise UserError(str(idx), "is missing", "the index that belongs to the .rec file")
    people = _people(properties)
    table = _table(rec, idx)
    if not len(table):
        raise UserError(str(rec), "no images", "at least one")

    def read(rows: Iterable[int]) -> Iterator[Record]:
        with rec.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for row in rows:
                key, begin, end, _ = table[row].tolist()
                where = f"{rec}, record {key}"
                labels, picture = unpack(record_at(data, begin, end, where), where)
                label = float(labels[0])
                if not (label >= 0 and label.is_integer()) or (people is not None and label >= people):
                    expected = "a whole number from 0" + (f" to {people - 1} (file property)" if people else "")
                    raise UserError(where, f"label {label}", expected)
                yield Record(f"record {key}", int(label), picture, where)

    def labelled() -> Iterator[tuple[str, int]]:
        for first in range(0, len(table), _AT_ONCE):
            for key, label in table[first : first + _AT_ONCE, [_KEY, _LABEL]].tolist():
                yield f"record {key}", label

    every = range(len(table))
    return Source(
        "InsightFace RecordIO", str(rec), len(table), lambda: read(every), (rec, idx), some=read, labelled=labelled
    )


def _table(rec: Path, idx: Path) -> np.ndarray:
    """Return of each image the key, where its record begins and ends, and its label; int64 (images, 4), mapped where
    there are many. Raises UserError for an index that does not fit the file."""
    file = cache.place(f"recordio-{cache.key(['recordio', 1], (rec, idx))}.npy")
    if not file.is_file():
        table = _made(rec, idx)
        if len(table) < _KEPT:
            return table

        def write(_: object) -> None:
            aside = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.npy")
            np.save(aside, table, allow_pickle=False)
            aside.rename(file)

        cache.make_once(file, Path.is_file, write, f"keeping the index of {rec}", "record")
    table, size = row_files.mapped(file), rec.stat().st_size
    if table.dtype != np.int64 or table.shape[1:] != (4,) or not len(table):
        raise UserError(str(file), f"{table.dtype} {table.shape}", "int64 (images, 4)", "remove the file")
    if table[:, _BEGIN].min() < 0 or table[:, _END].max() > size:
        raise UserError(str(file), "records outside of their file", remedy="remove the file")
    return table


def _made(rec: Path, idx: Path) -> np.ndarray:
    index = read_index(idx)
    spans = np.column_stack([index, _ends(index, rec)])
    with rec.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        chosen = spans[_pictures(rec, spans, data)]
        labels = _labels(np.frombuffer(data, "<u4", len(data) // 4), chosen[:, _BEGIN])
    return np.column_stack([chosen, labels])


def _labels(words: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the label in the header of each record, int64; -1 where there is none. Reading a record checks it."""
    found, last = np.full(len(begins), -1, np.int64), len(words) - 1
    numbers = words.view("<f4")
    for first in range(0, len(begins), _AT_ONCE):
        at = begins[first : first + _AT_ONCE] // 4
        several = words[np.minimum(at + 2, last)] > 0
        label = numbers[np.minimum(np.where(several, at + 8, at + 3), last)].astype(np.float64)
        whole = (label >= 0) & (label < 2**31) & (label == np.floor(label))
        found[first : first + _AT_ONCE] = np.where(whole, label, -1)
    return found


def read_index(path: Path) -> np.ndarray:
    """Read keys and offsets from lines of `key<TAB>offset`, int64 (records, 2), in the order of keys.

    Raises UserError naming the first line that is none, or has a key again.
    """
    pieces, rest = [], b""
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                whole, mark, rest = (rest + piece).rpartition(b"\n")
                pieces.append(_pairs(whole + mark))
            pieces.append(_pairs(rest))
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror or error})") from None
    found = [piece for piece in pieces if piece is not None]
    index = np.concatenate([np.empty((0, 2), np.int64), *found])
    index = index[np.argsort(index[:, 0], kind="stable")]
    if len(found) < len(pieces) or (index[1:, 0] == index[:-1, 0]).any():
        index = _line_by_line(path)
    if not len(index):
        raise UserError(str(path), "no records", "lines of a key and an offset")
    return index


def _pairs(lines: bytes) -> np.ndarray | None:
    """Parse lines of two numbers each; None where a line is anything else."""
    if lines.translate(None, b"0123456789 \t\r\n"):
        return None
    letters = np.frombuffer(lines, np.uint8)
    digit = np.concatenate([[False], letters >= ord("0"), [False]])
    begins = np.flatnonzero(digit[1:] & ~digit[:-1])
    ends = np.flatnonzero(digit[:-1] & ~digit[1:])
    line = np.searchsorted(np.flatnonzero(letters == ord("\n")), begins)
    if len(begins) % 2 or (line[::2] != line[1::2]).any() or (line[2::2] == line[1:-1:2]).any():
        return None
    if not len(begins):
        return np.empty((0, 2), np.int64)
    if (ends - begins).max() > _DIGITS:
        return None
    return np.fromstring(lines.decode("ascii"), np.int64, sep=" ").reshape(-1, 2)


def _line_by_line(path: Path) -> np.ndarray:
    """Read an index slowly. Raises UserError naming the line that is wrong."""
    offsets: dict[int, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                key, offset = map(int, line.split())
            except ValueError:
                raise UserError(f"{path}, line {number}", repr(line[:60]), "a key and an offset") from None
            if key in offsets or key < 0 or offset < 0:
                problem = "key again" if key in offsets else "negative number"
                raise UserError(f"{path}, line {number}", f"{problem}: {key} at {offset}", "each key once")
            if max(key, offset) >= 10**_DIGITS:
                raise UserError(f"{path}, record {key}", f"begins at byte {offset}", "a place within the file")
            offsets[key] = offset
    return np.asarray(sorted(offsets.items()), np.int64).reshape(-1, 2)


def record_at(data: mmap.mmap | bytes, offset: int, end: int, where: str) -> bytes:
    """Return the payload of the record that begins at `offset` and must not reach beyond `end`."""
    payload: list[bytes] = []
    wanted = (0, 1)
    while True:
        if offset + _PART.size > end:
            raise UserError(where, f"truncated at byte {offset}", f"a part header before byte {end}")
        magic, word = _PART.unpack_from(data, offset)
        if magic != MAGIC:
            raise UserError(where, f"bad magic {magic:#010x} at byte {offset}", f"{MAGIC:#010x}")
        flag, length = word >> 29, word & 0x1FFFFFFF
        if flag not in wanted:
            raise UserError(where, f"part flag {flag} at byte {offset}", f"{wanted[0]} or {wanted[1]}")
        begin = offset + _PART.size
        if begin + length > end:
            found = f"truncated or overlapping the next record: {length} bytes at byte {begin}"
            raise UserError(where, found, f"at most {end - begin}")
        payload.append(bytes(data[begin : begin + length]))
        if flag in (0, 3):
            return _MAGIC_BYTES.join(payload)
        wanted = (2, 3)
        offset = begin + (length + 3) // 4 * 4


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
    ends[order] = [*begins[1:].tolist(), size]
    return ends


def _pictures(rec: Path, spans: np.ndarray, data: mmap.mmap) -> slice:
    """Return which records are images, in the order of their keys. Raises UserError where some are missing."""
    if spans[0, _KEY] != 0:
        return slice(None)
    where = f"{rec}, record 0"
    labels, picture = unpack(record_at(data, int(spans[0, _BEGIN]), int(spans[0, _END]), where), where)
    if picture or len(labels) < 2:
        return slice(None)
    first, last = labels[:2].tolist()
    if not (first >= 1 and last >= first and first.is_integer() and last.is_integer()):
        raise UserError(where, f"ranges {first} and {last}", "the ends of images and of people")
    many = int(first) - 1
    if many > len(spans):
        raise UserError(where, f"{many} images, but {len(spans)} records in the index", "all of them")
    missing = np.flatnonzero(spans[1 : many + 1, _KEY] != np.arange(1, min(many, len(spans) - 1) + 1))[:1].tolist()
    if missing or many > len(spans) - 1:
        key = missing[0] + 1 if missing else len(spans)
        raise UserError(f"{rec.with_suffix('.idx')}, record {key}", "is missing", f"all of 1 to {many}")
    return slice(1, many + 1)

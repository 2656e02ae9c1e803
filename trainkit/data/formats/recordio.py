"""InsightFace's training sets: `train.rec`, `train.idx` and `property`, read without mxnet.

A `.rec` file is a row of records (dmlc RecordIO). Each is one or more parts; a part is

    u32 magic 0xced7230a | u32: 3 bits flag, 29 bits length | payload | 0 to 3 bytes of padding to a multiple of 4

with flag 0 for a whole record and 1, 2, 3 for the first, middle and last part of one that was split wherever the magic
number stood in its payload: there the magic number is left out, and is put back between the parts on reading.

The payload of an image is a header (u32 count, f32 label, u64, u64), `count` f32 labels that replace the one in the
header where count > 0, and the encoded image. Record 0 of a face set is no image: its two labels (a, b) say that
records 1 .. a-1 are images and a .. b-1 describe people (each the range of its images).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainkit.data.record import Record, Source
from trainkit.errors import UserError

MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_PART = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")


def insightface(root: Path) -> Source:
    """Open a folder with `train.rec` and `train.idx`. Raises UserError naming the record that is damaged."""
    rec = root / "train.rec" if root.is_dir() else root
    idx, properties = rec.with_suffix(".idx"), rec.with_name("property")
    if not idx.is_file():
        raise UserError(str(idx), "is missing", "the index that belongs to the .rec file")
    people = _people(properties)
    offsets = read_index(idx)
    ends = _ends(offsets, rec)
    keys = _picture_keys(rec, offsets, ends)
    if not keys:
        raise UserError(str(rec), "no images", "at least one")

    def records() -> Iterator[Record]:
        with rec.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for key in keys:
                where = f"{rec}, record {key}"
                labels, picture = unpack(record_at(data, offsets[key], ends[key], where), where)
                label = float(labels[0])
                if not (label >= 0 and label.is_integer()) or (people is not None and label >= people):
                    expected = "a whole number from 0" + (f" to {people - 1} (file property)" if people else "")
                    raise UserError(where, f"label {label}", expected)
                yield Record(f"record {key}", int(label), picture, where)

    return Source("InsightFace RecordIO", str(rec), len(keys), records, (rec, idx))


def read_index(path: Path) -> dict[int, int]:
    """Read key to offset from lines of `key<TAB>offset`."""
    offsets: dict[int, int] = {}
    try:
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
                offsets[key] = offset
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror or error})") from None
    if not offsets:
        raise UserError(str(path), "no records", "lines of a key and an offset")
    return offsets


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


def _ends(offsets: dict[int, int], rec: Path) -> dict[int, int]:
    # A record ends before the next one begins: a length that says otherwise is damage, and is caught as such.
    try:
        size = rec.stat().st_size
    except OSError as error:
        raise UserError(str(rec), f"cannot be read ({error.strerror or error})", "a RecordIO file") from None
    order = sorted(offsets, key=offsets.__getitem__)
    ends: dict[int, int] = {}
    for key, follower in zip(order, [*order[1:], None], strict=True):
        end = size if follower is None else offsets[follower]
        if offsets[key] >= size:
            raise UserError(f"{rec}, record {key}", f"begins at byte {offsets[key]}", f"a place within {size} bytes")
        if offsets[key] == end:
            raise UserError(f"{rec}, record {key}", f"overlaps record {follower} at byte {end}", "one place each")
        ends[key] = end
    return ends


def _picture_keys(rec: Path, offsets: dict[int, int], ends: dict[int, int]) -> list[int]:
    if 0 not in offsets:
        return sorted(offsets)
    where = f"{rec}, record 0"
    with rec.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        payload = record_at(data, offsets[0], ends[0], where)
    labels, picture = unpack(payload, where)
    if picture or len(labels) < 2:
        return sorted(offsets)
    first, last = labels[:2].tolist()
    if not (first >= 1 and last >= first and first.is_integer() and last.is_integer()):
        raise UserError(where, f"ranges {first} and {last}", "the ends of images and of people")
    keys = range(1, int(first))
    if int(first) - 1 > len(offsets):
        raise UserError(where, f"{int(first) - 1} images, but {len(offsets)} records in the index", "all of them")
    for key in keys:
        if key not in offsets:
            raise UserError(f"{rec.with_suffix('.idx')}, record {key}", "is missing", f"all of 1 to {int(first) - 1}")
    return list(keys)

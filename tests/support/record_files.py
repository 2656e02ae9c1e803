"""Files such as InsightFace's: `train.rec`, `train.idx` and `property`."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image

MAGIC = struct.pack("<I", 0xCED7230A)


def parts(payload: bytes) -> bytes:
    """What dmlc's writer makes of a payload: split wherever the magic number stands at a multiple of four."""
    cuts, at = [], 0
    for place in range(0, len(payload) - 3, 4):
        if payload[place : place + 4] == MAGIC:
            cuts.append((at, place))
            at = place + 4
    cuts.append((at, len(payload)))
    out = b""
    for i, (begin, end) in enumerate(cuts):
        flag = 0 if len(cuts) == 1 else 1 if i == 0 else 3 if i == len(cuts) - 1 else 2
        out += MAGIC + struct.pack("<I", flag << 29 | end - begin) + payload[begin:end]
        out += b"\0" * (-(end - begin) % 4)
    return out


def record(key: int, labels: list[float], data: bytes) -> bytes:
    if len(labels) == 1:
        return parts(struct.pack("<IfQQ", 0, labels[0], key, 0) + data)
    return parts(struct.pack("<IfQQ", len(labels), 0, key, 0) + struct.pack(f"<{len(labels)}f", *labels) + data)


def write(folder: Path, records: dict[int, bytes], people: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    offset, lines = 0, []
    for key, data in records.items():
        lines.append(f"{key}\t{offset}")
        offset += len(data)
    (folder / "train.rec").write_bytes(b"".join(records.values()))
    (folder / "train.idx").write_text("\n".join(lines) + "\n")
    (folder / "property").write_text(f"{people},8,8")
    return folder


def face(seed: int, side: int = 16, form: str = "JPEG") -> bytes:
    """An encoded image of noise, whose left upper corner is darker than the rest."""
    pixels = np.random.default_rng(seed).integers(40, 256, (side, side, 3), dtype=np.uint8)
    pixels[: side // 2, : side // 2] //= 2
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


def faces(folder: Path, people: int = 6, each: int = 8, side: int = 16) -> Path:
    """A set as InsightFace's, with the ranges of people behind the images. Labels are numbers and lists, images JPEG
    and PNG; one record is split where the magic number stands in it, and of person 1 there are no images."""
    images = people * each
    records = {0: record(0, [images + 1, images + 1 + people], b"")}
    for row in range(images):
        label = row // each + (row >= each)
        data = face(row, side, "PNG" if row % 7 == 3 else "JPEG")
        data = data + bytes(-(len(data) + 24) % 4) + MAGIC + b"rest" if row == 5 else data
        records[row + 1] = record(row + 1, [label] if row % 2 else [label, 0.5], data)
    for person in range(people):
        records[images + 1 + person] = record(0, [1 + person * each, 1 + (person + 1) * each], b"")
    return write(folder, records, people + 1)

"""Small files that claim to be large, or become so when they are unpacked, each in the hands of its reader."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import archive_bombs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scene_bombs

from trainkit.autoconfig import archive
from trainkit.data import sources
from trainkit.data.formats import image_decode, insightface_bin, nifti, recordio
from trainkit.data.people import sources as people_sources
from trainkit.data.people import tokenizer
from trainkit.data.scenes.files import Scene, header, read_mask

MB = 1 << 20


def _png(side: int, *between: bytes) -> bytes:
    """A black image of one bit a pixel: 47 KB are 400 million pixels."""
    rows = zlib.compress(b"\0" * ((side // 8 + 1) * side), 9)
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), *between, b"IDAT" + rows, b"IEND"]
    framed = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def _webp(side: int) -> bytes:
    """A lossless image, cut short behind its size: decoders take memory for it when they open it."""
    stream = io.BytesIO()
    from PIL import Image

    Image.new("RGB", (64, 64)).save(stream, "WEBP", lossless=True)
    data = bytearray(stream.getvalue())
    bits = struct.unpack_from("<I", data, 21)[0]
    struct.pack_into("<I", data, 21, bits & ~0xFFFFFFF | (side - 1) | (side - 1) << 14)
    return bytes(data)


def _jpeg(side: int, exif: bytes = b"") -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, "JPEG", **({"exif": exif} if exif else {}))
    data = bytearray(stream.getvalue())
    place = data.index(b"\xff\xc0") + 5
    if side:
        struct.pack_into(">HH", data, place, side, side)
    return bytes(data)


def _exif(entries: int) -> bytes:
    """Entries of which each claims 4 GB elsewhere, and a next directory that is this one."""
    one = struct.pack("<HHII", 0x0112, 7, 0xFFFFFFFF, 8)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + struct.pack("<H", entries) + one * entries + struct.pack("<I", 8)


def _nifti(side: int, compressed: bool, behind: int = 0) -> bytes:
    import nibabel

    head = nibabel.Nifti1Header(endianness="<")
    head.set_data_dtype(np.float32)
    head["dim"] = [3, side, side, side, 1, 1, 1, 1]
    head.set_sform(np.eye(4), 1)
    head["vox_offset"], head["magic"] = 352, b"n+1"
    data = head.binaryblock + bytes(4) + bytes(behind)
    return gzip.compress(data, 9) if compressed else data


def _parquet(rows: int, value: int, column: str = "image", label: str = "label") -> bytes:
    """One large value that all rows refer to, in some 1,000 bytes."""
    text = b"a" * value
    stream = io.BytesIO()
    kinds = {"image": pa.binary(), "caption": pa.string()}
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text], kinds[column]))
    part = pa.table({column: same, label: pa.array(np.arange(rows) % 2)})
    once = {"use_dictionary": True, "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(part, stream, compression="zstd", store_schema=False, write_statistics=False, **once)
    return stream.getvalue()


def _people_parquet(rows: int, value: int) -> bytes:
    text = pa.array(["a" * value])
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), text)
    person = pa.array([str(row % 3) for row in range(rows)])
    stream = io.BytesIO()
    table = pa.table({"person": person, "caption": same, "path": same, "modality": pa.array(["text"] * rows)})
    pq.write_table(table, stream, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False)
    return stream.getvalue()


def _arrow(megabytes: int) -> bytes:
    """A stream whose buffers are compressed: `datasets` writes none such."""
    sink = io.BytesIO()
    table = pa.table({"image": pa.array([bytes(megabytes * MB)]), "label": pa.array([0])})
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _saved(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "data.arrow").write_bytes(content)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return folder


def _bin_that_copies(text: int, times: int) -> bytes:
    """One long text, turned into bytes anew for each of its images."""
    out = b"\x80\x02c_codecs\nencode\nq\x00X" + struct.pack("<I", text) + b"a" * text + b"q\x01X\x06\0\0\0latin1q\x020"
    out += b"00" + b"]q\x03("
    out += b"h\x00h\x01h\x02\x86R" * times
    return out + b"e](" + b"\x88" * (times // 2) + b"e\x86."


def _bin_that_repeats(size: int, times: int) -> bytes:
    """One large image, named again and again."""
    out = b"\x80\x03B" + struct.pack("<I", size) + bytes(size) + b"q\x000](" + b"h\x00" * times
    return out + b"e](" + b"\x88" * (times // 2) + b"e\x86."


def _rec_that_claims(folder: Path) -> Path:
    folder.mkdir()
    part = struct.pack("<II", recordio.MAGIC, 0x1FFFFFFF) + struct.pack("<IfQQ", 0xFFFFFFFF, 0.0, 0, 0)
    (folder / "train.rec").write_bytes(part + bytes(100))
    (folder / "train.idx").write_text("0\t0\n")
    return folder


def _records(path: Path) -> None:
    for record in sources.open_source(path).records():
        image_decode.decode(record.data, record.where)


def _people(path: Path) -> None:
    people_sources.find(str(path))


def _unpacked(path: Path) -> None:
    archive.unpack(path, path.parent / "set")


def _written(name: str, content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content())
        return path

    return make


def _picture(path: Path) -> Any:
    return image_decode.decode(image_decode.read(path, str(path)), str(path))


def _mask(path: Path) -> Any:
    scene = Scene("x", path, path, str(path))
    header(scene)
    return read_mask(scene)


BOMBS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "PNG of 20,000 x 20,000 in 50 KB": (_written("a.png", lambda: _png(20_000)), _picture),
    "PNG of 10,000 x 10,000 in 12 KB": (_written("a.png", lambda: _png(10_000)), _picture),
    "mask of 20,000 x 20,000": (_written("a.png", lambda: _png(20_000)), _mask),
    "mask of 10,000 x 10,000": (_written("a.png", lambda: _png(10_000)), _mask),
    "PNG with 64 MB of text": (
        _written("a.png", lambda: _png(64, b"zTXt" + b"a\0\0" + zlib.compress(bytes(64 * MB), 1))),
        _picture,
    ),
    "PNG with a profile of 64 MB": (
        _written("a.png", lambda: _png(64, b"iCCP" + b"a\0\0" + zlib.compress(bytes(64 * MB), 1))),
        _picture,
    ),
    "WebP of 16,384 x 16,384": (_written("a.webp", lambda: _webp(16_384)), _picture),
    "PGM of 20,000 x 20,000": (_written("a.pgm", lambda: b"P5 20000 20000 255\n" + bytes(100)), _picture),
    "PPM of 7,000 x 7,000 in 100 bytes": (_written("a.ppm", lambda: b"P3 7000 7000 255\n" + b"1 " * 50), _picture),
    "PGM with 64 MB of comments": (_written("a.pgm", lambda: b"P2 #" + b"a" * (64 * MB) + b"\n2 2 255\n"), _picture),
    "JPEG of 65,500 x 65,500": (_written("a.jpg", lambda: _jpeg(65_500)), _picture),
    "JPEG with Exif that claims 4 GB": (_written("a.jpg", lambda: _jpeg(0, _exif(4000))), _picture),
    "NIfTI of 256 GB in 350 bytes": (_written("a.nii", lambda: _nifti(4096, False)), nifti.read_image),
    "NIfTI of 256 GB in 70 bytes": (_written("a.nii.gz", lambda: _nifti(4096, True)), nifti.read_image),
    "NIfTI of 2 GB in 100 KB": (_written("a.nii.gz", lambda: _nifti(812, True, 20 * MB)), nifti.read_image),
    "NIfTI with 64 MB behind it": (_written("a.nii.gz", lambda: _nifti(8, True, 64 * MB)), nifti.read_image),
    "parquet whose rows are one image of 8 MB": (_written("a.parquet", lambda: _parquet(100_000, 8 * MB)), _records),
    "parquet of 300 MB in 20 KB": (_written("a.parquet", lambda: _parquet(4, 300 * MB)), _records),
    "people whose captions are one text of 8 MB": (
        _written("a.parquet", lambda: _people_parquet(100_000, 8 * MB)),
        _people,
    ),
    "Arrow stream of 300 MB in 20 KB": (lambda folder: _saved(folder / "saved", _arrow(300)), _records),
    "InsightFace .bin that makes 300 GB": (
        _written("a.bin", lambda: _bin_that_copies(MB, 300_000)),
        lambda path: insightface_bin.read_bin(path),
    ),
    "InsightFace .bin of one image 300,000 times": (
        _written("a.bin", lambda: _bin_that_repeats(MB, 300_000)),
        lambda path: insightface_bin.read_bin(path),
    ),
    "records that claim 4 GB": (lambda folder: _rec_that_claims(folder / "rec"), _records),
    "merges of 75 MB in 300 KB": (
        _written("a.txt.gz", lambda: gzip.compress(b"a b\n" * (19 * MB), 1)),
        tokenizer.read_merges,
    ),
    **{name: (_written(*given), _unpacked) for name, given in archive_bombs.ARCHIVES.items()},
    **scene_bombs.BOMBS,
}  # fmt: skip
"""What writes the file into a folder, and what reads it."""

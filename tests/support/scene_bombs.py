"""Small or plain files of scenes and images that would take much memory or time, each in the hands of its reader."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from trainkit.data import import_images
from trainkit.data.formats import image_decode

MB = 1 << 20


def png(*chunks: bytes, side: int = 8) -> bytes:
    rows = zlib.compress(b"\0" * ((side + 1) * side))
    every = (b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0), *chunks, b"IDAT" + rows, b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in every
    )


def international(size: int) -> bytes:
    return b"iTXt" + b"a\0\1\0\0\0" + zlib.compress(bytes(size), 1)


def tiff(rows: int, strip: int, strips: int | None = None) -> bytes:
    """Deflated grey rows: each is a strip of the same `strip` bytes."""
    strips = rows if strips is None else strips
    pixels = zlib.compress(bytes(64), 1).ljust(strip, b"\0")
    lists = 8 + len(pixels)
    plain = {256: 64, 257: rows, 258: 8, 259: 8, 262: 1, 277: 1, 278: 1}
    entries = [(tag, 4, 1, value) for tag, value in plain.items()]
    entries += [(273, 4, strips, lists), (279, 4, strips, lists + 4 * strips)]
    listed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    pixels += struct.pack("<I", 8) * strips + struct.pack("<I", strip) * strips
    head = b"II*\0" + struct.pack("<I", 8 + len(pixels))
    return head + pixels + struct.pack("<H", len(entries)) + listed + bytes(4)


PICTURES: dict[str, Callable[[], bytes]] = {
    "PNG with 64 MB of compressed international text": lambda: png(international(64 * MB)),
    "PNG with 100 texts of 1 MB": lambda: png(*[b"zTXt" + b"a\0\0" + zlib.compress(bytes(MB - 9), 1)] * 100),
    "PNG with a chunk that claims 2 GB": lambda: png()[:33] + struct.pack(">I", 0x7FFFFFFF) + b"tEXt" + bytes(100),
    "TIFF of 20 million strips": lambda: tiff(700_000, 64, 20_000_000),
    "TIFF of 20,000 strips that are all the same 16 MB": lambda: tiff(20_000, 16 * MB),
}


def parquet_of_pictures(data: Callable[[], bytes], rows: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        own = data()
        table = pa.table({"image": [{"bytes": own, "path": None}] * rows, "label": [n % 2 for n in range(rows)]})
        pq.write_table(table, folder / "train.parquet")
        return folder / "train.parquet"

    return make


def imported(path: Path) -> None:
    """As `trainkit data import --resize any` reads a table."""
    import_images.import_faces(path, path.parent / "out", image_size=8, resize="any")


def black(side: int) -> bytes:
    stream = io.BytesIO()
    Image.new("1", (side, side)).save(stream, "PNG")
    return stream.getvalue()


TABLES = {
    "a table of 40 images of 10,000 x 10,000, resized": parquet_of_pictures(lambda: black(10_000), 40),
    "a table of 40 images that claim 60,000 x 60,000, resized": parquet_of_pictures(
        lambda: png(side=8)[:16] + struct.pack(">II", 60_000, 60_000) + png(side=8)[24:], 40
    ),
}


def _picture(path: Path) -> Any:
    return image_decode.decode(image_decode.read(path, str(path)), str(path))


def _file(content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "a.img"
        path.write_bytes(content())
        return path

    return make


BOMBS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    **{name: (_file(content), _picture) for name, content in PICTURES.items()},
    **{name: (make, imported) for name, make in TABLES.items()},
}

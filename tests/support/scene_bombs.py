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


PICTURES: dict[str, Callable[[], bytes]] = {
    "PNG with 64 MB of compressed international text": lambda: png(international(64 * MB)),
    "PNG with 100 texts of 1 MB": lambda: png(*[b"zTXt" + b"a\0\0" + zlib.compress(bytes(MB - 9), 1)] * 100),
    "PNG with a chunk that claims 2 GB": lambda: png()[:33] + struct.pack(">I", 0x7FFFFFFF) + b"tEXt" + bytes(100),
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

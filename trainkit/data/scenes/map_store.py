"""Maps of bytes, one for each image of a set, compressed one by one: the part that masks and distance maps share.

Columns of the `rows`:

| column  | hashed as                 | content                                                     |
|---------|---------------------------|-------------------------------------------------------------|
| `shape` | `shapes.npy`              | int32 (2,), height and width                                |
| `crc`   | `checksums.npy`           | uint32, CRC-32 of the stream, compared when it is first read |
| `map`   | `maps.bin`, `offsets.npy` | zlib stream of the map, uint8 in rows from the top          |

and what else a kind of map brings. The length of a map follows from its shape, so a damaged stream fills no memory.
"""

from __future__ import annotations

import functools
import zlib

import numpy as np

from trainkit.data.formats import image_decode
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import REBUILD, Column, Part
from trainkit.errors import UserError

COLUMNS = (
    Column("shape", "shapes.npy", "int32", 2),
    Column("crc", "checksums.npy", "uint32"),
    Part("map", "maps.bin", "offsets.npy"),
)

LEVEL = 6
"""Of zlib. A mask of 480 x 360 (CamVid) takes 4.8 kB and 1.9 ms so, 7.9 kB and 0.6 ms at level 1; reading takes 0.25 ms
either way, and it is written once."""


class CompressedMaps(Rows):
    """Such rows opened for reading."""

    @functools.cached_property
    def shapes(self) -> np.ndarray:
        """int32 (rows, 2), height and width of each map."""
        return self.column("shape")

    def bytes_of(self, row: int) -> np.ndarray:
        """Unpack the map of a row, uint8 (height, width), not to be written to. Raises UserError for a damaged one."""
        stream = self.stored(*self.span("map", row)).tobytes()
        if not self._checked[row]:
            self.compare(row, stream)
            self._checked[row] = True
        height, width = self.shapes[row].tolist()
        unpack = zlib.decompressobj()
        try:
            data = unpack.decompress(stream, height * width + 1)
        except zlib.error as error:
            raise UserError(self.where(row), f"cannot be unpacked ({error})", remedy=REBUILD) from None
        if len(data) != height * width or not unpack.eof:
            found = f"{len(data)} pixels" if unpack.eof else f"more than {height} x {width} pixels"
            raise UserError(self.where(row), found, f"{height} x {width}", REBUILD)
        return np.frombuffer(data, np.uint8).reshape(height, width)

    def _map(self) -> None:
        super()._map()
        self._checked = np.zeros(len(self), bool)

    def _check_columns(self) -> None:
        sizes = self.shapes.astype(np.int64).prod(1)
        if len(self) and (self.shapes.min() < 1 or sizes.max() > image_decode.PIXEL_CAP):
            raise self.damaged("rows.arrow", "impossible sizes")


def packed(values: np.ndarray) -> dict[str, object]:
    """Compress a map, uint8 (height, width), into the columns of a row."""
    stream = zlib.compress(np.ascontiguousarray(values, np.uint8).data, LEVEL)
    return {"shape": values.shape, "crc": zlib.crc32(stream), "map": stream}

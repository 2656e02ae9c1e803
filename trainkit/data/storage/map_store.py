"""Maps of bytes, one for each image of a set, compressed one by one: the part that masks and distance maps share.

A folder with

| file            | content                                                                    |
|-----------------|----------------------------------------------------------------------------|
| `maps.bin`      | zlib streams of the maps, uint8 in rows from the top, end to end           |
| `offsets.npy`   | int64 (rows + 1,), where each begins                                       |
| `shapes.npy`    | int32 (rows, 2), height and width of each                                  |
| `checksums.npy` | uint32 (rows,), CRC-32 of each stream, compared when a row is first read   |
| `manifest.json` | version, what the maps are, size and SHA-256 of every file, and the digest |

and what else a kind of map brings. The lengths of a map follow from its shape, so a damaged stream fills no memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainkit.data.formats import image_decode
from trainkit.data.storage.hashed_folder import REBUILD, FolderWriter, RowFolder
from trainkit.errors import UserError
from trainkit.files import Json

FILES = ("checksums.npy", "maps.bin", "offsets.npy", "shapes.npy")

LEVEL = 6
"""Of zlib. A mask of 480 x 360 (CamVid) takes 4.8 kB and 1.9 ms so, 7.9 kB and 0.6 ms at level 1; reading takes 0.25 ms
either way, and it is written once."""

Item = TypeVar("Item")
Made = TypeVar("Made")


class CompressedMaps(RowFolder):
    """Such a folder opened for reading."""

    shapes: np.ndarray
    """int32 (rows, 2), height and width of each map."""

    def bytes_of(self, row: int) -> np.ndarray:
        """Unpack the map of a row, uint8 (height, width), not to be written to. Raises UserError for a damaged one."""
        if not 0 <= row < len(self):
            raise ValueError(f"row {row} of a set of {len(self)}")
        stream = self._maps[int(self._offsets[row]) : int(self._offsets[row + 1])].tobytes()
        if not self._checked[row]:
            if zlib.crc32(stream) != int(self._checksums[row]):
                raise UserError(self.where(row), "is not what was written (checksum differs)", remedy=REBUILD)
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
        rows = len(self)
        self._maps, self._offsets = self.pieces("maps.bin", rows)
        self.shapes = self.array("shapes.npy", "int32", (rows, 2))
        self._checksums = self.array("checksums.npy", "uint32", (rows,))
        self._checked = np.zeros(rows, bool)
        sizes = self.shapes.astype(np.int64).prod(1)
        if rows and (self.shapes.min() < 1 or sizes.max() > image_decode.PIXEL_CAP):
            raise self.damaged("shapes.npy", "impossible sizes")


class Writer(FolderWriter):
    """Writes such a folder."""

    def __init__(self, out: Path):
        super().__init__(out, ["maps.bin"])
        self._offsets, self._checksums, self._shapes = [0], [], []

    def add(self, shape: tuple[int, int], stream: bytes) -> None:
        """Add one map: its height and width, and its stream from `compress`."""
        self._files["maps.bin"].write(stream)
        self._offsets.append(self._offsets[-1] + len(stream))
        self._checksums.append(zlib.crc32(stream))
        self._shapes.append(shape)

    def finish(self, kind: type[CompressedMaps], manifest: Mapping[str, Json]) -> None:
        """Write everything but the maps, make it durable, and give it its name."""
        self.save("offsets.npy", np.asarray(self._offsets, np.int64))
        self.save("shapes.npy", np.asarray(self._shapes, np.int32).reshape(-1, 2))
        self.save("checksums.npy", np.asarray(self._checksums, np.uint32))
        self.publish(kind, {**manifest, "rows": len(self._shapes)})


def compress(values: np.ndarray) -> bytes:
    """Compress a map, uint8 (height, width)."""
    return zlib.compress(np.ascontiguousarray(values, np.uint8).data, LEVEL)


def each(function: Callable[[Item], Made], items: Iterable[Item], threads: int, waiting: int = 4) -> Iterator[Made]:
    """Yield the results of `function` in the order of items, by `threads`, each with `waiting` items in memory."""
    items = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while chunk := list(islice(items, waiting * threads)):
            yield from pool.map(function, chunk)

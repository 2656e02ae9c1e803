"""TIFF: bounds on what a file claims, and refusal of what Pillow reads as something else."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from trainkit.errors import UserError

if TYPE_CHECKING:  # imported where an image is read
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

MAGIC = (b"II*\0", b"MM\0*")
"""First bytes of a file. BigTIFF has others and is not read."""

_ENTRIES = 512
"""Most tags of a directory; a photograph has some 20, a microscope's image some 60."""
_VALUES = 1 << 20
"""Most whole numbers of a tag: strips of an image of a million rows."""
_SHARED = 16
"""Most times that the pixels of a file may be named by its strips or tiles: each is read anew."""
_TILE = 1 << 24
"""Most pixels of a tile, for which the decoder takes memory whatever the size of the image."""

_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
"""Bytes of a value by its type."""
_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES, _PLANES = 258, 259, 262, 266, 277, 284
_STRIP_BYTES, _TILE_WIDTH, _TILE_HEIGHT, _TILE_BYTES, _FORMAT = 279, 322, 323, 325, 339
_COMPRESSIONS = (1, 5, 8, 32773, 32946)
"""None, LZW, deflate, PackBits, deflate."""
_EXPECTED = "one page, grey, RGB or palette, 1 to 16 bits without sign, uncompressed or by LZW, deflate or PackBits"


def check_directory(data: bytes, where: str) -> None:
    """Check what the tags of the first page claim, before Pillow or libtiff reads one. Raises UserError."""
    order = "<" if data[:2] == b"II" else ">"
    claimed = 0
    try:
        (place,) = struct.unpack_from(order + "I", data, 4)
        (count,) = struct.unpack_from(order + "H", data, place)
        if not 1 <= count <= _ENTRIES:
            raise _refused(where, f"{count} tags", f"1 to {_ENTRIES}")
        for at in range(place + 2, place + 2 + 12 * count, 12):
            tag, kind, many = struct.unpack_from(order + "HHI", data, at)
            if kind in (3, 4) and many > _VALUES:
                raise _refused(where, f"{many} values of type {kind} for the tag {tag}", f"at most {_VALUES}")
            claimed += many * _BYTES.get(kind, 0)
    except struct.error:
        raise _refused(where, "a directory beyond its end", "a whole file") from None
    if claimed > 2 * len(data):
        raise _refused(where, f"tags of {claimed} bytes in {len(data)}", "each with its own")


def check(tags: ImageFileDirectory_v2, size: int, where: str) -> None:
    """Check the tags of the first page of a file of `size` bytes, before its pixels are read. Raises UserError."""
    compression, photometric, order = tags.get(_COMPRESSION, 1), tags.get(_PHOTOMETRIC), tags.get(_FILL_ORDER, 1)
    samples, bits = tags.get(_SAMPLES, 1), tags.get(_BITS, (1,))
    tile = tags.get(_TILE_WIDTH, 1) * tags.get(_TILE_HEIGHT, 1)
    named = sum(tags.get(_TILE_BYTES) or tags.get(_STRIP_BYTES, ()))
    of_16 = bits[0] == 16
    refused = {
        f"compression {compression}": compression not in _COMPRESSIONS,
        f"colours {photometric}": photometric not in range(4),
        f"{samples} channels of {'/'.join(map(str, bits[:9]))} bits": (
            not 1 <= samples <= 4 or len(set(bits)) != 1 or bits[0] not in (1, 2, 4, 8, 16)
        ),
        "values with a sign or a decimal point": set(tags.get(_FORMAT, (1,))) != {1},
        "colours of 16 bits in planes": of_16 and samples > 1 and tags.get(_PLANES, 1) != 1,
        "16 bits of which 0 is white": of_16 and photometric == 0,
        f"bits in the order {order}": order != 1,
        f"tiles of {tile} pixels": not 1 <= tile <= _TILE,
        f"strips or tiles of {named} bytes in {size}": named > _SHARED * size,
    }
    if found := [text for text, is_so in refused.items() if is_so]:
        raise _refused(where, found[0], _EXPECTED, "save it as PNG")


def _refused(where: str, found: str, expected: str, remedy: str = "") -> UserError:
    return UserError(where, f"a TIFF file with {found}", expected, remedy)

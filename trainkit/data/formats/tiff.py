"""TIFF: bounds on what a file claims. Pillow reads the first page of one that keeps within them."""

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

_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, ORIENTATION, _SAMPLES, _PLANES = 258, 259, 262, 266, 274, 277, 284
_STRIP_BYTES, _TILE_WIDTH, _TILE_HEIGHT, _TILE_BYTES, _FORMAT = 279, 322, 323, 325, 339

_COMPRESSIONS = {1: "none", 5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate"}
_PHOTOMETRICS = {0: "grey, white is zero", 1: "grey", 2: "RGB", 3: "palette"}


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
    """Check the tags of the first page of a file of `size` bytes, before its pixels are read.

    Allowed are 1, 2, 4, 8, 12 and 16 bits a sample without sign, grey, RGB and palette, in strips or tiles, not
    compressed or by LZW, deflate or PackBits. Raises UserError naming `where` for anything else.
    """
    for name, value, allowed in (
        ("compression", tags.get(_COMPRESSION, 1), _COMPRESSIONS),
        ("colours", tags.get(_PHOTOMETRIC), _PHOTOMETRICS),
    ):
        if value not in allowed:
            names = ", ".join(dict.fromkeys(allowed.values()))
            raise _refused(where, f"{name} {value}", names, "save it again without compression, or as PNG")
    samples, bits = tags.get(_SAMPLES, 1), tags.get(_BITS, (1,))
    if not 1 <= samples <= 4 or len(set(bits)) != 1 or bits[0] not in (1, 2, 4, 8, 12, 16):
        found = f"{samples} channels of {'/'.join(map(str, bits[:9]))} bits"
        raise _refused(where, found, "1 to 4 of up to 16 bits")
    if set(tags.get(_FORMAT, (1,))) != {1}:
        found = "values with a sign or a decimal point"
        raise _refused(where, found, "whole numbers from 0", "save it with 16 bits")
    if bits[0] > 8 and tags.get(_PLANES, 1) != 1 and samples > 1:
        # Pillow takes the bytes of 16-bit planes for one another.
        raise _refused(where, "colours of 16 bits in planes", "one after the other", "save it with 8 bits, or as PNG")
    if tags.get(_FILL_ORDER, 1) != 1:
        raise _refused(where, "bits in reverse order", "fill order 1")
    if _TILE_WIDTH in tags and not 1 <= tags[_TILE_WIDTH] * tags.get(_TILE_HEIGHT, 0) <= _TILE:
        raise _refused(where, f"tiles of {tags[_TILE_WIDTH]} x {tags.get(_TILE_HEIGHT)} pixels", f"1 to {_TILE} pixels")
    lengths = tags.get(_TILE_BYTES) or tags.get(_STRIP_BYTES, ())
    if sum(lengths) > _SHARED * size:
        raise _refused(where, f"{len(lengths)} pieces of {sum(lengths)} bytes in {size}", "each with its own")


def top(tags: ImageFileDirectory_v2) -> int:
    """Return the largest value that a sample can have: 4095 of 12 bits."""
    return (1 << tags.get(_BITS, (1,))[0]) - 1


def inverted(tags: ImageFileDirectory_v2) -> bool:
    """Return True where 0 is white and Pillow leaves it so: from 9 bits on."""
    return tags.get(_PHOTOMETRIC) == 0 and top(tags) > 255


def _refused(where: str, found: str, expected: str, remedy: str = "") -> UserError:
    return UserError(where, f"a TIFF file with {found}", expected, remedy)

"""TIFF: the first page of a file, checked, and the few tags that its pixels need.

Pillow's and libtiff's readers follow every tag and directory of a file. They get the first directory alone, with tags
of the allow-list here, all of whose values lie in the file (TIFF 6.0, Adobe 1992).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from trainkit.errors import UserError

MAGIC = (b"II*\0", b"MM\0*")
"""First bytes of a file. BigTIFF has others and is not read."""

PAGES = 10_000
"""Most pages of a file."""

_ENTRIES = 512
"""Most tags of a directory; a photograph has some 20, a microscope's image some 60."""

_VALUES = 1 << 20
"""Most values of a tag: strips of an image of a million rows."""

_SHARED = 16
"""Most times that the pixels of a file may be named by its strips or tiles: each is read anew."""

_TILE = 1 << 24
"""Most pixels of a tile, for which the decoder takes memory whatever the size of the image."""

_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
"""Bytes of a value by its type."""

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 256, 257, 258, 259, 262, 266
_STRIPS, _ORIENTATION, _SAMPLES, _STRIP_BYTES = 273, 274, 277, 279
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _FORMAT = 322, 323, 324, 325, 339
_ROWS_PER_STRIP, _PLANES, _PREDICTOR, _COLOUR_MAP, _EXTRA = 278, 284, 317, 320, 338
_KEPT = frozenset({
    _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _STRIPS, _ORIENTATION, _SAMPLES, _ROWS_PER_STRIP, _STRIP_BYTES,
    _PLANES, _PREDICTOR, _COLOUR_MAP, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _EXTRA, _FORMAT,
})  # fmt: skip

_COMPRESSIONS = {1: "none", 5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate"}
_PHOTOMETRICS = {0: "grey, white is zero", 1: "grey", 2: "RGB", 3: "palette"}


@dataclass(frozen=True)
class Page:
    """The first page of a file."""

    data: bytes
    """A TIFF file of this page alone."""
    shape: tuple[int, int]
    """Height and width as it is shown, turned by its orientation."""
    orientation: int
    """1 to 8, as in EXIF; 1 for not turned."""
    top: int
    """Largest value that a sample can have: 4095 of 12 bits."""
    inverted: bool
    """True where 0 is white and `data` says otherwise: from 9 bits on Pillow would not invert it."""


def first_page(data: bytes, where: str) -> Page:
    """Check the first page of a TIFF file and return it alone.

    Read are 1, 2, 4, 8, 12 and 16 bits a sample without sign, grey, RGB and palette, in strips or tiles, not compressed
    or by LZW, deflate or PackBits. Raises UserError naming `where` for anything else, and for damage.
    """
    directory = _Directory(data, where)
    width, height = directory.one(_WIDTH), directory.one(_HEIGHT)
    if width < 1 or height < 1:
        raise directory.refused(f"{width} x {height} pixels", "at least one")
    directory.allow("compression", directory.one(_COMPRESSION, 1), _COMPRESSIONS)
    colours = directory.one(_PHOTOMETRIC)
    directory.allow("colours", colours, _PHOTOMETRICS)
    samples = directory.one(_SAMPLES, 1)
    bits = directory.values(_BITS) or (1,)
    if not 1 <= samples <= 4 or len(set(bits)) != 1 or bits[0] not in (1, 2, 4, 8, 12, 16):
        raise directory.refused(f"{samples} channels of {'/'.join(map(str, bits[:9]))} bits", "1 to 4 of up to 16 bits")
    if set(directory.values(_FORMAT) or (1,)) != {1}:
        raise directory.refused("values with a sign or a decimal point", "whole numbers from 0", "save it with 16 bits")
    if bits[0] > 8 and directory.one(_PLANES, 1) != 1 and samples > 1:
        # Pillow takes the bytes of 16-bit planes for one another.
        raise directory.refused("colours of 16 bits in planes", "one after the other", "save it with 8 bits, or as PNG")
    if directory.one(_FILL_ORDER, 1) != 1:
        raise directory.refused("bits in reverse order", "fill order 1")
    _check_pieces(directory, len(data))
    orientation = directory.one(_ORIENTATION, 1)
    orientation = orientation if orientation in range(1, 9) else 1
    shape = (width, height) if orientation >= 5 else (height, width)
    inverted = colours == 0 and bits[0] > 8
    return Page(directory.alone(as_grey=inverted), shape, orientation, (1 << bits[0]) - 1, inverted)


def pages(data: bytes, where: str) -> int:
    """Count the pages of an encoded image of any format, 1 but for TIFF.

    Raises UserError for more than `PAGES`, and for directories in a circle.
    """
    if data[:4] not in MAGIC:
        return 1
    order = "<" if data[:2] == b"II" else ">"
    (place,) = struct.unpack_from(order + "I", data.ljust(8, b"\0"), 4)
    seen: set[int] = set()
    while place:
        if place in seen or len(seen) == PAGES:
            found = "pages that refer to each other in a circle" if place in seen else f"more than {PAGES} pages"
            raise UserError(where, f"a TIFF file with {found}", f"1 to {PAGES} pages")
        seen.add(place)
        try:
            (entries,) = struct.unpack_from(order + "H", data, place)
            (place,) = struct.unpack_from(order + "I", data, place + 2 + 12 * entries)
        except struct.error:
            break  # cut short behind what is read
    return max(1, len(seen))


def _check_pieces(directory: _Directory, size: int) -> None:
    """Raise UserError where strips or tiles lie out of the file, or a tile is too large."""
    tiled = bool(directory.values(_TILES))
    if tiled:
        tile = directory.one(_TILE_WIDTH), directory.one(_TILE_HEIGHT)
        if not 1 <= tile[0] * tile[1] <= _TILE:
            raise directory.refused(f"tiles of {tile[0]} x {tile[1]} pixels", f"1 to {_TILE} pixels")
    begins = directory.values(_TILES if tiled else _STRIPS)
    lengths = directory.values(_TILE_BYTES if tiled else _STRIP_BYTES)
    if not begins or len(lengths) != len(begins):
        raise directory.refused(f"{len(begins)} pieces of pixels and {len(lengths)} lengths", "one length for each")
    if max(begin + length for begin, length in zip(begins, lengths, strict=True)) > size:
        raise directory.refused("pixels beyond its end", "a whole file")
    if sum(lengths) > _SHARED * size:
        raise directory.refused(f"{len(lengths)} pieces of {sum(lengths)} bytes in {size}", "each with its own")


class _Directory:
    """The first directory of a file: its tags of the allow-list, each once."""

    def __init__(self, data: bytes, where: str):
        self._data, self._where = data, where
        self._order = "<" if data[:2] == b"II" else ">"
        self._entries: dict[int, tuple[int, int, int]] = {}
        """Of each tag its type, the number of its values, and where its entry is."""
        try:
            (place,) = struct.unpack_from(self._order + "I", data, 4)
            (count,) = struct.unpack_from(self._order + "H", data, place)
            if not 1 <= count <= _ENTRIES:
                raise self.refused(f"{count} tags", f"1 to {_ENTRIES}")
            for at in range(place + 2, place + 2 + 12 * count, 12):
                tag, kind, many = struct.unpack_from(self._order + "HHI", data, at)
                if tag in _KEPT or tag == _FILL_ORDER:
                    self._entries.setdefault(tag, (kind, many, at))
        except struct.error:
            raise self.refused("a directory beyond its end", "a whole file") from None

    def values(self, tag: int) -> tuple[int, ...]:
        """Return the values of a tag, whole numbers; empty where it is not there."""
        if tag not in self._entries:
            return ()
        kind, many, at = self._entries[tag]
        if kind not in (3, 4) or not 1 <= many <= min(len(self._data), _VALUES):
            raise self.refused(f"{many} values of type {kind} for the tag {tag}", "whole numbers")
        try:
            place = at + 8
            if many * _BYTES[kind] > 4:
                (place,) = struct.unpack_from(self._order + "I", self._data, place)
            return struct.unpack_from(f"{self._order}{many}{'H' if kind == 3 else 'I'}", self._data, place)
        except struct.error:
            raise self.refused(f"values of the tag {tag} beyond its end", "a whole file") from None

    def one(self, tag: int, default: int | None = None) -> int:
        """Return the single value of a tag."""
        values = self.values(tag) or (() if default is None else (default,))
        if len(values) != 1:
            raise self.refused(f"{len(values)} values for the tag {tag}", "one")
        return values[0]

    def allow(self, what: str, value: int, allowed: dict[int, str]) -> None:
        """Raise UserError for a value that is none of those allowed."""
        if value not in allowed:
            names = ", ".join(dict.fromkeys(allowed.values()))
            raise self.refused(f"{what} {value}", names, "save it again without compression, or as PNG")

    def refused(self, found: str, expected: str, remedy: str = "") -> UserError:
        """Return the error to raise."""
        return UserError(self._where, f"a TIFF file with {found}", expected, remedy)

    def alone(self, as_grey: bool) -> bytes:
        """Return the file with a directory behind it that has these tags alone, and no page after it.

        With `as_grey` it says that 0 is black.
        """
        for tag in self._entries:
            self.values(tag)  # in the file, each
        kept = sorted(tag for tag in self._entries if tag in _KEPT)
        end = len(self._data) + len(self._data) % 2
        head = self._data[:4] + struct.pack(self._order + "I", end)
        found = {tag: self._data[at : at + 12] for tag, (_, _, at) in self._entries.items()}
        if as_grey:
            found[_PHOTOMETRIC] = struct.pack(self._order + "HHIHH", _PHOTOMETRIC, 3, 1, 1, 0)
        entries = b"".join(found[tag] for tag in kept)
        directory = struct.pack(self._order + "H", len(kept)) + entries + bytes(4)
        return b"".join((head, self._data[8:], b"\0" * (end - len(self._data)), directory))

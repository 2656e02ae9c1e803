"""Label maps: the classes 0 .. C-1 of the values or colours in mask files, and `IGNORED` where a pixel has none.

Published sets number their files each in a way of their own; each function here is one of these ways. 255 stands for no
class in files of numbers throughout, as it does in all of these sets.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from trainkit.config.ranges import Byte
from trainkit.data.verification import Mistake
from trainkit.errors import UserError, few, number_of
from trainkit.interfaces import IGNORED

Colour = tuple[Byte, Byte, Byte]

CLASS_LIMIT = 255
"""Most classes there can be: 0 .. 254 beside `IGNORED`."""

CODE_LIMIT = 4 * CLASS_LIMIT
"""Values or colours in masks from which nobody need look further: they are no classes."""

NAME_LIMIT = 200
"""Longest name of a class, in characters."""

_UNKNOWN = 256
_NAMED, _COUNTED = 8, 32
"""Values or colours of a mask that stand for no class, of which the places and of which the pixels are told."""


@dataclass(frozen=True)
class Labels:
    """The classes of a set, and how its mask files say which one a pixel has: by a number, or by a colour.

    Raises ValueError for names that are empty, too long or alike, for less than 2 or more than 255 of them, and for
    values and colours that stand for no class or for two.
    """

    names: tuple[str, ...]
    """Name of each class, in the order of their numbers."""
    colours: tuple[Colour, ...] = ()
    """Red, green and blue of each class in images; empty where the set has none of its own."""
    values: tuple[tuple[int, int], ...] = ()
    """Numbers in files and the class of each, `IGNORED` for none. Empty where files are coloured."""
    palette: tuple[tuple[Colour, int], ...] = ()
    """Colours in files and the class of each, likewise. Empty where files hold numbers."""

    def __post_init__(self):
        if not 2 <= len(self.names) <= CLASS_LIMIT:
            raise ValueError(f"{len(self.names)} classes; 2 to {CLASS_LIMIT} are needed")
        for name in self.names:
            if not name.strip() or len(name) > NAME_LIMIT or not name.isprintable():
                found = f"{len(name)} characters" if len(name) > NAME_LIMIT else repr(name)
                raise ValueError(f"the name of a class is {found}; 1 to {NAME_LIMIT} printable characters are needed")
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"two classes with the same name: {few(twice)}")
        if len(self.colours) not in (0, len(self.names)):
            raise ValueError(f"{len(self.colours)} colours for {len(self.names)} classes")
        if bool(self.values) == bool(self.palette):
            raise ValueError("mask files hold either numbers or colours")
        for colour in (*self.colours, *(colour for colour, _ in self.palette)):
            if len(colour) != 3 or not all(0 <= part <= 255 for part in colour):
                raise ValueError(f"colour {list(colour)}; red, green and blue from 0 to 255 are needed")
        if strange := [value for value, _ in self.values if not 0 <= value <= 0xFFFF]:
            raise ValueError(f"values {few(map(str, strange))}; 0 to 65535 are allowed")
        table = self.palette or self.values
        keys = [key for key, _ in table]
        if len(set(keys)) < len(keys):
            twice = [str(key) for key in dict.fromkeys(keys) if keys.count(key) > 1]
            raise ValueError(f"one {'colour' if self.palette else 'value'} for several classes: {few(twice)}")
        known = {number for _, number in table}
        if not known <= {*range(len(self.names)), IGNORED}:
            raise ValueError(f"only classes 0 to {len(self.names) - 1} and {IGNORED} are allowed")
        if absent := [name for number, name in enumerate(self.names) if number not in known]:
            raise ValueError(f"classes without a value in the masks: {few(absent)}")

    @property
    def coloured(self) -> bool:
        """True where files hold colours: a palette PNG must then be read with its palette."""
        return bool(self.palette)

    @property
    def key(self) -> tuple[object, ...]:
        """All that masks made with it depend on, for the names of caches."""
        return (self.names, self.colours, self.values, self.palette)

    def drops_white(self, mask: np.ndarray) -> bool:
        """Return whether a mask as it is in its file has the value 255, and that stands for no class."""
        return not self.coloured and bool(self._table[IGNORED] == IGNORED and (mask == IGNORED).any())

    def classes(self, mask: np.ndarray, where: str) -> np.ndarray:
        """Return the classes of a mask as it is in its file: numbers (h, w), uint8 or uint16, or RGB uint8 (h, w, 3).

        Returns uint8 (h, w). A grey mask may be stored as RGB, and colours that are grey as numbers. Raises UserError
        that names what is not in the table, with counts of pixels and the first place of each.
        """
        mask = np.asarray(mask)
        if mask.dtype not in (np.uint8, np.uint16) or mask.ndim not in (2, 3) or mask.shape[2:] not in ((), (3,)):
            raise ValueError(f"{where}: a mask of {mask.dtype} {mask.shape}")
        if self.palette:
            return self._of_colours(mask, where)
        if mask.ndim == 3:
            grey = mask[..., 0]
            if (mask[..., 1] != grey).any() or (mask[..., 2] != grey).any():
                count = len(np.unique(_codes(mask)))
                remedy = "set data.palette to the colours of the classes, or write masks of numbers"
                raise UserError(where, f"a coloured mask ({count} colours)", "a number for each pixel", remedy)
            mask = grey
        return self._looked_up(mask, self._table, where)

    def _of_colours(self, mask: np.ndarray, where: str) -> np.ndarray:
        if mask.dtype != np.uint8:
            raise UserError(where, "16 bits a pixel", "colours of 8 bits", "remove data.palette for masks of numbers")
        if mask.ndim == 2:
            return self._looked_up(mask, self._greys, where)
        codes = _codes(mask)
        keys, numbers = self._sorted
        place = np.searchsorted(keys, codes)
        # What sorts behind the last is compared with the last, and differs.
        np.minimum(place, len(keys) - 1, out=place)
        found = numbers[place]
        if (bad := keys[place] != codes).any():
            self._refuse(codes, bad, where)
        return found

    def _looked_up(self, mask: np.ndarray, table: np.ndarray, where: str) -> np.ndarray:
        found = table[: 256 if mask.dtype == np.uint8 else None][mask]
        bad = found == _UNKNOWN
        if bad.any():
            codes = mask.astype(np.uint32)
            self._refuse(codes * 0x010101 if self.palette else codes, bad, where)
        return found.astype(np.uint8)

    def _refuse(self, codes: np.ndarray, bad: np.ndarray, where: str) -> None:
        """Raise Mistake about the pixels where `bad`, whose values or colours are `codes`, (h, w) each."""
        strange, first, counts = np.unique(codes[bad], return_index=True, return_counts=True)
        places = np.flatnonzero(bad.ravel())[first]
        listed: list[str] = []
        pixels: dict[str, int] = {}
        for n in np.argsort(-counts, kind="stable").tolist():
            y, x = divmod(int(places[n]), codes.shape[1])
            called = self._called(int(strange[n]))
            pixels[called] = int(counts[n])
            listed.append(f"{called} ({counts[n]} px, first at x {x}, y {y})")
        share = f"{int(counts.sum())} of {codes.size} pixels"
        what = ("colour" if self.palette else "value") + "s" * (len(listed) != 1)
        found = f"{len(listed)} {what} outside the classes ({share}): {few(listed, _NAMED)}"
        pixels = dict(itertools.islice(pixels.items(), _COUNTED))
        kind = f"masks hold {'colours' if self.palette else 'values'} outside the classes"
        raise Mistake(kind, UserError(where, found, self._expected(), self._remedy()), pixels)

    def _called(self, code: int) -> str:
        return f"[{code >> 16}, {code >> 8 & 255}, {code & 255}]" if self.palette else str(code)

    def _expected(self) -> str:
        if self.palette:
            return few((f"{list(colour)}" for colour, _ in self.palette), 4)
        kept = sorted(value for value, number in self.values if number != IGNORED)
        dropped = sorted(value for value, number in self.values if number == IGNORED)
        if kept != list(range(kept[0], kept[-1] + 1)):
            return f"one of {few(map(str, kept), 40)}"
        return f"{kept[0]} to {kept[-1]}, or for unlabelled pixels {few(map(str, dropped), 8)}"

    def _remedy(self) -> str:
        if self.palette:
            return "add it to data.palette, or repair the mask (a resized or JPEG mask has mixed colours)"
        return "list all classes in data.names, and values without a class in data.ignore"

    @functools.cached_property
    def _table(self) -> np.ndarray:
        table = np.full(1 << 16, _UNKNOWN, np.uint16)
        for value, number in self.values:
            table[value] = number
        return table

    @functools.cached_property
    def _greys(self) -> np.ndarray:
        table = np.full(256, _UNKNOWN, np.uint16)
        for (red, green, blue), number in self.palette:
            if red == green == blue:
                table[red] = number
        return table

    @functools.cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        entries = sorted(((red << 16 | green << 8 | blue), number) for (red, green, blue), number in self.palette)
        return np.array([code for code, _ in entries], np.uint32), np.array([number for _, number in entries], np.uint8)


def _codes(mask: np.ndarray) -> np.ndarray:
    """Pack RGB (h, w, 3) into one number a pixel, uint32 (h, w)."""
    wide = mask.astype(np.uint32)
    return wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]


def numbered(names: Sequence[str], ignored: Sequence[int] = (), colours: Sequence[Sequence[int]] = ()) -> Labels:
    """Make labels of files of numbers: `names` are those of 0, 1, ... in turn, without the values `ignored`.

    So 0 .. 10 with 11 ignored are eleven names, and 1 .. 150 with 0 ignored are 150. 255 is ignored in any case. Raises
    ValueError as `Labels` does.
    """
    dropped = {*ignored, IGNORED}
    values, number = [], 0
    for value in range(1 << 16):
        if number == len(names):
            break
        if value not in dropped:
            values.append((value, number))
            number += 1
    values += [(value, IGNORED) for value in sorted(dropped)]
    return Labels(tuple(names), _colours(colours), tuple(values))


def from_palette(palette: Mapping[str, Sequence[int]], ignored: Sequence[Sequence[int]] = ()) -> Labels:
    """Make labels of coloured files: the name of each class with its colour, and colours that stand for no class.

    Raises ValueError as `Labels` does.
    """
    colours = _colours(list(palette.values()))
    entries = [(colour, number) for number, colour in enumerate(colours)]
    entries += [(colour, IGNORED) for colour in _colours(ignored)]
    return Labels(tuple(palette), colours, palette=tuple(entries))


def codes_in(mask: np.ndarray) -> set[tuple[int, ...]]:
    """Return the values (value,) or colours (red, green, blue) of a mask as it is in its file; of very many some."""
    if mask.ndim == 2:
        return {(value,) for value in np.unique(mask).tolist()}
    found = np.unique(_codes(mask)).tolist()
    return {(code >> 16, code >> 8 & 255, code & 255) for code in found[: CODE_LIMIT + 1]}


def guessed(found: Iterable[tuple[int, ...]]) -> Labels:
    """Make labels where nothing else is known: each value or colour `found` by `codes_in`, but 255, is a class.

    Of masks of 0 and 255 alone, black and white, white is the second class. Names are the
    values or colours. Raises ValueError where these are not 2 to 255.
    """
    # Grey that is stored in colour is numbers.
    coloured = any(len(set(code)) > 1 for code in found)
    codes = sorted({code * 3 if len(code) == 1 else code for code in found} if coloured else {c[:1] for c in found})
    if codes == [(0,), (IGNORED,)]:
        return from_palette({str([value] * 3): [value] * 3 for (value,) in codes})
    codes = [code for code in codes if code != (IGNORED,)]
    if not 2 <= len(codes) <= CLASS_LIMIT:
        many = number_of(len(codes), "colours" if coloured else "values")
        many = many if len(codes) < 2 else f"over {CLASS_LIMIT} {many.split()[1]}"
        raise ValueError(f"{many} in its masks; expected those of 2 to {CLASS_LIMIT} classes")
    if coloured:
        return from_palette({str(list(code)): code for code in codes})
    entries = [(code[0], number) for number, code in enumerate(codes)]
    return Labels(tuple(str(code[0]) for code in codes), values=(*entries, (IGNORED, IGNORED)))


def _colours(colours: Sequence[Sequence[int]]) -> tuple[Colour, ...]:
    # Those of other than three parts are refused by `Labels`.
    return tuple(cast(Colour, tuple(int(part) for part in colour)) for colour in colours)


def bit_colours(count: int) -> tuple[Colour, ...]:
    """Return the colours that Pascal VOC gives the numbers 0 .. count-1, at most 256 and no two alike.

    Its bits, lowest first, become the bits of red, green and blue in turn, highest first (the development kit of
    Everingham et al., "The Pascal Visual Object Classes Challenge", IJCV 2010).
    """
    made = []
    for number in range(count):
        parts = [0, 0, 0]
        for bit in range(8):
            parts[bit % 3] |= (number >> bit & 1) << (7 - bit // 3)
        made.append(tuple(parts))
    return tuple(made)


@functools.cache
def _published() -> dict[str, Any]:
    """Read names, numbers and colours (six digits, RGB) of the classes of published sets."""
    return json.loads(Path(__file__).with_name("published_classes.json").read_text("utf-8"))


def _with_colours(key: str) -> tuple[tuple[str, ...], tuple[Colour, ...]]:
    """Return names and colours of the classes of a published set."""
    return tuple(_published()[key]), _colours([bytes.fromhex(code) for code in _published()[key].values()])


@functools.cache
def cityscapes(train_ids: bool = False) -> Labels:
    """Return the 19 scored classes of Cityscapes (Cordts et al., CVPR 2016), of 34 numbers in `_labelIds` files.

    With `train_ids` the files hold 0 .. 18 already, as `_labelTrainIds` do.
    """
    names, colours = _with_colours("cityscapes")
    if train_ids:
        return numbered(names, colours=colours)
    classes = {value: number for number, value in enumerate(_published()["cityscapes_ids"])}
    values = [(value, classes.get(value, IGNORED)) for value in (*range(34), IGNORED)]
    return Labels(names, colours, tuple(values))


@functools.cache
def camvid11() -> Labels:
    """Return CamVid (Brostow et al., PRL 2009) in the 11 classes of SegNet, with 11 for no class."""
    names, colours = _with_colours("camvid")
    return numbered(names, (11,), colours)


@functools.cache
def camvid_colours() -> Labels:
    """Return these classes in CamVid's own files (`_L.png`): 31 kinds of things have colours, black is none."""
    kinds = _published()["camvid_kinds"].values()
    coded = [(bytes.fromhex(code), number) for number, some in enumerate(kinds) for code in some.values()]
    palette = zip((*_colours([code for code, _ in coded]), (0, 0, 0)), (*(n for _, n in coded), IGNORED), strict=True)
    return Labels(*_with_colours("camvid"), palette=tuple(palette))


@functools.cache
def ade20k() -> Labels:
    """Return the 150 classes of the benchmark of ADE20K (Zhou et al., CVPR 2017): 1 .. 150, 0 for no class."""
    names, colours = _with_colours("ade20k")
    return numbered(names, (0,), colours)


@functools.cache
def voc() -> Labels:
    """Return Pascal VOC's 20 classes and its background, 0 .. 20: indices of its palette PNGs, 255 along outlines."""
    names = _published()["voc"]
    return numbered(names, colours=bit_colours(len(names)))


@functools.cache
def coco_stuff() -> Labels:
    """Return the 171 classes of COCO-Stuff (Caesar et al., CVPR 2018) in its `stuffthingmaps`.

    These hold the id of a class less one. Of 182 ids eleven were never given to a pixel; they are ignored. The set has
    no colours of its own that differ; these are VOC's for the ids.
    """
    every = _published()["coco_stuff"]
    gone = [place for place, name in enumerate(every) if name.startswith("-")]
    kept = [place for place in range(len(every)) if place not in gone]
    colours = bit_colours(len(every) + 1)
    return numbered([every[place] for place in kept], gone, [colours[place + 1] for place in kept])


@functools.cache
def coco_stuff_train_ids() -> Labels:
    """Return the 171 classes of COCO-Stuff numbered without gaps, as files called `_labelTrainIds` have them."""
    known = coco_stuff()
    return numbered(known.names, colours=known.colours)

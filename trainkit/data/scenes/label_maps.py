"""Label maps: the classes 0 .. C-1 of the values or colours in mask files, and `IGNORED` where a pixel has none.

255 stands for no class in files of numbers throughout, as it does in all published sets. How published sets number or
colour their files, and by which names of files they are known, is in `published_classes.json`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from trainkit.config.ranges import Byte
from trainkit.data import folders
from trainkit.errors import UserError, few, number_of
from trainkit.interfaces import IGNORED

Colour = tuple[Byte, Byte, Byte]

CLASS_LIMIT = 255
"""Most classes there can be: 0 .. 254 beside `IGNORED`."""

CODE_LIMIT = 4 * CLASS_LIMIT
"""Values or colours in masks from which nobody need look further: they are no classes."""

NAME_LIMIT = 200
"""Longest name of a class, in characters."""

NAMES = "names.json"
"""File beside a set that names its classes, a list of those of 0, 1, ..., or gives each a colour."""

_NAMES_BYTES = 1 << 20
_UNKNOWN = 256
_LISTED = 8
"""Values or colours of a mask that stand for no class, of which the pixels are told."""


@dataclass(frozen=True)
class Labels:
    """The classes of a set, and how its mask files say which one a pixel has: by a number, or by a colour.

    Raises ValueError for names that are empty, too long or alike, for less than 2 or more than 255 of them, and for
    values and colours that are none, or stand for two classes.
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
        if twice := _repeated(self.names):
            raise ValueError(f"two classes with the same name: {few(twice)}")
        for colour in (*self.colours, *(colour for colour, _ in self.palette)):
            if len(colour) != 3 or not all(0 <= part <= 255 for part in colour):
                raise ValueError(f"colour {list(colour)}; red, green and blue from 0 to 255 are needed")
        if twice := _repeated([str(key) for key, _ in self.palette or self.values]):
            raise ValueError(f"one {'colour' if self.palette else 'value'} for several classes: {few(twice)}")

    @property
    def coloured(self) -> bool:
        """True where files hold colours: a palette PNG must then be read with its palette."""
        return bool(self.palette)

    def classes(self, mask: np.ndarray, where: str) -> np.ndarray:
        """Return the classes of a mask as it is in its file: numbers (h, w), uint8 or uint16, or RGB uint8 (h, w, 3).

        Returns uint8 (h, w). A grey mask may be stored as RGB, and colours that are grey as numbers. Raises UserError
        that names what is not in the table, with counts of pixels.
        """
        mask = np.asarray(mask)
        if mask.dtype not in (np.uint8, np.uint16) or mask.ndim not in (2, 3) or mask.shape[2:] not in ((), (3,)):
            raise ValueError(f"{where}: a mask of {mask.dtype} {mask.shape}")
        if self.palette:
            if mask.dtype != np.uint8:
                remedy = "remove data.palette for masks of numbers"
                raise UserError(where, "16 bits a pixel", "colours of 8 bits", remedy)
            return self._of_colours(_codes(mask) if mask.ndim == 3 else mask.astype(np.uint32) * 0x010101, where)
        if mask.ndim == 3:
            grey = mask[..., 0]
            if (mask[..., 1] != grey).any() or (mask[..., 2] != grey).any():
                count = len(np.unique(_codes(mask)))
                remedy = "set data.palette to the colours of the classes, or write masks of numbers"
                raise UserError(where, f"a coloured mask ({count} colours)", "a number for each pixel", remedy)
            mask = grey
        found = self._table[mask]
        if (bad := found == _UNKNOWN).any():
            self._refuse(mask, bad, where)
        return found.astype(np.uint8)

    def _of_colours(self, codes: np.ndarray, where: str) -> np.ndarray:
        keys, numbers = self._sorted
        # What sorts behind the last is compared with the last, and differs.
        place = np.minimum(np.searchsorted(keys, codes), len(keys) - 1)
        if (bad := keys[place] != codes).any():
            self._refuse(codes, bad, where)
        return numbers[place]

    def _refuse(self, codes: np.ndarray, bad: np.ndarray, where: str) -> None:
        """Raise UserError about the pixels where `bad`, whose values or colours are `codes`, (h, w) each."""
        strange, counts = np.unique(codes[bad], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:_LISTED]
        pixels = {self._called(int(strange[n])): int(counts[n]) for n in order}
        what = ("colour" if self.palette else "value") + "s" * (len(strange) != 1)
        listed = ", ".join(f"{called} ({count} px)" for called, count in pixels.items())
        more = f" and {len(strange) - len(pixels)} more" if len(strange) > len(pixels) else ""
        found = f"{len(strange)} {what} outside the classes ({counts.sum()} of {codes.size} pixels): {listed}{more}"
        if self.palette:
            known = few((f"{list(colour)}" for colour, _ in self.palette), 4)
            remedy = "add it to data.palette, or repair the mask (a resized or JPEG mask has mixed colours)"
        else:
            known = f"one of {few((str(value) for value, _ in sorted(self.values)), 40)}"
            remedy = "list all classes in data.names, and values without a class in data.ignore"
        raise UserError(where, found, known, remedy)

    def _called(self, code: int) -> str:
        return f"[{code >> 16}, {code >> 8 & 255}, {code & 255}]" if self.palette else str(code)

    @functools.cached_property
    def _table(self) -> np.ndarray:
        table = np.full(1 << 16, _UNKNOWN, np.uint16)
        for value, number in self.values:
            table[value] = number
        return table

    @functools.cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        entries = sorted(((red << 16 | green << 8 | blue), number) for (red, green, blue), number in self.palette)
        return np.array([code for code, _ in entries], np.uint32), np.array([number for _, number in entries], np.uint8)


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _codes(mask: np.ndarray) -> np.ndarray:
    """Pack RGB (h, w, 3) into one number a pixel, uint32 (h, w)."""
    wide = mask.astype(np.uint32)
    return wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]


def numbered(names: Sequence[str], ignored: Iterable[int] = (), colours: Iterable[Sequence[int]] = ()) -> Labels:
    """Make labels of files of numbers: `names` are those of 0, 1, ... in turn, without the values `ignored`.

    So 0 .. 10 with 11 ignored are eleven names, and 1 .. 150 with 0 ignored are 150. 255 is ignored in any case. Raises
    ValueError as `Labels` does.
    """
    dropped = {*ignored, IGNORED}
    kept = (value for value in range(1 << 16) if value not in dropped)
    values = [(value, number) for number, value in zip(range(len(names)), kept, strict=False)]
    return Labels(tuple(names), _colours(colours), (*values, *((value, IGNORED) for value in sorted(dropped))))


def from_palette(palette: Mapping[str, Sequence[int]], ignored: Iterable[Sequence[int]] = ()) -> Labels:
    """Make labels of coloured files: the name of each class with its colour, and colours that stand for no class.

    Raises ValueError as `Labels` does.
    """
    colours = _colours(palette.values())
    entries = [(colour, number) for number, colour in enumerate(colours)]
    entries += [(colour, IGNORED) for colour in _colours(ignored)]
    return Labels(tuple(palette), colours, palette=tuple(entries))


def _colours(colours: Iterable[Sequence[int]]) -> tuple[Colour, ...]:
    # Those of other than three parts are refused by `Labels`.
    return tuple(cast(Colour, tuple(int(part) for part in colour)) for colour in colours)


def codes_in(mask: np.ndarray) -> set[tuple[int, ...]]:
    """Return the values (value,) or colours (red, green, blue) of a mask as it is in its file; of very many some."""
    codes = np.unique(mask if mask.ndim == 2 else _codes(mask)).tolist()[: CODE_LIMIT + 1]
    return {(code,) if mask.ndim == 2 else (code >> 16, code >> 8 & 255, code & 255) for code in codes}


def guessed(found: Iterable[tuple[int, ...]]) -> Labels:
    """Make labels where nothing else is known: each value or colour `found` by `codes_in`, but 255, is a class.

    Of masks of 0 and 255 alone, black and white, white is the second class. Names are the values or colours. Raises
    ValueError where these are not 2 to 255.
    """
    values = sorted({code[0] for code in found})
    # Grey that is stored in colour is numbers.
    coloured = any(len(set(code)) > 1 for code in found) or values == [0, IGNORED]
    colours, values = sorted({code * (3 // len(code)) for code in found}), [v for v in values if v != IGNORED]
    count = len(colours if coloured else values)
    if not 2 <= count <= CLASS_LIMIT:
        many = number_of(min(count, CLASS_LIMIT + 1), "colours" if coloured else "values")
        raise ValueError(f"{many} in its masks; expected those of 2 to {CLASS_LIMIT} classes")
    if coloured:
        return from_palette({str(list(colour)): colour for colour in colours})
    entries = [(value, number) for number, value in enumerate(values)]
    return Labels(tuple(map(str, values)), values=(*entries, (IGNORED, IGNORED)))


def read_names(file: Path) -> Labels:
    """Read the classes that a file such as `NAMES` names. Raises UserError where it is none."""
    said = folders.read_json(file, _NAMES_BYTES, "names of classes")
    try:
        if isinstance(said, list) and all(isinstance(name, str) for name in said):
            return numbered(said)
        if isinstance(said, dict) and all(isinstance(colour, list) for colour in said.values()):
            return from_palette(said)
    except (TypeError, ValueError) as error:
        raise UserError(str(file), str(error)[:300], "names of classes") from None
    raise UserError(str(file), repr(said)[:100], 'a list such as ["sky", "road"], or {"sky": [70, 130, 180]}')


@functools.cache
def _published() -> dict[str, Any]:
    """Read the published sets: names of mask files, classes with their colours (six digits, RGB), ignored values."""
    return json.loads(Path(__file__).with_name("published_classes.json").read_text("utf-8"))


def published(masks: Iterable[Path]) -> tuple[str, Labels] | None:
    """Return the published set that the names of all mask files are of, and its classes; None where there is none."""
    names = [mask.as_posix() for mask in masks]
    for entry in _published()["sets"]:
        known = re.compile(entry["mask"])
        if all(map(known.fullmatch, names)):
            return entry["kind"], _labels_of(entry)
    return None


def _labels_of(entry: Mapping[str, Any]) -> Labels:
    classes = _published()[entry["classes"]]
    colours = [bytes.fromhex(code) for code in classes.values()]
    if "colours" not in entry:
        return numbered(list(classes), entry.get("ignored", ()), colours)
    # Several colours for a class, and black for none.
    kinds = _published()[entry["colours"]].values()
    coded = [(bytes.fromhex(code), number) for number, some in enumerate(kinds) for code in some.values()]
    keys = _colours([*(code for code, _ in coded), bytes(3)])
    palette = zip(keys, (*(number for _, number in coded), IGNORED), strict=True)
    return Labels(tuple(classes), _colours(colours), palette=tuple(palette))

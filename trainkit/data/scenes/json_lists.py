"""Lists in a JSON file, an entry at a time: of 500 MB no more is in memory than the entries that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

from trainkit.errors import UserError
from trainkit.files import Json

ENTRY = 2 << 20
"""Most characters of an entry, and of all else that the file holds: an outline of some 150,000 points."""

_SPACE = re.compile(r"[ \t\n\r]*")


def entries(file: Path, keys: Collection[str], expected: str) -> Iterator[tuple[str, int, Json]]:
    """Yield the entries of the lists under `keys` of the object in a file: the key, the place, the value.

    Raises UserError where the file cannot be read or an entry is larger than `ENTRY`.
    """
    try:
        with file.open(encoding="utf-8-sig") as stream:
            text = _Text(stream)
            for _ in text.items("{", "}"):
                key = str(text.value())
                text.take(":")
                if key not in keys:
                    text.value()
                    continue
                for place, _ in enumerate(text.items("[", "]")):
                    yield key, place, text.value()
            if text.next():
                raise ValueError("something follows the object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:300], expected) from None


class _Text:
    """A JSON text of which a part is in memory."""

    def __init__(self, stream: TextIO):
        self._stream, self._text, self._at, self._whole = stream, "", 0, False
        self._decode = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """Return the next character that is no space; nothing at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text) or self._whole:
                return self._text[self._at : self._at + 1]
            self._fill()

    def take(self, char: str) -> None:
        """Pass a character. Raises ValueError where another one is next."""
        if self.next() != char:
            raise ValueError(f"{char!r} expected, {self._text[self._at : self._at + 20]!r} found")
        self._at += 1

    def items(self, first: str, last: str) -> Iterator[None]:
        """Pass a bracket, the commas between items, which the caller reads, and the bracket at their end."""
        self.take(first)
        more = self.next() != last
        while more:
            yield
            if more := self.next() != last:
                self.take(",")
        self.take(last)

    def value(self) -> Json:
        """Read a value. Raises ValueError where it is none, or too large."""
        self.next()
        if len(self._text) - self._at < ENTRY and not self._whole:
            self._fill()
        try:
            found, end = self._decode(self._text, self._at)
        except json.JSONDecodeError as error:
            reason = error.msg if self._whole else f"an entry above {ENTRY} characters, or {error.msg}"
            raise ValueError(reason) from None
        if end == len(self._text) and not self._whole:  # the rest of a number may follow
            raise ValueError(f"an entry above {ENTRY} characters")
        self._at = end
        return found

    def _fill(self) -> None:
        self._text, self._at = self._text[self._at :], 0
        more = self._stream.read(2 * ENTRY - len(self._text))
        self._text += more
        self._whole = not more

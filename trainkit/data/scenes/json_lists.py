"""Lists in a JSON file, an entry at a time: of 500 MB no more is in memory than the entries that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TextIO

from trainkit.errors import UserError
from trainkit.files import Json

ENTRY = 2 << 20
"""Most characters of an entry, and of all else that the file holds: an outline of some 150,000 points."""

_SPACE = re.compile(r"[ \t\n\r]*")


class _Unreadable(Exception):
    """The text is no JSON, or an entry is too large."""


def read(file: Path, keys: Collection[str], keep: Callable[[str, str, Json], None], expected: str) -> set[str]:
    """Read the object in a file; return which of `keys` it has lists for.

    `keep` gets the key of each entry of these, its place in words (`images[3]`) and its value, in turn. Raises
    UserError where the file cannot be read or an entry is larger than `ENTRY`, and what `keep` raises.
    """
    found: set[str] = set()
    try:
        with file.open(encoding="utf-8-sig") as stream:
            text = _Text(stream)
            if not text.begins("{"):
                return found
            for _ in text.entries("}"):
                key = str(text.value())
                text.take(":")
                if key not in keys:
                    text.value()
                    continue
                text.take("[")
                found.add(key)
                for place, _ in enumerate(text.entries("]")):
                    keep(key, f"{key}[{place}]", text.value())
            text.ends()
    except (OSError, UnicodeDecodeError, _Unreadable) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:300], expected) from None
    return found


class _Text:
    """A JSON text of which a part is in memory."""

    def __init__(self, stream: TextIO):
        self._stream, self._text, self._at, self._whole, self._before = stream, "", 0, False, 0
        self._decode = json.JSONDecoder().raw_decode

    def begins(self, char: str) -> bool:
        """Pass a character, if it is the next one."""
        if self._next() != char:
            return False
        self._at += 1
        return True

    def take(self, char: str) -> None:
        """Pass a character. Raises _Unreadable where another one is next."""
        if not self.begins(char):
            self.refuse(f"{char!r}")

    def ends(self) -> None:
        """Raise _Unreadable where something follows."""
        if self._next():
            self.refuse("nothing more")

    def entries(self, end: str) -> Iterator[None]:
        """Pass the commas between entries, which the caller reads, and the bracket at their end."""
        if self.begins(end):
            return
        while True:
            yield
            if self.begins(end):
                return
            self.take(",")

    def value(self) -> Json:
        """Read a value."""
        self._next()
        if len(self._text) - self._at < ENTRY and not self._whole:
            self._fill()
        try:
            found, end = self._decode(self._text, self._at)
        except json.JSONDecodeError as error:
            reason = error.msg if self._whole else f"an entry above {ENTRY} characters, or {error.msg}"
            raise _Unreadable(f"{reason}: char {self._before + error.pos}") from None
        except (ValueError, RecursionError) as error:
            raise _Unreadable(str(error)) from None
        if end == len(self._text) and not self._whole:  # the rest of a number may follow
            self.refuse(f"at most {ENTRY} characters an entry")
        self._at = end
        return found

    def refuse(self, expected: str) -> None:
        """Raise _Unreadable for what is next."""
        raise _Unreadable(f"{expected} expected: char {self._before + self._at}")

    def _next(self) -> str:
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text) or self._whole:
                return self._text[self._at : self._at + 1]
            self._fill()

    def _fill(self) -> None:
        self._before += self._at
        self._text, self._at = self._text[self._at :], 0
        more = self._stream.read(2 * ENTRY - len(self._text))
        self._text += more
        self._whole = not more

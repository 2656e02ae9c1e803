"""Define the exception that users see as a sentence and not as a traceback, and the lists in it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable

EXIT_CODE = 2


class UserError(Exception):
    """An error that the user can correct. Commands print it without a traceback and exit with code 2.

    `where` names the place (file, row, key path), `found` what is there, `expected` what should be there, and `remedy`
    what to do.
    """

    told = False
    """True where another process reports it: the same error is not printed by each."""

    def __init__(self, where: str, found: str, expected: str = "", remedy: str = ""):
        self.where, self.found, self.expected, self.remedy = where, found, expected, remedy
        parts = [f"{where}: {found}"]
        if expected:
            parts.append(f"expected {expected}")
        if remedy:
            parts.append(remedy)
        # What ends in a list of lines goes on in a line of its own.
        super().__init__("; ".join(parts).replace("\n; ", "\n"))

    def __reduce__(self):
        """So that one raised in a worker process arrives whole."""
        return UserError, (self.where, self.found, self.expected, self.remedy)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = _FULL | {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


def of_disk(error: OSError, where: str | os.PathLike[str] = "") -> UserError | None:
    """Return the error of a disk that is full, failing or read-only, or refuses a name, as a UserError; else None.

    `where` is a place on that disk, for errors that name no file: those of writing to one that is open.
    """
    if error.errno not in _REFUSED or not (path := os.fspath(error.filename or where)):
        return None
    found = error.strerror or str(error)
    if error.errno == errno.ENAMETOOLONG:
        return UserError(str(path), found, remedy="give a shorter one")
    if error.errno not in _FULL:
        return UserError(str(path), found, remedy="repair the disk or the permissions; files written before are intact")
    folder = os.path.abspath(os.fsdecode(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    with contextlib.suppress(OSError):  # the sentence stands without
        found += f", {shutil.disk_usage(folder).free / 1e6:.1f} MB free"
    return UserError(str(path), found, remedy="free some space; what was written before is intact")


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Escape control characters of a text for the terminal: names of files and classes are anybody's.

    Terminal escapes, carriage returns, changes of the writing direction and bytes that are not UTF-8 are shown as in
    Python's source.
    """
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


FEW = 5
"""Names that a message lists."""


def few(names: Iterable[str], most: int = FEW, of: int = 0) -> str:
    """Join the first names and the number of the others: `a, b, c, d, e and 7 more`; `of` counts all where more exist
    than are given."""
    listed = list(names)
    others = max(len(listed), of) - min(len(listed), most)
    return ", ".join(listed[:most]) + (f" and {others} more" if others else "")


def listing(texts: Iterable[str], most: int = 20) -> str:
    """Join the first texts, each on a line of its own, and the number of the others."""
    every = list(texts)
    lines = every[:most] + ([f"and {len(every) - most} more"] if len(every) > most else [])
    return "".join(f"\n  {line}" for line in lines)


def number_of(count: int, many: str, one: str = "") -> str:
    """Return a count with its noun: `2 masks without an image`, `1 mask without an image`.

    The singular is `one`, by default `many` without the last `s` of its first word.
    """
    first, space, rest = many.partition(" ")
    return f"{count} {many if count != 1 else one or first.removesuffix('s') + space + rest}"

"""The one kind of exception a user sees as a sentence instead of a traceback, and how such sentences list things."""

from __future__ import annotations

from collections.abc import Iterable

EXIT_CODE = 2


class UserError(Exception):
    """A mistake that the user can mend. Commands print it without a traceback and exit with code 2.

    `where` names the place (file, row, key path), `found` what is there, `expected` what should be there, and `remedy`
    what to do.
    """

    told = False
    """Another process says it: the same mistake is not printed by each."""

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


def few(names: Iterable[str], most: int = 5) -> str:
    """The first names and how many more there are: `a, b, c, d, e and 7 more`."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def number_of(count: int, many: str, one: str = "") -> str:
    """A number and what is counted: `2 masks without a picture`, `1 mask without a picture`.

    Of one it is `one`; as given what `many` is but for the last letter of its first word.
    """
    first, space, rest = many.partition(" ")
    return f"{count} {many if count != 1 else one or first.removesuffix('s') + space + rest}"

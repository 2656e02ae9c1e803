"""The one kind of exception a user sees as a sentence instead of a traceback."""

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
        super().__init__("; ".join(parts))

    def __reduce__(self):
        """So that one raised in a worker process arrives whole."""
        return UserError, (self.where, self.found, self.expected, self.remedy)

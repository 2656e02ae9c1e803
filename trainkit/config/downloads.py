"""The block of a recipe for files that `trainkit download` fetches, and the checks of their paths."""

from __future__ import annotations

import importlib.machinery
import re
from dataclasses import dataclass


@dataclass(kw_only=True)
class Download:
    """A file that `trainkit download` fetches; training itself never uses the network."""

    url: str
    """Address, which must be https."""
    sha256: str
    """SHA-256 of the file, 64 hexadecimal digits."""
    to: str
    """Destination below `TRAINKIT_DATA`, else below the current folder. Existing files are never replaced."""
    unpack: str | None = None
    """Folder there into which a zip archive is unpacked, without a single top folder that it may hold. null: not
    unpacked."""

    def __post_init__(self) -> None:
        if not self.url.startswith("https://"):
            raise ValueError(f"url is {self.url!r}; use an https address")
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ValueError("sha256 must be 64 hexadecimal digits in lower case")
        # Whoever wrote the recipe chooses where on this machine a file of theirs is put: not in `~/.ssh`.
        for key, place in {"to": self.to, "unpack": self.unpack}.items():
            if place is not None and not is_plain_path(place):
                raise ValueError(
                    f"{key} is {place!r}; use a plain path below the data folder, without .. ~ or hidden names"
                )
        name = self.to.rpartition("/")[2]
        if "." not in name or is_code(name):
            raise ValueError(f"to is {self.to!r}; use the name of a data file, such as teacher.pth")
        if self.unpack is not None and not self.to.lower().endswith(".zip"):
            raise ValueError(f"unpack is set, but to is {self.to!r}; expected a zip archive, *.zip")


def is_plain_path(path: str) -> bool:
    """Return whether a path that somebody else chose stays below the folder where it begins, without hidden names."""
    return path == path.strip() and all(re.fullmatch(r"[\w][\w.+ ()-]*", part) for part in path.split("/"))


def is_code(name: str) -> bool:
    """Return whether Python or make would take a file of this name for code.

    Without TRAINKIT_DATA files are put where the command was started: where Python looks for modules, make for rules.
    """
    return name.lower().endswith((*importlib.machinery.all_suffixes(), ".pyd")) or name.lower().endswith("makefile")

"""Paths that a list or a JSON file names: kept below one folder, and looked up by listing each folder once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath

from trainkit.data import folders


def inside(name: str, root: Path) -> str | None:
    """Return a path of a list as one below the root, None where it is not."""
    if not folders.is_writable(name):
        return None
    if not {"", ".", ".."} & set(name.split("/")):
        return name
    pure = PurePosixPath(name)
    if pure.is_absolute():
        try:
            pure = pure.relative_to(root.as_posix())
        except ValueError:
            return None
    if not pure.parts or ".." in pure.parts:
        return None
    return pure.as_posix()


class FileListing:
    """Files that are there, by listing each folder once: asking file by file takes a network's disk minutes."""

    def __init__(self) -> None:
        self._listed: dict[str, frozenset[str]] = {}
        self._links: dict[str, frozenset[str]] = {}
        self._out: dict[str, bool] = {}

    def has(self, path: str) -> bool:
        """Return whether a file is there, by its whole path."""
        folder, _, name = path.rpartition("/")
        return name in self._files(folder)

    def leads_out(self, root: Path, name: str) -> bool:
        """Return whether a link on the way to a file below `root` leads out of it: each folder is asked once."""
        folder = name.rpartition("/")[0]
        if folder not in self._out:
            self._out[folder] = folders.leads_out(root, folder)
        if self._out[folder]:
            return True
        place, _, file = f"{root}/{name}".rpartition("/")
        self._files(place)
        return file in self._links[place] and folders.leads_out(root, name)

    def _files(self, folder: str) -> frozenset[str]:
        if folder not in self._listed:
            found, links = [], []
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        links.append(entry.name)
                    if entry.is_file():
                        found.append(entry.name)
            self._listed[folder], self._links[folder] = frozenset(found), frozenset(links)
        return self._listed[folder]

"""Where the paths of a recipe begin, and folders that are not for everybody."""

from __future__ import annotations

import os
from pathlib import Path


def data_root() -> Path:
    """Where relative paths begin: `$TRAINKIT_DATA` when it is set, else the current folder."""
    return Path(os.environ.get("TRAINKIT_DATA") or ".").absolute()


def locate(path: str) -> Path:
    """A path of a recipe as a place on this machine."""
    return data_root() / Path(path).expanduser()


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone can enter, whatever the umask; what is there keeps its mode.

    So a group that shares a store gives it the mode that it wants, once. Raises OSError.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)

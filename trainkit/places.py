"""Where the paths of a recipe begin."""

from __future__ import annotations

import os
from pathlib import Path


def data_root() -> Path:
    """Where relative paths begin: `$TRAINKIT_DATA` when it is set, else the current folder."""
    return Path(os.environ.get("TRAINKIT_DATA") or ".").absolute()


def locate(path: str) -> Path:
    """A path of a recipe as a place on this machine."""
    return data_root() / Path(path).expanduser()

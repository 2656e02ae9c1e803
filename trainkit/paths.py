"""Resolve paths of a recipe, and make folders that only their owner can enter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainkit.errors import UserError


def data_root() -> Path:
    """Return the folder at which relative paths begin: `$TRAINKIT_DATA` when it is set, else the current one."""
    return Path(os.environ.get("TRAINKIT_DATA") or ".").absolute()


def locate(path: str) -> Path:
    """Return a path of a recipe as an absolute path of this machine."""
    return data_root() / Path(path).expanduser()


def user_cache() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/trainkit`, else `~/.cache/trainkit`. Raises UserError."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainkit"
    except RuntimeError:
        remedy = "set HOME, XDG_CACHE_HOME or TRAINKIT_CACHE"
        raise UserError("~/.cache/trainkit", "this user has no home folder", remedy=remedy) from None


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone can enter, whatever the umask; what is there keeps its mode.

    So a group that shares a store gives it the mode that it wants, once. Raises OSError.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def keep_compiled_private() -> None:
    """Set torch.compile's cache to a folder of this user, unless the environment names one.

    Its default, `torchinductor_<user>` in the folder for temporary files, can be made by any user of a shared machine,
    and what lies in it is unpickled and run.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        folder = user_cache() / "compiled"
        make_private(folder)
        usable = os.access(folder, os.W_OK)
    except (OSError, UserError):
        usable = False
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder) if usable else tempfile.mkdtemp(prefix="trainkit-compiled-")

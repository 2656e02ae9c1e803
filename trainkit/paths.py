"""Find recipes, resolve the paths in them, and make folders that only their owner can enter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainkit.errors import UserError


def shipped(folder: str) -> Path:
    """Return a folder that comes with trainkit: `recipes` or `accelerate_configs`.

    In a wheel it is a part of the package, in a checkout it lies beside it.
    """
    package = Path(__file__).resolve().parent
    return package / folder if (package / folder).is_dir() else package.parent / folder


def recipe_file(word: str) -> Path:
    """Return a recipe's file: as given, else one that comes with trainkit: `adadistill` or `recipes/adadistill.yaml`.

    Raises UserError for a word that can be no path.
    """
    path = Path(word)
    try:
        there = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        found = f"cannot be read ({error.strerror})"
        raise UserError(f"{word[:60]}...", found, "a path, or the name of a shipped recipe") from None
    if there or path.parent not in (Path("."), Path("recipes")):
        return path
    file = shipped("recipes") / (path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml")
    return file if file.is_file() else path


def recipe_word(path: Path) -> str:
    """Return a recipe's file as a command takes it: from the current folder, or the name of a shipped one elsewhere."""
    word = os.path.relpath(path)
    return path.stem if word.startswith("..") and path.parent == shipped("recipes") else word


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

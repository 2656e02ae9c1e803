"""A cache of what is made of data once, keyed by the files that it is made of."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from trainkit import terminal
from trainkit.data.rows import row_files
from trainkit.data.rows.writer import JOURNAL, PARTIAL
from trainkit.errors import UserError
from trainkit.paths import data_root, make_private, user_cache

_BESIDE = ".trainkit-packed"
"""Folder of packed sets under the data root."""

Kind = TypeVar("Kind")

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (rows or cases done, those in all)."""


def make_once(
    folder: Path, is_made: Callable[[Path], bool], make: Callable[[Progress], None], what: str, unit: str = "image"
) -> None:
    """Have a folder of the cache made where it is not there yet. Processes that start together make it once.

    The progress of `make` is shown as `what`, counted in `unit`. What killed processes left half made is removed.
    """
    if is_made(folder):
        return
    import filelock

    try:
        make_private(folder.parent)
        # Not over what is there, nor through a link that came with the data.
        with contextlib.suppress(FileExistsError), open(folder.parent / ".gitignore", "x") as note:
            note.write("*\n")
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not is_made(folder):
                _remove_abandoned(folder)
                with terminal.bar(what, unit) as on_progress:
                    make(on_progress)
    except OSError as error:
        remedy = "set TRAINKIT_CACHE to a writable folder"
        raise UserError(str(folder), f"cannot be written ({error.strerror or error})", remedy=remedy) from None


def fill_once(folder: Path, mark: str, write: Callable[[Path], None], what: str) -> Path:
    """Return a folder that `write` fills, the file `mark` last, where it is not there yet.

    It has its name when `write` has returned, so that no reader sees a half; otherwise as `make_once`.
    """

    def make(_: Progress) -> None:
        aside = folder.with_name(f".{folder.name}.part")
        try:
            for stale in (aside, folder):
                shutil.rmtree(stale, ignore_errors=True)
            write(aside)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    make_once(folder, lambda it: (it / mark).is_file(), make, what)
    return folder


def cache_root() -> Path:
    """Return the folder of packed sets: `$TRAINKIT_CACHE`, else beside the data that `$TRAINKIT_DATA` names where that
    can be written, else the user's cache.
    """
    if chosen := os.environ.get("TRAINKIT_CACHE"):
        return Path(chosen).expanduser().absolute()
    if os.environ.get("TRAINKIT_DATA") and _writable(beside := data_root() / _BESIDE):
        return beside
    return user_cache() / "packed"


def place(name: str) -> Path:
    """Return the path of something in the cache."""
    return cache_root() / name


def is_there(key: str) -> bool:
    """Return True where a set was packed under this key."""
    return row_files.is_packed(place(f"{key}-rows"))


def pack_once(
    key: str, kind: Callable[[Path], Kind], make: Callable[[Path, Progress], object], what: str, unit: str = "image"
) -> Kind:
    """Open a set of the cache; where it is not there yet, `make` writes it to the folder that it is given.

    Processes that start together make it once. `what` and `unit` as of `make_once`; raises what `make` raises.
    """
    folder = place(f"{key}-rows")

    def made(on_progress: Progress) -> None:
        _log.info("%s into %s, once", what, folder)
        make(folder, on_progress)

    make_once(folder, row_files.is_packed, made, what, unit)
    return kind(folder)


def _remove_abandoned(own: Path) -> None:
    """Remove folders of the cache that are half made, but for those whose lock another process holds, and for the own
    one that is resumed."""
    import filelock

    for half in own.parent.glob(f".*{PARTIAL}*"):
        name = half.name[1:].rpartition(PARTIAL)[0]
        if name == own.name and (half / JOURNAL).is_file():
            continue
        with contextlib.suppress(filelock.Timeout, OSError):
            lock = filelock.FileLock(own.with_name(name).with_suffix(".lock"), timeout=0)
            with contextlib.nullcontext() if name == own.name else lock:
                shutil.rmtree(half)


def _writable(folder: Path) -> bool:
    folder = folder if os.path.exists(folder) else folder.parent
    try:
        # Permission bits as well as access: the superuser could write to what its owner has set read-only.
        return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)
    except OSError:
        return False


def key(made: list[Any], files: Iterable[Path | str]) -> str:
    """Name a packed set by how and from what it is made: any file that was changed, replaced or added gives another.

    The time of the last change of the file's entry (ctime) is part of it: unlike the time of modification, it cannot be
    carried over from a file that is replaced.
    """
    key = hashlib.sha256(repr(made).encode(errors="surrogateescape"))
    for file in files:
        try:
            seen = os.stat(file)
        except OSError:
            key.update(f"\n{file} missing".encode(errors="surrogateescape"))
            continue
        stamp = f"\n{file} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"
        key.update(stamp.encode(errors="surrogateescape"))
    return key.hexdigest()[:24]

"""Unpack an archive that somebody else made: plain files below one folder, or nothing."""

from __future__ import annotations

import shutil
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from trainkit.config.downloads import is_code, is_plain_path
from trainkit.errors import UserError

MOST_FILES = 5_000_000
_CHUNK = 1 << 20
_DAMAGED = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error, LZMAError)
_Member = tuple[PurePosixPath, int, Callable[[], IO[bytes]]]


def unpack(archive: Path, to: Path) -> int:
    """Unpack a zip or tar archive into the new folder `to`, at once or not at all; returns the number of files.

    Where the archive holds one folder at its top, what is in that goes into `to`. Raises UserError where it holds
    links, devices, code, names that lead elsewhere, a file twice or more than the disk has room for, and where it is
    damaged; then nothing is left of it.
    """
    aside = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        with ExitStack() as opened:
            members = [member for member in _members(archive, opened) if not _of_macos(member[0])]
            _check(archive, members)
            tops = {path.parts[0] for path, _, _ in members}
            depth = 1 if len(tops) == 1 and all(len(path.parts) > 1 for path, _, _ in members) else 0
            aside.mkdir(parents=True)
            for path, size, start in members:
                file = aside.joinpath(*path.parts[depth:])
                file.parent.mkdir(parents=True, exist_ok=True)
                with start() as data, file.open("xb") as out:
                    _copy(data, out, size)
        aside.rename(to)
    except _DAMAGED as error:
        raise UserError(str(archive), f"cannot be unpacked: {error}", remedy=f"unpack it by hand as {to}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return len(members)


def _members(archive: Path, opened: ExitStack) -> Iterator[_Member]:
    """Files of an archive: path in it, size in bytes, and what opens it. Raises ValueError for all but plain files."""
    if archive.name.lower().endswith(".zip"):
        packed = opened.enter_context(zipfile.ZipFile(archive))
        for info in packed.infolist():
            if info.external_attr >> 16 & 0o170000 not in (0, 0o100000, 0o040000):
                raise ValueError(f"{info.filename!r} is a link or a device")
            if not info.is_dir():
                yield PurePosixPath(info.filename), info.file_size, lambda info=info: packed.open(info)
        return
    tar = opened.enter_context(tarfile.open(archive))  # noqa: SIM115 - `opened` closes it
    for number, member in enumerate(tar):
        if number > MOST_FILES or not (member.isreg() or member.isdir()):
            raise ValueError(f"{member.name!r} is a link or a device, or beyond the limit of {MOST_FILES:,} files")
        if member.isreg():
            yield PurePosixPath(member.name), member.size, lambda member=member: _file(tar, member)


def _of_macos(path: PurePosixPath) -> bool:
    """Return whether macOS put a file beside those that were packed."""
    return "__MACOSX" in path.parts or path.name == ".DS_Store" or path.name.startswith("._")


def _file(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    data = tar.extractfile(member)
    if data is None:
        raise ValueError(f"{member.name!r} is not a file")
    return data


def _check(archive: Path, members: list[_Member]) -> None:
    """Raise ValueError for names and sizes that are not unpacked; before anything is written."""
    if not members or len(members) > MOST_FILES:
        raise ValueError(f"it holds {len(members):,} files; expected 1 to {MOST_FILES:,}")
    for path, _, _ in members:
        if not is_plain_path(str(path)) or is_code(path.name):
            raise ValueError(f"{str(path)[:200]!r} leads out of the folder, is hidden or is a code file")
    if len({str(path).casefold() for path, _, _ in members}) < len(members):
        raise ValueError("it holds two files of the same name")
    size, free = sum(size for _, size, _ in members), shutil.disk_usage(archive.parent).free
    if size > free:
        raise ValueError(f"it holds {size / 1e9:.3g} GB, and the disk has {free / 1e9:.3g} GB free")


def _copy(data: IO[bytes], out: IO[bytes], size: int) -> None:
    """Copy a file of the size that the archive states. Raises ValueError where it is another."""
    left = size
    while chunk := data.read(_CHUNK):
        left -= len(chunk)
        if left < 0:
            break
        out.write(chunk)
    if left:
        raise ValueError("a file differs from its stated size")

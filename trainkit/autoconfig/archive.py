"""Unpack a zip archive that somebody else made: plain files below one folder, or nothing.

An archive is read twice: judged from its directory alone, then written. Neither pass takes more memory or time than the
bytes of the archive give it a right to: what a file claims is compared with its own header, and bounded.
"""

from __future__ import annotations

import os
import shutil
import struct
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from trainkit.config.downloads import is_code, is_plain_path
from trainkit.errors import UserError

RATIO, SMALL_BYTES = 200, 64 << 20
"""An archive unpacks to at most `RATIO` times its own bytes, and `SMALL_BYTES` more."""
DEPTH, NAME_BYTES = 32, 255
"""Folders above a file, and the length of each name of its path."""
_CHUNK = 1 << 20
_DAMAGED = (OSError, EOFError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error, struct.error)


def unpack(archive: Path, to: Path) -> int:
    """Unpack a zip archive into the new folder `to`, at once or not at all; returns the number of files.

    Where the archive holds one folder at its top, what is in that goes into `to`. Raises UserError where it holds
    links, code, names that lead elsewhere, a file twice, more than the disk has room for or more than the limits of
    this module, and where it is damaged; then nothing is left of it.
    """
    aside = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        with zipfile.ZipFile(archive) as packed, archive.open("rb") as file:
            found = dict(_files(packed, file, archive.stat().st_size))
            _check_room(archive, sum(info.file_size for info in found.values()), found)
            tops = {path.parts[0] for path in found}
            depth = 1 if len(tops) == 1 and all(len(path.parts) > 1 for path in found) else 0
            aside.mkdir(parents=True)
            for path, info in found.items():
                place = aside.joinpath(*path.parts[depth:])
                place.parent.mkdir(parents=True, exist_ok=True)
                _write(packed, info, place)
        aside.rename(to)
    except _DAMAGED as error:
        said = f"cannot be unpacked: {error or type(error).__name__}"
        raise UserError(str(archive), said, "a zip archive", f"unpack it by hand as {to}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return len(found)


def _check_room(archive: Path, total: int, found: dict[PurePosixPath, zipfile.ZipInfo]) -> None:
    if not found:
        raise ValueError("it holds 0 files; expected 1 or more")
    if len({str(path).casefold() for path in found}) < len(found):
        raise ValueError("it holds two files of the same name")
    if total > (free := shutil.disk_usage(archive.parent).free):
        raise ValueError(f"it holds {total / 1e9:.3g} GB, and the disk has {free / 1e9:.3g} GB free")


def _files(packed: zipfile.ZipFile, file: IO[bytes], own: int) -> Iterator[tuple[PurePosixPath, zipfile.ZipInfo]]:
    """Yield the files that are unpacked. Raises ValueError for entries, names and sizes beyond the limits."""
    most, total, end = RATIO * own + SMALL_BYTES, 0, 0
    for info in sorted(packed.infolist(), key=lambda info: info.header_offset):
        path, shown = PurePosixPath(info.filename), repr(info.filename[:200])
        if info.external_attr >> 16 & 0o170000 not in (0, 0o100000, 0o040000):
            raise ValueError(f"{shown} is a link or a device")
        # Others are unpacked by zipfile whole: 4 kB of bzip2 can be gigabytes.
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{shown} is compressed by another method than deflate")
        if info.header_offset < end:
            raise ValueError(f"{shown} lies within another file")
        end = _end_of_local(file, info)
        total += info.file_size
        if total > most:
            raise ValueError(f"it claims to hold {total:,} bytes or more in {own:,}; expected at most {most:,}")
        of_macos = "__MACOSX" in path.parts or path.name in (".DS_Store", "Icon\r") or path.name.startswith("._")
        if info.is_dir() or of_macos:
            continue
        if len(path.parts) > DEPTH + 1 or any(len(os.fsencode(part)) > NAME_BYTES for part in path.parts):
            raise ValueError(f"{shown} is deeper than {DEPTH} folders, or has a name of more than {NAME_BYTES} bytes")
        if not is_plain_path(str(path)) or is_code(path.name):
            raise ValueError(f"{shown} leads out of the folder, is hidden or is a code file")
        yield path, info


def _write(packed: zipfile.ZipFile, info: zipfile.ZipInfo, place: Path) -> None:
    """Write a file of the size that the archive states. Raises ValueError where it is another."""
    left = info.file_size
    with packed.open(info) as data, place.open("xb") as out:
        while left >= 0 and (chunk := data.read(_CHUNK)):
            left -= len(chunk)
            out.write(chunk)
    if left:
        raise ValueError("a file differs from its stated size")


def _end_of_local(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return where an entry ends. Raises ValueError where its own header differs from the directory."""
    file.seek(info.header_offset)
    head = file.read(30)
    magic, _, flags, method, _, _, packed, size, name, extra = struct.unpack("<4s5H4x2L2H", head)
    sizes = info.compress_size, info.file_size
    # Behind the data (bit 3), or as zip64 beside the name: then these are 0 or all ones.
    same = all(
        here in (said, 0xFFFFFFFF) or (flags & 8 and not here) for here, said in zip((packed, size), sizes, strict=True)
    )
    if magic != b"PK\3\4" or method != info.compress_type or not same:
        raise ValueError(f"{info.filename[:200]!r} is another file by its own header than by the archive's directory")
    return info.header_offset + 30 + name + extra + info.compress_size

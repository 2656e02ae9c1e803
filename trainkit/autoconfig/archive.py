"""Unpack an archive that somebody else made: plain files below one folder, or nothing.

An archive is read twice: judged from its headers alone, then written. Neither pass takes more memory or time than the
bytes of the archive give it a right to: `_Headers` stands between tarfile, which believes what a header claims, and the
unpacked stream; of a zip the local headers are compared with its directory.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import shutil
import struct
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from trainkit.config.downloads import is_code, is_plain_path
from trainkit.errors import UserError

MOST_FILES = 5_000_000
RATIO, SMALL_BYTES = 200, 64 << 20
"""An archive unpacks to at most `RATIO` times its own bytes, and `SMALL_BYTES` more."""
SMALL_ENTRIES, ENTRY_BYTES = 10_000, 16
"""It has at most `SMALL_ENTRIES` entries, and one more for each `ENTRY_BYTES` bytes of its own."""
HEADER_BYTES = 16 << 10
"""Most that a tar archive may say about a file ahead of it: its headers, long names and extended attributes."""
GLOBAL_KEYS = 1_000
DEPTH, NAME_BYTES = 32, 255
"""Folders above a file, and the length of each name of its path."""
_BLOCK = 512
_CHUNK = 1 << 20
_PAX, _GNU_NAMES, _GNU_SPARSE = (b"x", b"X", b"g"), (b"L", b"K"), b"S"
_DIGITS = re.compile(rb"\d{65}")
"""The patterns that tarfile of Python before 3.11.10 looks for take quadratic time over digits."""
_RECORD = re.compile(rb"(\d{1,6}) ([^=\n]{1,255})=")
_DAMAGED = (
    OSError, EOFError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile, tarfile.TarError, zlib.error,
    lzma.LZMAError, struct.error,
)  # fmt: skip
_Chunks = Callable[[], Iterator[bytes]]


def unpack(archive: Path, to: Path) -> int:
    """Unpack a zip or tar archive into the new folder `to`, at once or not at all; returns the number of files.

    Where the archive holds one folder at its top, what is in that goes into `to`. Raises UserError where it holds
    links, devices, code, names that lead elsewhere, a file twice, more than the disk has room for or more than
    the limits of this module, and where it is damaged; then nothing is left of it.
    """
    aside = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        count, depth = _judged(archive)
        aside.mkdir(parents=True)
        for path, size, chunks in _files(archive):
            file = aside.joinpath(*path.parts[depth:])
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as out:
                _copy(chunks(), out, size)
        aside.rename(to)
    except _DAMAGED as error:
        found = f"cannot be unpacked: {error or type(error).__name__}"
        raise UserError(str(archive), found, remedy=f"unpack it by hand as {to}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return count


def _judged(archive: Path) -> tuple[int, int]:
    """Return the number of files, and of folders that all have above them. Raises ValueError; writes nothing."""
    names: set[str] = set()
    tops: set[str] = set()
    total, flat = 0, False
    for path, size, _ in _files(archive):
        name = str(path).casefold()
        if name in names:
            raise ValueError("it holds two files of the same name")
        names.add(name)
        tops.add(path.parts[0])
        flat = flat or len(path.parts) == 1
        total += size
    free = shutil.disk_usage(archive.parent).free
    if total > free:
        raise ValueError(f"it holds {total / 1e9:.3g} GB, and the disk has {free / 1e9:.3g} GB free")
    if not names:
        raise ValueError("it holds 0 files; expected 1 or more")
    return len(names), 1 if len(tops) == 1 and not flat else 0


def _files(archive: Path) -> Iterator[tuple[PurePosixPath, int, _Chunks]]:
    """Yield the files that are unpacked: path, size in bytes, and the content, to be read before the next.

    Raises ValueError for entries, names and sizes beyond the limits.
    """
    own = archive.stat().st_size
    most, entries, total = RATIO * own + SMALL_BYTES, min(MOST_FILES, SMALL_ENTRIES + own // ENTRY_BYTES), 0
    with archive.open("rb") as file:
        kind = _zipped if archive.name.lower().endswith(".zip") else _tarred
        for number, (name, size, chunks) in enumerate(kind(file, most)):
            if number >= entries:
                raise ValueError(f"it holds more than {entries:,} entries in {own:,} bytes")
            total += size
            if size < 0 or total > most:
                raise ValueError(f"it claims to hold {total:,} bytes or more in {own:,}; expected at most {most:,}")
            path = PurePosixPath(name)
            if chunks is not None and not _of_macos(path):
                _check_name(path)
                yield path, size, chunks


def _check_name(path: PurePosixPath) -> None:
    shown = repr(str(path)[:200])
    if len(path.parts) > DEPTH + 1 or any(len(os.fsencode(part)) > NAME_BYTES for part in path.parts):
        raise ValueError(f"{shown} is deeper than {DEPTH} folders, or has a name of more than {NAME_BYTES} bytes")
    if not is_plain_path(str(path)) or is_code(path.name):
        raise ValueError(f"{shown} leads out of the folder, is hidden or is a code file")


def _of_macos(path: PurePosixPath) -> bool:
    """Return whether macOS put a file beside those that were packed."""
    return "__MACOSX" in path.parts or path.name in (".DS_Store", "Icon\r") or path.name.startswith("._")


def _copy(chunks: Iterable[bytes], out: IO[bytes], size: int) -> None:
    """Write a file of the size that the archive states. Raises ValueError where it is another."""
    left = size
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            break
        out.write(chunk)
    if left:
        raise ValueError("a file differs from its stated size")


# ---- zip -------------------------------------------------------------------------------------------------------------


def _zipped(file: IO[bytes], most: int) -> Iterator[tuple[str, int, _Chunks | None]]:
    """Yield name, size and content of each entry of a zip archive, the content None of a folder."""
    with zipfile.ZipFile(file) as packed:
        end = 0
        for info in sorted(packed.infolist(), key=lambda info: info.header_offset):
            shown = repr(info.filename[:200])
            if info.external_attr >> 16 & 0o170000 not in (0, 0o100000, 0o040000):
                raise ValueError(f"{shown} is a link or a device")
            # Others are unpacked by zipfile whole: 4 kB of bzip2 can be gigabytes.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{shown} is compressed by another method than deflate")
            if info.header_offset < end:
                raise ValueError(f"{shown} lies within another file")
            end = _end_of_local(file, info)
            yield info.filename, info.file_size, None if info.is_dir() else _entry(packed, info)


def _entry(packed: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Chunks:
    def chunks() -> Iterator[bytes]:
        with packed.open(info) as data:
            while chunk := data.read(_CHUNK):
                yield chunk

    return chunks


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


# ---- tar -------------------------------------------------------------------------------------------------------------


def _tarred(file: IO[bytes], most: int) -> Iterator[tuple[str, int, _Chunks | None]]:
    """Yield name, size and content of each entry of a tar archive, compressed or not; the content None of a folder."""
    headers = _Headers(_unpacked(file), most)
    with tarfile.open(fileobj=headers, mode="r:") as tar:  # type: ignore[call-overload] # it reads, seeks and tells
        while (member := tar.next()) is not None:
            tar.members.clear()  # otherwise it keeps them all
            if not (member.isreg() or member.isdir()) or member.issparse():
                raise ValueError(f"{member.name[:200]!r} is a link or a device, or a sparse file")
            if len(tar.pax_headers) > GLOBAL_KEYS:
                raise ValueError(f"it says more than {GLOBAL_KEYS} things about all files")
            headers.spent = 0
            yield member.name, member.size, headers.content(member.size) if member.isreg() else None
    if headers.last.strip(b"\0"):  # tarfile takes it for the end
        raise ValueError(f"a damaged header at byte {headers.at - len(headers.last):,}")


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    return lzma.LZMAFile(file) if start == b"\xfd7zXZ\0" else file


class _Headers:
    """A tar archive as tarfile may read it: forward only, and no more about a file than `HEADER_BYTES`."""

    def __init__(self, stream: IO[bytes], most: int):
        self.stream, self.most = stream, most
        self.at = self.spent = 0
        self.last, self._ahead = b"", b""
        """The last header, and its kind while what it announces is still to be read."""

    def tell(self) -> int:
        """Return the place in the unpacked stream."""
        return self.at

    def seek(self, to: int) -> None:
        """Skip the content of a file. Raises ValueError where that goes back or beyond what an archive may hold."""
        if not self.at <= to <= self.most:
            raise ValueError(f"a header claims that the next is at byte {to:,}; expected {self.at:,} to {self.most:,}")
        self.at = self.stream.seek(to)

    def read(self, size: int) -> bytes:
        """Read a header, or what it announces. Raises ValueError where that is too much or not as tar has it."""
        self.spent += size
        if size < 0 or self.spent > HEADER_BYTES:
            raise ValueError(f"headers of {self.spent:,} bytes for one file; expected at most {HEADER_BYTES:,}")
        data = self.stream.read(size)
        self.at += len(data)
        announced, self._ahead = self._ahead, b""
        if announced in _PAX:
            _check_records(data)
        elif not announced and size == _BLOCK:
            self.last = data
            kind = data[156:157]
            if kind == _GNU_SPARSE:
                raise ValueError("it holds a sparse file")
            self._ahead = kind if kind in (*_PAX, *_GNU_NAMES) else b""
        return data

    def content(self, size: int) -> _Chunks:
        """Return what reads the content of the file whose header was read last."""

        def chunks() -> Iterator[bytes]:
            left = size
            while left and (data := self.stream.read(min(_CHUNK, left))):
                left -= len(data)
                self.at += len(data)
                yield data

        return chunks


def _check_records(data: bytes) -> None:
    """Raise ValueError unless an extended header is `LENGTH KEY=VALUE` and a line end, again and again, then zeros."""
    data, at = data.rstrip(b"\0"), 0
    while at < len(data):
        found = _RECORD.match(data, at)
        end = at + int(found[1]) if found else 0
        if found is None or not found.end() < end <= len(data) or data[end - 1] != ord("\n"):
            raise ValueError("a damaged extended header")
        if found[2].startswith(b"GNU.sparse"):
            raise ValueError("it holds a sparse file")
        at = end
    if _DIGITS.search(data):
        raise ValueError("an extended header with a number of more than 64 digits")

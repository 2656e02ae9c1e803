"""Archives of some kilobytes that claim to be large, or become so when they are unpacked."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

MB = 1 << 20


def zipped(**files: bytes) -> bytes:
    """A zip archive of text files, deflated."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(f"{name}.txt", content)
    return out.getvalue()


def by(method: int, size: int) -> bytes:
    """A zip archive of a file of zeros by another method of compression."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as packed:
        packed.writestr("a.txt", bytes(size))
    return out.getvalue()


def overlapping(times: int) -> bytes:
    """A zip archive whose directory names the same compressed file again and again."""
    one = zipped(a=bytes(MB))
    at, end = one.index(b"PK\1\2"), one.index(b"PK\5\6")
    entries = b"".join(one[at:end].replace(b"a.txt", b"%05d" % n) for n in range(times))
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, times, times, len(entries), at, 0)
    return one[:at] + entries + tail


def claims_in_zip(size: int) -> bytes:
    """A zip archive whose directory says by zip64 that a file of 5 bytes has `size`."""
    one = zipped(a=b"12345")
    at, end = one.index(b"PK\1\2"), one.index(b"PK\5\6")
    entry = bytearray(one[at:end])
    struct.pack_into("<L", entry, 24, 0xFFFFFFFF)
    struct.pack_into("<H", entry, 30, 12)
    entry += struct.pack("<HHQ", 1, 8, size)
    return one[:at] + bytes(entry) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(entry), at, 0)


def other_local_name() -> bytes:
    """A zip archive whose file has another name by its own header than by the directory."""
    return zipped(a=b"12345").replace(b"a.txt", b"b.txt", 1)


def other_local_size() -> bytes:
    """A zip archive whose file has another size by its own header than by the directory."""
    one = bytearray(zipped(a=b"12345"))
    struct.pack_into("<L", one, 22, 6)
    return bytes(one)


ARCHIVES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "zip of 200 MB in 200 kB": ("a.zip", lambda: zipped(a=bytes(200 * MB))),
    "zip by bzip2": ("a.zip", lambda: by(zipfile.ZIP_BZIP2, 20 * MB)),
    "zip by lzma": ("a.zip", lambda: by(zipfile.ZIP_LZMA, 20 * MB)),
    "zip of one file 10,000 times": ("a.zip", lambda: overlapping(10_000)),
    "zip64 that claims 2^62 bytes": ("a.zip", lambda: claims_in_zip(1 << 62)),
    "zip with another name in the file": ("a.zip", other_local_name),
    "zip with another size in the file": ("a.zip", other_local_size),
}
"""Name and content of each."""

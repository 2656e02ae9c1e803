"""Archives of some kilobytes that claim to be large, or become so when they are unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Callable

MB = 1 << 20


def head(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The 512 bytes that a tar archive has ahead of a file."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    """Content as tar stores it, in whole blocks."""
    return content + bytes(-len(content) % 512)


def records(kind: bytes = b"x", /, **said: str) -> bytes:
    """An extended header with its own head: what it says of the next file, or with kind g of all that follow."""
    body = b""
    for key, value in said.items():
        rest = f" {key.replace('__', '.')}={value}\n"
        length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
        body += f"{length}{rest}".encode()
    return head("pax", len(body), kind) + padded(body)


def claimed(compress: Callable[[bytes], bytes], kind: bytes, megabytes: int) -> bytes:
    """A header of that kind whose content is zeros of that size, ahead of an empty file; a stream for each megabyte."""
    zeros = compress(bytes(MB)) * megabytes
    return compress(head("x", megabytes * MB, kind)) + zeros + compress(head("a.txt") + bytes(1024))


def old_sparse(claim: int) -> bytes:
    """A file of one byte that GNU tar's old format says to have holes up to `claim`."""
    block = bytearray(head("a.txt", 512, tarfile.GNUTYPE_SPARSE))
    block[386:410] = b"%011o\0%011o\0" % (0, 1)
    block[483:495] = b"%011o\0" % claim
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + padded(b"1") + bytes(1024)


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
    "pax header of 512 MB": ("a.tar.bz2", lambda: claimed(bz2.compress, b"x", 512)),
    "global header of 512 MB": ("a.tar.xz", lambda: claimed(lzma.compress, b"g", 512)),
    "long name of 512 MB": ("a.tar.bz2", lambda: claimed(bz2.compress, b"L", 512)),
    "long link of 512 MB": ("a.tgz", lambda: claimed(gzip.compress, b"K", 512)),
    "long name that claims 8 GB": ("a.tar", lambda: head("x", (1 << 33) - 1, b"L") + bytes(1024)),
    "long names of long names": ("a.tgz", lambda: gzip.compress(head("x", 0, b"L") * 30_000 + head("a.txt"))),
    "pax records that overlap": ("a.tgz", lambda: gzip.compress(head("x", 15_000, b"x") + b"2 " * 7_500 + bytes(872))),
    "pax values of digits alone": (
        "a.tgz",
        lambda: gzip.compress((records(a="1" * 13_000) + head("a.txt", 0, tarfile.DIRTYPE)) * 200),
    ),
    "global headers without end": (
        "a.tgz",
        lambda: gzip.compress(
            b"".join(records(b"g", **{f"k{n}_{k}": "" for k in range(300)}) + head(str(n)) for n in range(99))
        ),
    ),
    "a file that claims 8 GB": ("a.tgz", lambda: gzip.compress(head("a.txt", (1 << 33) - 1))),
    "a file of a negative size": ("a.tar", lambda: head("a.txt", -512) + bytes(1024)),
    "a file of 1 GB in 160 kB": ("a.tar.xz", lambda: claimed(lzma.compress, b"0", 1024)),
    "a pax size of 10^30": ("a.tar", lambda: records(size="1" + "0" * 30) + head("a.txt") + bytes(1024)),
    "50,000 folders in 110 kB": ("a.tgz", lambda: gzip.compress(head("a", 0, tarfile.DIRTYPE) * 50_000)),
    "a sparse file of GNU's old format": ("a.tar", lambda: old_sparse(1 << 32)),
    "a sparse file of pax 0.1": (
        "a.tar",
        lambda: records(GNU__sparse__map="0,1", GNU__sparse__size="99999999999") + head("a.txt", 1) + padded(b"1"),
    ),
    "a sparse file of pax 1.0": (
        "a.tar",
        lambda: (
            records(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__realsize="99999999999")
            + head("a.txt", 1)
            + padded(b"1")
        ),
    ),
    "zip of 200 MB in 200 kB": ("a.zip", lambda: zipped(a=bytes(200 * MB))),
    "zip by bzip2": ("a.zip", lambda: by(zipfile.ZIP_BZIP2, 20 * MB)),
    "zip by lzma": ("a.zip", lambda: by(zipfile.ZIP_LZMA, 20 * MB)),
    "zip of one file 10,000 times": ("a.zip", lambda: overlapping(10_000)),
    "zip64 that claims 2^62 bytes": ("a.zip", lambda: claims_in_zip(1 << 62)),
    "zip with another name in the file": ("a.zip", other_local_name),
    "zip with another size in the file": ("a.zip", other_local_size),
}
"""Name and content of each."""

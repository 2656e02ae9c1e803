"""Write files atomically, and follow no symbolic link."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any

Json = Any
"""A value that JSON has: text, number, boolean, null, or lists and objects of such."""

NETWORK_DISK = re.compile(r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|afs|9p|fuse\.(sshfs|s3fs|gcsfuse|rclone)")
"""File systems on which SQLite is not safe, and on which another machine may cut a file that is mapped here."""


def write_aside(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, and a crash, sees all of it or the old one; then it is there for good."""
    out = path.with_name(f".{path.name}.new")
    try:
        with open(out, "wb", opener=through_no_link) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(out, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            out.unlink(missing_ok=True)  # on a full disk every byte counts
        error.filename = str(path)
        raise


def through_no_link(path: str, flags: int) -> int:
    """Open a file as `opener` of `open`. Raises OSError for a symbolic link, which others may have laid there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk: a rename is not before."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Sync a file that is closed to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on; empty where the system does not say."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return ""
    here = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(here, key=lambda entry: len(entry[0]), default=("", ""))[1]


def on_network(folder: Path) -> bool:
    """Return True for a folder on a disk that other machines write to as well."""
    return NETWORK_DISK.match(file_system(folder)) is not None

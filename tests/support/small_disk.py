"""A disk of a few megabytes: a tmpfs that only processes see that enter the namespace it is mounted in."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "TEST_NAMESPACE"
"""In the environment of a fork of the fork server: id of the process whose namespace it enters."""
_MOUNT = 'mount -t tmpfs -o "size=$1,$3" none "$2" && echo mounted && exec cat'


@dataclass(frozen=True)
class Disk:
    """A small disk, mounted at `place` for those who enter."""

    place: Path
    holder: int

    @property
    def seen(self) -> Path:
        """Where it is seen from outside. Databases are to be copied before they are opened: SQLite resolves links."""
        return Path(f"/proc/{self.holder}/root{self.place}")

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to enter."""
        return {VARIABLE: str(self.holder)}

    @property
    def within(self) -> list[str]:
        """In front of the words of a command that is to enter."""
        return ["nsenter", "-t", str(self.holder), "-U", "-m", "--preserve-credentials"]

    @property
    def free(self) -> int:
        """Bytes."""
        state = os.statvfs(self.seen)
        return state.f_bavail * state.f_frsize

    def fill(self, leave: int) -> None:
        """Put a file there that leaves so many bytes, up to a page."""
        self.empty()
        with open(self.seen / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free - leave))

    def empty(self) -> None:
        """Take that file away."""
        (self.seen / "ballast").unlink(missing_ok=True)


@contextmanager
def mounted(place: Path, megabytes: float, how: str = "rw") -> Iterator[Disk]:
    """Such a disk at a folder, as long as it lasts; the test is skipped where no namespace can be made."""
    place.mkdir(parents=True, exist_ok=True)
    words = ["unshare", "-Urm", "sh", "-c", _MOUNT, "sh", str(int(megabytes * 2**20)), str(place), how]
    try:
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    with holder:
        if holder.stdout.readline() != b"mounted\n":
            pytest.skip("no file system can be mounted here")
        try:
            yield Disk(place, holder.pid)
        finally:
            holder.stdin.close()


def enter_from_environment() -> None:
    """Enter the namespace that the environment names. For a process with one thread."""
    holder = os.environ.pop(VARIABLE, None)
    if holder is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt")]
    for kind in kinds:
        if libc.setns(kind, 0):
            raise OSError(ctypes.get_errno(), "the namespace cannot be entered")
        os.close(kind)

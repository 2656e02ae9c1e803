"""What a power cut may leave of a folder: everything that was synced, and of the rest whatever the disk had got to.

After ALICE (Pillai et al., OSDI 2014). `recorded` notes what a program does to the files below a folder. `after` is the
folder as it may be found when the power went off behind the n-th of these operations:

- the bytes of a file are there for certain up to its last fsync; of what was written since there may be all, a part,
  zeros in its place, or nothing;
- a name (made, renamed, removed) is there for certain once its folder was synced; of the others there may be any.
"""

from __future__ import annotations

import _pyio
import builtins
import io
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DATA = ("lost", "zeros", "whole", "any")
"""What becomes of bytes that were not synced."""
NAMES = ("lost", "kept", "any")
"""And of names."""


@dataclass
class Operation:
    """One thing that was done; paths are relative to the folder, and files have numbers that stay when they move."""

    kind: str
    path: str = ""
    to: str = ""
    file: int = -1
    at: int = 0
    data: bytes = b""


@dataclass
class Recording:
    """Operations in their order, and marks between them."""

    root: str
    operations: list[Operation] = field(default_factory=list)
    marks: list[tuple[int, str, object]] = field(default_factory=list)

    def mark(self, what: str, value: object = None) -> None:
        """Note that something was reached, such as a checkpoint that is said to be written."""
        self.marks.append((len(self.operations), what, value))

    def reached(self, n: int, what: str) -> list[object]:
        """What was marked so until the n-th operation was done."""
        return [value for at, name, value in self.marks if name == what and at <= n]

    def inside(self, path: object, folder: int | None = None) -> str | None:
        """A path relative to the root; None where it lies elsewhere."""
        text = os.fsdecode(path)
        if folder is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        text = os.path.abspath(text)
        return os.path.relpath(text, self.root) if text.startswith(self.root + os.sep) or text == self.root else None


@contextmanager
def recorded(root: Path) -> Iterator[Recording]:
    """Note what is done to files below a folder, by way of Python's own calls."""
    recording, real, open_files = Recording(str(root)), {}, {}

    def add(*words, **more) -> None:
        recording.operations.append(Operation(*words, **more))

    def opened(path, flags, mode=0o777, *, dir_fd=None):
        name = recording.inside(path, dir_fd)
        there = name is not None and os.path.lexists(path) if dir_fd is None else True
        descriptor = real["open"](path, flags, mode, dir_fd=dir_fd)
        if name is not None:
            number = os.fstat(descriptor).st_ino
            open_files[descriptor] = (number, name)
            if flags & os.O_CREAT and not there:
                add("create", name, file=number)
            elif flags & os.O_TRUNC:
                add("truncate", file=number, at=0)
        return descriptor

    def written(descriptor, data):
        at = os.lseek(descriptor, 0, os.SEEK_CUR) if descriptor in open_files else 0
        taken = real["write"](descriptor, data)
        if descriptor in open_files:
            add("write", file=open_files[descriptor][0], at=at, data=bytes(data[:taken]))
        return taken

    def truncated(descriptor, size):
        real["ftruncate"](descriptor, size)
        if descriptor in open_files:
            add("truncate", file=open_files[descriptor][0], at=size)

    def synced(descriptor):
        real["fsync"](descriptor)
        if descriptor in open_files:
            number, name = open_files[descriptor]
            add("sync", name if os.path.isdir(os.path.join(recording.root, name)) else "", file=number)

    def copied(descriptor):
        other = real["dup"](descriptor)
        if descriptor in open_files:
            open_files[other] = open_files[descriptor]
        return other

    def closed(descriptor):
        open_files.pop(descriptor, None)
        real["close"](descriptor)

    def moved(kind):
        def move(source, target, **more):
            real[kind](source, target, **more)
            add("link" if kind == "link" else "rename", recording.inside(source), recording.inside(target))

        return move

    def named(kind):
        def act(path, *rest, dir_fd=None, **more):
            name = recording.inside(path, dir_fd)
            real[kind](path, *rest, dir_fd=dir_fd, **more)
            if name is not None:
                add({"unlink": "remove", "remove": "remove", "rmdir": "remove"}.get(kind, kind), name)

        return act

    replaced = {
        "open": opened, "write": written, "ftruncate": truncated, "fsync": synced, "dup": copied, "close": closed,
        **{kind: moved(kind) for kind in ("rename", "replace", "link")},
        **{kind: named(kind) for kind in ("mkdir", "unlink", "remove", "rmdir")},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, function in replaced.items():
            real[name] = getattr(os, name)
            patch.setattr(os, name, function)
        patch.setattr(builtins, "open", _pyio.open)  # Python's own, in C, would write past what is patched
        patch.setattr(io, "open", _pyio.open)
        yield recording


def after(recording: Recording, n: int, out: Path, data: str, names: str, rng: random.Random) -> None:
    """Make the folder `out` as it may be found when the power goes off behind the first n operations."""
    done = recording.operations[:n]
    contents = {number: _content(done, number, data, rng) for number in {o.file for o in done if o.file >= 0}}
    root: dict[str, object] = {}
    for operation, certain in _certain(done):
        if certain or names == "kept" or (names == "any" and rng.random() < 0.5):
            _apply(root, operation)
    _make(root, contents, out)


def _content(done: Sequence[Operation], number: int, fate: str, rng: random.Random) -> bytes:
    mine = [o for o in done if o.file == number and o.kind in ("create", "write", "truncate", "sync")]
    synced = max((i for i, o in enumerate(mine) if o.kind == "sync"), default=-1)
    content = bytearray()
    for i, o in enumerate(mine):
        what = "whole" if i <= synced else rng.choice(("lost", "zeros", "whole", "part")) if fate == "any" else fate
        if what == "lost":
            continue
        if o.kind == "truncate":
            del content[o.at :]
        elif o.kind == "write":
            piece = o.data[: rng.randrange(len(o.data) + 1)] if what == "part" else o.data
            piece = bytes(len(piece)) if what == "zeros" else piece
            content.extend(bytes(max(0, o.at - len(content))))
            content[o.at : o.at + len(piece)] = piece
    return bytes(content)


def _certain(done: Sequence[Operation]) -> Iterator[tuple[Operation, bool]]:
    """Operations on names, and whether the folders that they touch were synced afterwards."""
    for i, o in enumerate(done):
        if o.kind in ("create", "mkdir", "rename", "link", "remove"):
            touched = {os.path.dirname(path) or "." for path in (o.path, o.to) if path}
            later = {p.path for p in done[i + 1 :] if p.kind == "sync" and p.path}
            yield o, touched <= later


def _apply(root: dict[str, object], o: Operation) -> None:
    """Change names; what has lost its ground is left out."""

    def place(path: str) -> tuple[dict[str, object] | None, str]:
        *folders, name = path.split(os.sep)
        at = root
        for folder in folders:
            at = at.get(folder) if isinstance(at, dict) else None
        return at if isinstance(at, dict) else None, name

    folder, name = place(o.path)
    if folder is None:
        return
    if o.kind in ("create", "mkdir"):
        folder.setdefault(name, o.file if o.kind == "create" else {})
    elif o.kind == "remove":
        folder.pop(name, None)
    elif name in folder and (other := place(o.to))[0] is not None:
        other[0][other[1]] = folder[name]
        if o.kind == "rename":
            del folder[name]


def _make(tree: dict[str, object], contents: dict[int, bytes], out: Path) -> None:
    out.mkdir()
    for name, member in tree.items():
        if isinstance(member, dict):
            _make(member, contents, out / name)
        else:
            (out / name).write_bytes(contents[member])

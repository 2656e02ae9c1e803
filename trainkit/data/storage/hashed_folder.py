"""Folders that can say whether they are what was written: a manifest has the hashes of all files, and a digest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from trainkit.data import folders
from trainkit.errors import UserError

MANIFEST_LIMIT = 1 << 20
"""Largest manifest that is read, in bytes."""

HASHED_AT_OPEN = 64 << 20
"""Largest file whose SHA-256 is compared whenever the folder is opened, in bytes."""

REBUILD = "remove the folder and import the set again"
RENAME = f"rename them in its source, {REBUILD}"


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(path: Path, error: Exception) -> UserError:
    """What to raise about a file that cannot be read."""
    text = " ".join(str(error).split())[:120] or type(error).__name__
    return UserError(str(path), f"cannot be read ({text})", remedy=REBUILD)


def mapped(path: Path) -> np.ndarray:
    """The array of an .npy file, memory-mapped. Raises UserError where it cannot be read; objects are not."""
    try:
        # Not `np.load`, which would take an archive of arrays for one too.
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, OverflowError, TypeError) as error:
        raise unreadable(path, error) from None


def lines(path: Path, count: int) -> list[str]:
    """The first so many lines of a file. Raises UserError where it cannot be read, or has fewer."""
    try:
        found = path.read_text("utf-8").split("\n")[:count]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    if len(found) < count:
        raise UserError(str(path), f"{len(found)} lines", f"{count}", REBUILD)
    return found


def listed(path: Path) -> tuple[str, ...]:
    """The names in a JSON file that is a list of them. Raises UserError where it is not, or where tables hold none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise UserError(str(path), "no list of texts", remedy=REBUILD)
    folders.check_names(str(path), found, RENAME)
    return tuple(found)


def read_manifest(path: Path, form: str, version: int, what: str, make: str) -> dict[str, Any]:
    """The manifest of the folder `path`, of this `form` and `version`. Raises UserError when there is none.

    `what` is such a folder in words, `make` the command that makes one.
    """
    file = path / "manifest.json"
    try:
        if file.stat().st_size > MANIFEST_LIMIT:
            raise UserError(str(file), "more than 1 MB", "a manifest", REBUILD)
        manifest = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        found = "no manifest.json" if path.exists() else "does not exist"
        raise UserError(str(path), found, what, f"make one with {make}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:300], remedy=REBUILD) from None
    if not isinstance(manifest, dict) or manifest.get("format") != form:
        raise UserError(str(file), f"not the manifest of {what}", f'"format": "{form}"')
    if manifest.get("version") != version:
        raise UserError(str(file), f"version {manifest.get('version')}"[:100], str(version), "import the set again")
    return manifest


def check_entries(path: Path, manifest: Mapping[str, Any], needed: Iterable[str]) -> None:
    """Raise UserError where a manifest does not list the `needed` files, and these alone, with size and SHA-256.

    They are a fixed list, so a manifest cannot point outside its folder.
    """
    file, entries = str(path / "manifest.json"), manifest.get("files")
    if not isinstance(entries, dict) or set(entries) != set(needed):
        found = sorted(entries) if isinstance(entries, dict) else entries
        raise UserError(file, f"files {found!r}"[:300], f"{sorted(needed)}", REBUILD)
    for name, entry in entries.items():
        if not (isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)):
            raise UserError(file, f"files.{name}: {entry!r}"[:200], "bytes and sha256", REBUILD)


def check_digest(path: Path, manifest: Mapping[str, Any], digest: str) -> None:
    """Raise UserError where the digest in a manifest is not that of its entries."""
    if manifest["digest"] != digest:
        raise UserError(str(path / "manifest.json"), "its digest does not fit its entries", remedy=REBUILD)


class Hashed(ABC):
    """Such a folder opened for reading. Pickles as its path, so spawned workers map the files themselves."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        """Compare the sizes of all files and the hashes of the small ones, and map them. Raises UserError."""
        self.path, self.manifest = path, manifest
        for name, entry in manifest["files"].items():
            file = path / name
            try:
                size = file.stat().st_size
            except OSError:
                raise UserError(str(file), "is missing", remedy=REBUILD) from None
            if size != entry["bytes"]:
                raise UserError(str(file), f"{size} bytes", f"{entry['bytes']}", REBUILD)
            if size <= HASHED_AT_OPEN and sha256(file) != entry["sha256"]:
                raise UserError(str(file), "is not what was written (SHA-256 differs)", remedy=REBUILD)
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.manifest = state["path"], state["manifest"]
        self._map()

    @abstractmethod
    def _map(self) -> None:
        """Open the arrays; files are there and of the right sizes."""

    @property
    def digest(self) -> str:
        """SHA-256 of the whole."""
        return self.manifest["digest"]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry["bytes"] for entry in self.manifest["files"].values())

    def changed(self) -> list[str]:
        """Sentences about files that are not what was written. Reads every byte."""
        return [
            f"{self.path / name}: is not what was written (SHA-256 differs)"
            for name, entry in self.manifest["files"].items()
            if sha256(self.path / name) != entry["sha256"]
        ]


class Aside:
    """Writes such a folder aside and renames it when it is whole; nothing is left of a failure."""

    def __init__(self, out: Path, names: Iterable[str]):
        """`names` are the files that are open while it is written. Raises UserError where `out` is there already."""
        if out.exists():
            raise UserError(str(out), "exists", "a folder that is not there yet", "remove it or choose another")
        self.out, self._names = out, names
        self.folder = out.with_name(f".{out.name}.partial-{uuid.uuid4().hex[:8]}")

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True)
            self._files = {name: (self.folder / name).open("wb") for name in self._names}
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise UserError(str(self.out), f"cannot be written ({error.strerror or error})") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for file in self._files.values():
            # What a full disk kept from being written is written when closing, and fails again.
            try:
                file.close()
            except OSError as late:
                error = error or late
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(str(self.out), f"cannot be written ({error.strerror or error})") from error

    def _publish(self, manifest: dict[str, Any], digest_of: Callable[[dict[str, Any]], str]) -> None:
        """Add sizes, hashes and the digest to the manifest, make all durable, and give the folder its name."""
        for file in self._files.values():
            file.close()
        entries = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(self.folder.iterdir())}
        manifest["files"] = entries
        manifest["digest"] = digest_of(manifest)
        (self.folder / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")
        for path in self.folder.iterdir():
            _sync(path)
        _sync(self.folder)
        self.folder.rename(self.out)
        _sync(self.out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Folders whose manifest has the hashes of all files and a digest: written aside, verified when they are opened."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import DTypeLike

from trainkit.data import folders
from trainkit.errors import UserError
from trainkit.files import Json, sync_folder

MANIFEST_LIMIT = 1 << 20
"""Largest manifest that is read, in bytes."""

HASHED_AT_OPEN = 64 << 20
"""Largest file whose SHA-256 is compared whenever the folder is opened, in bytes."""

_CHANGED = "is not what was written (SHA-256 differs)"
PARTIAL = ".partial-"
"""Part of the name of a folder that is being written, between its final name and a random one."""
REBUILD = "remove the folder and import the set again"
RENAME = f"rename them in its source, {REBUILD}"


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(path: Path, error: Exception) -> UserError:
    """Return the UserError about a file that cannot be read."""
    text = " ".join(str(error).split())[:120] or type(error).__name__
    return UserError(str(path), f"cannot be read ({text})", remedy=REBUILD)


def mapped(path: Path) -> np.ndarray:
    """Map the array of an .npy file. Raises UserError where it cannot be read; objects are not."""
    try:
        # Not `np.load`, which would take an archive of arrays for one too. As a plain array: slicing a memmap object
        # takes several times as long.
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, OverflowError, TypeError) as error:
        raise unreadable(path, error) from None


def listed(path: Path) -> tuple[str, ...]:
    """Read a JSON file that is a list of names. Raises UserError for others, and for names that tables cannot hold."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise UserError(str(path), "no list of texts", remedy=REBUILD)
    folders.check_names(str(path), found, RENAME)
    return tuple(found)


@dataclass(frozen=True)
class Form:
    """A kind of hashed folder."""

    format: str
    version: int
    described: str
    """Such a folder in words."""
    command: str = "trainkit"
    """The command that makes one."""


class HashedFolder(ABC):
    """A hashed folder opened for reading. Pickles as its path, so spawned workers map the files themselves."""

    FORM: ClassVar[Form]

    def __init__(self, path: Path | str):
        """Check manifest, digest, sizes of all files and hashes of the small ones, and map them. Raises UserError."""
        self.path = Path(path)
        self.manifest = manifest = self._read_manifest()
        _check_entries(self.path, manifest, self._check_manifest(manifest))
        if manifest.get("digest") != self.digest_of(manifest):
            raise self.damaged("manifest.json", "its digest does not match its entries")
        for name, entry in manifest["files"].items():
            try:
                size = (self.path / name).stat().st_size
            except OSError:
                raise self.damaged(name, "is missing") from None
            if size != entry["bytes"]:
                raise self.damaged(name, f"{size} bytes", f"{entry['bytes']}")
            if size <= HASHED_AT_OPEN and sha256(self.path / name) != entry["sha256"]:
                raise self.damaged(name, _CHANGED)
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.manifest = state["path"], state["manifest"]
        self._map()

    def _read_manifest(self) -> dict[str, Json]:
        file, form = self.path / "manifest.json", self.FORM
        try:
            if file.stat().st_size > MANIFEST_LIMIT:
                raise UserError(str(file), "more than 1 MB", "a manifest", REBUILD)
            manifest = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            found = "no manifest.json" if self.path.exists() else "does not exist"
            raise UserError(str(self.path), found, form.described, f"create one with {form.command}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(str(file), f"cannot be read ({error})"[:300], remedy=REBUILD) from None
        if not isinstance(manifest, dict) or manifest.get("format") != form.format:
            raise UserError(str(file), f"not the manifest of {form.described}", f'"format": "{form.format}"')
        if (version := manifest.get("version")) != form.version:
            raise UserError(str(file), f"version {version}"[:100], str(form.version), "import the set again")
        return manifest

    @classmethod
    @abstractmethod
    def identity(cls, manifest: Mapping[str, Json]) -> Sequence[str]:
        """Return lines that the digest is of, beside the hashes of the files."""

    @classmethod
    def digest_of(cls, manifest: Mapping[str, Json]) -> str:
        """Compute the SHA-256 of a folder from what its manifest says of it and the hashes of its files."""
        files = ((name, entry["sha256"]) for name, entry in sorted(manifest["files"].items()))
        lines = [cls.FORM.format, str(cls.FORM.version), *cls.identity(manifest), *(f"{n} {hash}" for n, hash in files)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @abstractmethod
    def _check_manifest(self, manifest: dict[str, Json]) -> Iterable[str]:
        """Return the names of the files that there must be. Raises UserError for entries that cannot be."""

    @abstractmethod
    def _map(self) -> None:
        """Open the arrays; files are there and of the right sizes."""

    def damaged(self, name: str, found: str, expected: str = "") -> UserError:
        """Return the UserError about one of the files."""
        return UserError(str(self.path / name), found, expected, REBUILD)

    def refuse_entries(self, manifest: Mapping[str, Json], wrong: Mapping[str, bool], expected: str = "") -> None:
        """Raise UserError for the first entry of a manifest that is marked as wrong."""
        for key in wrong:
            if wrong[key]:
                raise self.damaged("manifest.json", f"{key}: {manifest.get(key)!r}"[:200], expected)

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Map an .npy file. Raises UserError where it holds another array."""
        array = mapped(self.path / name)
        if array.shape != shape or array.dtype != dtype:
            raise self.damaged(name, f"{array.dtype} {array.shape}", f"{dtype} {shape}")
        return array

    def flat(self, name: str, dtype: DTypeLike = np.uint8) -> np.ndarray:
        """Map a file of numbers end to end. Raises UserError where it cannot be read."""
        if self.manifest["files"][name]["bytes"] == 0:
            return np.empty(0, dtype)
        try:
            return np.asarray(np.memmap(self.path / name, dtype=dtype, mode="r"))
        except (OSError, ValueError) as error:
            raise unreadable(self.path / name, error) from None

    def pieces(self, name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Map a file of rows end to end, and `offsets.npy`, int64 (rows + 1,), where each begins. Raises UserError."""
        data, offsets = self.flat(name), self.array("offsets.npy", "int64", (rows + 1,))
        if offsets[0] != 0 or offsets[-1] != data.size or (offsets[1:] < offsets[:-1]).any():
            raise self.damaged("offsets.npy", f"offsets do not match {name}")
        return data, offsets

    def lines(self, name: str, count: int) -> list[str]:
        """Read the first `count` lines of a file. Raises UserError where it cannot be read, or has fewer."""
        try:
            found = (self.path / name).read_text("utf-8").split("\n")[:count]
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(self.path / name, error) from None
        if len(found) < count:
            raise self.damaged(name, f"{len(found)} lines", f"{count}")
        return found

    @property
    def digest(self) -> str:
        """SHA-256 of the whole."""
        return self.manifest["digest"]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry["bytes"] for entry in self.manifest["files"].values())

    def changed(self) -> list[str]:
        """Return sentences about files that are not what was written. Reads every byte."""
        return [
            f"{self.path / name}: {_CHANGED}"
            for name, entry in self.manifest["files"].items()
            if sha256(self.path / name) != entry["sha256"]
        ]


def _check_entries(path: Path, manifest: Mapping[str, Json], needed: Iterable[str]) -> None:
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


class RowFolder(HashedFolder):
    """A hashed folder of rows, each with a name in `ids.txt`."""

    def __len__(self) -> int:
        return self.manifest["rows"]

    def ids(self) -> list[str]:
        """Read the name of every row in its source."""
        return self.lines("ids.txt", len(self))

    def where(self, row: int) -> str:
        """Describe a row's place, for messages."""
        try:
            return f"{self.path}, row {row} ({self.ids()[row]})"
        except (UserError, IndexError):
            return f"{self.path}, row {row}"


class FolderWriter:
    """Writes a hashed folder aside and renames it when it is whole; nothing is left of a failure."""

    def __init__(self, out: Path | str, names: Iterable[str] = ()):
        """`names` are the files that are open while it is written. Raises UserError where `out` already exists."""
        self.out, self._names = Path(out), names
        if self.out.exists():
            raise UserError(str(out), "exists", "a new folder", "remove it or choose another")
        self.folder = self.out.with_name(f".{self.out.name}{PARTIAL}{uuid.uuid4().hex[:8]}")

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

    def save(self, name: str, array: np.ndarray) -> None:
        """Write one more array of the folder."""
        np.save(self.folder / name, array, allow_pickle=False)

    def save_lines(self, name: str, lines: Iterable[str]) -> None:
        """Write names one a line; line breaks in one would shift all behind it."""
        lines = (line.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") for line in lines)
        (self.folder / name).write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))

    def publish(self, kind: type[HashedFolder], manifest: Mapping[str, Json]) -> None:
        """Write the manifest with form, sizes, hashes and digest, make all durable, and give the folder its name."""
        for file in self._files.values():
            file.close()
        files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(self.folder.iterdir())}
        whole = {"format": kind.FORM.format, "version": kind.FORM.version, **manifest, "files": files}
        whole["digest"] = kind.digest_of(whole)
        (self.folder / "manifest.json").write_text(json.dumps(whole, indent=1), "utf-8")
        for path in (*self.folder.iterdir(), self.folder):
            sync_folder(path)
        self.folder.rename(self.out)
        sync_folder(self.out.parent)

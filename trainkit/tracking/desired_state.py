"""Write down what MLflow is to show of a run besides its metrics: tags, files, data sets, models, child runs, status.

    {"kind": "tag", "key": "trainkit.note", "value": "x"}
    {"kind": "file", "key": "tables/metrics.csv", "value": {"at": "files/3f2a", "file": "metrics.csv", "crc": 7}}

Each line of `desired.jsonl` sets one thing, and of several lines about one thing the last counts; the value null takes
it back. A file lies at `files/3f2a/metrics.csv` until MLflow has it. `desired.jsonl` only grows, so that a position in
it says how far MLflow is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.files import sync_file, sync_folder
from trainkit.tracking.journal import Lines
from trainkit.tracking.run_folder import RunFolder, without_waiting

FILE = "desired.jsonl"
_FILES = "files"
"""Folder of the files that MLflow has not got yet."""
_PLACE = re.compile(rf"{_FILES}/\w+")
_LARGE = 64 << 20
_MOST_IN_MEMORY = 100
"""Files that wait in memory for a disk that takes them."""

_log = logging.getLogger("trainkit")


class Wanted(NamedTuple):
    """One thing that MLflow is to show."""

    kind: str
    """tag, file, dataset, model, child or status."""
    key: str
    """What it is of its kind: the name of a tag, the path of a file, the name and step of a model."""
    value: Any
    position: int
    """Bytes of the file up to the end of its line."""


class Waiting(NamedTuple):
    """A file that the disk has not taken yet."""

    kind: str
    key: str
    value: dict[str, Any]
    name: str
    write: Callable[[Path], object]


class DesiredState:
    """Writes the desired state of a run, in the one process that has claimed it; safe to use from several threads.

    A line or a file that the disk refuses waits in memory for the next one.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._lock = threading.RLock()
        self._lines = Lines(folder.path / FILE, hold=0.0)
        self._wanted = _last_of_each(_entries(self._lines.path))
        self._waiting: list[Waiting] = []
        self._unsynced: list[Path] = []
        self._warned = False

    @property
    def position(self) -> int:
        """Bytes appended so far."""
        with self._lock:
            return self._lines.position

    def wanted(self) -> list[Wanted]:
        """Return all that is wanted, what was set first coming first."""
        with self._lock:
            return list(self._wanted.values())

    def set(self, kind: str, key: str, value: Any) -> None:
        """Set one thing, or with None take it back. A disk that refuses the line is no error: it waits in memory."""
        with self._lock:
            position = self._lines.append({"kind": kind, "key": key, "value": value})
            _put(self._wanted, Wanted(kind, key, value, position))

    def set_file(self, kind: str, key: str, value: dict[str, Any], name: str, write: Callable[[Path], object]) -> None:
        """Set one thing that has a file `name`, which `write` makes. It appears complete or not at all.

        Where the disk refuses it, it waits in memory until the next file, or `write_waiting`. Raises UserError when the
        run's folder is gone.
        """
        with self._lock:
            self._waiting = [one for one in self._waiting if one[:2] != (kind, key)]
            self._waiting.append(Waiting(kind, key, value, name, write))
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write files that wait in memory to the disk."""
        with self._lock:
            while self._waiting:
                try:
                    self._write_file(self._waiting[0])
                except OSError as error:
                    if not self._warned:
                        self._warned = True
                        said = "%s: %s; training continues, its files wait in memory"
                        _log.warning(said, self.folder.path / _FILES, error)
                    break
                except BaseException:
                    del self._waiting[0]
                    raise
                del self._waiting[0]
            for lost in self._waiting[:-_MOST_IN_MEMORY]:
                _log.warning("%s: %s is lost, too many files wait in memory", self.folder.path, lost.name)
            self._waiting = self._waiting[-_MOST_IN_MEMORY:]
            if self._waiting:
                self.folder.refuse_deleted()

    def unwritten(self) -> list[str]:
        """Return names of what waits in memory: it is lost with the process unless the disk takes it."""
        with self._lock:
            return [one.name for one in self._waiting] + [FILE] * bool(self._lines.held)

    def _write_file(self, one: Waiting) -> None:
        files, at = self.folder.path / _FILES, uuid.uuid4().hex[:12]
        if not files.is_dir():
            files.mkdir()
            sync_folder(self.folder.path)
        aside = files / f".{at}"
        try:
            aside.mkdir()
            one.write(aside / one.name)
            crc = _crc(aside / one.name)
            aside.rename(files / at)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._unsynced.append(files / at)
        self.set(one.kind, one.key, {**one.value, "at": f"{_FILES}/{at}", "file": one.name, "crc": crc})

    def commit(self) -> None:
        """Sync everything to the disk: a resumed run does not do it again, so it must not be lost."""
        with self._lock:
            fresh, self._unsynced = self._unsynced, []
        for path in fresh:
            with contextlib.suppress(FileNotFoundError):  # uploaded meanwhile
                for part in (*path.iterdir(), path):
                    sync_file(part)
        if fresh:
            sync_folder(self.folder.path / _FILES)
        self._lines.sync(self._lock)

    def close(self) -> None:
        """Hand what is left to the disk, and close; harmless when repeated."""
        with self._lock:
            if not self._lines.file.closed:
                self._lines.pass_on()
                self._lines.file.close()

    def file(self, entry: Wanted) -> Path | None:
        """Return the file of an entry; None where it cannot be uploaded, which is logged.

        That of a foreign run could lie anywhere on this machine: it is not uploaded in its name.
        """
        place = path_of(self.folder, entry)
        if place is None:
            named = "run %s: %.200r names a file that is not beside it; left out"
            _log.warning(named, self.folder.name, entry.key)
        else:
            with contextlib.suppress(OSError):
                if entry.value.get("crc") in (None, _crc(place)):
                    return place
            _log.warning("%s cannot be read, as after a power cut; all else is sent", place)
        return None

    def remove_files(self, keep: Callable[[], Iterable[Wanted]], hidden: bool = False) -> None:
        """Remove the files that no entry of `keep` has; `hidden`: and those that a killed process was writing."""
        # Listed before it is asked what to keep: what is set meanwhile is not among them.
        places = list((self.folder.path / _FILES).glob("*"))
        kept = {_place(entry) for entry in keep()}
        for path in places:
            if hidden if path.name.startswith(".") else f"{_FILES}/{path.name}" not in kept:
                shutil.rmtree(path, ignore_errors=True)


def read(folder: RunFolder) -> list[Wanted]:
    """Return the desired state of a run without changing anything, what was set first coming first."""
    return list(_last_of_each(_entries(folder.path / FILE)).values())


def _last_of_each(entries: Iterable[Wanted]) -> dict[tuple[str, str], Wanted]:
    found: dict[tuple[str, str], Wanted] = {}
    for entry in entries:
        _put(found, entry)
    return found


def _put(wanted: dict[tuple[str, str], Wanted], entry: Wanted) -> None:
    wanted.pop(entry[:2], None)  # the last that was set comes last
    if entry.value is not None:
        wanted[entry[:2]] = entry


def is_gone(folder: RunFolder, entry: Wanted) -> bool:
    """Return True for an entry with a file that is not there: MLflow has it."""
    place = path_of(folder, entry)
    return place is not None and not place.parent.is_dir()


def path_of(folder: RunFolder, entry: Wanted) -> Path | None:
    """Return the place of the file of an entry, which may be gone; None where that is not in the run's folder."""
    at, name = _place(entry), entry.value.get("file") if _place(entry) else None
    if not isinstance(name, str) or Path(name).name != name:
        return None
    place = folder.path / at / name
    return place if place.resolve() == folder.path.resolve() / at / name else None


def _place(entry: Wanted) -> str:
    """Return the folder of the file of an entry, in that of the run; empty without one."""
    at = entry.value.get("at") if isinstance(entry.value, dict) else None
    return at if isinstance(at, str) and _PLACE.fullmatch(at) else ""


def _entries(path: Path) -> Iterator[Wanted]:
    """Yield the lines of a file. One that a power cut has damaged is logged and left out for the sake of the others."""
    position = 0
    try:
        with open(path, "rb", opener=without_waiting) as file:
            for line in file:
                position += len(line)
                if not line.endswith(b"\n"):
                    return
                try:
                    record = json.loads(line)
                    kind, key, value = record["kind"], record["key"], record["value"]
                    if not isinstance(kind, str) or not isinstance(key, str):
                        raise TypeError("a name is not text")
                except (ValueError, KeyError, TypeError, RecursionError):
                    _log.warning("%s: %.60r cannot be read, as after a power cut; all else is sent", path, line)
                    continue
                yield Wanted(kind, key, value, position)
    except FileNotFoundError:
        return


def _crc(file: Path) -> int | None:
    """Return the CRC-32 of a file; None of a large one, which is a link to weights that were synced before."""
    return zlib.crc32(file.read_bytes()) if file.stat().st_size <= _LARGE else None

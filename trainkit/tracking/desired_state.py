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
import sys
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.files import sync_file, sync_folder
from trainkit.tracking.journal import Lines, sync_lines
from trainkit.tracking.run_folder import RunFolder, without_waiting

FILE = "desired.jsonl"
_FILES = "files"
"""Folder of the files that MLflow has not got yet."""
_OLDER = "outbox"
"""Folder in which versions before 0.2 kept a numbered folder for each upload."""
_PLACE = re.compile(rf"{_FILES}/\w+|{_OLDER}/\d+/file")
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
        self._take_over()
        self.remove_unused(hidden=True)

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
        sync_lines(self._lines, self._lock)

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

    def remove_unused(self, hidden: bool = False) -> None:
        """Remove the folders of files that nothing refers to; `hidden` as well those that a killed process left."""
        with self._lock:
            used = {"/".join(entry.value["at"].split("/")[:2]) for entry in self._wanted.values() if _has_file(entry)}
            places = [path for name in (_FILES, _OLDER) for path in (self.folder.path / name).glob("*")]
        for path in places:
            unused = f"{path.parent.name}/{path.name}" not in used
            if hidden if path.name.startswith(".") else unused:
                _remove(path)
        with contextlib.suppress(OSError):
            (self.folder.path / _OLDER).rmdir()

    def uploaded(self, entry: Wanted) -> None:
        """Remove the file of an entry, which MLflow has or will never take."""
        if _has_file(entry) and _PLACE.fullmatch(entry.value["at"]):
            _remove(self.folder.path.joinpath(*entry.value["at"].split("/")[:2]))

    def _take_over(self) -> None:
        """Set what an older version had yet to upload."""
        older = [path for path, _ in _older_jobs(self.folder)]
        for entry in _older(self.folder):
            self.set(*entry[:3])
        if older:
            self.commit()
        for path in older:
            (path / "job.json").unlink(missing_ok=True)


def read(folder: RunFolder) -> list[Wanted]:
    """Return the desired state of a run without changing anything, what was set first coming first."""
    return list(_last_of_each((*_entries(folder.path / FILE), *_older(folder))).values())


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
    value = entry.value if isinstance(entry.value, dict) else {}
    at, name = value.get("at"), value.get("file")
    if not isinstance(at, str) or not isinstance(name, str) or not _PLACE.fullmatch(at) or Path(name).name != name:
        return None
    place = folder.path / at / name
    return place if place.resolve() == folder.path.resolve() / at / name else None


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


def _older_jobs(folder: RunFolder) -> Iterator[tuple[Path, Any]]:
    older = folder.path / _OLDER
    for path in sorted(older.iterdir()) if older.is_dir() else ():
        if path.name.isdigit() and (path / "job.json").exists():
            try:
                yield path, json.loads((path / "job.json").read_bytes())
            except (OSError, ValueError, RecursionError):
                _log.warning("%s cannot be read, as after a power cut; all else is sent", path)
                yield path, None


def _older(folder: RunFolder) -> Iterator[Wanted]:
    """Yield what an older version had yet to upload, at positions behind all others."""
    for path, job in _older_jobs(folder):
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            kind, behind = job.pop("kind"), sys.maxsize
            if job["file"] is not None:
                job["at"] = f"{_OLDER}/{path.name}/file"
            if kind == "tags":
                yield from (Wanted("tag", key, text, behind) for key, text in job["tags"].items())
            elif kind == "artifact":
                yield Wanted("file", "/".join(filter(None, (job["folder"], job["file"]))), job, behind)
            elif kind == "dataset":
                yield Wanted(kind, f"{job['name']} {job['context']}", job, behind)
            elif kind == "model":
                yield Wanted(kind, f"{job['name']}@{job['step']}", job, behind)
            elif kind == "beneath":
                yield Wanted("child", job["run"], job["tags"], behind)
            elif kind == "end":
                yield Wanted("status", "", {"status": job["status"], "time": job["time"]}, behind)


def _has_file(entry: Wanted) -> bool:
    return isinstance(entry.value, dict) and isinstance(entry.value.get("at"), str)


def _remove(path: Path) -> None:
    """Remove a folder, its name first: half of one would be taken for a damaged one."""
    aside = path if path.name.startswith(".") else path.with_name(f".{path.name}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _crc(file: Path) -> int | None:
    """Return the CRC-32 of a file; None of a large one, which is a link to weights that were synced before."""
    return zlib.crc32(file.read_bytes()) if file.stat().st_size <= _LARGE else None

"""Keep a run in a folder on disk: what it is, its lock, its files."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainkit.errors import UserError
from trainkit.files import file_system, write_aside

SUMMARY = "summary.txt"
"""File in the folder of a parent run that keeps what was printed at its end."""
CREATION = "enrolment.json"
"""File of a run's folder from which its MLflow run is created: `mlflow_run.RunCreation`."""
META = "meta.json"
"""File in the folder of a training that says what it was trained on, as far as its task knew: `DatasetInfo`."""
MEMBERS = "members.json"
"""File in the folder of a parent run that names its children: `{"fold 0": "toy-s0-1121-0200-c131"}`."""

_SENDS = b"sends"
"""Content of a lock that is held to upload what a run has left."""
_OWN_DISK = re.compile(r"ext[234]|xfs|btrfs|zfs|f2fs|bcachefs|tmpfs|overlay")
"""File systems that one kernel at a time mounts: a lock there is known to all who could write."""


def members(folder: RunFolder) -> dict[str, str]:
    """Return the names of the children of a run by title, such as `seed 3`; empty without any. Raises UserError."""
    file = folder.path / MEMBERS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="repeat the run") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UserError(str(file), "does not name runs", remedy="repeat the run")
    return found


def summary(folder: RunFolder) -> str:
    """Return the summary of a parent run; before its end its children; empty for a run without children."""
    try:
        return (folder.path / SUMMARY).read_text(encoding="utf-8")
    except FileNotFoundError:
        return "".join(f"{title}  {name}\n" for title, name in members(folder).items())


@dataclass(frozen=True)
class RunInfo:
    """Content of run.json."""

    name: str
    recipe: str
    recipe_hash: str
    seed: int
    started: float
    """Seconds since 1970."""
    status: str = "RUNNING"
    """RUNNING, FINISHED, FAILED or KILLED, as in MLflow; RUNNING of a process that is gone means killed."""
    run_id: str | None = None
    """Id of the run in MLflow."""
    experiment: str | None = None
    data_digest: str | None = None
    key: str | None = None
    """`run_key` of the recipe and data; equal keys mean that the run need not be repeated."""
    program: Mapping[str, str] | None = None
    """`provenance.program` of the process that finished it."""
    parent: str | None = None
    follows: str | None = None
    """Name of the run with which it is compared."""
    varies: Sequence[str] = ()
    """Of a parent run: keys and blocks of the recipe in which its children differ."""
    directions: Mapping[str, Literal["higher", "lower"]] = field(default_factory=dict)
    """Metrics of a plug-in's task, and the values that are better."""
    evaluates: str | None = None
    """Of a run that only evaluated, the run or the file of the weights: it trained nothing."""
    unsent: bool = False
    """True where it ended with something that is not in MLflow yet."""
    last_step: int = 0
    pid: int = 0
    host: str = ""


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    # Locks live as long as the process and belong to it, not to one of several objects that name the same folder. The
    # second is the thread: one that uploads what another run has left is not the training.
    _claims: ClassVar[dict[Path, tuple[Any, int]]] = {}
    _claiming: ClassVar[threading.Lock] = threading.Lock()
    # The training, the thread that writes its checkpoints and the one that sends all change run.json.
    _updating: ClassVar[threading.Lock] = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the run, which is that of its folder."""
        return self.path.name

    @property
    def journal(self) -> Path:
        """File of metrics and events."""
        return self.path / "journal.jsonl"

    @property
    def recipe(self) -> Path:
        """File of the resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def leaving(self) -> Path:
        """File that exists from before a run is FINISHED until its command has done everything."""
        return self.path / "leaving"

    def info(self) -> RunInfo:
        """Read run.json. Raises UserError when it is missing or damaged."""
        try:
            with open(self.path / "run.json", "rb", buffering=0, opener=without_waiting) as file:
                return parse_info(file.read())
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            found = f"cannot be read: {error}"
            raise UserError(str(self.path / "run.json"), found, remedy="start a new run") from None

    def update(self, **changes: Any) -> RunInfo:
        """Change fields of run.json, written aside and renamed; only the process that claimed the run does this."""
        unknown = changes.keys() - {field.name for field in fields(RunInfo)}
        if unknown:
            raise ValueError(f"run.json has no {', '.join(sorted(unknown))}")
        with self._updating:
            try:
                info = RunInfo(**{**asdict(self.info()), **changes})
                write_aside(self.path / "run.json", json.dumps(asdict(info), indent=1) + "\n")
            except (UserError, OSError):
                self.refuse_deleted()
                raise
        return info

    def refuse_deleted(self) -> None:
        """Raise UserError where the folder that was claimed is gone: nothing of the run can be kept any more."""
        claim = self._claims.get(self.path.resolve())
        try:
            here = claim is None or os.path.samestat(os.stat(self.path / ".lock"), os.fstat(claim[0].fileno()))
        except FileNotFoundError:
            here = False
        if not here:
            raise UserError(
                str(self.path), "the run's folder was deleted or moved while it ran", remedy="start it again"
            )

    def claim(self, patience: float = 0.0) -> None:
        """Make this process, and of it this thread, the only one that writes here, until it ends.

        A process that only uploads what the run has left, or is ending, is waited for, `patience` seconds at most.
        Raises UserError when another one writes here.
        """
        self._wait(b"", patience)

    @contextlib.contextmanager
    def sending(self, patience: float = 0.0) -> Iterator[None]:
        """Return a context that claims the folder to upload; a process that is to train waits. Raises as `claim`."""
        before = self._own()
        self._wait(_SENDS, patience)
        try:
            yield
        finally:
            if not before:
                self.release()

    def _wait(self, why: bytes, patience: float) -> None:
        end = time.monotonic() + patience
        while not self._claim(why):
            trains = self.trains()
            if trains or time.monotonic() >= end:
                info = self.info()
                by = (
                    f"process {info.pid} on {info.host}" if trains else "a process that ends, or sends what it had left"
                )
                raise UserError(f"run {self.name}", f"in use by {by}", remedy="wait for it, or stop it first")
            time.sleep(0.05)

    def _claim(self, why: bytes) -> bool:
        key, thread = self.path.resolve(), threading.get_ident()
        with self._claiming:
            if key in self._claims:
                return self._claims[key][1] == thread
            self._refuse_links()
            file = open(self.path / ".lock", "ab", buffering=0)  # noqa: SIM115 - held for as long as the process lives
            if not _lock(file):
                file.close()
                return False
            self._claims[key] = file, thread
            with contextlib.suppress(OSError):  # of a full disk
                file.truncate(0)
                file.write(why)
            return True

    def _refuse_links(self) -> None:
        """Raise UserError for a link in the folder: a foreign run would have files elsewhere written and deleted."""
        with os.scandir(self.path) as entries:
            links = sorted(entry.name for entry in entries if entry.is_symlink())
        if links:
            found = f"is a link to {os.readlink(self.path / links[0])!r:.200}"
            remedy = "put there what it leads to, if that is of this run"
            raise UserError(str(self.path / links[0]), found, "a file or folder of the run itself", remedy)

    def release(self) -> None:
        """Let other processes write here; harmless without a claim."""
        with self._claiming:
            if (claim := self._claims.pop(self.path.resolve(), None)) is not None:
                claim[0].close()

    def remove(self) -> None:
        """Delete the folder of a run that never began, with its claim."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def claimed(self) -> bool:
        """True where this process is the one that writes here."""
        return self.path.resolve() in self._claims

    def _own(self) -> bool:
        return self._claims.get(self.path.resolve(), (None, None))[1] == threading.get_ident()

    def alive(self) -> bool:
        """Return True where a process holds the lock of this run.

        Where machines may share the disk, and their locks not reach one another, a run of another machine counts as
        alive while RUNNING.
        """
        if self.claimed:
            return True
        info = self.info()
        if info.host != socket.gethostname() and not _OWN_DISK.fullmatch(file_system(self.path)):
            return info.status == "RUNNING"
        return self._asked(lambda file: not _lock(file), True)

    def saved_step(self) -> int:
        """Return the step of the newest checkpoint; 0 without one."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return max((int(number) for number in names if number.isascii() and number.isdigit()), default=0)

    def ended_unbegun(self) -> bool:
        """Return True for a run that ended before its first step and has no children: nothing of it can be used."""
        info = self.info()
        made = info.last_step or any(self.checkpoints.glob("step-*")) or (self.path / MEMBERS).is_file()
        return not made and info.status != "FINISHED" and not self.alive()

    def trains(self) -> bool:
        """Return True for a run that is alive and neither only uploading nor ending."""
        if not self.alive() or self.claimed:
            return self._own()
        return self.info().status in ("RUNNING", "FINISHED") and self._asked(lambda file: file.read() != _SENDS, False)

    def _asked(self, ask: Callable[[Any], bool], claimed: bool) -> bool:
        """Call `ask` with the lock file; False where there is none, `claimed` where this process holds the lock."""
        with self._claiming:
            if self.claimed:
                return claimed
            try:
                with open(self.path / ".lock", "r+b") as file:
                    return ask(file)
            except OSError:
                return False


def parse_info(text: bytes) -> RunInfo:
    """Parse the content of run.json. Raises ValueError, TypeError or AttributeError for damaged content."""
    found = json.loads(text)
    info = RunInfo(**{key: found[key] for key in found.keys() & RunInfo.__dataclass_fields__.keys()})
    # A foreign one must not keep commands from reading the others.
    numbers = info.seed, info.started, info.last_step, info.pid
    words = info.name, info.recipe, info.recipe_hash, info.status, info.host
    maybe = info.run_id, info.experiment, info.data_digest, info.key, info.parent, info.follows, info.evaluates
    if not all(isinstance(number, int | float) and abs(number) < 2**53 for number in numbers):
        raise ValueError("a time or a number is missing")
    if not all(isinstance(word, str) for word in (*words, *info.varies, *filter(None, maybe))):
        raise ValueError("a name is not text")
    if not isinstance(info.directions, dict) or not set(info.directions.values()) <= {"higher", "lower"}:
        raise ValueError("directions are not higher or lower")
    return info


def without_waiting(path: str, flags: int) -> int:
    """Open a file for `open`, without waiting for a pipe and without following a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def run_key(recipe_hash: str, data_digest: str) -> str:
    """Return the hash under which a finished run can be used again: 32 hexadecimal digits."""
    return hashlib.sha256(f"{recipe_hash}\n{data_digest}".encode()).hexdigest()[:32]


def _lock(file: Any) -> bool:
    # A lock of the process, not of the open file: loader workers that outlive a killed run do not inherit it.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

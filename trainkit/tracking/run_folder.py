"""Keep a run in a folder on disk: what it is, its lock, its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from trainkit.errors import UserError
from trainkit.files import write_aside

SUMMARY = "summary.txt"
"""File in the folder of the run above that keeps what was printed at its end."""


def members(folder: RunFolder) -> dict[str, str]:
    """Names of the runs beneath a run, by what each is: `seed 3`. Empty for one that stands above none."""
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
    """What the runs beneath a run came to; before its end those that there are. Empty where it stands above none."""
    try:
        return (folder.path / SUMMARY).read_text(encoding="utf-8")
    except FileNotFoundError:
        return "".join(f"{title}  {name}\n" for title, name in members(folder).items())


ENROLMENT = "enrolment.json"
"""File of a run's folder that says what MLflow is to know of its beginning: `enrolment.Enrolment`."""


MEMBERS = "members.json"
"""File in the folder of a run above others that names those beneath it: `{"fold 0": "toy-s0-1121-0200-c131"}`."""


_SENDS = b"sends"
"""Content of a lock that is held to send what a run has left."""


_OWN_DISK = re.compile(r"ext[234]|xfs|btrfs|zfs|f2fs|bcachefs|tmpfs|overlay")
"""File systems that one kernel at a time mounts: a lock there is known to all who could write."""


_NETWORK = re.compile(r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|afs|9p|fuse\.(sshfs|s3fs|gcsfuse|rclone)")


@dataclass(frozen=True)
class RunInfo:
    """What run.json says."""

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
    """Name of the run against which it says what was changed."""
    varies: Sequence[str] = ()
    """Of a run above others: keys of the recipe, blocks too, that those have of their own."""
    evaluates: str | None = None
    """Of a run that only scored, the run or the file whose weights these were: it trained nothing."""
    unsent: bool = False
    """Whether it ended with something that MLflow has yet to get."""
    last_step: int = 0
    pid: int = 0
    host: str = ""


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    # Locks live as long as the process and belong to it, not to one of several objects that name the same folder. The
    # second is the thread: one that sends what another run has left is not the training.
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
        """File that is there from before a run says FINISHED until all is done that its command was to do."""
        return self.path / "leaving"

    def info(self) -> RunInfo:
        """Read run.json. Raises UserError when it is missing or damaged."""
        try:
            with open(self.path / "run.json", "rb", buffering=0, opener=_at_once) as file:
                return _parsed(file.read())
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

        One that only sends what the run has left, or has said its end, is waited for, `patience` seconds at most.
        Raises UserError when another one writes here.
        """
        self._wait(b"", patience)

    @contextlib.contextmanager
    def sending(self, patience: float = 0.0) -> Iterator[None]:
        """Claimed within, but not to train: whoever is to do that waits for the end. Raises as `claim` does."""
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
        """Of a run that somebody else laid here: what is written, cut off and tidied away would be files elsewhere."""
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

    @property
    def claimed(self) -> bool:
        """Whether this process is the one that writes here."""
        return self.path.resolve() in self._claims

    def _own(self) -> bool:
        return self._claims.get(self.path.resolve(), (None, None))[1] == threading.get_ident()

    def alive(self) -> bool:
        """Whether a process is writing this run: whether its lock is held.

        Where machines may share the disk, and their locks not reach one another, one of another machine counts as alive
        while RUNNING.
        """
        if self.claimed:
            return True
        info = self.info()
        if info.host != socket.gethostname() and not _OWN_DISK.fullmatch(_disk(self.path)):
            return info.status == "RUNNING"
        return self._asked(lambda file: not _lock(file), True)

    def ended_unbegun(self) -> bool:
        """Whether this run ended before its first step, and no run stands beneath it: nothing of it can be used."""
        info = self.info()
        made = info.last_step or any(self.checkpoints.glob("step-*")) or (self.path / MEMBERS).is_file()
        return not made and info.status != "FINISHED" and not self.alive()

    def trains(self) -> bool:
        """Whether this run is alive, and not only until what it has left is sent, or its process has ended."""
        if not self.alive() or self.claimed:
            return self._own()
        return self.info().status in ("RUNNING", "FINISHED") and self._asked(lambda file: file.read() != _SENDS, False)

    def _asked(self, ask: Callable[[Any], bool], claimed: bool) -> bool:
        """What is asked of the lock, False where there is none; this process's own would be lost: then `claimed`."""
        with self._claiming:
            if self.claimed:
                return claimed
            try:
                with open(self.path / ".lock", "r+b") as file:
                    return ask(file)
            except OSError:
                return False


def _parsed(text: bytes) -> RunInfo:
    found = json.loads(text)
    info = RunInfo(**{key: found[key] for key in found.keys() & RunInfo.__dataclass_fields__.keys()})
    # One that somebody else laid here is to keep no command from the others.
    numbers = info.seed, info.started, info.last_step, info.pid
    words = info.name, info.recipe, info.recipe_hash, info.status, info.host
    maybe = info.run_id, info.experiment, info.data_digest, info.key, info.parent, info.follows, info.evaluates
    if not all(isinstance(number, int | float) and abs(number) < 2**53 for number in numbers):
        raise ValueError("a time or a number is none")
    if not all(isinstance(word, str) for word in (*words, *info.varies, *filter(None, maybe))):
        raise ValueError("a name is no text")
    return info


def _at_once(path: str, flags: int) -> int:
    """Opens a file that may be a pipe, at which reading would wait for ever, or a link to what has no end."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def run_key(recipe_hash: str, data_digest: str) -> str:
    """Hash under which a finished run can be used again: 32 hexadecimal digits."""
    return hashlib.sha256(f"{recipe_hash}\n{data_digest}".encode()).hexdigest()[:32]


def _lock(file: Any) -> bool:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    # A lock of the process, not of the open file: loader workers that outlive a killed run do not inherit it.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _disk(folder: Path) -> str:
    """The kind of file system that a folder is on; empty where the system does not say."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return ""
    here = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(here, key=lambda entry: len(entry[0]), default=("", ""))[1]

"""Where runs are kept: the MLflow store, and beside it one folder for each run.

    <home>/mlflow.db          metrics, parameters, tags (SQLite), unless MLFLOW_TRACKING_URI names another store
    <home>/artifacts/         files shown in MLflow
    <home>/outputs/           what frozen networks say of training sets (tabulated.py); may be deleted
    <home>/integrity/         what was found in data sets, and what their pictures look like; may be deleted
    <home>/runs/<run name>/   journal.jsonl  run.json  recipe.yaml  checkpoints/

`home` is `mlruns/` of the checkout, outside one of the current folder; TRAINKIT_STORE names another.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote, urlsplit

from trainkit.errors import UserError, of_disk
from trainkit.paths import make_private
from trainkit.redact import without_secrets, without_user_info
from trainkit.tracking.mlflow_errors import Away, is_refusal, passes, reason

ENROLMENT = "enrolment.json"
"""File of a run's folder that says what MLflow is to know of its beginning: `enrolment.Enrolment`."""
MEMBERS = "members.json"
"""File in the folder of a run above others that names those beneath it: `{"fold 0": "toy-s0-1121-0200-c131"}`."""
_SENDS = b"sends"
"""Content of a lock that is held to send what a run has left."""
_LOCK_SECONDS = 10.0
"""How long another writer may hold the database before it counts as locked; a batch of 1000 metrics takes 0.1 s."""
_CHECKED_BYTES = 256 * 2**20
"""Databases up to this size are checked page by page at the start (0.3 s for 100 MB)."""
_OLDEST_SERVER = 3
"""Version of MLflow since which runs have models (`LoggedModel`)."""
_OWN_DISK = re.compile(r"ext[234]|xfs|btrfs|zfs|f2fs|bcachefs|tmpfs|overlay")
"""File systems that one kernel at a time mounts: a lock there is known to all who could write."""
_NETWORK = re.compile(r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|afs|9p|fuse\.(sshfs|s3fs|gcsfuse|rclone)")

_log = logging.getLogger("trainkit")


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


@dataclass(frozen=True)
class Store:
    """A place for runs. Making one touches nothing; `prepare` and `client` do."""

    home: Path
    uri: str
    """MLflow tracking URI; may hold a password, so show `shown`."""

    @classmethod
    def locate(cls) -> Store:
        """The store that the environment and the current folder stand for."""
        home = _home()
        uri = os.environ.get("MLFLOW_TRACKING_URI", "").strip() or f"sqlite:///{home / 'mlflow.db'}"
        if uri.startswith("sqlite:///"):
            uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
        return cls(home, uri)

    @property
    def database(self) -> Path | None:
        """The SQLite file, or None for a server."""
        return Path(self.uri.removeprefix("sqlite:///")) if self.uri.startswith("sqlite:///") else None

    @property
    def artifacts(self) -> Path | None:
        """Folder of artifacts, beside the database; None where a server decides."""
        if self.uri.startswith(("http://", "https://", "databricks")):
            return None
        # Of a database elsewhere MLflow would take a folder of wherever the run was started.
        return (self.database.parent if self.database else self.home) / "artifacts"

    @property
    def shown(self) -> str:
        """The URI without user name, password and tokens."""
        return without_secrets(self.uri if self.database else without_user_info(self.uri))

    def prepare(self) -> None:
        """Make the folders and the database where they are missing and check what is there.

        Raises UserError, within seconds, for a place that cannot be written and for a database that is damaged, locked,
        of another program, or of a newer or older MLflow.
        """
        if self.database and ("?" in str(self.database) or unquote(str(self.database)) != str(self.database)):
            # SQLAlchemy would look for another file: MLflow retries that for 100 s, or puts the database there.
            found = "has ? or % with two digits in its name, which the address of a database cannot hold"
            raise UserError(str(self.database.parent), found, remedy=_ELSEWHERE)
        try:
            make_private(self.home)
            make_private(self.home / "runs")
            if self.database:
                make_private(self.database.parent)
                make_private(self.artifacts)  # type: ignore[arg-type]
        except OSError as error:
            raise UserError(str(self.home), f"cannot be made: {error.strerror}", remedy=_ELSEWHERE) from None
        for folder in {self.home / "runs", self.database.parent if self.database else self.home}:
            if not os.access(folder, os.W_OK):
                raise UserError(str(folder), "cannot be written", remedy=_ELSEWHERE)
        if self.database:
            _warn_of_network(self.database.parent)
            _make_database(self.database)
            _check_database(self.database)
        elif "://" not in self.uri or self.uri.startswith("file:"):
            found = f"{self.shown} is taken for a folder, which MLflow no longer writes"
            raise UserError(
                "MLFLOW_TRACKING_URI", found, "sqlite:///FILE or http(s)://HOST", "unset it for the default"
            )
        elif not _has_whole_address(self.uri):
            found = f"{self.shown} has no host and port"
            remedy = "write : / ? # @ in a password as %3A %2F %3F %23 %40"
            raise UserError("MLFLOW_TRACKING_URI", found, "SCHEME://USER:PASSWORD@HOST:PORT", remedy)
        elif not self.uri.startswith(("http://", "https://", "databricks")):
            _check_reachable(self.uri, self.shown)

    def ready(self) -> None:
        """As `prepare`, before a run begins. That the store is away is no mistake: the run begins all the same."""
        with contextlib.suppress(Away):
            self.prepare()

    def client(self) -> Any:
        """An MlflowClient of this store, after `prepare`.

        Raises UserError when the store does not answer, after 35 s at most, and for a server that is too old.
        """
        self.prepare()
        settle_mlflow()
        from mlflow.tracking import MlflowClient

        # A traceback of everything that it raises as well, whoever catches it and says so: a full disk, a lock.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        with self.asking():
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            client.search_experiments(max_results=1)
        if self.uri.startswith(("http://", "https://")):
            _check_server(self.uri, self.shown)
        return client

    def forget(self) -> None:
        """Leave connections to the database that are open: a file that was put in its place is another one."""
        if self.database is not None:
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            if (engine := SqlAlchemyStore._engine_map.get(self.uri)) is not None:
                engine.dispose()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """What MLflow, the network or a database raise within is a UserError of this store, which says what to do."""
        try:
            yield
        except Exception as error:
            if not is_refusal(error):
                raise
            found, remedy = reason(error)
            raise (Away if passes(error) else UserError)(self.shown, found, remedy=remedy) from error

    def model_file(self, uri: str) -> Path:
        """The safetensors file of `models:/<model id>`, a LoggedModel of this store.

        `NAME@ALIAS` and `NAME/VERSION` of the registry stand for the model that was registered so.

        A file that this machine does not hold is downloaded, once, to `<home>/downloads/<model id>/`. Raises UserError
        for an id that the store does not have, naming the nearest ones, and for a file that does not arrive whole.
        """
        word = uri.removeprefix("models:/").strip("/")
        client = self.client()
        from mlflow.exceptions import MlflowException
        from mlflow.utils.file_utils import local_file_uri_to_path

        try:
            word = _registered(client, word)
            model = client.get_logged_model(word)
            word = _plain_id(word, uri, self.shown)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "ENDPOINT_NOT_FOUND"):
                found, remedy = reason(error)
                raise UserError(self.shown, found, remedy=remedy) from None
            wanted = "models:/<model id> or models:/NAME@ALIAS"
            raise UserError(uri, f"not in {self.shown}", wanted, _near(word, _models(client))) from None
        try:
            files = [file for file in client.list_logged_model_artifacts(word) if file.path.endswith(".safetensors")]
            if len(files) != 1:
                found = f"holds {len(files)} safetensors files"
                raise UserError(uri, found, "one", _near(word, [m for m in _models(client) if m[0] != word]))
            (file,) = files
            if model.artifact_location.startswith(("file:", "/")):
                return Path(local_file_uri_to_path(model.artifact_location)) / file.path
            out = self.home / "downloads" / word / Path(file.path).name
            if out.is_file() and out.stat().st_size == file.file_size:
                return out
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=out.parent, prefix=".") as aside:
                got = Path(_download(self.uri, f"{model.artifact_location}/{file.path}", aside))
                if got.stat().st_size != file.file_size:
                    found = f"{got.stat().st_size} bytes of {file.path} arrived"
                    raise UserError(uri, found, f"{file.file_size} bytes", "try again")
                os.replace(got, out)
        except (MlflowException, OSError) as error:
            remedy = "check that the store is reachable and its disk not full"
            raise UserError(uri, f"cannot be fetched: {without_secrets(str(error))[:300]}", remedy=remedy) from None
        return out

    def new_run(self, recipe_name: str, seed: int, recipe_hash: str, parent: str | None = None) -> RunFolder:
        """Make and claim a new run's folder, named by recipe, seed, time and hash: `adadistill-s0-1121-0103-a1b2`."""
        runs = self.home / "runs"
        try:
            make_private(self.home)
            make_private(runs)
        except OSError as error:
            raise UserError(str(runs), f"cannot be made: {error.strerror}", remedy=_ELSEWHERE) from None
        word = re.sub(r"[^a-z0-9_]+", "-", recipe_name.lower()).strip("-")[:40] or "run"
        tail = (re.sub(r"[^0-9a-f]", "", recipe_hash.lower()) or secrets.token_hex(2))[:4]
        while True:
            started = time.time()
            stamp = time.strftime("%m%d-%H%M", time.localtime(started))
            folder = RunFolder(runs / f"{word}-s{seed}-{stamp}-{tail}")
            try:
                folder.path.mkdir()
                break
            except FileExistsError:
                tail = secrets.token_hex(2)
            except OSError as error:
                raise UserError(str(runs), f"cannot be written: {error.strerror}", remedy=_ELSEWHERE) from None
        info = RunInfo(
            folder.name,
            recipe_name,
            recipe_hash,
            seed,
            started,
            parent=parent,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        try:
            folder.checkpoints.mkdir()
            folder.claim()
            write_aside(folder.path / "run.json", json.dumps(asdict(info), indent=1) + "\n")
            sync_folder(runs)
            sync_folder(self.home)
        except OSError as error:
            folder.release()
            shutil.rmtree(folder.path, ignore_errors=True)
            raise of_disk(error, folder.path) or error from None
        return folder

    def runs(self) -> list[RunFolder]:
        """All run folders, oldest first. A folder whose run.json cannot be read is left out with a warning."""
        return [folder for _, folder in self._known()]

    def _known(self, holding: str = "") -> list[tuple[RunInfo, RunFolder]]:
        """What run.json says of all runs in whose text these letters stand, oldest first; each file is read once.

        Beside 10,000 runs letters that few hold take 0.12 s, reading all as JSON 0.4.
        """
        runs, letters, found = self.home / "runs", holding.encode(), []
        for name in os.listdir(runs) if runs.is_dir() else ():
            try:
                with open(f"{runs}/{name}/run.json", "rb", buffering=0, opener=_at_once) as file:
                    text = file.read()
                if letters in text:
                    found.append((_parsed(text), RunFolder(runs / name)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                _log.warning("%s: cannot be read: %s", runs / name / "run.json", error)
        return sorted(found, key=lambda entry: (entry[0].started, entry[1].name))

    def find(self, word: str, beside: RunFolder | None = None) -> RunFolder:
        """The run of this name, unique beginning of a name, or MLflow id.

        A run that ended before its first step makes no beginning of a name ambiguous.
        `last` is the newest training that finished, `best` that with the best primary metric of the experiment of the
        run `beside`, or of the last. Raises UserError naming the nearest.
        """
        if word == "last":
            return self._finished(word)[-1][1]
        if word == "best":
            return self._best(beside)
        word = word.rstrip("/")
        if "/" in word and Path(word).absolute().parent == (self.home / "runs").absolute():
            word = Path(word).name
        if word not in ("", "..") and Path(word).name == word:
            with contextlib.suppress(UserError):  # of what cannot be read, as of what is not there, more is said below
                exact = RunFolder(self.home / "runs" / word)
                exact.info()
                return exact
        known = self._known()
        if word:
            by_id = [folder for info, folder in known if info.run_id == word]
            matches = by_id or [folder for _, folder in known if folder.name.startswith(word)]
            if len(matches) > 1:
                matches = [folder for folder in matches if not folder.ended_unbegun()] or matches
            if len(matches) == 1:
                return matches[0]
            if matches:
                names = ", ".join(folder.name for folder in matches[-5:])
                raise UserError(f"run {word!r}", f"{len(matches)} runs begin so", remedy=f"the newest are {names}")
        names = [folder.name for _, folder in known]
        near = difflib.get_close_matches(word, names, n=3, cutoff=0.4) or names[-3:]
        remedy = f"the nearest are {', '.join(near)}" if near else "there are no runs yet"
        raise UserError(f"run {word!r}", f"not in {self.home / 'runs'}", remedy=remedy)

    def _finished(self, word: str) -> list[tuple[RunInfo, RunFolder]]:
        """Trainings that finished, oldest first. Raises UserError, for a run called `word`, where there is none."""
        # A run above others, and one that evaluates, has no key: none could be used in its place.
        known = self._known("FINISHED")
        found = [entry for entry in known if entry[0].status == "FINISHED" and entry[0].key]
        if not found:
            raise UserError(f"run {word!r}", f"no run in {self.home / 'runs'} has finished", remedy="train one first")
        return found

    def _best(self, beside: RunFolder | None) -> RunFolder:
        """The finished run with the best primary metric of an experiment."""
        found = self._finished("best")
        experiment = (beside.info() if beside else found[-1][0]).experiment
        folders = {info.run_id: folder for info, folder in found if info.experiment == experiment}
        client = self.client()
        kept = client.get_experiment_by_name(experiment or "")
        metric = kept.tags.get("mlflow.experiment.primaryMetric.name") if kept else None
        if not metric:
            remedy = "name a metric in the recipe: `best: {metric: ...}`"
            raise UserError("run 'best'", f"experiment {experiment!r} has no primary metric", remedy=remedy)
        name = f"best/{metric}"
        values = {}
        for run in client.search_runs([kept.experiment_id], max_results=50_000):
            # Of a run that chose its best by another score the one that it had then; older runs have both as `best/`.
            value = run.data.metrics.get(f"at_{name}", run.data.metrics.get(name))
            if run.info.run_id in folders and value is not None and value == value:
                values[run.info.run_id] = value
        if not values:
            raise UserError("run 'best'", f"no finished run of experiment {experiment!r} has {name}")
        highest = kept.tags.get("mlflow.experiment.primaryMetric.greaterIsBetter") != "False"
        return folders[(max if highest else min)(values, key=values.__getitem__)]

    def newest_unfinished(self, recipe_name: str, recipe_hash: str | None = None) -> RunFolder | None:
        """The newest run of a recipe (and hash) that began and is not being trained now, and did not finish.

        What it has left may be being sent just now. One whose process was killed behind its end is among them: it has
        yet to be promoted, say.
        """
        for info, folder in reversed(self._known(recipe_hash or "")):
            same = info.recipe == recipe_name and recipe_hash in (None, info.recipe_hash)
            # One that was never to be told to MLflow ended before its first step: refused, or killed at once.
            began = info.run_id or (folder.path / ENROLMENT).is_file()
            done = info.status == "FINISHED" and not folder.leaving.exists()
            if same and began and not done and not folder.trains():
                return folder
        return None

    def elsewhere(self, recipe_name: str, recipe_hash: str) -> str:
        """That a run of a recipe is said to go on, on another machine, and what to do if it does not; empty if none."""
        for info, folder in reversed(self._known(recipe_hash)):
            same = (info.recipe, info.recipe_hash, info.status) == (recipe_name, recipe_hash, "RUNNING")
            if same and info.host != socket.gethostname() and folder.alive():
                gone = f"if that machine is gone, --resume {info.name}"
                return f"{info.name} is said to be going on, on {info.host}; {gone}"
        return ""

    def finished_with(self, key: str, program: Mapping[str, str] | None = None) -> RunFolder | None:
        """The newest finished run of this `run_key`, and of this `provenance.program` where one is given."""
        for info, folder in reversed(self._known(key)):
            if info.key == key and info.status == "FINISHED" and program in (None, info.program):
                return folder
        return None

    def newest_finished(self, experiment: str, before: float) -> RunFolder | None:
        """The newest run of an experiment that trained before a moment, has finished, and stands beneath no other."""
        for info, folder in reversed(self._known(json.dumps(experiment))):
            whole = info.status == "FINISHED" and info.experiment == experiment and info.parent is None
            if whole and not info.evaluates and info.started < before and folder.recipe.is_file():
                return folder
        return None

    def abandoned(self) -> list[RunFolder]:
        """Runs said to be RUNNING whose process on this machine is gone."""
        known = self._known("RUNNING")
        return [folder for info, folder in known if info.status == "RUNNING" and not folder.alive()]

    def unsent(self) -> list[RunFolder]:
        """Runs that are over and ended with something that MLflow had yet to get."""
        known = self._known('"unsent": true')
        return [folder for info, folder in known if info.unsent and info.status != "RUNNING" and not folder.alive()]


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


_ELSEWHERE = "name another folder in TRAINKIT_STORE"


def _registered(client: Any, word: str) -> str:
    """The id of the LoggedModel behind `NAME@ALIAS` or `NAME/VERSION` of the registry; another word as it is."""
    name, at, alias = word.rpartition("@")
    if at:
        version = client.get_model_version_by_alias(name, alias)
    elif "/" in word:
        version = client.get_model_version(*word.split("/", 1))
    else:
        return word
    return version.tags.get("trainkit.model") or version.source.removeprefix("models:/")


def _plain_id(word: str, uri: str, shown: str) -> str:
    """An id that can be the name of a folder: a server could give any."""
    if not re.fullmatch(r"\w[\w.-]*", word):
        raise UserError(uri, f"{shown} calls that model {word!r}"[:300], "an id of letters and digits")
    return word


def _models(client: Any) -> list[tuple[str, str]]:
    """Id and description of the newest LoggedModels."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    newest = [{"field_name": "creation_timestamp", "ascending": False}]
    models = client.search_logged_models(experiments, max_results=100, order_by=newest) if experiments else []
    return [(model.model_id, f"{model.model_id} ({model.name})") for model in models]


def _near(word: str, models: list[tuple[str, str]]) -> str:
    near = difflib.get_close_matches(word, [model_id for model_id, _ in models], n=3, cutoff=0.6)
    shown = dict(models)
    listed = ", ".join([shown[model_id] for model_id in near] or list(shown.values())[:3])
    return f"{'the nearest' if near else 'the newest'} are {listed}" if listed else "the store holds no models yet"


def _download(tracking_uri: str, artifact_uri: str, folder: str) -> str:
    from mlflow.artifacts import download_artifacts

    return download_artifacts(artifact_uri=artifact_uri, dst_path=folder, tracking_uri=tracking_uri)


def run_key(recipe_hash: str, data_digest: str) -> str:
    """Hash under which a finished run can be used again: 32 hexadecimal digits."""
    return hashlib.sha256(f"{recipe_hash}\n{data_digest}".encode()).hexdigest()[:32]


def write_aside(path: Path, text: str) -> None:
    """Write a text file so that a reader, and a crash, sees all of it or the old one; then it is there for good."""
    out = path.with_name(f".{path.name}.new")
    try:
        with open(out, "w", encoding="utf-8", opener=through_no_link) as file:
            file.write(text)
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
    """Opens a file for `open`; not what a link that somebody laid under its name leads to. Raises OSError."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable (a rename is not, before this). Windows cannot open folders, and need not."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def settle_mlflow() -> None:
    """Settings of MLflow that are read from the environment; what the user has set stays. Call before importing it."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # The defaults (7 retries of 120 s, doubling pauses) take 247 s to notice a server that is down.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        # From the sending thread they would run through the lines of the training.
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }.items():
        os.environ.setdefault(name, value)


def _home() -> Path:
    named = os.environ.get("TRAINKIT_STORE", "").strip()
    if named:
        return Path(named).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / "mlruns"


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


def _make_database(database: Path) -> None:
    if database.is_file() and database.stat().st_size:
        return
    from filelock import FileLock, Timeout

    lock = database.with_name(f".{database.name}.lock")
    try:
        # Two processes that create it at once destroy it (MLflow migrates an empty database in many steps).
        with FileLock(lock, timeout=120):
            if database.is_file() and database.stat().st_size:
                return
            settle_mlflow()
            import mlflow.store.db.utils  # noqa: F401 - sets up the loggers that are quieted below
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            aside = database.with_name(f".{database.name}.new")
            aside.unlink(missing_ok=True)
            uri = f"sqlite:///{aside}"
            loud = [logging.getLogger(name) for name in ("mlflow.store.db.utils", "alembic")]
            levels = [logger.level for logger in loud]
            for logger in loud:
                logger.setLevel(logging.WARNING)
            try:
                made = SqlAlchemyStore(uri, (database.parent / "artifacts").as_uri())
            finally:
                for logger, level in zip(loud, levels, strict=True):
                    logger.setLevel(level)
            made.engine.dispose()
            SqlAlchemyStore._engine_map.pop(uri, None)
            # SQLite gives its journals the mode of their database.
            aside.chmod(0o600)
            os.replace(aside, database)
    except Timeout:
        raise UserError(str(lock), "held by another process for 120 s", remedy="stop it, or delete the file") from None
    except OSError as error:
        raise UserError(str(database), f"cannot be made: {error.strerror or error}", remedy=_ELSEWHERE) from None


def _check_database(database: Path) -> None:
    restore = (
        f"restore a copy, or move it away and begin a new one (journals of the runs are in {database.parent}/runs)"
    )
    try:
        connection = sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True, timeout=_LOCK_SECONDS)
        try:
            connection.isolation_level = None
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            version = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            if database.stat().st_size <= _CHECKED_BYTES:
                verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if verdict != "ok":
                    raise UserError(str(database), f"damaged: {verdict.splitlines()[-1]}", remedy=restore)
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        text = str(error)
        if "locked" in text:
            found = f"locked by another program for {_LOCK_SECONDS:.0f} s"
            raise Away(str(database), found, remedy="close what holds it (a database browser?)") from None
        if "no such table" in text:
            raise UserError(str(database), "not an MLflow database", remedy=_ELSEWHERE) from None
        if "readonly" in text or "unable to open" in text:
            raise UserError(str(database), f"cannot be written: {text}", remedy=_ELSEWHERE) from None
        raise UserError(str(database), f"damaged: {text}", remedy=restore) from None
    except sqlite3.DatabaseError as error:
        raise UserError(str(database), f"damaged: {error}", remedy=restore) from None
    known = _schemas()
    if version and known and version[0] not in known:
        found = f"written by a newer MLflow (schema {version[0]})"
        raise UserError(str(database), found, remedy="install that MLflow, or name another store in TRAINKIT_STORE")
    if version and known and version[0] != known[-1]:
        # Where whole tables are missing, MLflow would change the database at once, without a copy.
        found = f"written by an older MLflow (schema {version[0]})"
        remedy = f"copy it, then run: mlflow db upgrade sqlite:///{database}"
        raise UserError(str(database), found, remedy=remedy)


@functools.cache
def _schemas() -> tuple[str, ...]:
    """Schemas of the database that the installed MLflow knows, its own last; none where they are in no such order."""
    spec = importlib.util.find_spec("mlflow")
    if spec is None or spec.origin is None:
        return ()
    after, count = {}, 0
    for file in Path(spec.origin).parent.glob("store/db_migrations/versions/*.py"):
        text = file.read_text()
        named = re.search(r'^revision\s*=\s*"(\w+)"', text, re.MULTILINE)
        before = re.search(r'^down_revision\s*=\s*"(\w+)"', text, re.MULTILINE)
        if named:
            after[before[1] if before else ""] = named[1]
            count += 1
    order, last = [], ""
    while last in after:
        last = after.pop(last)
        order.append(last)
    return tuple(order) if len(order) == count else ()


@functools.cache
def _check_server(uri: str, shown: str) -> None:
    """Refuse a server that cannot keep what a run has to tell. One that does not say its version is taken as it is."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    version = ""
    try:
        answer = http_request(get_default_host_creds(uri), "/version", "GET", max_retries=0)
        version = answer.text.strip() if answer.status_code == 200 else ""
    except Exception as error:
        if not is_refusal(error):
            raise
    if (major := re.match(r"(\d+)\.\d+", version)) is not None and int(major[1]) < _OLDEST_SERVER:
        found = f"is a server of MLflow {version[:20]}, which keeps no models of runs"
        raise UserError(shown, found, f"{_OLDEST_SERVER} or newer", "update it")


def _has_whole_address(uri: str) -> bool:
    """Whether host and port of an address can be told apart; not where a password holds such a sign as / or #."""
    try:
        return urlsplit(uri).port != 0
    except ValueError:
        return False


def _check_reachable(uri: str, shown: str) -> None:
    """Ask a database server once: MLflow itself would try for most of an hour."""
    settle_mlflow()
    parts = urlsplit(uri)
    try:
        port = parts.port or {"postgresql": 5432, "mysql": 3306, "mssql": 1433}.get(parts.scheme.split("+")[0])
        if parts.hostname and port:
            socket.create_connection((parts.hostname, port), timeout=5).close()
        import sqlalchemy
        from mlflow.store.db.utils import create_sqlalchemy_engine

        engine = create_sqlalchemy_engine(uri)
        sqlalchemy.inspect(engine)
        engine.dispose()
    except Exception as error:
        if not is_refusal(error):
            raise
        found, remedy = reason(error)
        kind = Away if passes(error) else UserError
        raise kind(shown, found, remedy=remedy or "check MLFLOW_TRACKING_URI") from None


def _warn_of_network(folder: Path) -> None:
    if _NETWORK.match(kind := _disk(folder)):
        _log.warning("%s is on a network file system (%s), where SQLite is not safe; %s", folder, kind, _ELSEWHERE)


def _disk(folder: Path) -> str:
    """The kind of file system that a folder is on; empty where the system does not say."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except (OSError, IndexError):
        return ""
    here = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(here, key=lambda entry: len(entry[0]), default=("", ""))[1]

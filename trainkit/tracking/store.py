"""Find, make and list runs: the MLflow store, and beside it one folder for each run.

    <home>/mlflow.db          metrics, parameters, tags (SQLite), unless MLFLOW_TRACKING_URI names another store
    <home>/artifacts/         files shown in MLflow
    <home>/outputs/           cached outputs of frozen networks for training sets; may be deleted
    <home>/integrity/         results of data checks; may be deleted
    <home>/runs/<run name>/   journal.jsonl  run.json  recipe.yaml  checkpoints/

`home` is `mlruns/` of the checkout, outside one of the current folder; TRAINKIT_STORE names another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trainkit.config import metric_table
from trainkit.errors import UserError, of_disk
from trainkit.files import NETWORK_DISK, file_system, sync_folder, write_aside
from trainkit.paths import make_private
from trainkit.redact import without_secrets, without_user_info
from trainkit.tracking import run_names
from trainkit.tracking.logged_model import ABOUT
from trainkit.tracking.mlflow_client import (
    ELSEWHERE,
    Away,
    check_database,
    is_refusal,
    make_database,
    passes,
    reason,
    settle_mlflow,
)
from trainkit.tracking.run_folder import CREATION, RunFolder, RunInfo, parse_info, without_waiting

_log = logging.getLogger("trainkit")


@dataclass(frozen=True)
class Store:
    """A place for runs. Making one touches nothing; `prepare` and `client` do."""

    home: Path
    uri: str
    """MLflow tracking URI; may hold a password, so show `shown`."""

    @classmethod
    def locate(cls) -> Store:
        """Return the store that the environment and the current folder name."""
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
        # Of a database elsewhere MLflow would take a folder of wherever the run was started.
        return self.database.parent / "artifacts" if self.database else None

    @property
    def shown(self) -> str:
        """The URI without user name, password and tokens."""
        return without_secrets(self.uri if self.database else without_user_info(self.uri))

    def prepare(self) -> None:
        """Make the folders and the database where they are missing and check what is there.

        Raises UserError, within seconds, for a place that cannot be written and for a database that is damaged, locked,
        of another program, or of a newer or older MLflow.
        """
        database = self.database
        if database and ("?" in str(database) or unquote(str(database)) != str(database)):
            # SQLAlchemy would look for another file: MLflow retries that for 100 s, or puts the database there.
            found = "has ? or % with two digits in its name, which the address of a database cannot hold"
            raise UserError(str(database.parent), found, remedy=ELSEWHERE)
        try:
            make_private(self.home)
            make_private(self.home / "runs")
            if database:
                make_private(database.parent)
                make_private(database.parent / "artifacts")
        except OSError as error:
            raise UserError(str(self.home), f"cannot be made: {error.strerror}", remedy=ELSEWHERE) from None
        for folder in {self.home / "runs", database.parent if database else self.home}:
            if not os.access(folder, os.W_OK):
                raise UserError(str(folder), "cannot be written", remedy=ELSEWHERE)
        if database:
            _warn_of_network(database.parent)
            make_database(database)
            check_database(database)
        elif not self.uri.startswith(("http://", "https://", "databricks")):
            found, expected = f"{self.shown} is not a server", "sqlite:///FILE or http(s)://HOST"
            remedy = "start `mlflow server` before another database; unset it for the default"
            raise UserError("MLFLOW_TRACKING_URI", found, expected, remedy)
        elif not _has_whole_address(self.uri):
            found = f"{self.shown} has no host and port"
            remedy = "write : / ? # @ in a password as %3A %2F %3F %23 %40"
            raise UserError("MLFLOW_TRACKING_URI", found, "SCHEME://USER:PASSWORD@HOST:PORT", remedy)

    def ready(self) -> None:
        """Prepare the store before a run begins. One that is unavailable is no error: the run begins all the same."""
        with contextlib.suppress(Away):
            self.prepare()

    def client(self) -> Any:
        """Return an MlflowClient of this store, after `prepare`.

        Raises UserError when the store does not answer, after 35 s at most.
        """
        self.prepare()
        settle_mlflow(local=self.database is not None)
        from mlflow.tracking import MlflowClient

        # A traceback of everything that it raises as well, whoever catches it and says so: a full disk, a lock.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

        with self.asking():
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            client.search_experiments(max_results=1)
            return client

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Return a context in which errors of MLflow, the network or a database become UserErrors of this store."""
        try:
            yield
        except Exception as error:
            if not is_refusal(error):
                raise
            found, remedy = reason(error)
            raise (Away if passes(error) else UserError)(self.shown, found, remedy=remedy) from error

    def model_file(self, uri: str) -> Path:
        """Return the safetensors file of `models:/<model id>`, a LoggedModel of this store.

        `NAME@ALIAS` and `NAME/VERSION` of the registry name a registered model. Beside it lies what describes it. Files
        that this machine does not hold are downloaded, once, to `<home>/downloads/<model id>/`. Raises UserError for an
        id that the store does not have, and for a file that does not arrive whole.
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
            remedy = "`trainkit show RUN` and the page of an experiment name its models"
            raise UserError(uri, f"not in {self.shown}", wanted, remedy) from None
        try:
            there = client.list_logged_model_artifacts(word)
            files = [file for file in there if file.path.endswith(".safetensors")]
            if len(files) != 1:
                raise UserError(uri, f"holds {len(files)} safetensors files", "one", "name another model")
            if model.artifact_location.startswith(("file:", "/")):
                return Path(local_file_uri_to_path(model.artifact_location)) / files[0].path
            out = self.home / "downloads" / word
            out.mkdir(parents=True, exist_ok=True)
            for file in (*(file for file in there if file.path == ABOUT), *files):
                self._fetch(uri, f"{model.artifact_location}/{file.path}", out / Path(file.path).name, file.file_size)
        except (MlflowException, OSError) as error:
            remedy = "check that the store is reachable and its disk not full"
            raise UserError(uri, f"cannot be fetched: {without_secrets(str(error))[:300]}", remedy=remedy) from None
        return out / Path(files[0].path).name

    def _fetch(self, uri: str, artifact: str, out: Path, size: int) -> None:
        """Download an artifact of the model `uri`, whole, where it is not there yet. Raises UserError and OSError."""
        if out.is_file() and out.stat().st_size == size:
            return
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".") as aside:
            got = Path(_download(self.uri, artifact, aside))
            if got.stat().st_size != size:
                found = f"{got.stat().st_size} bytes of {out.name} arrived"
                raise UserError(uri, found, f"{size} bytes", "try again")
            os.replace(got, out)

    def new_run(self, recipe_name: str, seed: int, recipe_hash: str, parent: str | None = None) -> RunFolder:
        """Make and claim a new run's folder, named by recipe, seed, time and hash: `adadistill-s0-1121-0103-a1b2`."""
        runs = self.home / "runs"
        try:
            make_private(self.home)
            make_private(runs)
        except OSError as error:
            raise UserError(str(runs), f"cannot be made: {error.strerror}", remedy=ELSEWHERE) from None
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
                raise UserError(str(runs), f"cannot be written: {error.strerror}", remedy=ELSEWHERE) from None
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
        """Return all run folders, oldest first. A folder whose run.json cannot be read is left out with a warning."""
        return [folder for _, folder in self._known()]

    def _known(self, holding: str = "") -> list[tuple[RunInfo, RunFolder]]:
        """Return content and folder of all runs in whose run.json a text stands, oldest first.

        Among 10,000 runs a rare text takes 0.12 s, parsing all as JSON 0.4 s.
        """
        runs, letters, found = self.home / "runs", holding.encode(), []
        for name in os.listdir(runs) if runs.is_dir() else ():
            try:
                with open(f"{runs}/{name}/run.json", "rb", buffering=0, opener=without_waiting) as file:
                    text = file.read()
                if letters in text:
                    found.append((parse_info(text), RunFolder(runs / name)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                _log.warning("%s: cannot be read: %s", runs / name / "run.json", error)
        return sorted(found, key=lambda entry: (entry[0].started, entry[1].name))

    def find(self, word: str, beside: RunFolder | None = None, unfinished: bool = False) -> RunFolder:
        """Return the run that a word stands for: `run_names` lists the forms of it.

        `best` is the finished run with the best primary metric of the experiment of the run `beside`, or of the last
        one; `best:RECIPE` that of the runs of a recipe. With `unfinished` names stand for runs to be continued. Raises
        UserError naming the candidates, or the nearest, and for the path of anything but a run of this store.
        """
        if run_names.is_path(word) and os.path.exists(word) and not self._is_here(Path(word)):
            found = f"a path that is there, and not in {self.home / 'runs'}"
            raise UserError(f"run {word!r}", found, remedy="for the run of that name leave out the slash")
        return self._named(word, beside, unfinished)

    def find_or_path(self, word: str, root: Path = Path()) -> RunFolder | Path:
        """Return the run that a word stands for, or the path that it is: for whatever takes both.

        A word with a slash, or a dot at its beginning, is a path, but for that of a run of this store; another one is a
        path, from `root`, where no run has the name. Raises UserError, as `find` does, where there is neither.
        """
        path = root / os.path.expanduser(word)
        there = os.path.exists(path)
        if there and (path.suffix or run_names.is_path(word)) and not self._is_here(path):
            return path
        try:
            return self._named(word)
        except UserError:
            if there:
                return path
            raise

    def _is_here(self, path: Path) -> bool:
        return path.absolute().parent == (self.home / "runs").absolute()

    def _named(self, word: str, beside: RunFolder | None = None, unfinished: bool = False) -> RunFolder:
        word, runs = word.rstrip("/"), self.home / "runs"
        if (recipe := run_names.best_of(word)) is not None:
            return self._best(word, recipe, beside)
        if "/" in word and self._is_here(Path(word)):
            word = Path(word).name
        if word not in ("", "..") and Path(word).name == word:
            with contextlib.suppress(UserError):  # of what cannot be read, as of what is not there, more is said below
                exact = RunFolder(runs / word)
                exact.info()
                return exact
        return run_names.choose(self._known(), word, runs, unfinished)

    def _best(self, word: str, recipe: str, beside: RunFolder | None) -> RunFolder:
        """Return the finished run with the best primary metric of an experiment, of those of a recipe if one is given.

        The experiment is that of the run `beside`, else that of the newest of them.
        """
        found = run_names.finished(self._known("FINISHED"), word, self.home / "runs", recipe)
        experiment = (beside.info() if beside and not recipe else found[-1][0]).experiment
        folders = {info.run_id: folder for info, folder in found if info.run_id and info.experiment == experiment}
        client = self.client()
        kept = client.get_experiment_by_name(experiment or "")
        metric = kept.tags.get("mlflow.experiment.primaryMetric.name") if kept else None
        if not metric:
            remedy = "name a metric in the recipe: `best: {metric: ...}`"
            raise UserError(f"run {word!r}", f"experiment {experiment!r} has no primary metric", remedy=remedy)
        lower = metric_table.is_lower(metric)
        if metric_table.mode(metric) is None:  # else the tag may be that of an older version, which set it to True
            lower = kept.tags.get("mlflow.experiment.primaryMetric.greaterIsBetter") == "False"
        name = f"best/{metric}"
        of_recipe = f"tags.`trainkit.recipe` = '{recipe}'" if recipe else ""
        order = [f"metrics.`{name}` {'ASC' if lower else 'DESC'}"]  # runs without a value come last
        for run in _every_run(client, kept.experiment_id, of_recipe, order):
            if run.info.run_id in folders and not math.isnan(run.data.metrics.get(name, math.nan)):
                return folders[run.info.run_id]
        raise UserError(f"run {word!r}", f"no finished run of experiment {experiment!r} has {name}")

    def newest_unfinished(self, recipe_name: str, recipe_hash: str | None = None) -> RunFolder | None:
        """Return the newest run of a recipe (and hash) that began, did not finish, and is not being trained now.

        One whose process was killed after its end counts: it may have yet to be promoted.
        """
        for info, folder in reversed(self._known(recipe_hash or "")):
            same = info.recipe == recipe_name and recipe_hash in (None, info.recipe_hash)
            # One without a file for its MLflow run ended before its first step: refused, or killed at once.
            began = info.run_id or (folder.path / CREATION).is_file()
            done = info.status == "FINISHED" and not folder.leaving.exists()
            if same and began and not done and not folder.trains():
                return folder
        return None

    def elsewhere(self, recipe_name: str, recipe_hash: str) -> str:
        """Return a sentence about a run of this recipe that is marked as running on another machine; empty if none."""
        for info, folder in reversed(self._known(recipe_hash)):
            same = (info.recipe, info.recipe_hash, info.status) == (recipe_name, recipe_hash, "RUNNING")
            if same and info.host != socket.gethostname() and folder.alive():
                gone = f"if that machine is gone, --resume {info.name}"
                return f"{info.name} is recorded as running on {info.host}; {gone}"
        return ""

    def finished_with(self, key: str, program: Mapping[str, str] | None = None) -> RunFolder | None:
        """Return the newest finished run of this `run_key`, and of this `record.program` where one is given."""
        for info, folder in reversed(self._known(key)):
            if info.key == key and info.status == "FINISHED" and program in (None, info.program):
                return folder
        return None

    def newest_finished(self, experiment: str, before: float) -> RunFolder | None:
        """Return the newest finished training of an experiment that began before a moment and has no parent."""
        for info, folder in reversed(self._known(json.dumps(experiment))):
            whole = info.status == "FINISHED" and info.experiment == experiment and info.parent is None
            if whole and not info.evaluates and info.started < before and folder.recipe.is_file():
                return folder
        return None

    def abandoned(self) -> list[RunFolder]:
        """Return runs marked as RUNNING whose process on this machine has ended."""
        known = self._known("RUNNING")
        return [folder for info, folder in known if info.status == "RUNNING" and not folder.alive()]

    def unsent(self) -> list[RunFolder]:
        """Return runs that are over and ended with something that was not in MLflow."""
        known = self._known('"unsent": true')
        return [folder for info, folder in known if info.unsent and info.status != "RUNNING" and not folder.alive()]


def _every_run(client: Any, experiment_id: str, condition: str, order: Sequence[str]) -> Iterator[Any]:
    """Yield the runs of an experiment that meet a condition of MLflow, ten at a time."""
    token = None
    while True:
        page = client.search_runs([experiment_id], condition, max_results=10, order_by=order, page_token=token)
        yield from page
        if not (token := page.token):
            return


def _registered(client: Any, word: str) -> str:
    """Return the id of the LoggedModel behind `NAME@ALIAS` or `NAME/VERSION` of the registry; another word as it is."""
    name, at, alias = word.rpartition("@")
    if at:
        version = client.get_model_version_by_alias(name, alias)
    elif "/" in word:
        version = client.get_model_version(*word.split("/", 1))
    else:
        return word
    return version.tags.get("trainkit.model") or version.source.removeprefix("models:/")


def _plain_id(word: str, uri: str, shown: str) -> str:
    """Return an id that can be the name of a folder. Raises UserError: a server could give any."""
    if not re.fullmatch(r"\w[\w.-]*", word):
        raise UserError(uri, f"{shown} calls that model {word!r}"[:300], "an id of letters and digits")
    return word


def _download(tracking_uri: str, artifact_uri: str, folder: str) -> str:
    from mlflow.artifacts import download_artifacts

    return download_artifacts(artifact_uri=artifact_uri, dst_path=folder, tracking_uri=tracking_uri)


def _home() -> Path:
    named = os.environ.get("TRAINKIT_STORE", "").strip()
    if named:
        return Path(named).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / "mlruns"


def _has_whole_address(uri: str) -> bool:
    """Return True where host and port of an address can be parsed; not where a password holds / or #."""
    try:
        return urlsplit(uri).port != 0
    except ValueError:
        return False


def _warn_of_network(folder: Path) -> None:
    if NETWORK_DISK.match(kind := file_system(folder)):
        _log.warning("%s is on a network file system (%s), where SQLite is not safe; %s", folder, kind, ELSEWHERE)

"""Queue what a run has yet to upload to MLflow: the end of its journal, and numbered folders of files, tags and models.

Everything lies on the disk first. Progress is written down, so that any process can go on with it later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.files import sync_file, sync_folder, write_aside
from trainkit.redact import without_secrets
from trainkit.tracking import logged_model, mlflow_run
from trainkit.tracking.journal import Journal, Point, rows
from trainkit.tracking.metric_selection import matcher
from trainkit.tracking.mlflow_errors import Away, unreachable
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Dataset as LoggedDataset
    from mlflow.entities import LoggedModel, Metric, Run
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

_BATCH = 1000
_LARGE = 64 << 20
_MOST_IN_MEMORY = 100
"""Files that wait in memory for a disk that takes them."""
_TRIES = 3
"""After so many failed jobs of a kind, the others of it wait for the next time: the end of a run waits for none."""

_log = logging.getLogger("trainkit")


class UploadQueue:
    """Uploads of a run that are still to be done: the journal behind `acknowledged`, and folders in `outbox/`."""

    def __init__(self, folder: RunFolder, store: Store, journal: Journal):
        self.folder, self.store, self.journal = folder, store, journal
        self.run_id = folder.info().run_id
        """Of the MLflow run, as far as this process knows it."""
        self._ensured = False
        self._selects: Callable[[str], bool] = lambda name: True
        """Returns True for a metric that MLflow gets."""
        self._rounds = False
        self._path = folder.path / "outbox"
        self._path.mkdir(exist_ok=True)
        self._sent = folder.path / "sent.json"
        self._lock = threading.Lock()
        self._unsynced: list[Path] = []
        self.closed = False
        """True where no more calls are to be begun: the rest is left to another process."""
        for path in self._path.glob(".*"):  # left by a process that was killed while it wrote or removed them
            shutil.rmtree(path, ignore_errors=True)
        waiting = self.waiting()
        self._number = int(waiting[-1].name) if waiting else 0
        self._in_memory: list[tuple[dict[str, Any], str | None, Callable[[Path], object] | None]] = []
        self._warned = False
        self.acknowledged = min(sent(folder), journal.position)

    def waiting(self) -> list[Path]:
        """Return the jobs on the disk, in their order."""
        return sorted(path for path in self._path.iterdir() if path.name.isdigit()) if self._path.is_dir() else []

    def put(self, job: dict[str, Any], file: str | None = None, write: Callable[[Path], object] | None = None) -> None:
        """Add a job, with a file that `write` makes. It appears on the disk complete or not at all.

        Where the disk is full or fails, it waits in memory until the next job, or `write_waiting`; of artifacts with
        one name the last. Raises UserError when the run's folder is gone.
        """
        with self._lock:
            if job["kind"] == "artifact":
                self._in_memory = [one for one in self._in_memory if (one[0], one[1]) != (job, file)]
            self._in_memory.append((job, file, write))
        self.write_waiting()

    def write_waiting(self) -> bool:
        """Write jobs that wait in memory to the disk, those without a file first; returns True if none is left."""
        with self._lock:
            for one in sorted(self._in_memory, key=lambda one: one[1] is not None):
                try:
                    self._write_job(*one)
                except OSError as error:
                    if not self._warned:
                        self._warned = True
                        _log.warning("%s: %s; training continues, its files wait in memory", self._path, error)
                    break
                except BaseException:
                    self._in_memory.remove(one)
                    raise
                self._in_memory.remove(one)
            while sum(file is not None for _, file, _ in self._in_memory) > _MOST_IN_MEMORY:
                one = next(one for one in self._in_memory if one[1] is not None)
                self._in_memory.remove(one)
                _log.warning("%s: %s is lost, too many files wait in memory", self._path, one[1])
            if self._in_memory:
                self.folder.refuse_deleted()
            return not self._in_memory

    def holds_jobs(self) -> bool:
        """Return True while jobs without a file wait in memory, from where they can be uploaded."""
        return any(file is None for _, file, _ in self._in_memory)

    def unwritten(self) -> list[str]:
        """Return the names of jobs in memory: they are lost with the process unless the disk takes them."""
        return [file or job["kind"] for job, file, _ in self._in_memory]

    def _write_job(self, job: dict[str, Any], file: str | None, write: Callable[[Path], object] | None) -> None:
        number = f"{self._number + 1:08d}"
        aside = self._path / f".{number}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            (aside / "file").mkdir()
            if file is not None and write is not None:
                write(aside / "file" / file)
            kept = {**job, "file": file, "crc": _crc(aside / "file" / file) if file is not None else None}
            (aside / "job.json").write_text(json.dumps(kept), encoding="utf-8")
            aside.rename(self._path / number)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._number += 1
        self._unsynced.append(self._path / number)

    def commit(self) -> None:
        """Sync the jobs to the disk: a resumed run does not do them again, so they must not be lost."""
        with self._lock:
            fresh, self._unsynced = self._unsynced, []
        for path in fresh:
            for part in (*path.glob("file/*"), path / "job.json", path / "file", path):
                with contextlib.suppress(FileNotFoundError):  # sent meanwhile
                    sync_file(part)
        if fresh:
            sync_folder(self._path)

    def drop_end(self) -> None:
        """Remove the job that sets the final status: the run goes on."""
        for path in self.waiting():
            job = self._job(path)
            if job is not None and job["kind"] == "end":
                _drop(path)

    def acknowledge(self, position: int) -> None:
        """Write down that everything before `position` is in the store."""
        # Without the lock, for which `put` waits, which the training calls.
        write_aside(self._sent, json.dumps({"position": position, "run": self.run_id}) + "\n")
        self.acknowledged = position

    def recheck_run(self) -> None:
        """Check before the next upload that the store still has this run."""
        self._ensured = False

    def send(self, client: MlflowClient) -> None:
        """Upload everything there is now. Raises the client's errors, after progress was written down.

        One failed job holds up no other, unless the store is unavailable.
        """
        self.ensure_run(client)
        failure = None
        with self._lock:
            unwritten = [one for one in self._in_memory if one[1] is None]
        for one in unwritten:
            self._upload(client, one[0], None)
            with self._lock:
                self._in_memory = [other for other in self._in_memory if other is not one]
        if self.journal.position > self.acknowledged and self.folder.journal.exists():
            failure = self._try_metrics(client)
        failed: Counter[str] = Counter()
        for path in self.waiting():
            if self.closed:
                return
            job = self._job(path)
            if job is None or failed[job["kind"]] >= _TRIES:
                continue
            try:
                self._send_job(client, job, path)
            except Exception as error:
                if unreachable(error):
                    raise
                failed[job["kind"]] += 1
                failure = failure or error
        if failure is not None:
            raise failure

    def ensure_run(self, client: MlflowClient) -> None:
        """Create the MLflow run, or set it to running again, where that is still to be done."""
        if self._ensured or not self.folder.path.is_dir():
            return
        run_id = mlflow_run.ensure(self.folder, self.store, client, look=self.run_id is not None)
        if run_id != self.run_id:
            self.run_id = run_id
            self.acknowledged = min(sent(self.folder), self.journal.position)
        self._selects = selection(self.folder)
        creation = mlflow_run.read(self.folder)
        self._rounds = creation is not None and creation.rounds
        self._ensured = True

    def _try_metrics(self, client: MlflowClient) -> Exception | None:
        """Upload metrics; returns the error that prevents that alone, as of a disk that does not take the journal."""
        try:
            # A row in the store must also be in the journal after a power cut: otherwise it would get another time.
            end = self.journal.commit()
        except OSError as error:
            return error
        try:
            self._send_metrics(client, end)
        except Exception as error:
            if unreachable(error):
                raise
            return error
        return None

    def _send_metrics(self, client: MlflowClient, end: int) -> None:
        batch: list[tuple[str, Point]] = []
        line, whole = self.acknowledged, self.acknowledged
        for position, name, point in rows(self.folder.journal, self.acknowledged, end):
            if position != line:
                line, whole = position, line
            if self._selects(name):
                batch.append((name, point))
            if len(batch) == _BATCH:
                if self.closed:
                    return
                self._send_batch(client, batch)
                # The line this row is from may have more; it is sent again rather than not.
                self.acknowledge(whole)
                batch = []
        if batch:
            self._send_batch(client, batch)
        self.acknowledge(end)

    def _send_batch(self, client: MlflowClient, batch: list[tuple[str, Point]]) -> None:
        from mlflow.exceptions import MlflowException

        metrics = [entity(name, point, rounds=self._rounds) for name, point in batch]
        try:
            client.log_batch(self._id, metrics=metrics)
        except MlflowException as error:
            if not self._refused(client, error):
                raise
            for metric in metrics:
                try:
                    client.log_batch(self._id, metrics=[metric])
                except MlflowException as single:
                    if not self._refused(client, single):
                        raise
                    _log.warning(
                        "MLflow refuses %s at step %d: %s", metric.key, metric.step, without_secrets(str(single))
                    )

    def _job(self, path: Path) -> dict[str, Any] | None:
        """Read a job; None for one that a power cut has damaged, which is renamed."""
        try:
            job = json.loads((path / "job.json").read_bytes())
            if isinstance(job, dict) and job.keys() >= {"kind", "file"}:
                file = path / "file" / job["file"] if job["file"] else None
                if file is None or job.get("crc") is None or job["crc"] == _crc(file):
                    return job
        except (OSError, ValueError, TypeError):
            pass
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        _log.warning("%s cannot be read, as after a power cut; it is left aside, all else is sent", aside)
        self.journal.event(self.journal.last_step, "outbox_damaged", {"job": aside.name})
        return None

    def _send_job(self, client: MlflowClient, job: dict[str, Any], path: Path) -> None:
        file = path / "file" / job["file"] if job["file"] else None
        # Of a foreign run: files that lie elsewhere on this machine are not uploaded in its name.
        if file is not None and file.resolve().parent != path.resolve() / "file":
            named = "run %s: %s names %.200r, which is not beside it; left out"
            _log.warning(named, self.folder.name, path, job["file"])
        else:
            self._upload(client, job, file)
        _drop(path)

    @property
    def _id(self) -> str:
        """Of the MLflow run, which `ensure_run` has created. Raises `Away` where its process has yet to do that."""
        if self.run_id is None:
            raise Away(f"run {self.folder.name}", "is not in MLflow yet")
        return self.run_id

    def _upload(self, client: MlflowClient, job: dict[str, Any], file: Path | None) -> None:
        from mlflow.exceptions import MlflowException

        try:
            if job["kind"] == "artifact":
                client.log_artifact(self._id, str(file), job["folder"])
            elif job["kind"] == "tags":
                _set_tags(client, self._id, job["tags"])
            elif job["kind"] == "beneath":
                if (other := self._other(client, job["run"])) is not None:
                    _set_tags(client, other, {"mlflow.parentRunId": self._id, **job["tags"]})
            elif job["kind"] == "dataset":
                self._send_dataset(client, job)
            elif job["kind"] == "model":
                self._send_model(client, job, str(file))
            elif job["kind"] == "end":
                client.set_terminated(self._id, status=job["status"], end_time=job["time"])
        except (MlflowException, OSError) as error:
            if isinstance(error, OSError) and (file is None or file.exists()):
                raise
            code = getattr(error, "error_code", "")
            if "run" in job and code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # the second: deleted
                self._say_missing(job["run"])
            elif isinstance(error, MlflowException) and not self._refused(client, error):
                raise
            else:
                said = without_secrets(str(error))
                _log.warning("MLflow refuses %s of run %s: %s", job["kind"], self.folder.name, said)

    def _other(self, client: MlflowClient, name: str) -> str | None:
        """Return the MLflow id of another run, which has ended. None where it has none, and is to have none."""
        folder = mlflow_run.named(name, self.store)
        found = mlflow_run.ensure(folder, self.store, client) if folder is not None else None
        if found is None:
            self._say_missing(name)
        return found

    def _say_missing(self, name: str) -> None:
        said = "run %s is not in %s: its page will not be shown as a child of %s"
        _log.warning(said, name, self.store.shown, self.folder.name)

    def _send_dataset(self, client: MlflowClient, job: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": job["source"]})
        profile = json.dumps({"num_rows": job["size"], "digest": job.get("whole_digest", job["digest"])})
        dataset = Dataset(job["name"], job["digest"], source_type="local", source=source, profile=profile)
        client.log_inputs(self._id, [DatasetInput(dataset, [InputTag("mlflow.data.context", job["context"])])])

    def _send_model(self, client: MlflowClient, job: dict[str, Any], file: str) -> None:
        from mlflow.entities import LoggedModelOutput

        made_file = self.folder.path / "models.json"
        made = json.loads(made_file.read_text()) if made_file.exists() else {}
        key = f"{job['name']}@{job['step']}"
        run = client.get_run(self._id)
        model = _model(client, made[key]) if key in made else None
        if model is None:
            # Noted before anything else can fail: a second try, or a resumed run, fills the same model.
            made[key] = self._made_model(client, job, run)
            write_aside(made_file, json.dumps(made, indent=1) + "\n")
            model = client.get_logged_model(made[key])
        for own in self._model_files(Path(file), job, made[key]):
            client.log_model_artifact(made[key], str(own))
        client.finalize_logged_model(made[key], "READY")
        # Of all calls the only one that fails the second time, as after an answer that was lost.
        if made[key] not in [output.model_id for output in (run.outputs.model_outputs if run.outputs else [])]:
            client.log_outputs(self._id, [LoggedModelOutput(made[key], step=job["step"])])
        # A score is of the data set that its name begins with, where there is one.
        data = {entry.dataset.name: entry.dataset for entry in (run.inputs.dataset_inputs if run.inputs else [])}
        # As the journal has them, so that the run does not get other rows: a last evaluation that was held at an
        # earlier step, as where a run was told to stop, says nothing of these weights.
        points = self.journal.points([name for name in job["metrics"] if self._selects(name)], job["step"])
        # A score that the model has already, as after an answer that was lost, is not taken a second time.
        for has in model.metrics or []:
            points.pop(has.key, None)
        metrics = [
            entity(name, point, made[key], data.get(name.partition("/")[0]), self._rounds)
            for name, point in sorted(points.items())
        ]
        if metrics:
            client.log_batch(self._id, metrics=metrics)

    def _model_files(self, weights: Path, job: dict[str, Any], model_id: str) -> list[Path]:
        """Return the files of a LoggedModel: its weights, and those that make it a model that MLflow can load."""
        if (described := job.get("described")) is None:
            return [weights]
        about = {"name": job["name"], "model_id": model_id, "run_id": self._id}
        return [weights, *logged_model.write_files(weights.parent, described, size=weights.stat().st_size, **about)]

    def _made_model(self, client: MlflowClient, job: dict[str, Any], run: Run) -> str:
        """Return the id of a LoggedModel, which is made unless an earlier try, whose answer was lost, has made it."""
        experiment, step = run.info.experiment_id, str(job["step"])

        def found() -> list[str]:
            models = client.search_logged_models([experiment], f"name = '{job['name']}'", max_results=1000)
            return [m.model_id for m in models if (m.source_run_id, m.tags.get("trainkit.step")) == (self.run_id, step)]

        models = found()
        if not models:
            about = {k: v for k, v in run.data.tags.items() if k.startswith(("mlflow.user", "mlflow.source."))}
            tags = {**about, "trainkit.step": step, **job["tags"]}
            client.create_logged_model(experiment, job["name"], self._id, tags=tags, model_type="safetensors")
            models = found()  # MLflow's client asks again by itself when an answer is lost: then there are two
        for second in models[1:]:
            client.delete_logged_model(second)
        usage = f"Weights at step {step}, safetensors. In a recipe: `weights: models:/{models[0]}`"
        if "described" in job:
            usage += f"; in Python: `mlflow.pyfunc.load_model('models:/{models[0]}')`"
        client.set_logged_model_tags(models[0], {"mlflow.note.content": usage})
        return models[0]

    def _refused(self, client: MlflowClient, error: MlflowException) -> bool:
        """Return True where the store will never take this; False where it is unavailable or the run was deleted.

        BAD_REQUEST, which MLflow says of a damaged database and a proxy of whatever it likes, is no such answer.
        """
        # The client says the latter of whatever keeps it from asking for a model, a lost connection too.
        if "API request to endpoint" in str(error) or "Failed to get logged model" in str(error):
            return False
        if error.error_code != "INVALID_PARAMETER_VALUE":
            return False
        return client.get_run(self._id).info.lifecycle_stage == "active"


def _model(client: MlflowClient, model_id: str) -> LoggedModel | None:
    """Return a LoggedModel; None where the store has it no longer, as after its database was replaced."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_logged_model(model_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _set_tags(client: MlflowClient, run_id: str, tags: dict[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _drop(job: Path) -> None:
    """Remove a job, its name first: half of one would be taken for a damaged one."""
    aside = job.with_name(f".{job.name}")
    job.rename(aside)
    shutil.rmtree(aside)


def _crc(file: Path) -> int | None:
    """Return the CRC-32 of a file; None of a large one, which is a link to weights that were synced before."""
    plain = file.is_file() and file.stat().st_size <= _LARGE
    return zlib.crc32(file.read_bytes()) if plain else None


def sent(folder: RunFolder) -> int:
    """Return the position in the journal of a run before which everything is in its MLflow run.

    0 where that is in doubt: sending again is harmless.
    """
    try:
        noted = json.loads((folder.path / "sent.json").read_text())
        position = int(noted["position"])
        if noted.get("run") not in (None, folder.info().run_id):
            return 0
        with open(folder.journal, "rb") as file:
            file.seek(max(0, position - 1))
            return position if file.read(1) in (b"\n", b"") else 0  # behind the end there is nothing to send
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def selection(folder: RunFolder) -> Callable[[str], bool]:
    """Return a function that tells whether MLflow gets a metric of this run. Raises UserError for a damaged file."""
    creation = mlflow_run.read(folder)
    return matcher(creation.metrics if creation else None)


def left(folder: RunFolder) -> tuple[int, int]:
    """Count the values, and the files, tags, data sets and models, that a run has yet to upload, from its folder alone.

    Raises UserError for a damaged journal.
    """
    start, end = sent(folder), folder.journal.stat().st_size if folder.journal.exists() else 0
    selects = selection(folder)
    values = sum(selects(name) for _, name, _ in rows(folder.journal, start, end)) if end > start else 0
    outbox = folder.path / "outbox"
    return values, sum(path.name.isdigit() for path in outbox.iterdir()) if outbox.is_dir() else 0


def waits(folder: RunFolder) -> bool:
    """Return True where something of a finished run is not in MLflow; only its folder is read."""
    return folder.info().unsent or any(left(folder))


def rounded(value: float) -> float:
    """Return a value with six significant digits, as MLflow's page shows all that it has; whole numbers stay."""
    return value if not math.isfinite(value) or value.is_integer() else float(f"{value:.6g}")


def entity(
    name: str, point: Point, model_id: str | None = None, dataset: LoggedDataset | None = None, rounds: bool = False
) -> Metric:
    """Return a value as MLflow's Metric, with six digits where it `rounds`."""
    from mlflow.entities import Metric

    # MLflow would store an infinity as 1.8e308, which ruins every chart; the journal has it as it was.
    value = point.value if math.isfinite(point.value) else math.nan
    value = rounded(value) if rounds else value
    about = {"dataset_name": dataset.name, "dataset_digest": dataset.digest} if dataset else {}
    return Metric(name, value, point.t, point.step, model_id=model_id, **about)

"""What a run has yet to send to MLflow: the unsent end of its journal, and numbered folders of files, tags and models.

Everything here lies on the disk first. Sending notes how far it came, so that any process can go on with it later.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.files import write_aside
from trainkit.redact import without_secrets
from trainkit.tracking import mlflow_run
from trainkit.tracking.journal import Journal, Point, rows
from trainkit.tracking.mlflow_errors import unreachable
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.tracking.upload_process import Courier

_BATCH = 1000
_LARGE = 64 << 20
_MOST_IN_MEMORY = 100
"""Files that wait in memory for a disk that takes them."""
_TRIES = 3
"""So many jobs of a kind fail, and the others of it wait for the next time: the end of a run waits for none of them."""

_log = logging.getLogger("trainkit")


class Outbox:
    """What a run has yet to send: the journal behind `acknowledged`, and numbered folders in `outbox/`."""

    def __init__(self, folder: RunFolder, store: Store, journal: Journal):
        self.folder, self.store, self.journal = folder, store, journal
        self.run_id = folder.info().run_id
        """Of the MLflow run, as far as this process knows it."""
        self._enrolled = False
        self._path = folder.path / "outbox"
        self._path.mkdir(exist_ok=True)
        self._sent = folder.path / "sent.json"
        self._lock = threading.Lock()
        self._unsynced: list[Path] = []
        self.closed = False
        """Whether to begin no more calls: what is left is another's to send."""
        self.courier: Courier | None = None
        """What hands metrics over, where there is one."""
        for path in self._path.glob(".*"):  # what a process was putting down, or had sent, when it was killed
            shutil.rmtree(path, ignore_errors=True)
        waiting = self.waiting()
        self._number = int(waiting[-1].name) if waiting else 0
        self._in_memory: list[tuple[dict[str, Any], str | None, Callable[[Path], Any] | None]] = []
        self._warned = False
        self.acknowledged = min(sent(folder), journal.position)

    def waiting(self) -> list[Path]:
        """Jobs on the disk, in their order."""
        return sorted(path for path in self._path.iterdir() if path.name.isdigit()) if self._path.is_dir() else []

    def put(self, job: dict[str, Any], file: str | None = None, write: Callable[[Path], Any] | None = None) -> None:
        """Add a job, with a file that `write` makes. Appears complete or not at all.

        What a full or failing disk refuses waits in memory: it is put down before the next job, or by `put_down`, and
        of artifacts with one name the last. Raises UserError when the run's folder is gone.
        """
        with self._lock:
            if job["kind"] == "artifact":
                self._in_memory = [one for one in self._in_memory if (one[0], one[1]) != (job, file)]
            self._in_memory.append((job, file, write))
        self.put_down()

    def put_down(self) -> bool:
        """Put down what waits in memory, jobs without a file first; says whether nothing is left there."""
        with self._lock:
            for one in sorted(self._in_memory, key=lambda one: one[1] is not None):
                try:
                    self._lay(*one)
                except OSError as error:
                    if not self._warned:
                        self._warned = True
                        _log.warning("%s: %s; training goes on, its files wait in memory", self._path, error)
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

    def unsaid(self) -> bool:
        """Whether jobs wait in memory that can be handed over from there: those without a file."""
        return any(file is None for _, file, _ in self._in_memory)

    def lost(self) -> list[str]:
        """What waits in memory, by name: without a disk that takes it, it goes with the process."""
        return [file or job["kind"] for job, file, _ in self._in_memory]

    def _lay(self, job: dict[str, Any], file: str | None, write: Callable[[Path], Any] | None) -> None:
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
        """Put the jobs there are on the disk for good: what a resumed run does not do again must not be lost."""
        with self._lock:
            fresh, self._unsynced = self._unsynced, []
        for path in fresh:
            for part in (*path.glob("file/*"), path / "job.json", path / "file", path):
                _fsync(part)
        if fresh:
            _fsync(self._path)

    def forget_end(self) -> None:
        """Drop a status that was to be set: the run goes on."""
        for path in self.waiting():
            job = self._job(path)
            if job is not None and job["kind"] == "end":
                _drop(path)

    def acknowledge(self, position: int) -> None:
        """Note that everything before `position` is in the store."""
        # Not what `put` waits for, which the training calls.
        write_aside(self._sent, json.dumps({"position": position, "run": self.run_id}) + "\n")
        self.acknowledged = position

    def doubt(self) -> None:
        """Look before the next sending whether the store has this run still: something was not as expected."""
        self._enrolled = False

    def send(self, client: Any) -> None:
        """Send everything there is now. Raises what the client raises, having noted how far it came.

        What goes wrong with one thing holds up no other, unless the store is away.
        """
        self.enrol(client)
        failure = None
        with self._lock:
            unwritten = [one for one in self._in_memory if one[1] is None]
        for one in unwritten:
            self._hand_over(client, one[0], None)
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

    def enrol(self, client: Any) -> None:
        """Have the MLflow run made, or told that it goes on, where that is still to be done."""
        if self._enrolled or not self.folder.path.is_dir():
            return
        run_id = mlflow_run.ensure(self.folder, self.store, client, look=self.run_id is not None)
        if run_id != self.run_id:
            self.run_id = run_id
            self.acknowledged = min(sent(self.folder), self.journal.position)
        self._enrolled = True

    def _try_metrics(self, client: Any) -> Exception | None:
        """Send metrics; returns what keeps from that alone, such as a disk that takes no more of the journal."""
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

    def _send_metrics(self, client: Any, end: int) -> None:
        batch: list[tuple[str, Point]] = []
        line, whole = self.acknowledged, self.acknowledged
        for position, name, point in rows(self.folder.journal, self.acknowledged, end):
            if position != line:
                line, whole = position, line
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

    def _send_batch(self, client: Any, batch: list[tuple[str, Point]]) -> None:
        from mlflow.exceptions import MlflowException

        if self.courier is not None and self.courier.took(self.run_id, batch):
            return
        metrics = [entity(name, point) for name, point in batch]
        try:
            client.log_batch(self.run_id, metrics=metrics)
        except MlflowException as error:
            if not self._refused(client, error):
                raise
            for metric in metrics:
                try:
                    client.log_batch(self.run_id, metrics=[metric])
                except MlflowException as single:
                    if not self._refused(client, single):
                        raise
                    _log.warning(
                        "MLflow refuses %s at step %d: %s", metric.key, metric.step, without_secrets(str(single))
                    )

    def _job(self, path: Path) -> dict[str, Any] | None:
        """What is to be done; None for a job that a power cut left without its words, which is put aside."""
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

    def _send_job(self, client: Any, job: dict[str, Any], path: Path) -> None:
        file = path / "file" / job["file"] if job["file"] else None
        # Of a run that somebody else laid here: what lies elsewhere on this machine is not sent in its name.
        if file is not None and file.resolve().parent != path.resolve() / "file":
            named = "run %s: %s names %.200r, which is not beside it; left out"
            _log.warning(named, self.folder.name, path, job["file"])
        else:
            self._hand_over(client, job, file)
        _drop(path)

    def _hand_over(self, client: Any, job: dict[str, Any], file: Path | None) -> None:
        from mlflow.exceptions import MlflowException

        try:
            if job["kind"] == "artifact":
                client.log_artifact(self.run_id, str(file), job["folder"])
            elif job["kind"] == "tags":
                self._send_tags(client, self.run_id, job["tags"])
            elif job["kind"] == "beneath":
                if (other := self._other(client, job["run"])) is not None:
                    self._send_tags(client, other, {"mlflow.parentRunId": self.run_id, **job["tags"]})
            elif job["kind"] == "dataset":
                self._send_dataset(client, job)
            elif job["kind"] == "model":
                self._send_model(client, job, str(file))
            elif job["kind"] == "end":
                client.set_terminated(self.run_id, status=job["status"], end_time=job["time"])
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

    def _send_tags(self, client: Any, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _other(self, client: Any, name: str) -> str | None:
        """The MLflow id of another run, which has ended. None where it has none, and is to have none."""
        folder = mlflow_run.named(name, self.store)
        found = mlflow_run.ensure(folder, self.store, client) if folder is not None else None
        if found is None:
            self._say_missing(name)
        return found

    def _say_missing(self, name: str) -> None:
        said = "run %s is not in %s: its page will not be found beneath that of %s"
        _log.warning(said, name, self.store.shown, self.folder.name)

    def _send_dataset(self, client: Any, job: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": job["source"]})
        profile = json.dumps({"num_rows": job["size"], "digest": job.get("whole_digest", job["digest"])})
        dataset = Dataset(job["name"], job["digest"], source_type="local", source=source, profile=profile)
        client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", job["context"])])])

    def _send_model(self, client: Any, job: dict[str, Any], file: str) -> None:
        from mlflow.entities import LoggedModelOutput

        made_file = self.folder.path / "models.json"
        made = json.loads(made_file.read_text()) if made_file.exists() else {}
        key = f"{job['name']}@{job['step']}"
        run = client.get_run(self.run_id)
        model = self._model(client, made[key]) if key in made else None
        if model is None:
            # Noted before anything else can fail: a second try, or a resumed run, fills the same model.
            made[key] = self._made_model(client, job, run)
            write_aside(made_file, json.dumps(made, indent=1) + "\n")
            model = client.get_logged_model(made[key])
        client.log_model_artifact(made[key], file)
        client.finalize_logged_model(made[key], "READY")
        # Of all calls the only one that fails the second time, as after an answer that was lost.
        if made[key] not in [output.model_id for output in (run.outputs.model_outputs if run.outputs else [])]:
            client.log_outputs(self.run_id, [LoggedModelOutput(made[key], step=job["step"])])
        # A score is of the data set that its name begins with, where there is one.
        data = {entry.dataset.name: entry.dataset for entry in (run.inputs.dataset_inputs if run.inputs else [])}
        # As the journal has them, so that the run does not get other rows: a last evaluation that was held at an
        # earlier step, as where a run was told to stop, says nothing of these weights.
        points = self.journal.points(job["metrics"], job["step"])
        # A score that the model has already, as after an answer that was lost, is not taken a second time.
        for has in model.metrics or []:
            points.pop(has.key, None)
        metrics = [
            entity(name, point, made[key], data.get(name.partition("/")[0])) for name, point in sorted(points.items())
        ]
        if metrics:
            client.log_batch(self.run_id, metrics=metrics)

    def _model(self, client: Any, model_id: str) -> Any:
        """A LoggedModel; None where the store has it no longer, as after its database was replaced."""
        from mlflow.exceptions import MlflowException

        try:
            return client.get_logged_model(model_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _made_model(self, client: Any, job: dict[str, Any], run: Any) -> str:
        """The id of a LoggedModel, which is made where an earlier try, whose answer was lost, has not made it."""
        experiment, step = run.info.experiment_id, str(job["step"])

        def found() -> list[str]:
            models = client.search_logged_models([experiment], f"name = '{job['name']}'", max_results=1000)
            return [m.model_id for m in models if (m.source_run_id, m.tags.get("trainkit.step")) == (self.run_id, step)]

        models = found()
        if not models:
            about = {k: v for k, v in run.data.tags.items() if k.startswith(("mlflow.user", "mlflow.source."))}
            tags = {**about, "trainkit.step": step, **job["tags"]}
            client.create_logged_model(experiment, job["name"], self.run_id, tags=tags, model_type="safetensors")
            models = found()  # MLflow's client asks again by itself when an answer is lost: then there are two
        for second in models[1:]:
            client.delete_logged_model(second)
        usage = f"Weights at step {step}, safetensors. In a recipe: `weights: models:/{models[0]}`"
        client.set_logged_model_tags(models[0], {"mlflow.note.content": usage})
        return models[0]

    def _refused(self, client: Any, error: Any) -> bool:
        """Whether the store will never take this, as opposed to being away or the run being in its bin.

        BAD_REQUEST, which MLflow says of a damaged database and a proxy of whatever it likes, is no such answer.
        """
        # The client says the latter of whatever keeps it from asking for a model, a lost connection too.
        if "API request to endpoint" in str(error) or "Failed to get logged model" in str(error):
            return False
        if error.error_code != "INVALID_PARAMETER_VALUE":
            return False
        return client.get_run(self.run_id).info.lifecycle_stage == "active"


def _drop(job: Path) -> None:
    """Remove a job, its name first: half of one would be taken for a damaged one."""
    aside = job.with_name(f".{job.name}")
    job.rename(aside)
    shutil.rmtree(aside)


def _crc(file: Path) -> int | None:
    """CRC-32 of a file; None of a large one, which is a link to weights that are on the disk for good."""
    plain = file.is_file() and file.stat().st_size <= _LARGE
    return zlib.crc32(file.read_bytes()) if plain else None


def sent(folder: RunFolder) -> int:
    """Position in the journal of a run before which everything is in its MLflow run."""
    # Sending again is harmless; not sending is not.
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


def left(folder: RunFolder) -> tuple[int, int]:
    """How many values a run has yet to send, and how many files, tags, data sets and models; only its folder is read.

    Raises UserError for a damaged journal.
    """
    start, end = sent(folder), folder.journal.stat().st_size if folder.journal.exists() else 0
    values = sum(1 for _ in rows(folder.journal, start, end)) if end > start else 0
    outbox = folder.path / "outbox"
    return values, sum(path.name.isdigit() for path in outbox.iterdir()) if outbox.is_dir() else 0


def waits(folder: RunFolder) -> bool:
    """Whether MLflow has yet to get something of a run that is over; only its folder is read."""
    return folder.info().unsent or any(left(folder))


def _fsync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # sent meanwhile
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entity(name: str, point: Point, model_id: str | None = None, dataset: Any = None) -> Any:
    """A value as MLflow takes it."""
    from mlflow.entities import Metric

    # MLflow would store an infinity as 1.8e308, which ruins every chart; the journal has it as it was.
    value = point.value if math.isfinite(point.value) else math.nan
    about = {"dataset_name": dataset.name, "dataset_digest": dataset.digest} if dataset else {}
    return Metric(name, value, point.t, point.step, model_id=model_id, **about)

"""What happened, told to MLflow: a journal on disk first, and one thread behind it that sends.

Training never waits for the store. `log` writes a line of the journal; files, tags and models wait in `<run>/outbox/`.
The sender reads from there, in batches of up to 1000 metrics every few seconds, tries again when the store is away, and
notes in `<run>/sent.json` how far it came. What could not be sent by the end stays on disk; `send_rest` sends it later.

Own calls of MlflowClient with the run's id: MLflow's fluent API is per thread, starts runs on its own and ends crashed
ones as FINISHED; Accelerate's tracker, built on it, drops tensors and numpy numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from trainkit.errors import UserError
from trainkit.journal import Journal, Point, Replay, rows
from trainkit.redact import HIDDEN, is_secret_name, without_secrets
from trainkit.store import RunFolder, Store, write_aside

Status = Literal["FINISHED", "FAILED", "KILLED"]

METRIC_NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")
"""Names MLflow takes everywhere; one bad name would make it refuse a whole batch."""

_BATCH = 1000
_EVERY_SECONDS = 3.0
_WAKE_BYTES = 100_000
_FINISH_SECONDS = 30.0
_PARAM_CHARS, _TAG_CHARS, _DIGEST_CHARS = 6000, 8000, 36
_VERSIONS = ("torch", "torchvision", "accelerate", "mlflow", "timm", "datasets", "numpy")

_log = logging.getLogger("trainkit")


class Tracker:
    """The record of one run; made by `start`, on the main process only. Other processes hold a `Silent`."""

    def __init__(self, folder: RunFolder, store: Store, client: Any, run_id: str, *, waits: bool):
        self.folder = folder
        self.run_id: str | None = run_id
        self._journal = Journal(folder.journal)
        self._post = _Post(folder, run_id, self._journal)
        self._sender = _Sender(store, client, self._post, waits=waits)
        self._sampler: _Sampler | None = None
        self._finished = False
        self._pid = os.getpid()

    @classmethod
    def start(
        cls,
        folder: RunFolder,
        store: Store,
        *,
        experiment: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any] | None = None,
        parent: str | None = None,
        resume: bool = False,
        note: str = "",
        primary_metric: str | None = None,
        higher_is_better: bool = True,
        system_metrics_every: float = 10.0,
    ) -> Tracker:
        """Claim the folder, make the MLflow run (or continue it), and begin sending.

        `params` may be nested; names that look secret are hidden. `parent` is the MLflow id of the run this one belongs
        to. `note`, `primary_metric` and `higher_is_better` describe the experiment. `system_metrics_every` is in
        seconds, 0 for never. With `resume` nothing is sent before `cut_back` or the first `log`. Raises UserError when
        the folder is in use or the store does not answer.
        """
        folder.claim()
        try:
            client = store.client()
            flat = flatten(params)
            all_tags = {**_origin(), **_place(), "trainkit.run": folder.name, "trainkit.folder": str(folder.path)}
            all_tags.update({key: _scalar_text(value) for key, value in (tags or {}).items()})
            if parent:
                all_tags["mlflow.parentRunId"] = parent
            all_tags = {
                key: HIDDEN if is_secret_name(key) else without_secrets(value)[:_TAG_CHARS]
                for key, value in all_tags.items()
            }
            with _asking(store):
                experiment_id = _experiment(client, store, experiment, note, primary_metric, higher_is_better)
                known = _known_run(client, folder.info().run_id) if resume else None
                if known is None:
                    run_id = client.create_run(experiment_id, run_name=run_name, tags=all_tags).info.run_id
                    (folder.path / "sent.json").unlink(missing_ok=True)
                else:
                    run_id = known.info.run_id
                folder.update(
                    run_id=run_id, experiment=experiment, status="RUNNING", pid=os.getpid(), host=socket.gethostname(),
                    parent=parent or folder.info().parent,
                )  # fmt: skip
                if known is not None:
                    client.update_run(run_id, status="RUNNING")
                    old = known.data.params
                    changed = {key: [old[key], value] for key, value in flat.items() if old.get(key, value) != value}
                    flat = {key: value for key, value in flat.items() if key not in old}
                    if changed:
                        # A parameter cannot be changed in MLflow, and one changed value would lose the whole batch.
                        all_tags["trainkit.changed_params"] = json.dumps(changed)[:_TAG_CHARS]
                    all_tags["trainkit.resumed"] = str(int(known.data.tags.get("trainkit.resumed", 0)) + 1)
                _send_params(client, run_id, flat, all_tags if known is not None else {})
        except BaseException:
            with contextlib.suppress(OSError, UserError):
                if not resume:
                    folder.update(status="FAILED")
                folder.release()
            raise
        tracker = cls(folder, store, client, run_id, waits=resume)
        if resume:
            tracker._post.forget_end()
        tracker._sender.start()
        if system_metrics_every > 0:
            tracker._sampler = _Sampler(store, run_id, tracker._journal, system_metrics_every)
            tracker._sampler.start()
        atexit.register(tracker._at_exit)
        return tracker

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record values of one step: Python and numpy numbers, arrays and tensors of one element.

        Raises ValueError for a name outside `METRIC_NAME` and for what is no real number.
        """
        values = {_metric_name(name): _number(name, value) for name, value in metrics.items()}
        self._journal.append(_step(step), values)
        strange = sorted(name for name, value in values.items() if not math.isfinite(value))
        if strange:
            self._journal.event(_step(step), "nonfinite", {"names": strange})
        self._sender.released.set()
        if self._journal.position - self._post.acknowledged > _WAKE_BYTES:
            self._sender.wake.set()

    def event(self, step: int, name: str, data: Any = None) -> None:
        """Record in the journal that something happened; `data` is anything JSON holds."""
        self._journal.event(_step(step), name, data)

    def commit(self) -> int:
        """Put the journal on the disk for good and return its position, which belongs in the checkpoint.

        Raises OSError when the disk refuses.
        """
        return self._journal.commit()

    def cut_back(self, position: int) -> Replay:
        """Go back to a checkpoint: drop what the journal has behind `position`; the same values will be logged again.

        Returns the dropped part, in which decisions that hung on the clock are found. Raises UserError when the journal
        does not reach `position`. To be called after `start(resume=True)` and before the first `log`.
        """
        self._post.acknowledge(min(position, self._post.acknowledged))
        replay = self._journal.cut_back(position)
        self._sender.released.set()
        return replay

    def tags(self, values: Mapping[str, Any]) -> None:
        """Set tags of the run."""
        clean = {k: HIDDEN if is_secret_name(k) else without_secrets(_scalar_text(v)) for k, v in values.items()}
        self._post.put({"kind": "tags", "tags": {key: value[:_TAG_CHARS] for key, value in clean.items()}})

    def artifact_text(self, path: str, text: str) -> None:
        """Keep a text as a file of the run, at `path` among its artifacts. Secrets in it are hidden."""
        self._file(path, lambda out: out.write_text(without_secrets(text), encoding="utf-8"))

    def artifact_file(self, local: str | os.PathLike[str], path: str) -> None:
        """Keep a file as it is now. It may be replaced or deleted afterwards, but not written into."""
        self._file(path, lambda out: _link(Path(local), out))

    def figure(self, path: str, fig: Any) -> None:
        """Keep a matplotlib figure, in the format that the ending of `path` names."""
        self._file(path, lambda out: fig.savefig(out, dpi=120, bbox_inches="tight"))

    def table(self, path: str, columns: Mapping[str, Any]) -> None:
        """Keep columns of equal length (lists, arrays, tensors; first dimension is the row) as a parquet file."""
        self._file(path, lambda out: _write_table(out, columns))

    def dataset(self, name: str, context: str, digest: str, source: str, size: int) -> None:
        """Note a data set that went in: `context` is train, val or test, `size` its number of samples."""
        self._post.put(
            {
                "kind": "dataset",
                "name": name[:500],
                "context": context,
                "digest": digest[:_DIGEST_CHARS],
                "source": without_secrets(str(source)),
                "size": int(size),
            }
        )

    def model(
        self,
        name: str,
        path: str | os.PathLike[str],
        step: int,
        metrics: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep a safetensors file as a LoggedModel of the run, with the scores it had at `step`."""
        values = {_metric_name(key): _number(key, value) for key, value in (metrics or {}).items()}
        words = {key: without_secrets(_scalar_text(value)) for key, value in (tags or {}).items()}
        job = {"kind": "model", "name": re.sub(r"[/:.%\"']", "-", name), "step": _step(step), "tags": words}
        job["metrics"] = {key: value if math.isfinite(value) else str(value) for key, value in values.items()}
        self._post.put(job, Path(path).name, lambda out: _link(Path(path), out))

    def flush(self, timeout: float = _FINISH_SECONDS) -> bool:
        """Wait until all that was recorded is in the store, at most `timeout` seconds; says whether it is."""
        self._sender.released.set()
        return self._sender.drain(timeout)

    def finish(self, status: Status, error: BaseException | str | None = None) -> None:
        """End the run: send what is left, for at most 30 s, and set its status. Harmless when repeated."""
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status {status!r} is not FINISHED, FAILED or KILLED")
        if self._finished:
            return
        self._finished = True
        atexit.unregister(self._at_exit)
        if self._sampler:
            self._sampler.stop()
        try:
            self._end(status, error)
        except OSError as failure:
            _log.warning("run %s: its end could not be written: %s", self.folder.name, failure)
        if not self.flush(_FINISH_SECONDS):
            left = "run %s: not all reached %s; the rest is kept in %s"
            _log.warning(left, self.folder.name, self._sender.where, self.folder.path)
        self._sender.stop()
        try:
            self._journal.close()
        except OSError as failure:
            _log.warning("%s: %s", self.folder.journal, failure)
        self.folder.release()

    def _end(self, status: Status, error: BaseException | str | None) -> None:
        self.folder.update(status=status, last_step=self._journal.last_step)
        self._journal.commit()
        if error is not None:
            text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
            short = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            self.tags({"trainkit.error": short})
            self.artifact_text("error.txt", text)
        self._post.put({"kind": "end", "status": status, "time": time.time_ns() // 1_000_000})

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.finish("FAILED", "the process ended without saying how")

    def _file(self, path: str, write: Callable[[Path], Any]) -> None:
        where = PurePosixPath(path)
        if where.is_absolute() or ".." in where.parts or not where.name:
            raise ValueError(f"artifact path {path!r} is not a plain relative path")
        parent = str(where.parent) if where.parent.parts else None
        self._post.put({"kind": "artifact", "folder": parent}, where.name, write)


class Silent:
    """A tracker that does nothing, for the processes that are not the main one."""

    run_id: str | None = None

    @classmethod
    def start(
        cls,
        folder: RunFolder,
        store: Store,
        *,
        experiment: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any] | None = None,
        parent: str | None = None,
        resume: bool = False,
        note: str = "",
        primary_metric: str | None = None,
        higher_is_better: bool = True,
        system_metrics_every: float = 10.0,
    ) -> Silent:
        """Return a Silent."""
        return cls()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Do nothing; a tensor is not waited for."""

    def event(self, step: int, name: str, data: Any = None) -> None:
        """Do nothing."""

    def commit(self) -> int:
        """Return 0."""
        return 0

    def cut_back(self, position: int) -> Replay:
        """Return an empty replay."""
        return Replay()

    def tags(self, values: Mapping[str, Any]) -> None:
        """Do nothing."""

    def artifact_text(self, path: str, text: str) -> None:
        """Do nothing."""

    def artifact_file(self, local: str | os.PathLike[str], path: str) -> None:
        """Do nothing."""

    def figure(self, path: str, fig: Any) -> None:
        """Do nothing."""

    def table(self, path: str, columns: Mapping[str, Any]) -> None:
        """Do nothing."""

    def dataset(self, name: str, context: str, digest: str, source: str, size: int) -> None:
        """Do nothing."""

    def model(
        self,
        name: str,
        path: str | os.PathLike[str],
        step: int,
        metrics: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        """Do nothing."""

    def flush(self, timeout: float = _FINISH_SECONDS) -> bool:
        """Return True."""
        return True

    def finish(self, status: Status, error: BaseException | str | None = None) -> None:
        """Do nothing."""


def send_rest(folder: RunFolder, store: Store) -> None:
    """Send what a run that is over could not send. Raises UserError when it is in use or the store does not answer."""
    folder.claim()
    try:
        client = store.client()
        with _asking(store):
            _send_rest(folder, client)
    finally:
        folder.release()


def _send_rest(folder: RunFolder, client: Any) -> None:
    info = folder.info()
    if info.run_id is None:
        folder.update(status="KILLED" if info.status == "RUNNING" else info.status)
        return
    last_sign = max(path.stat().st_mtime for path in (folder.journal, folder.path / "run.json") if path.exists())
    journal = Journal(folder.journal)
    try:
        post = _Post(folder, info.run_id, journal)
        if info.status == "RUNNING":
            # Its process is gone without a word, or this could not have been claimed.
            post.put({"kind": "end", "status": "KILLED", "time": int(1000 * last_sign)})
            folder.update(status="KILLED", last_step=journal.last_step)
        post.send(client)
    finally:
        journal.close()


def flatten(params: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as dotted names and text, as MLflow takes them; secrets hidden, values as in JSON."""
    flat: dict[str, str] = {}
    for name, value in _leaves("", params):
        # No slashes: MLflow refuses those that would not be a plain path.
        key = re.sub(r"[^\w.\- :]", "_", name)[:250]
        key = key if key.strip(".") else "_"
        while key in flat:
            key = f"{key[:248]}_"
        flat[key] = HIDDEN if is_secret_name(name) else without_secrets(_scalar_text(value))[:_PARAM_CHARS]
    return flat


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not name):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}.{index}", inner)
    else:
        yield name, value


def _scalar_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # str() of an unknown object could hold its address in memory, which would differ on every resume.
    return json.dumps(value, default=lambda other: re.sub(r" at 0x[0-9a-f]+", "", str(other)))


def _metric_name(name: str) -> str:
    if not METRIC_NAME.fullmatch(name) or len(name) > 250 or ".." in name:
        raise ValueError(f"metric name {name!r}: only a-z 0-9 _ . - and single slashes inside, at most 250 characters")
    return name


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise ValueError(f"metric {name} has shape {tuple(value.shape)}, expected one number") from None
    if isinstance(value, (str, bytes, complex)) or value is None:
        raise ValueError(f"metric {name} is {value!r}, expected a real number")
    try:
        return float(value)
    except (TypeError, OverflowError):
        raise ValueError(f"metric {name} is {value!r}, expected a real number") from None


def _step(step: Any) -> int:
    number = int(step)
    if number != step or number < 0:
        raise ValueError(f"step {step!r} is not a whole number from 0")
    return number


class _Post:
    """What a run has yet to send: the journal behind `acknowledged`, and numbered folders in `outbox/`."""

    def __init__(self, folder: RunFolder, run_id: str, journal: Journal):
        self.folder, self.run_id, self.journal = folder, run_id, journal
        self.outbox = folder.path / "outbox"
        self.outbox.mkdir(exist_ok=True)
        self._sent = folder.path / "sent.json"
        self._lock = threading.Lock()
        waiting = self.waiting()
        self._number = int(waiting[-1].name) if waiting else 0
        try:
            self.acknowledged = min(int(json.loads(self._sent.read_text())["position"]), journal.position)
        except (OSError, ValueError, KeyError, TypeError):
            # Sending again is harmless; not sending is not.
            self.acknowledged = 0

    def waiting(self) -> list[Path]:
        """Jobs in their order."""
        return sorted(path for path in self.outbox.iterdir() if path.name.isdigit())

    def put(self, job: dict[str, Any], file: str | None = None, write: Callable[[Path], Any] | None = None) -> None:
        """Add a job, with a file that `write` makes. Appears complete or not at all."""
        with self._lock:
            self._number += 1
            number = f"{self._number:08d}"
        aside = self.outbox / f".{number}"
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "file").mkdir(parents=True)
        if file is not None and write is not None:
            write(aside / "file" / file)
        (aside / "job.json").write_text(json.dumps({**job, "file": file}), encoding="utf-8")
        aside.rename(self.outbox / number)

    def forget_end(self) -> None:
        """Drop a status that was to be set: the run goes on."""
        for path in self.waiting():
            if json.loads((path / "job.json").read_text())["kind"] == "end":
                shutil.rmtree(path)

    def acknowledge(self, position: int) -> None:
        """Note that everything before `position` is in the store."""
        with self._lock:
            write_aside(self._sent, json.dumps({"position": position}) + "\n")
            self.acknowledged = position

    def send(self, client: Any) -> None:
        """Send everything there is now. Raises what the client raises, having noted how far it came."""
        if self.journal.position > self.acknowledged:
            self._send_metrics(client)
        for path in self.waiting():
            self._send_job(client, path)

    def _send_metrics(self, client: Any) -> None:
        # A row in the store must also be in the journal after a power cut: otherwise it would get another time.
        end = self.journal.commit()
        batch: list[tuple[str, Point]] = []
        line, whole = self.acknowledged, self.acknowledged
        for position, name, point in rows(self.folder.journal, self.acknowledged, end):
            if position != line:
                line, whole = position, line
            batch.append((name, point))
            if len(batch) == _BATCH:
                self._send_batch(client, batch)
                # The line this row is from may have more; it is sent again rather than not.
                self.acknowledge(whole)
                batch = []
        if batch:
            self._send_batch(client, batch)
        self.acknowledge(end)

    def _send_batch(self, client: Any, batch: list[tuple[str, Point]]) -> None:
        from mlflow.exceptions import MlflowException

        metrics = [_metric(name, point) for name, point in batch]
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

    def _send_job(self, client: Any, path: Path) -> None:
        from mlflow.exceptions import MlflowException

        job = json.loads((path / "job.json").read_text(encoding="utf-8"))
        file = path / "file" / job["file"] if job["file"] else None
        try:
            if job["kind"] == "artifact":
                client.log_artifact(self.run_id, str(file), job["folder"])
            elif job["kind"] == "tags":
                from mlflow.entities import RunTag

                client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in job["tags"].items()])
            elif job["kind"] == "dataset":
                self._send_dataset(client, job)
            elif job["kind"] == "model":
                self._send_model(client, job, str(file))
            elif job["kind"] == "end":
                client.set_terminated(self.run_id, status=job["status"], end_time=job["time"])
        except (MlflowException, OSError) as error:
            if isinstance(error, OSError) and (file is None or file.exists()):
                raise
            if isinstance(error, MlflowException) and not self._refused(client, error):
                raise
            _log.warning("MLflow refuses %s of run %s: %s", job["kind"], self.folder.name, without_secrets(str(error)))
        shutil.rmtree(path)

    def _send_dataset(self, client: Any, job: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": job["source"]})
        profile = json.dumps({"num_rows": job["size"]})
        dataset = Dataset(job["name"], job["digest"], source_type="local", source=source, profile=profile)
        client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", job["context"])])])

    def _send_model(self, client: Any, job: dict[str, Any], file: str) -> None:
        from mlflow.entities import LoggedModelOutput

        made_file = self.folder.path / "models.json"
        made = json.loads(made_file.read_text()) if made_file.exists() else {}
        key = f"{job['name']}@{job['step']}"
        if key not in made:
            experiment = client.get_run(self.run_id).info.experiment_id
            tags = {"trainkit.step": str(job["step"]), **job["tags"]}
            model = client.create_logged_model(
                experiment, name=job["name"], source_run_id=self.run_id, tags=tags, model_type="safetensors"
            )
            # Noted before anything else can fail: a second try, or a resumed run, fills the same model.
            made[key] = model.model_id
            write_aside(made_file, json.dumps(made, indent=1) + "\n")
        client.log_model_artifact(made[key], file)
        client.finalize_logged_model(made[key], "READY")
        client.log_outputs(self.run_id, [LoggedModelOutput(made[key], step=job["step"])])
        metrics = []
        for name, value in job["metrics"].items():
            # With the time it has in the journal, so that the run does not get a second row.
            point = self.journal.lookup(name, job["step"])
            point = point or Point(job["step"], float(value), time.time_ns() // 1_000_000)
            metrics.append(_metric(name, point, made[key]))
        if metrics:
            client.log_batch(self.run_id, metrics=metrics)

    def _refused(self, client: Any, error: Any) -> bool:
        """Whether the store will never take this, as opposed to being away or the run being in its bin."""
        if error.error_code not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
            return False
        return client.get_run(self.run_id).info.lifecycle_stage == "active"


class _Sender(threading.Thread):
    """The one thread that talks to the store."""

    def __init__(self, store: Store, client: Any, post: _Post, *, waits: bool):
        super().__init__(name="trainkit-sender", daemon=True)
        self.where = store.shown
        self._store, self._client, self._post = store, client, post
        self.wake, self.released = threading.Event(), threading.Event()
        if not waits:
            self.released.set()
        self._stopping = self._urgent = False
        self._failures = 0

    def run(self) -> None:
        """Send until stopped."""
        self._close_abandoned()
        while not self._stopping:
            pause = min(60.0, _EVERY_SECONDS * 2**self._failures) if not self._urgent else 0.2
            self.wake.wait(pause)
            self.wake.clear()
            if self.released.is_set():
                self._try()

    def _try(self) -> None:
        try:
            self._post.send(self._client)
        except Exception as error:
            if self._failures == 0:
                lines = without_secrets(str(error)).strip().splitlines() or [type(error).__name__]
                _log.warning(
                    "%s does not take the metrics (%s); training goes on, they are kept in %s and sent when it does",
                    self.where, lines[0][:200], self._post.folder.path,
                )  # fmt: skip
            self._failures = min(self._failures + 1, 10)
        else:
            if self._failures:
                _log.warning("%s takes metrics again; nothing was lost", self.where)
            self._failures = 0

    def drain(self, timeout: float) -> bool:
        """Wait until everything that is recorded now is sent."""
        end = time.monotonic() + timeout
        position, waiting = self._post.journal.position, self._post.waiting()
        self._urgent = True
        try:
            while True:
                if self._post.acknowledged >= position and not any(path.exists() for path in waiting):
                    return True
                if not self.is_alive() or time.monotonic() > end:
                    return False
                self.wake.set()
                time.sleep(0.02)
        finally:
            self._urgent = False

    def stop(self) -> None:
        """Let the thread end; a call that hangs is left behind."""
        self._stopping = True
        self.wake.set()
        self.join(timeout=1.0)

    def _close_abandoned(self) -> None:
        """Runs of this store whose process died without a word are said to run for ever, unless somebody mends it."""
        try:
            for folder in self._store.abandoned():
                try:
                    folder.claim()
                except UserError:
                    continue
                try:
                    _send_rest(folder, self._client)
                finally:
                    folder.release()
        except Exception as error:
            _log.debug("looking for abandoned runs: %s", error)


class _Sampler(threading.Thread):
    """Reads the load of the machine and writes it into the journal under `system/`, counted by its own step."""

    def __init__(self, store: Store, run_id: str, journal: Journal, every: float):
        super().__init__(name="trainkit-sampler", daemon=True)
        # Only its readers are used: its own thread logs behind the journal's back and ends at the first outage.
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # It tells every user without a GPU that there is none.
        logging.getLogger("mlflow.system_metrics.system_metrics_monitor").setLevel(logging.WARNING)
        self._monitor = SystemMetricsMonitor(run_id, tracking_uri=store.uri)
        self._journal, self._every = journal, every
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample until stopped; the first sample comes within a second."""
        step = self._journal.highest("system/") + 1
        pause = min(1.0, self._every)
        while not self._stop_asked.wait(pause):
            pause = self._every
            try:
                self._monitor.collect_metrics()
                found = self._monitor.aggregate_metrics()
                for part in self._monitor.monitors:
                    part.clear_metrics()
                values = {re.sub(r"[^a-z0-9_./-]", "_", f"system/{key}".lower()): float(v) for key, v in found.items()}
                self._journal.append(step, values)
                step += 1
            except Exception as error:
                _log.warning("the load of the machine cannot be read any more: %s", error)
                return

    def stop(self) -> None:
        """End sampling."""
        self._stop_asked.set()
        self.join(timeout=2.0)


@contextlib.contextmanager
def _asking(store: Store) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = without_secrets(str(error)).strip().splitlines() or [type(error).__name__]
        raise UserError(store.shown, f"the store refuses: {lines[0][:300]}") from error


def _experiment(
    client: Any, store: Store, name: str, note: str, primary_metric: str | None, higher_is_better: bool
) -> str:
    from mlflow.exceptions import MlflowException

    tags = {"mlflow.experimentKind": "custom_model_development"}
    if note:
        tags["mlflow.note.content"] = without_secrets(note)[:5000]
    if primary_metric:
        tags["mlflow.experiment.primaryMetric.name"] = primary_metric
        tags["mlflow.experiment.primaryMetric.greaterIsBetter"] = str(higher_is_better)
    found = client.get_experiment_by_name(name)
    if found is None:
        # MLflow's default would be relative to the folder the run was started in.
        folder = store.artifacts / re.sub(r"[^\w.-]", "-", name) if store.artifacts else None
        try:
            client.create_experiment(name, artifact_location=folder.as_uri() if folder else None, tags=tags)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(name)
    if found.lifecycle_stage != "active":
        remedy = "restore it in the MLflow page, or name another experiment"
        raise UserError(f"experiment {name!r}", f"was deleted in {store.shown}", remedy=remedy)
    for key, value in tags.items():
        if found.tags.get(key) != value:
            client.set_experiment_tag(found.experiment_id, key, value)
    return found.experiment_id


def _known_run(client: Any, run_id: str | None) -> Any:
    """The MLflow run to continue, or None when this store has not got it: then a new one gets the whole journal."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        _log.warning("MLflow run %s is not in this store; a new one is made and gets the whole journal", run_id)
        return None
    if run.info.lifecycle_stage != "active":
        raise UserError(
            f"MLflow run {run_id}", "was deleted", remedy="restore it in the MLflow page, or start a new run"
        )
    return run


def _send_params(client: Any, run_id: str, params: dict[str, str], tags: dict[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    pairs = list(params.items())
    for start in range(0, len(pairs), 100):
        client.log_batch(run_id, params=[Param(key, value) for key, value in pairs[start : start + 100]])
    if tags:
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _metric(name: str, point: Point, model_id: str | None = None) -> Any:
    from mlflow.entities import Metric

    # MLflow would store an infinity as 1.8e308, which ruins every chart; the journal has it as it was.
    value = point.value if math.isfinite(point.value) else math.nan
    return Metric(name, value, point.t, point.step, model_id=model_id)


def _link(source: Path, out: Path) -> None:
    try:
        # A second name for the same file: it stays when checkpoints are pruned, and costs nothing.
        os.link(source, out)
    except OSError:
        shutil.copyfile(source, out)


def _write_table(out: Path, columns: Mapping[str, Any]) -> None:
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    arrays = {}
    for name, column in columns.items():
        if hasattr(column, "detach"):
            column = column.detach().cpu().numpy()
        if isinstance(column, np.ndarray) and column.ndim > 1:
            column = list(column.reshape(len(column), -1))
        arrays[name] = pa.array(column)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")
    parquet.write_table(pa.table(arrays), out, compression="zstd", write_page_checksum=True)


def _origin() -> dict[str, str]:
    """Who and what started the run, as MLflow notes it, and the state of the source. No remote address, no diff."""
    from mlflow.tracking.context.git_context import GitRunContext
    from mlflow.tracking.context.registry import resolve_tags

    found = {key: str(value) for key, value in resolve_tags(ignore=[GitRunContext]).items()}
    tags = {key: value for key, value in found.items() if "://" not in value and "url" not in key.lower()}
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        commit = _git(root, "rev-parse", "HEAD")
        if commit:
            tags["mlflow.source.git.commit"] = commit
            tags["mlflow.source.git.branch"] = _git(root, "rev-parse", "--abbrev-ref", "HEAD") or ""
            dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
            tags["mlflow.source.git.dirty"] = "unknown" if dirty is None else str(bool(dirty)).lower()
    return tags


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _place() -> dict[str, str]:
    """Versions and hardware."""
    import sys

    import psutil

    from trainkit import __version__

    tags = {"trainkit.version": __version__, "trainkit.python": platform.python_version()}
    for package in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            tags[f"trainkit.{package}"] = metadata.version(package)
    tags["trainkit.host"] = socket.gethostname()
    tags["trainkit.cpu"] = _cpu_name()
    tags["trainkit.cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    tags["trainkit.ram_gb"] = f"{psutil.virtual_memory().total / 2**30:.1f}"
    tags["trainkit.world_size"] = os.environ.get("WORLD_SIZE", "1")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        tags["trainkit.gpus"] = ", ".join(names)
    return tags


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

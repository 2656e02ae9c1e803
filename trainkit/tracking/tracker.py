"""Track a run: a journal on disk first, and one thread behind it that uploads to MLflow.

Training never waits for the store. `log` writes a line of the journal; tags, files, data sets and models are set in the
desired state beside it. The uploader makes MLflow equal to both every few seconds, tries again when the store is
unavailable, and writes its progress to `<run>/sent.json`. The rest stays on disk; `sync.send_rest` uploads it later.

The client is called with the run's id: MLflow's fluent API is per thread, starts runs on its own and ends crashed ones
as FINISHED; Accelerate's tracker, built on it, drops tensors and numpy numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import math
import os
import re
import shutil
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from trainkit.environment.record import origin, place
from trainkit.errors import UserError, few
from trainkit.redact import HIDDEN, is_secret_name, without_secrets
from trainkit.tracking import mlflow_run
from trainkit.tracking.journal import Journal, Replay
from trainkit.tracking.mlflow_client import Away, reason
from trainkit.tracking.run_folder import CREATION, RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.system_load import Sampler
from trainkit.tracking.upload import Upload
from trainkit.tracking.uploader import Uploader

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from trainkit.tracking.logged_model import Described
    from trainkit.tracking.system_load import Reading

Status = Literal["FINISHED", "FAILED", "KILLED"]

METRIC_NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")
"""Names MLflow takes everywhere; one bad name would make it refuse a whole batch."""

_WAKE_LINES = 500
_FLOAT = frozenset([float])
_FINISH_SECONDS, _STOP_SECONDS = 30.0, 4.0
_PARAM_CHARS, _TAG_CHARS = 6000, 8000
_DIGEST_CHARS = 12
"""MLflow takes 36, but shows name and digest together in a narrow column; the whole one is in the profile."""

_log = logging.getLogger("trainkit")


class Tracker:
    """The record of one run; made by `start`, on the main process only. Other processes hold a `Silent`."""

    def __init__(self, folder: RunFolder, store: Store, *, waits: bool):
        self.folder = folder
        self._journal = Journal(folder.journal)
        self._upload = Upload(folder, store, self._journal)
        self._uploader = Uploader(store, self._upload, waits=waits)
        self._sampler: Sampler | None = None
        self._finished = self._shows_images = False
        self._whole = True
        self.hurried: Callable[[], bool] = lambda: False
        """Returns True where the machine is about to go away: the upload then ends within seconds."""
        self._names: Set[str] = set()
        """Of the last line, which were checked."""
        self._logged, self._wakes_at = 0, 1  # the first line releases an uploader that waits for it
        self._pid = os.getpid()

    @property
    def run_id(self) -> str | None:
        """Id of the run in MLflow; None while it is not there yet."""
        return self._upload.run_id

    @property
    def remains(self) -> str:
        """Sentence with the command that uploads the rest of a run that has ended; empty where all was uploaded."""
        if self._whole:
            return ""
        return f"{self._uploader.where} has not got all of it; what is left goes by: trainkit sync {self.folder.name}"

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
        metrics: Sequence[str] | None = None,
        changed: Sequence[str] = (),
        system_metrics_every: float = 10.0,
    ) -> Tracker:
        """Claim the folder, create the MLflow run (or continue it), and begin to upload.

        `params` may be nested; names that look secret are hidden. `parent` is the name of the parent run, or its MLflow
        id. `note`, `primary_metric` and `higher_is_better` describe the experiment. `metrics`: patterns of those that
        MLflow gets, None for all. `changed`: keys that the command has set. `system_metrics_every`: seconds, 0 for
        never. With `resume` nothing is uploaded before `cut_back` or the first `log`. Where the store is unavailable
        the run begins all the same. Raises UserError when the folder is in use, and for errors of the store that last.
        """
        folder.claim()
        tracker = before = None
        try:
            # A damaged journal is refused before anything is changed.
            tracker = cls(folder, store, waits=resume)
            before = mlflow_run.read(folder) if resume else None
            about = {**origin(), **place(), "trainkit.run": folder.name, "trainkit.folder": str(folder.path)}
            about.update({key: _scalar_text(value) for key, value in (tags or {}).items()})
            parent = parent or folder.info().parent
            resumed = (before.resumed if before else 0) + 1 if resume else 0
            mlflow_run.RunCreation(
                experiment, run_name, flatten(params), _clean(about), note, primary_metric, higher_is_better, parent,
                metrics, tuple(changed), resumed, rounds=before.rounds if before else not resume,
            ).write(folder)  # fmt: skip
            folder.update(
                experiment=experiment, status="RUNNING", pid=os.getpid(), host=socket.gethostname(), unsent=False,
                parent=parent,
            )  # fmt: skip
            client = tracker._connected(store)
        except BaseException:
            with contextlib.suppress(OSError, UserError):
                if not resume:
                    folder.update(status="FAILED")
                    (folder.path / CREATION).unlink(missing_ok=True)
                elif before is not None:
                    before.write(folder)
                if tracker is not None:
                    tracker._journal.close()
            folder.release()
            raise
        if resume:
            tracker._upload.desired.set("status", "", None)
        tracker._begin(client, system_metrics_every)
        return tracker

    def _begin(self, client: MlflowClient | None, system_metrics_every: float) -> None:
        self._uploader.begin(client)
        if system_metrics_every > 0:
            self._sampler = Sampler(self._journal, system_metrics_every)
            self._sampler.start()
        atexit.register(self._at_exit)

    def _connected(self, store: Store) -> MlflowClient | None:
        """Create the MLflow run; returns the client, None where the store is unavailable, which is logged."""
        try:
            client = store.client()
            with store.asking():
                self._upload.ensure_run(client)
            return client
        except Away as away:
            said = "%s %s; the run begins all the same: it is kept in %s, and sent when the store answers"
            _log.warning(said, store.shown, reason(away)[0], self.folder.path)
            return None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record values of one step: Python and numpy numbers, arrays and tensors of one element.

        Raises ValueError for a name outside `METRIC_NAME` and for what is no real number.
        """
        # The processor's caches hold the network and none of this: whatever can be is done later.
        values = dict(metrics)
        if (
            values.keys() != self._names
            or not _FLOAT.issuperset(map(type, values.values()))
            or type(step) is not int
            or step < 0
        ):
            step, values = self._plain(step, values)
        self._journal.note(step, values)
        self._logged += 1
        if self._logged >= self._wakes_at:
            self._logged, self._wakes_at = 0, _WAKE_LINES
            (self._uploader.wake if self._uploader.released.is_set() else self._uploader.released).set()

    def _plain(self, step: Any, metrics: dict[str, Any]) -> tuple[int, dict[str, float]]:
        step, values = _step(step), {_metric_name(name): _number(name, value) for name, value in metrics.items()}
        self._names = values.keys()
        return step, values

    def event(self, step: int, name: str, data: Any = None) -> None:
        """Record an event in the journal; `data` is anything JSON holds."""
        self._journal.event(_step(step), name, data)

    def readings(self, since: float = 0.0) -> tuple[Reading, ...]:
        """Return the load of the machine after a moment of `time.perf_counter`, oldest first, as far as it is kept."""
        return self._sampler.readings(since) if self._sampler else ()

    def position(self) -> int:
        """Return the end of the journal in bytes, for a checkpoint; `commit` before that is on the disk."""
        return self._journal.position

    def commit(self) -> int:
        """Sync the desired state and the journal to the disk; returns the position of the latter.

        Raises OSError when the disk refuses.
        """
        self._upload.desired.commit()
        return self._journal.commit()

    def cut_back(self, position: int) -> Replay:
        """Cut the journal to the `position` of a checkpoint; the same values will be logged again.

        Returns the part that was cut off, with the events that hung on the clock. Raises UserError when the journal
        does not reach `position`. To be called after `start(resume=True)` and before the first `log`.
        """
        self._upload.acknowledge(min(position, self._upload.sent.position))
        replay = self._journal.cut_back(position)
        self._uploader.released.set()
        return replay

    def tags(self, values: Mapping[str, Any]) -> None:
        """Set tags of the run."""
        for key, text in _clean(values).items():
            self._set("tag", key, text)

    def adopt(self, run: str, values: Mapping[str, Any] | None = None) -> None:
        """Make this run the parent of one that has ended, by its name, and set tags of that."""
        self._set("child", run, _clean(values or {}))

    def artifact_text(self, path: str, text: str) -> None:
        """Keep a text as a file of the run, at `path` among its artifacts. Secrets in it are hidden."""
        self._file(path, lambda out: out.write_text(without_secrets(text), encoding="utf-8"))

    def artifact_file(self, local: str | os.PathLike[str], path: str) -> None:
        """Keep a file as it is now. It may be replaced or deleted afterwards, but not written into."""
        self._file(path, lambda out: _link(Path(local), out))

    def figure(self, path: str, fig: Any) -> None:
        """Keep a matplotlib figure, in the format that the ending of `path` names."""
        self._file(path, lambda out: fig.savefig(out, dpi=120, bbox_inches="tight"))

    def image(self, key: str, step: int, fig: Any) -> None:
        """Keep a matplotlib figure as the image of `key` at a step; MLflow shows those of a key with a slider.

        The file's name, which is MLflow's, depends on run, key and step alone: a step that is computed again after a
        resume replaces its image.
        """
        if not re.fullmatch(r"[a-zA-Z0-9_\-./ ]+", key):
            raise ValueError(f"image key {key!r}: only letters, digits, spaces and _ - . /")
        # MLflow takes the latest of several images of a step by this time; here there is never a second.
        started = int(1000 * self.folder.info().started)
        unique = uuid.uuid5(uuid.NAMESPACE_URL, f"{self.folder.name}/{started}/{key}/{_step(step)}")
        name = f"images/{key.replace('/', '~')}+step+{step}+timestamp+{started}+{unique}"
        png = io.BytesIO()
        fig.savefig(png, dpi=120, format="png")  # without a tight box, which would give each step another size
        self._file(f"{name}.png", lambda out: out.write_bytes(png.getvalue()))
        self._file(f"{name}+compressed.webp", lambda out: _write_small(out, png))
        if not self._shows_images:
            self._shows_images = True
            self.tags({"mlflow.loggedImages": "True"})

    def table(self, path: str, columns: Mapping[str, Any]) -> None:
        """Keep columns of equal length (lists, arrays, tensors; first dimension is the row), as parquet or `.csv`.

        MLflow's page shows the second as a table, digit by digit, so fractions have six in it.
        """
        self._file(path, lambda out: _write_table(out, columns))

    def dataset(self, name: str, context: str, digest: str, source: str, size: int) -> None:
        """Record a data set of the run: `context` is train, val or test, `size` its number of samples.

        A `name` that only repeats the context is replaced by the end of `source`.
        """
        if name == context:
            name = "/".join(PurePosixPath(without_secrets(str(source))).parts[-2:]) or name
        value = {"name": name[:500], "context": context, "digest": digest[:_DIGEST_CHARS], "whole_digest": digest}
        value |= {"source": without_secrets(str(source)), "size": int(size)}
        self._set("dataset", f"{value['name']} {context}", value)

    def model(
        self,
        name: str,
        path: str | os.PathLike[str],
        step: int,
        metrics: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        described: Described | None = None,
    ) -> None:
        """Keep a safetensors file as a LoggedModel of the run, with the scores it had at `step`.

        With `described` it is a model that MLflow can load and serve; else a file.
        """
        values = {_metric_name(key): _number(key, value) for key, value in (metrics or {}).items()}
        words = {key: without_secrets(_scalar_text(value)) for key, value in (tags or {}).items()}
        value = {"name": re.sub(r"[/:.%\"']", "-", name), "step": _step(step), "tags": words}
        value["metrics"] = {key: number if math.isfinite(number) else str(number) for key, number in values.items()}
        if described is not None:
            value["described"] = asdict(described)
        self._set_file("model", f"{value['name']}@{step}", value, Path(path).name, lambda out: _link(Path(path), out))

    def flush(self, timeout: float = _FINISH_SECONDS) -> bool:
        """Wait until all that was recorded is in the store, at most `timeout` seconds; returns True if it is."""
        self._uploader.released.set()
        return self._uploader.drain(timeout, self.hurried, _STOP_SECONDS)

    def finish(self, status: Status, error: BaseException | str | None = None) -> None:
        """End the run: upload the rest, and set its status. Harmless when repeated.

        The upload takes at most 30 s, 4 s for a run that was stopped. What is left then stays on the disk.
        """
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status {status!r} is not FINISHED, FAILED or KILLED")
        if self._finished:
            return
        self._finished = True
        atexit.unregister(self._at_exit)
        if self._sampler:
            self._sampler.stop()
        for part in (self._write_end, self._set_end):
            try:
                part(status, error)
            except (OSError, UserError) as failure:
                _log.warning("run %s: its end could not be written: %s", self.folder.name, failure)
        self._whole = self.flush(_STOP_SECONDS if status == "KILLED" else _FINISH_SECONDS)
        if not self._whole:
            left = "run %s: not all reached %s; the rest is kept in %s and sent by: trainkit sync %s"
            _log.warning(left, self.folder.name, self._uploader.where, self.folder.path, self.folder.name)
        self._uploader.stop()
        if lost := self._upload.desired.unwritten():
            _log.warning("run %s: the disk did not take, and nothing has now: %s", self.folder.name, few(lost))
        try:
            self._upload.desired.close()
            self._journal.close()
            if self._whole:
                self.folder.update(unsent=False)
        except (OSError, UserError) as failure:
            _log.warning("run %s: %s", self.folder.name, failure)
        self.folder.release()

    def discard(self) -> None:
        """End a run that was refused before its first step, and leave nothing of it: no files and no MLflow run."""
        if self._finished:
            return
        self._finished = True
        atexit.unregister(self._at_exit)
        if self._sampler:
            self._sampler.stop()
        self._uploader.stop()
        self._upload.desired.close()
        self._journal.close()
        self._uploader.delete_run()
        self.folder.remove()

    def _write_end(self, status: Status, error: BaseException | str | None) -> None:
        # `unsent` in one write with the status: the next process knows that something may be left.
        # The last line of the journal may lie before the checkpoint with which a run was stopped.
        step = max(self._journal.last_step, self.folder.saved_step())
        self.folder.update(status=status, last_step=step, unsent=True)
        self._journal.commit()

    def _set_end(self, status: Status, error: BaseException | str | None) -> None:
        try:
            if error is not None:
                self.tags({"trainkit.error": error if isinstance(error, str) else f"{type(error).__name__}: {error}"})
                whole = error if isinstance(error, str) else "".join(traceback.format_exception(error))
                self.artifact_text("error.txt", whole)
        finally:  # even where the error cannot be written
            self._set("status", "", {"status": status, "time": time.time_ns() // 1_000_000})
            self._upload.desired.commit()

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.finish("FAILED", "the process ended without saying how")

    def _file(self, path: str, write: Callable[[Path], object]) -> None:
        where = PurePosixPath(path)
        if where.is_absolute() or ".." in where.parts or not where.name:
            raise ValueError(f"artifact path {path!r} is not a plain relative path")
        self._set_file("file", str(where), {}, where.name, write)

    def _set(self, kind: str, key: str, value: Any) -> None:
        self._upload.desired.set(kind, key, value)

    def _set_file(self, kind: str, key: str, value: dict[str, Any], name: str, write: Callable[[Path], object]) -> None:
        self._upload.desired.set_file(kind, key, value, name, write)


class Silent(Tracker):
    """A tracker that does nothing, for the processes that are not the main one."""

    def __init__(self) -> None:
        pass

    @property
    def run_id(self) -> None:
        """None."""

    @property
    def remains(self) -> str:
        """An empty text."""
        return ""

    def _nothing(self, *given: object, **more: object) -> None:
        """Do nothing; a tensor is not waited for."""

    log = event = image = finish = discard = _set = _set_file = _nothing

    def readings(self, since: float = 0.0) -> tuple[Reading, ...]:
        """Return nothing."""
        return ()

    def position(self) -> int:
        """Return 0."""
        return 0

    commit = position

    def cut_back(self, position: int) -> Replay:
        """Return an empty replay."""
        return Replay()

    def flush(self, timeout: float = _FINISH_SECONDS) -> bool:
        """Return True."""
        return True


def flatten(params: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested settings to dotted names and text, as MLflow takes them; secrets hidden, values as in JSON."""
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


def _clean(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert tags to text as MLflow takes it, without secrets."""
    texts = {k: HIDDEN if is_secret_name(k) else without_secrets(_scalar_text(v)) for k, v in values.items()}
    return {key: value[:_TAG_CHARS] for key, value in texts.items()}


def _scalar_text(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        # What no database takes: bytes of a file's name that are no text, and zeros.
        return os.fspath(value).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
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


def _link(source: Path, out: Path) -> None:
    try:
        # A second name for the same file: it stays when checkpoints are pruned, and costs nothing.
        os.link(source, out)
    except OSError:
        shutil.copyfile(source, out)


def _write_table(out: Path, columns: Mapping[str, Any]) -> None:
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv, parquet

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
    if out.suffix == ".csv":
        for name, array in arrays.items():
            if pa.types.is_floating(array.type):
                short = [v if v is None else float(f"{v:.6g}") for v in array.to_pylist()]
                arrays[name] = pa.array(short, pa.float64())
        csv.write_csv(pa.table(arrays), out)
    else:
        parquet.write_table(pa.table(arrays), out, compression="zstd", write_page_checksum=True)


def _write_small(out: Path, png: io.BytesIO) -> None:
    from PIL import Image

    with Image.open(png) as picture:
        # For the page until it is clicked. MLflow's own copies of 256 pixels leave no letter readable; tall images
        # would be narrow, so the width is limited.
        picture = picture.convert("RGB")
        picture.thumbnail((600, 1800))
        picture.save(out)

"""Make the MLflow run of a run equal to what its folder says: the metrics of its journal, and its desired state.

Every call may be repeated, and the process may be killed at any moment: `sent.json` says how far MLflow is, and the
next process sends a little of it a second time, which changes nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.files import write_aside
from trainkit.redact import without_secrets
from trainkit.tracking import desired_state, logged_model, mlflow_run
from trainkit.tracking.desired_state import DesiredState, Wanted
from trainkit.tracking.journal import Journal, Point, rows
from trainkit.tracking.mlflow_client import Away, unreachable
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Dataset as LoggedDataset
    from mlflow.entities import LoggedModel, Metric, Run
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

SENT = "sent.json"
"""File of a run's folder that says how far MLflow is: `Sent`."""
_BATCHES = {"metrics": 1000, "tags": 100}
_TRIES = 3
"""After so many failures of a kind, the others of it wait for the next time: the end of a run waits for none."""

_log = logging.getLogger("trainkit")


@dataclass(frozen=True)
class Sent:
    """Content of `sent.json`: what of a run MLflow has."""

    position: int = 0
    """Position in the journal before which it has everything."""
    desired: int = 0
    """Position in the desired state before which it has everything but `missing`."""
    missing: Sequence[int] = ()
    """Positions before `desired` of what has failed."""
    run: str | None = None
    """Id of the MLflow run."""


class Upload:
    """Uploads a run, in the one process that has claimed it."""

    def __init__(self, folder: RunFolder, store: Store, journal: Journal):
        self.folder, self.store, self.journal = folder, store, journal
        self.desired = DesiredState(folder)
        self.run_id = folder.info().run_id
        """Of the MLflow run, as far as this process knows it."""
        self._ensured = False
        self._selects: Callable[[str], bool] = lambda name: True
        """Returns True for a metric that MLflow gets."""
        self._rounds = False
        self.closed = False
        """True where no more calls are to be begun: the rest is left to another process."""
        self.sent = self._sent()
        self.desired.remove_files(self.pending, hidden=True)

    def _sent(self) -> Sent:
        found = sent(self.folder)
        # A power cut may have taken lines that MLflow has. Others will stand in their place, and are to be sent.
        kept = min(found.position, self.journal.position), min(found.desired, self.desired.position)
        if kept != (found.position, found.desired):
            found = replace(found, position=kept[0], desired=kept[1])
            self._note(found)
        return found

    def acknowledge(self, position: int) -> None:
        """Write down that everything in the journal before `position` is in the store."""
        self._note(replace(self.sent, position=position))

    def _note(self, now: Sent) -> None:
        # Without a lock, for which the training would wait.
        self.sent = replace(now, run=self.run_id)
        if self.folder.path.is_dir():
            write_aside(self.folder.path / SENT, json.dumps(asdict(self.sent)) + "\n")

    def ends(self) -> tuple[int, int]:
        """Return the ends of the journal and of the desired state as they are now."""
        return self.journal.position, self.desired.position

    def reached(self, ends: tuple[int, int]) -> bool:
        """Return True where MLflow has everything before these ends."""
        metrics = self.sent.position >= ends[0] or not self.journal.path.exists()
        return bool(self.run_id) and metrics and not any(entry.position <= ends[1] for entry in self.pending())

    def pending(self) -> list[Wanted]:
        """Return what of the desired state MLflow has not got."""
        return _lacking(self.folder, self.desired.wanted(), self.sent)

    def recheck_run(self) -> None:
        """Check before the next upload that the store still has this run."""
        self._ensured = False

    def send(self, client: MlflowClient) -> None:
        """Upload everything there is now. Raises the client's errors, after progress was written down.

        One failure holds up nothing else, unless the store is unavailable.
        """
        self.ensure_run(client)
        failure = None
        if self.journal.position > self.sent.position and self.folder.journal.exists():
            failure = self._try_metrics(client)
        if pending := self.pending():
            failure = self._send_state(client, pending) or failure
            self.desired.remove_files(self.pending)
        if failure is not None:
            raise failure

    def ensure_run(self, client: MlflowClient) -> None:
        """Create the MLflow run, or set it to running again, where that is still to be done."""
        if self._ensured or not self.folder.path.is_dir():
            return
        run_id = mlflow_run.ensure(self.folder, self.store, client, look=self.run_id is not None)
        if run_id != self.run_id:
            self.run_id = run_id
            self.sent = self._sent()
        self._selects = selection(self.folder)
        creation = mlflow_run.read(self.folder)
        self._rounds = creation is not None and creation.rounds
        self._ensured = True

    def _try_metrics(self, client: MlflowClient) -> Exception | None:
        """Upload metrics; returns the error that prevents that alone, as of a disk that does not take the journal."""
        try:
            # A row in the store must also be in the journal after a power cut: otherwise it would get another time.
            self._send_metrics(client, self.journal.commit())
        except Exception as error:
            if unreachable(error):
                raise
            return error
        return None

    def _send_metrics(self, client: MlflowClient, end: int) -> None:
        batch: list[Metric] = []
        line, whole = self.sent.position, self.sent.position
        for position, name, point in rows(self.folder.journal, self.sent.position, end):
            if position != line:
                line, whole = position, line
            if self._selects(name):
                batch.append(entity(name, point, rounds=self._rounds))
            if len(batch) == _BATCHES["metrics"]:
                if self.closed:
                    return
                self._log_batch(client, metrics=batch)
                # The line this row is from may have more; it is sent again rather than not.
                self.acknowledge(whole)
                batch = []
        self._log_batch(client, metrics=batch)
        self.acknowledge(end)

    def _log_batch(self, client: MlflowClient, **entities: Sequence[Any]) -> None:
        """Set metrics or tags; what the store refuses is logged, and holds up no other."""
        from mlflow.exceptions import MlflowException

        for kind, every in entities.items():
            for start in range(0, len(every), _BATCHES[kind]):
                batch = every[start : start + _BATCHES[kind]]
                given: dict[str, Any] = {kind: batch}
                try:
                    client.log_batch(self._id, **given)
                except MlflowException as error:
                    if not self._refused(client, error):
                        raise
                    if len(batch) == 1:
                        _log.warning("MLflow refuses %s: %s", batch[0].key, without_secrets(str(error)))
                        continue
                    half = len(batch) // 2
                    self._log_batch(client, **{kind: batch[:half]})
                    self._log_batch(client, **{kind: batch[half:]})

    def _send_state(self, client: MlflowClient, pending: list[Wanted]) -> Exception | None:
        """Upload what of the desired state MLflow has not got, tags first; returns the first failure."""
        failure, failed, left = None, Counter[str](), {entry.position for entry in pending}
        tags = [entry for entry in pending if entry.kind == "tag"]
        try:
            for entries in ([tags] if tags else []) + [[entry] for entry in pending if entry.kind != "tag"]:
                if self.closed:
                    break
                kind = entries[0].kind
                try:
                    if failed[kind] < _TRIES:
                        self._upload(client, entries)
                        left -= {entry.position for entry in entries}
                except Exception as error:
                    if unreachable(error):
                        raise
                    failed[kind] += 1
                    failure = failure or error
        finally:
            if len(left) < len(pending):
                end = max(self.sent.desired, max(entry.position for entry in pending))
                self._note(replace(self.sent, desired=end, missing=sorted(left)))
        return failure

    @property
    def _id(self) -> str:
        """Of the MLflow run, which `ensure_run` has created. Raises `Away` where its process has yet to do that."""
        if self.run_id is None:
            raise Away(f"run {self.folder.name}", "is not in MLflow yet")
        return self.run_id

    def _upload(self, client: MlflowClient, entries: list[Wanted]) -> None:
        """Upload tags, or one other thing. What the store refuses for good is logged."""
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        entry = entries[0]
        kind, key, value, _ = entry
        try:
            if kind == "tag":
                self._log_batch(client, tags=[RunTag(one.key, one.value) for one in entries])
            elif kind == "child":
                if (other := self._other(client, key)) is not None:
                    tags = {"mlflow.parentRunId": self._id, **value}
                    client.log_batch(other, tags=[RunTag(*tag) for tag in tags.items()])
            elif kind == "dataset":
                self._send_dataset(client, value)
            elif kind == "status":
                client.set_terminated(self._id, status=value["status"], end_time=value["time"])
            elif kind in ("file", "model") and (file := self.desired.file(entry)) is not None:
                if kind == "file":
                    client.log_artifact(self._id, str(file), key.rpartition("/")[0] or None)
                else:
                    self._send_model(client, value, str(file))
        except MlflowException as error:
            if kind == "child" and error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                self._say_missing(key)  # the second: it was deleted
            elif not self._refused(client, error):
                raise
            else:
                _log.warning("MLflow refuses %s of run %s: %s", kind, self.folder.name, without_secrets(str(error)))

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

    def _send_dataset(self, client: MlflowClient, value: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": value["source"]})
        profile = json.dumps({"num_rows": value["size"], "digest": value.get("whole_digest", value["digest"])})
        dataset = Dataset(value["name"], value["digest"], source_type="local", source=source, profile=profile)
        client.log_inputs(self._id, [DatasetInput(dataset, [InputTag("mlflow.data.context", value["context"])])])

    def _send_model(self, client: MlflowClient, value: dict[str, Any], file: str) -> None:
        from mlflow.entities import LoggedModelOutput

        made_file = self.folder.path / "models.json"
        made = json.loads(made_file.read_text()) if made_file.exists() else {}
        key = f"{value['name']}@{value['step']}"
        run = client.get_run(self._id)
        model = _model(client, made[key]) if key in made else None
        if model is None:
            # Noted before anything else can fail: a second try, or a resumed run, fills the same model.
            made[key] = self._made_model(client, value, run)
            write_aside(made_file, json.dumps(made, indent=1) + "\n")
            model = client.get_logged_model(made[key])
        for own in self._model_files(Path(file), value, made[key]):
            client.log_model_artifact(made[key], str(own))
        client.finalize_logged_model(made[key], "READY")
        # Of all calls the only one that fails the second time, as after an answer that was lost.
        if made[key] not in [output.model_id for output in (run.outputs.model_outputs if run.outputs else [])]:
            client.log_outputs(self._id, [LoggedModelOutput(made[key], step=value["step"])])
        # A score is of the data set that its name begins with, where there is one.
        data = {entry.dataset.name: entry.dataset for entry in (run.inputs.dataset_inputs if run.inputs else [])}
        # As the journal has them, so that the run does not get other rows: a last evaluation that was held at an
        # earlier step, as where a run was told to stop, says nothing of these weights.
        points = self.journal.points([name for name in value["metrics"] if self._selects(name)], value["step"])
        # A score that the model has already, as after an answer that was lost, is not taken a second time.
        for has in model.metrics or []:
            points.pop(has.key, None)
        metrics = [
            entity(name, point, made[key], data.get(name.partition("/")[0]), self._rounds)
            for name, point in sorted(points.items())
        ]
        if metrics:
            client.log_batch(self._id, metrics=metrics)

    def _model_files(self, weights: Path, value: dict[str, Any], model_id: str) -> list[Path]:
        """Return the files of a LoggedModel: its weights, and those that make it a model that MLflow can load."""
        if (described := value.get("described")) is None:
            return [weights]
        about = {"name": value["name"], "model_id": model_id, "run_id": self._id}
        return [weights, *logged_model.write_files(weights.parent, described, size=weights.stat().st_size, **about)]

    def _made_model(self, client: MlflowClient, value: dict[str, Any], run: Run) -> str:
        """Return the id of a LoggedModel, which is made unless an earlier try, whose answer was lost, has made it."""
        experiment, step = run.info.experiment_id, str(value["step"])

        def found() -> list[str]:
            models = client.search_logged_models([experiment], f"name = '{value['name']}'", max_results=1000)
            return [m.model_id for m in models if (m.source_run_id, m.tags.get("trainkit.step")) == (self.run_id, step)]

        models = found()
        if not models:
            about = {k: v for k, v in run.data.tags.items() if k.startswith(("mlflow.user", "mlflow.source."))}
            tags = {**about, "trainkit.step": step, **value["tags"]}
            client.create_logged_model(experiment, value["name"], self._id, tags=tags, model_type="safetensors")
            models = found()  # MLflow's client asks again by itself when an answer is lost: then there are two
        for second in models[1:]:
            client.delete_logged_model(second)
        usage = f"Weights at step {step}, safetensors. In a recipe: `weights: models:/{models[0]}`"
        if "described" in value:
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


def sent(folder: RunFolder) -> Sent:
    """Return what MLflow has of a run. Positions are 0 where they are in doubt: sending again is harmless."""
    try:
        noted = json.loads((folder.path / SENT).read_bytes())
        missing = [int(position) for position in noted.get("missing", ())]
        found = Sent(int(noted["position"]), int(noted.get("desired", 0)), missing, noted.get("run"))
        if found.run not in (None, folder.info().run_id):
            return Sent()
        with open(folder.journal, "rb") as file:
            file.seek(max(0, found.position - 1))
            whole = file.read(1) in (b"\n", b"")  # behind the end there is nothing to send
        return found if whole else replace(found, position=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Sent()


def selection(folder: RunFolder) -> Callable[[str], bool]:
    """Return a function that tells whether MLflow gets a metric of this run. Raises UserError for a damaged file."""
    creation = mlflow_run.read(folder)
    return matcher(creation.metrics if creation else None)


def left(folder: RunFolder) -> tuple[int, int]:
    """Count the values, and the files, tags, data sets and models, that a run has yet to upload, from its folder alone.

    Raises UserError for a damaged journal.
    """
    done, end = sent(folder), folder.journal.stat().st_size if folder.journal.exists() else 0
    selects = selection(folder)
    values = sum(selects(name) for _, name, _ in rows(folder.journal, done.position, end)) if end > done.position else 0
    return values, len(_lacking(folder, desired_state.read(folder), done))


def _lacking(folder: RunFolder, wanted: list[Wanted], done: Sent) -> list[Wanted]:
    """Return what of a desired state MLflow has not got; what has a file, as long as that is there."""
    missing = {*done.missing}
    found = [entry for entry in wanted if entry.position > done.desired or entry.position in missing]
    return [entry for entry in found if not desired_state.is_gone(folder, entry)]


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


def matcher(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Return a function that tells whether a metric matches one of the patterns; of None every metric does.

    `*` stands for anything without a dot, behind which the class stands of which a metric is (`iou.road`), `**` for
    anything.
    """
    if patterns is None:
        return lambda name: True
    wild = {"*": "[^.]*", "**": ".*"}
    parts = ("".join(wild.get(word) or re.escape(word) for word in re.split(r"(\*+)", one)) for one in patterns)
    whole = re.compile("|".join(parts))
    return functools.cache(lambda name: whole.fullmatch(name) is not None)

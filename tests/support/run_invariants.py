"""What must be true of a run that has ended, whatever happened to it on the way: the invariants as functions.

`account` is everything about a run that must repeat, by name; `unlike` names where two accounts differ (I1, I4).
`unsound` is what is wrong with a run by itself (I2 to I5): rows, files and models that are left over or lost. Both
read what lies on the disk and ask none of the code that wrote it, but for the checkpoint's own verification.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainkit.checkpoint import storage, verification
from trainkit.tracking import mlflow_run, upload
from trainkit.tracking.journal import MEASURED
from trainkit.tracking.run_folder import CREATION, RunFolder

SAVED_LATER = ("entered", "final")
"""What a checkpoint's state says of evaluations of its own step: one that a full disk refused is written behind them.
The scores themselves are rows of the journal."""

CLOCKED = ("elapsed", "trained", "spent", "journal", "machine", "versions")
"""What a checkpoint's state says of the clock, of bytes and of places."""

OF_PROCESSES = ("error.txt",)
"""Artifacts that tell of one process: why an earlier one failed."""

MEASURED_TABLES = ("tables/metrics.csv", "tables/integrity.json")
"""The journal's metrics, measured ones among them, and a report with the seconds that it took."""

WHENEVER = ("system/", "speed/forecast_s")
"""Metrics whose steps hang on the clock, or on where a process began."""

_NUMBERED = re.compile(r"\+timestamp\+\d+\+[0-9a-f-]{36}")
"""What MLflow has in the names of images."""

Row = tuple[str, int, str, int]
"""Name, step, value in full, milliseconds."""


def account(folder: RunFolder) -> dict[str, Any]:
    """What of a finished run must be equal to that of another one of its recipe, by name."""
    path, problems = storage.newest_valid(folder.checkpoints)
    if path is None:
        return {"checkpoint": problems}
    loaded = storage.read(path)
    info = folder.info()
    found: dict[str, Any] = {
        "status": info.status,
        "last step": info.last_step,
        "key": info.key,
        "recipe": loaded.recipe_text,
        "resumed": json.loads((folder.path / CREATION).read_bytes())["resumed"],
    }
    for group, members in loaded.tensors.items():
        for name, tensor in members.items():
            bits = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
            found[f"tensor {group}/{name}"] = (str(tensor.dtype), tuple(tensor.shape), bits)
    for key, value in loaded.state.items():
        if key == "gates":
            value = {name: gate[0] for name, gate in value.items()}  # when each is due; the rest is the clock's
        if key not in (*CLOCKED, *SAVED_LATER):
            found[f"state {key}"] = json.dumps(value, sort_keys=True)
    for where, rows in (("journal", _journal(folder)), ("store", _stored(folder))):
        for name, step, value, _ in sorted(rows):
            if not measured(name):
                found.setdefault(f"{where} {name}", []).append((step, value))
            elif not name.startswith(WHENEVER):
                found.setdefault(f"measured {where} {name}", []).append(step)
    artifacts = _artifacts(folder)
    for file in sorted(artifacts.rglob("*")):
        name = _NUMBERED.sub("", file.relative_to(artifacts).as_posix())
        hidden = file.name.startswith(".artifact.uploading.")  # a copy cut short, which MLflow hides
        if file.is_file() and not hidden and name not in OF_PROCESSES:
            repeats = name.startswith(("rows/", "tables/", "recipe/")) and name not in MEASURED_TABLES
            found[f"artifact {name}"] = hashlib.sha256(file.read_bytes()).hexdigest() if repeats else "is there"
    # One that was told to stop has handed on what it had then, too.
    ends = {("last", str(info.last_step)), *(("best", str(record["step"])) for record in loaded.state["best"])}
    found["models"] = sorted(model for model in _models(folder) if model[:2] in ends)
    return found


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names under which two accounts differ: that of a run that was left alone, and another.

    What was measured since the last line dies with its process: where the next one begins on the step of a line, that
    line has no speeds. So the other may lack one step of what is measured for each time it was resumed, and has none
    that the first has not.
    """
    names = sorted((one.keys() | other.keys()) - {"resumed"})
    resumed = other.get("resumed", 0)
    return [name for name in names if _differ(name, one.get(name), other.get(name), resumed)]


def _differ(name: str, one: Any, other: Any, resumed: int) -> bool:
    if not name.startswith("measured "):
        return one != other
    one, other = set(one or ()), set(other or ())
    return not other <= one or len(one - other) > resumed


def unsound(folder: RunFolder) -> list[str]:
    """What is wrong with a run that ended, and with others of its store that are said to go on."""
    return list(_unsound(folder))


def _unsound(folder: RunFolder) -> Iterator[str]:
    if folder.alive():
        yield "somebody holds its lock"
    journal, stored = _journal(folder), _stored(folder)
    for where, rows in (("journal", journal), ("store", stored)):
        counted = collections.Counter((name, step) for name, step, _, _ in rows)
        yield from (f"{many} rows of {key} in the {where}" for key, many in counted.items() if many > 1)
    for where, rows in (("journal", set(journal) - set(stored)), ("store", set(stored) - set(journal))):
        if rows:
            yield f"{len(rows)} rows are in the {where} alone, such as {sorted(rows)[:2]}"
    newest: dict[str, Row] = {}
    for row in stored:
        newest[row[0]] = max(newest.get(row[0], row), row, key=lambda row: (row[1], row[3]))
    if set(newest.values()) != set(_stored(folder, "latest_metrics")):
        yield "the newest values of the store are others than those of its rows"
    for event in _records(folder):
        if event.get("event") in ("nondeterminism", "repeated"):
            yield f"step {event['step']}: {event['event']} {event['data']}"
    for path in sorted(folder.checkpoints.iterdir()):
        if problems := verification.verify(path) if path.name.startswith("step-") else ["is left over"]:
            yield f"{path.name}: {problems[0]}"
    left = [path for path in folder.path.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    left += folder.path.glob("files/*")
    yield from (f"{path.name} is left over" for path in left)
    for run_id, status, name, end in _query(folder, "SELECT run_uuid, status, name, end_time FROM runs"):
        if status == "RUNNING" or end is None:
            yield f"MLflow run {name} is {status}, its end {end}"
        if run_id == folder.info().run_id and status != folder.info().status:
            yield f"MLflow says {status}, run.json {folder.info().status}"
    for path in sorted(folder.path.parent.iterdir()):
        if (path / "run.json").is_file() and RunFolder(path).info().status == "RUNNING":
            yield f"run {path.name} is said to go on"
    names = collections.Counter((name, step) for name, step, *_ in _models(folder))
    yield from (f"{many} models {key}" for key, many in names.items() if many > 1)
    yield from (f"model {name} is {status}" for name, _, status, _, _ in _models(folder) if status != "READY")


def measured(name: str) -> bool:
    """Whether values of a metric are those of a clock or a machine, and so never repeat."""
    return name.startswith(MEASURED) or "/speed/" in name or "/time/" in name


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.journal.read_text(encoding="utf-8").splitlines()]


def _journal(folder: RunFolder) -> list[Row]:
    """Rows of the journal that MLflow is to have."""
    creation = mlflow_run.read(folder)
    wanted = upload.matcher(creation.metrics if creation is not None else None)
    return [
        (name, record["step"], _text(upload.rounded(float(value))), record["t"])
        for record in _records(folder)
        for name, value in record.get("m", {}).items()
        if wanted(name)
    ]


def _stored(folder: RunFolder, table: str = "metrics") -> list[Row]:
    # A run whose beginning was killed has no id; it has no rows then.
    run_id = folder.info().run_id or ""
    rows = _query(folder, f"SELECT key, step, value, is_nan, timestamp FROM {table} WHERE run_uuid = ?", run_id)
    return [(key, step, _text(math.nan if is_nan else value), t) for key, step, value, is_nan, t in rows]


def _text(value: float) -> str:
    return repr(value) if math.isfinite(value) else "nan"  # MLflow has one word for all that is not finite


def _models(folder: RunFolder) -> list[tuple[Any, ...]]:
    """Name, step, status, weights and scores of each model that a run made."""
    made = _query(
        folder,
        "SELECT m.model_id, m.name, m.status, m.artifact_location, t.tag_value FROM logged_models m "
        "LEFT JOIN logged_model_tags t ON t.model_id = m.model_id AND t.tag_key = 'trainkit.step' "
        "WHERE m.source_run_id = ?",
        folder.info().run_id or "",
    )
    found = []
    for model_id, name, status, place, step in made:
        files = sorted(Path(urlsplit(place).path).rglob("*.safetensors"))
        bits = tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
        scores = "SELECT metric_name, metric_step, metric_value FROM logged_model_metrics WHERE model_id = ?"
        found.append(
            (name, step, {2: "READY"}.get(status, status), bits, tuple(sorted(_query(folder, scores, model_id))))
        )
    return found


def _artifacts(folder: RunFolder) -> Path:
    ((place,),) = _query(folder, "SELECT artifact_uri FROM runs WHERE run_uuid = ?", folder.info().run_id)
    return Path(urlsplit(place).path)


def _query(folder: RunFolder, words: str, *values: Any) -> list[tuple[Any, ...]]:
    database = folder.path.parents[1] / "mlflow.db"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(words, values).fetchall()

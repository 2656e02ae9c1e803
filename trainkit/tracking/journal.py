"""Write the journal of a run: a file of JSON lines that holds every metric and every event, without MLflow.

    {"t": 1763686800123, "step": 120, "m": {"train/loss": 0.4375, "train/grad_norm": "inf"}}
    {"t": 1763686800200, "step": 120, "event": "gate", "data": {"name": "lfw"}}

`t` is milliseconds since 1970, fixed when a value is first logged. MLflow drops a row whose name, step, value and time
it already has, so sending a line twice is harmless; what a resumed run computes again keeps its old time, and the store
ends with exactly one row for each (metric, step).
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.errors import UserError
from trainkit.files import sync_folder, write_aside

MEASURED = ("speed/", "time/", "time_to/", "cost/", "device/", "system/", "final/speed/", "final/time/")
"""Prefixes of names that never repeat; when such a step is computed again the first measurement stands."""

_HOLD_BYTES = 64 * 1024
_HOLD_SECONDS = 5.0
_NOTES = 1000
_ENCODED = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_log = logging.getLogger("trainkit")


class Point(NamedTuple):
    """One value of one metric."""

    step: int
    value: float
    t: int
    """Milliseconds since 1970."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: a gate's decision, a resume, a value that was not finite."""

    t: int
    step: int
    name: str
    data: Any


@dataclass(frozen=True)
class History:
    """The content of a journal, in the order written."""

    metrics: dict[str, list[Point]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric; two empty lists when it was never logged."""
        points = self.metrics.get(name, [])
        return [p.step for p in points], [p.value for p in points]


@dataclass(frozen=True)
class Replay:
    """Lines written after the checkpoint that a run resumes from: it is about to compute these steps again."""

    values: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    """(metric, step) to (time, value)."""
    decided: list[Event] = field(default_factory=list)

    def events(self, after_step: int, name: str | None = None) -> list[Event]:
        """Return events of later steps than `after_step`, by step, such as decisions that hung on the clock."""
        found = [e for e in self.decided if e.step > after_step and name in (None, e.name)]
        return sorted(found, key=lambda e: e.step)


class Lines:
    """Appends JSON lines to the file at `path`, which is made if it is absent; a line cut short by a crash is removed.

    Lines wait in memory for `hold` seconds at most, and for as long as the disk refuses them. It has no lock.
    """

    def __init__(self, path: Path, hold: float):
        self.path, self._hold, self.held = path, hold, bytearray()
        # Unbuffered, so that what a full disk took and what it refused is known to the byte.
        new = not path.exists()
        self.file = open(path, "x+b" if new else "r+b", buffering=0)  # noqa: SIM115
        if new:
            sync_folder(path.parent)
        self.written = _whole_lines(self.file)
        self.file.truncate(self.written)
        self._flushed_at = time.monotonic()
        self._warned = False

    @property
    def position(self) -> int:
        """Bytes appended so far, those still in memory included."""
        return self.written + len(self.held)

    def append(self, record: dict[str, Any]) -> int:
        """Add a line; returns the position behind it."""
        if self.file.closed:
            raise ValueError(f"{self.path} is closed")
        self.held += _ENCODED(record).encode() + b"\n"
        if len(self.held) >= _HOLD_BYTES or time.monotonic() - self._flushed_at >= self._hold:
            self.pass_on()
        return self.position

    def pass_on(self) -> int:
        """Hand held lines to the operating system; returns how far the file reaches.

        A refusal is logged once and not raised: the lines stay in memory for the next try.
        """
        try:
            self.flush()
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("%s: %s; training continues, its lines wait in memory", self.path, error)
        return self.written

    def flush(self) -> None:
        """Hand held lines to the operating system. Raises OSError when the disk refuses; nothing is lost by that."""
        self._flushed_at = time.monotonic()
        while self.held:
            self.file.seek(self.written)
            done = self.file.write(self.held)
            self.written += done
            del self.held[:done]

    def sync(self, lock: threading.RLock) -> int:
        """Sync lines to the disk, and return how far the file reaches then. Raises OSError when the disk refuses."""
        with lock:
            self.flush()
            position = self.written
            # Under the lock an append of the main thread would wait for the disk; a descriptor of its own frees it.
            file = os.dup(self.file.fileno())
        try:
            os.fsync(file)
        finally:
            os.close(file)
        return position

    def cut(self, position: int) -> None:
        """Cut the file to `position`, at once and for good."""
        self.file.truncate(position)
        os.fsync(self.file.fileno())
        self.written = position


class Journal:
    """Appends to the journal at `path`, which is made if it is absent. Safe to use from several threads.

    `note` only puts values in a queue, with their time; every other method takes them in first. Lines wait in memory
    for at most a few seconds; `commit` syncs them to the disk. A line cut short by a crash is removed on opening. One
    process writes a journal at a time (`RunFolder.claim`).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock = threading.RLock()
        self._lines = Lines(self.path, _HOLD_SECONDS)
        self._now = 0
        self._notes: deque[tuple[int, int, dict[str, float]]] = deque()
        self._due = time.monotonic() + _HOLD_SECONDS
        self._last: dict[str, Point] = {}
        self._index(_lines(self.path, 0, self._lines.written))
        self.replay = _read_replay(self._replay_path)

    @property
    def _replay_path(self) -> Path:
        return self.path.with_suffix(".replay.jsonl")

    @property
    def position(self) -> int:
        """Bytes appended so far, those still in memory included."""
        with self._lock:
            self._take_in()
            return self._lines.position

    @property
    def last_step(self) -> int:
        """Greatest step of a metric that is not `MEASURED`, 0 when there is none: those stay when the rest is cut."""
        with self._lock:
            self._take_in()
            return max((p.step for name, p in self._last.items() if not name.startswith(MEASURED)), default=0)

    def points(self, names: Collection[str], step: int) -> dict[str, Point]:
        """Return values of metrics at a step, of those that have one; older ones than the last come from the file."""
        with self._lock:
            self._take_in()
            found = {name: self._last[name] for name in names if name in self._last and self._last[name].step == step}
            missing = {name for name in names if name in self._last} - found.keys()
            end = self._lines.pass_on() if missing else 0
        # Outside of the lock: a long journal takes seconds, and the training would wait.
        for _, name, point in rows(self.path, 0, end) if missing else ():
            if point.step == step and name in missing:
                found.setdefault(name, point)
        return found

    def _latest(self, name: str, point: Point) -> None:
        if name not in self._last or point.step >= self._last[name].step:
            self._last[name] = point

    def _lookup(self, name: str, step: int) -> Point | None:
        last = self._last.get(name)
        if last is None or last.step == step:
            return last
        end = self._lines.pass_on()
        return next((p for _, n, p in rows(self.path, 0, end) if (n, p.step) == (name, step)), None)

    def names(self) -> set[str]:
        """Return the names of all metrics that have a value; of the part that was cut off, those that are measured."""
        with self._lock:
            self._take_in()
            return set(self._last)

    def highest(self, prefix: str) -> int:
        """Return the greatest step of metrics with this prefix, the part that was cut off included; -1 without any."""
        with self._lock:
            self._take_in()
            kept = [point.step for name, point in self._last.items() if name.startswith(prefix)]
            cut = [step for name, step in self.replay.values if name.startswith(prefix)]
        return max(kept + cut, default=-1)

    def append(self, step: int, metrics: dict[str, float]) -> None:
        """Write values of one step.

        A name has one value a step: a second one is dropped, and if it differs an event `repeated` says so, except for
        `MEASURED` names: an evaluation that is repeated takes another time.
        """
        with self._lock:
            self._take_in()
            self._append(self._time(), step, metrics)

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Queue values for `append`: in a tenth of its time, and without waiting for other threads."""
        if self._lines.file.closed:
            raise ValueError(f"{self.path} is closed")
        self._notes.append((time.time_ns(), step, metrics))
        if len(self._notes) > _NOTES or time.monotonic() > self._due:
            with self._lock:  # the uploader, which reads every few seconds, is slow
                self._take_in()

    def _take_in(self) -> None:
        self._due = time.monotonic() + _HOLD_SECONDS
        while self._notes:
            now, step, metrics = self._notes.popleft()
            self._append(self._time(now // 1_000_000), step, metrics)

    def _append(self, now: int, step: int, metrics: dict[str, float]) -> None:
        by_time: dict[int, dict[str, float | str]] = {}
        changed: list[tuple[str, float, float]] = []
        strange: list[str] = []
        for name, value in metrics.items():
            value, t = float(value), now
            last, before = self._last.get(name), self.replay.values.get((name, step))
            if last is not None and step <= last.step:
                if before is not None and name.startswith(MEASURED):  # `cut_back` has put it back
                    continue
                if step < last.step:  # after a rollback
                    last = self._lookup(name, step)
                if last is not None and last.step == step:
                    if not (_same_bits(last.value, value) or name.startswith(MEASURED)):
                        self._append_event(
                            step, "repeated", {"name": name, "kept": _put(last.value), "dropped": _put(value)}
                        )
                    continue
            if before is not None:
                if _same_bits(before[1], value):
                    t = before[0]
                elif name.startswith(MEASURED):
                    t, value = before
                else:
                    changed.append((name, before[1], value))
            if not math.isfinite(value):
                strange.append(name)
            by_time.setdefault(t, {})[name] = _put(value)
            self._latest(name, Point(step, value, t))
        for t, values in by_time.items():
            self._lines.append({"t": t, "step": step, "m": values})
        if strange:
            self._append_event(step, "nonfinite", {"names": sorted(strange)})
        for name, old, new in changed:
            self._append_event(step, "nondeterminism", {"name": name, "first": _put(old), "again": _put(new)})

    def event(self, step: int, name: str, data: Any = None) -> None:
        """Write an event. `data` is anything JSON holds."""
        with self._lock:
            self._take_in()
            self._append_event(step, name, data)

    def commit(self) -> int:
        """Sync everything to the disk and return the position, which belongs in the checkpoint.

        Raises OSError when the disk refuses (full, gone); nothing held is lost by that.
        """
        with self._lock:
            self._take_in()
        return self._lines.sync(self._lock)

    def cut_back(self, position: int) -> Replay:
        """Cut the file to `position` (of the checkpoint that is resumed from); what was behind it becomes `replay`.

        What was measured is put back: it never repeats. The cut part is kept in a file of its own before anything is
        cut, so a crash in the middle, or a second interruption during the repeated steps, loses no time stamp. Raises
        UserError when the journal does not reach `position`.
        """
        with self._lock:
            self._take_in()
            self._lines.flush()
            written = self._lines.written
            if position > written:
                found = f"ends at byte {written}, but the checkpoint was written at byte {position}"
                raise UserError(str(self.path), found, remedy="restore the file, or start a new run")
            if position and self._byte(position - 1) != b"\n":
                raise UserError(
                    str(self.path),
                    f"byte {position} of the checkpoint is not the end of a line",
                    remedy="start a new run",
                )
            values, decided = dict(self.replay.values), list(self.replay.decided)
            for record in _lines(self.path, position, written):
                if "m" in record:
                    values.update({(n, record["step"]): (record["t"], _get(v)) for n, v in record["m"].items()})
                else:
                    event = Event(record["t"], record["step"], record["event"], record.get("data"))
                    # The first decision stands: an event replayed from the tail of an earlier cut is there already.
                    if event not in decided:
                        decided.append(event)
            self._last.clear()
            kept = self._index(_lines(self.path, 0, position))
            self.replay = Replay(
                {key: value for key, value in values.items() if key not in kept},
                [e for e in decided if ("event", e.t, e.step, e.name) not in kept],
            )
            _write_replay(self._replay_path, self.replay)
            self._lines.cut(position)
            self._put_back_measured()
            return self.replay

    def _put_back_measured(self) -> None:
        """Write measured values that were cut off again: the store may have them, their steps may not come again."""
        lines: dict[tuple[int, int], dict[str, float | str]] = {}
        for (name, step), (t, value) in self.replay.values.items():
            if name.startswith(MEASURED):
                lines.setdefault((step, t), {})[name] = _put(value)
                self._latest(name, Point(step, value, t))
        for (step, t), values in sorted(lines.items(), key=lambda line: line[0]):
            self._lines.append({"t": t, "step": step, "m": values})

    def close(self) -> None:
        """Commit and close; harmless when repeated."""
        with self._lock:
            if not self._lines.file.closed:
                try:
                    self.commit()
                finally:
                    self._lines.file.close()

    def _append_event(self, step: int, name: str, data: Any) -> None:
        t, data = self._time(), _plain(data)
        for e in self.replay.decided:
            if (e.step, e.name) == (step, name) and e.data == data:
                t = e.t
        self._lines.append({"t": t, "step": step, "event": name, "data": data})

    def _byte(self, at: int) -> bytes:
        self._lines.file.seek(at)
        return self._lines.file.read(1)

    def _time(self, now: int | None = None) -> int:
        # A clock that is set back must not put later steps before earlier ones.
        self._now = max(self._now, _milliseconds() if now is None else now)
        return self._now

    def _index(self, records: Iterator[dict[str, Any]]) -> set[tuple[Any, ...]]:
        seen: set[tuple[Any, ...]] = set()
        for record in records:
            self._now = max(self._now, record["t"])
            for name, value in record.get("m", {}).items():
                self._latest(name, Point(record["step"], _get(value), record["t"]))
                seen.add((name, record["step"]))
            if "event" in record:
                seen.add(("event", record["t"], record["step"], record["event"]))
        return seen


def read(path: str | os.PathLike[str]) -> History:
    """Read a journal, also of a run that is going on.

    A last line cut short is left out; damage before it is a UserError.
    """
    history = History()
    for record in _lines(Path(path), 0, None):
        if "m" in record:
            for name, value in record["m"].items():
                history.metrics.setdefault(name, []).append(Point(record["step"], _get(value), record["t"]))
        else:
            history.events.append(Event(record["t"], record["step"], record["event"], record.get("data")))
    return history


def at_best(metrics: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    """Rename `at_best/...` to `best/...`, so that all scores at the best evaluation have one prefix.

    Older runs logged all of them under `best/`, newer ones only the score that decides.
    """
    found: dict[str, list[Point]] = {}
    for name, points in metrics.items():
        # Of a run that began before and was resumed since, the later points are those under the new name.
        found.setdefault(name.removeprefix("at_") if name.startswith("at_best/") else name, []).extend(points)
    return found


def rows(path: str | os.PathLike[str], start: int, end: int) -> Iterator[tuple[int, str, Point]]:
    """Yield metric values between two byte positions, each with the position behind its line."""
    for record in _lines(Path(path), start, end):
        for name, value in record.get("m", {}).items():
            yield record["end"], name, Point(record["step"], _get(value), record["t"])


def _lines(path: Path, start: int, end: int | None) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        file.seek(start)
        at = start
        for number, line in enumerate(file, 1):
            at += len(line)
            if not line.endswith(b"\n") or (end is not None and at > end):
                return
            if line.isspace():  # a damaged line that was blanked out
                continue
            try:
                record = json.loads(line)
                complete = {"t", "step"} <= record.keys() and ("m" in record or "event" in record)
            except (ValueError, AttributeError):
                complete = False
            if not complete:
                where = f"{path}, line {number}" if start == 0 else f"{path}, line {number} after byte {start}"
                remedy = "restore the file from a copy, or overwrite that line with spaces, its length as it is"
                raise UserError(where, f"damaged: {line[:60]!r}", "one JSON object", remedy)
            record["end"] = at
            yield record


def _whole_lines(file: FileIO) -> int:
    """Return the length of the file without a last line that was cut short."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _plain(data: Any) -> Any:
    """Convert data to JSON types: lists for tuples, strings for keys and numbers that are not finite."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if data is None or isinstance(data, (str, bool, int)):
        return data
    return _put(float(data))


def _put(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _get(value: float | str) -> float:
    return float(value)


def _same_bits(a: float, b: float) -> bool:
    # 0.0 and -0.0 are equal but not the same; nan is the same as nan.
    return repr(a) == repr(b)


def _write_replay(path: Path, replay: Replay) -> None:
    lines: list[dict[str, Any]] = [
        {"t": t, "step": step, "m": {name: _put(value)}} for (name, step), (t, value) in replay.values.items()
    ]
    lines += [{"t": e.t, "step": e.step, "event": e.name, "data": e.data} for e in replay.decided]
    write_aside(path, "".join(json.dumps(line) + "\n" for line in lines))


def _read_replay(path: Path) -> Replay:
    replay = Replay()
    if path.exists():
        history = read(path)
        replay.values.update({(n, p.step): (p.t, p.value) for n, points in history.metrics.items() for p in points})
        replay.decided.extend(history.events)
    return replay

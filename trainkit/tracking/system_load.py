"""Read and record the load of the machine while a run goes on: processor, memory, reads from disk, GPU.

It tells what this process, its workers and all others use, within the quota that a container allows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainkit.tracking.journal import Journal

KEPT = 720
"""Readings that are kept: two hours of one every 10 seconds."""

_log = logging.getLogger("trainkit")


def quota(root: str = "/sys/fs/cgroup", proc: str = "/proc/self/cgroup") -> float | None:
    """Return the quota in processors, the tightest of the control group (v2) and those above it; None without a limit.

    `proc` names the group of the process; `root` is where groups are mounted.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path(proc).read_text().splitlines():
            if line.startswith("0::"):
                found = [_quota_of(folder) for folder in _upwards(Path(root), line[3:])]
                return min((most for most in found if most is not None), default=None)
    return None


def cores() -> float:
    """Return the number of processors this process may use, which in a container may be less than it sees."""
    return min(float(len(affinity())), quota() or float("inf"))


def affinity() -> list[int]:
    """Return the processors that this process may run on; OpenMP may have pinned the thread that asks."""
    process = psutil.Process()
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(psutil.cpu_count() or 1))


def _quota_of(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        most, period = (folder / "cpu.max").read_text().split()
        return float(most) / float(period) if most != "max" else None
    return None


def _upwards(base: Path, path: str) -> list[Path]:
    """Return the group's folder and those above it, up to the mount.

    In a container the path may be the host's, of which the mount shows the last part only, or nothing but its root.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    while parts and not base.joinpath(*parts).is_dir():
        parts = parts[1:]
    return [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The load since the reading before; None where it cannot be read."""

    at: float
    """Seconds, by time.perf_counter."""
    own_cores: float | None = None
    """Processor cores that this process keeps busy."""
    worker_cores: float | None = None
    """And its children, the workers of its loader among them."""
    host_share: float | None = None
    """Share of the time of all processors this process may run on that anyone used, 0 to 1."""
    rss_gb: float | None = None
    """Resident memory of this process and its children; pages that children share with it count once."""
    read_mb_s: float | None = None
    """Read from disk by them."""


@dataclass(frozen=True)
class _Counts:
    """Counts of one process since it began."""

    seconds: float
    read: int
    held: int
    """Resident bytes; of a child those that only it has."""


class Load:
    """Reads the load, each time since the reading before; the first since it was made.

    Fields that cannot be read are None. One thread may use it at a time.
    """

    def __init__(self) -> None:
        self._process, self._reads = psutil.Process(), True
        self._at, self._processors = time.perf_counter(), psutil.cpu_times(percpu=True)
        self._processes = self._counts()
        psutil.cpu_percent()  # counts since its last call

    def read(self) -> Reading:
        """Read the load since the last reading."""
        at, processors, processes = time.perf_counter(), psutil.cpu_times(percpu=True), self._counts()
        elapsed = max(at - self._at, 1e-9)
        nothing = _Counts(0.0, 0, 0)
        spent = {key: now.seconds - self._processes.get(key, nothing).seconds for key, now in processes.items()}
        read = sum(now.read - self._processes.get(key, nothing).read for key, now in processes.items())
        me = next(iter(processes))
        before, now = self._allowed(self._processors), self._allowed(processors)
        busy, total = (b - a for a, b in zip(before, now, strict=True))
        reading = Reading(
            at=at,
            own_cores=spent.pop(me) / elapsed,
            worker_cores=sum(spent.values()) / elapsed,
            # Counts of idle time may step back a little as processors go to sleep.
            host_share=min(1.0, max(0.0, busy / total)) if total > 0 else None,
            rss_gb=sum(count.held for count in processes.values()) / 1e9,
            read_mb_s=read / 1e6 / elapsed if self._reads else None,
        )
        self._at, self._processors, self._processes = at, processors, processes
        return reading

    def metrics(self, reading: Reading) -> dict[str, float]:
        """Return a reading as metrics `system/...`, and memory and GPUs as they are now.

        Names are MLflow's where they mean the same.
        """
        memory = psutil.virtual_memory()
        found: dict[str, float | None] = {
            "own_cores": reading.own_cores,
            "worker_cores": reading.worker_cores,
            "rss_gb": reading.rss_gb,
            "read_mb_s": reading.read_mb_s,
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": (memory.total - memory.available) / 1e6,
            "system_memory_usage_percentage": memory.percent,
            **self._gpus(),
        }
        return {f"system/{name}": float(value) for name, value in found.items() if value is not None}

    def _counts(self) -> dict[tuple[int, float], _Counts]:
        """Count this process first, then its children and theirs, by id and start: an id may be given out again."""
        found = {}
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError), process.oneshot():  # one that ends meanwhile is left out
                times, memory = process.cpu_times(), process.memory_info()
                # Counting the pages that a child does not share takes 6 ms for each GB.
                held = memory.rss if process is self._process else process.memory_full_info().uss
                counts = _Counts(times.user + times.system, self._read_bytes(process), held)
                found[process.pid, process.create_time()] = counts
        return found

    def _read_bytes(self, process: psutil.Process) -> int:
        try:
            return process.io_counters().read_bytes
        except (psutil.AccessDenied, OSError, AttributeError):
            if process is self._process:
                self._reads = False  # not counted by this operating system, or no permission
            return 0

    def _allowed(self, each: list[Any]) -> tuple[float, float]:
        """Return busy and all seconds of the processors that this process may run on."""
        mine = affinity()
        # In a container the system may show its own processors alone, under other numbers than the affinity has.
        chosen = [times for number, times in enumerate(each) if number in mine] or each
        # Guest time is in user time already; waiting for a disk is no work; stolen time is work of others.
        total = sum(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) for times in chosen)
        return total - sum(times.idle + getattr(times, "iowait", 0.0) for times in chosen), total

    def _gpus(self) -> dict[str, float | None]:
        """Return use, memory and power of the GPUs of this run on this machine, as torch counts them.

        Nothing is read before the process uses CUDA itself: asking must not begin that.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return {}
        found: dict[str, float | None] = {}
        for n in range(min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())):
            with contextlib.suppress(Exception):  # nvidia-ml-py is missing, or a function that this driver lacks
                memory, total = torch.cuda.device_memory_used(n), torch.cuda.get_device_properties(n).total_memory
                found[f"gpu_{n}_utilization_percentage"] = torch.cuda.utilization(n)
                found[f"gpu_{n}_memory_usage_megabytes"] = memory / 1e6
                found[f"gpu_{n}_memory_usage_percentage"] = 100 * memory / total
                found[f"gpu_{n}_power_usage_watts"] = torch.cuda.power_draw(n) / 1e3
        return found


class Sampler(threading.Thread):
    """Reads the load of the machine and writes it into the journal under `system/`, counted by its own step."""

    def __init__(self, journal: Journal, every: float):
        super().__init__(name="trainkit-sampler", daemon=True)
        self._journal, self._every = journal, every
        self._readings: deque[Reading] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample until stopped; the first sample comes within a second."""
        step = self._journal.highest("system/") + 1
        pause = min(1.0, self._every)
        try:
            load = Load()
            while not self._stop_asked.wait(pause):
                pause = self._every
                reading = load.read()
                with self._lock:
                    self._readings.append(reading)
                self._journal.append(step, load.metrics(reading))
                step += 1
        except Exception as error:
            if self._stop_asked.is_set():  # the journal may be closed by now
                return
            _log.warning("the load of the machine cannot be read any more: %s", error)

    def readings(self, since: float = 0.0) -> tuple[Reading, ...]:
        """Return the readings after a moment of `time.perf_counter`, oldest first, as far as they are kept."""
        with self._lock:
            return tuple(reading for reading in self._readings if reading.at > since)

    def stop(self) -> None:
        """End sampling."""
        self._stop_asked.set()
        self.join(timeout=2.0)

"""Read the load of the machine while a run goes on: what this process, its workers and all others use of it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil

from trainkit.tracking.system.cgroup import affinity


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

    `disk` is a folder on the disk whose space is read. `absent` holds fields that cannot be read, and why. One thread
    may use it at a time.
    """

    def __init__(self, disk: str | os.PathLike[str] = os.sep):
        self.absent: dict[str, str] = {}
        self._process, self._disk = psutil.Process(), disk
        self._at, self._processors = time.perf_counter(), psutil.cpu_times(percpu=True)
        self._processes, self._sent = self._counts(), psutil.net_io_counters()
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
            read_mb_s=None if "read_mb_s" in self.absent else read / 1e6 / elapsed,
        )
        self._at, self._processors, self._processes = at, processors, processes
        return reading

    def metrics(self, reading: Reading) -> dict[str, float]:
        """Return a reading as metrics `system/...`, and memory, disk, network and GPUs as they are now.

        Names are MLflow's where they mean the same.
        """
        memory, disk, sent = psutil.virtual_memory(), psutil.disk_usage(os.fspath(self._disk)), psutil.net_io_counters()
        found: dict[str, float | None] = {
            "own_cores": reading.own_cores,
            "worker_cores": reading.worker_cores,
            "rss_gb": reading.rss_gb,
            "read_mb_s": reading.read_mb_s,
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": (memory.total - memory.available) / 1e6,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
            "disk_usage_percentage": disk.percent,
            **self._gpus(),
        }
        if sent is not None and self._sent is not None:
            found["network_receive_megabytes"] = (sent.bytes_recv - self._sent.bytes_recv) / 1e6
            found["network_transmit_megabytes"] = (sent.bytes_sent - self._sent.bytes_sent) / 1e6
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
                self.absent["read_mb_s"] = "not counted by this operating system, or no permission"
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
            self.absent["gpus"] = "this process has used no GPU so far"
            return {}
        self.absent.pop("gpus", None)
        found: dict[str, float | None] = {}
        for n in range(min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())):
            try:
                memory, total = torch.cuda.device_memory_used(n), torch.cuda.get_device_properties(n).total_memory
                found[f"gpu_{n}_utilization_percentage"] = torch.cuda.utilization(n)
                found[f"gpu_{n}_memory_usage_megabytes"] = memory / 1e6
                found[f"gpu_{n}_memory_usage_percentage"] = 100 * memory / total
                found[f"gpu_{n}_power_usage_watts"] = torch.cuda.power_draw(n) / 1e3
            except Exception as error:  # nvidia-ml-py is missing, or a function that this driver lacks
                self.absent["gpus"] = str(error)
        return found

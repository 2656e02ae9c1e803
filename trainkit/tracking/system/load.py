"""Read the load of the machine while a run goes on: what this process, its workers and all others use of it.

Fields that cannot be read, for want of permission, of a counter or of a device, are left out; `Load.absent` says why.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import psutil

from trainkit.tracking.system import cgroup
from trainkit.tracking.system.cgroup import Groups
from trainkit.tracking.system.nvml import Gpus
from trainkit.tracking.system.processes import Counted, Counters
from trainkit.tracking.system.reading import Reading

BUSIEST = 8
"""Processors whose clock is asked for."""


class Load:
    """Reads the load, each time since the reading before; the first since it was made.

    `cgroup` is the folder of control groups; `pid` a process, by default this one; `disk` a folder on the disk whose
    space is read. One thread may use it at a time.
    """

    def __init__(
        self,
        cgroup: str | os.PathLike[str] = "/sys/fs/cgroup",
        now: Callable[[], float] = time.perf_counter,
        *,
        pid: int | None = None,
        disk: str | os.PathLike[str] = os.sep,
        gpus: Gpus | None = None,
    ):
        self._now, self._disk, self._gpus = now, disk, gpus or Gpus()
        self._source = Counters(pid, now)
        self._groups = Groups(cgroup, os.path.join(psutil.PROCFS_PATH, str(pid or os.getpid()), "cgroup"))
        self._at = now()
        self._processors = self._source.processors()
        self._processes = self._source.processes()
        self._refused = self._groups.refused()
        self._network = _network()
        self._busy: float | None = None
        self._last: Reading | None = None

    @property
    def absent(self) -> dict[str, str]:
        """Fields of a reading that cannot be read, and why."""
        return {**self._source.absent, **self._groups.absent, **self._gpus.absent}

    def cores(self) -> float:
        """Return the number of processors this process may use: the least of its affinity and its groups' quotas."""
        return _least(self._source, self._groups)

    def read(self) -> Reading:
        """Read the load since the last reading."""
        at, source = self._now(), self._source
        elapsed = at - self._at
        processors, processes, refused = source.processors(), source.processes(), self._groups.refused()
        rss = [one.rss for one in processes.values() if one.rss is not None]
        reading = Reading(
            at=at,
            rss_gb=sum(rss) / 1e9 if len(rss) == len(processes) else None,
            gpus=self._gpus.read(lambda: {pid for pid, _ in processes} | self._ranks()),
        )
        if elapsed > 0:
            reading = replace(
                reading,
                throttled_share=cgroup.share(self._refused, refused),
                **_spent(self._processes, processes, elapsed),
            )
        if processors is not None and self._processors is not None:
            busy = _busy(self._processors.allowed, processors.allowed)
            self._busy = _share([(self._processors.machine, processors.machine)])
            reading = replace(
                reading,
                host_share=_share([(self._processors.allowed[n], processors.allowed[n]) for n in busy]),
                cpu_mhz=source.mhz(sorted(busy, key=lambda n: -busy[n])[:BUSIEST]),
            )
        self._at, self._processors, self._processes, self._refused = at, processors, processes, refused
        self._last = reading
        return reading

    def metrics(self, reading: Reading) -> dict[str, float]:
        """Return a reading as metrics `system/...`, with MLflow's names where they mean the same.

        Memory, disk and network, which are in no reading, are those of now, and only come with the last one.
        """
        found: dict[str, float | None] = {
            name: getattr(reading, name)
            for name in (
                "own_cores", "worker_cores", "throttled_share", "cpu_mhz", "rss_gb", "read_mb_s", "major_faults_s",
            )
        }  # fmt: skip
        for gpu in reading.gpus:
            n = self._gpus.index(gpu.uuid)
            found[f"gpu_{n}_utilization_percentage"] = None if gpu.used is None else 100 * gpu.used
            found[f"gpu_{n}_memory_usage_megabytes"] = None if gpu.memory_gb is None else 1e3 * gpu.memory_gb
            found[f"gpu_{n}_clock_mhz"] = gpu.clock_mhz
            found[f"gpu_{n}_other_processes"] = gpu.others
        if reading is self._last:
            found |= {**self._gpus.metrics(), **self._machine()}
        return {f"system/{name}": float(value) for name, value in found.items() if value is not None}

    def _machine(self) -> dict[str, float]:
        found = {} if self._busy is None else {"cpu_utilization_percentage": 100 * self._busy}
        memory = psutil.virtual_memory()
        found["system_memory_usage_megabytes"] = (memory.total - memory.available) / 1e6
        found["system_memory_usage_percentage"] = 100 * (memory.total - memory.available) / memory.total
        if (network := _network()) is not None and self._network is not None:
            found["network_receive_megabytes"] = (network[0] - self._network[0]) / 1e6
            found["network_transmit_megabytes"] = (network[1] - self._network[1]) / 1e6
        with contextlib.suppress(OSError):
            disk = psutil.disk_usage(os.fspath(self._disk))
            found["disk_usage_megabytes"], found["disk_available_megabytes"] = disk.used / 1e6, disk.free / 1e6
            if disk.used + disk.free:
                found["disk_usage_percentage"] = 100 * disk.used / (disk.used + disk.free)
        return found

    def _ranks(self) -> set[int]:
        return self._source.siblings() if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 else set()


def cores() -> float:
    """Return the number of processors this process may use, which in a container may be less than it sees."""
    return _least(Counters(), Groups())


def _network() -> tuple[int, int] | None:
    """Return the bytes received and sent so far, over all interfaces; None where that cannot be read."""
    with contextlib.suppress(OSError):
        if (counts := psutil.net_io_counters()) is not None:
            return counts.bytes_recv, counts.bytes_sent
    return None


def _least(source: Counters, groups: Groups) -> float:
    return min(float(source.allowed()), groups.quota() or math.inf)


def _spent(
    before: Mapping[tuple[int, float], Counted], now: Mapping[tuple[int, float], Counted], elapsed: float
) -> dict[str, float | None]:
    """Return rates from the counts of this process, the first, and of its children.

    A child that ended between is in what its parent has reaped, the part that was counted while it lived included.
    """
    (me, mine), *_ = now.items()
    nothing = Counted(0.0, 0.0, 0, 0, 0)
    began = {key: before.get(key, nothing) for key in now}
    gone = [counted for key, counted in before.items() if key not in now]
    alive = sum(now[key].seconds - began[key].seconds for key in now if key != me)
    reaped = sum(now[key].reaped - began[key].reaped for key in now)
    known = sum(counted.seconds + counted.reaped for counted in gone)

    def counted(name: str) -> float | None:
        if any(getattr(one, name) is None for one in (mine, began[me])):
            return None
        # A child of another user, or one that is just ending, does not show its counts.
        pairs = [(getattr(now[key], name), getattr(began[key], name)) for key in now]
        known = sum(getattr(one, name) or 0 for one in gone)
        return max(0.0, sum(b - a for b, a in pairs if a is not None and b is not None) - known)

    faults, read = counted("faults"), counted("read_bytes")
    return {
        "own_cores": max(0.0, mine.seconds - began[me].seconds) / elapsed,
        "worker_cores": max(0.0, alive + max(0.0, reaped - known)) / elapsed,
        "read_mb_s": None if read is None else read / 1e6 / elapsed,
        "major_faults_s": None if faults is None else faults / elapsed,
    }


def _busy(before: Mapping[int, tuple[float, float]], now: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Return the busy time between two counts, by processor; without those that were not there before."""
    return {n: now[n][0] - before[n][0] for n in now if n in before}


def _share(pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> float | None:
    """Return the busy part of the time between two counts of each processor; None when no time has gone by."""
    busy = sum(b[0] - a[0] for a, b in pairs)
    total = sum(b[1] - a[1] for a, b in pairs)
    # Counts of idle time may step back a little as processors go to sleep.
    return min(1.0, max(0.0, busy / total)) if total > 0 else None

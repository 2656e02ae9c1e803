"""Count what this process, its children and the processors have used so far, through psutil.

Counts only grow: `load` takes differences.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

PAGES_PAID = 1000
"""Counting the pages of children takes at most one part in so many of the time: it is 6 ms for each GB."""
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Counted:
    """Counts of one process since it began; None where they may not be read."""

    seconds: float
    """Processor time of its own."""
    reaped: float
    """Processor time of its children that have ended and been waited for, and of theirs."""
    faults: int | None
    """Major page faults, those of such children included."""
    read_bytes: int | None
    """Bytes fetched from disk, those of such children included."""
    rss: int | None
    """Resident bytes; of a child those that only it has."""


@dataclass(frozen=True)
class Processors:
    """Counts of the processors, in any one unit of time."""

    machine: tuple[float, float]
    """Busy and all time of all of them."""
    allowed: dict[int, tuple[float, float]]
    """The same of each that this process may run on."""


class Counters:
    """Counters of the process `pid`, by default this one, of its children and of the machine."""

    def __init__(self, pid: int | None = None, now: Callable[[], float] = time.perf_counter):
        self._process, self._now = psutil.Process(pid), now
        self.absent: dict[str, str] = {}
        """Fields of a reading that cannot be read here, and why."""
        self._private: dict[tuple[int, float], tuple[int, int]] = {}
        self._count_pages_at = -math.inf
        # In most virtual machines, those without the flag, Linux repeats the clock of the data sheet.
        self._knows_clock = (_CPUS / "cpu0" / "cpufreq").exists() or "aperfmperf" in _text("cpuinfo")
        if not self._knows_clock:
            self.absent["cpu_mhz"] = "the processor's clock is not measured here"

    def processors(self) -> Processors | None:
        """Return how busy the processors were so far; None where that is not counted."""
        each = {}
        for number, times in enumerate(psutil.cpu_times(percpu=True)):
            # Guest time is in user time already; waiting for a disk is no work; stolen time is work of others.
            spent = {name: value for name, value in times._asdict().items() if not name.startswith("guest")}
            idle = spent["idle"] + spent.get("iowait", 0.0)
            each[number] = (sum(spent.values()) - idle, sum(spent.values()))
        machine = sum(busy for busy, _ in each.values()), sum(total for _, total in each.values())
        if not machine[1]:
            self.absent["host_share"] = "the time of processors is not counted here"
            return None
        mine = self._affinity()
        # In a container the system may show its own processors alone, under other numbers than the affinity has.
        chosen = {n: times for n, times in each.items() if n in mine} if 0 < len(mine) < len(each) else each
        return Processors(machine, chosen or each)

    def processes(self) -> dict[tuple[int, float], Counted]:
        """Count this process first, then its children and theirs, by id and start: an id may be given out again."""
        found: dict[tuple[int, float], Counted] = {}
        counts_pages = self._now() >= self._count_pages_at
        spent, private = 0.0, {}
        for process in (self._process, *self._process.children(recursive=True)):
            # One that ends meanwhile is left out.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess), process.oneshot():
                key = (process.pid, process.create_time())
                times, rss = process.cpu_times(), process.memory_info().rss
                if process.pid != self._process.pid:
                    began = self._now()
                    if counts_pages or key not in self._private:
                        private[key] = (self._pages_of(process), rss)
                        spent += self._now() - began
                    else:
                        private[key] = self._private[key]
                    own, then = private[key]
                    # What a child takes more after it was forked is its own.
                    rss = max(0, own + rss - then) if own >= 0 else None
                reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
                faults, read = self._major_faults(process.pid), self._read_bytes(process)
                found[key] = Counted(times.user + times.system, reaped, faults, read, rss)
        self._private = private
        if counts_pages:
            self._count_pages_at = self._now() + PAGES_PAID * spent
        return found

    def siblings(self) -> set[int]:
        """Return the ids of the children of this process's parent: the ranks of a launcher."""
        parent = self._process.parent()
        return {process.pid for process in parent.children()} if parent else set()

    def mhz(self, busiest: list[int]) -> float | None:
        """Return the mean clock of some processors; None where it is not measured."""
        clocks = psutil.cpu_freq(percpu=True) if self._knows_clock else []
        found = [clocks[n].current for n in busiest if n < len(clocks)]
        return sum(found) / len(found) if found else None

    def allowed(self) -> int:
        """Return the number of processors this process may run on; no more than the machine has."""
        there = self.processors()
        return len(there.allowed) if there else len(self._affinity()) or os.cpu_count() or 1

    def _affinity(self) -> set[int]:
        """Return the processors of the process: OpenMP may have pinned the thread that asks."""
        return set(self._process.cpu_affinity() or ()) if hasattr(self._process, "cpu_affinity") else set()

    def _pages_of(self, process: psutil.Process) -> int:
        """Return the bytes that only this child has, since shared ones are counted at its parent; -1: unknown."""
        try:
            return process.memory_full_info().uss
        except (psutil.AccessDenied, OSError):
            self.absent["rss_gb"] = "memory that workers share cannot be told: no permission"
            return -1

    def _read_bytes(self, process: psutil.Process) -> int | None:
        try:
            return process.io_counters().read_bytes
        except (psutil.AccessDenied, OSError, AttributeError, ValueError, RuntimeError):
            if process.pid == self._process.pid:
                self.absent["read_mb_s"] = "not counted by this operating system, or no permission"
            return None

    def _major_faults(self, pid: int) -> int | None:
        """Return those of a process and of its children that ended, which psutil does not know on Linux."""
        fields = _text(f"{pid}/stat").rpartition(")")[2].split()  # from the third on: the second may hold anything
        if len(fields) < 12:
            self.absent["major_faults_s"] = "not counted by this operating system"
            return None
        return int(fields[9]) + int(fields[10])


def _text(name: str) -> str:
    """Read a file of /proc; empty where there is none."""
    try:
        return Path(psutil.PROCFS_PATH, name).read_text(errors="replace")
    except OSError:
        return ""

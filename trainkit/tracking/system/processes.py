"""What the operating system counts of this process, of its children and of the processors.

`Procfs` reads Linux' /proc; `Psutil` stands in where there is none. Both only count up: `load` takes differences.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PAGES_PAID = 1000
"""Counting the pages of children takes at most one part in so many of the time: it is 6 ms for each GB."""


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


class Source(Protocol):
    """Where counts come from."""

    absent: dict[str, str]
    """Fields of a reading that can never be had here, and why."""

    def processors(self) -> Processors | None:
        """How busy the processors were so far."""

    def processes(self) -> dict[tuple[int, float], Counted]:
        """This process first, then its children and theirs, by id and start: an id may be given out again."""

    def beside(self) -> set[int]:
        """Ids of the processes that have the parent of this one: the other ranks of a launcher."""

    def mhz(self, busiest: list[int]) -> float | None:
        """Mean clock of some processors."""

    def memory(self) -> tuple[float, float] | None:
        """Bytes of the machine's memory that are taken, and all."""

    def network(self) -> tuple[float, float] | None:
        """Bytes received and sent so far, over all interfaces."""

    def allowed(self) -> int:
        """How many processors this process may run on."""


class Procfs:
    """Linux. A reading opens two files for each child and three for each thread of this process."""

    def __init__(
        self,
        root: str | os.PathLike[str] = "/proc",
        cpus: str = "/sys/devices/system/cpu",
        pid: int = 0,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._root, self._cpus, self._now = str(root), cpus, now
        self._pid = pid or os.getpid()
        self.absent: dict[str, str] = {}
        self._tick = 1.0 / os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._private: dict[tuple[int, float], tuple[int, int]] = {}
        self._count_pages_at = -math.inf
        self._scans = not Path(self._root, str(self._pid), "task", str(self._pid), "children").exists()
        self._open: dict[str, int] = {}
        weakref.finalize(self, _close, self._open)
        self._mhz_of = self._find_mhz()

    def processors(self) -> Processors | None:
        """From the lines `cpu...` of /proc/stat."""
        text = self._kept("stat", 65536 + 160 * (os.cpu_count() or 1))
        lines = {}
        for line in (text or "").splitlines():
            if not line.startswith("cpu"):
                break
            name, *ticks = line.split()
            # Guest time is in user time already; waiting for a disk is no work; stolen time is work of a neighbour.
            counts = [int(n) for n in ticks[:8]]
            lines[name[3:]] = (float(sum(counts) - sum(counts[3:5])), float(sum(counts)))
        if "" not in lines or not lines[""][1]:
            self.absent["host_share"] = f"{self._root}/stat cannot be read, or counts nothing"
            return None
        machine = lines.pop("")
        each = {int(number): times for number, times in lines.items()}
        mine = self._affinity()
        # In a container the file may show its own processors alone, under other numbers than the affinity has.
        chosen = {n: t for n, t in each.items() if n in mine} if 0 < len(mine) < len(each) else each
        return Processors(machine, chosen or each)

    def processes(self) -> dict[tuple[int, float], Counted]:
        """From /proc/PID/stat, io and, now and then, smaps_rollup."""
        found: dict[tuple[int, float], Counted] = {}
        counts_pages = self._now() >= self._count_pages_at
        spent, private = 0.0, {}
        for pid in (self._pid, *self._children()):
            stat = _fields(self._text(f"{pid}/stat"))
            if stat is None:
                continue  # ended between
            key = (pid, float(stat[19]))
            rss = int(stat[21]) * self._page
            if pid != self._pid:
                if counts_pages or key not in self._private:
                    began = self._now()
                    private[key] = (self._pages_of(pid, rss), rss)
                    spent += self._now() - began
                else:
                    private[key] = self._private[key]
                own, then = private[key]
                # What a child takes more after it was forked is its own.
                rss = max(0, own + rss - then) if own >= 0 else -1
            found[key] = Counted(
                (int(stat[11]) + int(stat[12])) * self._tick,
                (int(stat[13]) + int(stat[14])) * self._tick,
                int(stat[9]) + int(stat[10]),
                self._read_bytes(pid),
                rss if rss >= 0 else None,
            )
        self._private = private
        if counts_pages:
            self._count_pages_at = self._now() + PAGES_PAID * spent
        return found

    def beside(self) -> set[int]:
        """Children of the parent."""
        stat = _fields(self._text(f"{self._pid}/stat"))
        return set(self._below(int(stat[1]), deep=False)) if stat else set()

    def mhz(self, busiest: list[int]) -> float | None:
        """From cpufreq of sysfs, or from /proc/cpuinfo where it is measured."""
        if self._mhz_of == "cpufreq":
            found = []
            for n in busiest:
                with contextlib.suppress(OSError, ValueError):
                    found.append(int(_read(f"{self._cpus}/cpu{n}/cpufreq/scaling_cur_freq")) / 1e3)
            return sum(found) / len(found) if found else None
        if self._mhz_of == "cpuinfo":
            lines = (self._text("cpuinfo", 1 << 20) or "").splitlines()
            clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
            found = [clocks[n] for n in busiest if n < len(clocks)]
            return sum(found) / len(found) if found else None
        return None

    def memory(self) -> tuple[float, float] | None:
        """From /proc/meminfo: what could be had without swapping is not taken."""
        found = {}
        for line in (self._kept("meminfo") or "").splitlines()[:8]:
            name, value = line.split()[:2]
            found[name] = 1024.0 * int(value)
        if {"MemTotal:", "MemAvailable:"} <= found.keys():
            return found["MemTotal:"] - found["MemAvailable:"], found["MemTotal:"]
        return None

    def network(self) -> tuple[float, float] | None:
        """From /proc/PID/net/dev."""
        lines = (self._text(f"{self._pid}/net/dev", 65536) or "").splitlines()[2:]
        counts = [line.partition(":")[2].split() for line in lines]
        counts = [c for c in counts if len(c) > 8]
        return (float(sum(int(c[0]) for c in counts)), float(sum(int(c[8]) for c in counts))) if counts else None

    def allowed(self) -> int:
        """The affinity, which a cpuset narrows; no more than the machine has."""
        there = self.processors()
        return len(there.allowed) if there else len(self._affinity()) or os.cpu_count() or 1

    def _affinity(self) -> set[int]:
        """Of the process: OpenMP may have pinned the thread that asks."""
        for line in (self._text(f"{self._pid}/status") or "").splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return _numbers(line.split(":")[1])
        return set()

    def _children(self) -> list[int]:
        return self._below(self._pid, deep=True)

    def _below(self, pid: int, deep: bool) -> list[int]:
        if self._scans:
            born: dict[int, list[int]] = {}
            for child, parent in self._all_parents():
                born.setdefault(parent, []).append(child)
            of = lambda parent: born.get(parent, [])  # noqa: E731
        else:
            of = self._born_of
        found = of(pid)[:]
        for one in found if deep else ():  # grows as it goes
            found.extend(of(one))
        return found

    def _born_of(self, pid: int) -> list[int]:
        """Children are listed with the thread that started them."""
        found: list[int] = []
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"{self._root}/{pid}/task"):
                found.extend(int(n) for n in (self._text(f"{pid}/task/{thread}/children") or "").split())
        return found

    def _all_parents(self) -> Iterator[tuple[int, int]]:
        for name in os.listdir(self._root):
            if name.isdigit() and (stat := _fields(self._text(f"{name}/stat"))) is not None:
                yield int(name), int(stat[1])

    def _read_bytes(self, pid: int) -> int | None:
        try:
            for line in _read(f"{self._root}/{pid}/io").splitlines():
                if line.startswith("read_bytes:"):
                    return int(line.split(":")[1])
            self.absent["read_mb_s"] = f"{self._root}/PID/io does not count bytes read from disk"
        except OSError as error:
            if pid == self._pid:
                self.absent["read_mb_s"] = f"{self._root}/{pid}/io: {error.strerror}"
        return None

    def _pages_of(self, pid: int, rss: int) -> int:
        """Bytes that only this child has: what it shares with its parent since the fork is counted there; -1: unknown.

        Counting pages of 4 KB takes the kernel 6 ms for each GB (measured).
        """
        try:
            text = _read(f"{self._root}/{pid}/smaps_rollup")
        except ProcessLookupError:
            return 0  # ended: it has no pages any more
        except OSError as error:
            if rss:
                self.absent["rss_gb"] = f"memory that workers share cannot be told: smaps_rollup: {error.strerror}"
                return -1
            return 0
        lines = [line.split() for line in text.splitlines()]
        return 1024 * sum(int(w[1]) for w in lines if w and w[0] in ("Private_Clean:", "Private_Dirty:"))

    def _find_mhz(self) -> str:
        if Path(self._cpus, "cpu0/cpufreq/scaling_cur_freq").exists():
            return "cpufreq"
        # Without the flag, as in most virtual machines, /proc/cpuinfo repeats the clock of the data sheet.
        if "aperfmperf" in (self._text("cpuinfo", 8192) or ""):
            return "cpuinfo"
        self.absent["cpu_mhz"] = "the processor's clock is not measured here (virtual machine)"
        return ""

    def _text(self, name: str, size: int = 8192) -> str | None:
        try:
            return _read(f"{self._root}/{name}", size)
        except OSError:
            return None

    def _kept(self, name: str, size: int = 8192) -> str | None:
        """The same of a file that is read again and again."""
        try:
            if name not in self._open:
                self._open[name] = os.open(f"{self._root}/{name}", os.O_RDONLY)
            return os.pread(self._open[name], size, 0).decode()
        except OSError:
            return None


class Psutil:
    """What psutil finds where there is no /proc."""

    def __init__(self) -> None:
        import psutil

        self._psutil, self._me = psutil, psutil.Process()
        self.absent = {
            "major_faults_s": "not counted by this operating system",
            "cpu_mhz": "the processor's clock is not measured here",
        }

    def processors(self) -> Processors | None:
        """From psutil.cpu_times."""
        each = [(sum(t) - t.idle, sum(t)) for t in self._psutil.cpu_times(percpu=True)]
        whole = (sum(busy for busy, _ in each), sum(total for _, total in each))
        return Processors(whole, dict(enumerate(each)))

    def processes(self) -> dict[tuple[int, float], Counted]:
        """From psutil.Process."""
        found = {}
        for process in (self._me, *self._me.children(recursive=True)):
            with contextlib.suppress(self._psutil.NoSuchProcess, self._psutil.ZombieProcess):
                found[process.pid, process.create_time()] = self._counted(process)
        return found

    def _counted(self, process: object) -> Counted:
        times = process.cpu_times()
        rss, read = process.memory_info().rss, None
        if process is not self._me:
            try:
                rss = process.memory_full_info().uss
            except self._psutil.AccessDenied:
                self.absent["rss_gb"], rss = "memory that workers share cannot be told: no permission", None
        try:
            read = process.io_counters().read_bytes
        except (AttributeError, self._psutil.AccessDenied):
            self.absent["read_mb_s"] = "not counted by this operating system, or no permission"
        reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return Counted(times.user + times.system, reaped, None, read, rss)

    def beside(self) -> set[int]:
        """Children of the parent."""
        parent = self._me.parent()
        return {p.pid for p in parent.children()} if parent else set()

    def mhz(self, busiest: list[int]) -> float | None:
        """Unknown."""
        return None

    def memory(self) -> tuple[float, float] | None:
        """From psutil.virtual_memory."""
        found = self._psutil.virtual_memory()
        return float(found.total - found.available), float(found.total)

    def network(self) -> tuple[float, float] | None:
        """From psutil.net_io_counters."""
        found = self._psutil.net_io_counters()
        return (float(found.bytes_recv), float(found.bytes_sent)) if found else None

    def allowed(self) -> int:
        """All."""
        return os.cpu_count() or 1


def _read(path: str, size: int = 8192) -> str:
    # Python's own file objects take five times as many calls.
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, size).decode(errors="replace")
    finally:
        os.close(file)


def _close(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)


def _fields(text: str | None) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on; the second, a name, may hold blanks and brackets."""
    fields = text.rpartition(")")[2].split() if text else []
    return fields if len(fields) > 36 else None


def _numbers(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found

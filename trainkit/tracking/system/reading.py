"""Hold the load of the machine at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment."""

    uuid: str
    used: float | None = None
    """Share of the time since the last reading in which it did anything, 0 to 1."""
    memory_gb: float | None = None
    clock_mhz: float | None = None
    throttled: tuple[str, ...] = ()
    """Why it runs below its clock: power_cap, thermal, hardware, ..."""
    others: int | None = None
    """Processes on it that are not of this run."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The load of the machine over the moments since the reading before; None where it cannot be read."""

    at: float
    """Seconds, by time.perf_counter."""
    own_cores: float | None = None
    """Processor cores that this process keeps busy."""
    worker_cores: float | None = None
    """And its children, the workers of its loader among them."""
    host_share: float | None = None
    """Share of the time of all processors this process may run on that anyone used, 0 to 1."""
    throttled_share: float | None = None
    """Share of the processor time wanted that the control group refused, its quota being used up, 0 to 1."""
    cpu_mhz: float | None = None
    rss_gb: float | None = None
    """Resident memory of this process and its children."""
    read_mb_s: float | None = None
    """Read from disk by them."""
    major_faults_s: float | None = None
    """Pages that had to be fetched from disk, a second."""
    gpus: tuple[Gpu, ...] = ()

"""Count the GPU hours and core hours that a run is charged for, all that it may use, and those that it has used."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from trainkit.tracking.system_load import affinity, quota

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

PREFIX = "cost/"
USED = f"{PREFIX}core_hours_used"
"""Metric: CPU time of the process and its children, whereas `cost/core_hours` is charged for idle cores too."""

Process = tuple[str, Sequence[int], float | None]
"""Host of a process, the processors that it may run on, and the quota of its container in processors."""


def allotted(runtime: Runtime) -> dict[str, float]:
    """Return the cost of an hour of the run: `cost/core_hours`, and `cost/gpu_hours` where it trains on GPUs.

    Every process calls this. A process has one GPU; cores that several processes share count once.
    """
    found = {f"{PREFIX}core_hours": cores(runtime.all_gather((socket.gethostname(), affinity(), quota())))}
    if runtime.device.type == "cuda":
        found[f"{PREFIX}gpu_hours"] = float(runtime.world)
    return found


def busy() -> float:
    """Return the CPU seconds of this process since it began, and of its children, those that have ended included."""
    seconds, process = 0.0, psutil.Process()
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile
            times = one.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def cores(processes: Sequence[Process]) -> float:
    """Count the cores that these processes may use together; a quota holds for all processes of its host."""
    hosts: dict[str, tuple[set[int], float]] = {}
    for host, own, most in processes:
        known, least = hosts.get(host, (set(), float("inf")))
        hosts[host] = known | set(own), least if most is None else min(least, most)
    return sum(min(float(len(known)), least) for known, least in hosts.values())

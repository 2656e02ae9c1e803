"""Describe the end of a run whose process ended without a message, from its journal, at its next start.

A process that the kernel kills, or whose machine disappears, cannot record anything; its status stays RUNNING. The next
start reports how far it came, how much memory it used, and what to do.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil

from trainkit.distributed import rank_failures
from trainkit.errors import UserError
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder

_FULL = 85.0
"""Per cent of a machine's memory in use, when it was last looked at, from which on it is likely to have run out."""


def cause_of_death(folder: RunFolder, group: Path = Path("/sys/fs/cgroup/memory.events")) -> str:
    """Describe how the last process of an interrupted run ended; empty if it recorded that itself.

    `group` is where Linux counts processes that it killed in a container for lack of memory.
    """
    info = folder.info()
    if info.status != "RUNNING":
        return ""
    if left := rank_failures.left(folder.path):  # it hung, say, and nobody was left to close it
        return left
    try:
        history = journal.read(folder.journal)
    except (OSError, UserError):
        return ""
    points = [point for metric in history.metrics.values() for point in metric]
    last = max((point.t for point in points), default=int(1000 * info.started)) / 1000
    steps = [p.step for name, metric in history.metrics.items() if not name.startswith("system/") for p in metric]
    said = f"process {info.pid} on {info.host} ended without a message, at step {max(steps, default=0)} or later"
    if info.host == socket.gethostname() and psutil.boot_time() > last:
        return f"{said}; the machine was restarted since"
    held = [p.value for p in history.metrics.get("system/rss_gb", [])]
    full = [p.value for p in history.metrics.get("system/system_memory_usage_percentage", [])]
    seen = [f"it used up to {max(held):.3g} GB"] if held else []
    seen += [f"{max(full):.0f} % of the machine's memory was in use"] if full else []
    killed = _killed(group)
    if killed:
        seen.append(f"the kernel has killed {killed} processes of this container because it was out of memory")
    likely = "likely" if killed or max(full, default=0.0) >= _FULL else "perhaps"
    ago = time.strftime("%Y-%m-%d %H:%M", time.localtime(last))
    return (
        f"{said}, last seen at {ago}: killed (signal 9), {likely} out of memory"
        f"{' (' + ', '.join(seen) + ')' if seen else ''}; a smaller train.micro_batch, fewer loader.workers or smaller "
        "evaluation batches need less"
    )


def _killed(group: Path) -> int:
    try:
        lines = [line.split() for line in group.read_text().splitlines()]
        return next(int(line[1]) for line in lines if line[0] == "oom_kill")
    except (OSError, ValueError, IndexError, StopIteration):
        return 0

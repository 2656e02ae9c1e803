"""Describe the end of a run whose process ended without a message, from its journal, at its next start.

A process that the kernel kills, or whose machine disappears, cannot record anything; its status stays RUNNING. The next
start reports how far it came, how much memory it used, and what to do.
"""

from __future__ import annotations

import time

from trainkit.distributed import rank_failures
from trainkit.errors import UserError
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder


def cause_of_death(folder: RunFolder) -> str:
    """Describe how the last process of an interrupted run ended; empty if it recorded that itself."""
    info = folder.info()
    if info.status != "RUNNING":
        return ""
    if left := rank_failures.left(folder.path):  # it hung, say, and nobody was left to close it
        return left
    try:
        metrics = journal.read(folder.journal).metrics
    except (OSError, UserError):
        return ""
    last = max((point.t for points in metrics.values() for point in points), default=int(1000 * info.started)) / 1000
    steps = [points[-1].step for name, points in metrics.items() if not name.startswith("system/")]
    used = [point.value for point in metrics.get("system/rss_gb", [])]
    full = [point.value for point in metrics.get("system/system_memory_usage_percentage", [])]
    seen = [f"it used up to {max(used):.3g} GB"] if used else []
    seen += [f"up to {max(full):.0f} % of the machine's memory was in use"] if full else []
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last))
    return (
        f"process {info.pid} on {info.host} ended without a message, at step {max(steps, default=0)} or later, last "
        f"seen at {when}: killed (signal 9), perhaps out of memory, or the machine was restarted"
        f"{' (' + ', '.join(seen) + ')' if seen else ''}; a smaller train.micro_batch, fewer loader.workers or smaller "
        "evaluation batches need less memory"
    )

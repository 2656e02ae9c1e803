"""The load of the machine (processor, memory, disk, network, GPU) while a run goes on."""

from __future__ import annotations

import logging
import re
import threading

from trainkit.journal import Journal
from trainkit.store import Store

_log = logging.getLogger("trainkit")


class Sampler(threading.Thread):
    """Reads the load of the machine and writes it into the journal under `system/`, counted by its own step."""

    def __init__(self, store: Store, run_id: str, journal: Journal, every: float):
        super().__init__(name="trainkit-sampler", daemon=True)
        # Only its readers are used: its own thread logs behind the journal's back and ends at the first outage.
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # It tells every user without a GPU that there is none.
        logging.getLogger("mlflow.system_metrics.system_metrics_monitor").setLevel(logging.WARNING)
        self._monitor = SystemMetricsMonitor(run_id, tracking_uri=store.uri)
        self._journal, self._every = journal, every
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample until stopped; the first sample comes within a second."""
        import psutil

        # The first reading of the processor's load in a thread is always 0: it counts from the one before.
        psutil.cpu_percent()
        step = self._journal.highest("system/") + 1
        pause = min(1.0, self._every)
        while not self._stop_asked.wait(pause):
            pause = self._every
            try:
                self._monitor.collect_metrics()
                found = self._monitor.aggregate_metrics()
                for part in self._monitor.monitors:
                    part.clear_metrics()
                values = {re.sub(r"[^a-z0-9_./-]", "_", f"system/{key}".lower()): float(v) for key, v in found.items()}
                self._journal.append(step, values)
                step += 1
            except Exception as error:
                _log.warning("the load of the machine cannot be read any more: %s", error)
                return

    def stop(self) -> None:
        """End sampling."""
        self._stop_asked.set()
        self.join(timeout=2.0)

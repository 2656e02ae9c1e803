"""Sample the load of the machine (processor, memory, disk, network, GPU) while a run goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from trainkit.tracking.journal import Journal

if TYPE_CHECKING:
    from trainkit.tracking.system.load import Reading

KEPT = 720
"""Readings that are kept: two hours of one every 10 seconds."""

_log = logging.getLogger("trainkit")


class Sampler(threading.Thread):
    """Reads the load of the machine and writes it into the journal under `system/`, counted by its own step.

    What cannot be read is written once, with its reason, as an event `load_absent`. `disk` is a folder on the disk
    whose space is told.
    """

    def __init__(self, journal: Journal, every: float, disk: str | os.PathLike[str] = os.sep):
        super().__init__(name="trainkit-sampler", daemon=True)
        self._journal, self._every, self._disk = journal, every, disk
        self._readings: deque[Reading] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._absent: dict[str, str] = {}
        self._told: set[str] = set()
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample until stopped; the first sample comes within a second."""
        from trainkit.tracking.system.load import Load

        step = self._journal.highest("system/") + 1
        pause = min(1.0, self._every)
        try:
            load = Load(disk=self._disk)
            while not self._stop_asked.wait(pause):
                pause = self._every
                reading = load.read()
                with self._lock:
                    self._readings.append(reading)
                self._journal.append(step, load.metrics(reading))
                step += 1
                self._tell(load.absent)
        except Exception as error:
            if self._stop_asked.is_set():  # the journal may be closed by now
                return
            _log.warning("the load of the machine cannot be read any more: %s", error)

    def readings(self, since: float = 0.0) -> tuple[Reading, ...]:
        """Return the readings after a moment of `time.perf_counter`, oldest first, as far as they are kept."""
        with self._lock:
            return tuple(reading for reading in self._readings if reading.at > since)

    def absent(self) -> dict[str, str]:
        """Return fields of a reading that cannot be read, and why."""
        with self._lock:
            return dict(self._absent)

    def stop(self) -> None:
        """End sampling."""
        self._stop_asked.set()
        self.join(timeout=2.0)

    def _tell(self, absent: dict[str, str]) -> None:
        new = {name: why for name, why in absent.items() if name not in self._told}
        self._told |= new.keys()
        with self._lock:
            self._absent = dict(absent)
        if new:
            self._journal.event(self._journal.last_step, "load_absent", new)

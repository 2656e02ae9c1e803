"""Time the phases of a step on the device, with CUDA events.

On a GPU the main thread only queues work, so its clock cannot tell how long the device took for it. An event is put
into the device's queue wherever the phase changes; the time between two of them is read a few steps later, when the
device has passed both. Nothing here ever waits for the device.

A gap between two kernels of the forward pass counts as `forward`. `idle` lies between the end of one batch's work and
the beginning of the next one's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from trainkit.speed.clock import PHASES, STEP, Steps, Timeline

KEPT = 1024
"""Steps of which single times are kept."""
LATE = 8
"""Steps that are left alone before their events are asked for: by then most have passed, and few are asked in vain."""
LOST = 256
"""Steps that may wait to be read; of more, which no queue of work holds, the oldest are given up."""
_COLUMN = {phase: number for number, phase in enumerate(PHASES)}
_IDLE = STEP[0]


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self, stream: Any, /) -> None:
        """Queue the event behind all work of a stream."""

    def query(self) -> bool:
        """Test whether the device has passed the event."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds from this event to a later one."""
        ...


def of(device: torch.device) -> CudaTimeline | None:
    """Return the timeline of a CUDA device; None for a CPU, which the clock times, and for Apple's GPUs."""
    return CudaTimeline(device) if device.type == "cuda" else None


class CudaTimeline(Timeline):
    """Times of a CUDA device by phase, of each step.

    Work is expected in the stream that is current when this is made. A step records five events and reads five.
    """

    def __init__(self, device: torch.device, event: Callable[[], Event] | None = None, stream: Any = None):
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._stream = torch.cuda.current_stream(device) if event is None else stream
        self._pool: list[Event] = []
        self._phase = ""
        self._marks: list[tuple[int, Event]] = []
        self._waiting: deque[tuple[int, list[tuple[int, Event]], Event]] = deque()
        self._steps = 0
        self._rows: deque[tuple[int, list[float]]] = deque(maxlen=KEPT)
        self._sum, self._counted = [0.0] * len(PHASES), 0

    def mark(self, phase: str) -> None:
        """Begin `phase` in the queue of the device."""
        if phase != self._phase:
            self._phase = phase
            event = self._pool.pop() if self._pool else self._event()
            event.record(self._stream)
            self._marks.append((_COLUMN[phase], event))

    def step(self) -> None:
        """End a step; the device is idle until the next one has work."""
        self._steps += 1
        marks = self._marks
        self._marks, self._phase = [], ""
        self.mark(_IDLE)
        self._waiting.append((self._steps, marks, self._marks[0][1]))
        if len(self._waiting) > LATE:
            self._read(1)
            if len(self._waiting) > LOST:
                self._give_up()

    def window(self) -> dict[str, float]:
        """Return mean milliseconds of the steps that the device has ended since the last call, by metric name.

        Empty when it has ended none. Evaluations and whatever else lies between steps are not counted.
        """
        self._read(len(self._waiting))
        if not self._counted:
            return {}
        mean = [spent / self._counted for spent in self._sum]
        self._sum, self._counted = [0.0] * len(PHASES), 0
        return _named(mean[: len(STEP)])

    def recent(self, many: int = KEPT) -> Steps | None:
        """Return the device's times of the last `many` steps, as far as they are kept; None when there are none.

        Waiting for data is its idle time. Numbers are those of the clock; steps that were given up are missing.
        """
        self._read(len(self._waiting))
        rows = [self._rows[k] for k in range(max(0, len(self._rows) - many), len(self._rows))]
        if not rows:
            return None
        spent = np.array([row for _, row in rows]) / 1e3
        return Steps(np.array([number for number, _ in rows]), spent[:, : len(STEP)], spent[:, len(STEP) :])

    def _read(self, most: int) -> None:
        for _ in range(most):
            number, marks, end = self._waiting[0]
            if not end.query():
                return
            self._waiting.popleft()
            spent = [0.0] * len(PHASES)
            for (column, event), (_, after) in zip(marks, [*marks[1:], (0, end)], strict=True):
                spent[column] += event.elapsed_time(after)
            self._pool += (event for _, event in marks)
            self._rows.append((number, spent))
            self._sum = [a + b for a, b in zip(self._sum, spent, strict=True)]
            self._counted += 1

    def _give_up(self) -> None:
        # Events are put down again at once: the device passes the old mark and then the new one, and only that counts.
        _, marks, _ = self._waiting.popleft()
        self._pool += (event for _, event in marks)


def of_host(steps: Steps) -> dict[str, float]:
    """Return the metrics of `CudaTimeline.window` for a CPU, from the clock's times of the main thread.

    There is no idle time, since workers may keep the same cores busy; nor is it in `device/step_ms`.
    """
    if not len(steps):
        return {}
    named = _named((1e3 * steps.phases.mean(0)).tolist())
    named["device/step_ms"] -= named.pop("device/idle_ms")
    return named


def _named(step: list[float]) -> dict[str, float]:
    named = {f"device/{'idle' if phase == _IDLE else phase}_ms": ms for phase, ms in zip(STEP, step, strict=True)}
    return {**named, "device/step_ms": sum(step)}

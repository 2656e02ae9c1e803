"""Trace a few steps with torch.profiler, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from trainkit.config.schema import Profile
from trainkit.speed.clock import Clock

WARM = 3
"""Steps for which the profiler runs before it records: its first calls are slow."""
NEVER = sys.maxsize


class Trace:
    """Traces the steps that a recipe's `log.profile` names. They are slower than others, and so is the next one.

    Call `step` after every step whose number is at least `due`. After an error the reason is in `absent`, and training
    continues.
    """

    def __init__(
        self,
        profile: Profile,
        device: torch.device | None = None,
        clock: Clock | None = None,
        folder: Path | None = None,
    ):
        """Operations of the CPU and of `device` are traced, and the phases of `clock` where there is one.

        The file goes into `folder`, else into a temporary one that lasts as long as this does.
        """
        self.file: Path | None = None
        """The trace, a gzipped JSON file, once it is written."""
        self.absent = ""
        """Why there is none, once that is known."""
        self.slowed: tuple[int, int] | None = None
        """The first and the last step, by their numbers from 1, of those that ran under the tracer so far."""
        self.due = max(0, profile.at - 1 - WARM)
        """`step` has nothing to do before the step with this number; `NEVER` once all is done."""
        self._wanted, self._device, self._clock = profile, device or torch.device("cpu"), clock
        self._own = tempfile.TemporaryDirectory(prefix="trainkit-trace-") if folder is None else None
        self._folder = Path(self._own.name) if self._own else Path(folder or "")
        self._profiler: profile | None = None
        self._ranges: _Ranges | None = None
        self._first = 0

    def step(self, step: int) -> None:
        """End the step with this number; 0 before the first one."""
        if step < self.due:
            return
        if self._clock is not None:
            self._clock.to("log")
        try:
            if self._profiler is None:
                self._begin(step)
            else:
                self._continue(self._profiler, step)
        except Exception as error:  # a profiler error must not end the training
            self._give_up(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the training: a trace that has begun is written as far as it came."""
        if self.due == NEVER:
            return
        if self._profiler is None:
            return self._give_up(f"training ended before step {self._wanted.at}")
        try:
            self._quiet()
            self._stop()
        except Exception as error:
            return self._give_up(f"{type(error).__name__}: {error}")
        if self.file is None:
            return self._give_up(f"training ended before step {self._first}")
        self._end()

    def _begin(self, step: int) -> None:
        last = self._wanted.at + self._wanted.steps - 1
        if step >= last:
            return self._give_up(f"training resumed after step {step}, past the last step to trace")
        next = step + 1
        self._first = max(self._wanted.at, next)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a trace from the first step on: it has no warm-up
            actions = schedule(wait=0, warmup=self._first - next, active=last - self._first + 1, repeat=1)
        # Without a GPU the profiler's library says on stderr that it found none; it is silenced before it loads.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU]
        if self._device.type != "cpu" and hasattr(ProfilerActivity, self._device.type.upper()):
            activities.append(getattr(ProfilerActivity, self._device.type.upper()))
        # The profiler counts from 0, asks for the action at 0 when it is made, and names steps by its count.
        self._profiler = profile(
            activities=activities, schedule=lambda count: actions(max(0, count - next)), on_trace_ready=self._write
        )
        self._profiler.step_num = next
        self.slowed, self.due, self._left = (next, next), 0, last - step
        self._profiler.start()
        if self._clock is not None:
            self._ranges = _Ranges(self._clock)

    def _continue(self, profiler: profile, step: int) -> None:
        # Steps are counted here: after a value that is not finite their numbers go back.
        first, last = self.slowed or (step, step)
        self.slowed = min(first, step), max(last, step)
        self._left -= 1
        self._quiet()
        profiler.step()
        if not self._left:
            self._stop()
            self._end()

    def _write(self, profiler: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        last = self.slowed[1] if self.slowed else self._first
        file = self._folder / f"updates_{self._first}_{last}.json.gz"
        try:
            profiler.export_chrome_trace(str(file))
        except Exception:
            file.unlink(missing_ok=True)
            raise
        self.file = file

    def _quiet(self) -> None:
        """End the range of the running phase: the profiler's own range of a step ends now."""
        if self._ranges is not None:
            self._ranges.end()

    def _end(self) -> None:
        self.due, self._profiler = NEVER, None
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None

    def _give_up(self, why: str) -> None:
        self.absent = why
        if self._profiler is not None:
            with contextlib.suppress(Exception):
                self._quiet()
                self._profiler.on_trace_ready = None
                self._stop()
        self._end()

    def _stop(self) -> None:
        # Once: torch 2.11 dies of a second time.
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()


class _Ranges:
    """Puts the phases of a clock into the trace. Until it is closed it stands before the clock's `to`."""

    def __init__(self, clock: Clock):
        self._clock, self._to = clock, clock.to
        self._open: record_function | None = None
        clock.to = self.to  # pyright: ignore[reportAttributeAccessIssue]  in front of the method, for this clock alone

    def to(self, phase: str) -> None:
        self.end()
        self._to(phase)
        self._open = record_function(phase)
        self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def close(self) -> None:
        self.end()
        del self._clock.to  # its own is behind it

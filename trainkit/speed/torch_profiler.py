"""Trace a few steps with torch.profiler, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainkit.config.schema import Profile
from trainkit.speed.clock import Clock

WARM = 3
"""Steps for which the profiler runs before it records: its first calls are slow."""
NEVER = sys.maxsize


class Trace:
    """Traces the steps that a recipe's `log.profile` names. They are slower than others, and so is the next one.

    Call `step` after every step whose number is at least `due`. After an error the reason is in `absent`, and training
    continues. The file goes into `folder`, else into a temporary one that lasts as long as this does.
    """

    def __init__(self, wanted: Profile, device: torch.device, clock: Clock, folder: Path | None = None):
        self.file: Path | None = None
        """The trace, a gzipped JSON file, once it is written."""
        self.absent = ""
        """Why there is none, once that is known."""
        self.slowed: tuple[int, int] | None = None
        """The first and the last step, by their numbers from 1, of those that ran under the tracer so far."""
        self.due = max(0, wanted.at - 1 - WARM)
        """`step` has nothing to do before the step with this number; `NEVER` once all is done."""
        self._wanted, self._device, self._clock = wanted, device, clock
        self._own = tempfile.TemporaryDirectory(prefix="trainkit-trace-") if folder is None else None
        self._folder = Path(self._own.name) if self._own else Path(folder or "")
        self._profiler: profile | None = None
        self._first, self._left = wanted.at, 0

    def step(self, step: int) -> None:
        """End the step with this number; 0 before the first one."""
        if step < self.due:
            return
        self._clock.to("log")
        try:
            if self._profiler is None:
                self._begin(step)
            else:
                self._continue(self._profiler, step)
        except Exception as error:  # a profiler error must not end the training
            self.absent = f"{type(error).__name__}: {error}"
            if self._profiler is not None:
                self._profiler.on_trace_ready = None
            self._end(self.absent)

    def close(self) -> None:
        """End the training: a trace that has begun is written as far as it came."""
        if self.due != NEVER:
            self._end(f"training ended before step {self._first}")

    def _begin(self, step: int) -> None:
        last, following = self._wanted.at + self._wanted.steps - 1, step + 1
        if step >= last:
            return self._end(f"training resumed after step {step}, past the last step to trace")
        self._first = max(self._wanted.at, following)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a trace from the first step on: it has no warm-up
            actions = schedule(wait=0, warmup=self._first - following, active=last - self._first + 1, repeat=1)
        # Without a GPU the profiler's library says on stderr that it found none; it is silenced before it loads.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        # The profiler counts from 0, asks for the action at 0 when it is made, and names steps by its count.
        self._profiler = profile(
            activities=activities,
            schedule=lambda count: actions(max(0, count - following)),
            on_trace_ready=self._write,
        )
        self._profiler.step_num = following
        self.slowed, self.due, self._left = (following, following), 0, last - step
        self._profiler.start()

    def _continue(self, profiler: profile, step: int) -> None:
        # Steps are counted here: after a value that is not finite their numbers go back.
        first, last = self.slowed or (step, step)
        self.slowed = min(first, step), max(last, step)
        self._left -= 1
        profiler.step()
        if not self._left:
            self._end("nothing was traced")

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

    def _end(self, why: str) -> None:
        """Stop the profiler, which writes what it recorded; `why` is the reason if that is nothing."""
        self.due = NEVER
        profiler, self._profiler = self._profiler, None  # once: torch 2.11 dies of a second time
        if profiler is not None:
            try:
                profiler.stop()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        if self.file is None:
            self.absent = self.absent or why

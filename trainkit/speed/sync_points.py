"""Find the lines that make the host wait for a GPU, as CUDA's debug mode reports them."""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainkit.speed.clock import STEP, Clock
from trainkit.speed.evidence import Waits

_PACKAGE = Path(__file__).resolve().parents[1]
SKIPPED = {str(_PACKAGE / name) for name in ("speed/sync_points.py", "diagnostics/sync_audit.py")}
"""Source files that observe, and are never named."""
_FOREIGN = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib")} | {"<"})
_CUDA_SAYS = "synchronizing CUDA operation"


@dataclass(frozen=True)
class Place:
    """A line at which the host waits."""

    where: str
    """`file:line`, the file as seen from the working directory where it lies below."""
    code: str
    """The source line."""
    phase: str
    """Phase of the main thread: one of `clock.PHASES`, or `trial` for the first batch of an evaluation."""


class Log:
    """Counts waits by place: `seen` is called where one happens, in the thread that made the log.

    `phase` says what the main thread is doing; `roots` are folders of plug-ins.
    """

    def __init__(self, roots: Sequence[str] = (), phase: Callable[[], str] = lambda: ""):
        self.counts: Counter[Place] = Counter()
        self.phase = phase
        self._roots = (f"{_PACKAGE}/", *roots)
        self._thread = threading.get_ident()

    def is_own(self, file: str) -> bool:
        """Return whether a source file belongs to trainkit or a plug-in."""
        return file not in SKIPPED and (file.startswith(self._roots) or not file.startswith(_FOREIGN))

    def seen(self) -> None:
        """Count a wait, at the innermost line of trainkit or a plug-in that is being executed."""
        if threading.get_ident() != self._thread:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self.is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            place = Place("(outside the training code)", "", self.phase())
        else:
            file, line = frame.f_code.co_filename, frame.f_lineno
            place = Place(f"{_short(file)}:{line}", linecache.getline(file, line).strip()[:80], self.phase())
        self.counts[place] += 1


def _short(file: str) -> str:
    for base in (Path.cwd(), _PACKAGE.parent):
        with contextlib.suppress(ValueError):
            return str(Path(file).relative_to(base))
    return file


@contextlib.contextmanager
def cuda_waits(seen: Callable[[], None]) -> Iterator[None]:
    """Call `seen` at every operation for which CUDA reports that the host waits; other warnings are passed on."""
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

    def hear(message: Any, *rest: Any, **more: Any) -> None:
        waits = _CUDA_SAYS in str(message)
        if not waits or getattr(show, "hears_cuda", False):
            show(message, *rest, **more)  # an audited run counts a few steps itself
        if waits:
            seen()

    hear.hears_cuda = True
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_CUDA_SAYS}.*")
        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Probe:
    """Counts for a few steps of a real run how often the host waits for a GPU: `start(step)`, then `stop(step)`."""

    def __init__(self, device: torch.device, clock: Clock):
        self._cuda, self._clock = device.type == "cuda", clock
        self._stack = contextlib.ExitStack()
        self._log: Log | None = None
        self._from = 0

    def start(self, step: int = 0) -> None:
        """Begin, on a device the host waits for. Waits of log lines and evaluations are not counted."""
        if self._cuda:
            self._log, self._from = Log(phase=lambda: self._clock.phase), step
            self._stack.enter_context(cuda_waits(self._log.seen))

    def stop(self, step: int = 1) -> Waits | None:
        """End after this many steps; None where nothing was counted."""
        self._stack.close()
        if self._log is None:
            return None
        log, self._log = self._log, None
        by_place: Counter[str] = Counter()
        for place, count in log.counts.items():
            if place.phase in STEP:
                by_place[place.where] += count
        places = tuple(place for place, _ in by_place.most_common())
        return Waits(per_step=sum(by_place.values()) / max(1, step - self._from), places=places)

"""Find the lines that make the host wait for the device."""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from trainkit.speed.clock import STEP, Clock
from trainkit.speed.evidence import Waits

_PACKAGE = Path(__file__).resolve().parents[1]


_OWN = {
    str(_PACKAGE / name)
    for name in ("speed/sync_points.py", "diagnostics/sync_audit.py", "diagnostics/sync_emulation.py")
}


_FOREIGN = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib")} | {"<"})


_CORE = tuple(
    f"{_PACKAGE / name}/"
    for name in (
        "training",
        "checkpoint",
        "distributed",
        "environment",
        "experiments",
        "tracking",
        "inference",
        "config",
    )
)


_CUDA_SAYS = "synchronizing CUDA operation"


@dataclass(frozen=True)
class Place:
    """A line at which the host waits."""

    where: str
    """`file:line`, the file as seen from the working directory where it lies below."""
    code: str
    """The call there, as in the source."""
    what: str
    """Kind of call, where known: `.item()`, `float(tensor)`, `nonzero`."""
    phase: str
    """Phase of the main thread: one of `clock.PHASES`, or `trial` for the first batch of an evaluation."""


@dataclass
class Tally:
    """How often a line waited, and how long."""

    count: int = 0
    seconds: float = 0.0
    timed: int = 0
    """How many of them were timed."""


class Log:
    """Counts waits by place: `seen` is called where one happens, in the thread that made the log.

    `phase` says what the main thread is doing.
    """

    def __init__(self, roots: Sequence[str] = (), phase: Callable[[], str] = lambda: ""):
        self.tallies: dict[Place, Tally] = {}
        self.phase = phase
        self._roots = (f"{_PACKAGE}/", *roots)
        self._thread = threading.get_ident()

    def is_own(self, file: str) -> bool:
        """Return whether a source file belongs to trainkit or a plug-in."""
        return file not in _OWN and (file.startswith(self._roots) or not file.startswith(_FOREIGN))

    def asks(self, file: str) -> bool:
        """Return whether code of a file may see a simulated GPU: not the training loop, which needs its driver."""
        return self.is_own(file) and not file.startswith(_CORE)

    def seen(self, what: str, seconds: float | None) -> None:
        """Count a waiting call below this frame."""
        if threading.get_ident() != self._thread:
            return
        place = self._place(what)
        tally = self.tallies.setdefault(place, Tally())
        tally.count += 1
        if seconds is not None:
            tally.seconds += seconds
            tally.timed += 1

    def _place(self, what: str) -> Place:
        """Return the innermost line of trainkit or a plug-in that is being executed."""
        frame = sys._getframe(2)
        while frame is not None and not self.is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return Place("(outside the training code)", "", what, self.phase())
        return Place(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}", _code(frame), what, self.phase())


def _short(file: str) -> str:
    for base in (Path.cwd(), _PACKAGE.parent):
        with contextlib.suppress(ValueError):
            return str(Path(file).relative_to(base))
    return file


def _code(frame: FrameType) -> str:
    """The expression that a frame is at, in one line."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Named(TorchFunctionMode):
    """Knows which function of torch is being called, and since when."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[Any, float] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.call = self.call, (func, time.perf_counter())
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.call = before


@contextlib.contextmanager
def cuda_waits(seen: Callable[[str, float | None], None], names: bool = False) -> Iterator[None]:
    """Have CUDA report every operation for which the host waits; other warnings are passed on.

    With `names` the calls are named and timed too; do not use it where torch compiles. A wait in a backward pass
    is then reported without a time, at its end.
    """
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning
    named = _Named()

    def hear(message: Any, *rest: Any, **more: Any) -> None:
        if _CUDA_SAYS not in str(message) or getattr(show, "hears_cuda", False):
            show(message, *rest, **more)  # an audited run counts a few steps itself
        if _CUDA_SAYS not in str(message):
            return
        if named.call is None or named.call[0] is torch.Tensor.backward:
            seen("", None)
        else:  # torch hands on its warnings when a call ends, so it has been waited for by now
            seen(called(named.call[0], ""), time.perf_counter() - named.call[1])

    hear.hears_cuda = True
    with warnings.catch_warnings(), named if names else contextlib.nullcontext():
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
        for place, tally in log.tallies.items():
            if place.phase in STEP:
                by_place[place.where] += tally.count
        places = tuple(place for place, _ in by_place.most_common())
        return Waits(per_step=sum(by_place.values()) / max(1, step - self._from), places=places)


_T = Tensor


_NAMES = {
    _T.item: ".item()",
    _T.tolist: ".tolist()",
    _T.numpy: ".numpy()",
    _T.__array__: ".numpy()",
    _T.cpu: ".cpu()",
    _T.to: ".to()",
    _T.__bool__: "bool(tensor)",
    _T.__int__: "int(tensor)",
    _T.__index__: "int(tensor)",
    _T.__float__: "float(tensor)",
    _T.__repr__: "print(tensor)",
    _T.__format__: "print(tensor)",
    _T.__contains__: "in tensor",
    _T.__getitem__: "indexing",
    _T.__setitem__: "indexing",
}


def called(func: Callable[..., Any], what: str) -> str:
    """A call of a function of torch by the name it has in source code; `what` where it has none."""
    if func in (_T.__getitem__, _T.__setitem__):
        return "indexing with .item()" if what == ".item()" else "indexing with values of the device"
    return _NAMES.get(func) or (resolve_name(func) or what).replace("torch.Tensor.", ".")

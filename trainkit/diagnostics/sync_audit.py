"""Where the processor waits for the device.

On a GPU the main thread hands over work and runs ahead; whatever needs a value of the device on the host (`.item()`,
`float(tensor)`, a boolean mask as an index) makes it wait until the device has done all that it was given, and then the
device waits for the next piece of work. CUDA itself says where that happens (`torch.cuda.set_sync_debug_mode`); on a
CPU, where nothing waits, `Following` finds the calls that would.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainkit.config import loader
from trainkit.config.run_request import Order, load
from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.diagnostics.sync_emulation import Following, called
from trainkit.distributed.runtime import Machine
from trainkit.errors import UserError
from trainkit.speed.clock import STEP
from trainkit.speed.evidence import Waits
from trainkit.tracking.store import RunFolder, Store
from trainkit.tracking.tracker import Silent
from trainkit.training.dependencies import gather
from trainkit.training.run_logger import Witness

WARM_UP = 3
"""Updates before those that are watched."""
_PACKAGE = Path(__file__).resolve().parents[1]
_OWN = {str(_PACKAGE / "diagnostics" / name) for name in ("sync_audit.py", "sync_emulation.py")}
_FOREIGN = tuple({f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib")} | {"<"})
_LOOP = str(_PACKAGE / "training" / "trainer.py")
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
    """A line that waits."""

    where: str
    """`file:line`, the file as seen from the working directory where it lies below."""
    code: str
    """The call there, as in the source."""
    what: str
    """What kind of call it is, as far as that is known: `.item()`, `float(tensor)`, `nonzero`."""
    phase: str
    """What the main thread was doing: a phase of `clock.PHASES`, or `trial` for the first batch of an evaluation."""


@dataclass
class Tally:
    """How often a line waited, and how long."""

    count: int = 0
    seconds: float = 0.0
    timed: int = 0
    """How many of them were timed."""


class Log:
    """Counts waits by place: `seen` is called where one happens, in the thread that made the log."""

    def __init__(self, roots: Sequence[str] = ()):
        self.tallies: dict[Place, Tally] = {}
        self.on = True
        self._roots = (f"{_PACKAGE}/", *roots)
        self._thread = threading.get_ident()

    def is_own(self, file: str) -> bool:
        """Whether a source file belongs to trainkit or a plug-in."""
        return file not in _OWN and (file.startswith(self._roots) or not file.startswith(_FOREIGN))

    def asks(self, file: str) -> bool:
        """Whether code of a file may be told that it has a GPU: not that of the training itself, which would want its driver."""
        return self.is_own(file) and not file.startswith(_CORE)

    def seen(self, what: str, seconds: float | None) -> None:
        """A call that waits is being made somewhere below this frame."""
        if not self.on or threading.get_ident() != self._thread:
            return
        place = self._place(sys._getframe(1), what)
        tally = self.tallies.setdefault(place, Tally())
        tally.count += 1
        if seconds is not None:
            tally.seconds += seconds
            tally.timed += 1

    def _place(self, frame: FrameType | None, what: str) -> Place:
        user, phase = None, ""
        while frame is not None:
            file = frame.f_code.co_filename
            if user is None and self.is_own(file):
                user = frame
            if file == _LOOP:
                if frame.f_code.co_name == "_trial":
                    phase = "trial"
                elif frame.f_code.co_name == "train":
                    phase = phase or frame.f_locals["clock"].phase
                    break
            frame = frame.f_back
        if user is None:
            return Place("(no line of the training)", "", what, phase)
        return Place(f"{_short(user.f_code.co_filename)}:{user.f_lineno}", _code(user), what, phase)


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
    """CUDA tells of every operation for which the host waits; other warnings go where they went before.

    With `names` the calls are named and timed too, which must not be where torch compiles. What waits in a backward
    pass is then told of without a time, at its end.
    """
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning
    named = _Named()

    def hear(message: Any, *rest: Any, **more: Any) -> None:
        if _CUDA_SAYS not in str(message) or getattr(show, "hears_cuda", False):
            show(message, *rest, **more)  # a run that is audited counts a few updates itself
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
    """Counts for a few updates of a real run how often the host waits for a GPU: `start(step)`, then `stop(step)`."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._stack = contextlib.ExitStack()
        self._log: Log | None = None
        self._from = 0

    def start(self, step: int = 0) -> None:
        """Begin, where the device is one that is waited for. Waits of log lines and evaluations are not counted."""
        if self._cuda:
            self._log, self._from = Log(), step
            self._stack.enter_context(cuda_waits(self._log.seen))

    def stop(self, step: int = 1) -> Waits | None:
        """End after so many updates; None where nothing was counted."""
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


@dataclass(frozen=True)
class Audit:
    """What was found in a short training."""

    recipe: str
    device: str
    steps: int
    """Updates that were watched."""
    tallies: Mapping[Place, Tally]
    notes: tuple[str, ...] = ()

    def inside(self) -> dict[Place, Tally]:
        """Waits inside of steps."""
        return {place: tally for place, tally in self.tallies.items() if place.phase in STEP}

    def per_step(self) -> float:
        """How often a step waits, on average."""
        return sum(tally.count for tally in self.inside().values()) / self.steps


def audit(order: Order, steps: int = 10) -> Audit:
    """Train so many updates of a recipe, after a few to warm up, and note where the processor waits.

    Nothing is written to the store. Log lines come with the last update; evaluations are seen by the first batch that
    every training scores of each before it begins. Raises UserError as a training would.
    """
    if steps < 1:
        raise UserError("--steps", f"{steps}", "1 or more")
    recipe = load(order)
    machine = Machine(recipe)
    try:
        try:
            return _audit(order, recipe, machine, steps, as_gpu=True)
        except (RuntimeError, AssertionError, ValueError) as error:
            if machine.device.type == "cuda" or not any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA")):
                raise
            again = _audit(order, recipe, machine, steps, as_gpu=False)
            note = f"seen is the way of a CPU: as on a GPU it ends with: {str(error).splitlines()[0]}"
            return replace(again, notes=(*again.notes, note))
    finally:
        machine.close()


def command(order: Order, steps: int) -> Iterable[str]:
    """`trainkit syncs`: the lines of a recipe's training that make the processor wait, for people."""
    return lines(audit(order, steps))


def lines(found: Audit) -> list[str]:
    """What an audit found, for people."""
    said = [f"{found.recipe} on {found.device}: {found.steps} updates watched", *found.notes]
    inside = found.inside()
    if inside:
        said.append(f"inside steps: {found.per_step():g} a step")
        said += _table(inside, found.steps, "a step")
    else:
        said.append("inside steps: nothing waits")
    rest = {place: tally for place, tally in found.tallies.items() if place.phase not in STEP}
    for phase, title in _ELSEWHERE.items():
        there = {place: tally for place, tally in rest.items() if place.phase == phase}
        if there:
            said.append(title)
            said += _table(there, 1, "in all")
    return said


_ELSEWHERE = {
    "log": "log lines:",
    "checkpoint": "checkpoint:",
    "eval": "evaluations:",
    "trial": "first batches of the evaluations, each read twice:",
}


def _table(tallies: Mapping[Place, Tally], over: int, unit: str) -> list[str]:
    rows = sorted(tallies.items(), key=lambda item: (-item[1].seconds, -item[1].count))
    said = []
    for place, tally in rows:
        time_ = f", {1e3 * tally.seconds / over:.3g} ms" if tally.timed else ""
        what = f"{place.what} in " if place.what else ""
        said.append(f"  {place.where}  {what}{place.code}  {tally.count / over:g}{time_} {unit} ({place.phase})")
    return said


def _audit(order: Order, recipe: Recipe, machine: Machine, steps: int, as_gpu: bool) -> Audit:
    from trainkit.training import trainer

    cuda = machine.device.type == "cuda"
    notes = []
    if not cuda:
        notes.append(
            "on a CPU nothing waits: named are calls that would wait for a GPU, with the time of the call itself"
        )
        if recipe.train.compile != "off":
            notes.append("train.compile is off here: what is compiled cannot be looked into")
    total = WARM_UP + steps
    recipe = _shortened(recipe, total, cuda)
    machine.configure(recipe)
    found = {name: need.file for name, need in gather(order, recipe, machine, Store.locate(), None).items()}
    data = recipe.data.open(recipe.seed)
    log = Log(_roots(order.plugins))
    machine.at_once = False
    with tempfile.TemporaryDirectory(prefix="trainkit-syncs-") as folder:
        witness = _Watched(recipe, Path(folder), found, log, total)
        if cuda:
            watching = cuda_waits(log.seen, names=recipe.train.compile == "off")
        else:
            watching = Following(log.seen, log.asks if as_gpu else lambda file: False)
        with watching:
            trainer.train(recipe, data, machine, witness)
    watched = witness.last - witness.warm
    if witness.last < total:
        notes.append(f"the training has {witness.last} updates")
    return Audit(recipe.name, str(machine.device), watched, log.tallies, tuple(notes))


def _shortened(recipe: Recipe, total: int, cuda: bool) -> Recipe:
    """The recipe without evaluations, checkpoints and log lines of its own."""
    loader = recipe.loader if cuda else replace(recipe.loader, workers=0)
    return replace(
        recipe,
        train=recipe.train if cuda else replace(recipe.train, compile="off"),
        evaluations={
            name: replace(e, every=None, at_start=False, at_end=False) for name, e in recipe.evaluations.items()
        },
        checkpoints=replace(recipe.checkpoints, every=None, at_end=False, lose_at_most=None),
        log=replace(recipe.log, every=Span(total, "steps"), figures=None, profile=None, ceilings="off"),
        loader=loader,
    )


def _roots(plugins: Sequence[str]) -> list[str]:
    """Folders of the plug-ins, wherever they are installed."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in plugins]
    return [f"{Path(file).resolve().parent}/" for file in files if file and Path(file).name == "__init__.py"]


class _Watched(Witness):
    """A silent witness that ends the training after so many updates, and forgets what was seen in the warm-up."""

    def __init__(self, recipe: Recipe, folder: Path, found: Mapping[str, Path], log: Log, total: int):
        self.last, self.warm, self._log = 0, 0, log
        super().__init__(
            recipe,
            loader.digest(recipe),
            "",
            RunFolder(folder),
            Silent(),
            False,
            lambda: self.last >= total - 1,
            found,
        )

    def begun(self, *_: Any) -> None:
        """Do nothing: nobody would call a watchdog off."""

    def progress(self, step: int, steps: int) -> None:
        self.last = step
        if step == min(WARM_UP, steps - 1):  # of a training of two updates the second is watched
            self.warm = step
            for place in [place for place in self._log.tallies if place.phase in STEP]:
                del self._log.tallies[place]

    def commit(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""

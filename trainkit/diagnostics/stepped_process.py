"""Trainings in processes of their own that take so many updates when they are told to, and stand still in between.

Two of them can be measured in turns, block by block, in the same minutes of the same machine, with no import, no
compiling and no start of workers in the figures. Each has its own precision, threads and environment. It is the loop
of the product that trains: `loop.train`, with a witness that waits. A child that waits is frozen with its workers
(SIGSTOP), so that it neither reads ahead nor takes processor time from the other.

    with Paced(order) as plain, Paced(replace(order, overrides=("train.compile=default",))) as compiled:
        a, b = plain.go(20), compiled.go(20)

The child: `python -m trainkit.diagnostics.stepped_process RECIPE [words ...] [--plugin PACKAGE] [--keep BLOCK]`, told
what to do and answering in lines of JSON. One process trains, whatever launcher there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.config.run_request import Order
from trainkit.errors import UserError
from trainkit.training import evaluator

PATIENCE = 900.0
"""Seconds without a word after which a child is given up: the first update may have to compile."""
KEEPS = ("evaluations", "checkpoints")
"""Blocks of a recipe that a paced training leaves out unless told to keep them."""
PREFIX = "trainkit-paced-"
"""Of the folders in which children keep their files while they live."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_LENGTH = "100M steps"
_OUTPUT_ROWS = 32


@dataclass(frozen=True)
class Block:
    """Consecutive updates, and what they took."""

    first: int
    """Number of the first of them, from 1."""
    updates: int
    samples: int
    seconds: float
    """Wall-clock of the main thread, the device waited for at the end."""
    phases: Mapping[str, float]
    """The same by phase of `clock.PHASES`, but for `setup`."""
    losses: tuple[float, ...]
    """Mean training loss of each update."""
    each: tuple[float, ...]
    """Seconds of each update by itself, of the last 4,096."""
    memory_gb: float
    """Most that the CUDA allocator had given away in these updates; on a CPU the greatest resident set of the process
    in them, with what the workers of its loader hold for themselves."""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Ready:
    """What a child said when its first update had been made."""

    setup_s: float
    """Seconds from its start to then: libraries, data, networks, compiling."""
    batch_size: int
    micro_batch: int
    accumulation: int
    steps_per_epoch: int
    batch_norm: bool
    """Whether something in the network takes statistics of a micro-batch."""
    block: int
    """Samples that must not be parted; 1 where any may meet."""
    machine: Mapping[str, Any]
    """`Machine.describe()`, and `torch`, `bf16`, `tf32`, `compiles` (an empty text, or why not), `cores`."""
    views: int = 0
    """Countable versions of a picture; 0 where the augmentation has others."""


@dataclass(frozen=True)
class Ratio:
    """How much faster one thing is than another, from paired repeats."""

    value: float
    """Geometric mean of the ratios; above 1: faster."""
    low: float
    high: float
    """Ends of the 95 % interval: Student's t over the logarithms of the ratios."""

    def __str__(self) -> str:
        return f"x {self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


# Student's t, 97.5 %, by degrees of freedom from 1; beyond the last it is at most 4 % too wide.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def ratio(faster: Sequence[float], than: Sequence[float]) -> Ratio:
    """The ratio of rates that were measured in pairs. Raises ValueError for fewer than two pairs or rates not above 0.

    Neighbours in time share the machine's weather, so the ratio is taken within each pair.
    """
    if len(faster) != len(than) or len(faster) < 2:
        raise ValueError(f"{len(faster)} and {len(than)} rates; two pairs or more are needed")
    if min(*faster, *than) <= 0:
        raise ValueError("a rate is not above 0")
    logs = np.log(np.asarray(faster, float) / np.asarray(than, float))
    return _interval(float(logs.mean()), float(logs.std(ddof=1) / len(logs) ** 0.5), len(logs) - 1)


def unpaired(faster: Sequence[float], than: Sequence[float]) -> Ratio:
    """The ratio of rates that were not measured in turns: Welch's interval over their logarithms.

    With as many degrees of freedom as the shorter row allows, which is never too narrow. Raises ValueError as `ratio`.
    """
    if min(len(faster), len(than)) < 2:
        raise ValueError(f"{len(faster)} and {len(than)} rates; two or more are needed of each")
    a, b = np.log(np.asarray(faster, float)), np.log(np.asarray(than, float))
    error = float((a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)) ** 0.5)
    return _interval(float(a.mean() - b.mean()), error, min(len(a), len(b)) - 1)


def _interval(middle: float, error: float, freedom: int) -> Ratio:
    half = (_T[min(freedom, len(_T)) - 1]) * error
    return Ratio(*(float(np.exp(middle + side)) for side in (0.0, -half, half)))


def in_turns(one: Paced, other: Paced, updates: tuple[int, int], repeats: int) -> Iterator[tuple[Block, Block]]:
    """Blocks of two trainings in turns, A B B A A B ...: pairs of neighbours, of which each comes first as often."""
    for repeat in range(repeats):
        if repeat % 2 == 0:
            a = one.go(updates[0])
            yield a, other.go(updates[1])
        else:
            b = other.go(updates[1])
            yield one.go(updates[0]), b


class PaceError(Exception):
    """A child that cannot go on. `kind` is memory, user, silent or failed."""

    child: Paced | None = None
    """Whose it is, where it came to be."""

    def __init__(self, kind: str, reason: str, mistake: UserError | None = None):
        super().__init__(reason)
        self.kind, self.reason, self.mistake = kind, reason, mistake


class Paced:
    """A training in a child process. It has made its first update when this has been made.

    `environment` has variables for the child alone, None for one that is taken away. `keep` are blocks of `KEEPS`.
    `within` is the folder in which it keeps its files, checkpoints among them, while it lives: the place of temporary
    files unless given. Raises PaceError, here and in every call.
    """

    def __init__(
        self,
        order: Order,
        environment: Mapping[str, str | None] = {},
        *,
        keep: Collection[str] = (),
        patience: float = PATIENCE,
        within: Path | None = None,
    ):
        if unknown := set(keep) - set(KEEPS):
            raise ValueError(f"keep {sorted(unknown)}; there are {', '.join(KEEPS)}")
        self._patience, self._buffer, self._frozen, self._closed = patience, b"", False, False
        self._aside = tempfile.TemporaryDirectory(prefix=PREFIX, dir=within)
        self.folder = Path(self._aside.name)
        self._errors = self.folder / "stderr.txt"
        words = [sys.executable, "-P", "-m", "trainkit.diagnostics.stepped_process", str(order.path), *order.overrides]
        words += [f"--plugin={plugin}" for plugin in order.plugins] + [f"--keep={block}" for block in keep]
        # What the parent can import, the child can: plug-ins are found on the path of the process.
        found = os.pathsep.join(dict.fromkeys(path for path in (*sys.path, str(_ROOT)) if path))
        own = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
        own |= {"PYTHONPATH": found, "TRAINKIT_PACED": str(self.folder)}
        own |= {key: value for key, value in environment.items() if value is not None}
        for key in [key for key, value in environment.items() if value is None]:
            own.pop(key, None)
        with open(self._errors, "wb") as errors:
            # A group of its own, which can be frozen whole.
            self._child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=own, process_group=0
            )
        try:
            self.ready = Ready(**self._answer()["ready"])
            self.first = self._block(self._answer())
            self._freeze(True)
        except BaseException:
            self.close()
            raise

    def go(self, updates: int) -> Block:
        """Make so many updates."""
        if updates < 1:
            raise ValueError(f"{updates} updates; 1 or more are needed")
        return self._block(self._ask({"do": "go", "updates": updates}))

    def outputs(self) -> dict[str, np.ndarray]:
        """What the network, as it is now, predicts for the first samples of the recipe's first evaluation.

        At most 32; by name of the column, one row per sample. Empty without evaluations. The training is as before.
        """
        file = self.folder / "outputs.npz"
        self._ask({"do": "outputs", "file": str(file)})
        with np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}

    def evaluate(self, name: str, most: float = 60.0) -> tuple[float, bool]:
        """Seconds that an evaluation takes, and whether it was held.

        One that by its first batch would take more than `most` seconds is not held, and the seconds are that estimate.
        """
        answer = self._ask({"do": "evaluate", "name": name, "most": most})
        return answer["seconds"], answer["held"]

    def close(self) -> None:
        """End the child and its workers. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._child.poll() is None:
                self._freeze(False)
                with contextlib.suppress(OSError):
                    self._child.stdin.close()
                for ask in (lambda: None, lambda: self._signal(signal.SIGTERM)):
                    ask()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._child.wait(10)
                        break
        finally:  # and workers that outlive their parent, also where waiting was interrupted
            self._signal(signal.SIGKILL)
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            self._aside.cleanup()

    def __enter__(self) -> Paced:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the two sides of the pipe

    def _ask(self, word: Mapping[str, Any]) -> dict[str, Any]:
        self._freeze(False)
        try:
            self._child.stdin.write(json.dumps(word).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            error = self._gone()
            error.child = self
            raise error from None
        try:
            answer = self._answer()
        except PaceError as error:
            error.child = self
            raise
        self._freeze(True)
        return answer

    def _answer(self) -> dict[str, Any]:
        pipe, end = self._child.stdout.fileno(), time.monotonic() + self._patience
        while b"\n" not in self._buffer:
            # Asked now and then whether it lives: its workers hold the pipe open after its death.
            if select.select([pipe], [], [], 0.5)[0]:
                read = os.read(pipe, 1 << 16)
                if not read:
                    raise self._gone()
                self._buffer += read
            elif self._child.poll() is not None:
                raise self._gone()
            elif time.monotonic() > end:
                raise PaceError("silent", f"no word for {self._patience:.0f} s{self._last()}")
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "failed" in answer:
            mistake = UserError(*answer["mistake"]) if answer.get("mistake") else None
            raise PaceError(answer["failed"], answer["reason"], mistake)
        return answer

    def _block(self, answer: Mapping[str, Any]) -> Block:
        block = dict(answer["block"])
        return Block(**{**block, "losses": tuple(block["losses"]), "each": tuple(block["each"])})

    def _gone(self) -> PaceError:
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code == -getattr(signal, "SIGKILL", 9):
            return PaceError("memory", "killed by the system, as it does when memory is short")
        return PaceError("failed", f"ended with code {code}{self._last()}")

    def _last(self) -> str:
        """The last line that it wrote to stderr."""
        with contextlib.suppress(OSError):
            lines = [line for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
            return f": {lines[-1].strip()[:300]}" if lines else ""
        return ""

    def _freeze(self, on: bool) -> None:
        if on != self._frozen and hasattr(signal, "SIGSTOP"):
            self._signal(signal.SIGSTOP if on else signal.SIGCONT)
            self._frozen = on

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


_ROOT = Path(__file__).resolve().parents[2]


# ---- The child -------------------------------------------------------------------------------------------------------


class _Leave(Exception):
    """The parent has no more to ask."""


class _Watched:
    """A task of which the losses are noted, and the networks that it built."""

    def __init__(self, task: Any):
        self._task, self.parts = task, None
        self.losses: list[tuple[int, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def build(self, *args: Any) -> Any:
        self.parts = self._task.build(*args)
        return self.parts

    def loss(self, net: Any, parts: Any, batch: Any, at: Any) -> Any:
        loss = self._task.loss(net, parts, batch, at)
        # A copy: the memory of a captured CUDA graph is used again by the next update.
        self.losses.append((at.step, loss.sum.detach().clone(), loss.weight))
        return loss

    def take(self) -> list[float]:
        """Mean loss of each update since the last call; waits for the device."""
        sums: dict[int, list[float]] = {}
        for step, total, weight in self.losses:
            both = sums.setdefault(step, [0.0, 0.0])
            both[0] += float(total)
            both[1] += float(weight)
        self.losses.clear()
        return [total / weight if weight else float("nan") for total, weight in sums.values()]


def _witness_class() -> type:
    """The witness that waits; made when asked for, since the parent needs no torch."""
    import torch

    from trainkit.data.loader import stream
    from trainkit.training.plan import Plan, evaluated
    from trainkit.training.run_logger import Witness

    class Waiting(Witness):
        """Stops the training between updates until the parent says how many more."""

        def pace(self, whole: Any, data: Any, machine: Any, task: _Watched, began: float, tell: Any) -> None:
            """Before `loop.train`: what is answered with. `whole` is the recipe with its evaluations."""
            self._whole, self._data, self._machine, self._task = whole, data, machine, task
            self._began, self._tell = began, tell
            self._left, self._step, self._mark = 1, 0, None

        def begun(self, *_: Any) -> None:
            """Do nothing: while others are measured it waits or is frozen, and does not hang."""

        def say(self, text: str) -> None:
            """Lines of the training are kept apart from the answers."""
            print(text, file=sys.stderr, flush=True)

        def progress(self, step: int, steps: int) -> None:
            """An update has ended: go on, or answer and wait."""
            self._left -= 1
            if self._left:
                return
            self._machine.synchronize()
            self.clock.to("setup")
            if self._mark is None:
                self._tell({"ready": asdict(self._ready())})
            self._tell({"block": self._block(step)})
            while not self._left:
                self._obey()
            self._mark, self._step = dict(self.clock.seconds), step
            _forget_peak(self._machine)
            self.clock.to("optimizer")

        def _obey(self) -> None:
            line = sys.stdin.readline()
            if not line:
                if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
                    os.killpg(os.getpid(), signal.SIGCONT)  # workers that were frozen with it
                raise _Leave
            word = json.loads(line)
            if word["do"] == "go":
                self._left = word["updates"]
            elif word["do"] == "outputs":
                np.savez(word["file"], **self._outputs())
                self._tell({})
            else:
                self._tell(self._evaluate(word["name"], word["most"]))

        def _ready(self) -> Ready:
            net = self._task.parts.learns
            plan = Plan.make(self.recipe, self._data, 1, 0)
            norms = torch.nn.modules.batchnorm._BatchNorm
            return Ready(
                setup_s=time.time() - self._began,
                batch_size=plan.batch_size,
                micro_batch=plan.micro_batch,
                accumulation=plan.accumulation,
                steps_per_epoch=plan.steps_per_epoch,
                batch_norm=any(isinstance(m, norms) and m.training for m in net.modules()),
                block=self._data.block,
                views=self._data.train.views,
                machine=_facts(self._machine),
            )

        def _block(self, step: int) -> dict[str, Any]:
            before = self._mark or dict.fromkeys(self.clock.seconds, 0.0)
            phases = {p: s - before[p] for p, s in self.clock.seconds.items() if p != "setup"}
            updates = step - self._step
            each = self.clock.recent(updates).seconds.tolist()
            return asdict(
                Block(
                    first=self._step + 1,
                    updates=updates,
                    samples=updates * self.recipe.train.batch_size,
                    seconds=sum(phases.values()),
                    phases=phases,
                    losses=tuple(self._task.take()),
                    each=tuple(each),
                    memory_gb=_peak_gb(self._machine),
                )
            )

        def _splits(self) -> dict[str, Any]:
            return evaluated(self._whole, self._data)

        def _outputs(self) -> dict[str, np.ndarray]:
            for name, split in self._splits().items():
                size = min(self._whole.evaluations[name].batch_size, _OUTPUT_ROWS)
                rows, real = next(iter(stream.every_sample(split, size, 1, 0)))
                net = self._task.parts.learns
                training = net.training
                net.eval()
                with torch.no_grad(), self._machine.accelerator.autocast():
                    batch = split.on_device(self._machine.place(split.fetch(rows, epoch=0)))
                    found = self._task.predict(net, batch)
                net.train(training)
                return {key: value.float().cpu().numpy()[real] for key, value in found.items()}
            return {}

        def _evaluate(self, name: str, most: float) -> dict[str, Any]:
            split, size, net = self._splits()[name], self._whole.evaluations[name].batch_size, self._task.parts.learns
            seconds = evaluator._trial(self._task, net, split, size, self._machine)
            if seconds > most:
                return {"seconds": seconds, "held": False}
            began = time.perf_counter()
            evaluator.evaluate(self._task, net, split, size, self._machine)
            return {"seconds": time.perf_counter() - began, "held": True}

    return Waiting


def _journalled(folder: Any) -> Any:
    """A tracker that writes a journal and tells no store: what a log line costs the training, it costs here too."""
    from trainkit.tracking.journal import Journal
    from trainkit.tracking.tracker import Silent

    class Journalled(Silent):
        def __init__(self) -> None:
            self._journal = Journal(folder.journal)

        def log(self, step: int, metrics: Mapping[str, Any]) -> None:
            self._journal.note(step, {name: float(value) for name, value in metrics.items()})

        def event(self, step: int, name: str, data: Any = None) -> None:
            self._journal.event(step, name, data)

        def position(self) -> int:
            return self._journal.position

        def commit(self) -> int:
            return self._journal.commit()

    return Journalled()


def _facts(machine: Any) -> dict[str, Any]:
    """The machine, as far as it decides which switches there are."""
    import shutil

    import torch
    from torch.backends.cpu import get_cpu_capability

    cuda = machine.device.type == "cuda"
    compiles = ""
    if cuda:
        import importlib.util

        compiles = "" if importlib.util.find_spec("triton") else "torch.compile for GPUs needs triton"
    elif not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
        compiles = "torch.compile needs a C++ compiler"
    return {
        **machine.describe(),
        "torch": torch.__version__,
        "instructions": get_cpu_capability(),
        "bf16": not cuda or torch.cuda.is_bf16_supported(including_emulation=False),
        "tf32": cuda and torch.cuda.get_device_capability(machine.device) >= (8, 0),
        "compiles": compiles,
        "cores": _cores(),
    }


def _cores() -> float:
    """Processor cores that this process may use."""
    try:
        from trainkit.tracking.system.load import Load
    except ImportError:
        return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return Load().cores()


def _forget_peak(machine: Any) -> None:
    """Count the most memory from here on."""
    if machine.device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(machine.device)
        return
    with contextlib.suppress(OSError):  # Linux alone; elsewhere it stays that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _peak_gb(machine: Any) -> float:
    if machine.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(machine.device) / 1e9
    peak = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    if peak is None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return (peak + _own_of_workers()) / 1e9


def _own_of_workers() -> int:
    """Bytes that processes of the loader hold for themselves, and do not share with this one."""
    import psutil

    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, AttributeError):
            total += child.memory_full_info().uss
    return total


def paced(recipe: Any, keep: Collection[str]) -> Any:
    """A recipe as it is trained here: without end, and without evaluations and checkpoints that are not kept."""
    from trainkit.config.schema import Checkpoints
    from trainkit.config.units import Span

    log = replace(recipe.log, figures=None, system_every=None, ceilings="off", profile=None, rows=False)
    out = {"best": None, "stop_when": None, "time_to": {}, "promote": None, "log": log}
    out["train"] = replace(recipe.train, length=Span.parse(_LENGTH))
    if "evaluations" not in keep:
        out["evaluations"] = {}
    if "checkpoints" not in keep:
        out["checkpoints"] = Checkpoints(every=None, at_end=False, lose_at_most=None)
    return replace(recipe, **out)


def _train(words: list[str], began: float, tell: Any) -> None:
    keep = [word.partition("=")[2] for word in words if word.startswith("--keep=")]
    plugins = tuple(word.partition("=")[2] for word in words if word.startswith("--plugin="))
    path, *overrides = [word for word in words if not word.startswith(("--keep=", "--plugin="))]
    order = Order(Path(path), tuple(overrides), plugins)

    from trainkit.config import loader
    from trainkit.config.run_request import load
    from trainkit.distributed.runtime import Machine
    from trainkit.files import write_aside
    from trainkit.tracking.run_folder import RunFolder, RunInfo
    from trainkit.tracking.store import Store
    from trainkit.training import trainer
    from trainkit.training.dependencies import gather

    whole = load(order)
    machine, store = Machine(whole), Store.locate()
    try:
        found = {name: need.file for name, need in gather(order, whole, machine, store, None).items()}
        data = whole.data.open(whole.seed)
        recipe = paced(whole, keep)
        task = _Watched(recipe.task)
        folder = RunFolder(Path(os.environ.get("TRAINKIT_PACED") or tempfile.mkdtemp(prefix=PREFIX)))
        folder.checkpoints.mkdir(exist_ok=True)
        text = loader.dump(recipe)
        info = RunInfo(folder.name, recipe.name, loader.digest(recipe), recipe.seed, began)
        write_aside(folder.path / "run.json", json.dumps(asdict(info)))
        tracker = _journalled(folder)
        run = _witness_class()(recipe, info.recipe_hash, text, folder, tracker, True, lambda: False, found)
        run.pace(whole, data, machine, task, began, tell)
        trainer.train(replace(recipe, task=task), data, machine, run)
    except _Leave:
        pass
    finally:
        machine.close()


def main(words: list[str]) -> int:
    """The child. Exit code 0 when the parent has closed its end."""
    began = time.time()
    _wake_when_orphaned()
    # Whatever prints, prints to stderr; answers have a pipe of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        _train(words, began, tell)
    except UserError as error:
        mistake = [error.where, error.found, error.expected, error.remedy]
        tell({"failed": "user", "reason": str(error), "mistake": mistake})
    except BrokenPipeError:
        pass
    except Exception as error:
        import traceback

        from trainkit.training import out_of_memory

        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        short = f"{type(error).__name__}: {said[0]}"[:300]
        tell({"failed": "memory" if out_of_memory.is_one(error) else "failed", "reason": short})
    return 0


def _wake_when_orphaned() -> None:
    """Have a frozen child woken when its parent dies: it then reads the end of its input, and leaves with its workers.

    On Linux; elsewhere the kernel wakes stopped process groups that nobody is left to wake.
    """
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

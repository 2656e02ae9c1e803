"""Trainings in processes of their own that take so many updates when they are told to, and stand still in between.

Two of them can be measured in turns, block by block, in the same minutes of the same machine, with no import, no
compiling and no start of workers in the figures. Each has its own precision, threads and environment. It is
`Trainer.step` that trains, in `stepping_child`. A child that waits is frozen with its workers (SIGSTOP), so that it
neither reads ahead nor takes processor time from the other.

    with Paced(order) as plain, Paced(replace(order, overrides=("train.compile=default",))) as compiled:
        a, b = plain.go(20), compiled.go(20)

One process trains, whatever launcher there is.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError

PATIENCE = 900.0
"""Seconds without a word after which a child is given up: the first update may have to compile."""
KEEPS = ("evaluations", "checkpoints")
"""Blocks of a recipe that a paced training leaves out unless told to keep them."""
PREFIX = "trainkit-paced-"
"""Of the folders in which children keep their files while they live."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


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
    """Facts that a child tells when its first update is made."""

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
    """`Runtime.describe()`, and `torch`, `bf16`, `tf32`, `compile` (the mode), `compiles` (an empty text, or why not),
    `cores`."""
    views: int = 0
    """Countable versions of an image; 0 where the augmentation has others."""


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


def in_turns(
    one: SteppedProcess, other: SteppedProcess, updates: tuple[int, int], repeats: int
) -> Iterator[tuple[Block, Block]]:
    """Blocks of two trainings in turns, A B B A A B ...: pairs of neighbours, of which each comes first as often."""
    for repeat in range(repeats):
        if repeat % 2 == 0:
            a = one.go(updates[0])
            yield a, other.go(updates[1])
        else:
            b = other.go(updates[1])
            yield one.go(updates[0]), b


class SteppedProcessError(Exception):
    """A child that cannot go on. `kind` is memory, user, silent or failed."""

    child: SteppedProcess | None = None
    """Whose it is, where it came to be."""

    def __init__(self, kind: str, reason: str, mistake: UserError | None = None):
        super().__init__(reason)
        self.kind, self.reason, self.mistake = kind, reason, mistake


class SteppedProcess:
    """A training in a child process. It has made its first update when this has been made.

    `environment` has variables for the child alone, None for one that is taken away. `keep` are blocks of `KEEPS`.
    `within` is the folder in which it keeps its files, checkpoints among them, while it lives: the place of temporary
    files unless given. Raises PaceError, here and in every call.
    """

    def __init__(
        self,
        request: RunRequest,
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
        words = [
            sys.executable,
            "-P",
            "-m",
            "trainkit.diagnostics.stepping_child",
            str(request.path),
            *request.overrides,
        ]
        words += [f"--plugin={plugin}" for plugin in request.plugins] + [f"--keep={block}" for block in keep]
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

    @property
    def _stdin(self) -> IO[bytes]:
        if self._child.stdin is None:
            raise RuntimeError("the child has no pipe")
        return self._child.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        if self._child.stdout is None:
            raise RuntimeError("the child has no pipe")
        return self._child.stdout

    def go(self, updates: int) -> Block:
        """Make so many updates."""
        if updates < 1:
            raise ValueError(f"{updates} updates; 1 or more are needed")
        return self._block(self._ask({"do": "go", "updates": updates}))

    def outputs(self) -> dict[str, np.ndarray]:
        """Return what the network, as it is now, predicts for the first samples of the recipe's first evaluation.

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
                    self._stdin.close()
                for ask in (lambda: None, lambda: self._signal(signal.SIGTERM)):
                    ask()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._child.wait(10)
                        break
        finally:  # and workers that outlive their parent, also where waiting was interrupted
            self._signal(signal.SIGKILL)
            self._child.wait()
            for pipe in (self._stdin, self._stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            self._aside.cleanup()

    def __enter__(self) -> SteppedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the two sides of the pipe

    def _ask(self, word: Mapping[str, Any]) -> dict[str, Any]:
        self._freeze(False)
        try:
            self._stdin.write(json.dumps(word).encode() + b"\n")
            self._stdin.flush()
        except OSError:
            error = self._gone()
            error.child = self
            raise error from None
        try:
            answer = self._answer()
        except SteppedProcessError as error:
            error.child = self
            raise
        self._freeze(True)
        return answer

    def _answer(self) -> dict[str, Any]:
        pipe, end = self._stdout.fileno(), time.monotonic() + self._patience
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
                raise SteppedProcessError("silent", f"no word for {self._patience:.0f} s{self._last()}")
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "failed" in answer:
            mistake = UserError(*answer["mistake"]) if answer.get("mistake") else None
            raise SteppedProcessError(answer["failed"], answer["reason"], mistake)
        return answer

    def _block(self, answer: Mapping[str, Any]) -> Block:
        block = dict(answer["block"])
        return Block(**{**block, "losses": tuple(block["losses"]), "each": tuple(block["each"])})

    def _gone(self) -> SteppedProcessError:
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code == -getattr(signal, "SIGKILL", 9):
            return SteppedProcessError("memory", "killed by the system, as it does when memory is short")
        return SteppedProcessError("failed", f"ended with code {code}{self._last()}")

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

"""Trainings in child processes that run a given number of steps on request, and are frozen in between.

Two of them can be measured in alternating blocks, in the same minutes on the same machine, without imports, compilation
and worker start-up in the figures. Each has its own precision, threads and environment. `Trainer.step` trains, in
`stepping_child`. A waiting child and its workers are frozen (SIGSTOP), so that they neither prefetch nor take CPU time.

    with SteppedProcess(request) as plain, SteppedProcess(changed) as compiled:
        a, b = plain.go(20), compiled.go(20)

Each child is one process, also under a launcher.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError

PATIENCE = 900.0
"""Seconds without an answer after which a child counts as failed: the first step may have to compile."""
PREFIX = "trainkit-paced-"
"""Of the folders in which children keep their files while they live."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass(frozen=True)
class Block:
    """Consecutive steps, and their times."""

    steps: int
    samples: int
    seconds: float
    """Wall-clock of the main thread, the device waited for at the end."""
    losses: tuple[float, ...]
    """Mean training loss of each step."""
    memory_gb: float
    """Peak of the CUDA allocator in these steps; on a CPU the private memory of the process and its workers after."""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Ready:
    """Facts that a child reports after its first step."""

    steps_per_epoch: int
    batch_norm: bool
    """True where a layer uses statistics of the micro-batch."""
    machine: Mapping[str, Any]
    """`Runtime.describe()`, and `torch`, `bf16`, `tf32`, `compile` (the mode), `compiles` (empty, or the reason),
    `cores`."""
    views: int = 0
    """Number of views of an image; 0 where the augmentation has no countable views."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of two throughputs, from paired repeats."""

    value: float
    """Geometric mean of the ratios; above 1: faster."""
    low: float
    high: float
    """Ends of the 95 % interval: Student's t over the logarithms of the ratios."""

    def __str__(self) -> str:
        return f"x {self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(faster: Sequence[float], than: Sequence[float]) -> Ratio:
    """Return the ratio of rates measured in pairs. Raises ValueError for fewer than two pairs or rates not above 0.

    Adjacent blocks share the state of the machine, so the ratio is taken within each pair.
    """
    if len(faster) != len(than) or len(faster) < 2:
        raise ValueError(f"{len(faster)} and {len(than)} rates; two pairs or more are needed")
    if min(*faster, *than) <= 0:
        raise ValueError("a rate is not above 0")
    from scipy import stats

    logs = np.log(np.asarray(faster, float) / np.asarray(than, float))
    half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5)
    return Ratio(*(float(np.exp(logs.mean() + side)) for side in (0.0, -half, half)))


def in_turns(
    one: SteppedProcess, other: SteppedProcess, steps: tuple[int, int], repeats: int
) -> Iterator[tuple[Block, Block]]:
    """Yield pairs of alternating blocks of two trainings, A B B A A B ...; each comes first equally often."""
    for repeat in range(repeats):
        if repeat % 2 == 0:
            a = one.go(steps[0])
            yield a, other.go(steps[1])
        else:
            b = other.go(steps[1])
            yield one.go(steps[0]), b


class SteppedProcessError(Exception):
    """A child that cannot continue. `kind` is memory, user, silent or failed."""

    child: SteppedProcess | None = None
    """The child that failed, if it had started."""

    def __init__(self, kind: str, reason: str, user_error: UserError | None = None):
        super().__init__(reason)
        self.kind, self.reason, self.user_error = kind, reason, user_error


class SteppedProcess:
    """A training in a child process. The constructor returns after its first step.

    It has no evaluations and checkpoints. `environment` has variables for the child alone, None to unset one. `within`
    is the folder for its files while it lives; by default a temporary one. Raises SteppedProcessError, here and in
    every call.
    """

    def __init__(
        self,
        request: RunRequest,
        environment: Mapping[str, str | None] = {},
        *,
        patience: float = PATIENCE,
        within: Path | None = None,
    ):
        self._patience, self._buffer, self._frozen, self._closed = patience, b"", False, False
        self._aside = tempfile.TemporaryDirectory(prefix=PREFIX, dir=within)
        self.folder = Path(self._aside.name)
        self._errors = self.folder / "stderr.txt"
        words = [sys.executable, "-P", "-m", "trainkit.diagnostics.stepping_child", str(request.path)]
        words += [*request.overrides, *(f"--plugin={plugin}" for plugin in request.plugins)]
        # What the parent can import, the child can: plug-ins are found on the path of the process.
        found = os.pathsep.join(dict.fromkeys(path for path in (*sys.path, str(_ROOT)) if path))
        changed = {"PYTHONPATH": found, "TRAINKIT_PACED": str(self.folder), **environment}
        own = {key: value for key, value in os.environ.items() if key not in (*_LAUNCHER, *changed)}
        own |= {key: value for key, value in changed.items() if value is not None}
        with open(self._errors, "wb") as errors:
            # A group of its own, which can be frozen whole.
            self._child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=own, process_group=0
            )
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("the child has no pipes")
        self._stdin, self._stdout = self._child.stdin, self._child.stdout
        try:
            self.ready = Ready(**self._answer()["ready"])
            self.first = self._block(self._answer())
            self._freeze(True)
        except BaseException:
            self.close()
            raise

    def go(self, steps: int) -> Block:
        """Run this many steps."""
        if steps < 1:
            raise ValueError(f"{steps} steps; 1 or more are needed")
        return self._block(self._ask({"do": "go", "steps": steps}))

    def evaluate(self, name: str, most: float = 60.0) -> tuple[float, bool]:
        """Return the seconds of an evaluation, and whether it ran.

        One whose first batch predicts more than `most` seconds does not run, and the seconds are that estimate.
        """
        answer = self._ask({"do": "evaluate", "name": name, "most": most})
        return answer["seconds"], answer["ran"]

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
            with contextlib.suppress(OSError):  # of a child that has ended, which reading notices
                self._stdin.write(json.dumps(word).encode() + b"\n")
                self._stdin.flush()
            answer = self._answer()
        except SteppedProcessError as error:
            error.child = self
            raise
        self._freeze(True)
        return answer

    def _answer(self) -> dict[str, Any]:
        pipe, end = self._stdout.fileno(), time.monotonic() + self._patience
        while b"\n" not in self._buffer:
            # Poll the child too: its workers keep the pipe open after its death.
            if select.select([pipe], [], [], 0.5)[0]:
                read = os.read(pipe, 1 << 16)
                if not read:
                    raise self._gone()
                self._buffer += read
            elif self._child.poll() is not None:
                raise self._gone()
            elif time.monotonic() > end:
                raise SteppedProcessError("silent", f"no answer for {self._patience:.0f} s{self._last()}")
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "failed" in answer:
            user_error = UserError(*answer["user_error"]) if answer.get("user_error") else None
            raise SteppedProcessError(answer["failed"], answer["reason"], user_error)
        return answer

    def _block(self, answer: Mapping[str, Any]) -> Block:
        return Block(**{**answer["block"], "losses": tuple(answer["block"]["losses"])})

    def _gone(self) -> SteppedProcessError:
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code == -getattr(signal, "SIGKILL", 9):
            return SteppedProcessError("memory", "killed by the system, probably out of memory")
        return SteppedProcessError("failed", f"exit code {code}{self._last()}")

    def _last(self) -> str:
        """The last line that it wrote to stderr."""
        lines = self._errors.read_text(errors="replace").split("\n") if self._errors.exists() else []
        return next((f": {line.strip()[:300]}" for line in reversed(lines) if line.strip()), "")

    def _freeze(self, on: bool) -> None:
        if on != self._frozen and hasattr(signal, "SIGSTOP"):
            self._signal(signal.SIGSTOP if on else signal.SIGCONT)
            self._frozen = on

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


_ROOT = Path(__file__).resolve().parents[2]

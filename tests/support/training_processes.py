"""Trainings in processes of their own that a test looks at, and sends signals to, while they run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fault_injection
import psutil
from runs import PLUGIN, ROOT, TOY, Ran, _fork_server, _port, newest

PATIENCE = 480.0
"""Seconds within which whatever is waited for has to come on a machine that others use too."""


class Job:
    """`trainkit/run.py` with the toy recipe, forked with its imports done: one process, or several over gloo."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        processes: int = 1,
        recipe: Path = TOY,
        each: Sequence[Sequence[str]] = (),
        stdout: Path | None = None,
        plan: Sequence[fault_injection.Fault] = (),
        **environment: str,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        mark = uuid.uuid4().hex
        self.outputs = [stdout or folder / f"{mark}.out", folder / f"{mark}.err"]
        self.mark = f"TRAINKIT_JOB={mark}"
        env = {**os.environ, "PYTHONPATH": str(PLUGIN), "ACCELERATE_USE_CPU": "true", "TRAINKIT_JOB": mark}
        self.notes = folder / f"{mark}.notes"
        env |= {**environment, **fault_injection.environment(plan, self.notes)}
        if processes > 1:
            at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
            env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), **at}
        self._codes: list[int] | None = None
        self.pids = _fork_server().start(
            processes=processes,
            words=[str(recipe), "--plugin", "toy", *words],
            each=[list(some) for some in each],
            environment=env,
            folder=str(ROOT.parent),
            files=[str(file) for file in self.outputs],
            session=True,
        )

    @property
    def said(self) -> str:
        """Both outputs, as far as they are files."""
        return "\n".join(file.read_text() for file in self.outputs if file.is_file())

    def until(self, what: str | Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait for a text to be printed, or for something to be true, as long as a process lives.

        `step 20/` is the row of step 20 in the log table.
        """
        end = time.monotonic() + seconds
        step = re.fullmatch(r"step (\d+)/", what) if isinstance(what, str) else None
        pattern = re.compile(
            rf"^ +{step[1]} " if step else re.escape(what) if isinstance(what, str) else "", re.MULTILINE
        )

        def done() -> object:
            return pattern.search(self.said) if isinstance(what, str) else what()

        while not done():
            assert self.alive() or done(), f"ended before {what}:\n{self.said}"  # it may have ended with what it did
            assert time.monotonic() < end, f"no {what}:\n{self.said}"
            time.sleep(0.02)

    def until_struck(self) -> None:
        """Wait for the first fault of the plan."""
        self.until(lambda: fault_injection.struck(self.notes))

    def signal(self, number: int, rank: int = 0) -> None:
        """To one process."""
        os.kill(self.pids[rank], number)

    def signal_all(self, number: int) -> None:
        """To all processes of all groups, as schedulers and terminals do."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def alive(self) -> list[int]:
        """Processes of this job that live: those of its sessions, and what they started with their environment."""
        return [pid for pid in psutil.pids() if self._ours(pid)]

    def _ours(self, pid: int) -> bool:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
            own = pid in self.pids or os.getsid(pid) in self.pids
            return own or self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except (OSError, psutil.Error):
            return False

    def end(self, seconds: float = PATIENCE) -> list[int]:
        """Wait for the processes: their exit codes, -9 for one that was still there."""
        if self._codes is None:
            self._codes = _fork_server().wait(self.pids, seconds)
        return self._codes

    def gone(self, seconds: float = PATIENCE) -> float:
        """Wait until no process of this job lives: after how many seconds that was. Zombies are reaped by `end`."""
        began = time.monotonic()
        while left := self.alive():
            assert time.monotonic() - began < seconds, f"{left} are left:\n{self.said}"
            time.sleep(0.02)
        return time.monotonic() - began

    def ran(self, code: int = 0) -> Ran:
        """The newest run of the store."""
        return Ran(code, newest())


def job(folder: Path, *words: str, **options) -> contextlib.AbstractContextManager[Job]:
    """A job of which nothing is left afterwards."""
    return _cleared(Job(folder, *words, **options))


def launched(folder: Path, launcher: str, *words: str, **options) -> contextlib.AbstractContextManager[Job]:
    """The same beneath a launcher."""
    return _cleared(Launched(folder, launcher, *words, **options))


@contextlib.contextmanager
def _cleared(one: Job) -> Iterator[Job]:
    try:
        yield one
    finally:
        for pid in one.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.end(PATIENCE)


class Launched(Job):
    """The same beneath a real launcher: `accelerate launch` of one process, or `torchrun` of two."""

    def __init__(self, folder: Path, launcher: str, *words: str, plan: Sequence[fault_injection.Fault] = ()):
        mark = uuid.uuid4().hex
        self.mark, self.notes = f"TRAINKIT_JOB={mark}", folder / f"{mark}.notes"
        self.outputs, self.pids, self._codes = [folder / f"{mark}.out"], [], None
        env = {**os.environ, "PYTHONPATH": f"{PLUGIN}:{ROOT}", "ACCELERATE_USE_CPU": "true", "TRAINKIT_JOB": mark}
        env |= fault_injection.environment(plan, self.notes)
        if launcher == "accelerate":
            config = ["--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml")]
            own = ["-m", "accelerate.commands.launch", *config]
        else:
            own = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(_port())]
        script = [str(ROOT / "tests" / "support" / "fault_injection.py"), str(TOY), "--plugin", "toy"]
        with open(self.outputs[0], "w", encoding="utf-8") as said:
            self.launcher = subprocess.Popen(
                [sys.executable, *own, *script, *words],
                cwd=ROOT.parent,
                env=env,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: int, rank: int = 0) -> None:
        """To the launcher alone."""
        self.launcher.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To the launcher and everything beneath it, at once."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, seconds: float = PATIENCE) -> list[int]:
        """Wait for the launcher: its exit code."""
        return [self.launcher.wait(seconds)]

"""A process that has imported what a training imports, and is forked for each process that `runs.spawn` starts.

Importing took a process 6 to 8 s of processor time, training the toy half a second.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fault_injection
import small_disk
from unpainted_figures import leave_unpainted

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "trainkit" / "run.py"
IMPORTED = (
    "torch._dynamo",  # by torch's optimizers
    "accelerate",
    "timm",
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "matplotlib.backends.backend_agg",
    "trainkit.experiments.launch",
    "trainkit.training.trainer",
    "trainkit.plots.curves",
)
GRACE = 15.0
"""Seconds that the others have to end by themselves once a process has failed; `torch.distributed.run` gives none."""


class ForkServer:
    """Such a process, seen from the one that runs tests."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, **order: Any) -> list[int]:
        """Have processes started: their ids. They are children of the fork server, which has to be asked to `wait`."""
        return self._ask(order)

    def wait(self, processes: list[int], timeout: float) -> list[int]:
        """Wait for processes: their exit codes. What runs after so many seconds is killed."""
        return self._ask({"wait": processes, "timeout": timeout})

    def _ask(self, order: Mapping[str, Any]) -> list[int]:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = _wait(order["wait"], order["timeout"])
        else:
            answer = [_fork(order, rank, answers.fileno()) for rank in range(order["processes"])]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _fork(order: Mapping[str, Any], rank: int, answers: int) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.close(answers)
        if order.get("session"):  # of its own, so that its group can be sent signals
            os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(order["files"], start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        _train(order, rank)
    finally:
        os._exit(1)


def _train(order: Mapping[str, Any], rank: int) -> None:
    """Do what `python trainkit/run.py` does, which ends the process; returns where it does not come so far."""
    import numpy as np

    os.environ.clear()
    os.environ.update(order["environment"])
    if order["processes"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    small_disk.enter_from_environment()
    os.chdir(order["folder"])
    random.seed()
    np.random.seed()
    sys.argv = [str(RUN), *order["words"], *(order["each"][rank] if order.get("each") else ())]
    try:
        fault_injection.install_from_environment()
        runpy.run_path(str(RUN), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()


def _wait(children: list[int], timeout: float) -> list[int]:
    """Exit codes of all, each as long as none has failed and the time is not over."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, time.monotonic() + GRACE)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def _import() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    leave_unpainted()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _import()
    _serve()

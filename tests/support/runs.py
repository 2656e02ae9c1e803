"""Running recipes in tests, and reading what they left."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_injection
import numpy as np
import pytest
import torch
from fork_server import ForkServer
from PIL import Image

from trainkit.checkpoint import storage
from trainkit.config.run_request import RunRequest
from trainkit.experiments import metric_selection
from trainkit.experiments.launch import launch
from trainkit.tracking import journal, mlflow_run, upload
from trainkit.tracking.journal import MEASURED
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "tests" / "plugin"
TOY = PLUGIN / "toy.yaml"


@dataclass
class Ran:
    """A run that was made, and what can be read of it."""

    code: int
    folder: RunFolder

    @property
    def history(self) -> journal.History:
        return journal.read(self.folder.journal)

    @property
    def repeatable(self) -> dict[str, list[tuple[int, float]]]:
        """Every metric that must repeat, as (step, value)."""
        return {
            name: [(p.step, p.value) for p in points]
            for name, points in self.history.metrics.items()
            if not name.startswith(MEASURED) and "/speed/" not in name and "/time/" not in name
        }

    @property
    def in_mlflow(self) -> dict[str, list[tuple[int, float]]]:
        """The metrics that MLflow gets, as it gets them."""
        sent = upload.matcher(mlflow_run.read(self.folder).metrics)
        metrics = ((name, points) for name, points in self.history.metrics.items() if sent(name))
        return {name: sorted((p.step, upload.rounded(p.value)) for p in points) for name, points in metrics}

    def series(self, name: str) -> list[float]:
        return self.history.series(name)[1]

    def events(self, name: str) -> list[journal.Event]:
        return [event for event in self.history.events if event.name == name]

    @property
    def last(self) -> storage.Loaded:
        path, problems = storage.newest_valid(self.folder.checkpoints)
        assert path is not None and not problems
        return storage.read(path)

    @property
    def few_in_mlflow(self) -> bool:
        """Whether MLflow gets no more metrics than are counted on: in all, and those of the training."""
        names = self.in_mlflow
        of_training = [name for name in names if name.startswith("train/")]
        return len(names) <= metric_selection.MOST and len(of_training) <= metric_selection._TRAINING

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.folder.checkpoints.glob("step-*"))


@contextmanager
def left_alone(home: Path, database: Path, *words: str) -> Iterator[Ran]:
    """The toy recipe, run to its end in a store of its own with nothing in its way."""
    with own_store(home, database):
        yield run(*words)


def stop_after(steps: int):
    """What `launch` asks whether to stop: yes after so many steps."""
    asked = iter(range(10**9))
    # Asked once before training, once before the first step and once after each; the answer is read a step later.
    return lambda: next(asked) >= steps


def run(*words: str, recipe: Path = TOY, stopping=lambda: False, resume: str | None = None, **asked: Any) -> Ran:
    """Run a recipe in this process, in the store that the environment names; the newest run, with folds the last.

    `asked` are other fields of the order.
    """
    if str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    code = launch(RunRequest(recipe, words, ("toy",), resume, **asked), stopping)
    return Ran(code, newest())


def stopped_and_resumed(recipe: Path, words: Sequence[str], steps: int, *more: str) -> Ran:
    """Stop a run after so many steps and resume it, with `more` words that a resumed run may have otherwise."""
    cut = run(*words, recipe=recipe, stopping=stop_after(steps))
    assert cut.code == 143 and cut.folder.info().status == "KILLED" and cut.last.step >= steps - 1
    before = cut.last.step
    resumed = run(*words, *more, recipe=recipe, resume="")
    assert resumed.folder == cut.folder and resumed.last.step > before
    return resumed


def overrides(settings: Mapping[str, str], changes: Mapping[str, str]) -> list[str]:
    """Settings as words for `run`, those of `changes` in place of others; in their keys `__` may stand for a dot.

    As given there is a checkpoint every three steps, and all are kept.
    """
    every = {"checkpoints": "{every: 3 steps, keep_last: 50}", "log": "{every: 2 steps, system_every: null}"}
    words = every | dict(settings) | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in words.items()]


@contextmanager
def environment(**words: Path) -> Iterator[None]:
    """Places in the environment: what a fixture of a whole file cannot ask `monkeypatch` for."""
    with pytest.MonkeyPatch.context() as patch:
        for name, place in words.items():
            patch.setenv(name, str(place))
        yield


@contextmanager
def own_store(home: Path, database: Path) -> Iterator[None]:
    """A store in `home`, over a copy of an empty database."""
    shutil.copy(database, home / "mlflow.db")
    with environment(TRAINKIT_STORE=home):
        yield


def until_a_row(job: subprocess.Popen) -> str:
    """Read what a training prints until the next row of its log, or its end."""
    printed = ""
    for line in job.stdout:
        printed += line
        if re.match(r" *\d+ ", line):
            break
    return printed


def newest() -> RunFolder:
    return Store.locate().runs()[-1]


def spawn(processes: int, *words: str, timeout: float = 900, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run trainkit/run.py in so many processes of its own, over gloo, and wait for them.

    They are forks with their imports done. As of `torch.distributed.run` the exit code of several is 0 or 1.
    """
    with start(processes, *words, **environment) as started:
        codes = started.wait(timeout)
        code = codes[0] if processes == 1 else int(any(codes))
        return subprocess.CompletedProcess(list(words), code, started.stdout, started.stderr)


def evaluated(processes: int, *words: str) -> dict[str, list[tuple[int, float]]]:
    """Every score of an evaluation by `--score`, in full, as (step, value) by name."""
    done = spawn(processes, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    return Ran(0, newest()).repeatable


@dataclass
class Started:
    """Processes of the fork server, by rank."""

    pids: list[int]
    home: Path

    def kill(self, number: int = signal.SIGKILL, rank: int = 0) -> None:
        """Send a signal to one of them."""
        os.kill(self.pids[rank], number)

    def wait(self, timeout: float = 900) -> list[int]:
        """Their exit codes, once all are gone; what is left after so many seconds is killed."""
        return _fork_server().wait(self.pids, timeout)

    @property
    def stdout(self) -> str:
        return (self.home / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.home / "stderr").read_text()


@contextmanager
def start(
    processes: int,
    *words: str,
    plan: Sequence[fault_injection.Fault] = (),
    notes: Path | None = None,
    **environment: str,
) -> Iterator[Started]:
    """Begin what `spawn` runs, with faults where there is a plan. Whoever begins it waits for it."""
    env = {**os.environ, "PYTHONPATH": str(PLUGIN), "ACCELERATE_USE_CPU": "true", **environment}
    env |= fault_injection.environment(plan, notes)
    if processes > 1:
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
        env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), **at}
    with tempfile.TemporaryDirectory() as home:
        files = [str(Path(home) / name) for name in ("stdout", "stderr")]
        pids = _fork_server().start(
            processes=processes, words=words, environment=env, folder=str(ROOT.parent), files=files
        )
        yield Started(pids, Path(home))


@functools.cache
def _fork_server() -> ForkServer:
    return ForkServer()


def _port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def all_same(a: Ran, b: Ran) -> bool:
    """Whether the last checkpoints of two runs hold the same bits."""
    one, other = a.last.tensors, b.last.tensors
    return one.keys() == other.keys() and all(
        one[group].keys() == other[group].keys()
        and all(torch.equal(tensor, other[group][name]) for name, tensor in one[group].items())
        for group in one
    )


def stripes(folder: Path, per_class: int, seed: int, size: tuple[int, int] = (32, 32), name: str = "{:03d}") -> None:
    """Images of three classes: stripes across, down and slanted, under noise. Learnable, and not at once."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    for title, wave in (("across", x), ("down", y), ("slanted", x + y)):
        (folder / title).mkdir(parents=True)
        for n in range(per_class):
            pixels = 128 + 60 * np.sin(wave * 1.2 + rng.uniform(0, 6.3)) + rng.normal(0, 60, size)
            coloured = pixels[:, :, None] * rng.uniform(0.7, 1.0, 3)
            Image.fromarray(coloured.clip(0, 255).astype(np.uint8)).save(folder / title / f"{name.format(n)}.png")

"""Measure start-up: `trainkit --help`, the message about an error in a recipe, the first step.

    python benchmarks/startup.py
    ... --rounds 7 --cases help "recipe error"

`torch` is `python -c "import torch"`. `eager` imports what a script with this project's libraries imports at its head:
torch, timm, accelerate, datasets and mlflow. `trainkit` is, for help, the command; for an error, the command behind
`accelerate launch` with a recipe that has one in its task and one in its keys; each in a new process, after one that
is not counted. The first step is that of the sample set's face teacher, in a process that has trained it for a step
before: from the order to the journal's first line, with the store, the run and the data opened.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from contest import Contest, Sample, Target

ROOT = Path(__file__).resolve().parents[1]
EAGER = "import torch, timm, accelerate, datasets, mlflow"
SHORT = (
    "train.length=1 steps",
    "train.schedule.warmup=null",
    "log.every=1 steps",
    "evaluations={}",
    "best=null",
    "checkpoints.at_end=false",
)


def torch(case: str) -> Sample:
    return started("-c", "import torch")


def eager(case: str) -> Sample:
    return started("-c", EAGER)


def trainkit(case: str) -> Sample:
    if case == "help":
        return started("-c", "from trainkit.cli.main import main; main(['--help'])")
    if case == "recipe error":
        recipe = str(ROOT / "recipes" / "adadistill.yaml")
        return started(str(ROOT / "trainkit" / "run.py"), recipe, "task.alpha=none", "optim.rate=1", code=2)
    return first_step()


def started(*words: str, code: int = 0) -> Sample:
    """Seconds that a command takes; processor time beside them."""
    for _ in range(2):
        before, began = os.times(), time.perf_counter()
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        wall, after = time.perf_counter() - began, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        if done.returncode != code:
            raise RuntimeError(f"{words}: exit code {done.returncode}, not {code}: {done.stderr[-500:]}")
    return Sample(wall, None, {"cpu s": cpu})


def first_step() -> Sample:
    from trainkit.config.run_request import RunRequest
    from trainkit.experiments.launch import launch
    from trainkit.tracking import journal
    from trainkit.tracking.store import Store

    recipe = ROOT / "recipes" / "face_teacher.yaml"
    with tempfile.TemporaryDirectory() as home:
        os.environ["TRAINKIT_STORE"] = home
        for _ in range(2):
            began, busy = time.time(), time.process_time()
            with contextlib.redirect_stdout(sys.stderr):
                launch(RunRequest(recipe, SHORT), lambda: False)
            cpu = time.process_time() - busy
        (first,) = journal.read(Store.locate().runs()[-1].journal).metrics["train/loss"]
    return Sample(first.t / 1000 - began, None, {"cpu s": cpu})


CONTEST = Contest(
    title="Start-up",
    unit="s",
    baseline="torch",
    sides={"torch": torch, "eager": eager, "trainkit": trainkit},
    cases=("help", "recipe error", "first step"),
    only={"recipe error": ("torch", "trainkit"), "first step": ("trainkit",)},
    targets=(
        Target("help", "trainkit", 0.2, of="value", words="help, s,"),
        Target("recipe error", "trainkit", 0.3, of="difference", words="recipe error, s beyond importing torch,"),
        Target("first step", "trainkit", 2.0, of="value", words="first step after imports, s,"),
    ),
    bounds=(
        "Beyond importing torch, a recipe error takes the time of strict validation: importing pydantic and the "
        "modules of task and data, and building the schema."
    ),
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

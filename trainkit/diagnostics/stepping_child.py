"""The child of `stepped_process`: a training that runs a given number of steps on request, and waits in between.

    python -m trainkit.diagnostics.stepping_child RECIPE [words ...] [--plugin=PACKAGE]

Requests and answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.backends.cpu import get_cpu_capability

from trainkit.config import loader
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.diagnostics.short_recipe import steps_alone
from trainkit.diagnostics.stepped_process import PREFIX, Block, Ready
from trainkit.distributed.launch_settings import cannot_compile, with_compile_mode
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.tracking.journal import Journal
from trainkit.tracking.run_folder import RunFolder, RunInfo
from trainkit.tracking.store import Store
from trainkit.tracking.system_load import cores
from trainkit.tracking.tracker import Silent
from trainkit.training.dependencies import gather
from trainkit.training.evaluator import evaluate, trial
from trainkit.training.gradients import Update
from trainkit.training.out_of_memory import is_out_of_memory
from trainkit.training.plan import evaluated, updates
from trainkit.training.run_logger import RunLogger
from trainkit.training.trainer import Trainer

_LENGTH = "100M steps"

Tell = Callable[[Mapping[str, Any]], None]


class _Session:
    """A training, and the answers to the parent's requests. `whole` is the recipe with its evaluations."""

    def __init__(self, trainer: Trainer, whole: Recipe, tell: Tell):
        self._trainer, self._whole, self._tell = trainer, whole, tell

    def go(self, steps: int) -> dict[str, Any]:
        """Run this many steps, with what is due after each; returns their `Block`."""
        trainer = self._trainer
        losses: list[list[tuple[torch.Tensor, Any]]] = []
        if trainer.runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.runtime.device)
        began = time.perf_counter()
        for _ in range(steps):
            losses.append(_copied(trainer.step()))
            trainer.after_step()
        trainer.runtime.synchronize()
        block = Block(
            steps=steps,
            samples=steps * trainer.plan.batch_size,
            seconds=time.perf_counter() - began,
            losses=tuple(map(_mean, losses)),
            memory_gb=_memory_gb(trainer.runtime),
        )
        return {"block": asdict(block)}

    def obey(self, word: Mapping[str, Any]) -> None:
        """Serve a request of the parent."""
        if word["do"] == "go":
            self._tell(self.go(word["steps"]))
        else:
            self._tell(self._evaluate(word["name"], word["most"]))

    def ready(self) -> Ready:
        """Return the facts known after the first step."""
        plan, data, runtime = self._trainer.plan, self._trainer.data, self._trainer.runtime
        norms = torch.nn.modules.batchnorm._BatchNorm
        return Ready(
            steps_per_epoch=plan.steps_per_epoch,
            batch_norm=any(isinstance(m, norms) and m.training for m in self._trainer.model.bare.modules()),
            views=data.train.views,
            machine=_facts(runtime),
        )

    def _evaluate(self, name: str, most: float) -> dict[str, Any]:
        runtime, net, task = self._trainer.runtime, self._trainer.model.networks.model, self._whole.task
        split, size = evaluated(self._whole, self._trainer.data)[name], self._whole.evaluations[name].batch_size
        seconds = trial(task, net, split, size, runtime)
        if seconds > most:
            return {"seconds": seconds, "ran": False}
        began = time.perf_counter()
        evaluate(task, net, split, size, runtime)
        return {"seconds": time.perf_counter() - began, "ran": True}


def _copied(update: Update | None) -> list[tuple[torch.Tensor, Any]]:
    # A copy: the memory of a captured CUDA graph is used again by the next step.
    return [] if update is None else [(loss.sum.clone(), loss.weight) for loss in update.losses]


def _mean(losses: list[tuple[torch.Tensor, Any]]) -> float:
    """Return the mean loss of a step; waits for the device."""
    weight = sum(float(weight) for _, weight in losses)
    return sum(float(total) for total, _ in losses) / weight if weight else float("nan")


class _Journalled(Silent):
    """A tracker that writes a journal but not to a store, so that a log line costs as much as in a training."""

    def __init__(self, folder: RunFolder) -> None:
        self._journal = Journal(folder.journal)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._journal.note(step, {name: float(value) for name, value in metrics.items()})

    def event(self, step: int, name: str, data: Any = None) -> None:
        self._journal.event(step, name, data)

    def position(self) -> int:
        return self._journal.position

    def commit(self) -> int:
        return self._journal.commit()


def _facts(runtime: Runtime) -> dict[str, Any]:
    """Return the facts of the machine that decide which switches apply."""
    cuda = runtime.device.type == "cuda"
    return {
        **runtime.describe(),
        "torch": torch.__version__,
        "instructions": get_cpu_capability(),
        "bf16": not cuda or torch.cuda.is_bf16_supported(including_emulation=False),
        "tf32": cuda and torch.cuda.get_device_capability(runtime.device) >= (8, 0),
        "compile": runtime.compile,
        "compiles": cannot_compile(runtime.device.type),
        "cores": cores(),
    }


def _memory_gb(runtime: Runtime) -> float:
    """Return the peak of the CUDA allocator; on a CPU the private memory of this process and its workers now."""
    if runtime.device.type == "cuda":
        return torch.cuda.max_memory_allocated(runtime.device) / 1e9
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # a worker that has just ended
            total += process.memory_full_info().uss
    return total / 1e9


def shortened(recipe: Recipe) -> Recipe:
    """Return a recipe as it is trained here: endless, and without evaluations and checkpoints."""
    recipe = steps_alone(recipe)
    return replace(recipe, train=replace(recipe.train, length=Span.parse(_LENGTH)), evaluations={})


def run(words: list[str], began: float, tell: Tell) -> None:
    """Run the first step, answer, and then serve the parent's requests until it closes the pipe."""
    plugins = tuple(word.partition("=")[2] for word in words if word.startswith("--plugin="))
    path, *overrides = [word for word in words if not word.startswith("--plugin=")]
    request = RunRequest(Path(path), tuple(overrides), plugins)
    whole = load(request)
    runtime, store = Runtime(whole), Store.locate()
    try:
        found = {name: dependency.file for name, dependency in gather(request, whole, runtime, store, None).items()}
        data = whole.data.open(whole.seed)
        recipe = shortened(with_compile_mode(whole, runtime.device.type, updates(whole, data, runtime.world)[1]))
        folder = _folder(recipe, began)
        logger = RunLogger(recipe, folder, _Journalled(folder), main=True)
        with Trainer(recipe, data, runtime, logger, weights=found) as trainer:
            trainer.start()
            session = _Session(trainer, whole, tell)
            first = session.go(1)
            tell({"ready": asdict(session.ready())})
            tell(first)
            for line in sys.stdin:
                session.obey(json.loads(line))
            if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGCONT)  # workers that were frozen with it
    finally:
        runtime.close()


def _folder(recipe: Recipe, began: float) -> RunFolder:
    folder = RunFolder(Path(os.environ.get("TRAINKIT_PACED") or tempfile.mkdtemp(prefix=PREFIX)))
    folder.checkpoints.mkdir(exist_ok=True)
    info = RunInfo(folder.name, recipe.name, loader.digest(recipe), recipe.seed, began)
    write_aside(folder.path / "run.json", json.dumps(asdict(info)))
    return folder


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
        run(words, began, tell)
    except UserError as error:
        user_error = [error.where, error.found, error.expected, error.remedy]
        tell({"failed": "user", "reason": str(error), "user_error": user_error})
    except BrokenPipeError:
        pass
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        short = f"{type(error).__name__}: {said[0]}"[:300]
        tell({"failed": "memory" if is_out_of_memory(error) else "failed", "reason": short})
    return 0


def _wake_when_orphaned() -> None:
    """Have a frozen child woken when its parent dies: it then reads the end of its input, and leaves with its workers.

    On Linux; elsewhere the kernel wakes stopped process groups that no process can wake.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        import ctypes

        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

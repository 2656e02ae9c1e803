"""How long a training stands still for a checkpoint of 300 MB: model and moments of Adam, steps of 0.1 s and more.

    python benchmarks/checkpoints.py
    ... --rounds 7 --sides torch.save trainkit

Each side makes the same steps of a model of 26 million parameters and saves three times. The figure is the time
for which the training thread is held up by a save, the median of them: in the call itself and, where a step waits
for a copy, there. `first` is that of the first, for which memory must be got; `slowed` what the steps made while a
checkpoint is being written take longer than others, in all; `written` the time from the call to the checkpoint's last
byte; `step` a step in peace; all in ms. One thread trains. All sides must come to the same weights, and what they
have saved must be the weights of the moment of the call.

- `torch.save` writes model and optimizer into one file. It does not sync, hash or rename.
- `dcp` is `torch.distributed.checkpoint.async_save`: copies at once, a thread writes.
- `trainkit` is what its loop does: its writer (hashed, synced, read back, renamed) behind the training; memory is got
  ahead, after the first step.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contest import Contest, Sample, Target, digest

SAVES, BEFORE, AFTER = 3, 3, 12
"""Checkpoints, steps in peace before each, and steps after it."""


class Training:
    """A model that learns, and how long its steps take."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        self.net = nn.Sequential(
            *[m for _ in range(6) for m in (nn.Linear(2080, 2080), nn.ReLU())], nn.BatchNorm1d(2080)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)
        self.batches = torch.randn(4, 32, 2080)
        self.steps = 0

    def update(self, wait: Callable[[], Any] | None = None) -> float:
        """One step; returns its seconds. `wait` is called before the weights change."""
        began = time.perf_counter()
        self.net(self.batches[self.steps % 4]).square().mean().backward()
        if wait is not None:
            wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return time.perf_counter() - began


def measured(
    training: Training,
    save: Callable[[], Any],
    wait: Callable[[], Any] | None,
    done: Callable[[], bool],
    load: Callable[[], dict[str, Any]],
    first: Callable[[], Any] = lambda: None,
) -> Sample:
    """Steps in peace, a save, steps while it is being written and after; so many times.

    `first` is called after the first step.
    """
    held, slowed, written, saved = [], [], [], []
    waited = [0.0]

    def timed() -> None:
        began = time.perf_counter()
        if wait is not None:
            wait()
        waited[0] += time.perf_counter() - began

    training.update()
    first()
    for _ in range(2):
        training.update()
    for _ in range(SAVES):
        peace = statistics.median(training.update(timed) for _ in range(BEFORE))
        expected = digest(training.net.state_dict())
        waited[0] = 0.0
        began = time.perf_counter()
        save()
        in_call, end, beside = time.perf_counter() - began, None, []
        for _ in range(AFTER):
            if end is None and done():
                end = time.perf_counter()
            took = training.update(timed)
            if end is None:
                beside.append(took)
        while end is None and not done():
            time.sleep(0.01)
        written.append((end or time.perf_counter()) - began)
        held.append(in_call + waited[0])
        slowed.append(sum(beside) - waited[0] - len(beside) * peace)
        saved.append(digest(load()) == expected)
    more = {"slowed": statistics.median(slowed), "written": statistics.median(written), "step": peace, "first": held[0]}
    more = {key: 1e3 * seconds for key, seconds in more.items()}
    return Sample(1e3 * statistics.median(held), [digest(training.net.state_dict()), saved], more)


def _always() -> bool:
    return True


def torch_save(case: str) -> Sample:
    """One file, on the training thread."""
    import torch

    training, folder = Training(), Path(tempfile.mkdtemp())

    def save() -> None:
        torch.save({"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict()}, folder / "x.pt")

    try:
        return measured(training, save, None, _always, lambda: torch.load(folder / "x.pt")["model"])
    finally:
        shutil.rmtree(folder)


def dcp(case: str) -> Sample:
    """PyTorch's own asynchronous writer, which wants a process group."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    training, folder = Training(), Path(tempfile.mkdtemp())
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    made: list[Any] = []

    def save() -> None:
        state = {"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict()}
        made.append(dcp.async_save(state, checkpoint_id=folder / str(len(made))))

    def load() -> dict[str, Any]:
        state = {"model": {name: torch.empty_like(t) for name, t in training.net.state_dict().items()}}
        dcp.load(state, checkpoint_id=folder / str(len(made) - 1))
        return state["model"]

    try:
        return measured(training, save, None, lambda: made[-1].done(), load)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)


def trainkit(case: str) -> Sample:
    """As the loop does it."""
    import torch

    from trainkit.checkpoint import storage
    from trainkit.config.run_request import RunRequest, load
    from trainkit.tracking.run_folder import RunFolder
    from trainkit.training.checkpointer import CheckpointWriter
    from trainkit.training.events import EventSchedule
    from trainkit.training.loss_meter import LossMeter
    from trainkit.training.run_logger import RunLogger
    from trainkit.training.state import TrainState

    class Folder(RunFolder):
        """A folder without a record of its run."""

        def update(self, **changes: Any) -> None:
            pass

    training, folder = Training(), Folder(Path(tempfile.mkdtemp()))
    agenda, tally = (
        EventSchedule({}, lambda x: x, lambda *what: None),
        LossMeter(SimpleNamespace(device=torch.device("cpu"), at_once=True)),
    )
    state = TrainState(training.net, training.optimizer, None, None, None, agenda, tally, {})
    recipe = load(RunRequest(Path("recipes/convnext.yaml"), ("checkpoints.keep_last=1",)))
    writer = CheckpointWriter(recipe, RunLogger(recipe, folder, main=True))

    def save() -> None:
        writer.settle()
        state.step = training.steps
        copies, scalars = state.freeze(keep=True)
        writer.begin(state.step, copies, scalars)

    def read() -> dict[str, Any]:
        path, _ = storage.newest_valid(folder.checkpoints)
        return storage.read(path).tensors["model"]

    def ahead() -> None:
        threading.Thread(target=state.allocator(), daemon=True).start()

    try:
        return measured(training, save, writer.wait_for_copies, lambda: not writer.writing, read, ahead)
    finally:
        writer.settle()
        shutil.rmtree(folder.path)


CONTEST = Contest(
    title="Saving a 300 MB checkpoint",
    unit="ms blocked",
    baseline="torch.save",
    sides={"torch.save": torch_save, "dcp": dcp, "trainkit": trainkit},
    targets=(
        Target("", "trainkit", 0.1, words="blocked time relative to torch.save"),
        Target("", "trainkit", 50, "first", words="first save, ms blocked"),
    ),
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

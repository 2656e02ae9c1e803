"""Microseconds that a training step takes in other frameworks and here, beyond a loop written by hand.

    python benchmarks/step.py
    ... --rounds 7 --sides trainkit accelerate

A small model of three linear layers, data in memory in the same order, AdamW in one kernel, gradients clipped, a
cosine schedule, eight metrics written every 50 steps. Sides take turns of 100 steps, from the loss of step 300 to that
of step 2,300; of each the last 50 are timed, a log line among them: the first bring back what others drove out of the
caches. The weights must end equal.

`bare` is the loop that one writes by hand: it clips, sets the learning rate, sums loss and accuracy, and appends the
metrics to a file. `trainkit` is `trainkit train` with what it has by default: journal and MLflow store, clock and
observer, gates for an evaluation and checkpoints, a signal to stop, a check of every step for values that are not
finite, a progress bar in a terminal. `accelerate` is the loop of its documents, `lightning` its trainer;
both with their progress bar, and with the cheapest writer of metrics that they have.
"""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contest import Contest, Sample, Target, digest, next_turn
from torch import Tensor, nn

from trainkit import rng
from trainkit.distributed import stop_signal
from trainkit.interfaces import Dataset, DatasetInfo, Loss, Networks, Scores

SEED, SAMPLES, FEATURES, HIDDEN, CLASSES, BATCH = 0, 4096, 64, 128, 10, 64
FIRST, STEPS, BLOCK = 300, 2300, 50
"""The steps between whose losses time runs, in turns of two blocks of so many; the training ends with the second."""
EVERY = 50
RATE, DECAY, CLIP = 1e-3, 0.01, 1.0
PER_EPOCH = SAMPLES // BATCH
TABLES = {"task": {"step": "step:Told"}, "data": {"step": "step:InMemory"}}


# ---- What all sides do


def data() -> tuple[Tensor, Tensor]:
    """Samples (SAMPLES, FEATURES) and their classes."""
    rng = np.random.default_rng(SEED)
    labels = rng.integers(0, CLASSES, SAMPLES)
    means = rng.normal(0, 0.3, (CLASSES, FEATURES))
    points = means[labels] + rng.normal(0, 1, (SAMPLES, FEATURES))
    return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels)


def rows(step: int) -> np.ndarray:
    """The samples of a step."""
    epoch, at = divmod(step, PER_EPOCH)
    if epoch not in _orders:
        _orders.clear()
        _orders[epoch] = rng.permutation(SEED, epoch, SAMPLES).reshape(PER_EPOCH, BATCH)
    return _orders[epoch][at]


_orders: dict[int, np.ndarray] = {}


def network() -> nn.Module:
    torch.manual_seed(SEED)
    layers = [nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers)


def factor(step: int) -> float:
    """The share of the learning rate that the step after `step` others has."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / STEPS)))


class Watch:
    """The time of blocks of steps, taken where each side computes its loss; and what the training came to."""

    def __init__(self) -> None:
        self.calls, self.began = 0, (0.0, 0.0)
        self.blocks: list[tuple[float, float]] = []
        self.net: nn.Module | None = None

    def now(self) -> tuple[float, float]:
        return time.perf_counter(), time.thread_time()

    def loss(self, net: nn.Module, points: Tensor, labels: Tensor, reduction: str = "mean") -> tuple[Tensor, Tensor]:
        """Loss and accuracy of a batch."""
        self.calls += 1
        place = (self.calls - FIRST) % (2 * BLOCK) if FIRST <= self.calls <= STEPS else -1
        if place == 0:
            if self.calls > FIRST:
                wall, cpu = (1e6 * (b - a) / BLOCK for a, b in zip(self.began, self.now(), strict=True))
                self.blocks.append((wall, cpu))
            next_turn()
        elif place == BLOCK:
            self.began = self.now()
        logits = net(points)
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        return F.cross_entropy(logits, labels, reduction=reduction), accuracy

    def sample(self, net: nn.Module) -> Sample:
        if self.calls != STEPS:
            raise RuntimeError(f"{self.calls} losses, not {STEPS}")
        wall, cpu = zip(*self.blocks, strict=True)
        return Sample(statistics.median(wall), digest(net.state_dict()), {"cpu us": statistics.mean(cpu)}, wall)


WATCH = Watch()


class Sums:
    """Loss, accuracy and norm since the last line, for loops that keep them themselves."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.loss, self.accuracy, self.steps, self.since = torch.zeros(()), torch.zeros(()), 0, time.perf_counter()

    def add(self, loss: Tensor, accuracy: Tensor) -> None:
        self.loss += loss.detach()
        self.accuracy += accuracy
        self.steps += 1

    def line(self, step: int, norm: Tensor | float, lr: float) -> dict[str, float]:
        """The eight metrics of a line, which begins anew."""
        seconds = time.perf_counter() - self.since
        found = {
            "loss": float(self.loss) / self.steps,
            "accuracy": float(self.accuracy) / self.steps,
            "grad_norm": float(norm),
            "lr": lr,
            "epoch": step / PER_EPOCH,
            "seconds": seconds,
            "steps_per_s": self.steps / seconds,
            "samples_per_s": self.steps * BATCH / seconds,
        }
        self.clear()
        return found


class Batches(torch.utils.data.Dataset):
    """Batches of the steps in turn, as a data set whose items are batches."""

    def __init__(self) -> None:
        self.points, self.labels = data()

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= STEPS:
            raise IndexError(step)
        chosen = torch.from_numpy(rows(step))
        return self.points[chosen], self.labels[chosen]


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Batches(), batch_size=None, shuffle=False)


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY, fused=True)


class Terminal(io.TextIOWrapper):
    """Where a progress bar is drawn and nobody looks."""

    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Path]:
    """A terminal for progress bars, and a folder for what a side writes."""
    before = sys.stderr
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "wb") as nowhere:
        sys.stderr = Terminal(nowhere, write_through=True)
        try:
            yield Path(folder)
        finally:
            sys.stderr = before


# ---- Sides


def bare(case: str) -> Sample:
    """A loop written by hand."""
    batches, net, sums = Batches(), network(), Sums()
    moves = optimizer(net)
    with terminal() as folder, open(folder / "metrics.jsonl", "w") as out:
        for step in range(STEPS):
            points, labels = batches[step]
            loss, accuracy = WATCH.loss(net, points, labels)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            for group in moves.param_groups:
                group["lr"] = RATE * factor(step)
            moves.step()
            moves.zero_grad()
            sums.add(loss, accuracy)
            if (step + 1) % EVERY == 0:
                out.write(json.dumps(sums.line(step + 1, norm, RATE * factor(step))) + "\n")
    return WATCH.sample(net)


RECIPE = f"""\
name: step
seed: {SEED}
task: {{name: step}}
data: {{name: step}}
optim: {{name: adamw, lr: {RATE}, weight_decay: {DECAY}, clip_norm: {CLIP}}}
train: {{length: {STEPS} steps, batch_size: {BATCH}, schedule: {{name: cosine}}}}
evaluations: {{val: {{every: {10 * STEPS} steps}}}}
best: {{metric: val/accuracy}}
checkpoints: {{every: {10 * STEPS} steps}}
log: {{every: {EVERY} steps, ceilings: 'off'}}
"""


def trainkit(case: str) -> Sample:
    """`trainkit train`, in this process."""
    import step  # as a plug-in

    with terminal() as folder:
        os.environ["TRAINKIT_STORE"] = str(folder / "store")
        (folder / "step.yaml").write_text(RECIPE)
        from trainkit.config.run_request import RunRequest
        from trainkit.experiments.launch import launch

        out, sys.stdout = sys.stdout, sys.stderr
        try:
            launch(RunRequest(folder / "step.yaml", (), ("step",)), stop_signal.stop_flag())
        finally:
            sys.stdout = out
    return step.WATCH.sample(step.WATCH.net)


@dataclass(kw_only=True)
class Told:
    """The task of the recipe."""

    def required_weights(self) -> dict[str, Any]:
        return {}

    def build(self, meta: DatasetInfo, found: Any, seed: int) -> Networks:
        WATCH.net = network()
        return Networks(WATCH.net)

    def loss(self, net: nn.Module, networks: Networks, batch: dict[str, Tensor], at: Any) -> Loss:
        loss, accuracy = WATCH.loss(net, batch["image"], batch["label"], "sum")
        return Loss(loss, len(batch["label"]), {"accuracy": accuracy})

    def predict(self, net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hit": net(batch["image"]).argmax(1) == batch["label"]}

    def score(self, rows: dict[str, Tensor], split: Any) -> Scores:
        return Scores({"accuracy": float(rows["hit"].mean())})


@dataclass(kw_only=True)
class InMemory:
    """The data of the recipe."""

    train: str = "made up"
    evaluate: dict[str, str] = field(default_factory=dict)

    def open(self, seed: int) -> Dataset:
        return Dataset(DatasetInfo(CLASSES, (FEATURES,), "made up"), Points("train"), {"val": Points("val")})

    def missing(self) -> list[str]:
        return []


class Points:
    """A split of `InMemory`."""

    protocol = at_once = None
    views, size = 1, SAMPLES

    def __init__(self, name: str):
        self.name, self.digest = name, name
        self.points, self.labels = data()

    def order(self, epoch: int, batch_size: int) -> np.ndarray:
        return rng.permutation(SEED, epoch, SAMPLES).reshape(PER_EPOCH, BATCH)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> dict[str, Tensor]:
        chosen = torch.from_numpy(indices)
        return {"image": self.points[chosen], "label": self.labels[chosen], "index": chosen}

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch


def accelerate(case: str) -> Sample:
    """The loop of Accelerate's documents."""
    from accelerate import Accelerator
    from tqdm import tqdm

    accelerator, net, sums = Accelerator(cpu=True), network(), Sums()
    moves = optimizer(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(moves, factor)
    net, moves, batches, schedule = accelerator.prepare(net, moves, loader(), schedule)
    with terminal() as folder, open(folder / "metrics.jsonl", "w") as out:
        for step, (points, labels) in enumerate(tqdm(batches, file=sys.stderr), 1):
            with accelerator.accumulate(net):
                loss, accuracy = WATCH.loss(net, points, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(net.parameters(), CLIP)
                lr = schedule.get_last_lr()[0]
                moves.step()
                schedule.step()
                moves.zero_grad()
            sums.add(loss, accuracy)
            if step % EVERY == 0:
                out.write(json.dumps(sums.line(step, norm, lr)) + "\n")
    return WATCH.sample(accelerator.unwrap_model(net))


def lightning(case: str) -> Sample:
    """The Trainer of Lightning."""
    import logging

    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.sums = network(), Sums()

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            loss, accuracy = WATCH.loss(self.net, *batch)
            self.sums.add(loss, accuracy)
            self.log_dict({"train/loss": loss, "train/accuracy": accuracy})
            return loss

        def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **more: Any) -> None:
            self.norm = nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)

        def on_train_batch_end(self, *rest: Any) -> None:
            if self.global_step % EVERY == 0:
                lr = self.lr_schedulers().get_last_lr()[0]
                self.logger.log_metrics(self.sums.line(self.global_step, self.norm, lr), self.global_step)

        def configure_optimizers(self) -> dict[str, Any]:
            moves = optimizer(self.net)
            schedule = torch.optim.lr_scheduler.LambdaLR(moves, factor)
            return {"optimizer": moves, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    said, sys.stdout = sys.stdout, io.StringIO()
    try:
        with terminal() as folder:
            lightning.Trainer(
                accelerator="cpu",
                devices=1,
                max_steps=STEPS,
                logger=CSVLogger(folder),
                log_every_n_steps=EVERY,
                enable_checkpointing=False,
                enable_model_summary=False,
            ).fit(module, loader())
    finally:
        sys.stdout = said
    return WATCH.sample(module.net)


SIDES: dict[str, Callable[[str], Sample]] = {
    "bare": bare,
    "trainkit": trainkit,
    "accelerate": accelerate,
    "lightning": lightning,
}

CONTEST = Contest(
    title="Training step, all features on",
    unit="us per step",
    baseline="bare",
    sides=SIDES,
    turns=True,
    targets=[Target("", "trainkit", 20, "difference", words="trainkit minus bare, us per step")],
    bounds=(
        "On 2026-11-23, on another CPU with a bare loop of 480 to 500 us, the difference was 14 to 32 us, of which the "
        "log line every 50 steps took 22 (1.1 ms each) and the slowdown detector 8."
    ),
)


if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

"""A plug-in with a task and a data set small enough to train in a second: what the loop is tested with.

Convolution, batch norm, dropout, a memory that learns without gradients, an augmentation, and switches that break
things at a chosen step or sample.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainkit import rng
from trainkit.environment import record
from trainkit.errors import UserError
from trainkit.interfaces import Dataset, DatasetInfo, Loss, Networks, Scores, Source

TABLES = {
    "task": {"toy": "toy:ToyTask"},
    "data": {"toy": "toy:ToyData", "folded": "toy:FoldedData", "failing": "failing:FailingData"},
}
CLASSES, SIDE = 4, 8

if "TOY_OTHER_PROGRAM" in os.environ and os.environ.get("RANK", "0") != "0":  # as on a machine with another torch
    program = record.program
    record.program = lambda *plugins: {**program(*plugins), "torch": "0.4"}


class Net(nn.Module):
    def __init__(self, norm: bool, dropout: float):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8 * SIDE * SIDE, CLASSES)

    def forward(self, x):
        return self.head(self.drop(F.relu(self.norm(self.conv(x))).flatten(1)))


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))


class Constant(nn.Module):
    """A network that learned nothing."""

    def forward(self, x):
        return torch.zeros(len(x), CLASSES)


class Oracle(nn.Module):
    """A network that reads the class from the image as it was made."""

    def forward(self, x):
        return torch.stack([x[:, 0, c, c] for c in range(CLASSES)], 1)


@dataclass(kw_only=True)
class ToyTask:
    norm: bool = True
    dropout: float = 0.3
    nan_at: int | None = None
    """Step whose loss is not a number."""
    add_at: int | None = None
    """Step whose loss is infinite though its gradients are not."""
    teacher: str = "none"
    stored: bool = False
    """Whether what the teacher says is kept in the store."""
    tensor_weight: bool = False
    slow_score: float = 0.0
    slow_rank: int | None = None
    """Process that takes 30 ms longer until its backward pass."""
    needs_recipe: str | None = None
    signal_at: int | None = None
    """Step at which the process is told to stop, as a scheduler would."""

    def required_weights(self):
        return {"first": Source(recipe=self.needs_recipe)} if self.needs_recipe else {}

    def build(self, meta, found, seed):
        frozen = {"constant": {"teacher": Constant()}, "oracle": {"teacher": Oracle()}, "none": {}}[self.teacher]
        tabulated = {"teacher": frozen["teacher"]} if self.teacher == "oracle" else {}
        trusted = ("teacher",) if frozen else ()
        return Networks(Net(self.norm, self.dropout), frozen, trusted, tabulated, Memory(), cache_on_disk=self.stored)

    def loss(self, net, networks, batch, at):
        if self.signal_at == at.step and not hasattr(self, "signalled"):
            self.signalled = True  # once, not in every micro-batch: a second signal ends the process
            os.kill(os.getpid(), signal.SIGTERM)
        if os.environ.get("RANK", "0") == str(self.slow_rank):
            time.sleep(0.03)
        logits = net(batch["image"])
        if self.teacher == "oracle":
            with torch.no_grad():
                fresh = networks.frozen["teacher"](batch["image"])
                assert torch.allclose(batch["teacher"], fresh, rtol=1e-3 if self.stored else 1e-5)
        if networks.memory is not None:
            networks.memory.mean.lerp_(at.gather(logits.detach()).mean(0), 0.1)
        loss = F.cross_entropy(logits, batch["label"], reduction="sum")
        if self.nan_at == at.step:
            loss = loss * torch.nan
        if self.add_at == at.step:
            loss = loss + torch.inf
        weight = torch.tensor(float(len(logits))) if self.tensor_weight else len(logits)
        return Loss(loss, weight, {"margin": (logits.amax(1) - logits.mean(1)).detach().mean()})

    def predict(self, net, batch):
        return {"logits": net(batch["image"])}

    def score(self, rows, split):
        end = time.monotonic() + self.slow_score
        while time.monotonic() < end:  # in portions, between which a signal is handled
            time.sleep(0.01)
        hit = rows["logits"].argmax(1) == torch.from_numpy(split.labels)
        chance = 1 / CLASSES + 3 * (0.25 / split.size) ** 0.5
        table = {"id": split.ids, "hit": hit.numpy(), "accuracy": hit.float().numpy()}
        return Scores({"accuracy": float(hit.float().mean())}, table, chance={"accuracy": chance})


@dataclass(kw_only=True)
class ToyData:
    samples: int = 64
    test: int = 37
    noise: float = 1.0
    flip: bool = True
    lost_sample: bool = False
    damaged: int | None = None
    train: str = "made up"
    evaluate: dict[str, str] = field(default_factory=dict)

    def open(self, seed):
        train = ToySplit("train", self.samples, 1, self.noise, seed, self.flip, damaged=self.damaged)
        test = ToySplit("val", self.test, 2, self.noise, seed, False, lost=self.lost_sample)
        if "TOY_DIFFERS" in os.environ:  # as on machines with a copy each
            train.digest += os.environ["RANK"]
        return Dataset(DatasetInfo(CLASSES, (3, SIDE, SIDE), train.digest), train, {"val": test})

    def missing(self):
        return []


@dataclass(kw_only=True)
class FoldedData(ToyData):
    """The same samples, of which every third (or so) is kept from training."""

    folds: int = 3
    fold: int | None = None
    broken_fold: int | None = None
    """Fold whose data cannot be read."""

    def open(self, seed):
        if self.broken_fold is not None and self.fold == self.broken_fold:
            raise UserError(f"fold {self.fold}", "its file is damaged")
        rows = np.arange(self.samples)
        out = np.zeros(self.samples, bool) if self.fold is None else rows % self.folds == self.fold
        train = ToySplit("train", self.samples, 1, self.noise, seed, self.flip).only(rows[~out])
        held_out = ToySplit("held_out", self.samples, 1, self.noise, seed, False).only(rows[out])
        fixed = ToySplit("val", self.test, 2, self.noise, seed, False)
        splits = {"val": fixed} | ({} if self.fold is None else {"held_out": held_out})
        return Dataset(DatasetInfo(CLASSES, (3, SIDE, SIDE), f"{train.digest}-{self.fold}"), train, splits)


class ToySplit:
    protocol = None
    at_once = None

    def __init__(self, name, size, stream, noise, seed, flip, lost=False, damaged=None):
        self.damaged = damaged
        self.name, self.size, self.seed, self.flip, self.lost = name, size, seed, flip, lost
        rng = np.random.default_rng(stream)
        self.labels = rng.permutation(np.arange(size) % CLASSES)
        self.images = rng.normal(0, noise, (size, 3, SIDE, SIDE)).astype(np.float32)
        for c in range(CLASSES):
            self.images[self.labels == c, 0, c, c] += 3
        self.digest = f"{name}-{size}-{noise}"
        self.views = 2 if flip else 1
        self.ids = np.arange(size)

    def only(self, rows):
        self.labels, self.images, self.ids, self.size = self.labels[rows], self.images[rows], rows, len(rows)
        return self

    def order(self, epoch, batch_size):
        updates = self.size // batch_size
        return rng.permutation(self.seed, epoch, self.size)[: updates * batch_size].reshape(updates, batch_size)

    def fetch(self, indices, epoch, view=None):
        if self.damaged in indices and os.environ.get("RANK", "0") != "0":
            raise UserError(f"images/{self.damaged}", "damaged on the other machine")
        if self.damaged in indices:
            raise UserError(f"images/{self.damaged}", "damaged")
        if "TOY_SEEN" in os.environ and self.name == "train" and view is None:
            with open(os.environ["TOY_SEEN"], "a") as file:
                file.writelines(f"{epoch} {index}\n" for index in indices)
        images = self.images[indices].copy()
        views = np.full(len(indices), view or 0)
        if self.flip and view is None:
            views[:] = rng.uniform(self.seed, "flip", epoch, indices) < 0.5
        images[views == 1, 1:] = images[views == 1, 1:, :, ::-1]
        shown = np.where(indices == 5, 4, indices) if self.lost else indices
        return {
            "image": torch.from_numpy(images),
            "label": torch.from_numpy(self.labels[indices]),
            "index": torch.from_numpy(shown.astype(np.int64)),
            "view": torch.from_numpy(views.astype(np.int64)),
        }

    def on_device(self, batch):
        return batch

"""One model trained by trainkit, by a loop written by hand and by Accelerate's example loop.

`speed` runs it as a contest: each side is a process of its own, sides take turns block by block, and the first losses
of all must be equal. All read the same images through the same data set: trainkit by its own stream, the others by
torch's DataLoader. A case is `SUBJECT DEVICE tiny|full`; the images are in the folder `$TRAINKIT_GPU_FOLDER`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contest import Contest, Sample, next_turn
from trainkit import rng
from trainkit.config import loader
from trainkit.config.schema import Recipe
from trainkit.interfaces import Batch, Dataset

FOLDER = "TRAINKIT_GPU_FOLDER"
PROVED = 4
"""Steps whose losses must be equal."""
RATE, MOMENTUM, DECAY, CLIP, MARGIN, SCALE, SMOOTHING = 0.02, 0.9, 5e-4, 5.0, 0.35, 64.0, 0.1


class Finished(Exception):
    """Ends a loop that has been timed."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its images and its batch, each in full and as a test has them."""

    net: tuple[str, str]
    batch: tuple[int, int]
    classes: tuple[int, int]
    side: tuple[int, int] = (112, 48)
    rows: tuple[int, int] = (8192, 64)
    faces: bool = True
    """Class centres with a margin and SGD; else a classifier with label smoothing and AdamW."""


SUBJECTS = {
    "mobilefacenet": Subject(
        net=("{name: mobilefacenet, embedding: 512}", "{name: mobilefacenet, embedding: 64, width: 0.25}"),
        batch=(256, 8),
        classes=(10_000, 16),
    ),
    "iresnet50": Subject(
        net=("{name: iresnet50, embedding: 512}", "{name: iresnet18, embedding: 64, width: 0.125}"),
        batch=(256, 8),
        classes=(85_742, 16),
    ),
    "convnext_tiny": Subject(
        net=(
            "{model: convnext_tiny}",
            "{model: convnext_atto, args: {stem_type: overlap_act, depths: [1, 1, 1, 0], dims: [16, 16, 16, 16]}}",
        ),
        side=(224, 32),
        batch=(256, 8),
        classes=(1000, 16),
        rows=(2048, 64),
        faces=False,
    ),
}
_RECIPE = """\
name: {name}
task: {task}
data: {{name: {kind}, train: {data}, image_size: {side}{mirror}}}
optim: {optim}
train: {{length: 100M steps, batch_size: {batch}, precision: "{precision}"}}
checkpoints: {{every: null, at_end: false}}
log: {{every: 1M steps, system_every: null, ceilings: "off"}}
"""


def write(name: str, tiny: bool, folder: Path, precision: str) -> Path:
    """Draw a subject's images and write its recipe into `folder`, unless they are there; returns the recipe."""
    from trainkit.data.storage.image_store import Writer

    subject, path = SUBJECTS[name], folder / f"{name}.yaml"
    side, rows, classes = subject.side[tiny], subject.rows[tiny], subject.classes[tiny]
    data = folder / f"pictures{side}-{classes}"
    if not data.is_dir():
        draw, names = np.random.default_rng(0), [f"p{i}" for i in range(classes)]
        with Writer(data, size=(side, side), store="decoded") as out:
            for i in range(rows):
                out.add_image(str(i), draw.integers(0, 256, (3, side, side), np.uint8))
            labels = draw.permutation(rows) % classes
            out.finish(labels=labels, class_names=names)
    if subject.faces:
        task = f"{{name: embed, net: {subject.net[tiny]}, margin: {{name: cosface, m: {MARGIN}, scale: {SCALE}}}}}"
        optim = f"{{name: sgd, lr: {RATE}, momentum: {MOMENTUM}, weight_decay: {DECAY}, clip_norm: {CLIP}}}"
    else:
        task = f"{{name: classify, net: {subject.net[tiny]}, smoothing: {SMOOTHING}}}"
        optim = f"{{name: adamw, lr: {RATE / 20}, weight_decay: {DECAY}}}"
    mirror = ", flip: false" if subject.faces else ""
    words = {"kind": "faces" if subject.faces else "images", "data": data, "side": side, "mirror": mirror}
    text = _RECIPE.format(name=name, task=task, optim=optim, batch=subject.batch[tiny], precision=precision, **words)
    path.write_text(text, encoding="utf-8")
    return path


class Feed(torch.utils.data.Dataset):
    """Batches of the steps in turn, in the order in which trainkit has them."""

    def __init__(self, data: Dataset, batch: int):
        self.split, self.batch, self.epoch, self.order = data.train, batch, 0, data.train.order(0, batch)

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, step: int) -> Batch:
        epoch, at = divmod(step, self.split.size // self.batch)
        if self.epoch != epoch:
            self.epoch, self.order = epoch, self.split.order(epoch, self.batch)
        return self.split.fetch(np.asarray(self.order[at, 0 : self.batch]), epoch)


@dataclass
class Watch:
    """Times blocks of steps, the device waited for at both ends, and keeps the first losses."""

    device: torch.device
    batch: int
    tiny: bool
    calls: int = 0
    steps: int = 0
    """Of a block, from the pace of the steps before the first."""
    began: float = 0.0
    blocks: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    @property
    def warm(self) -> tuple[int, int]:
        """Steps before the pace is taken, and of that."""
        return (PROVED + 1, 1) if self.tiny else (20, 10)

    def tick(self) -> None:
        """Begin a step."""
        first, many = self.warm
        past = self.calls - first - many
        if self.calls == first:
            self.begin()
        elif past >= 0:
            if past == 0:
                self.steps = max(1, round((0.01 if self.tiny else 0.4) / (self.elapsed() / many)))
            elif past % self.steps == 0:
                self.blocks.append(self.elapsed() / self.steps)
                if len(self.blocks) == (2 if self.tiny else 8):
                    raise Finished
            if past % self.steps == 0:
                next_turn()
                self.begin()
        self.calls += 1

    def begin(self) -> None:
        self._wait()
        self.began = time.perf_counter()

    def elapsed(self) -> float:
        self._wait()
        return time.perf_counter() - self.began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def loss(self, value: Callable[[], Tensor] | Tensor) -> None:
        """Keep one of the first losses."""
        if len(self.losses) < PROVED:
            self.losses.append((value if isinstance(value, Tensor) else value()).detach().clone())

    def sample(self) -> Sample:
        """Return milliseconds a step, and the losses as proof."""
        memory = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0
        step = statistics.median(self.blocks)
        more = {"per_s": self.batch / step, "memory_gb": memory}
        blocks = [1e3 * seconds for seconds in self.blocks]
        return Sample(1e3 * step, [float(loss) for loss in self.losses], more, blocks)


class Job:
    """What a side trains: recipe, data, and for the loops of others model, optimizer and loss."""

    def __init__(self, case: str):
        name, device, size = case.split()
        self.tiny, self.device, self.subject = size == "tiny", torch.device(device), SUBJECTS[name]
        os.environ["ACCELERATE_USE_CPU"] = "true" if self.device.type == "cpu" else "false"
        self.recipe: Recipe = loader.load(Path(os.environ[FOLDER]) / f"{name}.yaml")
        self.data: Dataset = self.recipe.data.open(self.recipe.seed)
        self.batch = self.recipe.train.batch_size
        self.half = self.recipe.train.precision == "bf16"
        self.watch = Watch(self.device, self.batch, self.tiny)

    def network(self) -> nn.Module:
        """Build the model as trainkit does, with the same weights."""
        torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(rng.number(self.recipe.seed, "weights"))
        net = self.recipe.task.build(self.data.meta, {}, self.recipe.seed).model.train()
        return net.to(self.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch types no memory_format

    def optimizer(self, net: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
        """SGD or AdamW; `fused`: in one kernel, which is not what torch does unasked."""
        more: dict[str, Any] = {"fused": True} if fused else {}
        if self.subject.faces:
            return torch.optim.SGD(net.parameters(), RATE, MOMENTUM, weight_decay=DECAY, **more)
        return torch.optim.AdamW(net.parameters(), RATE / 20, weight_decay=DECAY, **more)

    def loader(self) -> torch.utils.data.DataLoader:
        """Batches by torch's own loader, as the examples of Accelerate and timm have it."""
        cuda = self.device.type == "cuda"
        return torch.utils.data.DataLoader(
            Feed(self.data, self.batch), batch_size=None, num_workers=4 if cuda else 0, pin_memory=cuda
        )

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Loss of a batch that lies on the device, written as the published codes have it."""
        image, label = self.data.train.on_device(batch)["image"], batch["label"]
        if not self.subject.faces:
            return F.cross_entropy(net(image), label, label_smoothing=SMOOTHING)
        centre = net.get_parameter("head.weight")
        cosine = F.linear(F.normalize(net.get_submodule("net")(image)), F.normalize(centre)).clamp(-1, 1).float()
        cosine = cosine.scatter_add(1, label[:, None], torch.full_like(cosine[:, :1], -MARGIN))
        return F.cross_entropy(SCALE * cosine, label)


def _timed(loop: Callable[[Job], None]) -> Callable[[str], Sample]:
    def side(case: str) -> Sample:
        job = Job(case)
        try:
            loop(job)
        except Finished:
            return job.watch.sample()
        raise RuntimeError("the loop ended before it was timed")

    return side


# ---- Sides


def trainkit(job: Job) -> None:
    """`Trainer.step` with all that follows a step."""
    from trainkit.distributed.runtime import Runtime
    from trainkit.training.trainer import Trainer

    with Trainer(job.recipe, job.data, Runtime(job.recipe)) as trainer:
        trainer.start()
        while True:
            job.watch.tick()
            update = trainer.step()
            if update is None:
                raise RuntimeError("a step was left out")
            one = update.losses[0]
            job.watch.loss(lambda one=one: one.sum / one.weight)
            trainer.after_step()


def by_hand(job: Job) -> None:
    """A loop written for this model: one kernel for the optimizer, channels last."""
    net = job.network()
    moves, batches = job.optimizer(net, fused=True), iter(job.loader())
    schedule = torch.optim.lr_scheduler.LambdaLR(moves, lambda step: 1.0)
    for host in batches:
        job.watch.tick()
        batch = {key: value.to(job.device, non_blocking=True) for key, value in host.items()}
        with torch.autocast(job.device.type, torch.bfloat16, enabled=job.half):
            loss = job.loss(net, batch)
        loss.backward()
        if job.subject.faces:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        moves.step()
        schedule.step()
        moves.zero_grad()
        job.watch.loss(loss)


def accelerate(job: Job) -> None:
    """The loop of Accelerate's documents."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device.type == "cpu", mixed_precision="bf16" if job.half else "no")
    net = job.network()
    moves = job.optimizer(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(moves, lambda step: 1.0)
    net, moves, batches, schedule = accelerator.prepare(net, moves, job.loader(), schedule)
    for batch in batches:
        job.watch.tick()
        with accelerator.accumulate(net):
            with accelerator.autocast():
                loss = job.loss(net, batch)
            accelerator.backward(loss)
            if job.subject.faces and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), CLIP)
            moves.step()
            schedule.step()
            moves.zero_grad()
        job.watch.loss(loss)


LOOPS: Mapping[str, Callable[[Job], None]] = {
    "by hand": by_hand,
    "trainkit": trainkit,
    "accelerate": accelerate,
}
CONTEST = Contest(
    title="A step of the same model",
    unit="ms a step",
    baseline="by hand",
    sides={name: _timed(loop) for name, loop in LOOPS.items()},
    cases=tuple(f"{name} cpu tiny" for name in SUBJECTS),
    turns=True,
    threads=4,
    tolerance=2e-2,
    timeout=120.0,
)


if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

"""The toy task under injected faults: numbers that are not finite, memory that runs out."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from toy import ToyTask

from trainkit.interfaces import Loss

TABLES = {"task": {"poisoned": "poison:PoisonedTask"}, "data": {}}


@dataclass(kw_only=True)
class PoisonedTask(ToyTask):
    poison: str | None = None
    """What is spoilt: image, weight, loss, gradient."""
    value: str = "nan"
    steps: list[int] = field(default_factory=list)
    rank: int | None = None
    """On which process alone; None: on each."""
    constant: bool = False
    """Whether the network has a buffer that is infinite by design."""
    unscored: bool = False
    """Whether scores are not numbers."""
    room: int | None = None
    """Samples for which memory suffices; more run out of it in the steps `steps`, or in any where there are none."""
    room_scored: int | None = None
    """The same of evaluations."""
    error: str = "cpu"
    """What is raised then: cpu, gpu, python."""
    late: bool = False
    """Whether it is raised in the backward pass."""
    jump: float = 1.0
    """What the loss, and its gradient, is multiplied by in the steps `steps`."""
    killed: bool = False
    """Whether the process is killed in the steps `steps`, as the kernel does when memory runs out."""
    remembers: bool = True
    compares: bool = False
    """Whether the loss compares the samples of a micro-batch on all processes, and the network may see parts of it."""
    hoard: int = 0
    """MB that the forward pass of a sample really takes."""

    def build(self, meta, found, seed):
        networks = super().build(meta, found, seed)
        if not self.remembers:
            networks.memory = None
        if self.compares:
            networks.indivisible, networks.in_parts = "its loss compares the samples of a micro-batch", True
        if self.constant:
            networks.model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        return networks

    def loss(self, net, networks, batch, at):
        return (self._compared if self.compares else self._summed)(net, networks, batch, at)

    def _compared(self, net, networks, batch, at):
        """Of each sample a cross-entropy of its scores less their means over all samples."""
        label = batch["label"]
        here = self.rank is None or os.environ.get("RANK", "0") == str(self.rank)
        here = here and (not self.steps or at.step in self.steps)

        def seen(image):
            self._need(net, self.room, len(image), here)
            return {"scores": [net(image)]}

        scores = at.forward(seen, batch["image"])["scores"][0]
        means = at.gather(scores, grad=True).mean(0)
        if networks.memory is not None:
            networks.memory.mean.lerp_(at.gather(scores.detach()).mean(0), 0.1)
        loss = F.cross_entropy(scores - means, label, reduction="sum")
        return Loss(loss, len(label), {"margin": scores.detach().amax(1).mean()})

    def _summed(self, net, networks, batch, at):
        here = self.rank is None or os.environ.get("RANK", "0") == str(self.rank)
        self._need(net, self.room, len(batch["label"]), here and (not self.steps or at.step in self.steps))
        poison = self.poison if here and at.step in self.steps else None
        bad = float(self.value)
        if poison == "image":
            batch = {**batch, "image": batch["image"].index_fill(0, torch.tensor([0]), bad)}
        if self.killed and at.step in self.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        hoard = torch.zeros(len(batch["label"]), self.hoard << 18)  # noqa: F841 - held until the loss is there
        out = super().loss(net, networks, batch, at)
        if at.step in self.steps:
            out.sum = out.sum * self.jump
        if poison == "loss":
            out.sum = out.sum + bad
        if poison == "weight":
            out.weight = torch.tensor(len(batch["label"]) * bad)
        if poison == "gradient":
            out.sum = _Spoilt.apply(out.sum, bad)
        return out

    def _need(self, net, room, samples, here):
        bare = getattr(net, "module", net)
        if here and room is not None and samples > room:
            if self.late and bare.training:
                # One for each part of a micro-batch, in both of its forwards; all go when the first raises.
                hooks = self.__dict__.setdefault("hooks", [])
                hooks.append(bare.conv.weight.register_hook(lambda grad: self._run_out(hooks)))
            else:
                bare(torch.zeros(2, 3, 8, 8))  # statistics have moved by then
                _raise(self.error)

    def _run_out(self, hooks):
        while hooks:
            hooks.pop().remove()
        _raise(self.error)

    def predict(self, net, batch):
        self._need(net, self.room_scored, len(batch["label"]), True)
        return super().predict(net, batch)

    def score(self, rows, split):
        scores = super().score(rows, split)
        if self.unscored:
            scores.metrics["accuracy"] = float("nan")
        return scores


class _Spoilt(torch.autograd.Function):
    """A loss that is what it is, and whose gradient is not."""

    @staticmethod
    def forward(ctx, loss, factor):
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def _raise(kind):
    if kind == "gpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if kind == "python":
        raise MemoryError
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ...")

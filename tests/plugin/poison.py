"""The toy task under injected faults: numbers that are not finite, memory that runs out, bits that flip."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from toy import ToyTask

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

    def build(self, meta, found, seed):
        parts = super().build(meta, found, seed)
        if self.constant:
            parts.learns.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        return parts

    def loss(self, net, parts, batch, at):
        here = self.rank is None or os.environ.get("RANK", "0") == str(self.rank)
        poison = self.poison if here and at.step in self.steps else None
        bad = float(self.value)
        if poison == "image":
            batch = {**batch, "image": batch["image"].index_fill(0, torch.tensor([0]), bad)}
        out = super().loss(net, parts, batch, at)
        if poison == "loss":
            out.sum = out.sum + bad
        if poison == "weight":
            out.weight = torch.tensor(len(batch["label"]) * bad)
        if poison == "gradient":
            out.sum = _Spoilt.apply(out.sum, bad)
        return out

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

"""The margin softmax over many classes: one pass against chains that keep the matrix of batch x classes.

    python benchmarks/margin_head.py --rounds 7

512 embeddings of 512 numbers, ArcFace (m 0.45, scale 64), two threads: loss, and gradient of the embeddings. Centres
are `frozen`, without a gradient, or `trained`. The sides:

- naive: the chain of published heads. Centres are a parameter that every call normalises; the margin is added to the
  angles of all cosines, so the whole matrix goes through acos and cos; the gradient of the centres is computed, used or
  not.
- plain: the short chain, which trainkit takes for small heads: the margin on the target's cosine, no gradient of frozen
  centres.
- torch: `F.linear_cross_entropy`, which knows no margin, with the portions that it chooses itself.
- trainkit: `Centres.scores` or `MarginHead`, and `margin_loss`.

Sides take turns of one call, loss and backward, and what they need on top is measured in the same turn:

- `cpu_s`: processor time of a call, of both threads. Others on the machine stretch it less than the time by the clock.
- `of_products`: the time by the clock, over that of the matrix products alone which the pass consists of, two of batch
  x classes x embedding for frozen centres, four for trained ones. Nothing that computes the same can be below 1. For
  two million centres it is the time of 85,742 multiplied: so it says how far time grows faster than classes.
- `of_budget`: of trained centres, the time over that of two frozen calls and of filling a new gradient.
- `extra_mb`: the greatest resident memory of the first call above that before it: about 10 MB are code that is read for
  the first time, and the gradient of trained centres (176 MB) is in it.

The first call is not timed: a training makes it once. Two million centres are called once, in the first round, and are
too many for the other sides. Trained centres and those without a margin are in that round too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from contest import Contest, Sample, Target, next_turn
from torch import Tensor, nn

from trainkit.losses.distillation import Centres
from trainkit.losses.margin import MarginHead, class_loss, margin_logits, margin_loss
from trainkit.losses.margin_specs import ArcFace
from trainkit.losses.online_softmax import MarginTerms
from trainkit.tensors import cosines

BATCH, EMBEDDING, SCALE, MARGIN = 512, 512, 64.0, 0.45
CLASSES, MOST = 85_742, 2_000_000
BLOCKS = {"frozen": 2, "trained": 5, "no-margin": 3}
"""Timed calls of a process. Frozen centres take part in every round."""
GRADIENT_MB = CLASSES * EMBEDDING * 4 / 1e6
Loss = Callable[[Tensor, Tensor], Tensor]


def naive(centres: Tensor, margin: float) -> Loss:
    """The published chain."""

    def loss(x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(centres)).clamp(-1, 1)
        added = torch.zeros_like(cosine).scatter_(1, label[:, None], margin)
        return F.cross_entropy(SCALE * (cosine.acos() + added).cos(), label, reduction="sum")

    return loss


def plain(centres: Tensor, margin: float) -> Loss:
    """The short chain."""
    settings = ArcFace(m=margin, scale=SCALE)

    def loss(x: Tensor, label: Tensor) -> Tensor:
        return class_loss(margin_logits(cosines(x, centres), label, settings), label, settings)[0]

    return loss


def fused(centres: Tensor, margin: float) -> Loss:
    """Torch's own, of centres that were normalised before."""
    unit, options = F.normalize(centres), nn.LinearCrossEntropyOptions()

    def loss(x: Tensor, label: Tensor) -> Tensor:
        return F.linear_cross_entropy(SCALE * F.normalize(x), unit, label, reduction="sum", options=options)

    return loss


def ours(centres: Tensor, margin: float) -> Loss:
    """One pass."""
    settings = ArcFace(m=margin, scale=SCALE)
    if isinstance(centres, nn.Parameter):
        head = MarginHead(1, EMBEDDING, SCALE)
        head.weight, score = centres, head
    else:
        frozen = Centres(1, EMBEDDING)
        frozen.weight = centres
        frozen.unit()

        def score(x: Tensor, label: Tensor) -> MarginTerms:
            return frozen.scores(x, label, SCALE)

    def loss(x: Tensor, label: Tensor) -> Tensor:
        return margin_loss(score(x, label), label, settings)[0]

    return loss


def side(make: Callable[[Tensor, float], Loss], always_trained: bool = False) -> Callable[[str], Sample]:
    """What a process measures of one case."""

    def measured(case: str) -> Sample:
        kind, classes = case.split()
        draw = torch.Generator().manual_seed(0)
        centres = torch.empty(int(classes), EMBEDDING).uniform_(-1, 1, generator=draw)
        data = torch.randn(BATCH, EMBEDDING, generator=draw)
        label = torch.randint(len(centres), (BATCH,), generator=draw)
        margin, trained = 0.0 if kind == "no-margin" else MARGIN, kind == "trained"
        if always_trained or trained:
            centres = nn.Parameter(centres)
        loss, own = make(centres, margin), make is ours
        torch.mm(data, data.T)  # What the library keeps for itself is no side's.
        Path("/proc/self/clear_refs").write_text("5")  # The peak of memory is counted from here.
        before = resident("VmRSS")
        calls = [timed(loss, data, label, centres)]
        proof = [calls[0].loss, *calls[0].norms[: 1 + trained]]
        more: dict[str, list[float]] = {"extra_mb": [resident("VmHWM") - before], "of_products": [], "of_budget": []}
        if len(centres) > CLASSES:
            more["of_products"] = [calls[0].seconds / products(centres, data, trained)]
        else:
            calls.clear()
            frozen = ours(centres.detach(), margin) if own and trained else None
            for _ in range(BLOCKS[kind]):
                next_turn()
                calls.append(timed(loss, data, label, centres))
                if own:
                    more["of_products"].append(calls[-1].seconds / products(centres, data, trained))
                if frozen:
                    budget = 2 * timed(frozen, data, label, centres).seconds + written(centres)
                    more["of_budget"].append(calls[-1].seconds / budget)
        more["cpu_s"] = [call.processor for call in calls]
        blocks = [call.seconds for call in calls]
        figures = {name: statistics.median(each) for name, each in more.items() if each}
        return Sample(statistics.median(blocks), proof, figures, blocks)

    return measured


class Call(NamedTuple):
    """A loss and its gradients."""

    seconds: float
    """By the clock."""
    processor: float
    """Seconds of all threads."""
    loss: float
    norms: tuple[float, ...]
    """Of the gradients: of the embeddings, and of the centres where they have one."""


def timed(loss: Loss, data: Tensor, label: Tensor, centres: Tensor) -> Call:
    """One loss and its gradients, which are made anew as in each step of a training."""
    x, centres.grad = data.clone().requires_grad_(), None
    clock, processor = time.perf_counter(), time.process_time()
    total = loss(x, label)
    total.backward()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    return Call(clock, processor, total.item(), tuple(g.norm().item() for g in (x.grad, centres.grad) if g is not None))


def products(centres: Tensor, x: Tensor, trained: bool) -> float:
    """Seconds of the products alone, of portions of 2,048 centres; of more than `CLASSES`, reckoned from so many."""
    some = centres.detach()[:CLASSES]
    logits, mean = x.new_zeros(BATCH, 2048), torch.zeros_like(x)
    weights, gradient = torch.zeros_like(logits), torch.zeros(2048, EMBEDDING)
    began = time.perf_counter()
    for centre in some.split(2048):
        logit = logits[:, : len(centre)]
        torch.mm(x, centre.T, out=logit)
        torch.addmm(mean, weights[:, : len(centre)], centre, out=mean)
        if trained:
            torch.mm(x, centre.T, out=logit)
            torch.mm(weights[:, : len(centre)].T, x, out=gradient[: len(centre)])
    return (time.perf_counter() - began) * len(centres) / len(some)


def written(centres: Tensor) -> float:
    """Seconds in which a new tensor of this size is filled."""
    began = time.perf_counter()
    torch.empty_like(centres.detach()).fill_(1.0)
    return time.perf_counter() - began


def resident(word: str) -> float:
    """VmRSS or its peak, VmHWM, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(word)) * 1.024e-3


CONTEST = Contest(
    title="Margin softmax with 85,742 and 2,000,000 classes",
    unit="s",
    baseline="naive",
    sides={
        "naive": side(naive, always_trained=True),
        "plain": side(plain),
        "torch": side(fused),
        "trainkit": side(ours),
    },
    cases=(f"frozen {CLASSES}", f"trained {CLASSES}", f"no-margin {CLASSES}", f"frozen {MOST}"),
    only={
        f"frozen {CLASSES}": ("naive", "plain", "trainkit"),
        f"trained {CLASSES}": ("naive", "trainkit"),
        f"no-margin {CLASSES}": ("torch", "trainkit"),
        f"frozen {MOST}": ("trainkit",),
    },
    once=(f"trained {CLASSES}", f"no-margin {CLASSES}", f"frozen {MOST}"),
    turns=True,
    bounds=(
        "`of_products` is the time relative to the matrix products alone, in the same process, which are a lower "
        "bound for every head that computes all cosines in float32."
    ),
    tolerance=1e-4,
    threads=2,
    targets=(
        Target(f"frozen {CLASSES}", "trainkit", 1 / 6, words="frozen centres, time relative to naive"),
        Target(f"frozen {CLASSES}", "trainkit", 64.0, "extra_mb", words="frozen centres, extra MB"),
        Target(
            f"trained {CLASSES}",
            "trainkit",
            1.0,
            "of_budget",
            words="trained centres, time relative to two frozen calls + dW",
        ),
        Target(f"frozen {MOST}", "trainkit", 1.2 * 64.0, "extra_mb", words="two million frozen centres, extra MB"),
        Target(f"trained {CLASSES}", "trainkit", 2 * 64.0 + GRADIENT_MB, "extra_mb", words="trained centres, extra MB"),
        Target(
            f"frozen {CLASSES}",
            "trainkit",
            1.15,
            "of_products",
            words="frozen centres, time relative to the two matrix products",
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

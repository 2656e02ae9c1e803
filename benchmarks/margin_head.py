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

`extra_mb` is the greatest resident memory of the first call above that before it: about 10 MB are code that is read for
the first time, and the gradient of trained centres (176 MB, of two million 4.1 GB) is in it. The time is that of the
faster of two calls. Two million centres are called once, and are too many for the other sides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from contest import Contest, Sample, Target
from torch import Tensor, nn

from trainkit.losses.distill import Centres
from trainkit.losses.margin import ArcFace, MarginHead, class_loss, cosines, margin_logits, margin_loss
from trainkit.losses.online_softmax import Rivals

BATCH, EMBEDDING, SCALE, MARGIN = 512, 512, 64.0, 0.45
CLASSES, MOST = 85_742, 2_000_000
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

        def score(x: Tensor, label: Tensor) -> Rivals:
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
        if always_trained or kind == "trained":
            centres = nn.Parameter(centres)
        loss = make(centres, 0.0 if kind == "no-margin" else MARGIN)
        torch.mm(data, data.T)  # What the library keeps for itself is no side's.
        Path("/proc/self/clear_refs").write_text("5")  # The peak of memory is counted from here.
        before, first, seconds = resident("VmRSS"), None, []
        for _ in range(1 if len(centres) > CLASSES else 2):
            x, centres.grad = data.clone().requires_grad_(), None
            began = time.perf_counter()
            total = loss(x, label)
            total.backward()
            seconds.append(time.perf_counter() - began)
            if first is None:
                first = {"extra_mb": resident("VmHWM") - before}
                proof = [total.item(), x.grad.norm().item()]
                if kind == "trained":
                    proof.append(centres.grad.norm().item())
        return Sample(min(seconds), proof, first)

    return measured


def resident(word: str) -> float:
    """VmRSS or its peak, VmHWM, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(word)) * 1.024e-3


CONTEST = Contest(
    title="Margin softmax of 85,742 and 2,000,000 classes",
    unit="s",
    baseline="naive",
    sides={
        "naive": side(naive, always_trained=True),
        "plain": side(plain),
        "torch": side(fused),
        "trainkit": side(ours),
    },
    cases=(f"frozen {CLASSES}", f"trained {CLASSES}", f"no-margin {CLASSES}", f"frozen {MOST}", f"trained {MOST}"),
    only={
        f"frozen {CLASSES}": ("naive", "plain", "trainkit"),
        f"trained {CLASSES}": ("naive", "plain", "trainkit"),
        f"frozen {MOST}": ("trainkit",),
        f"trained {MOST}": ("trainkit",),
    },
    tolerance=1e-4,
    threads=2,
    targets=(
        Target(f"frozen {CLASSES}", "trainkit", 1 / 6, words="frozen centres, time of the naive chain: a sixth"),
        Target(f"frozen {CLASSES}", "trainkit", 64.0, "extra_mb", words="frozen centres, extra MB"),
        Target(f"frozen {MOST}", "trainkit", 1.2 * 64.0, "extra_mb", words="two million frozen centres, extra MB"),
        Target(f"trained {CLASSES}", "trainkit", 2 * 64.0 + GRADIENT_MB, "extra_mb", words="trained centres, extra MB"),
    ),
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))

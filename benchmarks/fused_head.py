"""The margin softmax over many people on a GPU: products in float32, in bfloat16, and the two products alone.

    python benchmarks/fused_head.py

512 embeddings of 512 numbers, 85,742 frozen centres, forward and backward. Prints milliseconds (median of 50, by
events) and how far losses and gradients are apart. Without a GPU it says so and ends with 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.losses import online_softmax
from trainkit.losses.distillation import Centres
from trainkit.losses.margin import ArcFace, margin_loss

BATCH, EMBEDDING, CLASSES = 512, 512, 85_742
ARCFACE = ArcFace(m=0.45)


def step(centres: Centres, x_BD: Tensor, label_B: Tensor, products: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Loss and gradient."""
    leaf_BD = x_BD.clone().requires_grad_()
    loss = margin_loss(centres.scores(leaf_BD, label_B, ARCFACE.scale, products), label_B, ARCFACE)[0] / len(x_BD)
    loss.backward()
    return loss.detach(), leaf_BD.grad


def milliseconds(call: Callable[[], object], times: int = 50) -> float:
    """Median over calls, after three that compile and prove."""
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for before, after in events:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return float(torch.tensor([before.elapsed_time(after) for before, after in events]).median())


def main() -> int:
    """Time the ways one after another."""
    if not torch.cuda.is_available():
        print("no GPU: there is nothing to measure", file=sys.stderr)
        return 2
    device, draw = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    x_BD = torch.randn(BATCH, EMBEDDING, device=device, generator=draw)
    label_B = torch.randint(CLASSES, (BATCH,), device=device, generator=draw)
    centres = Centres(CLASSES, EMBEDDING).to(device)
    weight_CD = torch.randn(CLASSES, EMBEDDING, device=device, generator=draw)
    centres.weight.copy_(weight_CD)
    exact, gradient_BD = step(centres, x_BD, label_B, None)
    for name, products in (("float32", None), ("bfloat16", torch.bfloat16)):
        took = milliseconds(lambda products=products: step(centres, x_BD, label_B, products))
        loss, found_BD = step(centres, x_BD, label_B, products)
        off = float((found_BD - gradient_BD).norm() / gradient_BD.norm())
        print(f"products in {name}: {took:.3f} ms; loss off by {float(loss / exact - 1):.1e}, gradient by {off:.1e}")
    unit_CD, half_BD = F.normalize(weight_CD).bfloat16(), F.normalize(x_BD).bfloat16()
    print(f"two products of bfloat16 alone: {milliseconds(lambda: (half_BD @ unit_CD.T) @ unit_CD):.3f} ms")
    kernel = online_softmax._kernel()
    print("the kernel took part:", kernel.tiles if kernel else "no Triton")
    return 0


if __name__ == "__main__":
    sys.exit(main())

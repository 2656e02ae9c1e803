"""Forward and backward passes of a micro-batch in parts, under a loss that compares all of its samples.

GradCache (Gao et al., RepL4NLP 2021, arXiv 2101.06983): the outputs of all parts are computed without what a backward
pass needs; the loss is computed of all of them, and its gradients with respect to them; then each part is computed
again, and its gradients go on. It costs a second forward pass. Of layers that see each sample by itself it is exact;
batch norm sees a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def forward_in_parts(compute: Callable[[slice], T], count: int, size: int, net: nn.Module, device: torch.device) -> T:
    """Return `compute(rows)` of `count` rows, made of `size` rows at a time and joined along the first dimension.

    It is called again of each part in the backward pass, under the same random numbers and precision. Buffers of `net`,
    such as the statistics of batch norm, move with the first call alone.
    """
    on = torch.empty(0, device=device)  # tells whose random numbers are to be repeated, besides the processor's

    def of(_: torch.Tensor, first: int) -> T:
        return compute(slice(first, min(first + size, count)))

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _unmoved(net)

    made = [
        checkpoint(of, on, first, use_reentrant=False, context_fn=contexts, early_stop=False)
        for first in range(0, count, size)
    ]
    return made[0] if len(made) == 1 else tree_map(lambda *parts: torch.cat(parts), *made)


@contextmanager
def _unmoved(net: nn.Module) -> Iterator[None]:
    """Put the buffers of a network back afterwards."""
    before = [buffer.clone() for buffer in net.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in zip(net.buffers(), before, strict=True):
                buffer.copy_(kept)

"""Forward and backward passes of a micro-batch in parts, under a loss that compares all of its samples.

GradCache (Gao et al., RepL4NLP 2021, arXiv 2101.06983): compute the outputs of all parts without a graph, the loss on
all of them and its gradients with respect to them; then recompute each part and continue the backward pass. It costs a
second forward pass. The result is exact for layers that treat samples independently; batch norm sees one part.
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
    """Return `compute(rows)` of `count` rows, computed `size` rows at a time and joined along the first dimension.

    It is called again for each part in the backward pass, with the same random numbers and precision. Buffers of `net`,
    such as the statistics of batch norm, change only in the first call.
    """
    on = torch.empty(0, device=device)  # names the device whose random numbers are repeated, besides the CPU's

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
    """Restore the buffers of a network afterwards."""
    before = [buffer.clone() for buffer in net.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in zip(net.buffers(), before, strict=True):
                buffer.copy_(kept)

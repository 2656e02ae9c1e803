"""Multiply-accumulates of a network, by torch's own counter."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def macs(net: nn.Module, shape: tuple[int, int, int]) -> int:
    """Of one image of `shape` (C, H, W) through a network in evaluation, which may be on the meta device."""
    first = next(net.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net.eval()(torch.zeros(1, *shape, device=first.device, dtype=first.dtype))
    return counter.get_total_flops() // 2

"""Low-rank corrections of linear layers, one for each modality.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022, arXiv 2106.09685): W x becomes
W x + (alpha / rank) B A x, with B zero at the start. Here each modality has an A and a B of its own over a shared W
(Zuo et al., "ReID5o", NeurIPS 2025, arXiv 2506.09385).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.models.network_specs import Lora

LAYERS = (".attn.qkv", ".attn.proj", ".mlp.fc1", ".mlp.fc2")
"""Ends of the names of the linear layers that get corrections."""


class BatchModalities:
    """Modality of each row of a batch, for layers deep in a network.

    Set before a forward and cleared after it, and only read between: the networks between are timm's and hand on
    nothing but their maps.
    """

    def __init__(self) -> None:
        self.first: Tensor | None = None
        """Maps that the first layers made of the images, where each modality has its own."""
        self.widths: set[int] = set()
        """For how many columns a modality is asked for."""
        self.own: dict[int, Tensor] = {}
        """By number of columns a modality, (N, modalities * columns): 1 in those of a row's modality, else 0; empty
        where all rows are of one."""

    def set(self, sizes: Sequence[int], device: torch.device) -> None:
        """Of the forward that comes next, how many rows are of each modality, one modality after another."""
        if len(sizes) > 1 and self.widths:
            kinds = torch.eye(len(sizes), device=device)
            one = torch.cat([kinds[m].expand(n, -1) for m, n in enumerate(sizes)])
            self.own = {width: one.repeat_interleave(width, 1) for width in sorted(self.widths)}

    def clear(self) -> None:
        """Drop all data of a batch."""
        self.first, self.own = None, {}


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank correction for each modality.

    The corrections of all modalities are one product, and a mask then leaves each row its own: at rank 4 and four
    modalities 16 columns beside hundreds. Sizes of the batch by modality play no part, so nothing is compiled again
    where they change, and a modality without a row has a gradient of zero. Queries, keys and values that come of one
    layer (`parts` 3) have corrections of `rank` each.
    """

    def __init__(
        self, linear: nn.Linear, rank: int, alpha: float, modalities: int, rows: BatchModalities, parts: int = 1
    ):
        weight = linear.weight
        # On the meta device nothing is made and thrown away.
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, "meta", weight.dtype)
        self.weight, self.bias = linear.weight, linear.bias
        self.rank, self.scale, self.modalities, self.parts, self.rows = rank, alpha / rank, modalities, parts, rows
        rows.widths.add(parts * rank)
        made = {"device": weight.device, "dtype": weight.dtype}
        self.lora_down = nn.Parameter(torch.empty(modalities, parts * rank, self.in_features, **made))
        self.lora_up = nn.Parameter(torch.zeros(modalities, parts * rank, self.out_features // parts, **made))
        nn.init.uniform_(self.lora_down, -math.sqrt(1 / self.in_features), math.sqrt(1 / self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """(N, ..., in) to (N, ..., out)."""
        out = super().forward(x)
        low = F.linear(x, self.lora_down.flatten(0, 1))
        if self.rows.own:
            own = self.rows.own[self.parts * self.rank]
            low = low * own.to(low.dtype).view(len(x), *(1,) * (x.ndim - 2), own.shape[1])
        return out + F.linear(low, self._up().flatten(0, 1).T)

    def _up(self) -> Tensor:
        """(modalities, parts*rank, out), each part's rows zero outside the outputs of that part."""
        if self.parts == 1:
            return self.lora_up * self.scale
        up = self.lora_up.unflatten(1, (self.parts, self.rank))[:, :, :, None]
        own = torch.eye(self.parts, device=up.device, dtype=up.dtype)[:, None, :, None] * self.scale
        return (up * own).flatten(3).flatten(1, 2)


def add(net: nn.Module, spec: Lora, modalities: int, rows: BatchModalities, where: str) -> list[str]:
    """Add corrections to linear layers of `net`, in place; return their names.

    They are those of attention and of the two layers behind it, in the names of timm. Raises UserError without any.
    """
    linears = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    chosen = [name for name in linears if f".{name}".endswith(LAYERS)]
    if not chosen:
        found = f"a network without linear layers named {', '.join(LAYERS)}"
        raise UserError(where, found, "a transformer of timm", "LoRA is not available for convolutions; leave it out")
    if spec.layers is not None:
        chosen = _of_last(chosen, spec.layers, where)
    for name in chosen:
        linear = linears[name]
        parts = 3 if name.endswith("qkv") and linear.out_features % 3 == 0 else 1
        parent, _, last = name.rpartition(".")
        made = LoraLinear(linear, spec.rank, spec.alpha, modalities, rows, parts)
        setattr(net.get_submodule(parent), last, made)
    return chosen


def _of_last(names: Sequence[str], layers: int, where: str) -> list[str]:
    """Those that belong to the last `layers` blocks: a block is what comes before the last number of a name."""
    blocks = {name: found.group() for name in names if (found := re.match(r".*\.\d+(?=\.)|\d+(?=\.)", name))}
    order = list(dict.fromkeys(blocks.values()))
    if layers > len(order):
        raise UserError(
            f"{where}.layers", f"{layers}, but the network has {len(order)} such blocks", f"at most {len(order)}"
        )
    kept = set(order[-layers:])
    return [name for name in names if blocks.get(name) in kept]

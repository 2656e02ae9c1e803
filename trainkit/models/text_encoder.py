"""A transformer for captions, laid out so that the text tower of CLIP can be loaded into it.

Pre-norm blocks (Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021,
arXiv 2103.00020). A caption ends at its first token with the highest id; what follows is padding and has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError
from trainkit.models.network_specs import TextSpec


def transformer_block(width: int, heads: int, activation: Literal["gelu", "quick_gelu"] = "gelu") -> Any:
    """Build timm's block: attention and two linear layers, each after a layer norm and added to its input.

    It takes tokens (N, L, width), which of them to attend to (N, 1, 1, L) or None, and whether it is causal.
    """
    from timm.layers import QuickGELU
    from timm.models.vision_transformer import Block

    act = QuickGELU if activation == "quick_gelu" else nn.GELU
    return Block(width, heads, qkv_bias=True, act_layer=act, norm_layer=nn.LayerNorm)


class TextEncoder(nn.Module):
    """Captions (N, length), token ids below `vocabulary`, to (N, width)."""

    def __init__(self, spec: TextSpec, vocabulary: int, length: int):
        super().__init__()
        self.end, self.causal, self.pool = vocabulary - 1, spec.causal, spec.pool
        width = spec.width
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        blocks = [transformer_block(width, spec.heads, spec.activation) for _ in range(spec.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        # Initial weights as in CLIP: deeper towers start with smaller residuals.
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        for block in blocks:
            nn.init.normal_(block.attn.qkv.weight, std=width**-0.5)
            nn.init.normal_(block.mlp.fc1.weight, std=(2 * width) ** -0.5)
            for last in (block.attn.proj, block.mlp.fc2):
                nn.init.normal_(last.weight, std=width**-0.5 * (2 * spec.layers) ** -0.5)
            for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                nn.init.zeros_(linear.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Token ids (N, length) to (N, width)."""
        last = last_token(text, self.end)
        x = self.tokens(text) + self.positions[: text.shape[1]]
        used = torch.arange(text.shape[1], device=text.device) <= last[:, None]
        # Padding comes last, so causal attention never sees it.
        seen = None if self.causal else used[:, None, None]
        for block in self.blocks:
            x = block(x, seen, self.causal)
        x = self.norm(x)
        if self.pool == "end":
            return x[torch.arange(len(x), device=x.device), last]
        share = used / used.sum(1, keepdim=True)
        return (x * share[:, :, None].to(x.dtype)).sum(1)

    def no_weight_decay(self) -> set[str]:
        """Names of token and position embeddings."""
        return {"tokens.weight", "positions"}

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """The order of the layers, in the form of timm's networks."""
        return {"stem": r"^tokens|positions", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}


def last_token(text: Tensor, end: int) -> Tensor:
    """Position of the last token of each caption (N, L): the first `end`, or the last that is not 0."""
    place = torch.arange(text.shape[1], device=text.device)
    used = torch.where(text > 0, place, 0).amax(1)
    return torch.where(text == end, place, text.shape[1]).amin(1).minimum(used)


_TOWER = re.compile(r"(?:text\.)?(transformer\.resblocks\.|token_embedding\.|positional_embedding$|ln_final\.)")
"""Beginnings of the names of a CLIP's text tower, OpenAI's or OpenCLIP's."""
_OURS = {
    "transformer.resblocks.": "blocks.",
    "token_embedding.": "tokens.",
    "positional_embedding": "positions",
    "ln_final.": "norm.",
    ".ln_": ".norm",
    ".attn.in_proj_": ".attn.qkv.",
    ".attn.out_proj.": ".attn.proj.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
"""Parts of these names to those of `TextEncoder`."""
_HEAD = 64
"""Width per head of CLIP's towers; no tensor shows the number of heads."""


def load(net: TextEncoder, spec: TextSpec, tensors: Mapping[str, Tensor], where: str) -> Tensor | None:
    """Load an encoder from the text tower of a CLIP, or from a re-identification network.

    For CLIP the names are those of OpenAI's release or of OpenCLIP (with or without `text.`); positions beyond the
    longest caption are dropped. Returns the weight (D, width) of the projection that follows, or None. Raises UserError
    if there is no such encoder, or it does not fit.
    """
    if "text.tokens.weight" in tensors:
        own = {name.removeprefix("text."): t for name, t in tensors.items() if name.startswith("text.")}
        safe_load.load_into(net, own, where)
        return tensors.get("project_text.weight")
    tower = {_renamed(name): t for name, t in tensors.items() if _TOWER.match(name)}
    if "tokens.weight" not in tower:
        remedy = "use a file with one as task.net.text.weights"
        raise UserError(where, "no tensor token_embedding.weight", "the text tower of a CLIP", remedy)
    if not spec.causal or spec.width != _HEAD * spec.heads:
        raise UserError(
            "task.net.text",
            f"causal {str(spec.causal).lower()}, heads {spec.heads} and width {spec.width} with weights of a CLIP",
            f"causal true and one head per {_HEAD} of the width, as the weights were trained",
            f"set causal: true and heads: {max(1, spec.width // _HEAD)}",
        )
    if "positions" in tower and len(tower["positions"]) > len(net.positions):
        tower["positions"] = tower["positions"][: len(net.positions)]
    safe_load.load_into(net, tower, where)
    projection = tensors.get("text_projection", tensors.get("text.text_projection"))
    return None if projection is None else projection.T


def _renamed(name: str) -> str:
    name = name.removeprefix("text.")
    for theirs, ours in _OURS.items():
        name = name.replace(theirs, ours)
    return name

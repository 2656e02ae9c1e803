"""A transformer for captions, laid out so that the text tower of CLIP can be loaded into it.

Pre-norm blocks (Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021,
arXiv 2103.00020). A caption ends at its first token with the highest id; what follows is padding and has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError
from trainkit.models.network_specs import TextSpec


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, kept."""
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    """Self-attention with several heads (Vaswani et al., NeurIPS 2017)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor | None, causal: bool) -> Tensor:
        """(N, L, width) to the same; `seen` (N, 1, 1, L) is True for tokens to attend to, None: all."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)
        return self.proj(x.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with four times the width between them."""

    def __init__(self, width: int, activation: nn.Module):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Attention and two linear layers, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, activation: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, activation or nn.GELU())
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor | None = None, causal: bool = False) -> Tensor:
        """(N, L, width) to the same."""
        x = x + self.drop(self.attn(self.norm1(x), seen, causal))
        return x + self.drop(self.mlp(self.norm2(x)))


class TextEncoder(nn.Module):
    """Captions (N, length), token ids below `vocabulary`, to (N, width)."""

    def __init__(self, spec: TextSpec, vocabulary: int, length: int):
        super().__init__()
        self.end, self.causal, self.pool = vocabulary - 1, spec.causal, spec.pool
        width = spec.width
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        act = {"gelu": nn.GELU, "quick_gelu": QuickGELU}[spec.activation]
        blocks = [Block(width, spec.heads, act(), spec.dropout) for _ in range(spec.layers)]
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


_CLIP = (
    (r"^(text\.)?transformer\.resblocks\.", "blocks."),
    (r"^(text\.)?token_embedding\.", "tokens."),
    (r"^(text\.)?positional_embedding$", "positions"),
    (r"^(text\.)?ln_final\.", "norm."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


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
    tower = {_plain(name): t for name, t in tensors.items() if re.match(_TOWER, name)}
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


_TOWER = r"(text\.)?(transformer\.resblocks\.|token_embedding\.|positional_embedding$|ln_final\.)"


def _plain(name: str) -> str:
    """The name in `TextEncoder` of a tensor of CLIP's text tower."""
    for pattern, plain in _CLIP:
        name = re.sub(pattern, plain, name)
    return name

"""Small networks for eye crops: a ConvNeXt or depthwise-separable backbone, and a mean or a transformer over its map.

After the networks of an eye-state classifier (OCEC and its ConvNeXt fork, 32 x 64 pixels), written from their
description: ConvNeXt blocks (Liu et al., CVPR 2022, arXiv 2201.03545), depthwise-separable ones (Howard et al., 2017,
arXiv 1704.04861), and a transformer (Vaswani et al., NeurIPS 2017) over a grid of pooled tokens. B images, C channels,
H x W places of a map, T tokens, D length of the embedding.

Different from the origin on purpose: the LayerNorm over channels of the paper at each place alone, where GroupNorm with
one group let places move each other; a head that always gives the embedding which every loss reads, so that each weight
has a gradient; and a learned vector for the place of each token, with which the published parameter counts are met. The
baseline's blocks follow from its published costs: its multiply-accumulates are met exactly, its parameters to 0.6 %.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.models.network_specs import EyeSpec, channels_of

NORM_EPS = 1e-6
HEAD_LAYERS = 2
MOST_HEADS = 8
"""Of the attention; fewer where they do not divide the channels."""

STEM_STRIDE = {"eye_convnext": 4, "eye_baseline": 2}


class EyeNet(nn.Module):
    """Images of `shape` (channels, height, width) to embeddings (B, embedding) that are not normalised.

    Raises UserError for images that leave no whole grid.
    """

    def __init__(self, shape: tuple[int, int, int], spec: EyeSpec):
        super().__init__()
        blocks, with_tokens = spec.num_blocks, spec.head == "transformer"
        channels = channels_of(spec.base_channels, blocks)
        size = _map_size(shape[1:], spec.name, blocks, spec.grid if with_tokens else (1, 1))
        # Stochastic depth (Huang et al., ECCV 2016): later blocks are left out more often.
        rates = [spec.drop_path * (i + 1) / blocks for i in range(blocks)]
        convnext = spec.name == "eye_convnext"
        block = partial(Block, layer_scale=spec.layer_scale) if convnext else SeparableBlock
        self.stem = (_patches if convnext else _halved)(shape[0], spec.base_channels)
        self.blocks = nn.Sequential(*map(block, [spec.base_channels, *channels[:-1]], channels, rates))
        last = channels[-1]
        self.head = Transformer(last, size, spec.grid, spec.dropout) if with_tokens else Average(spec.dropout)
        self.projection = nn.Linear(last, spec.embedding) if spec.embedding and spec.embedding != last else None
        self.apply(_first_weights)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, embedding)."""
        x = self.head(self.blocks(self.stem(x)))
        return x if self.projection is None else self.projection(x)


def _map_size(size: tuple[int, int], backbone: str, num_blocks: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the last map. Raises UserError where pixels would be left out, or a grid place is empty."""
    stride = STEM_STRIDE[backbone] * 2 ** ((num_blocks - 1) // 2)
    found = f"images of {size[1]} x {size[0]} pixels"
    remedy = "change data.image_size, or task.net.num_blocks or task.net.grid"
    # Patches that do not fit would be cut off silently; the padded 3x3 of the baseline takes any size.
    whole = backbone == "eye_convnext"
    least = [g * stride if whole else (g - 1) * stride + 1 for g in grid]
    if (whole and any(n % stride for n in size)) or any(n < m for n, m in zip(size, least, strict=True)):
        fits = f"sides that are multiples of {stride}, at least" if whole else "at least"
        raise UserError(f"net {backbone}", found, f"{fits} {least[1]} x {least[0]}", remedy)
    return -(-size[0] // stride), -(-size[1] // stride)


def _first_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        # The published first weights of ConvNeXt; before a batch norm, as in the baseline, the scale says nothing.
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# ---- Backbones -------------------------------------------------------------------------------------------------------


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map (B, C, H, W), at each place alone."""

    def __init__(self, channels: int):
        super().__init__(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape; in channels_last memory the permutations move nothing."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DropPath(nn.Module):
    """In training, leaves the branch out for a share `rate` of the samples and scales the others up."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...), each sample whole or zero."""
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty(x.shape[0], *(1 for _ in x.shape[1:])).bernoulli_(1 - self.rate)
        return x * kept / (1 - self.rate)


def _patches(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 4, 4), ChannelNorm(after))


class Block(nn.Module):
    """ConvNeXt: 7x7 by channel, norm, 1x1 to four times the channels, GELU, 1x1 back, scaled; plus the input.

    Where channels change, a norm and a 2x2 convolution with stride 2 come first.
    """

    def __init__(self, before: int, channels: int, drop_path: float = 0.0, layer_scale: float = 1e-6):
        super().__init__()
        self.downsample: nn.Module | None = None
        if before != channels:
            self.downsample = nn.Sequential(ChannelNorm(before), nn.Conv2d(before, channels, 2, 2))
        self.depthwise = nn.Conv2d(channels, channels, 7, 1, 3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=NORM_EPS)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), layer_scale))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, channels, H, W), or half the sides where channels change."""
        if self.downsample is not None:
            x = self.downsample(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.widen(y)))
        return x + self.drop_path(y.permute(0, 3, 1, 2))


def _halved(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.PReLU(after))


class SeparableBlock(nn.Module):
    """3x3 by channel, batch norm, PReLU, 1x1, batch norm; plus the input where the shape stays; PReLU.

    Where channels change, the 3x3 has stride 2.
    """

    def __init__(self, before: int, channels: int, drop_path: float = 0.0):
        super().__init__()
        self.residual = before == channels
        stride = 1 if self.residual else 2
        self.depthwise = nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)
        self.bn1 = nn.BatchNorm2d(before)
        self.prelu1 = nn.PReLU(before)
        self.pointwise = nn.Conv2d(before, channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.prelu2 = nn.PReLU(channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, channels, H, W), or half the sides, rounded up, where channels change."""
        y = self.bn2(self.pointwise(self.prelu1(self.bn1(self.depthwise(x)))))
        return self.prelu2(x + self.drop_path(y) if self.residual else y)


# ---- Heads -----------------------------------------------------------------------------------------------------------


class Average(nn.Module):
    """The mean of the map over its places. `dropout` is the share of what is pooled set to zero."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C)."""
        return self.dropout(x.mean((2, 3)))


class TokenGrid(nn.Module):
    """The map averaged over a grid of (rows, columns): tokens, row by row.

    As adaptive average pooling, whose gradient has no deterministic form on a GPU, and which cannot be exported where
    the grid does not divide the map; two products have neither flaw.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, size: tuple[int, int], grid: tuple[int, int]):
        super().__init__()
        self.register_buffer("rows", _averages(size[0], grid[0]), persistent=False)
        self.register_buffer("columns", _averages(size[1], grid[1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, T, C)."""
        return (self.rows @ x @ self.columns.T).flatten(2).transpose(1, 2)


def _averages(n: int, places: int) -> Tensor:
    """(places, n): row i holds the weights of the mean of the values that lie in place i, even if in part."""
    weight = torch.zeros(places, n)
    for i in range(places):
        first, end = i * n // places, -(-(i + 1) * n // places)
        weight[i, first:end] = 1 / (end - first)
    return weight


class Transformer(nn.Module):
    """Two layers of a pre-norm transformer over the tokens and the vectors of their places; the mean of the tokens."""

    def __init__(self, channels: int, size: tuple[int, int], grid: tuple[int, int], dropout: float = 0.0):
        super().__init__()
        self.tokens = TokenGrid(size, grid)
        self.place = nn.Parameter(torch.zeros(grid[0] * grid[1], channels))
        nn.init.trunc_normal_(self.place, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(TransformerLayer(channels) for _ in range(HEAD_LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C)."""
        return self.layers(self.dropout(self.tokens(x) + self.place)).mean(1)


class TransformerLayer(nn.Module):
    """Attention among the tokens, then two linear layers on each; both behind a norm and added to their input."""

    def __init__(self, channels: int):
        super().__init__()
        self.heads = max(n for n in range(1, MOST_HEADS + 1) if channels % n == 0)
        self.norm1 = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.norm2 = nn.LayerNorm(channels)
        hidden = max(128, 2 * channels)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (B, T, C)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

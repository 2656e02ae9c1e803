"""MobileFaceNet: a face network of one million parameters (Chen et al., "MobileFaceNets", CCBR 2018, arXiv 1804.07573).

Layout, initial weights and state-dict keys are those of AdaDistill's student (Boutros et al., ECCV 2024), so its
checkpoints load by key; InsightFace's `mbf` is another, wider net.
"""

from __future__ import annotations

from torch import Tensor, nn


class ConvBN(nn.Module):
    """Convolution and batch norm, with PReLU unless `linear`."""

    def __init__(
        self,
        before: int,
        after: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        linear: bool = False,
    ):
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(after)
        self.prelu = None if linear else nn.PReLU(after)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, after, H', W')."""
        x = self.bn(self.conv(x))
        return x if self.prelu is None else self.prelu(x)


class Bottleneck(nn.Module):
    """1x1 to `inner` channels, 3x3 on each alone, 1x1 back without activation; plus the input where `residual`."""

    def __init__(self, before: int, after: int, inner: int, stride: int = 1, residual: bool = False):
        super().__init__()
        self.residual = residual
        self.conv = ConvBN(before, inner)
        self.conv_dw = ConvBN(inner, inner, 3, stride, 1, groups=inner)
        self.project = ConvBN(inner, after, linear=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, after, ceil(H/stride), ceil(W/stride))."""
        y = self.project(self.conv_dw(self.conv(x)))
        return x + y if self.residual else y


class Stack(nn.Module):
    """Bottlenecks with residuals, one after another."""

    def __init__(self, channels: int, blocks: int, inner: int):
        super().__init__()
        self.model = nn.Sequential(*(Bottleneck(channels, channels, inner, residual=True) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (B, channels, H, W)."""
        return self.model(x)


class GlobalDepthwise(nn.Module):
    """One learned weight per channel and place of the last map, then a linear map and a batch norm without scale."""

    def __init__(self, channels: int, side: int, embedding: int):
        super().__init__()
        self.conv_6_dw = ConvBN(channels, channels, side, groups=channels, linear=True)
        self.linear = nn.Linear(channels, embedding, bias=False)
        self.bn = nn.BatchNorm1d(embedding, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, side, side) to (B, embedding)."""
        return self.bn(self.linear(self.conv_6_dw(x).flatten(1)))


class MobileFaceNet(nn.Module):
    """Square images of `image_size` pixels to embeddings that are not normalised."""

    def __init__(self, embedding: int = 512, image_size: int = 112, width: float = 1.0, channels_in: int = 3):
        super().__init__()
        c64, c128, c256, c512 = (max(1, round(c * width)) for c in (64, 128, 256, 512))
        side = image_size
        for _ in range(4):
            side = (side + 1) // 2
        self.conv1 = ConvBN(channels_in, c64, 3, 2, 1)
        self.conv2_dw = ConvBN(c64, c64, 3, 1, 1, groups=c64)
        self.conv_23 = Bottleneck(c64, c64, c128, stride=2)
        self.conv_3 = Stack(c64, 4, c128)
        self.conv_34 = Bottleneck(c64, c128, c256, stride=2)
        self.conv_4 = Stack(c128, 6, c256)
        self.conv_45 = Bottleneck(c128, c128, c512, stride=2)
        self.conv_5 = Stack(c128, 2, c256)
        self.conv_6_sep = ConvBN(c128, c512)
        self.output_layer = GlobalDepthwise(c512, side, embedding)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, embedding)."""
        x = self.conv_3(self.conv_23(self.conv2_dw(self.conv1(x))))
        x = self.conv_5(self.conv_45(self.conv_4(self.conv_34(x))))
        return self.output_layer(self.conv_6_sep(x))

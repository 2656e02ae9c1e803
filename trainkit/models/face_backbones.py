"""Networks for embeddings, built by the blocks of `network_specs`; those of face recognition stand here.

Every network maps float images (B, C, H, W), normalised to [-1, 1], to embeddings (B, embedding) that are not
normalised. State-dict keys are those of published checkpoints, which load by key:

- iResNet (Duta et al., ICPR 2020) in the form that ArcFace (Deng et al., CVPR 2019) trains: keys of InsightFace and
  AdaDistill.
- IR, the network of AdaFace (Kim et al., CVPR 2022, arXiv 2204.00964): keys of CVLface's teachers, whose files begin
  them with `net.`.
- MobileFaceNet (Chen et al., CCBR 2018, arXiv 1804.07573) as AdaDistill's student (Boutros et al., ECCV 2024), with its
  layout and initial weights; InsightFace's `mbf` is another, wider network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.losses.online_softmax import MarginTerms
from trainkit.models.eye import EyeNet
from trainkit.models.network_specs import AnyNet, EyeSpec, IResNetSpec, IRSpec, MobileFaceNetSpec, TimmSpec
from trainkit.models.timm_classifier import keep_statistics, load, timm_network

LAYERS = {
    "iresnet18": (2, 2, 2, 2),
    "iresnet34": (3, 4, 6, 3),
    "iresnet50": (3, 4, 14, 3),
    "iresnet100": (3, 13, 30, 3),
    "ir18": (2, 2, 2, 2),
    "ir50": (3, 4, 14, 3),
    "ir101": (3, 13, 30, 3),
}
"""Blocks in each of the four stages."""
CHANNELS = (64, 128, 256, 512)
HALVINGS = 16
"""How many times the face networks make the sides of an image smaller; an image must have as many pixels."""


def build(spec: AnyNet, shape: Sequence[int], weights: Path | None = None) -> nn.Module:
    """Build the network of `spec` for images of `shape` (channels, height, width), with random weights.

    `weights` is a file for a network of timm without its neck. Raises UserError if it does not fit, if the network does
    not take such images, or if timm has no such network or argument.
    """
    channels, height, width = shape
    if isinstance(spec, TimmSpec):
        return TimmEmbedding(spec, shape, weights)
    if isinstance(spec, EyeSpec):
        return EyeNet((channels, height, width), spec)
    if height != width or height < HALVINGS:
        raise UserError(
            f"net {spec.name}",
            f"images of {width} x {height} pixels",
            f"square images of {HALVINGS} pixels or more",
            "change data.image_size, or use a network of timm",
        )
    if isinstance(spec, IRSpec) and spec.bgr and channels != 3:
        raise UserError(f"net {spec.name}", f"bgr with images of {channels} channels", "3 channels", "leave bgr out")
    if isinstance(spec, IResNetSpec):
        return IResNet(spec, height, channels)
    return IR(spec, height, channels) if isinstance(spec, IRSpec) else MobileFaceNet(spec, height, channels)


def _scaled(channels: Sequence[int], width: float) -> list[int]:
    return [max(1, round(c * width)) for c in channels]


def _last_side(image_size: int) -> int:
    return -(-image_size // HALVINGS)


# ---- Residual networks: BN, 3x3, BN, PReLU, 3x3 with the stride, BN; plus the input. Nothing follows the sum.


class IResNetBlock(nn.Module):
    """A block whose shortcut is convolved where it halves the map or changes the channels."""

    def __init__(self, before: int, channels: int, stride: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.prelu = nn.PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, channels, ceil(H/stride), ceil(W/stride))."""
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        return self.bn3(self.conv2(y)) + (x if self.downsample is None else self.downsample(x))


class IResNet(nn.Module):
    """Square images of `image_size` pixels to embeddings."""

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(self, spec: IResNetSpec, image_size: int, channels_in: int = 3):
        super().__init__()
        channels, side = _scaled(CHANNELS, spec.width), _last_side(image_size)
        before = channels[0]
        self.conv1 = nn.Conv2d(channels_in, before, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(before)
        self.prelu = nn.PReLU(before)
        for stage, (blocks, after) in enumerate(zip(LAYERS[spec.name], channels, strict=True), start=1):
            rest = [IResNetBlock(after, after, 1) for _ in range(blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(IResNetBlock(before, after, 2), *rest))
            before = after
        self.bn2 = nn.BatchNorm2d(before)
        self.dropout = nn.Dropout(spec.dropout)
        self.fc = nn.Linear(before * side * side, spec.embedding)
        self.features = nn.BatchNorm1d(spec.embedding)
        # Scaling all embeddings of a coordinate alike is what the weights before it can do already; the published nets
        # hold the weight at one.
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, embedding)."""
        x = self.prelu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.dropout(self.bn2(x)).flatten(1)
        return self.features(self.fc(x))


class IRBlock(nn.Module):
    """A block that adds its input unchanged, every other pixel of it if it halves the map, unless channels change."""

    def __init__(self, before: int, channels: int, stride: int):
        super().__init__()
        self.stride = stride
        self.shortcut_layer: nn.Module | None = None
        if before != channels:
            self.shortcut_layer = nn.Sequential(
                nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        self.res_layer = nn.Sequential(
            nn.BatchNorm2d(before),
            nn.Conv2d(before, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.PReLU(channels),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, channels, ceil(H/stride), ceil(W/stride))."""
        if self.shortcut_layer is not None:
            return self.res_layer(x) + self.shortcut_layer(x)
        return self.res_layer(x) + x[:, :, :: self.stride, :: self.stride]


class IR(nn.Module):
    """Square RGB images of `image_size` pixels to embeddings; the last batch norm has no weights.

    With `bgr`, for weights that were trained on blue, green, red, channels are reversed before the first layer.
    """

    def __init__(self, spec: IRSpec, image_size: int, channels_in: int = 3):
        super().__init__()
        self.bgr = spec.bgr
        channels, side = _scaled(CHANNELS, spec.width), _last_side(image_size)
        before, blocks = channels[0], []
        for count, after in zip(LAYERS[spec.name], channels, strict=True):
            blocks += [IRBlock(before, after, 2), *(IRBlock(after, after, 1) for _ in range(count - 1))]
            before = after
        self.input_layer = nn.Sequential(
            nn.Conv2d(channels_in, channels[0], 3, 1, 1, bias=False), nn.BatchNorm2d(channels[0]), nn.PReLU(channels[0])
        )
        self.body = nn.Sequential(*blocks)
        last = nn.Linear(before * side * side, spec.embedding)
        self.output_layer = nn.Sequential(
            nn.BatchNorm2d(before),
            nn.Dropout(spec.dropout),
            nn.Flatten(),
            last,
            nn.BatchNorm1d(spec.embedding, affine=False),
        )
        _kaiming(self)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, embedding)."""
        return self.output_layer(self.body(self.input_layer(x.flip(1) if self.bgr else x)))


def _kaiming(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


# ---- MobileFaceNet


class ConvBN(nn.Module):
    """Convolution, padded by `padding` pixels, and batch norm, with PReLU unless `linear`."""

    def __init__(
        self, before: int, after: int, kernel: int = 1, stride: int = 1, padding: int = 0, groups: int = 1,
        linear: bool = False,
    ):  # fmt: skip
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
    """Square images of `image_size` pixels to embeddings."""

    def __init__(self, spec: MobileFaceNetSpec, image_size: int, channels_in: int = 3):
        super().__init__()
        c64, c128, c256, c512 = _scaled(CHANNELS, spec.width)
        self.conv1 = ConvBN(channels_in, c64, 3, 2, 1)
        self.conv2_dw = ConvBN(c64, c64, 3, 1, 1, groups=c64)
        self.conv_23 = Bottleneck(c64, c64, c128, stride=2)
        self.conv_3 = Stack(c64, 4, c128)
        self.conv_34 = Bottleneck(c64, c128, c256, stride=2)
        self.conv_4 = Stack(c128, 6, c256)
        self.conv_45 = Bottleneck(c128, c128, c512, stride=2)
        self.conv_5 = Stack(c128, 2, c256)
        self.conv_6_sep = ConvBN(c128, c512)
        self.output_layer = GlobalDepthwise(c512, _last_side(image_size), spec.embedding)
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, embedding)."""
        x = self.conv_3(self.conv_23(self.conv2_dw(self.conv1(x))))
        x = self.conv_5(self.conv_45(self.conv_4(self.conv_34(x))))
        return self.output_layer(self.conv_6_sep(x))


# ---- Other networks, and what stands above all of them


class TimmEmbedding(nn.Module):
    """A network of timm and a neck that maps its features to embeddings."""

    def __init__(self, spec: TimmSpec, shape: Sequence[int], weights: Path | None = None):
        super().__init__()
        self.backbone = timm_network(spec.model, shape, spec.args, 0, "net timm").eval()
        self.freeze_bn = spec.freeze_bn
        with torch.no_grad():
            probe = torch.zeros(1, *shape, device=next(self.backbone.parameters()).device)
            features = self.backbone(probe).shape[1]
        if weights is not None:
            load(self.backbone, weights, 0)
        self.neck = nn.Sequential(
            nn.BatchNorm1d(features), nn.Linear(features, spec.embedding), nn.BatchNorm1d(spec.embedding)
        )
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) to embeddings (B, D)."""
        return self.neck(self.backbone(x))

    def train(self, mode: bool = True) -> TimmEmbedding:
        """With `freeze_bn` the backbone keeps its statistics."""
        super().train(mode)
        if self.freeze_bn:
            keep_statistics(self.backbone)
        return self


class WithHead(nn.Module):
    """A network and its class centres in one module, so that they are wrapped, compiled and saved together."""

    def __init__(self, net: nn.Module, head: nn.Module):
        super().__init__()
        self.net, self.head = net, head

    def forward(
        self, image: Tensor, with_scores: bool = False, label: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | MarginTerms]:
        """Embeddings (B, D), and on request the head's scores: cosines with every centre (B, C).

        With labels and many classes the head returns only the `MarginTerms` that the loss needs.
        """
        embedding = self.net(image)
        return (embedding, self.head(embedding, label)) if with_scores else embedding


class Pixels(nn.Module):
    """The image itself as an embedding: a baseline."""

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C * H * W)."""
        return image.flatten(1)

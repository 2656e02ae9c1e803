"""iResNet: the residual network of face recognition.

Duta et al., "Improved Residual Networks for Image and Video Recognition", ICPR 2020, in the form that ArcFace (Deng et
al., CVPR 2019) trains. State-dict keys are those of InsightFace and AdaDistill, so their checkpoints load by key.
"""

from __future__ import annotations

from torch import Tensor, nn

LAYERS = {
    "iresnet18": (2, 2, 2, 2),
    "iresnet34": (3, 4, 6, 3),
    "iresnet50": (3, 4, 14, 3),
    "iresnet100": (3, 13, 30, 3),
}
"""Blocks in each of the four stages."""
CHANNELS = (64, 128, 256, 512)
BN_EPS = 1e-5


class Block(nn.Module):
    """BN, 3x3, BN, PReLU, 3x3 with the stride, BN; plus the input. Nothing follows the sum."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in, eps=BN_EPS)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels, eps=BN_EPS)
        self.prelu = nn.PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels, eps=BN_EPS)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels, eps=BN_EPS)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) to (B, channels, ceil(H/stride), ceil(W/stride))."""
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        return self.bn3(self.conv2(y)) + (x if self.downsample is None else self.downsample(x))


class IResNet(nn.Module):
    """Square images of `image_size` pixels to embeddings that are not normalised."""

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(
        self,
        layers: tuple[int, int, int, int] = (2, 2, 2, 2),
        embedding: int = 512,
        image_size: int = 112,
        width: float = 1.0,
        dropout: float = 0.0,
        channels_in: int = 3,
    ):
        super().__init__()
        channels = [max(1, round(c * width)) for c in CHANNELS]
        side = image_size
        for _ in channels:
            side = (side + 1) // 2
        self.conv1 = nn.Conv2d(channels_in, channels[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0], eps=BN_EPS)
        self.prelu = nn.PReLU(channels[0])
        before = channels[0]
        for stage, (blocks, after) in enumerate(zip(layers, channels, strict=True), start=1):
            rest = [Block(after, after, 1) for _ in range(blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(Block(before, after, 2), *rest))
            before = after
        self.bn2 = nn.BatchNorm2d(before, eps=BN_EPS)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(before * side * side, embedding)
        self.features = nn.BatchNorm1d(embedding, eps=BN_EPS)
        # Scaling all embeddings of a coordinate alike is what the weights before it can do already; the published nets
        # hold the weight at one.
        nn.init.constant_(self.features.weight, 1.0)
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

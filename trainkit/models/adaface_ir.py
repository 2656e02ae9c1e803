"""IR: the residual network that AdaFace trains, with the state-dict keys of CVLface's published teachers.

Kim, Jain, Liu, "AdaFace: Quality Adaptive Margin for Face Recognition", CVPR 2022, arXiv 2204.00964. The same blocks as
iResNet (`iresnet.py`) with two differences: a block that keeps its channels adds its input unchanged (every other
pixel of it if the block halves the map), and the last batch norm has no weights. CVLface's files begin their
keys with `net.`.
"""

from __future__ import annotations

from torch import Tensor, nn

LAYERS = {"ir18": (2, 2, 2, 2), "ir50": (3, 4, 14, 3), "ir101": (3, 13, 30, 3)}
"""Blocks in each of the four stages."""
CHANNELS = (64, 128, 256, 512)


class Block(nn.Module):
    """BN, 3x3, BN, PReLU, 3x3 with the stride, BN; plus the input. Nothing follows the sum."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.stride = stride
        self.shortcut_layer: nn.Module | None = None
        if channels_in != channels:
            self.shortcut_layer = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        self.res_layer = nn.Sequential(
            nn.BatchNorm2d(channels_in),
            nn.Conv2d(channels_in, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.PReLU(channels),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) to (B, channels, ceil(H/stride), ceil(W/stride))."""
        if self.shortcut_layer is not None:
            return self.res_layer(x) + self.shortcut_layer(x)
        return self.res_layer(x) + x[:, :, :: self.stride, :: self.stride]


class IR(nn.Module):
    """Square RGB images of `image_size` pixels to embeddings that are not normalised.

    `bgr` is for weights that were trained on images in the order blue, green, red, such as AdaFace's own release: the
    network still takes RGB and reverses the channels before its first layer.
    """

    def __init__(
        self,
        layers: tuple[int, int, int, int] = (2, 2, 2, 2),
        embedding: int = 512,
        image_size: int = 112,
        width: float = 1.0,
        dropout: float = 0.4,
        channels_in: int = 3,
        bgr: bool = False,
    ):
        super().__init__()
        self.bgr = bgr
        channels = [max(1, round(c * width)) for c in CHANNELS]
        side = image_size
        blocks = []
        before = channels[0]
        for count, after in zip(layers, channels, strict=True):
            side = (side + 1) // 2
            blocks += [Block(before, after, 2), *(Block(after, after, 1) for _ in range(count - 1))]
            before = after
        self.input_layer = nn.Sequential(
            nn.Conv2d(channels_in, channels[0], 3, 1, 1, bias=False), nn.BatchNorm2d(channels[0]), nn.PReLU(channels[0])
        )
        self.body = nn.Sequential(*blocks)
        last = nn.Linear(before * side * side, embedding)
        self.output_layer = nn.Sequential(
            nn.BatchNorm2d(before), nn.Dropout(dropout), nn.Flatten(), last, nn.BatchNorm1d(embedding, affine=False)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, embedding)."""
        if self.bgr:
            x = x.flip(1)
        return self.output_layer(self.body(self.input_layer(x)))

"""BiSeNet: a path that keeps spatial detail, a path with a large receptive field, and their fusion.

`BiSeNetV1` is that of Yu et al., ECCV 2018, arXiv 1808.00897; `BiSeNetV2` that of Yu et al., IJCV 2021, arXiv
2004.02147. Details that the papers leave open (channels of the heads, activations, initial weights) follow the most
used public implementation (github.com/CoinCheung/BiSeNet), whose weights `from_published` renames.

Both map images (B, channels, H, W), whose sides are multiples of 32, to a dict:

- `logits`: a list of class scores (B, classes, h, w). First those of the main head, at an eighth of the image's
  sides; while training, those of the auxiliary heads follow, each at its own size. Nothing is enlarged to the image
  here: at 19 classes that costs more memory than the network.
- `fine`: a map (B, fine_channels, H/4, W/4) with spatial detail, for the refinement of points.

In training, batch norm needs two images or more (`least`): some maps have one value per image.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.models.segmentation_specs import FusionKind
from trainkit.models.timm_classifier import feature_info


class ConvBN(nn.Module):
    """Convolution without bias that keeps the size (or halves it), batch norm, and ReLU unless `linear`."""

    def __init__(
        self, before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1, linear: bool = False
    ):
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(after)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, after, ceil(H/stride), ceil(W/stride))."""
        x = self.bn(self.conv(x))
        return x if self.linear else F.relu(x, inplace=True)


class Head(nn.Module):
    """A 3x3 convolution to `inner` channels and a 1x1 convolution to classes; in between, if `second`, at twice the
    size a 3x3 convolution to so many channels."""

    def __init__(self, before: int, inner: int, classes: int, dropout: float = 0.0, second: int | None = None):
        super().__init__()
        self.conv = ConvBN(before, inner)
        self.drop = nn.Dropout(dropout)
        self.second = ConvBN(inner, second) if second else None
        self.out = nn.Conv2d(second or inner, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, h, w) to class scores (B, classes, h, w), or (B, classes, 2h, 2w)."""
        x = self.drop(self.conv(x))
        if self.second is not None:
            x = self.second(_times(x, 2))
        return self.out(x)


def _times(x: Tensor, factor: int) -> Tensor:
    return F.interpolate(x, scale_factor=float(factor), mode="nearest")


def _mean(x: Tensor) -> Tensor:
    """(B, C, H, W) to (B, C, 1, 1)."""
    return x.mean((2, 3), keepdim=True)


def _wide(channels: int, width: float) -> int:
    """`width` times as many channels, in whole eights."""
    return max(8, 8 * round(channels * width / 8))


class Attention(nn.Module):
    """The attention refinement module: each channel times a share that follows from the mean of all channels."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.conv = ConvBN(before, after)
        self.share = nn.Conv2d(after, after, 1, bias=False)
        self.bn = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, h, w) to (B, after, h, w)."""
        x = self.conv(x)
        return x * self.bn(self.share(_mean(x))).sigmoid()


class Fusion(nn.Module):
    """The feature fusion module: both ways side by side, mixed, plus themselves times a share of each channel."""

    def __init__(self, before: int, after: int, kind: FusionKind = "squeeze"):
        super().__init__()
        self.mix = ConvBN(before, after, 1)
        self.kind: FusionKind = kind
        if kind == "squeeze":
            self.squeeze = nn.Conv2d(after, after // 4, 1, bias=False)
            self.excite = nn.Conv2d(after // 4, after, 1, bias=False)
        else:
            self.share = nn.Conv2d(after, after, 1, bias=False)
            self.bn = nn.BatchNorm2d(after)

    def forward(self, detail: Tensor, context: Tensor) -> Tensor:
        """(B, b1, h, w) and (B, b2, h, w) to (B, after, h, w); `before` is b1 + b2."""
        x = self.mix(torch.cat([detail, context], 1))
        mean = _mean(x)
        share = self.excite(F.relu(self.squeeze(mean))) if self.kind == "squeeze" else self.bn(self.share(mean))
        return x + x * share.sigmoid()


class _BiSeNet(nn.Module):
    multiple = 32
    """The sides of an image must be multiples of it."""
    stride = 8
    """How many times the main logits are smaller than the image."""
    least = 2
    """How many images batch norm must see at once in training: there are maps of one value per image."""


class BiSeNetV1(_BiSeNet):
    """BiSeNet of Yu et al., ECCV 2018: a spatial path of four convolutions beside the context path of an encoder.

    `encoder` is a network of timm with maps at strides 4 to 32 (the paper's is ResNet-18), here with random weights;
    `width` scales what is around it. `fusion` is the form of the fusion module, see `FusionKind`. `fine` is the
    encoder's map at stride 4. In the public implementation the fusion module has the learning rate of the heads:
    `match: "*fusion*"` beside `"*head*"`.
    """

    def __init__(
        self,
        classes: int,
        in_channels: int = 3,
        width: float = 1.0,
        aux: bool = True,
        encoder: str = "resnet18",
        fusion: FusionKind = "squeeze",
    ):
        super().__init__()
        import timm

        c64, c128, c256 = (_wide(c, width) for c in (64, 128, 256))
        self.encoder = timm.create_model(encoder, features_only=True, out_indices=(1, 3, 4), in_chans=in_channels)
        info = feature_info(self.encoder)
        strides = info.reduction()
        if strides != [4, 16, 32]:
            raise ValueError(f"encoder {encoder!r} has maps at strides {strides}; expected 4, 16 and 32")
        self.fine_channels, near, far = info.channels()
        self.spatial = nn.Sequential(
            ConvBN(in_channels, c64, 7, 2), ConvBN(c64, c64, 3, 2), ConvBN(c64, c64, 3, 2), ConvBN(c64, c128, 1)
        )
        self.mean = ConvBN(far, c128, 1)
        self.attention32, self.attention16 = Attention(far, c128), Attention(near, c128)
        self.up32, self.up16 = ConvBN(c128, c128), ConvBN(c128, c128)
        self.fusion = Fusion(2 * c128, c256, fusion)
        self.head = Head(c256, c256, classes)
        self.aux_heads = nn.ModuleList(Head(c128, c64, classes) for _ in range(2 if aux else 0))
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and not name.startswith("encoder."):
                nn.init.kaiming_normal_(module.weight, a=1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, image: Tensor) -> dict[str, Tensor | list[Tensor]]:
        """See the module; the auxiliary heads are at strides 8 and 16."""
        fine, at16, at32 = self.encoder(image)
        at16_up = self.up32(_times(self.attention32(at32) + self.mean(_mean(at32)), 2))
        at8 = self.up16(_times(self.attention16(at16) + at16_up, 2))
        logits = [self.head(self.fusion(self.spatial(image), at8))]
        if self.training:
            logits += [head(x) for head, x in zip(self.aux_heads, (at8, at16_up), strict=False)]
        return {"logits": logits, "fine": fine}


class Stem(nn.Module):
    """Two ways to a quarter of the size, a convolution and a maximum, side by side and mixed."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.conv = ConvBN(before, after, 3, 2)
        self.left = nn.Sequential(ConvBN(after, after // 2, 1), ConvBN(after // 2, after, 3, 2))
        self.fuse = ConvBN(2 * after, after)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, after, H/4, W/4)."""
        x = self.conv(x)
        return self.fuse(torch.cat([self.left(x), F.max_pool2d(x, 3, 2, 1)], 1))


class GatherExpansion(nn.Module):
    """The gather-and-expansion layer: a 3x3 convolution, six times the channels each convolved alone, and back.

    With stride 2 there is one more convolution of each channel alone, and the way beside it is convolved too. The last
    batch norm starts at 0, so at first the layer is the way beside it.
    """

    def __init__(self, before: int, after: int, stride: int = 1, expansion: int = 6):
        super().__init__()
        inner = before * expansion
        self.conv = ConvBN(before, before)
        self.depthwise = nn.Sequential(ConvBN(before, inner, 3, stride, groups=before, linear=stride > 1))
        if stride > 1:
            self.depthwise.append(ConvBN(inner, inner, groups=inner))
        self.project = ConvBN(inner, after, 1, linear=True)
        self.beside = nn.Identity()
        if stride > 1:
            self.beside = nn.Sequential(
                ConvBN(before, before, 3, stride, groups=before, linear=True), ConvBN(before, after, 1, linear=True)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, h, w) to (B, after, h/stride, w/stride)."""
        return F.relu(self.project(self.depthwise(self.conv(x))) + self.beside(x))


class ContextEmbedding(nn.Module):
    """The mean of the whole map, added to each place, and a 3x3 convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.mean = ConvBN(channels, channels, 1)
        self.conv = ConvBN(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (B, channels, h, w)."""
        return self.conv(x + self.mean(self.bn(_mean(x))))


class Depthwise(nn.Module):
    """A 3x3 convolution of each channel alone, batch norm, and a 1x1 convolution; no activation."""

    def __init__(self, channels: int):
        super().__init__()
        self.each = ConvBN(channels, channels, groups=channels, linear=True)
        self.mix = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (B, channels, h, w)."""
        return self.mix(self.each(x))


class Aggregation(nn.Module):
    """Bilateral guided aggregation: each branch times a gate that follows from the other, at both sizes."""

    def __init__(self, channels: int):
        super().__init__()
        self.detail, self.detail_down = Depthwise(channels), ConvBN(channels, channels, 3, 2, linear=True)
        self.semantic, self.semantic_up = Depthwise(channels), ConvBN(channels, channels, linear=True)
        self.conv = ConvBN(channels, channels)

    def forward(self, detail: Tensor, semantic: Tensor) -> Tensor:
        """(B, channels, h, w) and (B, channels, h/4, w/4) to (B, channels, h, w)."""
        fine = self.detail(detail) * _times(self.semantic_up(semantic), 4).sigmoid()
        coarse = F.avg_pool2d(self.detail_down(detail), 3, 2, 1) * self.semantic(semantic).sigmoid()
        return self.conv(fine + _times(coarse, 4))


class BiSeNetV2(_BiSeNet):
    """BiSeNet V2 of Yu et al., IJCV 2021: a wide shallow branch for detail beside a narrow deep one for meaning.

    `width` scales all channels, `head` is how many the main head has before its classes. `fine` is the detail
    branch's map at stride 4. The auxiliary ("booster") heads are at strides 2, 4, 8 and 16, for the four stages of the
    semantic branch; while training they add 45 % to the multiply-adds. Those are 24.6 G for an image of 512 x 1024
    pixels; the paper says 21.15 G, which a head of 664 channels would give.
    """

    def __init__(self, classes: int, in_channels: int = 3, width: float = 1.0, aux: bool = True, head: int = 1024):
        super().__init__()
        c16, c32, c64, c128 = (_wide(c, width) for c in (16, 32, 64, 128))
        self.fine_channels = c64
        self.detail = nn.ModuleList(
            nn.Sequential(*(ConvBN(a, b, stride=2 if i == 0 else 1) for i, (a, b) in enumerate(pairwise(channels))))
            for channels in ((in_channels, c64, c64), (c64, c64, c64, c64), (c64, c128, c128, c128))
        )
        stages = [nn.Sequential(Stem(in_channels, c16))]
        for before, after, count in ((c16, c32, 2), (c32, c64, 2), (c64, c128, 4)):
            then = (GatherExpansion(after, after) for _ in range(count - 1))
            stages.append(nn.Sequential(GatherExpansion(before, after, 2), *then))
        self.semantic = nn.ModuleList(stages)
        self.context = ContextEmbedding(c128)
        self.aggregation = Aggregation(c128)
        self.head = Head(c128, _wide(head, width), classes, 0.1)
        boosted = zip((c16, c32, c64, c128), (16, 64, 256, 1024), strict=True)
        self.aux_heads = nn.ModuleList(
            Head(before, c128, classes, 0.1, _wide(second, width)) for before, second in (boosted if aux else ())
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, GatherExpansion):
                nn.init.zeros_(module.project.bn.weight)

    def forward(self, image: Tensor) -> dict[str, Tensor | list[Tensor]]:
        """See the module."""
        detail, stages = [], []
        for stage in self.detail:
            detail.append(stage(detail[-1] if detail else image))
        for stage in self.semantic:
            stages.append(stage(stages[-1] if stages else image))
        logits = [self.head(self.aggregation(detail[-1], self.context(stages[-1])))]
        if self.training:
            logits += [head(x) for head, x in zip(self.aux_heads, stages, strict=False)]
        return {"logits": logits, "fine": detail[1]}


_V1 = {
    "cp.resnet.": "encoder.",
    "cp.arm": "attention",
    ".conv_atten.": ".share.",
    ".bn_atten.": ".bn.",
    "cp.conv_head": "up",
    "cp.conv_avg.": "mean.",
    "sp.conv1.": "spatial.0.",
    "sp.conv2.": "spatial.1.",
    "sp.conv3.": "spatial.2.",
    "sp.conv_out.": "spatial.3.",
    "ffm.convblk.": "fusion.mix.",
    "ffm.conv1.": "fusion.squeeze.",
    "ffm.conv2.": "fusion.excite.",
    "ffm.conv.": "fusion.share.",
    "ffm.bn.": "fusion.bn.",
    "conv_out.conv.": "head.conv.",
    "conv_out.conv_out.": "head.out.",
    "conv_out16.": "aux_heads.0.",
    "conv_out32.": "aux_heads.1.",
    ".conv_out.": ".out.",
}
"""Parts of names in the public implementation's files of V1 to those here, replaced one after the other."""
_LAYERS = {
    ".dwconv1.": ".depthwise.0.",
    ".dwconv2.": ".depthwise.1.",
    ".dwconv.": ".depthwise.0.",
    ".conv2.": ".project.",
    ".shortcut.": ".beside.0.",
    "bga.left1.": "aggregation.detail.each.",
    "bga.right2.": "aggregation.semantic.each.",
    "bga.left2.": "aggregation.detail_down.",
    "bga.right1.": "aggregation.semantic_up.",
    "bga.conv.": "aggregation.conv.",
}
"""Of V2, a convolution and its batch norm as members 0 and 1 of a sequence, here `conv` and `bn`."""
_V2 = {
    "detail.S1.": "detail.0.",
    "detail.S2.": "detail.1.",
    "detail.S3.": "detail.2.",
    "segment.S1S2.": "semantic.0.0.",
    "segment.S5_5.bn.": "context.bn.",
    "segment.S5_5.conv_gap.": "context.mean.",
    "segment.S5_5.conv_last.": "context.conv.",
    "segment.S3.": "semantic.1.",
    "segment.S4.": "semantic.2.",
    "segment.S5_4.": "semantic.3.",
    ".shortcut.2.": ".beside.1.conv.",
    ".shortcut.3.": ".beside.1.bn.",
    "bga.left1.2.": "aggregation.detail.mix.",
    "bga.right2.2.": "aggregation.semantic.mix.",
    **{f"{old}{i}.": f"{new}{word}." for old, new in _LAYERS.items() for i, word in enumerate(("conv", "bn"))},
    ".conv1.": ".conv.",
    "aux2.": "aux_heads.0.",
    "aux3.": "aux_heads.1.",
    "aux4.": "aux_heads.2.",
    "aux5_4.": "aux_heads.3.",
    ".conv_out.0.1.": ".second.",
    ".conv_out.1.": ".out.",
}


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the public implementation's files under the names used here; any other names are kept.

    A file is taken for one of V1 or V2 by the modules that only those have.
    """
    of_v1, of_v2 = (any(name.startswith(start) for name in tensors) for start in ("cp.resnet.", "bga."))
    parts = _V1 if of_v1 else _V2 if of_v2 else {}

    def renamed(name: str) -> str:
        for theirs, ours in parts.items():
            name = name.replace(theirs, ours)
        return name

    return {renamed(name): tensor for name, tensor in tensors.items()}

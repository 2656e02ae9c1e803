"""EMCAD: a light decoder of multi-scale convolutions and attention over an encoder's maps, for each slice of a volume.

For anisotropic volumes: if slices are a dozen times as far apart as voxels, adjacent slices have little in common.

Rahman, Munir, Marculescu, "EMCAD: Efficient Multi-scale Convolutional Attention Decoding for Medical Image
Segmentation" (CVPR 2024, arXiv 2405.06880), written from the paper: with maps of 512, 320, 128 and 64 channels
(PVTv2-B2; Wang et al., 2022) and kernels of 1, 3 and 5 the decoder has 1.91 million parameters, as published.

The published training code (SLDGroup/EMCAD, read at commit 8f18a7d) differs from the paper in the decoder; these facts
of it are in `Form`. Before September 2024 it also had ReLU6 where maps are enlarged and gated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.interfaces import DatasetInfo
from trainkit.models.patch_geometry import check_patch, format_sides
from trainkit.models.segmentation_specs import EmcadSpec, Form
from trainkit.models.timm_classifier import feature_info, misfits_refused, refuse_unknown

STRIDES = (4, 8, 16, 32)
"""Strides of the four maps of the encoder, finest first."""


class ChannelAttention(nn.Module):
    """CAB: a gate for each channel, from its mean and highest value by one small network (Woo et al., ECCV 2018)."""

    def __init__(self, channels: int, reduction: int = 16):
        super().__init__()
        hidden = max(1, channels // reduction)
        self.squeeze = nn.Conv2d(channels, hidden, 1, bias=False)
        self.excite = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, H, W), gated."""
        pooled = (x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True))
        mean, highest = (self.excite(F.relu(self.squeeze(p))) for p in pooled)
        return x * torch.sigmoid(mean + highest)


class SpatialAttention(nn.Module):
    """SAB: a gate for each place, from the mean and the highest value of its channels by one 7x7 convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, H, W), gated."""
        return x * torch.sigmoid(self.conv(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)))


class MultiScale(nn.Module):
    """MSCB: widened by a 1x1 convolution, depth-wise convolutions of several sizes added up, narrowed, a shortcut."""

    def __init__(self, channels: int, kernels: Sequence[int], expansion: int):
        super().__init__()
        wide = channels * expansion
        self.widen = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6())
        self.scales = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(wide, wide, k, padding=k // 2, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()
            )
            for k in kernels
        )
        self.narrow = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))
        # Depth-wise convolutions mix no channels; shuffled, those that came of one channel are no longer together.
        self.groups = channels

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C, H, W) of the same size."""
        wide = self.widen(x)
        return x + self.narrow(shuffle(reduce(torch.add, (scale(wide) for scale in self.scales)), self.groups))


def shuffle(x: Tensor, groups: int) -> Tensor:
    """Channels of (N, C, H, W) dealt out: the first of every group, then the second (Zhang et al., ShuffleNet 2018)."""
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


class Attention(nn.Sequential):
    """MSCAM: channels gated, places gated, then convolved at several scales."""

    def __init__(self, channels: int, kernels: Sequence[int], expansion: int):
        super().__init__(ChannelAttention(channels), SpatialAttention(), MultiScale(channels, kernels, expansion))


class Gate(nn.Module):
    """LGAG: what the encoder passes on, gated by both sides through grouped 3x3 convolutions."""

    def __init__(self, channels: int):
        super().__init__()
        self.activation = nn.ReLU()
        hidden = max(1, channels // 2)
        groups = hidden if channels % hidden == 0 else 1

        def side() -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(channels, hidden, 3, padding=1, groups=groups), nn.BatchNorm2d(hidden))

        self.coarse, self.passed = side(), side()
        self.judge = nn.Sequential(nn.Conv2d(hidden, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())

    def forward(self, coarse: Tensor, passed: Tensor) -> Tensor:
        """`passed` (N, C, H, W), gated; `coarse` has the same shape."""
        return passed * self.judge(self.activation(self.coarse(coarse) + self.passed(passed)))


class Up(nn.Sequential):
    """EUCB: enlarged twice, a depth-wise 3x3 convolution, a 1x1 convolution to the channels of the finer level."""

    def __init__(self, before: int, after: int):
        super().__init__(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(before, before, 3, padding=1, groups=before, bias=False),
            nn.BatchNorm2d(before),
            nn.ReLU(),
            nn.Conv2d(before, after, 1),
        )


class Decoder(nn.Module):
    """From maps of `channels`, coarsest first, each twice the size of the one before, to as many refined ones."""

    def __init__(
        self, channels: Sequence[int], kernels: Sequence[int] = (1, 3, 5), expansion: int = 2, form: Form = "paper"
    ):
        super().__init__()
        refine = [Attention(c, kernels, expansion) for c in channels]
        self.refine = nn.ModuleList(refine)
        self.up = nn.ModuleList(Up(a, b) for a, b in pairwise(channels))
        self.gate = nn.ModuleList(Gate(c) for c in channels[1:])
        self.shared = form == "code"
        if form == "code":
            for attention in refine[1:]:
                attention[1] = nn.Identity()
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.normal_(module.weight, std=0.02)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps (N, C, H, W), coarsest first."""
        first, *finer = (cast(Attention, refine) for refine in self.refine)  # as `__init__` filled it
        out = [first(maps[0])]
        for up, gate, refine, passed in zip(self.up, self.gate, finer, maps[1:], strict=True):
            x = up(out[-1])
            channels, places, scales = refine
            places = first[1] if self.shared else places
            out.append(scales(places(channels(x + gate(x, passed)))))
        return out


class Emcad(nn.Module):
    """Class scores of images: in training those of four levels, in evaluation those of the finest.

    All are enlarged to the size of the image, for the loss adds them up.
    """

    def __init__(self, encoder: nn.Module, classes: int, kernels: Sequence[int], expansion: int, form: Form = "paper"):
        super().__init__()
        channels = feature_info(encoder).channels()[::-1]
        self.encoder, self.decoder = encoder, Decoder(channels, kernels, expansion, form)
        self.heads = nn.ModuleList(nn.Conv2d(c, classes, 1) for c in channels)
        self.last = getattr(encoder, "output_fmt", None) == "NHWC"

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Images (N, C, H, W) to class scores (N, classes, H, W); in training a list, finest first."""
        maps = self.encoder(image)[::-1]
        refined = self.decoder([x.movedim(-1, 1) for x in maps] if self.last else maps)
        levels = range(len(refined) - 1, -1, -1) if self.training else [len(refined) - 1]
        scores = [F.interpolate(self.heads[i](refined[i]).float(), image.shape[2:], mode="bilinear") for i in levels]
        return scores if self.training else scores[0]


class Slices(nn.Module):
    """A 2-D network applied to every slice of a volume, with `neighbours` slices on either side as further channels."""

    def __init__(self, net: nn.Module, neighbours: int = 0):
        super().__init__()
        self.net, self.neighbours = net, neighbours

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Volumes (B, C, D, H, W) to class scores (B, classes, D, H, W); a list if the network returns one."""
        out = self.net(with_neighbours(image, self.neighbours))
        volumes = [
            scores.unflatten(0, (image.shape[0], image.shape[2])).transpose(1, 2)
            for scores in (out if isinstance(out, list) else [out])
        ]
        return volumes if isinstance(out, list) else volumes[0]


def with_neighbours(image: Tensor, neighbours: int) -> Tensor:
    """Volumes (B, C, D, H, W) to images (B*D, C*(2*neighbours+1), H, W): each slice between those beside it.

    At either end the last slice is repeated. The channels of one slice lie side by side.
    """
    depth = image.shape[2]
    at = torch.arange(depth, device=image.device)
    beside = [image[:, :, (at + k).clamp(0, depth - 1)] for k in range(-neighbours, neighbours + 1)]
    return torch.cat(beside, 1).transpose(1, 2).flatten(0, 1)


def build(spec: EmcadSpec, meta: DatasetInfo) -> tuple[nn.Module, str]:
    """Build the network of `spec`, with random weights; return also a description.

    Raises UserError for an encoder that timm does not have, or without such maps of such slices.
    """
    import timm

    where, sides = "task.net.encoder", meta.shape[1:]
    check_patch(spec.name, sides, (1, STRIDES[-1], STRIDES[-1]))
    refuse_unknown(spec.encoder, where)
    given: dict[str, Any] = {"drop_path_rate": spec.drop_path} if spec.drop_path else {}
    with misfits_refused(where, spec.encoder, f"a network with maps at strides {', '.join(map(str, STRIDES))}"):
        strides = feature_info(timm.create_model(spec.encoder, features_only=True)).reduction()
        if not set(STRIDES) <= set(strides):
            raise ValueError(f"maps at strides {', '.join(map(str, strides))}")
        encoder = timm.create_model(
            spec.encoder,
            features_only=True,
            in_chans=meta.shape[0] * (2 * spec.neighbours + 1),
            out_indices=tuple(i for i, stride in enumerate(strides) if stride in STRIDES),
            **given,
        )
    inner = Emcad(encoder, meta.classes, spec.kernels, spec.expansion, spec.form)
    net = Slices(inner, spec.neighbours).eval()
    what = f"{spec.encoder} on slices of {format_sides(sides[1:])} voxels"
    with misfits_refused(where, what, remedy="use another encoder"), torch.no_grad():
        scores = net(torch.zeros(1, meta.shape[0], 1, *sides[1:], device=next(net.parameters()).device))
        if scores.shape != (1, meta.classes, 1, *sides[1:]):
            raise ValueError(f"scores of shape {tuple(scores.shape)}, not one per voxel and class")
    seen = f"each slice with {spec.neighbours} on either side" if spec.neighbours else "each slice alone"
    multiple = format_sides((1, STRIDES[-1], STRIDES[-1]))
    decoder = sum(p.numel() for p in inner.decoder.parameters())
    about = f"{spec.encoder} with kernels {format_sides(spec.kernels)}, {seen}, patch sides multiples of {multiple}"
    return net.train(), f"{about}, {decoder:,} parameters in the decoder"

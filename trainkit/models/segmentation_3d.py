"""Networks for the segmentation of volumes: MONAI's U-Net, nnU-Net's network, and EMCAD on slices.

Every network maps float volumes (B, C, D, H, W) to class scores (B, classes, D, H, W). In training, a network with deep
supervision returns a list of such scores, finest first, the coarser ones at the size of their level. MONAI takes 12 s
to import, so it is imported only when a network is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError, number_of
from trainkit.interfaces import DatasetInfo
from trainkit.models import emcad
from trainkit.models.patch_geometry import (
    SMALLEST_SIDE,
    Levels,
    check_patch,
    format_sides,
    levels_for,
    require,
)
from trainkit.models.segmentation_specs import AnyVolumeNet, DynUNetSpec, EmcadSpec, UNetSpec
from trainkit.models.timm_classifier import load_encoder


def build(spec: AnyVolumeNet, meta: DatasetInfo, found: Mapping[str, Path]) -> tuple[nn.Module, list[str]]:
    """Build the network of `spec` for patches of `meta.shape` (C, D, H, W); return also notes about its levels.

    `found` holds the file of its weights under `net`. Raises UserError if MONAI is not installed, the patch is too
    small or does not fit the strides, or the weights are of another network.
    """
    net, about = _MAKERS[type(spec)](spec, meta)
    if "net" in found:
        if isinstance(spec, EmcadSpec) and spec.weights == "pretrained":
            load_encoder(net, spec.encoder, found["net"])
        else:
            safe_load.load_into(net, safe_load.read_tensors(found["net"]), str(found["net"]))
    count = sum(p.numel() for p in net.parameters())
    return net, [f"{spec.name}: {about}, {count:,} parameters"]


def _levels(spec: AnyVolumeNet, patch: Sequence[int], spacing: Sequence[float], wanted: int, least: int) -> Levels:
    levels = levels_for(patch, spacing, wanted)
    if len(levels.kernels) < least:
        raise UserError(
            "data.patch",
            f"{format_sides(patch)} voxels, enough for {number_of(len(levels.kernels), 'levels')} of {spec.name}",
            f"enough for {least} or more",
            f"use a larger patch: a side is halved only while {SMALLEST_SIDE} voxels are left",
        )
    check_patch(spec.name, patch, levels.multiple)
    return levels


def _unet(spec: UNetSpec, meta: DatasetInfo) -> tuple[nn.Module, str]:
    levels = _levels(spec, meta.shape[1:], meta.spacing, len(spec.filters), 2)
    require("monai")
    from monai.networks.nets.unet import UNet

    upwards = iter(levels.kernels[-2::-1])
    strides: Any = levels.strides[1:]  # MONAI accepts tuples, although its types name only integers

    class ByLevel(UNet):
        """MONAI's U-Net with a kernel per level. MONAI builds levels from the coarsest; this sets the next one's."""

        def _get_bottom_layer(self, *args: Any) -> nn.Module:
            return self._then_next(super()._get_bottom_layer(*args))

        def _get_connection_block(self, *args: Any) -> nn.Module:
            return self._then_next(super()._get_connection_block(*args))

        def _then_next(self, made: nn.Module) -> nn.Module:
            self.kernel_size = self.up_kernel_size = next(upwards, None)
            return made

    net = ByLevel(
        spatial_dims=3,
        in_channels=meta.shape[0],
        out_channels=meta.classes,
        channels=spec.filters[: len(levels.kernels)],
        strides=strides,
        kernel_size=levels.kernels[-1],
        num_res_units=spec.res_units,
        norm="instance",
        dropout=spec.dropout,
    )
    # A plain module: a class inside a function cannot be pickled.
    return Whole(net.model), _about(levels, len(spec.filters))


def _about(levels: Levels, wanted: int) -> str:
    count = len(levels.kernels)
    fewer = f"{count} of {wanted} levels, the most that the patch allows, " if count < wanted else ""
    return f"{fewer}{levels}, patch sides multiples of {format_sides(levels.multiple)}"


class Whole(nn.Module):
    """A network without deep supervision."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Volumes (B, C, D, H, W) to class scores (B, classes, D, H, W)."""
        return self.model(image)


def _dynunet(spec: DynUNetSpec, meta: DatasetInfo) -> tuple[nn.Module, str]:
    levels = _levels(spec, meta.shape[1:], meta.spacing, len(spec.filters), 3)
    require("monai")
    from monai.networks.nets.dynunet import DynUNet

    count = len(levels.kernels)
    net = DynUNet(
        spatial_dims=3,
        in_channels=meta.shape[0],
        out_channels=meta.classes,
        kernel_size=levels.kernels,
        strides=levels.strides,
        upsample_kernel_size=levels.strides[1:],
        filters=spec.filters[:count],
        dropout=spec.dropout or None,
        res_block=spec.res_block,
        deep_supervision=spec.deep_supervision,
        deep_supr_num=count - 2,
    )
    outputs = count - 1 if spec.deep_supervision else 1
    return Dynamic(net), f"{_about(levels, len(spec.filters))}, {outputs} outputs in training"


class Dynamic(nn.Module):
    """The blocks of MONAI's DynUNet, each once.

    MONAI's own class holds every block under two names, which doubles its checkpoints; it keeps the last outputs and
    their graph in a list; and it enlarges the coarse outputs to the full size, which at 96^3 and ten classes costs more
    memory than the outputs themselves.
    """

    downsamples: nn.ModuleList
    upsamples: nn.ModuleList
    deep_supervision_heads: nn.ModuleList

    def __init__(self, net: Any):
        super().__init__()
        self.input_block, self.downsamples, self.bottleneck = net.input_block, net.downsamples, net.bottleneck
        self.upsamples, self.output_block = net.upsamples, net.output_block
        self.deep_supervision_heads = net.deep_supervision_heads if net.deep_supervision else nn.ModuleList()

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Volumes (B, C, D, H, W) to class scores; in training with deep supervision a list, finest first."""
        passed = [self.input_block(image)]
        for block in self.downsamples:
            passed.append(block(passed[-1]))
        x, coarse = self.bottleneck(passed[-1]), []
        for up in self.upsamples:
            x = up(x, passed.pop())
            if self.training and 1 <= len(passed) <= len(self.deep_supervision_heads):
                coarse.append(self.deep_supervision_heads[len(passed) - 1](x))
        out = self.output_block(x)
        return [out, *coarse[::-1]] if coarse else out


_MAKERS = {
    UNetSpec: _unet,
    DynUNetSpec: _dynunet,
    EmcadSpec: emcad.build,
}

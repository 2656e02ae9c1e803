"""Networks by name: the YAML blocks that choose one, and `build`, which makes it.

Every network maps float pictures (B, C, H, W), normalised to [-1, 1], to embeddings (B, embedding) that are not
normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from trainkit.config.ranges import Channels, FractionBelowOne
from trainkit.errors import UserError
from trainkit.models import adaface_ir, iresnet
from trainkit.models.adaface_ir import IR
from trainkit.models.eye import EyeNet, EyeSpec
from trainkit.models.iresnet import IResNet
from trainkit.models.mobilefacenet import MobileFaceNet
from trainkit.models.timm_classifier import Argument, check_arguments, timm_network

SMALLEST_SIDE = 16
"""Pixels; the face networks halve the picture four times."""


@dataclass(kw_only=True)
class MobileFaceNetSpec:
    """MobileFaceNet in AdaDistill's layout (Chen et al. 2018): 1.2 M parameters at width 1."""

    name: Literal["mobilefacenet"]
    embedding: Channels = 512
    """Length of the embedding."""
    width: Annotated[float, Field(gt=0, le=8)] = 1.0
    """Factor on all channel counts."""


@dataclass(kw_only=True)
class IResNetSpec:
    """Residual network of face recognition (Duta et al. 2020; Deng et al. 2019)."""

    name: Literal["iresnet18", "iresnet34", "iresnet50", "iresnet100"]
    embedding: Channels = 512
    """Length of the embedding."""
    width: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Factor on all channel counts."""
    dropout: FractionBelowOne = 0.0
    """Share of the last map set to zero in training."""


@dataclass(kw_only=True)
class IRSpec:
    """The network of AdaFace (Kim et al. 2022) that CVLface's teachers are: iResNet with plain shortcuts."""

    name: Literal["ir18", "ir50", "ir101"]
    embedding: Channels = 512
    """Length of the embedding."""
    width: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Factor on all channel counts."""
    dropout: FractionBelowOne = 0.4
    """Share of the last map set to zero in training."""
    bgr: bool = False
    """For weights learnt on pictures with blue first (AdaFace's own release); CVLface's have red first, as here."""


@dataclass(kw_only=True)
class TimmSpec:
    """Any classification network of timm, from random weights, with a neck: batch norm, linear, batch norm."""

    name: Literal["timm"]
    model: str = field(metadata={"timm": ""})
    """Name as `timm.list_models()` gives it; a tag after a dot is ignored, for nothing is downloaded."""
    embedding: Channels = 512
    """Length of the embedding."""
    args: dict[str, Argument] = field(default_factory=dict)
    """Further arguments of its constructor: `drop_path_rate`, `depths`, `dims`, `patch_size`, ..."""

    def __post_init__(self) -> None:
        check_arguments(self.args)


AnyNet = MobileFaceNetSpec | IResNetSpec | IRSpec | EyeSpec | TimmSpec
Net = Annotated[AnyNet, Field(discriminator="name")]
"""The block of a recipe that chooses a network."""


def embedding_of(spec: AnyNet) -> int:
    """Return the length of the embedding of a network."""
    if spec.embedding is None:
        raise ValueError(f"net {spec.name}: the length of its embedding is not known")
    return spec.embedding


def build(spec: AnyNet, shape: Sequence[int]) -> nn.Module:
    """Make the network of `spec` for pictures of `shape` (channels, height, width), with random weights.

    Raises UserError when the network cannot take such pictures, or timm has none of that name or with such arguments.
    """
    channels, height, width = shape
    if isinstance(spec, TimmSpec):
        return _Timm(spec, shape)
    if isinstance(spec, EyeSpec):
        return EyeNet((channels, height, width), spec)
    if height != width or height < SMALLEST_SIDE:
        raise UserError(
            f"net {spec.name}",
            f"pictures of {width} x {height} pixels",
            f"square pictures of {SMALLEST_SIDE} pixels or more",
            "change image_size of the data, or take a timm network",
        )
    if isinstance(spec, IResNetSpec):
        return IResNet(iresnet.LAYERS[spec.name], spec.embedding, height, spec.width, spec.dropout, channels)
    if isinstance(spec, IRSpec):
        if spec.bgr and channels != 3:
            raise UserError(f"net {spec.name}", f"pictures of {channels} channels", "3 for bgr", "leave bgr out")
        layers = adaface_ir.LAYERS[spec.name]
        return IR(layers, spec.embedding, height, spec.width, spec.dropout, channels, spec.bgr)
    return MobileFaceNet(spec.embedding, height, spec.width, channels)


class _Timm(nn.Module):
    def __init__(self, spec: TimmSpec, shape: Sequence[int]):
        super().__init__()
        self.backbone = timm_network(spec.model, shape, spec.args, 0, "net timm").eval()
        with torch.no_grad():
            probe = torch.zeros(1, *shape, device=next(self.backbone.parameters()).device)
            features = self.backbone(probe).shape[1]
        self.backbone.train()
        self.neck = nn.Sequential(
            nn.BatchNorm1d(features), nn.Linear(features, spec.embedding), nn.BatchNorm1d(spec.embedding)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.neck(self.backbone(x))

"""Networks for embeddings: the recipe blocks that select one, and `build`.

Every network maps float images (B, C, H, W), normalised to [-1, 1], to embeddings (B, embedding) that are not
normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from trainkit.models.timm_classifier import Argument, check_arguments, check_tag, keep_statistics, load, timm_network

SMALLEST_SIDE = 16
"""Pixels; the face networks halve the image four times."""


@dataclass(kw_only=True)
class MobileFaceNetSpec:
    """MobileFaceNet in AdaDistill's layout (Chen et al., CCBR 2018, arXiv 1804.07573): 1.2 M parameters at width 1."""

    name: Literal["mobilefacenet"]
    """Selects MobileFaceNet."""
    embedding: Channels = 512
    """Length of the embedding."""
    width: Annotated[float, Field(gt=0, le=8)] = 1.0
    """Factor on all channel counts."""


@dataclass(kw_only=True)
class IResNetSpec:
    """iResNet, the residual network of face recognition (Duta et al., ICPR 2020; Deng et al., CVPR 2019)."""

    name: Literal["iresnet18", "iresnet34", "iresnet50", "iresnet100"]
    """Selects iResNet with 18, 34, 50 or 100 layers."""
    embedding: Channels = 512
    """Length of the embedding."""
    width: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Factor on all channel counts."""
    dropout: FractionBelowOne = 0.0
    """Dropout: share of the last feature map that is set to zero in training."""


@dataclass(kw_only=True)
class IRSpec:
    """IR, the network of AdaFace (Kim et al., CVPR 2022) and of CVLface's teachers: iResNet with plain shortcuts."""

    name: Literal["ir18", "ir50", "ir101"]
    """Selects IR with 18, 50 or 101 layers."""
    embedding: Channels = 512
    """Length of the embedding."""
    width: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Factor on all channel counts."""
    dropout: FractionBelowOne = 0.4
    """Dropout: share of the last feature map that is set to zero in training."""
    bgr: bool = False
    """Set it for weights that were trained on images in the channel order blue, green, red, such as AdaFace's own
    release. CVLface's weights use red, green, blue."""


@dataclass(kw_only=True)
class TimmSpec:
    """Any classification network of timm, followed by a neck: batch norm, linear layer, batch norm."""

    name: Literal["timm"]
    """Selects a network of timm."""
    model: str = field(metadata={"timm": ""})
    """Name of the network in `timm.list_models()`, with the tag of its weights (`NAME.TAG`) if `weights` is
    `pretrained`."""
    embedding: Channels = 512
    """Length of the embedding."""
    args: dict[str, Argument] = field(default_factory=dict)
    """Further arguments of the network's constructor: `drop_path_rate`, `depths`, `dims`, `patch_size`, ..."""
    weights: str | None = field(default=None, metadata={"hash": "set"})
    """Initial weights of the network without its neck, with the values of `task.net.weights` of task `classify`; only
    for task `embed`. None: random."""
    frozen: bool = field(default=False, metadata={"hash": "set"})
    """Train only the neck and the class centres, on features of the pretrained network that are computed once before
    the first step; only for task `embed`. Image augmentation is limited to mirroring."""
    freeze_bn: bool = field(default=False, metadata={"hash": "set"})
    """Keep the running statistics of the pretrained batch norms below the neck fixed."""

    def __post_init__(self) -> None:
        check_arguments(self.args)
        check_tag(self.model, self.weights, "convnext_atto.d2_in1k", "model")
        if self.frozen and self.weights is None:
            raise ValueError(
                "frozen is true, but weights is not set, so the frozen layers would stay random; set weights"
            )
        if self.freeze_bn and self.weights is None:
            raise ValueError(
                "freeze_bn is true, but weights is not set, so there are no statistics to keep; set weights"
            )


AnyNet = MobileFaceNetSpec | IResNetSpec | IRSpec | EyeSpec | TimmSpec
Net = Annotated[AnyNet, Field(discriminator="name")]
"""The block of a recipe that selects a network."""


def embedding_of(spec: AnyNet) -> int:
    """Return the length of the embedding of a network."""
    if spec.embedding is None:
        raise ValueError(f"net {spec.name}: the length of its embedding is not known")
    return spec.embedding


def weights_of(spec: AnyNet) -> str | None:
    """Return the source of the initial weights, in the form of `required_weights` of a task; None: random."""
    if not isinstance(spec, TimmSpec):
        return None
    return f"timm:{spec.model}" if spec.weights == "pretrained" else spec.weights


def refuse_weights(spec: AnyNet, key: str) -> None:
    """Raise ValueError if a network has initial weights, or is frozen, in a task that does not support it."""
    if isinstance(spec, TimmSpec) and spec.weights is not None:
        raise ValueError(f"{key}.weights is set, which only task embed supports; leave it out")


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
    if height != width or height < SMALLEST_SIDE:
        raise UserError(
            f"net {spec.name}",
            f"images of {width} x {height} pixels",
            f"square images of {SMALLEST_SIDE} pixels or more",
            "change data.image_size, or use a network of timm",
        )
    if isinstance(spec, IResNetSpec):
        return IResNet(iresnet.LAYERS[spec.name], spec.embedding, height, spec.width, spec.dropout, channels)
    if isinstance(spec, IRSpec):
        if spec.bgr and channels != 3:
            raise UserError(
                f"net {spec.name}", f"bgr with images of {channels} channels", "3 channels", "leave bgr out"
            )
        layers = adaface_ir.LAYERS[spec.name]
        return IR(layers, spec.embedding, height, spec.width, spec.dropout, channels, spec.bgr)
    return MobileFaceNet(spec.embedding, height, spec.width, channels)


class TimmEmbedding(nn.Module):
    """A network of timm and a neck that maps its features to embeddings."""

    def __init__(self, spec: TimmSpec, shape: Sequence[int], weights: Path | None = None):
        super().__init__()
        self.backbone = timm_network(spec.model, shape, spec.args, 0, "net timm").eval()
        self.frozen, self.freeze_bn = spec.frozen, spec.freeze_bn
        with torch.no_grad():
            probe = torch.zeros(1, *shape, device=next(self.backbone.parameters()).device)
            features = self.backbone(probe).shape[1]
        if weights is not None:
            load(self.backbone, weights, 0)
        self.neck = nn.Sequential(
            nn.BatchNorm1d(features), nn.Linear(features, spec.embedding), nn.BatchNorm1d(spec.embedding)
        )
        if self.frozen:
            self.backbone.requires_grad_(False)
        self.train()

    def forward(self, x: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W), or their cached features (B, F), to embeddings (B, D)."""
        return self.neck(self.backbone(x) if features is None else features)

    def train(self, mode: bool = True) -> TimmEmbedding:
        """A frozen backbone keeps its statistics."""
        super().train(mode)
        self.backbone.train(mode and not self.frozen)
        if self.freeze_bn:
            keep_statistics(self.backbone)
        return self

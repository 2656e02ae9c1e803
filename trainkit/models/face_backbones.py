"""Networks for embeddings, built by the blocks of `network_specs`.

Every network maps float images (B, C, H, W), normalised to [-1, 1], to embeddings (B, embedding) that are not
normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.losses.online_softmax import MarginTerms
from trainkit.models import adaface_ir, iresnet
from trainkit.models.adaface_ir import IR
from trainkit.models.eye import EyeNet
from trainkit.models.iresnet import IResNet
from trainkit.models.mobilefacenet import MobileFaceNet
from trainkit.models.network_specs import AnyNet, EyeSpec, IResNetSpec, IRSpec, TimmSpec
from trainkit.models.timm_classifier import keep_statistics, load, timm_network

SMALLEST_SIDE = 16
"""Pixels; the face networks halve the image four times."""


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


class WithHead(nn.Module):
    """A network and its class centres in one module, so that they are wrapped, compiled and saved together."""

    def __init__(self, net: nn.Module, head: nn.Module):
        super().__init__()
        self.net, self.head = net, head

    def forward(
        self,
        image: Tensor | None = None,
        with_scores: bool = False,
        label: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | MarginTerms]:
        """Embeddings (B, D), and on request the head's scores: cosines with every centre (B, C).

        With labels and many classes the head returns only the `MarginTerms` that the loss needs. A frozen network of
        timm takes cached `features` instead of images.
        """
        embedding = self.net(image) if features is None else self.net(features=features)
        return (embedding, self.head(embedding, label)) if with_scores else embedding


class Pixels(nn.Module):
    """The image itself as an embedding: a baseline."""

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C * H * W)."""
        return image.flatten(1)

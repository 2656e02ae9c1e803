"""Networks by name: the YAML blocks that choose one, and `build`, which makes it.

Every network maps float pictures (B, C, H, W), normalised to [-1, 1], to embeddings (B, embedding) that are not
normalised.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.models import ir, iresnet
from trainkit.models.ir import IR
from trainkit.models.iresnet import IResNet
from trainkit.models.mobilefacenet import MobileFaceNet

__all__ = [
    "IR",
    "IRSpec",
    "IResNet",
    "IResNetSpec",
    "MobileFaceNet",
    "MobileFaceNetSpec",
    "Net",
    "TimmSpec",
    "build",
    "macs",
]

SMALLEST_SIDE = 16
"""Pixels; the face networks halve the picture four times."""


@dataclass(kw_only=True)
class MobileFaceNetSpec:
    """MobileFaceNet in AdaDistill's layout (Chen et al. 2018): 1.2 M parameters at width 1."""

    name: Literal["mobilefacenet"]
    embedding: int = 512
    """Length of the embedding."""
    width: float = 1.0
    """Factor on all channel counts."""

    def __post_init__(self) -> None:
        _check(self.embedding, self.width)


@dataclass(kw_only=True)
class IResNetSpec:
    """Residual network of face recognition (Duta et al. 2020; Deng et al. 2019)."""

    name: Literal["iresnet18", "iresnet34", "iresnet50", "iresnet100"]
    embedding: int = 512
    """Length of the embedding."""
    width: float = 1.0
    """Factor on all channel counts."""
    dropout: float = 0.0
    """Share of the last map set to zero in training."""

    def __post_init__(self) -> None:
        _check(self.embedding, self.width, self.dropout)


@dataclass(kw_only=True)
class IRSpec:
    """The network of AdaFace (Kim et al. 2022) that CVLface's teachers are: iResNet with plain shortcuts."""

    name: Literal["ir18", "ir50", "ir101"]
    embedding: int = 512
    """Length of the embedding."""
    width: float = 1.0
    """Factor on all channel counts."""
    dropout: float = 0.4
    """Share of the last map set to zero in training."""
    bgr: bool = False
    """For weights learnt on pictures with blue first (AdaFace's own release); CVLface's have red first, as here."""

    def __post_init__(self) -> None:
        _check(self.embedding, self.width, self.dropout)


@dataclass(kw_only=True)
class TimmSpec:
    """Any classification network of timm, from random weights, with a neck: batch norm, linear, batch norm."""

    name: Literal["timm"]
    model: str
    """Name as `timm.list_models()` gives it; a tag after a dot is ignored, for nothing is downloaded."""
    embedding: int = 512
    """Length of the embedding."""

    def __post_init__(self) -> None:
        _check(self.embedding)


Net = Annotated[MobileFaceNetSpec | IResNetSpec | IRSpec | TimmSpec, Field(discriminator="name")]
"""The block of a recipe that chooses a network."""


def _check(embedding: int, width: float = 1.0, dropout: float = 0.0) -> None:
    if embedding < 1:
        raise ValueError(f"embedding is {embedding}; it must be 1 or more")
    if not 0 < width <= 16:
        raise ValueError(f"width is {width}; a factor above 0 and up to 16 is needed")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; a share from 0 to below 1 is needed")


def build(spec: MobileFaceNetSpec | IResNetSpec | IRSpec | TimmSpec, shape: tuple[int, int, int]) -> nn.Module:
    """Make the network of `spec` for pictures of `shape` (channels, height, width), with random weights.

    Raises UserError when the network cannot take such pictures, or timm has none of that name.
    """
    channels, height, width = shape
    if isinstance(spec, TimmSpec):
        return _Timm(spec, shape)
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
        layers = ir.LAYERS[spec.name]
        return IR(layers, spec.embedding, height, spec.width, spec.dropout, channels, spec.bgr)
    return MobileFaceNet(spec.embedding, height, spec.width, channels)


class _Timm(nn.Module):
    def __init__(self, spec: TimmSpec, shape: tuple[int, int, int]):
        import timm

        super().__init__()
        architecture = spec.model.partition(".")[0]
        if not timm.is_model(architecture):
            near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
            raise UserError(
                "net timm",
                f"timm {timm.__version__} has no model {spec.model!r}",
                remedy=f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists the names",
            )
        config = timm.get_pretrained_cfg(architecture, allow_unregistered=False)
        sized = {"img_size": shape[1:]} if config is not None and config.fixed_input_size else {}
        unfit = f"{spec.model} does not take {shape[0]} x {shape[1]} x {shape[2]} pictures"
        try:
            self.backbone = timm.create_model(architecture, pretrained=False, num_classes=0, in_chans=shape[0], **sized)
            self.backbone.eval()
            with torch.no_grad():
                probe = torch.zeros(1, *shape, device=next(self.backbone.parameters()).device)
                out = self.backbone(probe)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError("net timm", f"{unfit} ({reason})", remedy="change image_size or the model") from error
        # A transformer would leave the pixels out that do not fill a patch, without a word.
        patch = getattr(getattr(self.backbone, "patch_embed", None), "patch_size", None)
        if sized and patch is not None and any(n % p for n, p in zip(shape[1:], patch, strict=True)):
            raise UserError(
                "net timm", unfit, f"sides that are multiples of {patch[0]}", "change image_size or the model"
            )
        if out.ndim != 2:
            raise UserError(
                "net timm", f"{spec.model} gives maps of shape {tuple(out.shape)}", "one vector per picture"
            )
        self.backbone.train()
        self.neck = nn.Sequential(
            nn.BatchNorm1d(out.shape[1]), nn.Linear(out.shape[1], spec.embedding), nn.BatchNorm1d(spec.embedding)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.neck(self.backbone(x))


def macs(net: nn.Module, shape: tuple[int, int, int]) -> int:
    """Multiply-accumulates of one picture of `shape` (C, H, W) through the convolutions and linear layers of `net`.

    Products outside such layers (the attention of a transformer) are not counted. One forward is run, so a network on
    the meta device costs nothing.
    """
    total = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        # A weight of an output value is met once: fan-in per output value.
        per_value = weight[0].numel()
        total += output.numel() * per_value

    handles = [
        module.register_forward_hook(count) for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    modes = [(module, module.training) for module in net.modules()]
    first = next(net.parameters())
    try:
        net.eval()
        with torch.no_grad():
            net(torch.zeros(1, *shape, device=first.device, dtype=first.dtype))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return total

"""Networks for semantic segmentation: BiSeNet, or any decoder of segmentation_models_pytorch.

Every network, with or without a point head, is wrapped in a `SceneNet`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError, few
from trainkit.interfaces import DatasetInfo
from trainkit.models import bisenet, multi_scale
from trainkit.models import pointrend as pointwise
from trainkit.models.patch_geometry import check_patch, require
from trainkit.models.pointrend import PointHead
from trainkit.models.segmentation_specs import (
    GIVEN,
    SMP,
    TIMM,
    AnySceneNet,
    BiSeNetV1Spec,
    BiSeNetV2Spec,
    Norm,
    PointSpec,
    SmpSpec,
    timm_name,
)
from trainkit.models.timm_classifier import load_encoder, misfits_refused, refuse_unknown


class SmpBody(nn.Module):
    """A network of segmentation_models_pytorch without its final upsampling: scores at the stride of its decoder.

    `fine` is the encoder's finest map at stride 4 or more, as PointRend uses for DeepLabV3. Parameters that no score
    depends on are frozen, because DDP would wait for their gradients; `idle` is their number.
    """

    encoder: nn.Module
    decoder: nn.Module
    segmentation_head: nn.Module

    def __init__(self, model: Any, shape: Sequence[int]):
        super().__init__()
        self.encoder, self.decoder, self.segmentation_head = model.encoder, model.decoder, model.segmentation_head[0]
        # An encoder with a stride below 2^depth is dilated; smaller multiples are not guaranteed to work.
        self.multiple = 2 ** getattr(model.encoder, "_depth", 5)
        # A small image of an unusual shape.
        m = self.multiple
        height, width = (max(m, min(side // m, most) * m) for side, most in zip(shape[1:], (4, 6), strict=True))
        self.eval()  # keep the statistics of batch norms
        with torch.enable_grad(), _normed(self) as sizes:
            maps = self.encoder(torch.zeros(1, shape[0], height, width, device=next(self.parameters()).device))
            scores = self.segmentation_head(self.decoder(maps))
            scores.sum().backward()
        self.least = 2 if 1 in sizes else 1
        self.fine_at = next(i for i, x in enumerate(maps) if i and x.shape[1] and height // x.shape[2] >= 4)
        self.fine_channels = maps[self.fine_at].shape[1]
        self.stride = height // scores.shape[2]
        unread = [p for p in self.parameters() if p.grad is None]
        self.idle = sum(p.requires_grad_(False).numel() for p in unread)
        self.zero_grad(set_to_none=True)
        self.train()

    def forward(self, image: Tensor) -> dict[str, Tensor | list[Tensor]]:
        """Images (B, channels, H, W) to `logits`, a list of one (B, classes, H/stride, W/stride), and `fine`."""
        maps = self.encoder(image)
        return {"logits": [self.segmentation_head(self.decoder(maps))], "fine": maps[self.fine_at]}


@contextlib.contextmanager
def _normed(net: nn.Module) -> Iterator[set[int]]:
    """Collect the number of values per channel that the batch norms of `net` receive."""
    sizes: set[int] = set()
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(lambda _, given: sizes.add(given[0][:, 0].numel())) for norm in norms]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()


Body = bisenet.BiSeNetV1 | bisenet.BiSeNetV2 | SmpBody
"""Networks under a `SceneNet`."""


class SceneNet(nn.Module):
    """A network for semantic segmentation, with or without a point head.

    `body` maps images to a dict of `logits`, a list of class scores with the main ones first, and `fine`, a finer map
    of features. Its attributes are `stride` of the main logits, `fine_channels`, `multiple` (divisor of the sides of an
    image), and `least` (smallest number of images that batch norm needs in training).
    """

    body: Body

    def __init__(self, body: Body, classes: int, points: PointSpec | None = None):
        super().__init__()
        self.body, self.points = body, points
        self.point_head = None if points is None else PointHead(points, body.fine_channels, classes)

    @property
    def multiple(self) -> int:
        """The sides of an image must be multiples of this number."""
        return self.body.multiple

    @property
    def least(self) -> int:
        """Smallest number of images that batch norm needs in training: 2 if a map has one value per image."""
        return self.body.least

    def forward(self, image: Tensor, distance: Tensor | None = None) -> dict[str, Tensor | list[Tensor]]:
        """Images (B, 3, H, W) to a dict of `logits`: a list of class scores (B, classes, h, w), the main ones first.

        In training those of auxiliary heads follow, each at its stride; a point head adds `points` (B, N, 2), (x, y) in
        [0, 1], and `point_logits` (B, classes, N); `distance` (B, H, W), pixels to the nearest boundary, is needed
        if points are drawn near boundaries. In evaluation there are only the main scores, refined to (B, classes, H, W)
        by a point head.
        """
        out = self.body(image)
        logits = list(out["logits"]) if self.training else out["logits"][:1]
        if self.point_head is None or self.points is None:
            return {"logits": logits}
        coarse = pointwise.pooled(logits[0], self.body.stride)
        if not self.training:
            size = (image.shape[2], image.shape[3])
            return {"logits": [pointwise.refine(self.point_head, coarse, out["fine"], size, self.points)]}
        if self.points.near and distance is None:
            raise UserError(
                "task.points.near",
                f"{self.points.near}, but the data gives no distances",
                remedy="add `distance: {}` under data",
            )
        chosen = pointwise.choose_points(coarse.detach(), self.points, distance)
        found = self.point_head(pointwise.sample(out["fine"], chosen), pointwise.sample(coarse, chosen))
        return {"logits": logits, "points": chosen, "point_logits": found}


def build(
    spec: AnySceneNet, points: PointSpec | None, norm: Norm, meta: DatasetInfo, found: Mapping[str, Path]
) -> tuple[SceneNet, list[str]]:
    """Build the network of `spec` for images of `meta.shape` (3, h, w); return also notes about it.

    `found` holds the file of its weights under `net`. Raises UserError if a package is missing, encoder and decoder do
    not fit together, the crop is not a multiple of the network's stride, or the weights are of another network.
    """
    if isinstance(spec, BiSeNetV2Spec):
        body, about = bisenet.BiSeNetV2(meta.classes, meta.shape[0], spec.width), f"width {spec.width:g}"
    else:
        body, about = _bisenetv1(spec, meta) if isinstance(spec, BiSeNetV1Spec) else _smp(spec, meta)
    check_patch(spec.name, meta.shape[1:], (body.multiple,) * 2, "data.crop", "pixels")
    notes = []
    if isinstance(body, SmpBody) and body.idle:
        notes.append(f"{body.idle:,} parameters of the encoder that the decoder does not use are frozen")
    tensors = safe_load.read_tensors(found["net"]) if "net" in found else {}
    if tensors and not isinstance(spec, BiSeNetV2Spec) and _is_of_encoder(spec, body, tensors):
        load_encoder(body, timm_name(spec.encoder), found["net"])
        notes.append(f"{spec.encoder} starts from {spec.weights or found['net'].name}, the rest from random weights")
        tensors = {}
    if norm.name != "batch":
        from trainkit.models import norms

        norms.convert(body, norm.name, norm.groups)
    net = SceneNet(body, meta.classes, points)
    if tensors:
        notes += _load(net, tensors, found["net"])
    count = sum(p.numel() for p in net.parameters())
    said = [f"{spec.name}: {about}, logits at stride {body.stride}, {count:,} parameters"]
    if points is not None and net.point_head is not None:
        refined = sum(p.numel() for p in net.point_head.parameters())
        near, unsure, anywhere = points.parts
        parts = f"{near} near boundaries, {unsure} uncertain, {anywhere} uniform"
        said.append(f"point head: {refined:,} of the parameters; {points.points} points per image: {parts}")
    return net, said + notes


def _is_of_encoder(spec: BiSeNetV1Spec | SmpSpec, body: Body, tensors: Mapping[str, Tensor]) -> bool:
    """Return True for tensors of the encoder's classifier in timm's names, False for a whole network."""
    if isinstance(spec, SmpSpec) and not spec.encoder.startswith(TIMM):
        return False
    renamed = bisenet.from_published(tensors)
    whole = {"body", "point_head", *(name for name, _ in body.named_children())}
    return whole.isdisjoint(name.partition(".")[0] for name in renamed)


def _load(net: SceneNet, tensors: dict[str, Tensor], file: Path) -> list[str]:
    """Load a whole network; from a file without a point head, such as the public BiSeNet's, all but that head."""
    if not any(name.startswith("body.") for name in tensors):
        tensors = {f"body.{name}": tensor for name, tensor in bisenet.from_published(tensors).items()}
    if isinstance(net.body, bisenet.BiSeNetV1):
        _check_fusion(net.body.fusion.kind, tensors, file)
    headless = net.point_head is not None and not any(name.startswith("point_head.") for name in tensors)
    safe_load.load_into(net, tensors, str(file), ignore=("point_head.*",) if headless else ())
    return [f"{file} has no point head: it starts from random weights"] if headless else []


def _check_fusion(kind: bisenet.FusionKind, tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise UserError, naming the key to set, for weights whose fusion module has another form than `kind`."""
    layers = {"squeeze": "body.fusion.squeeze.weight", "conv": "body.fusion.share.weight"}
    found = next((form for form, name in layers.items() if name in tensors), kind)
    if found != kind:
        raise UserError("task.net.fusion", kind, f"{found}, the form of the weights {file}", f"set `fusion: {found}`")


_FITTING = ("an encoder and a decoder that fit together", "use another encoder or decoder")


def _bisenetv1(spec: BiSeNetV1Spec, meta: DatasetInfo) -> tuple[Body, str]:
    refuse_unknown(spec.encoder, "task.net.encoder")
    with misfits_refused("task.net", f"{spec.encoder} as a context path", *_FITTING):
        body = bisenet.BiSeNetV1(
            meta.classes, meta.shape[0], width=spec.width, encoder=spec.encoder, fusion=spec.fusion
        )
    return body, f"{spec.encoder} as context path, width {spec.width:g}"


def _smp(spec: SmpSpec, meta: DatasetInfo) -> tuple[Body, str]:
    require(SMP, "segmentation")
    import segmentation_models_pytorch as smp

    if spec.encoder.startswith(TIMM):
        refuse_unknown(timm_name(spec.encoder), "task.net.encoder")
    elif spec.encoder not in smp.encoders.encoders:
        found = f"{SMP} has no encoder {spec.encoder!r}"
        raise UserError("task.net.encoder", found, remedy=f"put {TIMM} before the name of an encoder of timm")
    known = set(inspect.signature(smp.MODEL_ARCHITECTURES_MAPPING[spec.decoder].__init__).parameters)
    known -= GIVEN | {"kwargs"}
    unknown = [name for name in spec.args if name not in known]
    if unknown:
        found = f"{few(unknown)}, which {spec.decoder} does not have"
        raise UserError("task.net.args", found, few(sorted(known), len(known)), "correct the name, or leave it out")
    about = f"{spec.decoder} over {spec.encoder}"
    given = {"in_channels": meta.shape[0], "classes": meta.classes, **spec.args}
    with misfits_refused("task.net", about, *_FITTING):
        body = SmpBody(smp.create_model(spec.decoder, spec.encoder, encoder_weights=None, **given), meta.shape)
    return body, about


class Deployable(nn.Module):
    """Pixels to class scores: normalises, rounds the sides up, and resizes the scores back to the image."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, net: nn.Module, mean: Sequence[float], std: Sequence[float], multiple: int, align_corners: bool = False
    ):
        super().__init__()
        self.net, self.multiple, self.align_corners = net, multiple, align_corners
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """RGB (B, 3, H, W), 0 .. 255, to logits (B, classes, H, W), float32."""
        height, width = pixels.shape[2:]
        image = (pixels / 255 - self.mean) / self.std
        # Only non-negative numbers: an exported division of negative ones rounds towards 0.
        size = [(side + self.multiple - 1) // self.multiple * self.multiple for side in (height, width)]
        if size != [height, width]:
            image = F.interpolate(image, size, mode="bilinear", align_corners=self.align_corners)
        return multi_scale.resize_back(self.net(image)["logits"][0], size, (height, width), self.align_corners)

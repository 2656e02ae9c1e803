"""Each loss, model and measure of a prediction on small random input, for comparison between devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.report import require
from trainkit.interfaces import IGNORED, MODALITIES, DatasetInfo
from trainkit.losses import distillation, margin, retrieval, segmentation_3d
from trainkit.losses.segmentation_2d import Near, Ohem, PixelLoss
from trainkit.losses.segmentation_3d import SegmentationLoss
from trainkit.metrics import boundary_f_score
from trainkit.metrics import segmentation_2d as scenes
from trainkit.models import face_backbones, multi_scale, sliding_window, timm_classifier
from trainkit.models import reid as people
from trainkit.models import segmentation_2d as pixels
from trainkit.models import segmentation_3d as voxels
from trainkit.models.pointrend import PointSpec
from trainkit.models.text_encoder import TextEncoder, TextSpec
from trainkit.tasks.segment2d import point_loss


@dataclass
class Drawn:
    """Random input of the losses: B 24 samples of C 10 classes and D 32 dimensions, two images, two volumes."""

    x_BD: Tensor
    teacher_BD: Tensor
    centre_CD: Tensor
    label_B: Tensor
    picture: Tensor
    mask: Tensor
    distance: Tensor
    points: Tensor
    volume: Tensor
    labels: Tensor

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Drawn:
        """The same numbers, drawn in float64 on the CPU, on a device and rounded to a type."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def whole(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator)

        mask = whole(5, 2, 32, 48).to(torch.uint8)
        mask[:, :4] = IGNORED
        drawn = cls(
            x_BD=normal(24, 32), teacher_BD=normal(24, 32), centre_CD=normal(10, 32), label_B=whole(10, 24),
            picture=normal(2, 5, 8, 12), mask=mask, distance=normal(2, 32, 48).abs() * 5,
            points=torch.rand(2, 40, 2, generator=generator, dtype=torch.float64),
            volume=normal(2, 5, 8, 12, 12), labels=whole(5, 2, 8, 12, 12),
        )  # fmt: skip
        for name, value in vars(drawn).items():
            moved = value.to(device, dtype if value.is_floating_point() else value.dtype)
            setattr(drawn, name, moved.requires_grad_(name in ("x_BD", "centre_CD", "picture", "volume")))
        return drawn


def _margin(spec: Any) -> Callable[[Drawn], Tensor]:
    def loss(d: Drawn) -> Tensor:
        quality = torch.tanh(d.teacher_BD.sum(1)) if isinstance(spec, margin.AdaFace) else None
        return margin.margin_loss(margin.cosines(d.x_BD, d.centre_CD), d.label_B, spec, quality)[0]

    return loss


_ARCFACE = margin.ArcFace(name="arcface", m=0.5, scale=16.0)


def _one_pass(d: Drawn) -> Tensor:
    return margin.margin_loss(margin.margin_terms_of(d.x_BD, d.centre_CD, d.label_B, 16.0), d.label_B, _ARCFACE)[0]


def _centres(duplicates: Any) -> Callable[[Drawn], Tensor]:
    def loss(d: Drawn) -> Tensor:
        classes, width = d.centre_CD.shape
        memory = distillation.Centres(classes, width).to(d.x_BD)
        memory.weight.copy_(d.centre_CD.detach())
        memory.update(d.label_B, d.x_BD.detach(), d.teacher_BD, "hard", duplicates)
        return margin.margin_loss(memory.cosines(d.x_BD), d.label_B, _ARCFACE)[0] + memory.weight.square().sum()

    return loss


def _geometry(d: Drawn) -> Tensor:
    hardness = distillation.agreement(d.centre_CD[d.label_B], d.teacher_BD)
    return distillation.geometry(hardness, distillation.agreement(d.x_BD, d.teacher_BD)).sum()


def _pixels(**weights: Any) -> Callable[[Drawn], Tensor]:
    spec = PixelLoss(**weights)
    return lambda d: spec(d.picture, d.mask, d.distance, torch.linspace(1, 2, 5).to(d.picture))


def _voxels(**weights: Any) -> Callable[[Drawn], Tensor]:
    spec = SegmentationLoss(**weights)
    return lambda d: spec(d.volume, d.labels, torch.linspace(1, 2, 5).to(d.volume)).sum()


def _levels(d: Drawn) -> list[Tensor]:
    return [d.volume, nn.functional.avg_pool3d(d.volume, 2)]


def _across(d: Drawn) -> Tensor:
    return retrieval.matching(d.x_BD[:12], d.label_B[:12], d.x_BD[12:], d.label_B[12:])


LOSSES: dict[str, Callable[[Drawn], Tensor]] = {
    "arcface": _margin(_ARCFACE),
    "cosface": _margin(margin.CosFace(name="cosface", m=0.35, scale=16.0)),
    "adaface": _margin(margin.AdaFace(name="adaface", scale=16.0)),
    "softmax without margin": _margin(margin.NoMargin(name="none")),
    "binary cross-entropies": _margin(margin.NoMargin(name="none", loss="bce")),
    "arcface in one pass over classes": _one_pass,
    "feature mse": lambda d: distillation.feature_mse(d.x_BD, d.teacher_BD),
    "adadistill centres, last": _centres("last"),
    "adadistill centres, sequential": _centres("sequential"),
    "adadistill geometry": _geometry,
    "identity": lambda d: retrieval.identity(d.x_BD, d.label_B, 0.1).sum(),
    "triplet, soft": lambda d: retrieval.triplet(d.x_BD, d.label_B, "soft"),
    "triplet, margin": lambda d: retrieval.triplet(d.x_BD, d.label_B, 0.3),
    "contrast": lambda d: retrieval.contrast(d.x_BD, d.label_B),
    "matching (SDM)": _across,
    "pixels: cross-entropy near boundaries": _pixels(near=Near()),
    "pixels: hard ones (OHEM)": _pixels(ohem=Ohem()),
    "pixels: dice": _pixels(ce=0.0, dice=1.0),
    "pixels: lovasz": _pixels(ce=0.0, lovasz=1.0),
    "pixels: boundary": _pixels(ce=0.0, boundary=1.0),
    "pixels: points": lambda d: point_loss(d.picture.flatten(2)[:, :, :40], d.points, d.mask),
    "voxels: dice and cross-entropy": _voxels(),
    "voxels: dice of a whole batch": _voxels(ce=0.0, whole_batch=True),
    "voxels: deep supervision": lambda d: segmentation_3d.deep(SegmentationLoss(), _levels(d), d.labels).sum(),
    "voxels: subsets of outputs": lambda d: segmentation_3d.subsets(SegmentationLoss(), _levels(d), d.labels).sum(),
}
"""Each loss: a scalar."""


# ---- Models

FACE, EYE, SCENE = (3, 48, 48), (3, 32, 64), DatasetInfo(5, (3, 64, 96), "", tuple("abcde"))
VOLUME = DatasetInfo(3, (1, 16, 32, 32), "", spacing=(1.0, 1.0, 1.0))
PEOPLE = DatasetInfo(7, (3, 32, 16), "", modalities=MODALITIES, vocabulary=50, text_length=9)
Made = tuple[nn.Module, tuple[Any, ...]]
"""A model and what it takes; tensors are replaced by the same on the device."""


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _captions() -> Tensor:
    text = torch.randint(1, 49, (4, 9), generator=torch.Generator().manual_seed(1))
    text[:, -2:] = torch.tensor([49, 0])
    return text


def _face(spec: Any, shape: tuple[int, int, int] = FACE) -> Callable[[], Made]:
    return lambda: (face_backbones.build(spec, shape), (_normal(8, *shape),))


def _eye(name: Any, head: Any) -> Callable[[], Made]:
    return _face(face_backbones.EyeSpec(name=name, head=head, base_channels=8, embedding=16), EYE)


def _scene(spec: Any, points: bool = False) -> Callable[[], Made]:
    def made() -> Made:
        if spec.name == "smp":
            require("segmentation_models_pytorch")
        chosen = PointSpec(points=64, channels=16, subdivide=100) if points else None
        net = pixels.build(spec, chosen, pixels.Norm(), SCENE, {})[0]
        return net.train(not points), (_normal(4, *SCENE.shape),)

    return made


def _volume(spec: Any, package: str = "monai") -> Callable[[], Made]:
    def made() -> Made:
        require(package)
        return voxels.build(spec, VOLUME, {})[0], (_normal(4, *VOLUME.shape),)

    return made


def _reid(**settings: Any) -> Callable[[], Made]:
    def made() -> Made:
        spec = people.ReidSpec(embedding=16, text=TextSpec(layers=1, width=16, heads=2), **settings)
        images = {name: _normal(4, *PEOPLE.shape) for name in MODALITIES if name != "text"}
        queries = torch.arange(20).view(5, 4).T.contiguous()
        return people.build(spec, PEOPLE, {}), (images, _captions(), queries)

    return made


def _timm() -> Made:
    net = timm_classifier.build(timm_classifier.Network(model="test_convnext"), FACE, 5, {})[0]
    return net, (_normal(8, *FACE),)


NETWORKS: dict[str, Callable[[], Made]] = {
    "mobilefacenet": _face(face_backbones.MobileFaceNetSpec(name="mobilefacenet", embedding=32, width=0.25)),
    "iresnet18": _face(face_backbones.IResNetSpec(name="iresnet18", embedding=32, width=0.125)),
    "ir18": _face(face_backbones.IRSpec(name="ir18", embedding=32, width=0.125)),
    "timm embedding": _face(face_backbones.TimmSpec(name="timm", model="test_resnet", embedding=32)),
    **{
        f"{name}, {head}": _eye(name, head)
        for name, head in (
            ("eye_baseline", "avg"),
            ("eye_convnext", "avgmax_mlp"),
            ("eye_convnext", "transformer"),
            ("eye_baseline", "mlp_mixer"),
        )
    },
    "timm classifier": _timm,
    "reid, mean": _reid(model="test_resnet"),
    "reid, transformer": _reid(model="test_resnet", fusion=people.Fusion(name="transformer", heads=2)),
    "text encoder": lambda: (TextEncoder(TextSpec(layers=2, width=16, heads=2), 50, 9), (_captions(),)),
    "bisenetv1": _scene(pixels.BiSeNetV1Spec(name="bisenetv1", encoder="test_resnet", width=0.125)),
    "bisenetv2": _scene(pixels.BiSeNetV2Spec(name="bisenetv2", width=0.125)),
    "bisenetv2 with points, evaluated": _scene(pixels.BiSeNetV2Spec(name="bisenetv2", width=0.125), points=True),
    "smp fpn": _scene(pixels.SmpSpec(name="smp", encoder="tu-test_resnet", decoder="fpn")),
    "unet, 3-D": _volume(voxels.UNetSpec(name="unet", filters=[4, 8, 12])),
    "dynunet": _volume(voxels.DynUNetSpec(name="dynunet", filters=[4, 8, 12, 16])),
    "slices (2.5-D)": _volume(
        voxels.SlicesSpec(name="slices", encoder="tu-test_resnet", decoder="unet", filters=[16, 8, 8]),
        "segmentation_models_pytorch",
    ),
    "emcad": _volume(voxels.EmcadSpec(name="emcad", encoder="test_convnext"), "timm"),
}
"""A small one of each model."""
FLOAT32 = ("reid, mean", "reid, transformer")
"""Those that compute features in float32 whatever their input."""


# ---- What is computed of predictions on the device


def _found(drawn: Drawn) -> Tensor:
    """Classes as a model might find them: some right, some not."""
    return drawn.mask.roll(1, 2).long() % 5


MEASURES: dict[str, Callable[[Drawn], Any]] = {
    "numbers of pixels": lambda d: scenes.pixel_counts(_found(d), d.mask, 5),
    "numbers of boundary pixels": lambda d: boundary_f_score.boundary_counts(
        _found(d), d.mask, 5, boundary_f_score.tolerance(32, 48)
    ),
    "thumbnails of label maps": lambda d: scenes.thumbnail_maps(_found(d), d.mask),
    "probabilities of several scales, mirrored": lambda d: multi_scale.probabilities(
        lambda x: x, d.picture.detach(), scales=[0.75, 1.5], mirrors=[False, True], window=[0, 0], multiple=4,
        batch_size=4, align_corners=False,
    ),
    "sliding windows over a volume": lambda d: sliding_window.sliding_probabilities(
        lambda x: x, d.volume.detach()[:1], (8, 8, 8), batch_size=2
    ),
    "calibrated class scores": lambda d: margin.class_logits(margin.cosines(d.x_BD, d.centre_CD), _ARCFACE).softmax(1),
}  # fmt: skip
"""Each as a tree of tensors."""

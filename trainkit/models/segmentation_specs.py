"""Blocks of recipes that choose a network for segmentation: their keys alone, so that recipes are read without torch.

`segmentation_2d` and `segmentation_3d` build the networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainkit.checkpoint import timm_weights
from trainkit.config.ranges import Channels, Fraction, FractionBelowOne, NotNegative
from trainkit.models.network_specs import check_tag

SMP = "segmentation_models_pytorch"
TIMM = "tu-"
"""Prefix of segmentation_models_pytorch for encoders of timm."""

# ---- Images ----------------------------------------------------------------------------------------------------------

FusionKind = Literal["squeeze", "conv"]
"""Computation of the channel weights from the channel means: two 1x1 convolutions with a quarter of the channels
between them, as in the paper; or one 1x1 convolution and batch norm, as in today's public implementation."""

GIVEN = {"self", "encoder_name", "encoder_weights", "in_channels", "classes", "activation", "aux_params", "upsampling"}
"""Arguments of smp's decoders that a recipe cannot set: they are set where it is built, or not used."""


@dataclass(kw_only=True)
class BiSeNetV1Spec:
    """BiSeNet (Yu et al., ECCV 2018, arXiv 1808.00897): a spatial path beside the context path of an encoder."""

    name: Literal["bisenetv1"]
    """Selects BiSeNet V1."""
    width: Annotated[float, Field(gt=0, le=8)] = 1.0
    """Factor on the channels of everything but the encoder."""
    fusion: FusionKind = "squeeze"
    """Feature fusion module. `squeeze`: two 1x1 convolutions, as in the paper and in older weights of the public
    implementation. `conv`: one 1x1 convolution and batch norm, as in its current weights."""
    encoder: str = field(default="resnet18.tv_in1k", metadata={"timm": ""})
    """A network of timm with maps at strides 4, 16 and 32; the tag selects the `pretrained` weights. Published:
    ResNet-18 with torchvision's weights."""
    weights: str | None = None
    """Initial weights. For the encoder: `pretrained` (downloaded by `trainkit download`), `timm:NAME.TAG`, or a file of
    timm's classifier. For the whole network: a file, `run:NAME` or `models:/ID`. None: random."""

    def __post_init__(self) -> None:
        check_tag(self.encoder, self.weights, "resnet18.tv_in1k")


@dataclass(kw_only=True)
class BiSeNetV2Spec:
    """BiSeNet V2 (Yu et al., IJCV 2021, arXiv 2004.02147): a detail branch beside a deep, narrow one."""

    name: Literal["bisenetv2"]
    """Selects BiSeNet V2."""
    width: Annotated[float, Field(gt=0, le=8)] = 1.0
    """Factor on all channel counts."""
    weights: str | None = None
    """Initial weights of the whole network: a file, `run:NAME` or `models:/ID`; files of the public implementation are
    supported. None: random."""

    def __post_init__(self) -> None:
        if _of_timm(self.weights):
            raise ValueError(
                f"weights is {self.weights!r}, but bisenetv2 has no encoder of timm; use a file, run:NAME or models:/ID"
            )


@dataclass(kw_only=True)
class SmpSpec:
    """A network of segmentation_models_pytorch: an encoder, usually of timm, and a decoder."""

    name: Literal["smp"]
    """Selects a network of segmentation_models_pytorch."""
    encoder: str = field(metadata={"timm": TIMM})
    """`tu-` and the name of a network of timm, with the tag of its weights if `weights` is `pretrained`; or an encoder
    of segmentation_models_pytorch, such as `resnet18`."""
    decoder: Literal[
        "unet", "unetplusplus", "fpn", "linknet", "manet", "pspnet", "pan", "deeplabv3", "deeplabv3plus", "segformer",
        "upernet",
    ]  # fmt: skip
    """Decoder, by its name in segmentation_models_pytorch."""
    args: dict[str, int | float | str | bool | list[int] | None] = field(default_factory=dict)
    """Further arguments of the decoder, by the library's names: `decoder_channels`, `encoder_output_stride`, ..."""
    weights: str | None = None
    """Initial weights. For a `tu-` encoder: `pretrained` (downloaded by `trainkit download`), `timm:NAME.TAG`, or a
    file of timm's classifier. For the whole network: a file, `run:NAME` or `models:/ID`. None: random."""

    def __post_init__(self) -> None:
        if _of_timm(self.weights) and not self.encoder.startswith(TIMM):
            raise ValueError(
                f"encoder is {self.encoder!r}; pretrained weights need an encoder of timm, such as tu-resnet18.a1_in1k"
            )
        check_tag(self.encoder, self.weights, "tu-resnet18.a1_in1k")
        reserved = sorted(GIVEN & set(self.args))
        if reserved:
            raise ValueError(f"args has {', '.join(reserved)}, which trainkit sets or does not use; leave them out")


AnySceneNet = BiSeNetV1Spec | BiSeNetV2Spec | SmpSpec
SceneNetSpec = Annotated[AnySceneNet, Field(discriminator="name")]
"""The block of a recipe that selects a network for semantic segmentation."""


@dataclass(kw_only=True)
class Norm:
    """Replacement of the batch norms of a network."""

    name: Literal["batch", "sync", "group"] = "batch"
    """`batch`: batch norm over the micro-batch of a process. `sync`: batch norm over the micro-batches of all
    processes. `group`: group norm, each image alone (Wu and He, ECCV 2018, arXiv 1803.08494)."""
    groups: Channels = 32
    """Largest number of groups of group norm. The number used is the largest one up to this that divides the channels
    and leaves 4 or more channels per group."""


def _of_timm(weights: str | None) -> bool:
    return weights is not None and (weights == "pretrained" or weights.startswith(timm_weights.PREFIX))


@dataclass(kw_only=True)
class PointSpec:
    """Point head of PointRend (Kirillov et al., CVPR 2020, arXiv 1912.08193): refines a segmentation at uncertain
    points."""

    points: Annotated[int, Field(ge=1, le=1 << 20)] = 2048
    """Number of points per image in training."""
    oversample: Annotated[float, Field(ge=1, le=100)] = 3.0
    """Number of candidate points per point that is selected as uncertain."""
    importance: Fraction = 0.75
    """Share of the points, without those of `near`, that are the least certain candidates; the rest are drawn
    uniformly."""
    near: Fraction = 0.0
    """Share of the points that are drawn near class boundaries; needs `data.distance`."""
    sigma: Annotated[float, Field(gt=0, le=10000)] = 4.0
    """Range in pixels of the draw near boundaries: a pixel at distance d from the nearest boundary is drawn in
    proportion to exp(-d^2 / (2 sigma^2))."""
    steps: Annotated[int, Field(ge=0, le=8)] | None = None
    """Number of doublings of the map at inference, followed by bilinear resizing to the size of the image. None: until
    that size is reached. Published: 2 from stride 4, which reach it."""
    subdivide: Annotated[int, Field(ge=1, le=1 << 22)] = 8192
    """Number of points that are predicted again after each doubling."""
    channels: Annotated[int, Field(ge=1, le=4096)] = 256
    """Channels of the head's hidden layers."""
    layers: Annotated[int, Field(ge=1, le=64)] = 3
    """Number of hidden layers of the head."""
    weight: NotNegative = 1.0
    """Weight of the loss at the points; the loss of the coarse map has weight 1."""

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of points near boundaries, of uncertain points, and of uniform points."""
        near = round(self.near * self.points)
        unsure = int(self.importance * (self.points - near))
        return near, unsure, self.points - near - unsure


# ---- Volumes ---------------------------------------------------------------------------------------------------------

Form = Literal["paper", "code"]
"""The decoder as the paper describes it: a spatial attention at each level, and PyTorch's first weights. Or as the
published code trains it: one spatial attention for all levels, and all convolutions with first weights from a normal
distribution of deviation 0.02 and biases 0. Both have ReLU where maps are enlarged and gated, ReLU6 in blocks."""


@dataclass(kw_only=True)
class EmcadSpec:
    """EMCAD (CVPR 2024, arXiv 2405.06880): a decoder over a network of timm, applied to each slice of a volume."""

    name: Literal["emcad"]
    """Selects EMCAD."""
    encoder: str = field(default="pvt_v2_b2", metadata={"timm": ""})
    """Name of a network in `timm.list_models()` with maps at strides 4, 8, 16 and 32, with the tag of its weights if
    `weights` is `pretrained`."""
    drop_path: FractionBelowOne = 0.0
    """Stochastic depth of the encoder (Huang et al., ECCV 2016): largest share of slices that skip a block."""
    kernels: list[Annotated[int, Field(ge=1, le=31)]] = field(default_factory=lambda: [1, 3, 5])
    """Sides, all odd, of the parallel depth-wise convolutions."""
    expansion: Annotated[int, Field(ge=1, le=32)] = 2
    """Factor on the channels between the two 1x1 convolutions of a block."""
    form: Form = "paper"
    """`paper`: the decoder of the paper. `code`: that of the published code, with one spatial attention for all levels
    and initial weights with standard deviation 0.02."""
    neighbours: Annotated[int, Field(ge=0, le=2)] = 0
    """Number of slices on either side that are given as further channels. At the ends of a patch its last slice is
    repeated."""
    weights: str | None = None
    """Initial weights: `pretrained` (for the encoder, downloaded by `trainkit download`), or those of a whole network
    from a file, `run:NAME` or `models:/ID`. None: random."""
    supervision: ClassVar[str] = "subsets"

    def __post_init__(self) -> None:
        check_tag(self.encoder, self.weights, "pvt_v2_b2.in1k")
        if not self.kernels or any(k % 2 == 0 for k in self.kernels):
            raise ValueError(f"kernels is {self.kernels}; expected one or more odd numbers")


Filters = Annotated[int, Field(ge=1, le=4096)]
"""Channels of a level."""


@dataclass(kw_only=True)
class UNetSpec:
    """MONAI's 3-D U-Net (Kerfoot et al., STACOM 2018) with residual units, strided convolutions and instance norm."""

    name: Literal["unet"]
    """Selects MONAI's U-Net."""
    filters: list[Filters]
    """Channels of each level, finest first. Levels are dropped if the patch is too small for them."""
    res_units: Annotated[int, Field(ge=0, le=16)] = 2
    """Number of convolutions in a residual unit. 0: one plain convolution per level."""
    dropout: FractionBelowOne = 0.0
    """Share of the values that is set to zero after each convolution."""
    weights: str | None = None
    """Initial weights: a file, `run:NAME` or `models:/ID`. None: random."""
    supervision: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        _check(self.filters, 2, self.weights)


@dataclass(kw_only=True)
class DynUNetSpec:
    """nnU-Net's network (Isensee et al., arXiv 1809.10486), from MONAI: two convolutions per level."""

    name: Literal["dynunet"]
    """Selects nnU-Net's network."""
    filters: list[Filters]
    """Channels of each level, finest first. Levels are dropped if the patch is too small for them. nnU-Net uses 32, 64,
    128, 256, 320, 320."""
    deep_supervision: bool = True
    """Compute the loss at every level but the two coarsest, with weights 1, 1/2, 1/4 ... by nnU-Net's rule. The last
    level but one also has an output, with weight 0."""
    res_block: bool = False
    """Use residual blocks instead of plain ones."""
    dropout: FractionBelowOne = 0.0
    """Share of the values that is set to zero after each convolution."""
    weights: str | None = None
    """Initial weights: a file, `run:NAME` or `models:/ID`. None: random."""
    supervision: ClassVar[str] = "nnunet"

    def __post_init__(self) -> None:
        _check(self.filters, 3, self.weights)


AnyVolumeNet = UNetSpec | DynUNetSpec | EmcadSpec
VolumeNet = Annotated[AnyVolumeNet, Field(discriminator="name")]
"""The block of a recipe that selects a network for volumes."""
WindowWeight = Literal["gaussian", "constant"]
"""Weights of the voxels of a window of a sliding-window prediction."""


def _check(filters: Sequence[int], levels: int, word: str | None) -> None:
    if len(filters) < levels:
        raise ValueError(f"filters is {list(filters)}; expected {levels} levels or more")
    if word == "pretrained":
        raise ValueError("weights is 'pretrained', which only emcad has; use a file, run:NAME or models:/ID")


def timm_name(encoder: str) -> str:
    """Return the name in timm of an encoder: `tu-resnet18.a1_in1k` -> `resnet18.a1_in1k`."""
    return encoder.removeprefix(TIMM)


def source_of(spec: AnySceneNet | AnyVolumeNet) -> str | None:
    """Return the source of the initial weights, in the form of `required_weights` of a task; None: random."""
    if isinstance(spec, BiSeNetV1Spec | SmpSpec | EmcadSpec) and spec.weights == "pretrained":
        return f"{timm_weights.PREFIX}{timm_name(spec.encoder)}"
    return spec.weights

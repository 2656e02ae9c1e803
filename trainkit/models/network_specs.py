"""Blocks of recipes that choose a network for classes and embeddings: their keys alone, to be read without torch.

`timm_classifier`, `face_backbones` and `reid` build the networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from trainkit.config.ranges import Channels, FractionAboveZero, FractionBelowOne, Layers, Positive

Argument = bool | int | float | str | list[int] | list[float]

_RESERVED = {
    "num_classes", "in_chans", "features_only", "out_indices", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay",
    "checkpoint_path", "cache_dir", "scriptable", "exportable", "no_jit",
}  # fmt: skip
"""Arguments of timm that a recipe cannot set: they change the output, download, or unpickle a file."""


def check_tag(model: str, weights: str | None, example: str, key: str = "encoder") -> None:
    """Raise ValueError for `pretrained` weights if the name of the network has no tag."""
    if weights == "pretrained" and "." not in model:
        raise ValueError(f"{key} is {model!r}; pretrained weights need a tag, such as {example}")


def check_arguments(args: Mapping[str, Argument]) -> None:
    """Raise ValueError for arguments that a recipe may not set, such as a file that would be unpickled."""
    if taken := _RESERVED & args.keys():
        raise ValueError(f"args has {', '.join(sorted(taken))}, which other keys or the data decide; leave them out")


def _check_pretrained(spec: Network | TimmSpec) -> None:
    """Raise ValueError for arguments, weights and frozen parts that do not go together."""
    check_arguments(spec.args)
    check_tag(spec.model, spec.weights, "convnext_atto.d2_in1k", "model")
    needed = {"probe": "features would be random", "freeze_bn": "there are no statistics to keep"}
    for key, why in needed.items():
        if getattr(spec, key, False) and spec.weights is None:
            raise ValueError(f"{key} is true, but weights is not set, so {why}; set weights")


# ---- Classification --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Network:
    """A network of timm, its initial weights, and the parameters that are trained."""

    model: str = field(metadata={"timm": ""})
    """Name of the network in `timm.list_models()`, with the tag of its weights (`NAME.TAG`) if `weights` is
    `pretrained`."""
    args: dict[str, Argument] = field(default_factory=dict)
    """Further arguments of the network's constructor: `depths`, `dims`, `patch_size`, `ls_init_value`, ..."""
    drop_path: FractionBelowOne = 0.0
    """Stochastic depth (Huang et al., ECCV 2016): largest share of samples that skip a block."""
    dropout: FractionBelowOne = 0.0
    """Share of the features that is set to zero before the classifier."""
    weights: str | None = None
    """Initial weights: `pretrained` (timm's, downloaded by `trainkit download`), `timm:NAME.TAG`, a file, `run:NAME`, a
    folder written by `trainkit export`, or `models:/NAME@ALIAS`. None: random. A classifier for other classes is
    replaced."""
    tune: Literal["all", "head", "linear"] = "all"
    """Parameters that are trained. `all`: the whole network. `head`: the head with its norm, above a frozen backbone.
    `linear`: only the last layer."""
    probe: bool = field(default=False, metadata={"hash": "set"})
    """Start from a linear probe: before the first step the last layer is fitted by logistic regression to the features
    of the pretrained network for the training set, without augmentation. With `at_start: true` an evaluation shows its
    scores as those of step 0."""
    freeze_bn: bool = field(default=False, metadata={"hash": "set"})
    """Keep the running statistics of batch norms fixed; their weights and biases are still trained."""

    def __post_init__(self) -> None:
        _check_pretrained(self)
        if taken := {"drop_path_rate", "drop_rate"} & set(self.args):
            raise ValueError(f"args has {', '.join(sorted(taken))}; use drop_path and dropout instead")
        if self.tune != "all" and self.weights is None:
            raise ValueError(
                f"tune is {self.tune!r}, but weights is not set, so the rest would stay random; set weights"
            )


# ---- Embeddings ------------------------------------------------------------------------------------------------------

Backbone = Literal["eye_convnext", "eye_baseline"]
Head = Literal["avg", "transformer"]
MOST_CHANNELS = 4096
"""Of a map, which doubles them as the network gets deeper."""


@dataclass(kw_only=True)
class EyeSpec:
    """A small network for eye crops or other small images: 12 thousand to 2 million parameters."""

    name: Backbone
    """Backbone: ConvNeXt blocks (`eye_convnext`) or depthwise-separable convolutions (`eye_baseline`)."""
    base_channels: Annotated[int, Field(ge=1, le=1024)] = 32
    """Channels of the first two blocks. They double, and the map is halved, at the third block, the fifth, and so
    on."""
    num_blocks: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of blocks."""
    head: Head = "transformer"
    """Layers between the last map and the embedding: its mean (`avg`), or a `transformer` over a grid of tokens."""
    grid: tuple[Annotated[int, Field(ge=1, le=32)], Annotated[int, Field(ge=1, le=32)]] = (2, 4)
    """Rows and columns of tokens, for the head `transformer`."""
    embedding: Channels | None = None
    """Length of the embedding. None: the channels of the last map. Any other length adds a linear layer."""
    drop_path: FractionBelowOne = 0.0
    """Stochastic depth (Huang et al., ECCV 2016): share of samples that skip the last block; earlier blocks have
    smaller shares."""
    dropout: FractionBelowOne = 0.0
    """Share of the head's input that is set to zero in training."""
    layer_scale: FractionAboveZero = 1e-6
    """Initial factor on each block of `eye_convnext`. The default is the published one; a training of a few minutes
    needs a larger one."""

    def __post_init__(self) -> None:
        last = channels_of(self.base_channels, self.num_blocks)[-1]
        if last > MOST_CHANNELS:
            raise ValueError(
                f"base_channels {self.base_channels} with num_blocks {self.num_blocks} gives {last} channels in the "
                f"last block; expected at most {MOST_CHANNELS}"
            )
        if self.embedding is None:
            # Tasks size their heads by it, and the resolved recipe shows it.
            self.embedding = last


def channels_of(base_channels: int, num_blocks: int) -> list[int]:
    """Channels of each block: doubled at every even block after the first, where the map is halved."""
    return [base_channels * 2 ** (i // 2) for i in range(num_blocks)]


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
    freeze_bn: bool = field(default=False, metadata={"hash": "set"})
    """Keep the running statistics of the pretrained batch norms below the neck fixed."""

    def __post_init__(self) -> None:
        _check_pretrained(self)


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
    """Raise ValueError if a network has initial weights, in a task that does not support it."""
    if isinstance(spec, TimmSpec) and spec.weights is not None:
        raise ValueError(f"{key}.weights is set, which only task embed supports; leave it out")


# ---- Re-identification -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Lora:
    """Low-rank corrections (LoRA) of the linear layers of a transformer, one per modality (ICLR 2022, arXiv
    2106.09685)."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 4
    """Rank of the correction."""
    alpha: Positive = 4.0
    """The correction is multiplied by alpha / rank."""
    layers: Layers | None = None
    """Number of blocks, counted from the last one, that get corrections. None: all blocks."""


@dataclass(kw_only=True)
class TextSpec:
    """A transformer for captions. CLIP's has 12 layers, width 512, 8 heads, pool end, causal, activation quick_gelu."""

    layers: Layers = 4
    """Number of transformer blocks."""
    width: Channels = 256
    """Length of a token's vector; a multiple of `heads`."""
    heads: Layers = 4
    """Number of attention heads per block."""
    pool: Literal["mean", "end"] = "mean"
    """Vector of a caption: the mean of its tokens (`mean`), or its last token (`end`, as in CLIP)."""
    causal: bool = False
    """Let a token attend only to itself and earlier tokens, as in CLIP."""
    activation: Literal["gelu", "quick_gelu"] = "gelu"
    """`gelu`, or `quick_gelu`: x sigmoid(1.702 x), with which OpenAI's CLIP was trained."""
    weights: str | None = None
    """Initial weights: a file with CLIP's text tower (names of OpenAI or OpenCLIP), `run:NAME` or `models:/ID`. None:
    random."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}; expected a multiple of heads ({self.heads})")


@dataclass(kw_only=True)
class Fusion:
    """Combines the features of a query's records into one vector."""

    name: Literal["mean", "transformer"] = "mean"
    """`mean`: the mean of the records' features. `transformer`: the mean plus a trained correction, which is 0 at the
    start."""
    layers: Layers = 2
    """Number of transformer blocks."""
    heads: Layers = 4
    """Number of attention heads per block; it must divide the length of the embedding."""


@dataclass(kw_only=True)
class ReidSpec:
    """A network for records of people: a backbone of timm for images and, if the data has captions, a text encoder."""

    model: str = field(metadata={"timm": ""})
    """Name of the network in `timm.list_models()`, with the tag of its weights (`NAME.TAG`) if `weights` is
    `pretrained`."""
    args: dict[str, Argument] = field(default_factory=dict)
    """Further arguments of the network's constructor: `depth`, `patch_size`, `output_stride`, ..."""
    weights: str | None = None
    """Initial weights: `pretrained` (timm's, downloaded by `trainkit download`), a file of the backbone or of a CLIP,
    or a file, `run:NAME` or `models:/ID` of a re-identification network. None: random."""
    embedding: Channels | None = 512
    """Length of a feature, the same for all modalities. None: the length that the backbone outputs, without a
    projection."""
    stems: Literal["own", "shared"] = "own"
    """`own`: images of each modality have their own first convolution and norm, with equal initial weights. `shared`:
    one for all modalities."""
    lora: Lora | None = None
    """Low-rank corrections of the backbone's linear layers, one per modality. None: no corrections."""
    tune: Literal["all", "lora"] = "all"
    """Trained part of the backbone. `all`: every parameter. `lora`: only the corrections and the first layers."""
    drop_path: FractionBelowOne = 0.0
    """Stochastic depth of the backbone (Huang et al., ECCV 2016): largest share of samples that skip a block."""
    text: TextSpec = field(default_factory=TextSpec)
    """Encoder of captions; used if the data has captions."""
    fusion: Fusion = field(default_factory=Fusion)
    """Combines the features of a query's records into one vector."""
    neck: Literal["bn", "none"] = "bn"
    """Layer between a feature and the vector that is compared and classified: `bn`, a batch norm without trained bias,
    or `none`."""

    def __post_init__(self) -> None:
        check_arguments(self.args)
        if "drop_path_rate" in self.args:
            raise ValueError("args has drop_path_rate; use drop_path instead")
        check_tag(self.model, self.weights, "resnet50.a1_in1k", "model")
        if self.tune == "lora" and (self.lora is None or self.weights is None):
            raise ValueError("tune is 'lora', but lora or weights is not set; set both")


def required_weights(spec: ReidSpec) -> dict[str, str]:
    """Sources of the initial weights by name, in the form of `required_weights` of a task."""
    net = {"net": f"timm:{spec.model}" if spec.weights == "pretrained" else spec.weights}
    return {name: word for name, word in (net | {"text": spec.text.weights}).items() if word is not None}

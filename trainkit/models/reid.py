"""The network of multi-modal person re-identification: images of four kinds and captions in one space.

One backbone of timm processes the images of all modalities, each with its own first layer and, in a transformer, its
own low-rank corrections; a second transformer encodes captions. A query of several records is fused to one vector. The
output of a batch norm before the classifier (Luo et al., "Bag of Tricks", CVPRW 2019, arXiv 1903.07071) is compared.
After ReID5o (Zuo et al., NeurIPS 2025, arXiv 2506.09385).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_settings
from torch.nn import functional as F

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError
from trainkit.interfaces import MODALITIES, RGB, DatasetInfo
from trainkit.models import lora
from trainkit.models import text_encoder as captions
from trainkit.models.compilation import by_mode
from trainkit.models.lora import BatchModalities
from trainkit.models.network_specs import Fusion, ReidSpec
from trainkit.models.text_encoder import TextEncoder
from trainkit.models.timm_classifier import misfits_refused, timm_network

WHERE = "task.net"
InParts = Callable[[Callable[[slice], Tensor], int], Tensor]
"""Computes features of rows a few at a time: `StepContext.in_parts`."""


class Handed(nn.Module):
    """Replaces the first layer of a backbone: returns the output of the first layers of all modalities."""

    def __init__(self, rows: BatchModalities):
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Ignore the input and return the maps in `rows.first`."""
        if self.rows.first is None:
            raise RuntimeError("the backbone was called before the first layers")
        return self.rows.first


class _NoRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return like.new_empty(like.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(p) for p in ctx.saved_tensors)


def empty_rows(params: Iterable[Tensor], like: Tensor) -> Tensor:
    """Zero rows in the shape of `like` that give parameters a gradient of zero.

    Without any gradient, the all-reduce over processes would wait forever. The layers are not called: a batch norm over
    zero rows computes NaN.
    """
    trained = [p for p in params if p.requires_grad] if torch.is_grad_enabled() else []
    return _NoRows.apply(like[:0].detach(), *trained) if trained else like[:0]


class MeanFusion(nn.Module):
    """The mean of the features that are present."""

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """Features (N, 5, D), of which some are `present` (N, 5), to (N, D); zeros where none is."""
        there = present[:, :, None]
        # Absent features may hold anything, even NaN.
        total = torch.where(there, features, 0).sum(1)
        return total / present.sum(1, keepdim=True).clamp(min=1).to(features.dtype)


class TransformerFusion(nn.Module):
    """The mean of the features that are present plus a correction by a transformer, which is 0 at the start.

    A single record is its own fusion, so gallery images and queries of one record need no pass.
    """

    def __init__(self, dim: int, fusion: Fusion):
        super().__init__()
        self.mean = MeanFusion()
        self.before = nn.LayerNorm(dim)
        self.kinds = nn.Parameter(torch.empty(len(MODALITIES), dim))
        self.blocks = nn.ModuleList(captions.transformer_block(dim, fusion.heads) for _ in range(fusion.layers))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, dim)
        nn.init.normal_(self.kinds, std=0.02)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """Features (N, 5, D), of which some are `present` (N, 5), to (N, D); zeros where none is."""
        mean = self.mean(features, present)
        if not len(features):
            return empty_rows(self.parameters(), mean)
        several = present.sum(1, keepdim=True) > 1
        x = self.before(torch.where(present[:, :, None], features, 0)) + self.kinds
        # Softmax over nothing is NaN: a row without records attends to all of them, and is left out below.
        seen = present | ~present.any(1, keepdim=True)
        for block in self.blocks:
            x = block(x, seen[:, None, None])
        added = self.out(self.norm(self.mean(x, present)))
        return mean + added * several.to(added.dtype)

    def no_weight_decay(self) -> set[str]:
        """Names of the modality embeddings."""
        return {"kinds"}


class ReidNet(nn.Module):
    """Records of people to features, in one space for all modalities.

    Rows of a batch are images in the order of `MODALITIES`, then captions. Their numbers are known from shapes, so the
    host never waits for the device; a modality may have no row.
    """

    backbone: Any
    """The network of timm, whose methods no type of torch has."""

    def __init__(self, spec: ReidSpec, meta: DatasetInfo, backbone: nn.Module):
        super().__init__()
        known = meta.modalities or (MODALITIES[RGB],)
        self.pictures = tuple(name for name in known if name != "text")
        self.tune, self.rows = spec.tune, BatchModalities()
        self.about: list[str] = []
        """Sentences about what was built."""
        self.backbone = backbone
        self.stems: nn.ModuleDict | None = None
        """First layers of each modality, if `stems` is `own`; `build` takes them out of the backbone."""
        wide = _features(backbone, meta.shape)
        self.dim = spec.embedding or wide
        self.project = nn.Identity() if spec.embedding is None else nn.Linear(wide, self.dim, bias=False)
        self.text = self.project_text = None
        if "text" in known:
            self.text = TextEncoder(spec.text, meta.vocabulary, meta.text_length)
            self.project_text = nn.Linear(spec.text.width, self.dim, bias=False)
        # With RGB and one other modality, no query has two records.
        several = len(known) > 2 and spec.fusion.name == "transformer"
        if several and self.dim % spec.fusion.heads:
            raise UserError(
                f"{WHERE}.fusion.heads", f"{spec.fusion.heads}", f"a divisor of the length of a feature, {self.dim}"
            )
        self.fusion = TransformerFusion(self.dim, spec.fusion) if several else MeanFusion()
        self.bn = nn.Identity()
        if spec.neck == "bn":
            self.bn = nn.BatchNorm1d(self.dim)
            # A shift would be the same for all people and would change the cosines.
            self.bn.bias.requires_grad_(False)
        self.classifier = nn.Linear(self.dim, meta.classes, bias=False)
        nn.init.normal_(self.classifier.weight, std=0.001)

    def forward(
        self,
        images: Mapping[str, Tensor],
        text: Tensor | None,
        queries: Tensor | None = None,
        in_parts: InParts | None = None,
    ) -> dict[str, Tensor]:
        """Features of a batch, and of the queries that are made of its rows.

        `images` are float images (b, 3, H, W) by name of modality, of all that the data has; `text` token ids (b, L).
        Returns `feature` (B, D), `neck` (B, D) and `logits` (B, classes), and with `queries` (Q, 5), rows of the batch
        or -1, also `fused`, `fused_neck` and `fused_logits`. All of them go through the batch norm at once. `in_parts`
        is that of `StepContext`: features are then made of some rows at a time.
        """
        if in_parts is not None:
            images = {name: images[name] for name in self.pictures}
            count = sum(map(len, images.values())) + (0 if text is None else len(text))
            return self._heads(in_parts(lambda rows: self.encode(*_taken(images, text, rows)), count), queries)
        try:
            return self._after(self._first(images), text, queries)
        finally:
            self.rows.clear()

    def compile(self, **options: Any) -> None:
        """Compile in place everything but the first layers.

        The number of images per modality changes with every batch; compiled first layers would be recompiled for each
        modality that has none or one.
        """
        self._after = _SizesLeftOpen(self, by_mode(self, self._after, dynamic=None, **options))

    def encode(self, images: Mapping[str, Tensor], text: Tensor | None) -> Tensor:
        """Features (B, D) of images, then captions, float32, before the neck."""
        try:
            return self._features(self._first(images), text)
        finally:  # also if memory runs out: the maps of the first layers would be kept
            self.rows.clear()

    def _first(self, images: Mapping[str, Tensor]) -> Tensor | None:
        """Images of all modalities (N, 3, H, W), None without one; `rows` is set for the layers that need it."""
        missing = [name for name in self.pictures if name not in images]
        if missing:
            raise KeyError(f"the batch has no entry for images of {', '.join(missing)}; expected one, even if empty")
        parts = {name: images[name] for name in self.pictures}
        sizes = [len(x) for x in parts.values()]
        if not sum(sizes):
            return None
        self.rows.set(sizes, parts[self.pictures[0]].device)
        if self.stems is None:
            return torch.cat(list(parts.values())) if len(parts) > 1 else parts[self.pictures[0]]
        made = {name: self.stems[name](x) for name, x in parts.items() if len(x)}
        like = next(iter(made.values()))
        idle = {name: empty_rows(self.stems[name].parameters(), like) for name in parts if name not in made}
        self.rows.first = torch.cat([(made | idle)[name] for name in parts])
        # The backbone only uses the shape of its input.
        return like.new_zeros(()).expand(sum(sizes), *parts[self.pictures[0]].shape[1:])

    def _after(self, pictures: Tensor | None, text: Tensor | None, queries: Tensor | None) -> dict[str, Tensor]:
        return self._heads(self._features(pictures, text), queries)

    def _heads(self, feature: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        if queries is None:
            neck = self.neck(feature)
            return {"feature": feature, "neck": neck, "logits": self.classifier(neck)}
        fused = self.fuse(feature[queries.clamp(min=0)], queries >= 0)
        neck = self.neck(torch.cat([feature, fused]))
        logits = self.classifier(neck)
        count = len(feature)
        return {
            "feature": feature,
            "neck": neck[:count],
            "logits": logits[:count],
            "fused": fused,
            "fused_neck": neck[count:],
            "fused_logits": logits[count:],
        }

    def _features(self, pictures: Tensor | None, text: Tensor | None) -> Tensor:
        none = self.classifier.weight.new_zeros(0, self.dim)
        if pictures is None:
            found = [empty_rows([*self._shared(), *self.project.parameters()], none)]
        else:
            maps = self.backbone.forward_features(pictures)
            found = [self.project(self.backbone.forward_head(maps, pre_logits=True)).float()]
        if self.text is not None and self.project_text is not None:
            some = text is not None and len(text)
            params = [*self.text.parameters(), *self.project_text.parameters()]
            found.append(self.project_text(self.text(text)).float() if some else empty_rows(params, none))
        return torch.cat(found)

    def _shared(self) -> list[nn.Parameter]:
        return [*self.backbone.parameters(), *([] if self.stems is None else self.stems.parameters())]

    def fuse(self, features: Tensor, present: Tensor) -> Tensor:
        """Features (N, 5, D), a place for each modality, of which some are `present` (N, 5), to one each, (N, D)."""
        return self.fusion(features, present).float()

    def neck(self, x: Tensor) -> Tensor:
        """Features (N, D) to the vectors that are compared by cosine and classified, (N, D)."""
        return self.bn(x)

    def train(self, mode: bool = True) -> ReidNet:
        """Set the mode; a frozen backbone keeps its statistics."""
        super().train(mode)
        for module in self.backbone.modules() if self.tune == "lora" else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not any(
                p.requires_grad for p in module.parameters()
            ):
                module.eval()
        return self


class _SizesLeftOpen:
    """Calls the compiled part behind the first layers: sizes are static until one changes, then all become dynamic.

    By default torch makes only the size dynamic that has changed, and compiles again for each of the others.
    """

    def __init__(self, net: ReidNet, call: Callable[..., dict[str, Tensor]]):
        self.rows, self.call, self.format = net.rows, call, torch.contiguous_format
        for weight in () if net.stems is None else net.stems.parameters():
            if weight.ndim == 4 and not weight.is_contiguous():
                self.format = torch.channels_last
        self.first: list[int] = []
        self.open = False

    def __call__(self, pictures: Tensor | None, text: Tensor | None, queries: Tensor | None) -> dict[str, Tensor]:
        if self.rows.first is not None:  # an empty modality would change the memory format of all rows
            self.rows.first = self.rows.first.contiguous(memory_format=self.format)
        every = (pictures, text, queries, self.rows.first, *self.rows.own.values())
        tensors = [t for t in every if t is not None]
        sizes = [len(t) for t in tensors]
        self.first = self.first or sizes
        self.open = self.open or sizes != self.first
        if not self.open:
            return self.call(pictures, text, queries)
        for t in tensors:
            torch._dynamo.maybe_mark_dynamic(t, 0)
        # Sizes that happen to be equal stay separate.
        with shape_settings.patch(use_duck_shape=False):  # pyright: ignore[reportAttributeAccessIssue] - torch types no settings
            return self.call(pictures, text, queries)


def _taken(images: Mapping[str, Tensor], text: Tensor | None, rows: slice) -> tuple[dict[str, Tensor], Tensor | None]:
    """Images and captions of some rows of a batch: those of images by modality, then those of captions."""
    found, first = {}, 0
    for name, x in {**images, "text": text}.items():
        if x is not None:
            found[name] = x[max(0, rows.start - first) : max(0, rows.stop - first)]
            first += len(x)
    return found, found.pop("text", None)


@torch.no_grad()
def _pooled(backbone: Any, picture: Tensor) -> Tensor:
    """Return what the backbone's own pooling gives for images, in evaluation."""
    was = backbone.training
    backbone.eval()
    pooled = backbone.forward_head(backbone.forward_features(picture), pre_logits=True)
    backbone.train(was)
    return pooled


def _features(backbone: Any, shape: Sequence[int]) -> int:
    """Length of what the backbone's own pooling gives."""
    pooled = _pooled(backbone, torch.zeros(1, *shape, device=next(backbone.parameters()).device))
    if pooled.ndim != 2:
        found = f"the network outputs maps of shape {tuple(pooled.shape)}"
        raise UserError(f"{WHERE}.model", found, "one vector per image", "use another model, or set args.global_pool")
    return pooled.shape[1]


def build(spec: ReidSpec, meta: DatasetInfo, found: Mapping[str, Path]) -> ReidNet:
    """Build the network of `spec` for records of `meta`: its image shape, modalities, captions and identities.

    `found` holds the files of its weights, under `net` and `text`. Raises UserError if timm has no such network, it
    does not take such images, it has no layer for LoRA, or weights do not fit.
    """
    drop = {"drop_path_rate": spec.drop_path}
    net = ReidNet(spec, meta, timm_network(spec.model, meta.shape, {**spec.args, **drop}, 0, WHERE))
    tensors = safe_load.read_tensors(found["net"]) if "net" in found else {}
    whole = any(name.startswith("backbone.") for name in tensors)
    if tensors and not whole:
        _fill_backbone(net, spec.model, tensors, str(found["net"]))
    if "text" in found and net.text is not None and net.project_text is not None:
        file = str(found["text"])
        projection = captions.load(net.text, spec.text, safe_load.read_tensors(found["text"]), file)
        if projection is not None:
            _fill_projection(net, net.project_text, projection, file)
    _first_layers(net, spec, meta.shape)
    if spec.lora is not None:
        names = lora.add(net.backbone, spec.lora, len(net.pictures), net.rows, f"{WHERE}.lora")
        low = sum(p.numel() for name, p in net.backbone.named_parameters() if ".lora_" in name)
        net.about.append(f"LoRA of rank {spec.lora.rank} in {len(names)} linear layers: {low:,} parameters")
    if whole:
        _fill_whole(net, tensors, str(found["net"]))
    count = sum(p.numel() for p in net.parameters())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    net.about.insert(0, f"{spec.model} with heads and encoders: {count:,} parameters")
    if trained < count:
        net.about.append(f"{trained:,} parameters are trained")
    return net.train()


def _first_layers(net: ReidNet, spec: ReidSpec, shape: Sequence[int]) -> None:
    """Give each modality its own first layers; they are trained even if the backbone is frozen.

    These are the first convolution, and the norm if one follows. Raises UserError if timm does not name it, or images
    are changed before it.
    """
    own = spec.stems == "own" and len(net.pictures) > 1
    if spec.tune == "lora":
        net.backbone.requires_grad_(False)
    elif not own:
        return
    names = _first_names(net.backbone, spec.model, shape)
    layers = [net.backbone.get_submodule(name).requires_grad_(True) for name in names]
    if not own:
        return
    net.stems = nn.ModuleDict({name: copy.deepcopy(nn.Sequential(*layers)) for name in net.pictures})
    for name, instead in zip(names, (Handed(net.rows), nn.Identity()), strict=False):
        parent, _, last = name.rpartition(".")
        setattr(net.backbone.get_submodule(parent), last, instead)
    net.about.append(f"{', '.join(net.pictures)} each have their own {' and '.join(names)}")


def _first_names(backbone: Any, model: str, shape: Sequence[int]) -> list[str]:
    """Names of the first convolution and of the norm after it, found by one forward pass."""
    import timm

    config = timm.get_pretrained_cfg(model.partition(".")[0], allow_unregistered=False)
    first = getattr(config, "first_conv", None)
    leaves = {name: module for name, module in backbone.named_modules() if not list(module.children())}
    names = list(leaves)[list(leaves).index(first) :][:2] if first in leaves else []
    passed: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def seen(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
            passed.setdefault(name, (given[0], made))

        return seen

    picture = torch.zeros(1, *shape, device=next(backbone.parameters()).device)
    with contextlib.ExitStack() as hooks:
        for name in names:
            hooks.enter_context(leaves[name].register_forward_hook(keep(name)))
        _pooled(backbone, picture)
    if first not in passed or passed[first][0] is not picture:
        found = f"{model} has no first convolution that timm names and that takes the images directly"
        raise UserError(f"{WHERE}.stems", found, remedy="use another model, or `stems: shared`")
    then = [n for n in names[1:] if "Norm" in type(leaves[n]).__name__ and n in passed]
    return [first, *(n for n in then if passed[n][0] is passed[first][1])]


def _fill_backbone(net: ReidNet, model: str, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load weights of the backbone, or of a CLIP's image tower, with its projection if that fits."""
    import timm
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

    if isinstance(net.backbone, VisionTransformer):
        with misfits_refused(where, f"does not fit {model}", remedy="use the weights of this model"):
            # Names of OpenAI and OpenCLIP; position embeddings and patches of another size are interpolated.
            tensors = checkpoint_filter_fn(dict(tensors), net.backbone)
    config = timm.get_pretrained_cfg(model.partition(".")[0], allow_unregistered=False)
    heads = config.classifier if config is not None else None
    heads = heads if isinstance(heads, tuple) else (heads,)
    heads = tuple(f"{head}." for head in heads if head)
    safe_load.load_into(net.backbone, {name: t for name, t in tensors.items() if not name.startswith(heads)}, where)
    projection = tensors.get("head.weight")
    if "clip" in model and projection is not None and isinstance(net.project, nn.Linear):
        _fill_projection(net, net.project, projection, where)


def _fill_projection(net: ReidNet, into: nn.Linear, projection: Tensor, where: str) -> None:
    if projection.shape == into.weight.shape:
        safe_load.load_into(into, {"weight": projection}, where)
    else:
        net.about.append(f"projection to {len(projection)} in {where} not used: embedding is {net.dim}")


def _fill_whole(net: ReidNet, tensors: dict[str, Tensor], where: str) -> None:
    """Load weights of a whole re-identification network; a classifier for other identities is not loaded."""
    name = "classifier.weight"
    own = net.state_dict()[name]
    if name in tensors and tensors[name].shape[:1] != own.shape[:1]:
        net.about.append(f"classifier of {len(tensors[name])} identities in {where} not used")
        tensors = {**tensors, name: own.clone()}
    safe_load.load_into(net, tensors, where)


class Pixels(nn.Module):
    """Small copies of images of any modality as features: a baseline.

    Each is averaged over a grid of 16 x 8 areas and compared by correlation. Captions become zeros.
    """

    GRID = (16, 8)

    def encode(self, images: Mapping[str, Tensor], text: Tensor | None) -> Tensor:
        """Images (b, C, H, W) of each modality and captions (b, L) to features (B, C x 128) of length 1 or 0."""
        pictures = torch.cat([F.adaptive_avg_pool2d(x.float(), self.GRID).flatten(1) for x in images.values()])
        features = F.normalize(pictures - pictures.mean(1, keepdim=True))
        return features if text is None else torch.cat([features, features.new_zeros(len(text), features.shape[1])])

    def fuse(self, features: Tensor, present: Tensor) -> Tensor:
        """Features (N, 5, D), of which some are `present` (N, 5), to the sum of these, (N, D)."""
        return torch.where(present[:, :, None], features, 0).sum(1)

    def neck(self, x: Tensor) -> Tensor:
        """Features as they are."""
        return x

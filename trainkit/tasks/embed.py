"""Embeddings trained from class labels: face teachers, eye states, characters.

A margin softmax, ArcFace (Deng et al., CVPR 2019, arXiv 1801.07698), CosFace (Wang et al., CVPR 2018), AdaFace (Kim et
al., CVPR 2022), or a plain classifier over the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.config.ranges import Positive
from trainkit.evaluation_protocols import Classes
from trainkit.interfaces import (
    Baseline,
    Batch,
    DatasetInfo,
    Loss,
    Networks,
    Rows,
    Source,
    Split,
    StepContext,
)
from trainkit.losses.class_weights import class_weights
from trainkit.losses.margin_specs import AdaFace, ArcFace, Head, MarginOrNone, NoMargin
from trainkit.metrics import baselines
from trainkit.models.network_specs import Net, embedding_of, weights_of
from trainkit.tasks.protocol_scores import ScoredByProtocol
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainkit.losses.online_softmax import MarginTerms


@dataclass(kw_only=True)
class Embed(ScoredByProtocol):
    """Train embeddings from class labels, so that images of one class lie close together."""

    net: Net
    """The network that computes the embedding."""
    margin: MarginOrNone = field(default_factory=lambda: ArcFace(name="arcface", m=0.5, scale=64.0))
    """Margin softmax over the classes, or a plain classifier (`name: none`). Default: ArcFace with m 0.5 and scale
    64."""
    head: Head = field(default_factory=Head, metadata={"hash": "set"})
    """How several processes hold the class centres. Default: whole on each."""
    class_weights: dict[str, Positive] = field(default_factory=dict)
    """Weight of a class in the loss, by class name. Classes that are not named have weight 1."""
    mirror: bool = True
    """Evaluate with the sum of the embeddings of an image and its mirror image, as is customary in face
    verification."""
    classify: bool = False
    """Also predict class scores. Needed to evaluate classification on the classes that were trained."""

    def __post_init__(self) -> None:
        if self.head.sharded and (isinstance(self.margin, NoMargin) or self.classify):
            found = "`margin: {name: none}`" if isinstance(self.margin, NoMargin) else "`classify: true`"
            raise ValueError(f"head.sharded with {found}, which needs the scores of all classes; leave one out")

    def required_weights(self) -> dict[str, Source]:
        """Initial weights, if the recipe names any."""
        word = weights_of(self.net)
        return {} if word is None else {"net": Source(weights=word)}

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """Build the network and its class centres, and raw pixels as a baseline."""
        from trainkit.losses.margin import NormStatistics, class_head
        from trainkit.models import face_backbones

        self._weights = class_weights(self.class_weights, meta.class_names)
        head = class_head(self.margin, meta.classes, embedding_of(self.net), self.head)
        net = face_backbones.WithHead(face_backbones.build(self.net, meta.shape, found.get("net")), head)
        # Pixels are an embedding, not a classifier.
        references: dict[str, nn.Module] = {} if self.classify else {"pixels": face_backbones.Pixels()}
        memory = NormStatistics() if isinstance(self.margin, AdaFace) else None
        return Networks(net, frozen=references, memory=memory, in_parts=True)

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """Cross-entropy over the scores of the class centres, with the margin on the true class."""
        from trainkit.losses.margin import margin_loss, margin_ramp

        label = batch["label"]
        embedding, scores = at.forward(net, batch["image"], True, label)
        quality = embedding_quality(embedding, self.margin, networks.memory, at)
        weights = None if self._weights is None else self._weights.to(label.device)
        ramp = margin_ramp(self.margin, at.epoch)
        total, divisor = margin_loss(scores, label, self.margin, quality, ramp, weights)
        return Loss(total, divisor, {"accuracy": batch_accuracy(scores, label)})

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """Embedding of each image and its norm; with `mirror` summed over both views, with `classify` class scores."""
        if not self.classify:
            return embed_both_views(net, batch["image"]) if self.mirror else embed_view(net, batch)
        from trainkit.losses.margin import class_logits

        embedding, scores = net(batch["image"], with_scores=True)
        logits = class_logits(scores, self.margin)
        if self.mirror:
            mirrored, scores = net(batch["image"].flip(-1), with_scores=True)
            embedding, logits = embedding + mirrored, (logits + class_logits(scores, self.margin)) / 2
        return {"embedding": embedding.float(), "norm": embedding.float().norm(dim=1), "logits": logits}

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of `predict`."""
        return ("embedding", "norm", "logits") if self.classify else ("embedding", "norm")

    def baselines(self, split: Split, train: Split | None) -> list[Baseline]:
        """For classes the majority class and 1-NN, otherwise raw pixels as an embedding."""
        if isinstance(split.protocol, Classes):
            return baselines.of_classes(split, train)
        return [pixels_baseline(self.mirror)]


def pixels_baseline(mirror: bool) -> Baseline:
    """Compare images by their pixels; with `mirror` by both views, as a network is evaluated."""
    from trainkit.models.face_backbones import Pixels

    def predict(batch: Batch) -> Rows:
        image = batch["image"]
        return embed_both_views(Pixels(), image) if mirror else embed_view(Pixels(), {"image": image})

    return Baseline("pixels", lambda _: predict)


def embed_both_views(net: nn.Module, image: Tensor) -> Rows:
    """Embeddings of images and of their mirror images: their sum, and the mean of their norms."""
    # One forward of twice the size: half as many launches, and one batch shape for the compiler.
    # Not chunk(2), which ONNX supports only for a fixed batch size.
    plain, mirrored = net(torch.cat([image, image.flip(-1)])).float().unflatten(0, (2, -1)).unbind()
    return {"embedding": plain + mirrored, "norm": (plain.norm(dim=1) + mirrored.norm(dim=1)) / 2}


def embed_view(net: nn.Module, batch: Batch) -> Rows:
    """Embeddings of images and their norms."""
    embedding = net(batch["image"]).float()
    return {"embedding": embedding, "norm": embedding.norm(dim=1)}


def batch_accuracy(scores: Tensor | MarginTerms, label: Tensor) -> Tensor:
    """Share of samples whose class has the highest score."""
    from trainkit.losses.online_softmax import MarginTerms

    if isinstance(scores, MarginTerms):
        return (scores.target.detach() >= scores.nearest).float().mean()
    return (scores.detach().argmax(1) == label).float().mean()


def embedding_quality(
    embedding: Tensor, margin: MarginOrNone, statistics: nn.Module | None, at: StepContext, plus: Tensor | float = 0.0
) -> Tensor | None:
    """AdaFace's quality of each sample plus `plus`; the statistics are updated with the norms of all ranks in order."""
    if not isinstance(margin, AdaFace):
        return None
    from trainkit.losses.margin import NormStatistics

    if not isinstance(statistics, NormStatistics):
        raise TypeError(f"AdaFace needs NormStatistics, not {type(statistics).__name__}")
    norm = embedding.detach().float().norm(dim=1)
    statistics.update(at.gather(norm), margin.t_alpha)
    return statistics.quality(norm, margin.h, plus)

"""Embeddings by a margin softmax: the face teacher, and the student that learns without one.

ArcFace (Deng et al., CVPR 2019, arXiv 1801.07698), CosFace (Wang et al., CVPR 2018), AdaFace (Kim et al., CVPR 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit import metrics, models
from trainkit.losses.margin import AdaFace, AnyMargin, ArcFace, Margin, MarginHead, NormStatistics, margin_logits
from trainkit.task import At, Batch, Loss, Meta, Parts, Rows, Scores, Source, Split


@dataclass(kw_only=True)
class Embed:
    """Learn embeddings in which pictures of one class lie together, from class labels alone."""

    net: models.Net
    margin: Margin = field(default_factory=lambda: ArcFace(name="arcface", m=0.5, scale=64.0))

    def needs(self) -> dict[str, Source]:
        """Nothing."""
        return {}

    def build(self, meta: Meta, found: Mapping[str, Path], seed: int) -> Parts:
        """The network and its class centres, and raw pixels as the reference every network should beat."""
        net = WithHead(models.build(self.net, meta.shape), MarginHead(meta.classes, self.net.embedding))
        remembers = NormStatistics() if isinstance(self.margin, AdaFace) else None
        return Parts(net, frozen={"pixels": Pixels()}, remembers=remembers)

    def loss(self, net: nn.Module, parts: Parts, batch: Batch, at: At) -> Loss:
        """Cross-entropy over cosines with the trained centres, with the margin on the true class."""
        embedding, cosines = net(batch["image"], with_cosines=True)
        quality = embedding_quality(embedding, self.margin, parts.remembers, at)
        logits = margin_logits(cosines, batch["label"], self.margin, quality)
        loss = F.cross_entropy(logits, batch["label"], reduction="sum")
        return Loss(loss, len(logits), {"accuracy": hits(cosines, batch["label"])})

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """Embedding of each picture summed with that of its mirror image, and the mean norm of the two."""
        return embed_both_views(net, batch["image"])

    def score(self, rows: Rows, split: Split) -> Scores:
        """The score of the split's protocol: pairs, templates or identification."""
        return metrics.score(rows, split.protocol, split.name)


class WithHead(nn.Module):
    """A network and the centres it is trained against, in one module: one unit to wrap, compile and save."""

    def __init__(self, net: nn.Module, head: MarginHead):
        super().__init__()
        self.net, self.head = net, head

    def forward(self, image: Tensor, with_cosines: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Embeddings (B, D), and on request their cosines (B, C) with every centre."""
        embedding = self.net(image)
        return (embedding, self.head(embedding)) if with_cosines else embedding


class Pixels(nn.Module):
    """The picture itself as an embedding: the reference that a network has to beat."""

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C * H * W)."""
        return image.flatten(1)


def embed_both_views(net: nn.Module, image: Tensor) -> Rows:
    """Embeddings of pictures and of their mirror images: their sum, and the mean of their norms."""
    # One forward of twice the size: half as many launches, and one batch shape for the compiler.
    plain, mirrored = net(torch.cat([image, image.flip(-1)])).float().chunk(2)
    return {"embedding": plain + mirrored, "norm": (plain.norm(dim=1) + mirrored.norm(dim=1)) / 2}


def embedding_quality(embedding: Tensor, margin: AnyMargin, statistics: nn.Module | None, at: At) -> Tensor | None:
    """AdaFace's quality of each sample; the statistics take in the norms of all ranks in global order."""
    if not isinstance(margin, AdaFace):
        return None
    norm = embedding.detach().float().norm(dim=1)
    statistics.update(at.gather(norm), margin.t_alpha)
    return statistics.quality(norm, margin.h)


def hits(cosines: Tensor, label: Tensor) -> Tensor:
    """Share of samples whose nearest centre is that of their class."""
    return (cosines.detach().argmax(1) == label).float().mean()

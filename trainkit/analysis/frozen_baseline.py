"""Features of a network pretrained on ImageNet as a baseline for embeddings of faces, people and other classes.

What a trained embedding must beat, and what can be had without training: 19 MB of weights and a forward pass an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.autoconfig import pretrained
from trainkit.config.schema import Recipe
from trainkit.data.split import named_sets
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import Baseline, Batch, Rows, Split
from trainkit.models import timm_classifier
from trainkit.models.reid import Pixels

SIDE = 160
"""Side in pixels to which images are brought."""


class Frozen(Pixels):
    """Features of a pretrained network, compared as `Pixels` are."""

    def __init__(self, net: Any, scale: Tensor, shift: Tensor):
        super().__init__()
        self.net, self.scale, self.shift = net, scale, shift

    def forward(self, image: Tensor) -> Tensor:
        """Images (B, 3, H, W), as the recipe's data normalises them, to features (B, D)."""
        image = F.interpolate(image.float() * self.scale + self.shift, (SIDE, SIDE), mode="bilinear")
        return self.net.forward_head(self.net.forward_features(image), pre_logits=True)

    def encode(self, images: Mapping[str, Tensor], text: Tensor | None) -> Tensor:
        """Images of each modality to features of length 1, captions to zeros."""
        parts = [self(x) for x in images.values() if len(x)]
        features = F.normalize(torch.cat(parts)) if parts else torch.zeros(0, self.net.num_features)
        return features if text is None else torch.cat([features, features.new_zeros(len(text), features.shape[1])])


def of(recipe: Recipe, split: Split, others: Sequence[Baseline]) -> list[Baseline]:
    """Return the baseline if the `others` compare pixels as embeddings and the weights are on this machine."""
    task: Any = recipe.task
    if [one.name for one in others] != ["pixels"]:
        return []
    weights = pretrained.found(named_sets(recipe.data)["train"].removeprefix("derived:"))
    if weights is None or weights.file is None:
        return []
    net: Any = timm_classifier.timm_network(weights.model, (3, SIDE, SIDE), {}, 0, "log.baseline")
    timm_classifier.load(net, weights.file, 0)
    config, own = pretrained.config(weights.model), vars(recipe.data)
    mean, std, other_mean, other_std = (
        torch.tensor(values or (0.5, 0.5, 0.5), dtype=torch.float32).view(3, 1, 1)
        for values in (own.get("mean"), own.get("std"), config.mean, config.std)
    )
    frozen = Frozen(net, std / other_std, (mean - other_mean) / other_std).eval()

    def predict(batch: Batch) -> Rows:
        if isinstance(split.protocol, Search):
            return task.predict(frozen, batch)
        embedding = frozen(batch["image"])
        return {"embedding": embedding, "norm": embedding.norm(dim=1)}

    return [Baseline(f"frozen {weights.model}", lambda _: predict)]

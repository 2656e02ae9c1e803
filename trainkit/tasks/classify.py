"""Image classification with networks of timm: label smoothing, mixup, cutmix, fine-tuning, linear probes.

ConvNeXt (Liu et al., CVPR 2022, arXiv 2201.03545); mixup (Zhang et al., ICLR 2018, arXiv 1710.09412); cutmix (Yun et
al., ICCV 2019, arXiv 1905.04899); label smoothing (Szegedy et al., CVPR 2016, arXiv 1512.00567).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from trainkit.config.ranges import Fraction, FractionAboveZero, FractionBelowOne, Positive
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Classes, Retrieval
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
from trainkit.metrics import baselines
from trainkit.models.network_specs import Network
from trainkit.tasks.protocol_scores import ScoredByProtocol
from trainkit.tensors import F, torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(kw_only=True)
class Mix:
    """Mix the images and labels of a micro-batch in pairs, with timm's implementation."""

    mixup: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Parameter of the beta distribution of mixup's mixing ratio (Zhang et al., ICLR 2018). 0: no mixup."""
    cutmix: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Parameter of the beta distribution of the area of cutmix's rectangle (Yun et al., ICCV 2019). 0: no cutmix."""
    prob: FractionAboveZero = 1.0
    """Probability that a batch is mixed."""
    switch: Fraction = 0.5
    """Probability of cutmix where mixup and cutmix are both on."""
    mode: Literal["batch", "pair", "elem"] = "batch"
    """Unit that gets its own mixing ratio: a batch, a pair of images, or an image (elem)."""

    def __post_init__(self) -> None:
        if not (self.mixup or self.cutmix):
            raise ValueError("mixup and cutmix are both 0; set one above 0, or leave `mix` out")
        for name in ("mixup", "cutmix"):
            if 0 < getattr(self, name) < 1e-3:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0, or 0.001 or more")


@dataclass(kw_only=True)
class Classify(ScoredByProtocol):
    """Image classification: train a network of timm on class labels."""

    net: Network
    """The network, its initial weights, and which parameters are trained."""
    smoothing: FractionBelowOne = 0.0
    """Label smoothing: share of the target that is spread evenly over all classes (Szegedy et al., CVPR 2016)."""
    mix: Mix | None = None
    """Mixup and cutmix. None: images are not mixed."""
    class_weights: dict[str, Positive] = field(default_factory=dict)
    """Weight of a class in the loss, by class name. Classes that are not named have weight 1."""

    @property
    def fits(self) -> str:
        """`probe` if training starts from a linear probe."""
        return "probe" if self.net.probe else ""

    def fit(self, net: nn.Module, rows: Rows, train: Split) -> dict[str, np.ndarray]:
        """Fit the last layer to the features of the training set."""
        from trainkit.models import linear_probe

        if not isinstance(train.protocol, Classes):
            raise TypeError(f"{train.name} has no labels")
        return linear_probe.fit(net, rows["embedding"].numpy(), np.asarray(train.protocol.label))

    def begin_training(self, net: nn.Module) -> None:
        """Soften the probe if the layers below are trained: what fits the training set gives them no gradient."""
        from trainkit.models import linear_probe

        if self.net.probe and self.net.tune == "all":
            linear_probe.soften(net)

    def required_weights(self) -> dict[str, Source]:
        """Initial weights, if the recipe names any."""
        word = self.net.weights
        if word is None:
            return {}
        return {"net": Source(weights=f"timm:{self.net.model}" if word == "pretrained" else word)}

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """The classifier."""
        from trainkit.models import timm_classifier

        self._weights = class_weights(self.class_weights, meta.class_names)
        self._mix = self._mixer(meta.classes)
        model, notes = timm_classifier.build(self.net, meta.shape, meta.classes, found)
        return Networks(model, notes=tuple(notes))

    def _mixer(self, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        if self.mix is None:
            return None
        from timm.data.mixup import Mixup

        return Mixup(
            mixup_alpha=self.mix.mixup,
            cutmix_alpha=self.mix.cutmix,
            prob=self.mix.prob,
            switch_prob=self.mix.switch,
            mode=self.mix.mode,
            label_smoothing=self.smoothing,
            num_classes=classes,
        )

    def check_micro_batch(self, samples: int) -> None:
        """Refuse an odd number of images if they are mixed."""
        if self.mix is not None and samples % 2:
            raise UserError(
                "task.mix",
                f"micro-batches of {samples} images",
                "an even number, because images are mixed in pairs",
                "change train.batch_size, train.micro_batch or the number of processes",
            )

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """Cross-entropy with smoothed and possibly mixed labels."""
        label = batch["label"]
        if self._mix is None:
            logits = net(batch["image"])
            logs = {"accuracy": (logits.detach().argmax(1) == label).float().mean()}
            return cross_entropy(logits, label, self._weights, self.smoothing, logs)
        image, target = self._mixed(batch["image"], label)
        return cross_entropy(net(image), target, self._weights, 0.0, {})  # `Mixup` has smoothed them

    def _mixed(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        if self._mix is None:
            raise ValueError("nothing is mixed")
        self.check_micro_batch(len(image))
        # timm draws from numpy's global generator; seed it from torch's, whose state depends on step and rank.
        np.random.seed(int(torch.randint(2**32, ())))
        return self._mix(image.clone(), label)

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """Class scores, and the input of the last layer as embedding."""
        logits, embedding = net(batch["image"], with_embedding=True)
        return {"logits": logits, "embedding": embedding.flatten(1)}

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of `predict`."""
        return ("logits", "embedding")

    def baselines(self, split: Split, train: Split | None) -> list[Baseline]:
        """Majority class and 1-NN; for retrieval, raw pixels as an embedding."""
        if isinstance(split.protocol, Retrieval):
            return [Baseline("pixels", lambda _: lambda batch: {"embedding": batch["image"].flatten(1)})]
        return baselines.of_classes(split, train)


def cross_entropy(
    logits: Tensor, target: Tensor, weights: Tensor | None, smoothing: float, logs: dict[str, Tensor]
) -> Loss:
    """Return torch's cross-entropy of labels (B,) or of probabilities (B, C), as a sum and the divisor of its mean.

    Torch divides by the sum of the labels' weights, which smoothing does not change; of probabilities by their number.
    """
    if weights is not None:
        weights = weights.to(logits.device)
    total = F.cross_entropy(logits.float(), target, weights, reduction="sum", label_smoothing=smoothing)
    if weights is None or target.is_floating_point():
        return Loss(total, len(logits), logs)
    return Loss(total, weights[target].sum(), logs)
